"""Settings of PyTorch, of the process or of a thread, that a call switches while it runs, then puts
back.

They are *counted*: the first call that needs one switches it, the last one restores it. Nested
context managers would race between threads and leave the process changed (measured: fused attention
and cuDNN off for good).

Here as everywhere in the road, what undoes a step is noted *before* the step is made, and may be
run twice, or
without need: an interrupt (Ctrl-C) at any moment finds what is to be undone.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core import _locks, _needed, _versions
from hodiff._core._versions import uncompiled
from hodiff.errors import HodiffWarning

__all__ = [
    "Counted",
    "DispatchMode",
    "InTime",
    "Offered",
    "RandomState",
    "Scope",
    "Undo",
    "assign",
    "autocast",
    "autocast_now",
    "eager",
    "grad_mode",
    "on",
    "owned",
    "record",
    "recording",
    "records",
    "take_off",
    "those_on",
    "tracing",
    "undo_all",
    "without_collections",
]

T = TypeVar("T")
Undo = list[Callable[[], object]]
"""What is to be undone, the last step first."""

Switch = Callable[[Undo], object]
"""Switches a setting; it is given where to note what restores it, before it does."""


def assign(undo: Undo, target: Any, values: dict[str, Any]) -> None:
    """Set attributes, or settings of PyTorch's."""
    before = {name: getattr(target, name) for name in values}
    undo += [partial(setattr, target, name, value) for name, value in before.items()]
    for name, value in values.items():
        setattr(target, name, value)


class _Opened(threading.local):
    """The ways to undo each open context of a thread, the innermost last."""

    def __init__(self) -> None:
        self.undos: list[Undo] = []


opened = _Opened()


ROOM = 100
"""By how many frames Python's stack may grow where a context failed to begin or to end: what undoes
it needs some.

Where a context begins and ends, not in a function of its own: at the limit that could be called,
and not set it back.
"""


def undo_all(undo: Undo, last: bool = True) -> None:
    """Undo everything.

    What fails, or is interrupted, is run once more, and does not keep the rest from it.

    Unless this is the `last` time, what finds no room on Python's stack is kept, for a time when
    there is some.
    """
    try:
        undos = opened.undos
        if undos and undos[-1] is undo:
            del undos[-1]
        elif undos:
            _forget(undos, undo)
        while undo:
            undo[-1]()
            del undo[-1]
    except BaseException as error:
        if undo and (last or not isinstance(error, RecursionError)):
            again = undo.pop()
            try:
                again()
            finally:
                undo_all(undo, last)
        raise


def undo_inner(undo: Undo) -> None:
    """Undo what contexts did that an interrupt kept open inside this one: later,
    it would put back what they found.
    """
    undos = opened.undos
    while any(each is undo for each in undos[:-1]):
        at = next(at for at, each in enumerate(undos) if each is undo)
        undo_all(undos[at + 1])  # the outer ones first: what is inside may be among their steps


def _forget(undos: list[Undo], undo: Undo) -> None:
    undos[:] = [each for each in undos if each is not undo]


class InTime(partial[Any]):
    """An undoing of a change of a mode of the thread: once the contexts of the caller have ended,
    it would be wrong.
    """


_lost: list[InTime] = []  # kept, because PyTorch's guards undo what they did when they go


def _undo_late(undos: list[Undo], undo: Undo, _: object) -> None:
    """Undo what a context did that has been lost; modes are left to the contexts of the caller."""
    _forget(undos, undo)
    _lost.extend(step for step in undo if isinstance(step, InTime))
    undo[:] = [step for step in undo if not isinstance(step, InTime)]
    undo_all(undo)


class Scope(Generic[T]):
    """A context of steps that note first what undoes them: `enter` makes them, and is given where
    to note it.

    Where an interrupt keeps Python from ending it (between a block and `__exit__` no code of ours
    runs), it ends when nobody holds it any more.
    """

    __slots__ = ("__weakref__", "_enter", "_undo")

    def __init__(self, enter: Callable[[Undo], T]) -> None:
        self._enter, self._undo = enter, []

    def __enter__(self) -> T:
        undo = self._undo
        try:
            # Undone when nobody holds it any more. Not by `__del__`: at the end of a call it loses
            # interrupts. Held there, for the collector calls no reference that it collects; as a
            # step it does nothing.
            undos = opened.undos
            undo += [weakref.ref(self, partial(_undo_late, undos, undo))]
            undos += [undo]
            return self._enter(undo)
        except BaseException:
            raised = sys.getrecursionlimit() + ROOM
            try:
                sys.setrecursionlimit(raised)
                self.close()
            finally:  # the limit may be among what was undone
                sys.setrecursionlimit(min(sys.getrecursionlimit(), raised - ROOM))
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self.close(last=False)
        except BaseException:  # an interrupt may have kept it from its beginning
            raised = sys.getrecursionlimit() + ROOM
            try:
                sys.setrecursionlimit(raised)
                self.close()
            finally:  # the limit may be among what was undone
                sys.setrecursionlimit(min(sys.getrecursionlimit(), raised - ROOM))
            raise

    def close(self, last: bool = True) -> None:
        """Undo everything, also where Ctrl-C kept the block from ending it; it may be run again."""
        undo_all(self._undo, last)


class Offered(Scope[T]):
    """A context that a user is given.

    One that was never entered says so when it goes, but not at the end of Python.
    """

    __slots__ = ("_unused",)

    def __init__(self, enter: Callable[[Undo], T], name: str) -> None:
        super().__init__(enter)
        self._unused = weakref.finalize(self, _say_unused, name)
        self._unused.atexit = False

    def __enter__(self) -> T:
        self._unused.detach()
        return super().__enter__()


def _say_unused(name: str) -> None:
    warnings.warn(
        f"{name}() alone does nothing: it is a context, which was never entered. "
        f"Write `with {name}():` around the code that it is for.",
        HodiffWarning,
        stacklevel=3,
    )


def without_collections(undo: Undo) -> None:
    """No collection meanwhile: modules make objects that stay,
    and a full one goes through all of PyTorch's.
    """
    if gc.isenabled():
        undo += [gc.enable]
        gc.disable()


def owned(what: object) -> Scope[None]:
    """A block in which something is this thread's: others that would have it wait."""
    loan = object()

    def enter(undo: Undo) -> None:
        undo += [partial(_locks.release, (what,), loan)]
        _locks.claim((what,), loan)

    return Scope(enter)


class Counted:
    """A process-wide switch: on while anyone is inside, restored by the last one out.

    The module that it needs is loaded without the lock: another thread may be loading it, and that
    may collect what we have lost, which waits for the lock.

    Attributes:
        needs: The name of that module, until it is there.
    """

    def __init__(self, switch: Switch, needs: str = "") -> None:
        self._switch, self.needs = switch, needs
        self._users: dict[object, int] = {}  # each in its thread
        self._restore: Undo = []
        _locks.in_child(self._keep)

    @property
    def on(self) -> bool:
        """Whether anyone is inside."""
        return bool(self._restore)

    def enter(self, undo: Undo) -> None:
        """Switch it, unless someone has; `undo` is given what leaves it."""
        if self.needs:
            __import__(self.needs)
            self.needs = ""
        enter((self,), undo)

    def _keep(self, thread: int) -> None:
        """Leave it for all threads but one."""
        if self._restore:
            self._users = {user: where for user, where in self._users.items() if where == thread}
            undo: Undo = []
            self.enter(undo)  # the last one out restores
            undo_all(undo)


def enter(switches: Sequence[Counted], undo: Undo) -> None:
    """Switch all of these that nobody has switched; `undo` is given what leaves them."""
    user = lambda: None  # noqa: E731 - an object of its own, made without a call
    undo += [partial(_leave, switches, user)]
    with _locks.lock:
        for switch in switches:
            switch._users[user] = _locks.here.thread
            if not switch._restore:
                switch._switch(switch._restore)


def _leave(switches: Sequence[Counted], user: object) -> None:
    with _locks.lock:
        for switch in switches:
            users, restore = switch._users, switch._restore
            if user in users:
                del users[user]
            while restore and not users:
                restore[-1]()
                del restore[-1:]  # a handler's call may have been here


stance = SimpleNamespace(ours=None, theirs=None, holders=dict[object, None]())
"""That by which nothing compiled runs; the one that stood there as it came; who has it there."""


def force_eager(holder: object) -> None:
    """Compiled functions run as plain PyTorch: compiled code has no second derivative."""
    compiler, name = sys.modules[_versions.COMPILER].__dict__, _versions.STANCE
    if stance.ours is None:
        _needed.check("torch.compile beside hodiff")
        # As by `torch.compiler.set_stance`, which takes as long as all that is switched beside it.
        stance.ours = compiler["DynamoStance"]("force_eager")
    stance.holders[holder] = None
    if compiler[name] is not stance.ours:
        stance.theirs, compiler[name] = compiler[name], stance.ours


def as_compiled(holder: object) -> None:
    """The last holder puts it back."""
    compiler, name = sys.modules[_versions.COMPILER].__dict__, _versions.STANCE
    holders = stance.holders
    last = not holders or holders == {holder: None}
    # First of all: behind the other step an interrupt would leave it for good.
    if last and stance.ours is not None and compiler[name] is stance.ours:
        compiler[name] = stance.theirs
    if holder in holders:
        del holders[holder]


def _eager(undo: Undo) -> None:
    undo += [partial(as_compiled, _eager)]
    force_eager(_eager)


def _no_cudnn(undo: Undo) -> None:
    """Native RNN kernels: cuDNN's have no second derivative."""
    undo += [partial(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)]
    torch.backends.cudnn.enabled = False


eager = Counted(_eager, needs=_versions.COMPILER)
no_cudnn = Counted(_no_cudnn)


# --- what a thread is set to for the while of a block: grad mode, autocast, modes that see each
# operation PyTorch's own contexts are written in Python, where an interrupt (Ctrl-C) may come
# between a change and the note of how it was before, or at the beginning of `__exit__`: grad mode
# then stays off for good. Those here note first what undoes a step (see `Undo`), and end in C where
# they can: no interrupt comes between its steps. tests/meta lets nobody else use PyTorch's.


Context = AbstractContextManager[Any]
M = TypeVar("M", bound=Context)


def records() -> bool:
    """Whether operations are recorded now."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def recording() -> Context:
    """The state in which operations are recorded, whatever the caller's modes are.

    It begins when this is called.
    """
    return _versions.inference(False)


def record(undo: Undo) -> None:
    """Turn recording on until it is undone."""
    guards: list[Any] = []

    def leave() -> None:
        for guard in guards:
            guard.__exit__(None, None, None)

    undo += [InTime(leave)]
    guards.append(_versions.inference(False))


def grad_mode(on: bool) -> Context:
    """Whether operations are recorded, under the caller's inference mode.

    It begins when this is called.
    """
    forward = _versions.forward_mode_on()
    guard = _versions.inference(torch.is_inference_mode_enabled())
    try:
        _versions.set_grad_enabled(on)
        _versions.set_forward_mode(forward)
    except BaseException:
        guard.__exit__(None, None, None)
        raise
    return guard


def autocast(device: str, dtype: torch.dtype | None = None, *, enabled: bool = False) -> Context:
    """Autocast as it was somewhere else; by default none."""
    if not enabled and not torch.is_autocast_enabled(device):
        return nullcontext()
    to = device, torch.get_autocast_dtype(device) if dtype is None else dtype, enabled

    def enter(undo: Undo) -> None:
        # Not by PyTorch's count of nested ones: were one lost, its copies of parameters would never
        # be renewed.
        before = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        undo += [InTime(_set_autocast, *before), *([torch.clear_autocast_cache] if enabled else [])]
        _set_autocast(*to)
        if enabled:
            torch.clear_autocast_cache()  # of what was cast before, which has a graph of its own

    return Scope(enter)


def autocast_now(device: str) -> Callable[[], Context]:
    """A function that sets autocast later as it is now."""
    dtype = torch.get_autocast_dtype(device)
    return partial(autocast, device, dtype, enabled=torch.is_autocast_enabled(device))


def _set_autocast(device: str, dtype: torch.dtype, enabled: bool) -> None:
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, enabled)


def on(mode: M) -> Scope[M]:
    """A mode of our own that sees each operation: it is on the stack within the block,
    and gone after it.
    """
    if isinstance(mode, _versions.DispatchMode):
        return Scope(partial(_push_operations, mode))
    return Scope(partial(push_calls, mode))


def push_calls(mode: M, undo: Undo) -> M:
    """Put a mode that sees calls on the stack until it is undone."""
    undo += [partial(take_off, mode)]
    mode.__enter__()
    return mode


def those_on(kind: type[M]) -> list[M]:
    """The modes of a kind that see calls at this moment."""
    return [mode for mode in _versions.modes() if isinstance(mode, kind)]


class _Absent(threading.local):
    modes: tuple[weakref.ref[Any], ...] = ()


absent = _Absent()
"""Modes that were not there as they ended: PyTorch's `_pop_mode_temporarily`, interrupted,
puts one back later.
"""


def take_off(mode: Any) -> None:
    """Take a mode off the stack of those that see calls, wherever on it;
    the next call looks for one not there.
    """
    modes = _versions.modes()
    at = next((at for at, each in enumerate(modes) if each is mode), len(modes))
    if at == len(modes):
        absent.modes += (weakref.ref(mode),)
    for other in modes[at:]:  # whatever their own classes do beside
        TorchFunctionMode.__exit__(other, None, None, None)
    for other in modes[at + 1 :]:
        TorchFunctionMode.__enter__(other)


def _flags() -> dict[str, bool]:
    """Whether a mode that sees operations is on, as PyTorch keeps it in Python: for the process,
    not for a thread.
    """
    return {
        name: value
        for name, value in _versions.flags_of_modes.items()
        if name.startswith("_is_in_")
    }


_TOLD = {
    f"_is_in_any_mode_{name}": _versions.flags_of_modes[f"set_is_in_mode_{name}"]
    for name in ("without_ignore_compile_internals",)
    if f"set_is_in_mode_{name}" in _versions.flags_of_modes
}


def _tell(flags: dict[str, bool]) -> None:
    _versions.flags_of_modes.update(flags)
    for name, told in _TOLD.items():
        told(flags[name])


def _keep_flags(undo: Undo) -> None:
    undo += [partial(_tell, _flags())]


_flagged = Counted(_keep_flags)
"""Of threads whose modes overlap the last puts back what the first found:
else nothing compiles any more.
"""


def _push_operations(mode: M, undo: Undo) -> M:
    enter((_flagged,), undo)
    depth, flags = _versions.count_below(), _flags()

    def leave() -> None:
        while _versions.count_below() > depth:
            _versions.pop_below(None)
        if depth:
            _tell(flags)

    undo += [leave]
    mode.__enter__()
    return mode


def take_off_absent() -> None:
    """Remove entries that were absent when a context ended, and are there now."""
    for late in absent.modes:
        mode = late()
        if mode is not None:
            take_off(mode)
    absent.modes = ()


class DispatchMode(_versions.DispatchMode):
    """A `TorchDispatchMode` whose handler the tracer (Dynamo) leaves alone, by a mark on its code.

    The base class puts `torch.compiler.disable` around it, which imports Dynamo when a mode sees
    its first operation: two seconds, for whoever compiles nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        handler: Any = uncompiled(cls.__torch_dispatch__)

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(self, func, types, *self._in_memory(func, args, kwargs or {}))

        cls.__torch_dispatch__ = uncompiled(dispatch)  # type: ignore[method-assign]

    def _in_memory(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Operands of which a kernel may read the memory: they hold the numbers that their memory
        does.

        PyTorch replaces zero tensors (which have no memory), conjugate and negative views before a
        handler is asked, except for some operations; and not while a handler runs, for none. A view
        of such a view, and what is written to, stay as they are.
        """
        if not any(map(_is_apart, (args, tuple(kwargs.values())))):
            # from 1 + a zero tensor
            if args and type(args[0]) in (int, float, complex) and func.is_view:
                args = (torch.as_tensor(args[0], device="cpu"), *args[1:])
            return args, kwargs
        declared = () if (schema := _versions.schema_of(func)) is None else schema.arguments
        kept = {each.name for each in declared if each.alias_info is not None}

        def read(value: Any, name: str) -> Any:
            if isinstance(value, (tuple, list)):
                return [read(each, name) for each in value]
            if not _is_apart(value) or name in kept:
                return value
            if value._is_zerotensor():
                return torch.zeros_like(value)
            with on(self):
                return value.resolve_conj().resolve_neg()

        names = [each.name for each in declared] + [""] * len(args)
        return (
            tuple(map(read, args, names)),
            {name: read(value, name) for name, value in kwargs.items()},
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _is_apart(value: Any) -> bool:
    """Whether the numbers of a tensor, or of one among several, are not those in its memory."""
    if isinstance(value, Tensor):
        return value._is_zerotensor() or value.is_conj() or value.is_neg()
    return isinstance(value, (tuple, list)) and any(map(_is_apart, value))


def tracing() -> bool:
    """Whether PyTorch follows what runs, with stand-ins for values: Dynamo, `torch.export`,
    `make_fx`.
    """
    mode = _versions.mode_below()
    return mode is not None and mode.is_infra_mode()


# --- the state of PyTorch's default generators: kept, put back, compared --------------------------


class RandomState:
    """The state now of the default generators that a function on a device may draw from.

    Attributes:
        device: Where the function runs.
        states: The CPU's, and the GPU's where the device is one.
    """

    __slots__ = ("device", "states")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: list[Tensor] = [torch.default_generator.get_state()]
        if device.type == "cuda":
            self.states += [torch.cuda.get_rng_state(device)]

    def restore(self) -> None:
        """Put this state back."""
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.cuda.set_rng_state(self.states[1], self.device)

    def replayed(self) -> Scope[None]:
        """A block that draws once more what was drawn from here on;
        what follows does not notice.
        """

        def enter(undo: Undo) -> None:
            undo += [InTime(RandomState(self.device).restore)]
            self.restore()

        return Scope(enter)

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        return not all(map(torch.equal, self.states, RandomState(self.device).states))
