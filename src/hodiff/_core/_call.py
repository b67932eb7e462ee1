"""A call of a public function: what it was asked, settled once,
with the calls that it runs inside.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hodiff._core import _arguments, _settings, _versions
from hodiff._core._arguments import Allowed, allowed, is_set
from hodiff._core._where import Where
from hodiff.errors import InputError

__all__ = [
    "COMPUTED",
    "Call",
    "call",
    "carries_tangent",
    "check_samples",
    "cut",
    "in_place_of",
    "inside",
    "inside_vmap",
    "is_followed",
    "is_hidden",
    "loss_recorded",
    "outer_order",
    "recorded",
    "refuse_stand_ins",
    "refuse_tangent",
    "refuse_transforms",
    "state",
    "tag_of",
    "tangents",
]


class Call(NamedTuple):
    """The settings of one call of the library.

    Attributes:
        what: The user's function; or the tensors given in its place, already computed.
        where: The parsed point.
        builds_graph: Whether `what` is a function, so that the graph is ours and the last pass may
            free it.
        create_graph: Whether the final result stays differentiable.
        order: The highest derivative that the graph will see, those of an enclosing call included.
        batch_ndim: How many leading dimensions index independent samples.
        batch: Their shape.
        args: Further positional arguments of the function.
        kwargs: Its keyword arguments.
        allow: The Functions whose second derivatives are accepted as they are.
        strict: Whether each part of the point must matter (True), some part (None), or none
            (False).
        has_aux: Whether the function returns something beside the loss.
        unpack_point: Whether it receives the items of the point one by one: f(x, y).
        keep: Whether the graph stays for passes after the evaluation.
        cast: A dtype in which to evaluate instead, the modules of the point included.
    """

    what: Any
    where: Where
    builds_graph: bool
    create_graph: bool
    order: int
    batch_ndim: int
    batch: torch.Size
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    allow: Sequence[str | type]
    strict: bool | None
    has_aux: bool
    unpack_point: bool
    keep: bool
    cast: torch.dtype | None


_NONE, _NO_BATCH = (), torch.Size()

check_samples: Callable[[Call], object] = lambda settled: None  # noqa: E731 - until `hodiff` puts its own here
"""What warns where samples of a call are not independent."""


def call(
    what: Any,
    where: Any,
    passes: int,
    create_graph: bool | None = None,
    strict: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = _NONE,
    kwargs: Mapping[str, Any] | None = None,
    batch_ndim: int = 0,
    *,
    has_aux: bool = False,
    unpack_point: bool = False,
    keep: bool = False,
    cast: torch.dtype | None = None,
    check_independence: bool = False,
) -> Call:
    """A `Call`, from arguments as users and the functions above give them.

    With `check_independence`, once it is known that samples are independent.
    """
    where = where if where.__class__ is Where else Where(where)
    create_graph = recorded(create_graph)
    plain = type(what) is FunctionType  # as the tracer of `torch.compile` can read it
    builds_graph = plain or (callable(what) and not isinstance(what, Tensor))
    if args is not _NONE or kwargs is not None:
        _arguments.check_arguments(args, kwargs)
        if not builds_graph and (args or kwargs):
            raise InputError(
                "args, kwargs: these are passed to a function, but f is a tensor already computed."
            )
    has_aux = has_aux is not False and is_set(has_aux, "has_aux")
    if has_aux and not builds_graph:
        raise InputError(COMPUTED)
    if not plain and isinstance(what, (nn.Module, type)):
        what = _arguments.as_called(what)
    if where.layout is not None:
        what = where.layout.served(what, builds_graph, create_graph, batch_ndim)
    # past the function that the class has for it, as in each call of every function
    settled = tuple.__new__(Call, (
        what,
        where,
        builds_graph,
        create_graph,
        passes + outer_order() if create_graph else passes,
        batch_ndim,
        _NO_BATCH
        if batch_ndim.__class__ is int and batch_ndim == 0
        else _arguments.check_batch(where.tensors, where.names, batch_ndim),
        args,
        kwargs or {},
        _NONE if allow is _NONE else allowed(allow),
        strict if strict is None else is_set(strict, "strict"),
        has_aux,
        unpack_point,
        keep,
        cast,
    ))  # fmt: skip
    if check_independence is not False and is_set(check_independence, "check_independence"):
        check_samples(settled)
    return settled


COMPUTED = (
    "has_aux: this is about what a function returns, but f is a tensor already computed. Leave "
    "has_aux out, or give the function."
)


USER = "hodiff: the function of the user's in it"


def in_place_of(f: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours that is evaluated in place of the user's, from which that can be told."""
    vars(ours)[USER] = f
    return ours


# --- leaves in place of tensors -------------------------------------------------------------------

LEAF_TAG = "_leaf_of_hodiff"
"""The attribute of a leaf of ours that says whose it is."""


class LeafTag:
    """The owner of a leaf: it is met again, in the graph of a later call, where `f` kept something.

    Attributes:
        open: Whether the evaluation still runs.
        detached: Whether its results are, so that nothing but a leftover leads to its leaves.
    """

    open = True
    detached: bool


def tag_of(leaf: Tensor) -> tuple[LeafTag, int] | None:
    """The owner of a leaf, and its number there; None for a tensor of the user's."""
    return leaf.__dict__.get(LEAF_TAG)


# --- calls inside the functions of other calls: which evaluations this thread has open, and what
# follows from it


class _OpenEvaluations(threading.local):
    """The evaluations open in this thread, innermost last: proxies of `EvaluationContext`s, which
    stand on this module.

    Weak ones, so that a context whose end an interrupt prevented is closed when nobody holds it any
    more.
    """

    def __init__(self) -> None:
        self.running: list[Any] = []  # those whose f runs, differentiated or not
        self.open: list[Any] = []  # those whose f is differentiated


state = _OpenEvaluations()


def enter(context: Any, undo: list[Callable[[], object]], *, differentiated: bool) -> None:
    """Put a context on the stacks; `undo` is given what takes it off, and ends its leaves."""
    context.forward_mode = _versions.forward[_versions.LEVEL] >= 0
    running, differentiable = state.running, state.open
    if running:
        running[-1].nests = True
    proxy = weakref.proxy(context)
    undo += [partial(_leave, context.leaf_tag, proxy, running, differentiable)]
    running += [proxy]
    if differentiated:
        differentiable += [proxy]


def _leave(tag: Any, proxy: Any, *stacks: list[Any]) -> None:
    tag.open = False
    for stack in stacks:
        if stack and stack[-1] is proxy:
            del stack[-1]
        else:
            stack[:] = [other for other in stack if other is not proxy]


def inside() -> bool:
    """Whether this code runs inside the `f` of another call."""
    return bool(state.open)


def nested() -> bool:
    """Whether the evaluation at hand is itself inside the `f` of another."""
    return len(state.open) > 1


def refuse_transforms(*, batched: bool = False) -> None:
    """Raise inside a transform of `torch.func` that differentiates: a detached result would count
    as a constant.

    Args:
        batched: Whether values are looked at, so that it raises inside `vmap` as well.
    """
    stack = _versions.transforms()
    if stack and (batched or any(level.key().name in ("Grad", "Jvp") for level in stack)):
        raise InputError(INSIDE_A_TRANSFORM)


def refuse_stand_ins() -> None:
    """Raise where values that are to be looked at are not there: inside `vmap`, and in a tracer."""
    refuse_transforms(batched=True)
    if _settings.tracing():
        raise InputError(
            "hodiff looks at values here, but PyTorch traces (make_fx, torch.func.linearize, "
            "torch.export), with stand-ins for values. Call it outside of what is traced; for a "
            "derivative of a derivative, nest hodiff calls."
        )


def inside_vmap() -> bool:
    """Whether this code runs inside `torch.vmap`,
    which `torch.func.jacrev` and the like call as well.
    """
    return any(level.key().name == "Vmap" for level in _versions.transforms() or ())


INSIDE_A_TRANSFORM = (
    "hodiff was called inside a torch.func transform (vmap, grad, jvp, ...), where it cannot "
    "create leaves. For a batch, call hodiff once with batch_ndim=1; for a derivative of a "
    "derivative, nest hodiff calls."
)


def outer_order() -> int:
    """The derivatives that the innermost enclosing call takes of what is made here; one,
    where there is none.
    """
    return max(1, state.open[-1].call.order) if state.open else 1


def tangents() -> bool:
    """Whether tensors may carry tangents of PyTorch's forward mode."""
    return _versions.forward[_versions.LEVEL] >= 0


def is_followed() -> bool:
    """Whether something besides reverse mode follows what runs: forward mode, `torch.func`,
    a tracer.
    """
    return tangents() or _settings.tracing() or bool(_versions.levels_entered())


def is_hidden(value: Tensor) -> bool:
    """Whether the numbers of a tensor cannot be looked at: it is such a one, or PyTorch traces."""
    return _versions.is_wrapped(value) or _settings.tracing()


def carries_tangent(x: Any) -> bool:
    """Whether something is a tensor that carries one; what `torch.func` has wrapped counts as such,
    of any level.
    """
    if not isinstance(x, Tensor):
        return False
    return _versions.is_wrapped(x) or forward_ad.unpack_dual(x).tangent is not None


def note_forward_mode() -> None:
    """Let the innermost evaluation know that its `f` uses forward mode."""
    if state.running:
        state.running[-1].forward_mode = True


def refuse_tangent(x: Tensor, name: str = "x") -> None:
    """Raise for a point that carries a tangent of PyTorch's forward mode:
    a detached result would lose it.
    """
    if _versions.forward[_versions.LEVEL] >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        # which keep their tangents in the same place, and have an error of their own
        refuse_transforms()
        raise InputError(
            f"{name} carries a tangent of PyTorch's forward mode (forward_ad.make_dual), which a "
            f"detached result would lose. Give its primal, and take the outer derivative with "
            f"hodiff.jvp."
        )


def cut(tensor: Tensor) -> Tensor:
    """A result without its graph: as `detach`, which drops tangents of forward mode too,
    but with those.
    """
    if _versions.forward[_versions.LEVEL] < 0:
        return tensor.detach()
    tangent = forward_ad.unpack_dual(tensor).tangent
    return (
        tensor.detach()
        if tangent is None
        else forward_ad.make_dual(tensor.detach(), tangent.detach())
    )


def recorded(create_graph: bool | None) -> bool:
    """Whether a result of the calculus keeps its graph: by default,
    inside the `f` of another call.
    """
    if create_graph is None:
        return bool(state.open) and torch.is_grad_enabled()
    return (
        create_graph
        if create_graph is True or create_graph is False
        else is_set(create_graph, "create_graph")
    )


def loss_recorded(create_graph: bool | None) -> bool:
    """Whether a loss (a penalty, a field) keeps its graph: by default,
    where the caller's grad mode is on.
    """
    return torch.is_grad_enabled() if create_graph is None else is_set(create_graph, "create_graph")
