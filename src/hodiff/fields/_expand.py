"""One expansion to second order, by jets or by nested reverse mode; the choice between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff import _checks, _nodes, _reverse, _safety
from hodiff._evaluate import Evaluation, detached
from hodiff.errors import HodiffWarning, InputError
from hodiff.fields._directions import Directions
from hodiff.jets import _jet, _push
from hodiff.jets._jet import MixesSamples, NoRule
from hodiff.jets._series import full

METHODS = ("auto", "jets", "reverse")


@dataclass(frozen=True)
class Call:
    """What every field operator passes on: the function, its point, and how to evaluate."""

    name: str
    f: Any
    x: Any
    batch_ndim: int = 1
    create_graph: bool | None = None
    method: str = "auto"
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None

    def checked(self) -> Call:
        """Itself, with its arguments checked."""
        if self.x is _checks.MISSING:
            raise InputError(f"x: missing. hodiff evaluates at a point: hodiff.{self.name}(f, x).")
        if not _jet.is_jet(self.x):
            _checks.check_real_tensor(self.x, "x")
        _checks.check_batch([self.x], ["x"], self.batch_ndim)
        _checks.check_arguments(self.args, self.kwargs)
        if self.method not in METHODS:
            raise InputError(f'method: got {self.method!r}, expected "auto", "jets" or "reverse".')
        if isinstance(self.f, Tensor) and self.method == "jets":
            raise InputError('method: "jets" needs the function, and f is a tensor already computed.')
        if not callable(self.f) and not isinstance(self.f, Tensor):
            raise InputError(
                f"f: is a {type(self.f).__name__}; expected a function of x, or a tensor computed from it."
            )
        return self

    @property
    def record(self) -> bool:
        """Whether the result is to be differentiable: a field is a loss."""
        return _safety.loss_recorded(self.create_graph)

    def grad_mode(self) -> Any:
        """The context of everything that the result is computed with, also under the caller's `no_grad`."""
        return torch.set_grad_enabled(self.record)

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch."""
        return tuple(self.x.shape[: self.batch_ndim])

    @property
    def event(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[self.batch_ndim :])

    def finish(self, result: Any) -> Any:
        """A result as the caller gets it."""
        return result if self.record else detached(result)


def choose(call: Call, jets: Callable[[], Any], reverse: Callable[[], Any], *, prefer: str = "jets") -> Any:
    """The result of one of two routes: as `method` says, else as measured; as a whole, never a mixture."""
    if isinstance(call.f, Tensor) or call.method == "reverse" or (call.method == "auto" and prefer == "reverse"):
        return call.finish(reverse())
    try:
        return call.finish(jets())
    except MixesSamples:
        raise
    except NoRule as error:
        if call.method == "jets" or _jet.is_jet(call.x) or torch.compiler.is_compiling():
            raise
        warnings.warn(
            f"{call.name}: Taylor mode has no rule for {error.operation}{': ' + error.why if error.why else ''}. "
            f"Nested reverse mode is used for the whole call: the same result, slower. Choose it by "
            f'method="reverse".',
            HodiffWarning,
            stacklevel=_checks.outside(),
        )
        return call.finish(reverse())


class Curves(NamedTuple):
    """Along each direction: the value, first derivatives `(R, *out)` and second ones `(groups, *out)`."""

    value: Any
    first: Any
    second: Any


def second_order(call: Call, directions: Directions, drift: Any = None, *, prefer: str = "jets") -> Curves:
    """The function and its derivatives along straight lines; with `drift` b, second ones gain b·∇f."""
    return choose(
        call, lambda: _by_jets(call, directions, drift), lambda: _by_reverse(call, directions, drift), prefer=prefer
    )


def push(call: Call, seeds: Sequence[Any], order: int, **options: Any) -> tuple[Any, Any]:
    """The output's series, and its expansion."""
    record = call.record
    output, expansion = _push.push(
        call.f, [call.x], [seeds], order, record=record, args=call.args, kwargs=call.kwargs, **options
    )
    series = _push.coefficients(output, expansion, call.batch)
    return series, expansion


def _by_jets(call: Call, directions: Directions, drift: Any) -> Curves:
    vectors, weights, groups = directions
    rows = vectors.shape[0]
    seeds = [vectors] if drift is None else [vectors, (drift * 0.5).unsqueeze(0)]
    series, _ = push(call, seeds, 2, groups=groups, weights=weights)
    return Curves(series[0], _push.entry(series, 1, rows), _push.entry(series, 2, groups) * 2)


def _by_reverse(call: Call, directions: Directions, drift: Any) -> Curves:
    """Double backward: one pass for each component of f, then one for each direction."""
    vectors, weights, groups = directions
    with Evaluation(
        call.f,
        call.x,
        passes=2,
        batch_ndim=call.batch_ndim,
        create_graph=call.record,
        args=call.args,
        kwargs=call.kwargs,
    ) as ev:
        output = _checks.check_output(ev.outputs)
        _push.check_batch(output, call.batch)
        columns = output.reshape(*call.batch, -1).unbind(-1)
        found = [_component(ev, column, call, vectors, drift, last=column is columns[-1]) for column in columns]
        first, second, along = (
            torch.stack([part[i] for part in found], -1).reshape(-1, *output.shape) for i in range(3)
        )
        value = ev.value()
    if weights is not None:
        second = second * weights.reshape(-1, *[1] * output.ndim)
    if groups != second.shape[0]:
        second = second.reshape(groups, -1, *output.shape).sum(1)
    return Curves(*released(ev, [value, first, second if drift is None else second + along]))


def released(ev: Evaluation, results: list[Tensor]) -> list[Tensor]:
    """Results without their graph, where it leads to nothing but the leaf that hodiff made."""
    ours = {id(leaf) for leaf in ev.leaves} if ev.owned else set()
    return results if _nodes.survey(results).leaf_ids() - ours else [result.detach() for result in results]


def _component(
    ev: Evaluation, column: Tensor, call: Call, vectors: Tensor, drift: Any, *, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (gradient,) = _reverse.pull(ev, [column], [torch.ones_like(column)], last=False)
    dims = tuple(range(call.batch_ndim, gradient.ndim))
    inner = lambda a, b: (a * b).sum(dims) if dims else a * b  # noqa: E731
    firsts, seconds = [], []
    for index, vector in enumerate(vectors):
        vector = full(vector.unsqueeze(0), gradient.shape)[0]
        (product,) = _reverse.pull(ev, [gradient], [vector], last=last and index == len(vectors) - 1)
        firsts.append(inner(vector, gradient))
        seconds.append(inner(vector, product))
    along = inner(gradient, drift) if drift is not None else torch.zeros_like(firsts[0])
    return torch.stack(firsts), torch.stack(seconds), along.unsqueeze(0)
