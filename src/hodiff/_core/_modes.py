"""What a thread is set to for the while of a block: grad mode, autocast, modes that see each operation.

PyTorch's own contexts are written in Python, where an interrupt (Ctrl-C) may come between a change and the note of how
it was before, or at the beginning of `__exit__`: grad mode then stays off for good. Those here note first what undoes a
step (see `_switches`), and end in C where they can: no interrupt comes between its steps. tests/meta lets nobody else
use PyTorch's.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from hodiff._core._compiled_callers import uncompiled
from hodiff._core._switches import InTime, Scope, Undo

M = TypeVar("M", bound=TorchFunctionMode | TorchDispatchMode)
Context = AbstractContextManager[Any]
_torch: Any = torch._C
_Inference: Any = _torch._InferenceMode
"""A guard: from when it is made until it goes, or `__exit__` in C: it puts back inference mode and grad mode."""


def recording() -> Context:
    """The state in which operations are recorded, whatever the caller's modes are. It begins when this is called."""
    return _Inference(False)


def record(undo: Undo) -> None:
    """The same, until it is undone."""
    guards: list[Any] = []

    def leave() -> None:
        for guard in guards:
            guard.__exit__(None, None, None)

    undo += [InTime(leave)]
    guards.append(_Inference(False))


def grad_mode(on: bool) -> Context:
    """Whether operations are recorded, under the caller's inference mode. It begins when this is called."""
    if torch.compiler.is_compiling():
        return torch.set_grad_enabled(on)
    forward, threads = _torch._is_fwd_grad_enabled(), _torch._is_multithreading_enabled()
    guard = _Inference(torch.is_inference_mode_enabled())
    try:
        _torch._set_grad_enabled(on)
        _torch._set_fwd_grad_enabled(forward)
        _torch._set_multithreading_enabled(threads)
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
        # Not by PyTorch's count of nested ones: were one lost, its copies of parameters would never be renewed.
        before = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        undo += [InTime(_set_autocast, *before), *([torch.clear_autocast_cache] if enabled else [])]
        _set_autocast(*to)

    return Scope(enter)


def _set_autocast(device: str, dtype: torch.dtype, enabled: bool) -> None:
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, enabled)


def on(mode: M) -> Scope[M]:
    """A mode of our own that sees each operation: it is on the stack within the block, and gone after it."""
    if isinstance(mode, TorchDispatchMode):
        return Scope(partial(_push_operations, mode))
    return Scope(partial(_push_calls, mode))


def _push_calls(mode: M, undo: Undo) -> M:
    undo += [partial(take_off, mode)]
    mode.__enter__()
    return mode


class _Absent(threading.local):
    modes: tuple[weakref.ref[Any], ...] = ()


absent = _Absent()
"""Modes that were not there as they ended: PyTorch's `_pop_mode_temporarily`, interrupted, puts one back later."""


def take_off(mode: Any) -> None:
    """Take a mode off the stack of those that see calls, wherever on it; the next call looks for one not there."""
    depth = _torch._len_torch_function_stack()
    at = next((at for at in range(depth) if _torch._get_function_stack_at(at) is mode), depth)
    if at == depth:
        absent.modes += (weakref.ref(mode),)
    found = [_torch._pop_torch_function_stack() for _ in range(at, depth)]
    for other in found[-2::-1]:
        _torch._push_on_torch_function_stack(other)


def _push_operations(mode: M, undo: Undo) -> M:
    depth, module = _torch._len_torch_dispatch_stack(), _python_dispatch.__dict__
    flags = {name: value for name, value in module.items() if name.startswith("_is_in_")}  # kept in Python, and in C

    def leave() -> None:
        while _torch._len_torch_dispatch_stack() > depth:
            _torch._pop_torch_dispatch_stack(None)
        module.update(flags)
        for name, told in _TOLD.items():
            told(flags[name])

    undo += [leave]
    mode.__enter__()
    return mode


def take_off_absent() -> None:
    """What was absent when it ended, and is there now, goes."""
    for late in absent.modes:
        mode = late()
        if mode is not None:
            take_off(mode)
    absent.modes = ()


_TOLD = {
    f"_is_in_any_mode_{name}": vars(_python_dispatch)[f"set_is_in_mode_{name}"]
    for name in ("without_ignore_compile_internals",)
    if f"set_is_in_mode_{name}" in vars(_python_dispatch)
}


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose handler the tracer (Dynamo) leaves alone, by a mark on its code.

    The base class puts `torch.compiler.disable` around it, which imports Dynamo when a mode sees its first operation:
    two seconds, for whoever compiles nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        uncompiled(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tracing() -> bool:
    """Whether PyTorch follows what runs, with stand-ins for values: Dynamo, `torch.export`, `make_fx`."""
    mode = _python_dispatch._get_current_dispatch_mode()
    return (mode is not None and mode.is_infra_mode()) or torch.compiler.is_compiling()
