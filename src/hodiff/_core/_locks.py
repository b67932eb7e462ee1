"""The state that threads share: one lock, claims to what one thread has for longer, repairs in a
forked child.

What can change belongs to one thread (`threading.local`), is changed under `lock`, for moments in
which no code of the user's runs, or is claimed: the others wait, and a circle of waiting threads
raises. All else is built before anyone else can see it, and not changed then.

A module on loan is claimed, so each evaluation has leaves of its own, and starts from the user's
buffers (the power iteration of spectral norm moves them). Claims of one thread nest: each is known
by the loan that makes it, which may release it twice, or before it is made.

What runs in a reverse pass counts as the thread's that began the pass: on a GPU the engine has
threads of its own, and their nodes may evaluate `f` once more while that one waits.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from hodiff._core import _faults, _versions
from hodiff.errors import GraphError

__all__ = ["claimed", "here", "lock", "wait_for"]

# the only one: the collector may close what was lost at any moment, so two could cross
lock = threading.RLock()
_changed = threading.Condition(lock)  # notified when a claim is released
# a module, or what else -> (owning thread, the loans that claim)
_claims: dict[Any, tuple[int, dict[Any, None]]] = {}
_waiting: dict[int, Iterable[Any]] = {}  # thread -> what it waits for


LOOK = 0.5
"""Seconds between two looks at what the thread that is waited for does."""
WAITS = ("threading", "concurrent.futures._base")
"""The modules in which a thread waits for another."""


class _Here(threading.local):
    """The identity of this thread, read without a call."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


here = _Here()

_KEY = "hodiff: the thread that waits for what runs here"
_known = partial(_versions.remembered, _KEY)


def _me() -> int:
    """This thread; in one of the engine's, the one that began the pass,
    whose PyTorch-local values it has.
    """
    try:
        return _known()
    except RuntimeError:  # nobody has asked in this thread
        _versions.remember_in_thread(_KEY, threading.get_ident())
        return _known()


INTERRUPTED = (
    "this call was made by the handler of a signal, or by a callback of the garbage collector, "
    "in the middle of a hodiff call that has the same module on loan. Let the handler set a flag, "
    "and look at it between two calls; or give it a copy of the module."
)


def claim(modules: Iterable[Any], loan: Any, first: bool = False) -> None:
    """Make `modules` this thread's, for a loan, waiting until no other has any of them.

    Where this evaluation claims them `first`, the other claims of this thread are of calls that are
    not ended: its `f` is inside of theirs, or a handler has interrupted them.
    """
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
                if first and _faults.interrupted():
                    raise GraphError(INTERRUPTED)
                first = False
                _claims[module][1][loan] = None
            else:
                _claims[module] = (me, {loan: None})


def release(modules: Iterable[Any], loan: Any) -> None:
    """Undo a loan's `claim`."""
    with lock:
        for module in modules:
            if module in _claims:
                _, loans = _claims[module]
                if loan in loans:
                    del loans[loan]
                if not loans:
                    del _claims[module]
        if _waiting:
            _changed.notify_all()


def wait_for(root: nn.Module) -> None:
    """Wait until no other thread has the module, or one below it; the lock is held,
    and keeps it so.
    """
    if not _claims:
        return
    modules = list(root.modules())
    if claimed(modules):
        _wait(modules)
        if claimed(modules) and _faults.interrupted():
            raise GraphError(INTERRUPTED)


def claimed(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules is lent to an evaluation just now, in this thread or another."""
    return not _claims.keys().isdisjoint(modules)


def _wait(modules: Iterable[Any]) -> None:
    """Wait until no other thread has any of `modules`; the lock is held.

    A circle of waiting threads raises.
    """
    me = _me()
    while _owners(modules, me):
        _waiting[me] = modules
        try:
            # on a device all passes go through one thread: the other's would wait for this one
            if me != here.thread:
                raise GraphError(
                    "a reverse pass on a device needs a module that a hodiff call in another "
                    "thread is using now (to run f, or a checkpointed block again). Use one lock "
                    "around both calls, or a copy of the module for each thread."
                )
            if _in_circle(me):
                raise GraphError(
                    "two threads use each other's modules or operators, and each waits for the "
                    "other. Give both calls the same modules (a tuple of them), or use one lock "
                    "around both."
                )
            if any(map(_ends_after_this, _owners(modules, me))):
                raise GraphError(
                    f"the thread {threading.current_thread().name!r} calls hodiff on a module that "
                    f"a call in another thread has on loan, whose f waits for this thread to end: "
                    f"neither would go on. Call hodiff in the thread that f runs in, or give this "
                    f"one a copy of the module."
                )
            _changed.wait(LOOK)
        finally:
            del _waiting[me]


def _owners(modules: Iterable[Any], me: int) -> set[int]:
    """The other threads that have any of the modules now."""
    return {_claims[module][0] for module in modules if module in _claims} - {me}


def _frames() -> dict[int, Any]:
    """The frame that each thread is in.

    No collection meanwhile: Python 3.11 may run one then, which may let another thread run; and
    where that one starts a third, all of them wait for ever (CPython's issue 106883).
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _ends_after_this(thread: int) -> bool:
    """Whether a thread stands in a `join` of this one, or waits for the `result` of what runs here.

    Only where it waits without a limit. What else it may wait for is not known.
    """
    awaited, frame = list[Any](), _frames().get(thread)
    while frame is not None and frame.f_globals.get("__name__") in WAITS:
        if frame.f_code.co_name in ("join", "result") and frame.f_locals.get("timeout") is None:
            awaited += [frame.f_locals["self"]]
        frame = frame.f_back
    ours, frame = [threading.current_thread()], sys._getframe() if awaited else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "concurrent.futures.thread":
            ours += [getattr(frame.f_locals.get("self"), "future", None)]
        frame = frame.f_back
    return any(one is each for one in awaited for each in ours)


def _in_circle(start: int) -> bool:
    """Whether a thread waits for itself.

    One that was woken, and has not run since, waits only for what is claimed.
    """
    seen, threads = {start}, [start]
    for thread in threads:
        owners = _owners(_waiting.get(thread, ()), thread)
        if start in owners:
            return True
        threads += owners - seen
        seen |= owners
    return False


# --- forks

_restored: list[Callable[[int], object]] = []


def in_child(restore: Callable[[int], object]) -> None:
    """Let `restore(thread)` undo in a forked child what other threads than this one have open."""
    _restored.append(restore)


def _forked() -> None:
    """The thread that forked is the only one left; what the others had is given back,
    where they stood.
    """
    _waiting.clear()
    try:
        for restore in _restored:
            restore(_me())
    finally:
        lock.release()


def _close_loans(me: int) -> None:
    theirs = [(thing, loans) for thing, (owner, loans) in _claims.items() if owner != me]
    for loan in {loan: None for _, loans in theirs for loan in loans}:
        if hasattr(loan, "close"):
            loan.close()
    for thing, _ in theirs:
        _claims.pop(thing, None)


in_child(_close_loans)
# the lock is held meanwhile, so that nothing under it is halfway
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=_forked)
