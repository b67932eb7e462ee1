"""A Lanczos basis with full reorthogonalisation, grown and restarted; the engine of `eigsh`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.errors import GraphError

Multiply = Callable[[Tensor], Tensor]
Draw = Callable[[], Tensor]


class Basis:
    r"""An orthonormal basis \(V\) of a Krylov space, and the operator's projection \(T = V A V^\top\) on it.

    Every new vector is made orthogonal to all before, and to the locked ones, so that no eigenvalue
    appears twice unless it is so. When the space is exhausted (the remainder vanishes: a breakdown),
    it goes on with a random vector orthogonal to all: thus the identity and matrices of low rank are
    no special case, and multiplicities come out.

    Attributes:
        vectors: The basis as rows, `(room + 1, D)`; the first `size` are in use, one more is the next.
        size: How many columns of `T` are known.
        scale: The largest |T| seen: an estimate of |A|, below it.
        exhausted: Whether the basis and the locked vectors span everything.
    """

    def __init__(self, multiply: Multiply, draw: Draw, room: int, locked: Tensor, scale: float, eps: float) -> None:
        self._multiply, self._draw, self._locked = multiply, draw, locked
        start = draw()
        self.vectors = torch.empty((room + 1, start.numel()), dtype=start.dtype, device=start.device)
        self._projection = torch.zeros((room + 1, room + 1), dtype=torch.float64)
        self._eps = eps  # of the products; the basis may be more precise
        self.size, self.scale, self.exhausted, self.remainder = 0, scale, False, 0.0
        self._fresh(0)

    def grow(self, stop: int) -> None:
        """Extend the basis to `stop` vectors, or until everything is spanned."""
        while self.size < stop and not self.exhausted:
            self._step()

    def _step(self) -> None:
        """One product; its remainder is the next vector."""
        j = self.size
        w = self._multiply(self.vectors[j])
        if not math.isfinite(float(w.sum())):
            raise GraphError(
                "eigsh: a product is not finite, so the operator has NaN or infinite entries. Are the parameters "
                "finite, and the function smooth where they are (sqrt at 0, norm at 0)?"
            )
        column, w, norm = self._orthogonalised(w, j + 1)
        self._projection[: j + 1, j] = self._projection[j, : j + 1] = column
        self.scale = max(self.scale, float(column.abs().max()), norm)
        self.size, self.remainder = j + 1, norm
        if norm > 10 * self._eps * self.scale:
            torch.div(w, norm, out=self.vectors[j + 1])
        else:
            self.remainder = 0.0
            self._fresh(j + 1)

    def _orthogonalised(self, w: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
        """`w` without its parts in the basis and the locked vectors; twice where much cancels."""
        total = torch.zeros(count, dtype=torch.float64)
        norm = float(w.norm())
        for _ in range(3):
            before = norm
            basis = self.vectors[:count]
            part = basis @ w
            w = torch.addmv(w, basis.T, part, alpha=-1)
            if len(self._locked):
                w = torch.addmv(w, self._locked.T, self._locked @ w, alpha=-1)
            total += part.double().cpu()
            norm = float(w.norm())
            if norm > 0.5 * before or norm <= self._eps * self.scale:
                break
        return total, w, norm

    def _fresh(self, count: int) -> None:
        """Put a random vector orthogonal to all others at `count`, if there is one left."""
        if count + len(self._locked) >= self.vectors.shape[1]:
            self.exhausted = True
            return
        for _ in range(5):
            w, norm = self._draw(), 0.0
            w = w / w.norm()
            for _ in range(3):
                for basis in (self.vectors[:count], self._locked):
                    if len(basis):
                        w = torch.addmv(w, basis.T, basis @ w, alpha=-1)
                norm = float(w.norm())
                if norm == 0:
                    break
                w = w / norm
            if norm > 0:
                self.vectors[count] = w
                return
        self.exhausted = True

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, their coordinates in the basis as columns, and the norms of their residuals."""
        values, coordinates = torch.linalg.eigh(self._projection[: self.size, : self.size])
        return values, coordinates, coordinates[-1].abs() * self.remainder

    def combine(self, coordinates: Tensor) -> Tensor:
        """Vectors, as rows, with these coordinates in the basis."""
        return coordinates.T.to(self.vectors) @ self.vectors[: self.size]

    def restart(self, values: Tensor, coordinates: Tensor) -> None:
        """Keep only some Ritz vectors, and the vector that was next."""
        count = len(values)
        kept = self.combine(coordinates)
        following = self.vectors[self.size].clone()
        self.vectors[:count] = kept
        self.vectors[count] = following
        self._projection.zero_()
        self._projection[:count, :count] = torch.diag(values)
        self.size = count
