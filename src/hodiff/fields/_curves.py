"""A function along straight lines to second order: by jets, all lines at once, or by double backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _checks, _reverse
from hodiff._core._graph import Graph
from hodiff.fields._directions import Directions
from hodiff.fields._expand import Call, components, push, released
from hodiff.jets import _push
from hodiff.jets._series import full


class Curves(NamedTuple):
    """Along each direction: the value, first derivatives `(R, *out)` and second ones `(groups, *out)`."""

    value: Any
    first: Any
    second: Any


def by_jets(call: Call, directions: Directions, drift: Any = None, *, limit: float | None = None) -> Curves:
    """One expansion in all directions; with `drift` b, second ones gain b·∇f."""
    vectors, weights, groups = directions
    rows = vectors.shape[0]
    seeds = [vectors] if drift is None else [vectors, (drift * 0.5).unsqueeze(0)]
    series, _ = push(call, seeds, 2, groups=groups, weights=weights, limit=limit)
    return Curves(series[0], _push.entry(series, 1, rows), _push.entry(series, 2, groups) * 2)


def by_reverse(call: Call, directions: Directions, drift: Any) -> Curves:
    """Double backward: one pass for each component of f, then one for each direction."""
    vectors, weights, groups = directions
    with call.evaluation(passes=2) as ev:
        output = _checks.check_output(ev.outputs)
        _push.check_batch(output, call.batch)
        columns = components(output, call)
        found = [_component(ev, column, call, vectors, drift, more=column is not columns[-1]) for column in columns]
        stacked = [torch.stack(parts, -1) for parts in zip(*found, strict=True)]
        first, second, along = (part.reshape(len(part), *output.shape) for part in stacked)
        value = ev.value()
    if weights is not None:
        second = second * weights.reshape(-1, *[1] * output.ndim)
    if groups != second.shape[0]:
        second = second.reshape(groups, len(second) // groups, *output.shape).sum(1)
    return Curves(*released(ev, [value, first, second if drift is None else second + along]))


def _component(
    ev: Graph, column: Tensor, call: Call, vectors: Tensor, drift: Any, *, more: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (gradient,) = _reverse.pull(ev, [column], [torch.ones_like(column)], differentiated=True)
    dims = tuple(range(call.batch_ndim, gradient.ndim))
    inner = lambda a, b: (a * b).sum(dims) if dims else a * b  # noqa: E731
    firsts, seconds = [], []
    for index, vector in enumerate(vectors):
        vector = full(vector.unsqueeze(0), gradient.shape)[0]
        (product,) = _reverse.pull(ev, [gradient], [vector], more=more or index < len(vectors) - 1)
        firsts.append(inner(vector, gradient))
        seconds.append(inner(vector, product))
    along = inner(gradient, drift) if drift is not None else torch.zeros_like(firsts[0])
    return torch.stack(firsts), torch.stack(seconds), along.unsqueeze(0)
