"""Second-order expansions in parts, where all directions of all samples at once would take much memory.

Jets carry R first derivatives of every sample, so they take R times the memory of `f`. There are two ways
to take less.

* *Blocks of samples.* They cost nothing, for samples are independent; those that fit the processor's caches
  are quicker than the whole. But `f` is given fewer samples than the caller gave, and a function that holds
  data of its own for each sample, or draws random numbers, is another function then. So it is first
  expanded for the whole batch in one direction, and every block must agree with that; where one does not,
  or fails, the whole is done at once after all. Only where nothing is recorded: a graph would keep it all.
* *Chunks of directions.* `f` is given what it always is, and only its value is computed again for each
  chunk; these values must be the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _checks, _reverse
from hodiff._core._faults import is_fault, is_wrapped
from hodiff._core._random_state import RandomState
from hodiff.errors import GraphError
from hodiff.fields._curves import Curves, by_jets, by_reverse
from hodiff.fields._directions import Directions
from hodiff.fields._expand import FieldCall, choose, push
from hodiff.jets import _jet, _push
from hodiff.jets._series import TooWide

BLOCK_BYTES = 11 * 2**17
"""A coefficient of one block of samples, on a processor (1.4 MiB). Two are alive at a time, in its caches or near them:
smaller blocks lose time by their number of calls, larger ones by fresh memory."""

WHOLE_BYTES = 2**22
"""A coefficient of the whole batch up to which blocks are not worth the rehearsal."""

LEAST_BLOCK = 2  # samples: a single one could be broadcast against data that f holds for a whole batch
LEAST_CHUNK = 8  # directions: the value is computed again for each chunk
WORTHWHILE = 16  # directions: the rehearsal costs three vectors of R + 2


def second_order(call: FieldCall, directions: Directions, drift: Any = None, *, first: bool = False) -> Curves:
    """The function and its derivatives along straight lines; with `drift` b, second ones gain b·∇f.

    First derivatives are there where they are by-products, or wanted.
    """
    reverse = lambda: by_reverse(call, directions, drift, first=first)  # noqa: E731
    return choose(call, lambda: _by_jets(call, directions, drift), reverse)


def _by_jets(call: FieldCall, directions: Directions, drift: Any) -> Curves:
    if _hidden(call.x):
        return by_jets(call, directions, drift)
    size = _checks.check_chunk_size(call.chunk_size)
    if size is not None:
        found = _by_directions(call, directions, drift, size)
        if found is None:
            raise GraphError(
                "f gave another value when it was evaluated again (does it keep a state, or draw random numbers that "
                'are not PyTorch\'s?), so its directions cannot be expanded in chunks. Use chunk_size="auto".'
            )
        return found
    if call.record or _jet.is_jet(call.x) or len(directions.vectors) < WORTHWHILE:
        return by_jets(call, directions, drift)
    return _within_bounds(call, directions, drift)


def _hidden(x: Any) -> bool:
    """Whether values cannot be looked at: while `torch.compile` traces, and below a `vmap` around the call."""
    return torch.compiler.is_compiling() or is_wrapped(_jet.value_of(x))


def _within_bounds(call: FieldCall, directions: Directions, drift: Any) -> Curves:
    """All at once where that is small; else blocks of samples, or chunks of directions where those cannot be."""
    random = RandomState.of(call.x.device)
    divisible = call.batch_ndim > 0 and len(call.x) >= 2 * LEAST_BLOCK
    cached = divisible and call.x.device.type == "cpu"
    whole, block = (WHOLE_BYTES, BLOCK_BYTES) if cached else (_reverse.CHUNK_BYTES, _reverse.CHUNK_BYTES)
    try:
        return by_jets(call, directions, drift, limit=whole)
    except TooWide:
        random.restore()
    rehearsal = _rehearse(call, directions)
    drew = random.moved()
    random.restore()
    if divisible and not drew and rehearsal.tells():
        found = _by_samples(call, directions, drift, block, rehearsal)
        if found is not None:
            return found
        random.restore()
    if rehearsal.bytes * len(directions.vectors) > _reverse.CHUNK_BYTES:
        found = _by_directions(call, directions, drift, max(LEAST_CHUNK, _reverse.CHUNK_BYTES // rehearsal.bytes))
        if found is not None:
            return found
        random.restore()
    return by_jets(call, directions, drift)


class Rehearsal(NamedTuple):
    """What `f` does with the whole batch along one direction, against which blocks of samples are held.

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

    def agrees(self, found: list[Tensor], rows: slice) -> bool:
        """Whether orders 0, 1, ... of some samples are those of the whole batch, up to rounding."""
        pairs = zip(found, self.orders, strict=False)
        return all(_same(part, order[rows], _rounding(order)[rows]) for part, order in pairs)


def _rehearse(call: FieldCall, directions: Directions) -> Rehearsal:
    vectors = directions.vectors
    count = torch.arange(1, 1 + len(vectors), dtype=torch.float32, device=vectors.device)  # squares fit no half
    mix = torch.cos(count**2).to(vectors.dtype)
    vector = torch.tensordot(mix, vectors, 1).unsqueeze(0)
    orders, widest = _along(call, vector)
    return Rehearsal(mix, vector, orders, widest)


def _along(call: FieldCall, vector: Tensor) -> tuple[list[Tensor], int]:
    """The coefficients of f along one direction, and the bytes of the largest tensor met."""
    series, expansion = push(call, [vector], 2, limit=float("inf"))
    return [series[0], *(_push.entry(series, k, 1)[0] for k in (1, 2))], expansion.widest


def _rounding(order: Tensor) -> Tensor:
    """What blocks of another size may change, for each entry: half its digits, and some of the mean size of all."""
    size = order.abs()
    return (size + 0.1 * size.nan_to_num(0, 0, 0).mean()) * torch.finfo(order.dtype).eps ** 0.5


def _same(a: Tensor, b: Tensor, bound: Any = 0.0) -> bool:
    """Whether two tensors are equal within a bound; NaN equals itself."""
    return a.shape == b.shape and _truth(((a == b) | ((a - b).abs() <= bound) | (a.isnan() & b.isnan())).all())


def _truth(condition: Tensor) -> bool:
    """A condition; False where f brings in tensors of a `vmap` around the call, which hides the values."""
    return not is_wrapped(condition) and bool(condition)


def _by_samples(
    call: FieldCall, directions: Directions, drift: Any, limit: float, rehearsal: Rehearsal
) -> Curves | None:
    """Block after block; None where `f` takes them for something else than parts of the batch."""
    size = int(limit * len(call.x) // (len(directions.vectors) * rehearsal.bytes))
    blocks = _slices(len(call.x), size)
    mixed = lambda part: [part.value, torch.tensordot(rehearsal.mix, part.first, 1)]  # noqa: E731
    parts: list[Curves] = []
    try:
        for rows in blocks:
            block = dataclasses.replace(call, x=call.x[rows])
            vectors = _rows(directions.vectors, rows)
            part = by_jets(block, directions._replace(vectors=vectors), None if drift is None else drift[rows])
            if not parts and not rehearsal.agrees(mixed(part), rows):  # most of what fails does so at once
                return None
            parts.append(part)
        value, first, second = zip(*parts, strict=True)
        found = Curves(torch.cat(value), torch.cat(first, 1), torch.cat(second, 1))
        last = _along(block, _rows(rehearsal.vector, rows))[0]  # pyright: ignore[reportPossiblyUnboundVariable]
    except Exception as error:  # f cannot take fewer samples: with the whole batch it speaks for itself
        if not is_fault(error):
            error.add_note("hodiff: f was given a part of the batch's samples; chunk_size= keeps the batch whole.")
            raise
        return None
    return found if rehearsal.agrees(mixed(found), slice(None)) and rehearsal.agrees(last, blocks[-1]) else None


def _slices(count: int, size: int) -> list[slice]:
    """Parts of nearly equal length, of `size` at most where that leaves enough in each."""
    parts = min(-(-count // max(1, size)), count // LEAST_BLOCK)
    return [slice(count * index // parts, count * (index + 1) // parts) for index in range(parts)]


def _rows(vectors: Tensor, rows: slice) -> Tensor:
    """The directions of some samples; those that are the same for all of them stay as they are."""
    return vectors[:, rows] if vectors.shape[1] > 1 else vectors


def _by_directions(call: FieldCall, directions: Directions, drift: Any, size: int) -> Curves | None:
    """Chunk after chunk; None where `f` does not give the same value each time."""
    vectors, weights, groups = directions
    random = RandomState.of(call.x.device)
    parts: list[Curves] = []
    for start in range(0, len(vectors), size):
        chunk = slice(start, start + size)
        if parts:
            random.restore()
        part = Directions(
            vectors[chunk], None if weights is None else weights[chunk], 1 if groups == 1 else len(vectors[chunk])
        )
        found = by_jets(call, part, drift if start == 0 else None)
        if parts and not _same(*(_jet.value_of(each.value).detach() for each in (found, parts[0]))):
            return None
        parts.append(found)
    first = torch.cat([part.first for part in parts])
    seconds = [part.second for part in parts]
    return Curves(parts[0].value, first, sum(seconds[1:], seconds[0]) if groups == 1 else torch.cat(seconds))
