"""What was asked: a function (or its value), a point, and the options, checked and settled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _nesting
from hodiff._core._options import Allowed, allowed, is_set
from hodiff._core._where import Where, plain
from hodiff.errors import InputError


class Call(NamedTuple):
    """What one call of the library evaluates.

    Attributes:
        what: The user's function; or the tensors given in its place, already computed.
        where: The parsed point.
        owned: Whether `what` is a function, so that the graph is ours and the last pass may free it.
        create_graph: Whether the final result stays differentiable.
        order: The highest derivative that the graph will see, those of an enclosing call included.
        batch_ndim: How many leading dimensions index independent samples.
        batch: Their shape.
        args: Further positional arguments of the function.
        kwargs: Its keyword arguments.
        allow: The `@once_differentiable` Functions that are accepted.
        strict: Whether each part of the point must matter (True), some part (None), or none (False).
        has_aux: Whether the function returns something beside the loss.
        spread: Whether it receives the items of the point one by one: f(x, y).
        keep: Whether the graph stays for passes after the evaluation.
        cast: A dtype in which to evaluate instead, the modules of the point included.
    """

    what: Any
    where: Where
    owned: bool
    create_graph: bool
    order: int
    batch_ndim: int
    batch: torch.Size
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    allow: Sequence[str | type]
    strict: bool | None
    has_aux: bool
    spread: bool
    keep: bool
    cast: torch.dtype | None


_NONE = ()


def call(
    what: Any,
    where: Any,
    *,
    passes: int,
    create_graph: bool | None = None,
    args: Sequence[Any] = _NONE,
    kwargs: Mapping[str, Any] | None = None,
    allow: Allowed = (),
    strict: bool | None = None,
    batch_ndim: int = 0,
    has_aux: bool = False,
    spread: bool = False,
    keep: bool = False,
    cast: torch.dtype | None = None,
) -> Call:
    """A `Call`, from arguments as users and the functions above give them."""
    where = where if where.__class__ is Where else Where(where)
    create_graph = _nesting.recorded(create_graph)
    owned = callable(what) and not isinstance(what, Tensor)
    if args is not _NONE or kwargs is not None:
        _checks.check_arguments(args, kwargs)
        if not owned and (args or kwargs):
            raise InputError("args, kwargs: are passed to a function, but f is a tensor already computed.")
    if isinstance(what, (nn.Module, type)):
        what = _module(what)
    return Call(
        what,
        where,
        owned,
        create_graph,
        _nesting.total_order(passes, create_graph),
        batch_ndim,
        _checks.check_batch(where.tensors, where.names, batch_ndim),
        args,
        kwargs or {},
        allowed(allow),
        strict if strict is None else is_set(strict, "strict"),
        has_aux is not False and is_set(has_aux, "has_aux"),
        spread,
        keep,
        cast,
    )


def _module(what: Any) -> Any:
    """A module as it is called: behind a `torch.compile` wrapper, since compiled code has no second derivative."""
    if isinstance(what, nn.Module):
        return plain(what)
    if issubclass(what, nn.Module):
        raise InputError(f"f: is the class {what.__name__}; give an instance of it.")
    return what
