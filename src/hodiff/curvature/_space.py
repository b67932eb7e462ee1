"""The vectors that an operator takes and gives: shaped like a point, or flat.

Inside, a vector is a list of parts, one for each leaf; `K` vectors are parts with one more dimension
in front. Outside there are four spellings: like the point, `K` of those stacked, flat `(D,)`, and
columns `(D, K)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _tree
from hodiff._core._vectors import match
from hodiff._core._where import Where
from hodiff.errors import InputError

TURNED_BYTES = 16 * 2**20
_TILE = 4096


def wide(dtype: torch.dtype) -> torch.dtype:
    """What many terms of a dtype are added up in: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def plus(total: list[Tensor], terms: Sequence[Tensor]) -> list[Tensor]:
    """A running sum, which is the caller's own, in `wide` precision from the second term on."""
    return [sum_.to(wide(sum_.dtype)).add_(term) for sum_, term in zip(total, terms, strict=True)]


def _turned(columns: Tensor) -> Tensor:
    """The transpose `(K, n)`, each row contiguous.

    By tiles: a processor turns what its caches hold two to five times faster than a large matrix at once.
    """
    if columns.stride(0) == 1 or columns.device.type != "cpu" or len(columns) <= _TILE:
        return columns.T if columns.stride(0) == 1 else columns.T.contiguous()
    rows = columns.new_empty(columns.T.shape)
    for start in range(0, len(columns), _TILE):
        rows[:, start : start + _TILE] = columns[start : start + _TILE].T
    return rows


class Vectors(NamedTuple):
    """Vectors as they were given: their spelling, and their parts (`number` is None for a single one)."""

    kind: str  # "flat", "columns", "structure" or "stack"
    parts: list[Tensor]
    number: int | None


class Space:
    """One side of an operator.

    Attributes:
        names: A readable name for each leaf.
        shapes: The shape of each leaf.
        size: The number of entries, D.
        dtype: The dtype of flat vectors: that of the leaves, promoted.
        device: Where the vectors live.
    """

    __slots__ = ("_likes", "_meaning", "_sizes", "_tree", "device", "dtype", "names", "shapes", "size")

    def __init__(self, likes: Sequence[Tensor], names: Sequence[str], tree: _tree.Tree, meaning: str) -> None:
        self.names = list(names)
        self.shapes = [like.shape for like in likes]
        self._sizes = [shape.numel() for shape in self.shapes]
        self.size = sum(self._sizes)
        self.dtype = likes[0].dtype
        for like in likes:
            self.dtype = torch.promote_types(self.dtype, like.dtype)
        self.device = likes[0].device
        if any(like.device != self.device for like in likes):
            raise InputError(
                f"{meaning}: its tensors are on several devices "
                f"({', '.join(sorted({str(like.device) for like in likes}))}); an operator needs them on one."
            )
        # Shapes without memory: a space must not keep anything of the user's alive.
        self._likes = [torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape) for like in likes]
        self._tree = tree
        self._meaning = meaning

    @classmethod
    def of(cls, where: Where) -> Space:
        """The space of vectors like a point."""
        return cls(where.tensors, where.names, where.tree(), f"like {where.name}")

    @classmethod
    def line(cls, like: Tensor, name: str = "x") -> Space:
        """The space of vectors like one tensor."""
        return cls([like], [name], _tree.LEAF, f"like {name}")

    def only(self, chosen: Sequence[int]) -> Space:
        """The space of some of the leaves: vectors are dicts by name."""
        names = [self.names[index] for index in chosen]
        tree = _tree.Branch(dict, tuple(names), (_tree.LEAF,) * len(names))
        return Space([self._likes[index] for index in chosen], names, tree, f"a dict with keys {names}")

    def like(self, other: Space) -> bool:
        """Whether vectors of the other space are vectors of this one, with their leaves in the same order."""
        same = self.shapes == other.shapes and _tree.difference(self._tree, other._tree, "") is None
        return same and _tree.paths(self._tree, "") == _tree.paths(other._tree, "")

    @property
    def flat(self) -> bool:
        """Whether a vector is a single tensor of one dimension, so that structure and flat spelling are one."""
        return self._tree is _tree.LEAF and len(self.shapes[0]) == 1

    def parse(self, value: Any, name: str = "v") -> Vectors:
        """Recognise a spelling, check it, and split it into parts."""
        if isinstance(value, Tensor) and (self.flat or (0 < value.ndim <= 2 and value.shape[0] == self.size)):
            return self._parse_flat(value, name)
        if isinstance(value, Tensor) and self._tree is not _tree.LEAF:
            raise InputError(f"{name}: {self._wrong_shape(value)}")
        parts, count = match(value, self._tree, self._likes, name, self._meaning)
        return Vectors("structure" if count is None else "stack", parts, count)

    def _parse_flat(self, value: Tensor, name: str) -> Vectors:
        if value.ndim not in (1, 2) or value.shape[0] != self.size:
            raise InputError(f"{name}: {self._wrong_shape(value)}")
        if value.dtype != self.dtype or value.device != self.device:
            raise InputError(
                f"{name}: is {value.dtype} on {value.device}, expected {self.dtype} on {self.device}; "
                f"convert it: v.to(H.device, H.dtype)."
            )
        if value.ndim == 1:
            return Vectors("flat", self.split(value), None)
        return Vectors("columns", [value], value.shape[1])

    def _wrong_shape(self, value: Tensor) -> str:
        turned = value.ndim == 2 and value.shape[1] == self.size
        advice = "; several vectors are columns: give v.T" if turned else ""
        structure = "" if self.flat else f", or a vector {self._meaning}"
        return (
            f"has shape {tuple(value.shape)}, expected ({self.size},), ({self.size}, K) for K vectors"
            f"{structure}{advice}."
        )

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of flat vectors, `(D,)` or rows `(K, D)`: views, unless dtypes are mixed."""
        lead = flat.shape[:-1]
        pieces = flat.split(self._sizes, dim=-1)
        return [
            piece.reshape((*lead, *like.shape)).to(like.dtype) for piece, like in zip(pieces, self._likes, strict=True)
        ]

    def rows(self, columns: Tensor) -> list[Tensor]:
        """The parts of columns `(D, K)`."""
        pieces = columns.split(self._sizes, dim=0)
        return [
            _turned(piece).reshape((piece.shape[1], *like.shape)).to(like.dtype)
            for piece, like in zip(pieces, self._likes, strict=True)
        ]

    def turned_at_once(self, least: int) -> int:
        """How many vectors to turn from columns into rows in one go: some `TURNED_BYTES`, but at least so many."""
        return max(least, TURNED_BYTES // max(1, self.size * self.itemsize()))

    def join_into(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Write the parts of several vectors as the rows of `out`."""
        if any(part.dtype != self.dtype for part in parts):
            out.copy_(self.join(parts, len(out)))
            return
        torch.cat([part.reshape(len(out), -1) for part in parts], dim=1, out=out)

    def join(self, parts: Sequence[Tensor], count: int | None) -> Tensor:
        """Parts as one flat vector `(D,)`, or as rows `(K, D)`."""
        lead = () if count is None else (count,)
        if len(parts) == 1:
            return parts[0].reshape((*lead, self.size)).to(self.dtype)
        pieces = [part.reshape((*lead, size)).to(self.dtype) for part, size in zip(parts, self._sizes, strict=True)]
        return torch.cat(pieces, dim=-1)

    def result(self, parts: Sequence[Tensor]) -> Any:
        """Parts in the structure of the point."""
        return _tree.rebuild(self._tree, iter(parts))

    def zeros(self, count: int | None = None) -> list[Tensor]:
        """The parts of a zero vector, or of `count` of them."""
        lead = () if count is None else (count,)
        return [torch.zeros((*lead, *like.shape), dtype=like.dtype, device=like.device) for like in self._likes]

    def empty(self, count: int) -> list[Tensor]:
        """Room for the parts of `count` vectors."""
        return [torch.empty((count, *like.shape), dtype=like.dtype, device=like.device) for like in self._likes]

    def itemsize(self) -> int:
        """Bytes of one entry of a flat vector."""
        return torch.empty((), dtype=self.dtype).element_size()
