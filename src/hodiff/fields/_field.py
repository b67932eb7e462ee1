"""A call of a field operator: what it was given, the choice of its route, what all routes share."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor

from hodiff._core import (
    _arguments,
    _call,
    _messages,
    _nodes,
    _settings,
    _tree,
    _versions,
)
from hodiff._core._arguments import ChunkSize, check_option, is_set
from hodiff._core._call import call, cut, is_hidden
from hodiff._core._graph import OutputGraph, Watched, detached, split
from hodiff.errors import HodiffWarning, InputError
from hodiff.jets import _jet, _pushforward
from hodiff.jets._series import entry

What = Callable[..., Any] | Tensor
"""A function, or a tensor already computed."""

Method = Literal["auto", "jets", "reverse"]
"""`method=`: which route computes."""


Probes = Literal["rademacher", "gaussian", "coordinates"]
"""The law of random directions."""

# directions: a value, or the three vectors of a rehearsal, are little beside so many
WORTHWHILE = 16


class FieldOptions(TypedDict, total=False):
    """The options of every field operator.

    For overloads alone: at run time signatures are spelled out.
    """

    batch_ndim: int
    create_graph: bool | None
    method: Method
    check_independence: bool
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


class SecondOrderOptions(FieldOptions, total=False):
    """The options of field operators of second order."""

    chunk_size: ChunkSize


class FieldCall(NamedTuple):
    """The call that every field operator passes on: the function, its point,
    and how to evaluate.
    """

    name: str
    f: Any
    x: Any
    batch_ndim: int = 1
    create_graph: bool | None = None
    method: str = "auto"
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    chunk_size: ChunkSize = "auto"
    check_independence: bool = False
    has_aux: bool = False
    record: bool = False

    def checked(self) -> FieldCall:
        """Itself, with its arguments checked, and its function as one of a single value; `record`
        is set.

        The result is then differentiable: a field is a loss.
        """
        if isinstance(self.x, (tuple, list, dict)):
            refuse_columns(self.x, self.name)
        _arguments.check_real_tensor(self.x, "x")
        _arguments.check_batch([self.x], ["x"], self.batch_ndim)
        event = self.x.shape[self.batch_ndim :]
        if not event.numel():
            raise InputError(
                f"x: points of shape {tuple(event)} have no coordinates to differentiate by."
            )
        _arguments.check_chunk_size(self.chunk_size)
        check_option(self.method, Method, "method")
        if isinstance(self.f, Tensor) and self.method == "jets":
            raise InputError(
                'method: "jets" needs the function, but f is a tensor already computed.'
            )
        if not callable(self.f) and not isinstance(self.f, Tensor):
            raise InputError(
                f"f: got {_arguments.kind(self.f)}, expected a function of x, "
                "or a tensor computed from it."
            )
        aux = self.has_aux is not False and is_set(self.has_aux, "has_aux")
        if aux and isinstance(self.f, Tensor):
            raise InputError(_call.COMPUTED)
        # One point of D coordinates looks like D points of one: a vector field of the first mixes
        # the second.
        unclear = self.batch_ndim and not (event or _jet.is_jet(self.x) or is_hidden(self.x))
        if self.check_independence is not False or unclear:
            call(
                self.f,
                self.x,
                1,
                False,
                batch_ndim=self.batch_ndim,
                check_independence=True if unclear else self.check_independence,
                args=self.args,
                kwargs=self.kwargs,
                has_aux=self.has_aux,
            )
        f = WithExtra(self.f, self.x) if aux else self.f
        return self._replace(f=f, record=_call.loss_recorded(self.create_graph))

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch."""
        return tuple(self.x.shape[: self.batch_ndim])

    @property
    def event(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[self.batch_ndim :])

    def evaluation(self, passes: int) -> OutputGraph:
        """The evaluation of f at x, for nested reverse mode."""
        request = call(
            self.f.f if self.has_aux else self.f,
            self.x,
            passes=passes,
            batch_ndim=self.batch_ndim,
            create_graph=self.record,
            has_aux=self.has_aux,
            args=self.args,
            kwargs=self.kwargs,
        )
        graph = Watched(request, self.watched)
        graph.surrogates = True
        return graph

    def watched(self) -> Any:
        """The context of an evaluation by nested reverse mode:
        no automatic choice passes what Taylor mode refuses.
        """
        return (
            _settings.on(_jet.NoConstants()) if self.method == "auto" else contextlib.nullcontext()
        )

    def note(self, graph: OutputGraph) -> None:
        """Keep what `f` returned beside its value, of an evaluation for nested reverse mode."""
        if self.has_aux:
            self.f.extra = graph.extra()

    def with_extra(self, value: Any) -> Any:
        """A value, and beside it what `f` returned beside its own, where it did."""
        return (value, self.finish(_jet.settled(self.f.given()))) if self.has_aux else value

    def finish(self, result: Any) -> Any:
        """A result as the caller gets it."""
        if self.record:
            return _pushforward.connected(result, [self.x])
        if _jet.is_jet(self.x):
            return detached(result)
        whole = _tree.tree_map(
            lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, result
        )
        return detached(whole, {_tree.memory_of(self.x)})


def choose(
    call: FieldCall,
    jets: Callable[..., Any],
    reverse: Callable[..., Any],
    *given: Any,
    nested: bool = False,
) -> Any:
    """The result of one of two routes: as `method` says, else jets; never a mixture.

    What Taylor mode gives has the value first; but where routes are calls of others (`nested`),
    which look at theirs.
    """
    if isinstance(call.f, Tensor) or call.method == "reverse":
        return call.finish(_by_reverse(reverse, call, *given))
    try:
        result = jets(call, *given)
    except _jet.ByNoRoute:
        raise
    except _jet.NoRule as error:
        if call.method == "jets" or _jet.is_jet(call.x):
            raise
        warnings.warn(
            f"{call.name}: {error.said} Nested reverse mode is used for the whole call; the "
            f"result is the same, but slower. To silence this warning, pass "
            f'method="reverse".',
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )
        return call.finish(_by_reverse(reverse, call, *given))
    if not nested:
        made: Any = result.values() if isinstance(result, dict) else result
        met = [*map(_jet.value_of, filter(torch.is_tensor, (call.x, *made)))]
        finite = (math.isfinite(part.detach().sum()) for part in met[2:])
        # on other devices to look is to wait
        if all(part.is_cpu and not is_hidden(part) for part in met) and not all(finite):
            _warn_if_not_finite(met[2:], met[:2], ())
    return call.finish(result)


def _warn_if_not_finite(
    results: Sequence[Tensor], given: Sequence[Tensor], kinds: Iterable[type]
) -> None:
    """Say that a derivative does not exist, where all that it was computed from is finite."""
    ours, theirs = (all(bool(each.isfinite().all()) for each in t) for t in (results, given))
    if theirs and not ours:
        from hodiff._core._values import warn_of_non_finite

        warn_of_non_finite(kinds)


@_versions.uncompiled
def _by_reverse(route: Callable[..., Any], *given: Any) -> Any:
    """Nested reverse mode reads graphs, so a compiled caller leaves it alone."""
    return route(*given)


def push(call: FieldCall, seeds: Sequence[Any], order: int, **options: Any) -> tuple[Any, Any]:
    """The output's series, and its expansion."""
    output, expansion = _pushforward.push(
        call.f,
        [call.x],
        [seeds],
        order,
        record=call.record,
        args=call.args,
        kwargs=call.kwargs,
        **options,
    )
    series = _pushforward.coefficients(output, expansion, call.batch)
    if (
        order >= 2
        and any(map(_messages.BENDS.__getitem__, expansion.operations))
        and not _call.inside()
    ):
        from hodiff._core._values import warn_of_zeros

        warn_of_zeros(lambda: expansion.operations, series[2:], seeds)
    return series, expansion


def released(graph: OutputGraph, results: list[Tensor]) -> list[Tensor]:
    """Results without their graph, where it leads to nothing but the leaf that hodiff made."""
    if seen := [part for part in results if part.is_cpu and not is_hidden(part)]:
        _warn_if_not_finite(seen, [*graph.leaves, *graph.tensors()], graph.kinds)
    ours = {id(leaf) for leaf in graph.leaves} if graph.call.builds_graph else set()
    if not _nodes.survey(results).leaf_ids() - ours:
        return [cut(result) for result in results]
    _nodes.mark_results(results)  # the value is among them, which no pass of ours has marked
    return results


def refuse_columns(x: Any, name: str) -> NoReturn:
    """Raise for a container of coordinates: a field is a function of one tensor of them all."""
    raise InputError(
        f"x: got {_arguments.kind(x)}, expected one tensor that holds the coordinates as columns. "
        f"Join them: hodiff.{name}(lambda z: net(z[:, :1], z[:, 1:]), torch.cat([x, t], 1)). For "
        f"derivatives with respect to some columns alone, pass the others through args=: "
        f"hodiff.{name}(lambda x, t: net(x, t), x, args=(t,))."
    )


# --- what a field returns beside its value (`has_aux=`), whichever route evaluates it, and however
# often


class WithExtra:
    """A function that returns `(value, extra)`, as one that returns the value, and keeps the extra
    of the whole batch.

    Blocks of samples are evaluated beside the whole batch, not in its place: their extras are
    passed over.
    """

    def __init__(self, f: Any, x: Any) -> None:
        self.f = _arguments.as_called(f)
        self.extra: Any = None
        self._x, self._shape = x, tuple(x.shape)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        value, extra = split(self.f(x, *args, **kwargs))
        if tuple(x.shape) == self._shape:
            self.extra = extra
        return value

    def given(self) -> Any:
        """The extra as the caller knows its tensors: without the series of this call."""
        return _tree.tree_map(self._below, self.extra)

    def _below(self, leaf: Any) -> Any:
        own = self._x.expansion.number if _jet.is_jet(self._x) else -1
        while _jet.is_jet(leaf) and leaf.expansion.number > own:
            leaf = leaf.series[0]
        return leaf


# --- a function along straight lines to second order: by jets, all lines at once ------------------


class Directions(NamedTuple):
    """Vectors `(R, *batch or ones, *event)`, their weights (None: all one),
    and how many sums are kept apart.
    """

    vectors: Any
    weights: Any = None
    groups: int = 1


def of_laplacian(x: Any, batch_ndim: int, weight: Any = None, *, units: bool = False) -> Directions:
    """Coordinate directions, each with its factor.

    With `units` they keep their lengths, so that first coefficients are partial derivatives.
    """
    axes = _pushforward.units(x, batch_ndim)
    return (
        Directions(axes)
        if weight is None
        else diagonal(axes, factors(weight, x, len(axes)), units=units)
    )


def factors(weight: Any, x: Any, size: int) -> Tensor:
    """A factor for each coordinate."""
    _arguments.check_real_tensor(weight, "weight")
    if tuple(weight.shape) != (size,):
        raise InputError(
            f"weight has shape {tuple(weight.shape)}, expected ({size},): one factor per "
            f"coordinate. For a matrix use hodiff.second_order_operator(f, x, C)."
        )
    return like_point(weight, x, "weight")


def like_point(weight: Any, x: Any, name: str) -> Any:
    if weight.dtype != x.dtype or weight.device != x.device:
        raise InputError(
            f"{name} is {weight.dtype} on {weight.device}, but x is {x.dtype} on {x.device}; "
            f"convert it: {name}.to(x)."
        )
    return weight


def is_differentiable(weight: Any) -> bool:
    return _jet.is_jet(weight) or (weight.requires_grad and torch.is_grad_enabled())


def diagonal(axes: Tensor, weight: Any, *, units: bool) -> Directions:
    """Coordinate directions, scaled by the roots where all weights are positive constants."""
    kept = weight != 0
    if units or is_differentiable(weight) or not holds(kept.any()):
        return Directions(axes, weight)
    axes, weight = axes[kept], weight[kept]
    scaled = axes * weight.abs().sqrt().reshape(-1, *[1] * (axes.ndim - 1))
    return Directions(scaled, None if holds((weight > 0).all()) else weight.sign())


def holds(condition: Tensor) -> bool:
    """Whether it is seen to hold: where a trace runs nothing is seen."""
    return not _settings.tracing() and bool(condition)


class Curves(NamedTuple):
    """The value; first derivatives along each direction, `(R, *out)`, where wanted; second ones,
    `(groups, *out)`.
    """

    value: Any
    first: Any
    second: Any


def by_jets(
    call: FieldCall, directions: Directions, drift: Any = None, *, max_bytes: float | None = None
) -> Curves:
    """One expansion in all directions; with `drift` b, second ones gain b·∇f."""
    vectors, weights, groups = directions
    rows = vectors.shape[0]
    seeds = [vectors] if drift is None else [vectors, (drift * 0.5).unsqueeze(0)]
    series, _ = push(call, seeds, 2, groups=groups, weights=weights, max_bytes=max_bytes)
    return Curves(series[0], entry(series, 1, rows), entry(series, 2, groups) * 2)
