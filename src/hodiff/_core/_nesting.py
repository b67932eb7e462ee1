"""Calls inside the functions of other calls: which evaluations this thread has open, and what follows from it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hodiff._core._options import is_set
from hodiff.errors import InputError


class _State(threading.local):
    """What this thread is evaluating, innermost last: proxies of `Lending`s, which stand on this module.

    Weak ones, so that a lending whose end an interrupt prevented is closed when nobody holds it any more.
    """

    def __init__(self) -> None:
        self.running: list[Any] = []  # those whose f runs, differentiated or not
        self.open: list[Any] = []  # those whose f is differentiated


state = _State()


def enter(lending: Any, undo: list[Callable[[], object]], *, differentiated: bool) -> None:
    """Put a lending on the stacks; `undo` is given what takes it off."""
    lending.forward_mode = forward_ad._current_level >= 0
    if state.running:
        state.running[-1].nests = True
    proxy, stacks = weakref.proxy(lending), (state.running, state.open) if differentiated else (state.running,)

    def leave() -> None:
        for stack in stacks:
            if stack and stack[-1] is proxy:
                del stack[-1]
            else:
                stack[:] = [other for other in stack if other is not proxy]

    undo += [leave]
    for stack in stacks:
        stack += [proxy]


def inside() -> bool:
    """Whether this code runs inside the `f` of another call."""
    return bool(state.open)


def nested() -> bool:
    """Whether the evaluation at hand is itself inside the `f` of another."""
    return len(state.open) > 1


def refuse_transforms(*, batched: bool = False) -> None:
    """Raise inside a transform of `torch.func` that differentiates: a detached result would count as a constant.

    Args:
        batched: Whether to raise inside `vmap` as well.
    """
    stack = torch._C._functorch.get_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    if stack and (batched or any(level.key().name in ("Grad", "Jvp") for level in stack)):
        raise InputError(INSIDE_A_TRANSFORM)


INSIDE_A_TRANSFORM = (
    "hodiff was called inside a torch.func transform (vmap, grad, jvp, ...), where it cannot make leaves. "
    "For a batch, call hodiff once with batch_ndim=1; for a derivative of a derivative, nest hodiff calls."
)


def total_order(passes: int, create_graph: bool) -> int:
    """The highest derivative that a call's graph will see, those of an enclosing call included."""
    if not create_graph:
        return passes
    return passes + outer_order()


def outer_order() -> int:
    """The derivatives that the innermost enclosing call takes of what is made here; one, where there is none."""
    return max(1, state.open[-1].call.order) if state.open else 1


def tangents() -> bool:
    """Whether tensors may carry tangents of PyTorch's forward mode."""
    return forward_ad._current_level >= 0


def carries_tangent(x: Any) -> bool:
    """Whether something is a tensor that carries one; what `torch.func` has wrapped counts as such, of any level."""
    if not isinstance(x, Tensor):
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped or forward_ad.unpack_dual(x).tangent is not None


def note_forward_mode() -> None:
    """Let the innermost evaluation know that its `f` uses forward mode."""
    if state.running:
        state.running[-1].forward_mode = True


def refuse_tangent(x: Tensor, name: str = "x") -> None:
    """Raise for a point that carries a tangent of PyTorch's forward mode: a detached result would lose it."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        refuse_transforms()  # which keep their tangents in the same place, and have an error of their own
        raise InputError(
            f"{name}: carries a tangent of PyTorch's forward mode (forward_ad.make_dual), which a detached result "
            "would lose. Give its primal, and take the outer derivative by hodiff.jvp."
        )


def recorded(create_graph: bool | None) -> bool:
    """Whether a result of the calculus keeps its graph: by default, inside the `f` of another call."""
    if create_graph is None:
        return bool(state.open) and torch.is_grad_enabled()
    return create_graph if create_graph is True or create_graph is False else is_set(create_graph, "create_graph")


def loss_recorded(create_graph: bool | None) -> bool:
    """Whether a loss (a penalty, a field) keeps its graph: by default, where the caller's grad mode is on."""
    if create_graph is True or create_graph is False:
        return create_graph
    return torch.is_grad_enabled() if create_graph is None else is_set(create_graph, "create_graph")
