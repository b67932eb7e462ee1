"""An index set for each element of a tensor, with what movement, broadcasting, sums and scatters do to them.

Elements that have the same set share it: a `Sets` is a table of sets, and for each element the number of its row there.
So a broadcast copies no set, and an operation that couples everything makes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LIMIT = 2**28
"""The most numbers that sets may hold together, 2 GiB of them."""


class TooMany(Exception):
    """The sets hold more numbers than any matrix that is worth calling sparse."""


class Sets:
    """A set of numbers below `width` for each of some elements.

    Attributes:
        rows: For each element the row of the table that is its set; row 0 is the empty set.
        start: Where each row of the table begins in `items`, and where the last one ends.
        items: The members of all rows, one row after the other, ascending.
        width: What all members are below.
    """

    __slots__ = ("items", "rows", "start", "width")

    def __init__(self, rows: Tensor, start: Tensor, items: Tensor, width: int) -> None:
        self.rows = rows
        self.start = start
        self.items = items
        self.width = width

    @classmethod
    def empty(cls, count: int, width: int) -> Sets:
        """Empty sets."""
        return cls(_zeros(count), _zeros(2), _zeros(0), width)

    @classmethod
    def singletons(cls, first: int, count: int, width: int) -> Sets:
        """The sets {first}, {first + 1}, ..."""
        items = torch.arange(first, first + count, device="cpu")
        start = torch.cat([_zeros(1), torch.arange(count + 1, device="cpu")])
        return cls(torch.arange(1, count + 1, device="cpu"), start, items, width)

    def __len__(self) -> int:
        return len(self.rows)

    def is_empty(self) -> bool:
        """Whether every set is."""
        return not len(self.items) or not bool(self.rows.any())

    def take(self, elements: Tensor) -> Sets:
        """The sets of some elements, in that order; of element -1 the empty one."""
        rows = self.rows[elements.clamp(min=0)] if len(self) else _zeros(len(elements))
        return Sets(torch.where(elements < 0, 0, rows), self.start, self.items, self.width)

    def put(self, elements: Tensor, sets: Sets) -> Sets:
        """These, with the sets of some elements replaced."""
        whole = Sets.joined([self, sets])
        rows = whole.rows[: len(self)].clone()
        rows[elements] = whole.rows[len(self) :]
        return Sets(rows, whole.start, whole.items, self.width)._compact()

    @staticmethod
    def joined(parts: Sequence[Sets]) -> Sets:
        """The elements of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        rows = []
        starts = [_zeros(1)]
        ends = 0
        above = 0
        for part in parts:
            rows.append(torch.where(part.rows > 0, part.rows + above, 0))
            starts.append(part.start[1:] + ends)  # the empty row of each goes along, unused but for the first
            above += len(part.start) - 1
            ends += len(part.items)
        items = torch.cat([part.items for part in parts])
        return Sets(torch.cat(rows), torch.cat(starts), items, parts[0].width)

    def __or__(self, other: Sets) -> Sets:
        """The union, element by element."""
        if other.is_empty() or (self.items is other.items and torch.equal(self.rows, other.rows)):
            return self
        if self.is_empty():
            return other
        count = len(self)
        if max(len(self.start), len(other.start)) < count // 2:  # few sets: form the union of each pair once
            pairs, of_pair = torch.unique(self.rows * len(other.start) + other.rows, return_inverse=True)
            left, right = pairs // len(other.start), pairs % len(other.start)
            united = Sets.joined([self._of_rows(left), other._of_rows(right)])
            return united.grouped(torch.arange(len(pairs), device="cpu").repeat(2), len(pairs)).take(of_pair)
        return Sets.joined([self, other]).grouped(torch.arange(count, device="cpu").repeat(2), count)

    def spread(self, elements: Tensor, targets: Tensor, count: int) -> Sets:
        """`count` new elements: the set of each is the union of those of the `elements` that have it as a target."""
        return self.take(elements).grouped(targets, count)

    def grouped(self, groups: Tensor, count: int) -> Sets:
        """The union of the sets in each group."""
        rows = self.rows
        held = rows > 0
        if not bool(held.all()):
            rows, groups = rows[held], groups[held]
        if len(self.start) < len(rows):  # sets are shared: take each once in each group
            keys = sorted_unique(groups * len(self.start) + rows)
            groups = torch.div(keys, len(self.start), rounding_mode="floor")
            rows = keys - groups * len(self.start)
        lengths = (self.start[1:] - self.start[:-1])[rows]
        total = _total(lengths)
        keys = torch.repeat_interleave(groups * self.width, lengths, output_size=total) + self._members(rows, lengths)
        keys = sorted_unique(keys)
        groups = torch.div(keys, self.width, rounding_mode="floor")
        start = torch.cat([_zeros(1), torch.bincount(groups, minlength=count).cumsum(0)])
        items = keys - groups * self.width
        return Sets(torch.arange(1, count + 1, device="cpu"), torch.cat([_zeros(1), start]), items, self.width)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Element and member of all, ordered by both."""
        lengths = (self.start[1:] - self.start[:-1])[self.rows]
        elements = torch.repeat_interleave(torch.arange(len(self), device="cpu"), lengths, output_size=_total(lengths))
        return elements, self._members(self.rows, lengths)

    # --- within the table

    def _of_rows(self, rows: Tensor) -> Sets:
        return Sets(rows, self.start, self.items, self.width)

    def _members(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """The members of some rows, one row after the other."""
        if len(rows) and len(rows) == len(self.start) - 2 and int(rows[0]) == 1 and bool((rows[1:] > rows[:-1]).all()):
            return self.items  # the whole table, in order
        ends = lengths.cumsum(0)
        shift = self.start[rows] - (ends - lengths)
        total = _total(lengths)
        return self.items[
            torch.arange(total, device="cpu") + torch.repeat_interleave(shift, lengths, output_size=total)
        ]

    def _compact(self) -> Sets:
        """Without the rows that no element has, where they are many."""
        if len(self.start) <= 2 * len(self) + 16:
            return self
        used, rows = torch.unique(self.rows, return_inverse=True)
        if not len(used) or int(used[0]) != 0:
            used, rows = torch.cat([_zeros(1), used]), rows + 1
        lengths = (self.start[1:] - self.start[:-1])[used]
        return Sets(rows, torch.cat([_zeros(1), lengths.cumsum(0)]), self._members(used, lengths), self.width)


def sorted_unique(keys: Tensor) -> Tensor:
    """The different numbers among some, ascending."""
    try:
        import numpy

        ordered = torch.from_numpy(numpy.sort(keys.numpy()))  # an order of magnitude faster than torch.sort
    except (ImportError, RuntimeError):  # neither hodiff nor PyTorch needs NumPy
        ordered = keys.sort().values
    return torch.unique_consecutive(ordered)


def _total(lengths: Tensor) -> int:
    total = int(lengths.sum())
    if total > LIMIT:
        raise TooMany
    return total


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cpu")
