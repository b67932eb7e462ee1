"""Krylov spaces: their orthonormal bases; conjugate gradients, MINRES, GMRES; Neumann's series."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.curvature._operator import as_given
from hodiff.curvature._records import Status
from hodiff.errors import InputError

Product = Callable[[Tensor], Tensor]
Show = Callable[[Callable[[], Tensor], float], None]
"""Is called after each step with the solution so far, to be computed if wanted, and the norm of its residual."""


class Solution(NamedTuple):
    """Where a run of a method, or of several, ended.

    Attributes:
        x: The solution.
        status: How it ended; of one run, "converged" is by its own recurrence.
        size: The length of the residual, by the recurrence; None where that measures it otherwise.
        direction: Along which curvature is negative.
    """

    x: Tensor
    status: Status
    size: float | None
    direction: Tensor | None = None


def conjugate_gradients(
    product: Product, inverse: Product, b: Tensor, tolerance: float, eps: float, left: Callable[[], int], show: Show
) -> Solution:
    """A x = b from zero, until |r| <= tolerance; `d'Ad <= 0` ends it. Products round by `eps`."""
    x, r = torch.zeros_like(b), b.clone()
    z = inverse(r)
    d, rz = z.clone(), dot(r, z)
    if rz <= 0:
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")
    largest = 0.0
    size = least = dot(r, r) ** 0.5
    best = x
    while left() > 0:
        image = product(d)
        curvature, length = dot(d, image), dot(d, d)
        # Along a null vector the curvature is what rounding leaves of the largest, and steps towards it are huge.
        largest = max(largest, (dot(image, image) / length) ** 0.5)
        if not curvature > eps * largest * length:
            return Solution(best, "negative curvature", least, d)
        step = rz / curvature
        x = torch.add(x, d, alpha=step)
        r = torch.add(r, image, alpha=-step)
        square = dot(r, r)
        size = square**0.5
        show(lambda x=x: x, size)
        if size <= tolerance:
            return Solution(x, "converged", size)
        if size < least:
            best, least = x, size
        z, before = inverse(r), rz
        rz = square if z is r else dot(r, z)
        if rz <= 0:
            return Solution(x, "stagnation", size)
        d = torch.add(z, d, alpha=rz / before)
    return Solution(x, "budget", size)


def minres(
    product: Product, inverse: Product, b: Tensor, tolerance: float, eps: float, left: Callable[[], int], show: Show
) -> Solution:
    """A x = b from zero, least |r| in the Krylov space at each step; the Lanczos matrix is reduced by rotations."""
    x = torch.zeros_like(b)
    r1 = r2 = b.clone()
    y = inverse(b)
    beta = dot(b, y)
    if beta <= 0:
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")
    beta = first = beta**0.5
    phi = beta
    beta_old = 0.0
    epsilon = 0.0
    dbar = 0.0
    cs = -1.0
    sn = 0.0
    w, w_old = torch.zeros_like(b), torch.zeros_like(b)
    # phi is the residual in the preconditioner's norm; the caller looks at the true one.
    unit = float(b.norm()) / first
    target, scale = tolerance / unit, 0.0
    while left() > 0:
        v = y / beta
        y = product(v)
        if beta_old:
            y = torch.add(y, r1, alpha=-beta / beta_old)
        alpha = dot(v, y)
        y = torch.add(y, r2, alpha=-alpha / beta)
        r1, r2 = r2, y
        y = inverse(r2)
        beta_old, beta = beta, max(dot(r2, y), 0.0) ** 0.5
        scale = max(scale, abs(alpha), beta)
        epsilon_old, delta = epsilon, cs * dbar + sn * alpha
        gbar = sn * dbar - cs * alpha
        epsilon = sn * beta
        dbar = -cs * beta
        gamma = max(math.hypot(gbar, beta), eps * scale * 1e-3, 1e-300)
        cs, sn = gbar / gamma, beta / gamma
        step, phi = cs * phi, sn * phi
        w_new = (v - epsilon_old * w_old - delta * w) / gamma
        w_old, w = w, w_new
        x = torch.add(x, w, alpha=step)
        show(lambda x=x: x, abs(phi) * unit)
        if abs(phi) <= target:
            return Solution(x, "converged", None)
        # The Krylov space is exhausted; or x, along a null vector, has grown so that A x rounds like the residual.
        if beta <= 10 * eps * scale or eps * scale * float(x.norm()) > 0.1 * abs(phi):
            return Solution(x, "stagnation", None)
    return Solution(x, "budget", None)


def neumann(
    product: Product,
    inverse: Product,
    b: Tensor,
    tolerance: float,
    eps: float,
    left: Callable[[], int],
    show: Show,
    *,
    scale: float,
) -> Solution:
    """The first terms of the series x = Σ (I - M A / s)^j M b / s: with no product M b / s, with each one term more.

    The residual is that of the sum before the last term.
    """
    r = b.clone()
    size = first = float(r.norm())
    x = term = inverse(r) / scale
    while left() > 0:
        r = r - product(term)
        size = float(r.norm())
        if size <= tolerance:
            return Solution(x, "converged", size)
        term = inverse(r) / scale
        x = x + term
        show(lambda x=x: x, size)
    return Solution(x, "budget" if size <= first else "divergence", size)


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product of two flat vectors."""
    return float(torch.dot(a, b))


# --- GMRES, restarted: linear systems whose operator is not symmetric -------------------------------------------------


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
    max_basis: int,
) -> Solution:
    """A x = b from zero, until |r| <= tolerance: least |r| over the Krylov space of A M, anew every `max_basis` steps.

    The inverse M stands on the right, so the residual is that of the system itself.
    """
    x, r = torch.zeros_like(b), b.clone()
    size = float(r.norm())
    while left() > 0:
        before = size
        basis = Basis(lambda v: product(inverse(v)), r, max_basis, eps, symmetric=False)
        least = LeastSquares(size, eps)
        while basis.size < max_basis and not basis.exhausted and size > tolerance and left() > 0:
            basis.grow(basis.size + 1)
            size = least.append(basis.projection[: basis.size + 1, basis.size - 1].tolist())
            show(lambda x=x, basis=basis, least=least: x + inverse(basis.combine(least.solution())), size)
        y = least.solution()
        x = x + inverse(basis.combine(y))
        r = r - basis.combine(basis.projection[: basis.size + 1, : basis.size] @ y)
        size = float(r.norm())
        if size <= tolerance:
            return Solution(x, "converged", size)
        if basis.exhausted or not size <= SLOW * before:
            return Solution(x, "stagnation", size)
    return Solution(x, "budget", size)


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


# --- an orthonormal basis of a Krylov space with full reorthogonalisation; the engine of `eigsh`, `eigs` and GMRES ----


class Basis:
    r"""An orthonormal basis \(V\) of a Krylov space, and the operator's projection \(T = V A V^\top\) on it.

    Of a symmetric operator (Lanczos) the projection is kept symmetric; of another one (Arnoldi) it
    is a Hessenberg matrix, but for what a restart leaves.

    Every new vector is made orthogonal to all before, and to the locked ones, so that no eigenvalue
    appears twice unless it is so. When the space is exhausted (the remainder vanishes: a
    breakdown), it goes on with a random vector orthogonal to all, if it may draw one: thus the
    identity and matrices of low rank are no special case, and multiplicities come out.

    Attributes:
        vectors: The basis as rows, `(room + 1, D)`; the first `size` are in use, one more is the next.
        projection: `T`, with one row more, on the CPU in double precision.
        size: How many columns of `T` are known.
        scale: The largest |T| seen: an estimate of |A|, below it.
        exhausted: Whether the basis and the locked vectors span everything; without `draw`, the Krylov space.
    """

    def __init__(
        self,
        multiply: Product,
        start: Tensor,
        max_basis: int,
        eps: float,
        *,
        symmetric: bool,
        draw: Callable[[], Tensor] | None = None,
        locked: Tensor | None = None,
        scale: float = 0.0,
    ) -> None:
        self._multiply, self._symmetric, self._draw = multiply, symmetric, draw
        self._locked = start.new_empty((0, len(start))) if locked is None else locked
        self.vectors = start.new_empty((max_basis + 1, len(start)))
        self.projection = torch.zeros((max_basis + 1, max_basis + 1), dtype=torch.float64, device="cpu")
        self._eps = eps  # of the products; the basis may be more precise
        self.size = 0
        self.scale = scale
        self.exhausted = False
        if not self._put(0, start):
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
        self.exhausted = not any(self._put(count, self._draw()) for _ in range(5))

    def _put(self, count: int, w: Tensor) -> bool:
        """Put what the others leave of a vector at `count`; False where that is nothing."""
        _, w, norm = self._orthogonalised(w / w.norm(), count)
        if norm > 0:
            torch.div(w, norm, out=self.vectors[count])
        return norm > 0

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
