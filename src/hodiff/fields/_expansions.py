r"""Second-order expansions along an operator's directions, in blocks where all at once would take
much memory.

One expansion along them gives \(C : \nabla^2 f\) as twice its summed second coefficient.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _reverse, _settings
from hodiff._core._faults import is_fault
from hodiff._core._settings import RandomState
from hodiff._core._vectors import Space, check_generator, draw
from hodiff._core._versions import is_wrapped
from hodiff.calculus import _directional
from hodiff.errors import GraphError, InputError
from hodiff.fields._field import FieldCall, choose, push, released
from hodiff.jets import _jet, _pushforward
from hodiff.jets._series import CoefficientTooLarge, entry

Probes = Literal["rademacher", "gaussian", "coordinates"]


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
        else _diagonal(axes, _factors(weight, x, len(axes)), units=units)
    )


def of_matrix(x: Any, batch_ndim: int, weight: Any) -> Directions:
    """Directions of the operator with the matrix C, here `weight`."""
    axes = _pushforward.units(x, batch_ndim)
    weight = _matrix(weight, x, batch_ndim, len(axes))
    if weight.ndim == 1:
        return _diagonal(axes, weight, units=False)
    if weight.ndim == 2 and weight.shape[1] != weight.shape[0]:
        return Directions(_shaped(weight.mT, x, batch_ndim))
    if weight.ndim > 2 and weight.shape[-1] != weight.shape[-2]:
        return Directions(_per_sample(weight, x, batch_ndim))
    if _differentiable(weight):
        return _pairs(weight, x, batch_ndim)
    return _eigenvectors(weight, x, batch_ndim)


def _factors(weight: Any, x: Any, size: int) -> Tensor:
    """A factor for each coordinate."""
    if not _jet.is_jet(weight):
        _arguments.check_real_tensor(weight, "weight")
    if tuple(weight.shape) != (size,):
        raise InputError(
            f"weight has shape {tuple(weight.shape)}, expected ({size},): one factor per "
            f"coordinate. For a matrix use hodiff.second_order_operator(f, x, C)."
        )
    return _like(weight, x, "weight")


def _matrix(C: Any, x: Any, batch_ndim: int, size: int) -> Tensor:
    """The matrix of an operator, in any of its forms."""
    if not _jet.is_jet(C):
        _arguments.check_real_tensor(C, "C")
    batch, shape = tuple(x.shape[:batch_ndim]), tuple(C.shape)
    fits = (
        shape == (size,)
        or (len(shape) == 2 and shape[0] == size)
        or (
            batch_ndim > 0
            and len(shape) == batch_ndim + 2
            and shape[:batch_ndim] == batch
            and shape[-2] == size
        )
    )
    if not fits:
        raise InputError(
            f"C has shape {shape}; with {size} coordinates it must be a diagonal ({size},), a "
            f"matrix ({size}, {size}), a factor ({size}, R), or one of the last two per sample, "
            f"({', '.join(map(str, (*batch, size)))}, R)."
        )
    return _like(C, x, "C")


def _like(weight: Any, x: Any, name: str) -> Any:
    if weight.dtype != x.dtype or weight.device != x.device:
        raise InputError(
            f"{name} is {weight.dtype} on {weight.device}, but x is {x.dtype} on {x.device}; "
            f"convert it: {name}.to(x)."
        )
    return weight


def _differentiable(weight: Any) -> bool:
    return _jet.is_jet(weight) or (weight.requires_grad and torch.is_grad_enabled())


def _diagonal(axes: Tensor, weight: Any, *, units: bool) -> Directions:
    """Coordinate directions, scaled by the roots where all weights are positive constants."""
    kept = weight != 0
    if units or _differentiable(weight) or not _holds(kept.any()):
        return Directions(axes, weight)
    axes, weight = axes[kept], weight[kept]
    scaled = axes * weight.abs().sqrt().reshape(-1, *[1] * (axes.ndim - 1))
    return Directions(scaled, None if _holds((weight > 0).all()) else weight.sign())


def _holds(condition: Tensor) -> bool:
    """Whether it is seen to hold: where a trace runs nothing is seen."""
    return not _settings.tracing() and bool(condition)


def _shaped(rows: Any, x: Any, batch_ndim: int) -> Any:
    """`(R, D)` as directions that are the same for every sample."""
    return rows.reshape(rows.shape[0], *[1] * batch_ndim, *x.shape[batch_ndim:])


def _per_sample(factor: Any, x: Any, batch_ndim: int) -> Any:
    """`(*batch, D, R)` as directions."""
    return factor.movedim(-1, 0).reshape(factor.shape[-1], *x.shape)


def _eigenvectors(weight: Tensor, x: Any, batch_ndim: int) -> Directions:
    """The eigenvectors of the symmetric part, scaled by the roots of |λ|, with the signs of λ."""
    weight = weight.detach()
    # there is no eigh of halves
    wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    values, vectors = (part.to(weight.dtype) for part in torch.linalg.eigh((wide + wide.mT) / 2))
    if weight.ndim == 2:
        negligible = (
            values.abs() <= values.abs().amax() * weight.shape[0] * torch.finfo(weight.dtype).eps
        )
        if _holds((~negligible).any()):
            values, vectors = values[~negligible], vectors[:, ~negligible]
        rows = _shaped((vectors * values.abs().sqrt()).mT, x, batch_ndim)
        return Directions(rows) if _holds((values > 0).all()) else Directions(rows, values.sign())
    # Signs differ from sample to sample: one block of directions for each, empty entries being
    # zero.
    up = _per_sample(vectors * values.clamp(min=0).sqrt().unsqueeze(-2), x, batch_ndim)
    if _holds((values >= 0).all()):
        return Directions(up)
    down = _per_sample(vectors * values.clamp(max=0).neg().sqrt().unsqueeze(-2), x, batch_ndim)
    return Directions(
        torch.cat([up, down]), torch.cat([values.new_ones(len(up)), -values.new_ones(len(down))])
    )


def _pairs(weight: Any, x: Any, batch_ndim: int) -> Directions:
    r"""Directions and weights for a weight that is differentiated by: eigenvectors have no
    derivative where eigenvalues meet.

    \(C : H = \sum_{i \le j} w_{ij} \, (e_i + e_j)^\top H (e_i + e_j)\) with coefficients linear in
    C. One weight per sample becomes a pair of directions, \(w = ((1 + w)/2)^2 - ((1 - w)/2)^2\)
    times a square.
    """
    size = weight.shape[-1]
    symmetric = (weight + weight.mT) * 0.5
    axes = torch.eye(size, dtype=x.dtype, device=x.device)
    rows, columns = torch.triu_indices(size, size, 1, device=x.device)
    own = torch.diagonal(symmetric, dim1=-2, dim2=-1) * 2 - symmetric.sum(-1)
    vectors = torch.cat([axes, axes[rows] + axes[columns]])
    weights = torch.cat([own, symmetric[..., rows, columns]], -1)
    if weight.ndim == 2:
        return Directions(_shaped(vectors, x, batch_ndim), weights)
    plus, minus = (1 + weights) * 0.5, (1 - weights) * 0.5
    each = torch.cat([plus.unsqueeze(-2) * vectors.mT, minus.unsqueeze(-2) * vectors.mT], -1)
    return Directions(
        _per_sample(each, x, batch_ndim),
        axes.new_tensor([1.0, -1.0]).repeat_interleave(len(vectors)),
    )


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
        weight = _factors(weight, x, torch.Size(x.shape[batch_ndim:]).numel())
    plain = _jet.value_of(x)
    if vectors is not None:
        drawn = _given(vectors, plain)
    elif probes == "coordinates":
        return _coordinates(x, batch_ndim, weight, samples, generator)
    else:
        drawn = draw((samples, *plain.shape), plain, probes, generator)  # pyright: ignore[reportArgumentType]
    if weight is not None:
        if _differentiable(weight) or _holds((weight < 0).any()):
            raise InputError(
                "weight: random directions are scaled by its square root, so it must not be "
                'negative or require grad. Use probes="coordinates".'
            )
        drawn = drawn * weight.sqrt().reshape(x.shape[batch_ndim:])
    return Directions(drawn, None, len(drawn)), 1.0


def _given(vectors: Any, x: Tensor) -> Tensor:
    """The caller's own directions, stacked."""
    [stacked] = Space([x], ["x"], None, "like x").parse(vectors, "vectors").stacked()
    return stacked.clone() if stacked.is_inference() else stacked


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
        _shaped(axes, x, batch_ndim),
        (axes.new_ones(samples) if weight is None else weight[chosen]) * count,
        samples,
    ), 1 - samples / count


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
# directions: a value, or the three vectors of a rehearsal, are little beside so many
WORTHWHILE = 16


def second_order(
    call: FieldCall, directions: Directions, drift: Any = None, *, first: bool = False
) -> Curves:
    """The function and its derivatives along straight lines; with `drift` b, second ones gain b·∇f.

    First derivatives are there where they are by-products, or wanted.
    """
    return choose(call, _by_jets, by_reverse, directions, drift, first)


def _by_jets(call: FieldCall, directions: Directions, drift: Any, first: bool) -> Curves:
    if is_wrapped(_jet.value_of(call.x)):  # nobody can look at values
        return by_jets(call, directions, drift)
    size = _arguments.check_chunk_size(call.chunk_size)
    if size is not None:
        curves = _by_directions(call, directions, drift, size)
        if curves is None:
            raise GraphError(
                "f returned a different value when it was evaluated again (does it keep a state, "
                "or draw random numbers that are not PyTorch's?), so its directions cannot be "
                'expanded in chunks. Use chunk_size="auto".'
            )
        return curves
    if call.record or _jet.is_jet(call.x) or len(directions.vectors) < WORTHWHILE:
        return by_jets(call, directions, drift)
    return _within_bounds(call, directions, drift)


def _within_bounds(call: FieldCall, directions: Directions, drift: Any) -> Curves:
    """All at once where that is small; else chunks of many directions, blocks of samples,
    chunks of few.
    """
    random = RandomState(call.x.device)
    divisible = call.batch_ndim > 0 and len(call.x) >= 2 * LEAST_BLOCK
    cached = divisible and call.x.device.type == "cpu"
    whole, block = (
        (WHOLE_BYTES, BLOCK_BYTES) if cached else (_reverse.CHUNK_BYTES, _reverse.CHUNK_BYTES)
    )
    try:
        return by_jets(call, directions, drift, max_bytes=whole)
    except CoefficientTooLarge as error:
        parts = -(-len(directions.vectors) * error.args[0] // whole)
        random.restore()
    size = -(-len(directions.vectors) // parts)
    if cached and size >= WORTHWHILE:
        curves = _by_directions(call, directions, drift, size, whole)
        if curves is not None:
            return curves
        random.restore()
    rehearsal, drew = _rehearse(call, directions), random.moved()
    random.restore()
    if divisible and not drew and rehearsal.tells():
        curves = _by_samples(call, directions, drift, block, rehearsal)
        if curves is not None:
            return curves
        random.restore()
    if rehearsal.bytes * len(directions.vectors) > _reverse.CHUNK_BYTES:
        curves = _by_directions(
            call, directions, drift, max(LEAST_CHUNK, _reverse.CHUNK_BYTES // rehearsal.bytes)
        )
        if curves is not None:
            return curves
        random.restore()
    return by_jets(call, directions, drift)


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

    def tells(self) -> bool:
        """Whether there are numbers to compare with at every order."""
        return all(_truth(order.isfinite().any()) for order in self.orders)

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


# --- a function along straight lines to second order: by jets, all lines at once, or by double
# backward


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


def by_reverse(call: FieldCall, directions: Directions, drift: Any, first: bool) -> Curves:
    """Double backward: one pass for each component of f, then the directions in batches."""
    vectors, weights, groups = directions
    with call.evaluation(passes=2) as graph:
        output = _arguments.check_output(graph.outputs)
        _arguments.check_rows(output, call.batch)
        lines = _directional.by_entries(
            graph,
            output,
            vectors,
            first=first,
            drift=drift,
            chunk_size=_arguments.check_chunk_size(call.chunk_size),
        )
        value, second = graph.value(), lines.second
        graph.warn_of_zeros([second], [vectors])
        call.note(graph)
    if weights is not None:
        second = second * weights.reshape(-1, *[1] * output.ndim)
    if groups != second.shape[0]:
        second = second.reshape(groups, len(second) // groups, *output.shape).sum(1)
    if lines.drift is not None:
        second = second + lines.drift
    value, second, *firsts = released(
        graph, [value, second, *([] if lines.first is None else [lines.first])]
    )
    return Curves(value, firsts[0] if firsts else None, second)
