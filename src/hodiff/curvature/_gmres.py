"""GMRES, restarted: linear systems whose operator is not symmetric."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.curvature._basis import Basis
from hodiff.curvature._krylov import Product, Run, Show

SLOW = 0.999
"""A whole basis that leaves more of the residual than this has found no way down."""


def gmres(
    product: Product,
    inverse: Product,
    b: Tensor,
    tolerance: float,
    eps: float,
    left: Callable[[], int],
    show: Show,
    *,
    room: int,
) -> Run:
    """A x = b from zero, until |r| <= tolerance: least |r| over the Krylov space of A M, begun anew every `room` steps.

    The inverse M stands on the right, so the residual is that of the system itself.
    """
    x, r = torch.zeros_like(b), b.clone()
    size = float(r.norm())
    while left() > 0:
        before = size
        basis = Basis(lambda v: product(inverse(v)), r, room, eps, symmetric=False)
        least = LeastSquares(size, eps)
        while basis.size < room and not basis.exhausted and size > tolerance and left() > 0:
            basis.grow(basis.size + 1)
            size = least.append(basis.projection[: basis.size + 1, basis.size - 1].tolist())
            show(lambda x=x, basis=basis, least=least: x + inverse(basis.combine(least.solution())), size)
        y = least.solution()
        x = x + inverse(basis.combine(y))
        r = r - basis.combine(basis.projection[: basis.size + 1, : basis.size] @ y)
        size = float(r.norm())
        if size <= tolerance:
            return Run(x, "converged", size)
        if basis.exhausted or not size <= SLOW * before:
            return Run(x, "stagnation", size)
    return Run(x, "budget", size)


class LeastSquares:
    """min |e - H y|, with e = (size, 0, 0, ...) and H of Hessenberg form, column by column, by rotations."""

    def __init__(self, size: float, eps: float) -> None:
        self._right = [size]
        self._eps = eps
        self._largest = 0.0
        self._columns: list[list[float]] = []
        self._rotations: list[tuple[float, float]] = []

    def append(self, column: list[float]) -> float:
        """Take one more column, one entry longer than the last, and give the least |e - H y|."""
        for i, (c, s) in enumerate(self._rotations):
            column[i], column[i + 1] = c * column[i] + s * column[i + 1], c * column[i + 1] - s * column[i]
        *_, a, b = column
        length, before = math.hypot(a, b), self._right[-1]
        self._largest = max(self._largest, length)
        c, s = (a / length, b / length) if self._counts(length) else (0.0, 1.0)
        self._rotations.append((c, s))
        self._columns.append([*column[:-2], length])
        self._right[-1:] = [c * before, -s * before]
        return abs(self._right[-1])

    def _counts(self, length: float) -> bool:
        """Whether a column is more than, up to rounding, a combination of those before."""
        return length > 10 * self._eps * self._largest

    def solution(self) -> Tensor:
        """The y; zero at a column that does not count."""
        count = len(self._columns)
        y = [0.0] * count
        for i in reversed(range(count)):
            rest = self._right[i] - sum(self._columns[j][i] * y[j] for j in range(i + 1, count))
            y[i] = rest / self._columns[i][i] if self._counts(self._columns[i][i]) else 0.0
        return torch.tensor(y, dtype=torch.float64, device="cpu")
