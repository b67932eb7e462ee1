"""Process-wide settings that `f` must run without, or with.

They are *counted*: the first call that needs one switches it, the last one restores it. Nested context
managers would race between threads and leave the process changed (measured: fused attention and cuDNN
off for good).

Here as everywhere in the road, what undoes a step is noted *before* the step is made, and may be run twice, or
without need: an interrupt (Ctrl-C) at any moment finds what is to be undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from hodiff._core import _claims

T = TypeVar("T")
Undo = list[Callable[[], object]]
"""What is to be undone, the last step first."""

Switch = Callable[[], tuple[Callable[[], object], Callable[[], object]]]
"""Looks at a setting, changes nothing, and gives what switches it and what restores it."""


def undo_all(undo: Undo) -> None:
    """Undo everything. What fails, or is interrupted, is run once more, and does not keep the rest from it."""
    try:
        while undo:
            undo[-1]()
            del undo[-1]
    except BaseException:
        if undo:
            again = undo.pop()
            try:
                again()
            finally:
                undo_all(undo)
        raise


class InTime(partial[Any]):
    """What undoes a change of a mode of the thread: once the contexts of the caller have ended, it would be wrong."""


_lost: list[InTime] = []  # kept, because PyTorch's guards undo what they did when they go


_entered: dict[weakref.ref[Any], None] = {}  # held here, for the collector calls no reference that it collects


def when_lost(undo: Undo, context: Any) -> None:
    """Undo it when nobody holds the context any more. Not by `__del__`: at the end of a call it loses interrupts."""
    reference = weakref.ref(context, partial(_undo_late, undo))
    undo += [partial(_entered.pop, reference, None)]
    _entered[reference] = None


def _undo_late(undo: Undo, _: object) -> None:
    """Undo what a context did that has been lost; modes are left to the contexts of the caller."""
    _lost.extend(step for step in undo if isinstance(step, InTime))
    undo[:] = [step for step in undo if not isinstance(step, InTime)]
    undo_all(undo)


class Scope(Generic[T]):
    """A context of steps that note first what undoes them: `enter` makes them, and is given where to note it.

    Where an interrupt keeps Python from ending it (between a block and `__exit__` no code of ours runs), it ends when
    nobody holds it any more.
    """

    __slots__ = ("__weakref__", "_enter", "_undo")

    def __init__(self, enter: Callable[[Undo], T]) -> None:
        self._enter, self._undo = enter, []

    def __enter__(self) -> T:
        try:
            when_lost(self._undo, self)
            return self._enter(self._undo)
        except BaseException:
            undo_all(self._undo)
            raise

    def __exit__(self, *exc: object) -> None:
        undo_all(self._undo)


class Counted:
    """A process-wide switch: on while anyone is inside, restored by the last one out.

    The module that it needs is loaded without the lock: another thread may be loading it, and that may collect what we
    have lost, which waits for the lock.
    """

    def __init__(self, switch: Switch, needs: str = "") -> None:
        self._switch, self._needs = switch, needs
        self._users: dict[object, int] = {}  # each in its thread
        self._restore: Callable[[], object] | None = None
        _claims.in_child(self._keep)

    @property
    def on(self) -> bool:
        """Whether anyone is inside."""
        return self._restore is not None

    def enter(self, undo: Undo) -> None:
        """Switch it, unless someone has; `undo` is given what leaves it."""
        user = lambda: None  # noqa: E731 - an object of its own, made without a call

        def leave() -> None:
            with _claims.lock:
                if user in self._users:
                    del self._users[user]
                if not self._users and self._restore is not None:
                    self._restore()
                    self._restore = None

        undo += [leave]
        if self._needs:
            __import__(self._needs)
        with _claims.lock:
            self._users[user] = _claims.here.thread
            if self._restore is None:
                switch, self._restore = self._switch()
                switch()

    def _keep(self, thread: int) -> None:
        """Leave it for all threads but one."""
        if self._restore is not None:
            self._users = {user: where for user, where in self._users.items() if where == thread}
            undo: Undo = []
            self.enter(undo)  # the last one out restores
            undo_all(undo)


def _plain_attention() -> tuple[Callable[[], object], Callable[[], object]]:
    """Attention by matrix products: the fused kernels have no second derivative."""
    cuda = torch.backends.cuda
    changes: list[tuple[Callable[[bool], None], bool, bool]] = []
    for enabled, enable, wanted in (
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
    ):
        before = enabled()
        if before is not wanted:
            changes += [(enable, wanted, before)]

    def switch() -> None:
        for enable, wanted, _ in changes:
            enable(wanted)

    def restore() -> None:
        for enable, _, before in changes:
            enable(before)

    return switch, restore


def _eager() -> tuple[Callable[[], object], Callable[[], object]]:
    """Compiled functions run as plain PyTorch: compiled code has no second derivative."""
    from torch._dynamo import eval_frame

    before = eval_frame._stance  # not by `set_stance` alone, which tells it once it has switched
    return lambda: torch.compiler.set_stance("force_eager"), lambda: eval_frame._set_stance(before)


def _no_cudnn() -> tuple[Callable[[], object], Callable[[], object]]:
    """Native RNN kernels: cuDNN's have no second derivative."""
    enabled = torch.backends.cudnn.enabled

    def switch() -> None:
        torch.backends.cudnn.enabled = False

    def restore() -> None:
        torch.backends.cudnn.enabled = enabled

    return switch, restore


plain_attention = Counted(_plain_attention)
eager = Counted(_eager, needs="torch._dynamo")
no_cudnn = Counted(_no_cudnn)
