"""A module on loan belongs to one thread at a time: the others wait.

So each evaluation has leaves of its own, and starts from the user's buffers (the power iteration of
spectral norm moves them). Claims of one thread nest: each is known by the loan that makes it, which may release it
twice, or before it is made.

What runs in a reverse pass counts as the thread's that began the pass: on a GPU the engine has threads of its own, and
their nodes may evaluate `f` once more while that one waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hodiff.errors import GraphError

lock = threading.RLock()  # guards everything below
_changed = threading.Condition(lock)  # notified when a module is given back
_claims: dict[nn.Module, tuple[int, dict[object, None]]] = {}  # module -> (owning thread, the loans that claim it)
_waiting: dict[int, int] = {}  # thread -> the thread it waits for


_torch: Any = torch._C
_KEY = "hodiff: the thread that waits for what runs here"
_known = functools.partial(_torch._get_obj_in_tls, _KEY)  # raises a RuntimeError where nobody has asked before


def _me() -> int:
    """This thread; in one of the engine's, the one that began the pass, whose PyTorch-local values it has."""
    if not _torch._is_key_in_tls(_KEY):
        _torch._stash_obj_in_tls(_KEY, threading.get_ident())
    return _known()


def claim(modules: Iterable[nn.Module], loan: object) -> None:
    """Make `modules` this thread's, for a loan, waiting until no other has any of them."""
    with lock:
        try:
            me = _known()  # instead of asking first: this is on the way of every call
        except RuntimeError:
            me = _me()
        for module in modules:
            if module in _claims and _claims[module][0] != me:
                _wait(modules)
                break
        for module in modules:
            if module in _claims:
                _claims[module][1][loan] = None
            else:
                _claims[module] = (me, {loan: None})


def release(modules: Iterable[nn.Module], loan: object) -> None:
    """Undo a loan's `claim`."""
    with lock:
        for module in modules:
            if module in _claims:
                loans = _claims[module][1]
                if loan in loans:
                    del loans[loan]
                if not loans:
                    del _claims[module]
        if _waiting:
            _changed.notify_all()


def wait_for(root: nn.Module) -> None:
    """Wait until no other thread has the module, or one below it; the lock is held, and keeps it so."""
    if _claims:
        _wait(list(root.modules()))


def claimed(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules is lent to an evaluation just now, in this thread or another."""
    return bool(_claims) and any(module in _claims for module in modules)


def _wait(modules: Iterable[nn.Module]) -> None:
    """Wait until no other thread has any of `modules`; the lock is held. A circle of waiting threads raises."""
    me = _me()
    while True:
        owner = next((_claims[module][0] for module in modules if module in _claims and _claims[module][0] != me), None)
        if owner is None:
            return
        _waiting[me] = owner
        try:
            if _in_circle(me):
                raise GraphError(
                    "two threads differentiate in each other's modules and wait for each other. "
                    "Give both calls the same modules (a tuple of them), or use one lock around both."
                )
            _changed.wait()
        finally:
            del _waiting[me]


def _in_circle(start: int) -> bool:
    thread = _waiting.get(start)
    while thread is not None and thread != start:
        thread = _waiting.get(thread)
    return thread == start
