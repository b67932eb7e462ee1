"""Second-order expansions along random directions; in blocks, where all at once would take much
memory; by reverse passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _reverse
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph
from hodiff._core._records import NoNumber
from hodiff._core._settings import RandomState
from hodiff._core._vectors import Space, check_generator, draw, standard_error
from hodiff._core._versions import is_wrapped
from hodiff.errors import GraphError, InputError
from hodiff.fields import _field
from hodiff.fields._field import (
    Curves,
    Directions,
    FieldCall,
    Probes,
    by_jets,
    factors,
    holds,
    is_differentiable,
    push,
    released,
)
from hodiff.jets import _jet
from hodiff.jets._series import CoefficientTooLarge, entry


@dataclass(frozen=True, repr=False, eq=False)
class Estimate(NoNumber):
    """A randomized result.

    Attributes:
        value: The estimate, shaped like `f(x)`.
        stderr: Its standard error, with the same shape; None for a single sample.
        samples: How many random directions were used.
    """

    value: Tensor
    stderr: Tensor | None
    samples: int

    def __repr__(self) -> str:
        size = "x".join(map(str, self.value.shape)) or "one value"
        error = "" if self.stderr is None else f", ± {self.stderr.max():.3g} at most"
        return f"Estimate({size}, {self.samples} samples{error})"


def mean_over(each: Any, remaining: float, vectors: Any) -> Estimate | Tensor:
    """The mean over directions; of those that were drawn with its standard error."""
    count = each.shape[0]
    if vectors is not None:
        return each.mean(0)
    if not remaining:
        return Estimate(each.mean(0), torch.zeros_like(each[0]), count)
    error = standard_error(each)
    return Estimate(each.mean(0), None if error is None else error * remaining**0.5, count)


def sampled(
    x: Any,
    batch_ndim: int,
    weight: Any,
    samples: int | None,
    probes: str,
    vectors: Any,
    generator: torch.Generator | None,
) -> tuple[Directions, float]:
    """Random directions whose mean square is the identity (or weight);
    and the part of the variance left.
    """
    _arguments.check_option(probes, Probes, "probes")
    check_generator(generator)
    if vectors is not None and samples is not None:
        raise InputError(
            f"samples: got {samples}, but vectors= already gives the directions; "
            "give one of the two."
        )
    samples = _arguments.check_integer(1 if samples is None else samples, "samples", least=1)
    if weight is not None:
        weight = factors(weight, x, torch.Size(x.shape[batch_ndim:]).numel())
    plain = _jet.value_of(x)
    if vectors is not None:
        [drawn] = Space([plain], ["x"], None, "like x").parse(vectors, "vectors").stacked()
        drawn = drawn.clone() if drawn.is_inference() else drawn
    elif probes == "coordinates":
        return _coordinates(x, batch_ndim, weight, samples, generator)
    else:
        drawn = draw((samples, *plain.shape), plain, probes, generator)  # pyright: ignore[reportArgumentType]
    if weight is not None:
        if is_differentiable(weight) or holds((weight < 0).any()):
            raise InputError(
                "weight: random directions are scaled by its square root, so it must not be "
                'negative or require grad. Use probes="coordinates".'
            )
        drawn = drawn * weight.sqrt().reshape(x.shape[batch_ndim:])
    return Directions(drawn, None, len(drawn)), 1.0


def _coordinates(
    x: Any, batch_ndim: int, weight: Any, samples: int, generator: torch.Generator | None
) -> tuple[Directions, float]:
    """Some coordinates, drawn without replacement, the same for every sample; of millions, none
    but those is written out.
    """
    x, count = _jet.value_of(x), x.shape[batch_ndim:].numel()
    if samples > count:
        raise InputError(f"samples: got {samples}, but there are only {count} coordinates.")
    chosen = torch.randperm(
        count, generator=generator, device=generator.device if generator else None
    )[:samples].to(x.device)
    axes = x.new_zeros(samples, count).scatter_(1, chosen.unsqueeze(1), 1.0)
    return Directions(
        shaped(axes, x, batch_ndim),
        (axes.new_ones(samples) if weight is None else weight[chosen]) * count,
        samples,
    ), 1 - samples / count


def shaped(rows: Any, x: Any, batch_ndim: int) -> Any:
    """`(R, D)` as directions that are the same for every sample."""
    return rows.reshape(rows.shape[0], *[1] * batch_ndim, *x.shape[batch_ndim:])


# --- blocks of directions and samples -------------------------------------------------------------
# Jets carry R first derivatives of every sample, so they take R times the memory of `f`. There are
# two ways to take less. What fits memory that is used again is quicker than the whole, whose large
# tensors are fresh memory each. Only where nothing is recorded: a graph would keep it all.
#
# * *Chunks of directions.* `f` is given what it always is, and only its value is computed again for
# each
#   chunk; these values must be the same. Quicker, where a chunk has many.
# * *Blocks of samples.* Samples are independent. But `f` is given fewer samples than the caller
#   gave, and a function that holds data of its own for each sample, or draws random numbers, is
#   another function then. So it is first expanded for the whole batch in one direction, and every
#   block must agree with that; where one does not, or fails, the whole is done at once after all.


BLOCK_BYTES = 2**24
"""A coefficient of one block of samples, on a processor. Two are alive at a time: smaller blocks
lose time by the calls of an expansion, some 2 ms each."""

WHOLE_BYTES = 2**25
"""A coefficient of the whole batch, or of a chunk of directions, on a processor; glibc gives larger
ones as fresh memory each time, which takes 1.2 to 1.8 times as long."""

# samples: a single one could be broadcast against data that f holds for a whole batch
LEAST_BLOCK = 2
LEAST_CHUNK = 8  # directions: the value is computed again for each chunk


def in_parts(call: FieldCall, directions: Directions, drift: Any) -> Curves:
    """The function along many lines: `chunk_size` of them at a time, or what is quickest."""
    size = _arguments.check_chunk_size(call.chunk_size)
    if size is None:
        return _within_bounds(call, directions, drift)
    curves = _by_directions(call, directions, drift, size)
    if curves is None:
        raise GraphError(
            "f returned a different value when it was evaluated again (does it keep a state, "
            "or draw random numbers that are not PyTorch's?), so its directions cannot be "
            'expanded in chunks. Use chunk_size="auto".'
        )
    return curves


def _within_bounds(call: FieldCall, directions: Directions, drift: Any) -> Curves:
    """By the first way that will do, of those that take little memory; else all at once."""
    random = RandomState(call.x.device)
    for curves in _ways(call, directions, drift, random):
        if curves is not None:
            return curves
        random.restore()
    return by_jets(call, directions, drift)


def _ways(
    call: FieldCall, directions: Directions, drift: Any, random: RandomState
) -> Iterator[Curves | None]:
    """All at once where that is small; else chunks of many directions, blocks of samples,
    chunks of few. None where that does not do.
    """
    divisible = call.batch_ndim > 0 and len(call.x) >= 2 * LEAST_BLOCK
    cached = divisible and call.x.device.type == "cpu"
    whole, block = (
        (WHOLE_BYTES, BLOCK_BYTES) if cached else (_reverse.CHUNK_BYTES, _reverse.CHUNK_BYTES)
    )
    count = len(directions.vectors)
    try:
        yield by_jets(call, directions, drift, max_bytes=whole)
        return
    except CoefficientTooLarge as error:
        size = -(-count // -(-count * error.args[0] // whole))
        random.restore()
    if cached and size >= _field.WORTHWHILE:
        yield _by_directions(call, directions, drift, size, whole)
    rehearsal, drew = _rehearse(call, directions), random.moved()
    random.restore()
    # where an order has no finite number, there is nothing to compare with
    if divisible and not drew and all(_truth(each.isfinite().any()) for each in rehearsal.orders):
        yield _by_samples(call, directions, drift, block, rehearsal)
    if rehearsal.bytes * count > _reverse.CHUNK_BYTES:
        few = max(LEAST_CHUNK, _reverse.CHUNK_BYTES // rehearsal.bytes)
        yield _by_directions(call, directions, drift, few)


class Rehearsal(NamedTuple):
    """The results of `f` for the whole batch along one direction, against which blocks of samples
    are held.

    Attributes:
        mix: The share of each direction in that one.
        vector: The direction, `(1, *batch or ones, *event)`.
        orders: Value, first and second coefficient.
        bytes: Those of the largest tensor on the way.
    """

    mix: Tensor
    vector: Tensor
    orders: list[Tensor]
    bytes: int

    def agrees(self, derivatives: list[Tensor], rows: slice) -> bool:
        """Whether orders 0, 1, ... of some samples are those of the whole batch, up to rounding."""
        return all(
            _same(part, order[rows], _rounding(order)[rows])
            for part, order in zip(derivatives, self.orders, strict=False)
        )


def _rehearse(call: FieldCall, directions: Directions) -> Rehearsal:
    vectors = directions.vectors
    # Squares fit no half.
    mix = (
        torch.arange(1, 1 + len(vectors), dtype=torch.float32, device=vectors.device)
        .square()
        .cos()
        .to(vectors)
    )
    vector = torch.tensordot(mix, vectors, 1).unsqueeze(0)
    orders, widest = _series_along(call, vector)
    return Rehearsal(mix, vector, orders, widest)


def _series_along(call: FieldCall, vector: Tensor) -> tuple[list[Tensor], int]:
    """The coefficients of f along one direction, and the bytes of the largest tensor met."""
    series, expansion = push(call, [vector], 2, max_bytes=float("inf"))
    return [series[0], *(entry(series, k, 1)[0] for k in (1, 2))], expansion.widest


def _rounding(order: Tensor) -> Tensor:
    """The most that blocks of another size may change in each entry: half its digits, and some of
    the mean size of all.
    """
    size = order.abs()
    return (size + 0.1 * size.nan_to_num(0, 0, 0).mean()) * torch.finfo(order.dtype).eps ** 0.5


def _same(a: Tensor, b: Tensor, bound: Any = 0.0) -> bool:
    """Whether two tensors are equal within a bound; NaN equals itself."""
    return a.shape == b.shape and _truth(
        ((a == b) | ((a - b).abs() <= bound) | (a.isnan() & b.isnan())).all()
    )


def _truth(condition: Tensor) -> bool:
    """A condition; False where f brings in tensors of a `vmap` around the call,
    which hides the values.
    """
    return not is_wrapped(condition) and bool(condition)


def _by_samples(
    call: FieldCall, directions: Directions, drift: Any, max_bytes: float, rehearsal: Rehearsal
) -> Curves | None:
    """Block after block; None where `f` takes them for something different from
    parts of the batch.
    """
    size = int(max_bytes * len(call.x) // (len(directions.vectors) * rehearsal.bytes))
    blocks = _slices(len(call.x), size)
    mixed = lambda part: [part.value, torch.tensordot(rehearsal.mix, part.first, 1)]  # noqa: E731
    parts: list[Curves] = []
    try:
        for rows in blocks:
            block = call._replace(x=call.x[rows])
            vectors = _rows(directions.vectors, rows)
            part = by_jets(
                block, directions._replace(vectors=vectors), None if drift is None else drift[rows]
            )
            # most of what fails does so at once
            if not parts and not rehearsal.agrees(mixed(part), rows):
                return None
            parts.append(part)
        value, first, second = zip(*parts, strict=True)
        curves = Curves(torch.cat(value), torch.cat(first, 1), torch.cat(second, 1))
        last = _series_along(block, _rows(rehearsal.vector, rows))[0]  # pyright: ignore[reportPossiblyUnboundVariable]
    except Exception as error:
        # f cannot take fewer samples: with the whole batch it speaks for itself
        if not is_fault(error):
            error.add_note(
                "hodiff: f was given a part of the batch's samples; chunk_size= keeps the batch "
                "whole."
            )
            raise
        return None
    return (
        curves
        if rehearsal.agrees(mixed(curves), slice(None)) and rehearsal.agrees(last, blocks[-1])
        else None
    )


def _slices(count: int, size: int) -> list[slice]:
    """Parts of nearly equal length, of `size` at most where that leaves enough in each."""
    parts = min(-(-count // max(1, size)), count // LEAST_BLOCK)
    return [slice(count * index // parts, count * (index + 1) // parts) for index in range(parts)]


def _rows(vectors: Tensor, rows: slice) -> Tensor:
    """The directions of some samples; those that are the same for all of them stay as they are."""
    return vectors[:, rows] if vectors.shape[1] > 1 else vectors


def _by_directions(
    call: FieldCall, directions: Directions, drift: Any, size: int, max_bytes: float | None = None
) -> Curves | None:
    """Chunk after chunk; None where `f` does not give the same value each time,
    or a coefficient is too large.
    """
    vectors, weights, groups = directions
    random = RandomState(call.x.device)
    parts: list[Curves] = []
    for start in range(0, len(vectors), size):
        chunk = slice(start, start + size)
        part = Directions(
            vectors[chunk],
            None if weights is None else weights[chunk],
            1 if groups == 1 else len(vectors[chunk]),
        )
        random.restore()
        try:
            parts.append(by_jets(call, part, None if parts else drift, max_bytes=max_bytes))
        except CoefficientTooLarge:
            return None
        if not _same(*(_jet.value_of(parts[each].value).detach() for each in (-1, 0))):
            return None
    value, first, second = zip(*parts, strict=True)
    total = sum(second[1:], second[0]) if groups == 1 else torch.cat(second)
    return Curves(value[0], torch.cat(first), total)


# --- a function along straight lines to second order, by double backward --------------------------


def by_reverse(call: FieldCall, directions: Directions, drift: Any, *, first: bool) -> Curves:
    """Double backward: for each output of a sample its gradient, in one pass, then the lines in
    batches. First derivatives along them cost no pass.
    """
    vectors, weights, groups = directions
    vectors = vectors.clone() if vectors.is_inference() else vectors
    seconds: list[Tensor] = []
    firsts: list[Tensor] = []
    drifts: list[Tensor] = []
    with call.evaluation(passes=2) as graph:
        output = _arguments.check_output(graph.outputs)
        _arguments.check_rows(output, call.batch)
        chunk = _arguments.check_chunk_size(call.chunk_size)
        columns = entries(output, call.batch_ndim)
        for k, one in enumerate(columns):
            (gradient,) = _reverse.vjp(graph, [one], [torch.ones_like(one)], differentiated=True)
            more = k < len(columns) - 1
            seconds.append(_seconds(graph, gradient, vectors, chunk, more=more))
            if first:
                firsts.append(inner(gradient, vectors, call.batch_ndim))
            if drift is not None:
                drifts.append(inner(gradient, drift.unsqueeze(0), call.batch_ndim))
        shaped = lambda parts: torch.stack(parts, -1).reshape(len(parts[0]), *output.shape)  # noqa: E731
        second, value = shaped(seconds), graph.value()
        graph.warn_of_zeros([second], [vectors])
        call.note(graph)
    if weights is not None:
        second = second * weights.reshape(-1, *[1] * output.ndim)
    if groups != second.shape[0]:
        second = second.reshape(groups, len(second) // groups, *output.shape).sum(1)
    if drifts:
        second = second + shaped(drifts)[0]
    made = [value, second, shaped(firsts)] if firsts else [value, second]
    value, second, *along = released(graph, made)
    return Curves(value, along[0] if along else None, second)


def entries(output: Tensor, batch_ndim: int) -> tuple[Tensor, ...]:
    """The entries of an output for each sample, one tensor of the batch's shape for each."""
    return output.flatten(batch_ndim).unbind(-1) if output.ndim > batch_ndim else (output,)


def _seconds(
    graph: OutputGraph, gradient: Tensor, vectors: Tensor, chunk_size: int | None, *, more: bool
) -> Tensor:
    """v'∇²f v of each line and sample, from the gradients of one output."""

    def rows(start: int, stop: int) -> list[Tensor]:
        return [vectors[start:stop].expand(stop - start, *gradient.shape)]

    seconds = []
    chunks = _reverse.vjps(graph, [gradient], rows, len(vectors), chunk_size=chunk_size, more=more)
    for start, stop, (products,) in chunks:
        seconds.append(inner(products, vectors[start:stop], graph.call.batch_ndim))
        del products  # before the next chunk is made
    return torch.cat(seconds)


def inner(a: Tensor, rows: Tensor, batch_ndim: int) -> Tensor:
    """The inner products of samples with each row."""
    products = a * rows
    dims = tuple(range(1 + batch_ndim, products.ndim))
    return products.sum(dims) if dims else products
