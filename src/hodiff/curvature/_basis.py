"""An orthonormal basis of a Krylov space with full reorthogonalisation; the engine of `eigsh`, `eigs` and GMRES."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.curvature._space import as_given

Multiply = Callable[[Tensor], Tensor]
Draw = Callable[[], Tensor]


class Basis:
    r"""An orthonormal basis \(V\) of a Krylov space, and the operator's projection \(T = V A V^\top\) on it.

    Of a symmetric operator (Lanczos) the projection is kept symmetric; of another one (Arnoldi) it is a
    Hessenberg matrix, but for what a restart leaves.

    Every new vector is made orthogonal to all before, and to the locked ones, so that no eigenvalue
    appears twice unless it is so. When the space is exhausted (the remainder vanishes: a breakdown),
    it goes on with a random vector orthogonal to all, if it may draw one: thus the identity and matrices
    of low rank are no special case, and multiplicities come out.

    Attributes:
        vectors: The basis as rows, `(room + 1, D)`; the first `size` are in use, one more is the next.
        projection: `T`, with one row more, on the CPU in double precision.
        size: How many columns of `T` are known.
        scale: The largest |T| seen: an estimate of |A|, below it.
        exhausted: Whether the basis and the locked vectors span everything; without `draw`, the Krylov space.
    """

    def __init__(
        self,
        multiply: Multiply,
        start: Tensor | Draw,
        room: int,
        eps: float,
        *,
        symmetric: bool,
        locked: Tensor | None = None,
        scale: float = 0.0,
    ) -> None:
        self._multiply, self._symmetric = multiply, symmetric
        self._draw = None if isinstance(start, Tensor) else start
        like = start if isinstance(start, Tensor) else start()
        self._locked = like.new_empty((0, like.numel())) if locked is None else locked
        self.vectors = torch.empty((room + 1, like.numel()), dtype=like.dtype, device=like.device)
        self.projection = torch.zeros((room + 1, room + 1), dtype=torch.float64, device="cpu")
        self._eps = eps  # of the products; the basis may be more precise
        self.size = 0
        self.scale = scale
        self.exhausted = False
        if isinstance(start, Tensor):
            torch.div(start, start.norm(), out=self.vectors[0])
        else:
            self._fresh(0)

    def grow(self, stop: int) -> None:
        """Extend the basis to `stop` vectors, or until everything is spanned."""
        while self.size < stop and not self.exhausted:
            self._step()

    def _step(self) -> None:
        """One product; its remainder is the next vector."""
        j = self.size
        column, w, norm = self._orthogonalised(self._multiply(self.vectors[j]), j + 1)
        self.projection[: j + 1, j] = column
        if self._symmetric:
            self.projection[j, : j + 1] = column
        self.scale = max(self.scale, float(column.abs().max()), norm)
        self.size = j + 1
        if norm > 10 * self._eps * self.scale:
            self.projection[j + 1, j] = norm
            torch.div(w, norm, out=self.vectors[j + 1])
        else:
            self._fresh(j + 1)

    def _orthogonalised(self, w: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
        """`w` without its parts in the basis and the locked vectors; twice where much cancels."""
        total = torch.zeros(count, dtype=torch.float64, device="cpu")
        norm = float(w.norm())
        for _ in range(3):
            before = norm
            w, part = without(w, self.vectors[:count])
            if len(self._locked):
                w, _ = without(w, self._locked)
            total += part.double().cpu()
            norm = float(w.norm())
            if norm > 0.5 * before or norm <= self._eps * self.scale:
                break
        return total, w, norm

    def _fresh(self, count: int) -> None:
        """Put a random vector orthogonal to all others at `count`, if there is one left."""
        if self._draw is None or count + len(self._locked) >= self.vectors.shape[1]:
            self.exhausted = True
            self.vectors[count].zero_()
            return
        for _ in range(5):
            w, norm = self._draw(), 0.0
            w = w / w.norm()
            for _ in range(3):
                for basis in (self.vectors[:count], self._locked):
                    if len(basis):
                        w, _ = without(w, basis)
                norm = float(w.norm())
                if norm == 0:
                    break
                w = w / norm
            if norm > 0:
                self.vectors[count] = w
                return
        self.exhausted = True

    @property
    def remainder(self) -> Tensor:
        """The part of `A V'` along the next vector, `(size,)`: what the projection leaves out."""
        return self.projection[self.size, : self.size]

    @property
    def square(self) -> Tensor:
        """The projection on the vectors in use, `(size, size)`."""
        return self.projection[: self.size, : self.size]

    def combine(self, coordinates: Tensor) -> Tensor:
        """The vector with these coordinates in the basis; for columns of them, vectors as rows."""
        coordinates = coordinates.to(self.vectors)
        with as_given(coordinates):
            return (coordinates if coordinates.ndim == 1 else coordinates.T) @ self.vectors[: len(coordinates)]

    def restart(self, coordinates: Tensor, square: Tensor) -> None:
        """Keep only an invariant subspace of the projection, which is `square` on it, and the vector that was next."""
        count = coordinates.shape[1]
        kept, left = self.combine(coordinates), self.remainder @ coordinates
        following = self.vectors[self.size].clone()
        self.vectors[:count] = kept
        self.vectors[count] = following
        self.projection.zero_()
        self.projection[:count, :count] = square
        self.projection[count, :count] = left
        self.size = count


def without(w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A vector without its parts in a basis, and these."""
    with as_given(w):
        part = basis @ w
        return torch.addmv(w, basis.T, part, alpha=-1), part
