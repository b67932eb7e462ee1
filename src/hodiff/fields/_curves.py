"""A function along straight lines to second order: by jets, all lines at once, or by double backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from hodiff._core import _checks
from hodiff.calculus import _along
from hodiff.fields._directions import Directions
from hodiff.fields._expand import FieldCall, push, released
from hodiff.jets import _push


class Curves(NamedTuple):
    """The value; first derivatives along each direction, `(R, *out)`, where wanted; second ones, `(groups, *out)`."""

    value: Any
    first: Any
    second: Any


def by_jets(call: FieldCall, directions: Directions, drift: Any = None, *, limit: float | None = None) -> Curves:
    """One expansion in all directions; with `drift` b, second ones gain b·∇f."""
    vectors, weights, groups = directions
    rows = vectors.shape[0]
    seeds = [vectors] if drift is None else [vectors, (drift * 0.5).unsqueeze(0)]
    series, _ = push(call, seeds, 2, groups=groups, weights=weights, limit=limit)
    return Curves(series[0], _push.entry(series, 1, rows), _push.entry(series, 2, groups) * 2)


def by_reverse(call: FieldCall, directions: Directions, drift: Any, *, first: bool = True) -> Curves:
    """Double backward: one pass for each component of f, then the directions in batches."""
    vectors, weights, groups = directions
    with call.evaluation(passes=2) as ev:
        output = _checks.check_output(ev.outputs)
        _push.check_batch(output, call.batch)
        size = _checks.check_chunk_size(call.chunk_size)
        lines = _along.by_entries(ev, output, vectors, first=first, drift=drift, chunk_size=size)
        value, second = ev.value(), lines.second
        call.note(ev)
    if weights is not None:
        second = second * weights.reshape(-1, *[1] * output.ndim)
    if groups != second.shape[0]:
        second = second.reshape(groups, len(second) // groups, *output.shape).sum(1)
    if lines.drift is not None:
        second = second + lines.drift
    value, second, *firsts = released(ev, [value, second, *([] if lines.first is None else [lines.first])])
    return Curves(value, firsts[0] if firsts else None, second)
