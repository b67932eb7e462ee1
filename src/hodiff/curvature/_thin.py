"""The thin side of matrices M'M + λ: what follows from M M', where M has few rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _settings
from hodiff.calculus._factors import Outer, Stack

ROWS, NUMBERS = 2048, 64
"""M has at most so many rows, and so many of a sample."""

WORTH = 200
"""So many rows, times those of a sample, cost about a product: measured, 100 to 400."""


class Thin(NamedTuple):
    """Σ c M'M + λ, of matrices that know the rows of M, and λ times the identity.

    Attributes:
        terms: Each c with its matrix.
        shift: λ.
        made: The operators that are made of these, whose products the passes count as.
    """

    terms: tuple[tuple[float, Any], ...]
    shift: float = 0.0
    made: tuple[Any, ...] = ()

    def diagonal(self, most: int) -> Tensor | None:
        """The diagonal, flat; None where it takes more than so many passes for each batch."""
        parts = [A._squares(most) for _, A in self.terms]
        if not all(parts):
            return None
        for A in self.made:
            A._count(max(passes for _, passes in parts))
        return self.shift + torch.stack(
            [c * squares for (c, _), (squares, _) in zip(self.terms, parts, strict=True)]
        ).sum(0)

    def matrix(self, columns: int, most: int) -> ThinMatrix | None:
        """The matrix by all rows.

        None where they are not known, or cost more than so many products.
        """
        limit, passes = partial(_most, columns, most), 0
        stacks, scales = list[list[Outer]](), list[float]()
        for c, A in self.terms:
            factored = A._factored(limit) if c > 0 else None
            if factored is None:
                return None
            batches, weight, own = factored
            stacks, passes = [*stacks, *batches], max(passes, own)
            scales += [math.sqrt(c / weight)] * len(batches)
        if passes > limit(sum(len(parts[0].left) for parts in stacks)):
            return None
        made = ThinMatrix(Stack(stacks), scales, self.shift)
        if not bool(made.gram.diagonal().isfinite().all()):
            return None
        for A in self.made:
            A._count(passes)
        return made


def _most(columns: int, products: int, samples: int) -> int:
    """The most rows of each sample that are few enough."""
    room, cost, samples = min(columns // 2, ROWS), WORTH * products, max(1, samples)
    return min(NUMBERS, products, room // samples, math.isqrt(cost // samples))


class ThinMatrix:
    """M'M + shift, with the rows of M in factors.

    Attributes:
        shift: The multiple of the identity.
        gram: M M', in double precision.
    """

    def __init__(self, rows: Stack, scales: Sequence[float], shift: float) -> None:
        """Make the matrix of rows in factors, those of each part times a number."""
        self._rows, self.shift = rows, shift
        with _settings.autocast(rows.like.device.type):
            gram = rows.gram().double()
        each = zip(scales, rows.lengths, strict=True)
        self._scales = gram.new_tensor([scale for scale, length in each for _ in range(length)])
        gram = gram.tril() + gram.tril(-1).mT
        self.gram = gram * self._scales * self._scales[:, None]

    def solved(self, b: Tensor, damping: float) -> Tensor | None:
        """The solutions for rows, or a flat vector; None where rounding leaves nothing of them.

        By (b - M' (M M' + λ)⁻¹ M b) / λ, and once more for what is left of b.
        """
        shift, sides = self.shift + damping, torch.atleast_2d(b).double()
        shifted = self.gram.clone()
        shifted.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if shift <= 0 or bool(failed):
            return None

        def inverse(r: Tensor) -> Tensor:
            return (r - self._pull(torch.cholesky_solve(self._push(r).T, factor).T)) / shift

        x = inverse(sides)
        rest = sides - self._pull(self._push(x)) - shift * x
        right = bool((rest.norm(dim=1) <= 0.5 * sides.norm(dim=1)).all())
        x = (x + inverse(rest)).to(b.dtype).reshape(b.shape)
        return x if right and bool(x.isfinite().all()) else None

    def largest(self, k: int) -> tuple[Tensor, Tensor] | None:
        """The largest eigenvalues, so many, and their vectors, as rows; None where M has fewer."""
        values, vectors = torch.linalg.eigh(self.gram.to(self._rows.like))
        noise = 100 * torch.finfo(values.dtype).eps * values[-1]
        if k > len(values) or not bool(values[-k] > noise):
            return None
        values, rows = values[-k:].flip(0).double(), vectors.T[-k:].flip(0)
        return values + self.shift, self._pull(rows / values.sqrt()[:, None])

    def _push(self, vectors: Tensor) -> Tensor:
        """M v of each row."""
        like = self._rows.like
        with _settings.autocast(like.device.type):
            return torch.stack([*map(self._rows.push, vectors.to(like.dtype))]) * self._scales

    def _pull(self, weights: Tensor) -> Tensor:
        """M'u of each row."""
        like = self._rows.like
        with _settings.autocast(like.device.type):
            lines = [*map(self._rows.pull, (weights * self._scales).to(like.dtype))]
        return torch.stack(lines).double()
