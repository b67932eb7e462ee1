"""Krylov spaces: their orthonormal bases; conjugate gradients, MINRES, GMRES; Neumann's series."""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.curvature._operator import as_given
from hodiff.curvature._records import Status
from hodiff.errors import InputError

Product = Callable[[Tensor, Tensor], Tensor]
"""The products with vectors as rows, each by the matrix of the system with its number."""
Show = Callable[[Callable[[], tuple[Tensor, Tensor]]], None]
"""Is called after each step with what computes the solutions so far, and their residuals' norms."""


Number = Any
"""Of one system a float, which is quick; of several a line, in double precision on the CPU."""


class Systems(NamedTuple):
    """Linear systems that are solved side by side: one for each row of what is given.

    Attributes:
        product: A v; it rounds by `eps`.
        inverse: M v, with an approximate inverse, if there is one.
        eps: The precision of products.
    """

    product: Product
    inverse: Product | None
    eps: float


@dataclass
class Solutions:
    """Where a run of a method, or of several, ended, for each system.

    Attributes:
        x: The solutions, as rows.
        status: How they ended; of one run, "converged" is by its own recurrence.
        size: The lengths of the residuals, by the recurrence.
        taken: How many products each took.
        direction: Along which curvature is negative; zero where it is not. None where it nowhere
            is.
    """

    x: Tensor
    status: list[Status]
    size: Tensor
    taken: Tensor
    direction: Tensor | None = None

    @classmethod
    def like(cls, x: Tensor) -> Solutions:
        """These, of which nothing is known."""
        return cls(x, ["running"] * len(x), coefficients(len(x)), coefficients(len(x)))

    def running(self, at: Tensor, steps: Tensor, size: Tensor, unit: Tensor) -> Solutions:
        """A copy, in which some have gone such steps further, and go on."""
        so_far = Solutions(self.x.clone(), [*self.status], self.size.clone(), self.taken)
        so_far.x[at] += steps
        so_far.size[at] = size / unit
        for number in at.tolist():
            so_far.status[number] = "running"
        return so_far

    def put(self, at: Tensor, x: Tensor, size: Tensor, taken: Tensor | int, direction: Tensor | None) -> None:
        """Take what is known of some systems."""
        self.x[at] = x
        self.size[at] = size
        self.taken[at] = torch.as_tensor(taken, dtype=torch.float64, device="cpu")
        if direction is not None and bool(direction.any()):
            self.direction = torch.zeros_like(self.x) if self.direction is None else self.direction
            self.direction[at] = direction


class Block(ABC):
    """Systems on their way, by one method: everything that is known of them has them as rows.

    Attributes:
        numbers: Which of the systems these are.
        x: The iterates.
        size: The lengths of their residuals.
        direction: Where negative curvature was met.
    """

    size: Number
    direction: Tensor | None = None

    def __init__(self, systems: Systems, b: Tensor, numbers: Tensor, tolerance: Tensor) -> None:
        """The systems with these right-hand sides, from zero, until |r| <= tolerance."""
        self._systems = systems
        self.numbers = numbers
        self.tolerance: Number = float(tolerance) if len(b) == 1 else tolerance
        self.x = torch.zeros_like(b)

    @abstractmethod
    def step(self) -> dict[Status, Number]:
        """A product for each system; which have ended, and how: the first that is said counts."""

    def solution(self, chosen: Tensor) -> Tensor:
        """The iterates of some."""
        return self.x[chosen]

    def spent(self, over: Tensor) -> dict[Status, Number]:
        """How these end, whose products are spent."""
        return {"budget": over}

    def keep(self, chosen: Tensor) -> None:
        """Let the chosen systems alone go on."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[chosen])

    def _product(self, v: Tensor) -> Tensor:
        return self._systems.product(v, self.numbers)

    def _inverse(self, r: Tensor, numbers: Tensor | None = None) -> Tensor:
        inverse = self._systems.inverse
        if inverse is None:
            return r
        return inverse(r, self.numbers if numbers is None else numbers)


def run(block: Block, left: Tensor, show: Show) -> Solutions:
    """Steps, until each system has ended, or spent what is left to it; who has ended leaves."""
    end, steps = Solutions.like(torch.zeros_like(block.x)), 0
    places, first = torch.arange(len(block.x), device="cpu"), int(left.min())

    def current() -> tuple[Tensor, Tensor]:
        x, size = end.x.clone(), end.size.clone()
        x[places] = block.solution(torch.ones(len(places), dtype=torch.bool, device="cpu"))
        size[places] = lines(block.size)
        return x, size

    if first <= 0:
        places = leave(block, end, places, 0, block.spent(left <= 0))
    while len(places):
        ends = block.step()
        steps += 1
        show(current)
        places = leave(block, end, places, steps, ends)
        if steps >= first and len(places):
            places = leave(block, end, places, steps, block.spent(left[places] <= steps))
    return end


def leave(block: Block, end: Solutions, places: Tensor, steps: int, ends: dict[Status, Number]) -> Tensor:
    """Put the systems of a block that have ended into their places; those of the others."""
    if not anywhere(functools.reduce(operator.or_, ends.values())):
        return places
    gone = torch.zeros(len(places), dtype=torch.bool, device="cpu")
    for status, which in reversed(ends.items()):
        which = torch.as_tensor(which, device="cpu").expand(len(places))
        gone |= which
        for place in places[which].tolist():
            end.status[place] = status
    direction = None if block.direction is None else block.direction[gone]
    end.put(places[gone], block.solution(gone), lines(block.size)[gone], steps, direction)
    places = places[~gone]
    if len(places):
        block.keep(~gone)
    return places


class ConjugateGradients(Block):
    """For positive definite matrices; d'Ad <= 0 ends it, with the best iterate until then."""

    def __init__(self, systems: Systems, b: Tensor, numbers: Tensor, tolerance: Tensor) -> None:
        super().__init__(systems, b, numbers, tolerance)
        self._r, self._best = b, self.x
        self._d = self._inverse(b)
        self._rz = dots(b, self._d)
        check_definite(self._rz)
        self._largest = 0.0
        self.size = self._least = dots(b, b) ** 0.5

    def step(self) -> dict[Status, Number]:
        """Along d, to where the residual is orthogonal to it."""
        d, image = self._d, self._product(self._d)
        curvature, length = dots(d, image), dots(d, d)
        # Along a null vector the curvature is what rounding leaves of the largest, and steps towards it are huge.
        self._largest = larger(self._largest, (dots(image, image) / length) ** 0.5)
        down = select(curvature > self._systems.eps * self._largest * length, False, True)
        step = self._rz / select(down, math.inf, curvature)
        self.x = along(self.x, step, d)
        self._r = along(self._r, -step, image)
        square = dots(self._r, self._r)
        self.size = square**0.5
        self._remember(down)
        self.direction = select(down, d, 0 * d) if anywhere(down) else None
        z, before = self._inverse(self._r), self._rz
        self._rz = square if z is self._r else dots(self._r, z)
        self._d = along(z, self._rz / before, d)
        converged = self.size <= self.tolerance
        return {"negative curvature": down, "converged": converged, "stagnation": self._rz <= 0}

    def _remember(self, down: Number) -> None:
        """The best iterates; who went down ends with those."""
        better = self.size < self._least
        self._best = select(better, self.x, self._best)
        self._least = select(better, self.size, self._least)
        if anywhere(down):
            self.x = select(down, self._best, self.x)
            self.size = select(down, self._least, self.size)


class MINRES(Block):
    """For symmetric matrices: the least |r| in the Krylov space, by rotations of Lanczos' matrix.

    `size` is of the residual in the preconditioner's norm; the caller looks at the true one.
    """

    def __init__(self, systems: Systems, b: Tensor, numbers: Tensor, tolerance: Tensor) -> None:
        super().__init__(systems, b, numbers, tolerance)
        self._r1 = self._r2 = b
        self._y = self._inverse(b)
        square = dots(b, self._y)
        check_definite(square)
        self._beta = self._phi = square**0.5
        self._beta_old = self._epsilon = self._dbar = self._sn = self._scale = 0.0
        self._cs = -1.0
        self._w = self._w_old = self.x
        self.size = dots(b, b) ** 0.5
        self._unit = self.size / self._beta

    def step(self) -> dict[Status, Number]:
        """One more vector of Lanczos', and the rotation that it takes."""
        v = self._y / spread(self._beta, self._y)
        y = self._product(v)
        if self._r1 is not self._r2:
            y = along(y, -self._beta / self._beta_old, self._r1)
        alpha = dots(v, y)
        y = along(y, -alpha / self._beta, self._r2)
        self._r1, self._r2 = self._r2, y
        self._y = self._inverse(y)
        self._beta_old, self._beta = self._beta, larger(0.0, dots(y, self._y)) ** 0.5
        self._scale = larger(larger(self._scale, abs(alpha)), self._beta)
        self._rotate(v, alpha)
        left = abs(self._phi)
        self.size = left * self._unit
        # The Krylov space is exhausted; or x, along a null vector, has grown so that A x rounds like the residual.
        rounding = self._systems.eps * self._scale
        end = (self._beta <= 10 * rounding) | (rounding * dots(self.x, self.x) ** 0.5 > 0.1 * left)
        return {"converged": self.size <= self.tolerance, "stagnation": end}

    def _rotate(self, v: Tensor, alpha: Number) -> None:
        epsilon_old, delta = self._epsilon, self._cs * self._dbar + self._sn * alpha
        gbar = self._sn * self._dbar - self._cs * alpha
        self._epsilon, self._dbar = self._sn * self._beta, -self._cs * self._beta
        tiny = torch.finfo(v.dtype).tiny  # of a zero matrix
        gamma = larger(larger(tiny, self._systems.eps * 1e-3 * self._scale), (gbar**2 + self._beta**2) ** 0.5)
        self._cs, self._sn = gbar / gamma, self._beta / gamma
        step, self._phi = self._cs * self._phi, self._sn * self._phi
        w = along(along(v, -epsilon_old, self._w_old), -delta, self._w) / spread(gamma, v)
        self._w_old, self._w = self._w, w
        self.x = along(self.x, step, w)


class Neumann(Block):
    """The first terms of the series x = Σ (I - M A / s)^j M b / s: with no product M b / s, with each one term more.

    The residual is that of the sum before the last term.
    """

    def __init__(self, systems: Systems, b: Tensor, numbers: Tensor, tolerance: Tensor, *, scale: float) -> None:
        super().__init__(systems, b, numbers, tolerance)
        self._scale = scale
        self._r = b
        self.size = self._first = dots(b, b) ** 0.5
        self.x = self._term = self._inverse(b) / scale

    def step(self) -> dict[Status, Number]:
        """The next term, unless nothing is left of the residual."""
        self._r = self._r - self._product(self._term)
        self.size = dots(self._r, self._r) ** 0.5
        done = self.size <= self.tolerance
        self._term = self._inverse(self._r) / self._scale
        self.x = select(done, self.x, self.x + self._term)
        return {"converged": done}

    def spent(self, over: Tensor) -> dict[Status, Number]:
        """Where the terms have grown, they add up to nothing."""
        return {"divergence": over & (self.size > self._first), "budget": over}


SLOW = 0.999
"""A whole basis that leaves more of the residual than this has found no way down."""


class GMRES(Block):
    """The least |r| over the Krylov space of A M, anew every `room` steps; r is the system's own.

    Every vector of the orthonormal basis V is made orthogonal to all before; the Hessenberg matrix
    H, which A M is on it, becomes triangular by rotations, all of them together in Q.
    """

    def __init__(self, systems: Systems, b: Tensor, numbers: Tensor, tolerance: Tensor, *, room: int) -> None:
        super().__init__(systems, b, numbers, tolerance)
        self._room = room
        self._basis = b.new_empty((len(b), room + 1, b.shape[1]))
        self._begin(b)

    def _begin(self, r: Tensor) -> None:
        count, room = len(r), self._room
        self._r, self._count = r, 0
        self.size = self._before = norms(r)
        self._basis[:, 0] = r / spread(self.size, r)
        self._hessenberg = coefficients(count, room + 1, room)
        self._rotations = torch.eye(room + 1, dtype=torch.float64, device="cpu").repeat(count, 1, 1)
        self._scale = self._largest = coefficients(count)

    def step(self) -> dict[Status, Number]:
        """One more vector of the basis."""
        j = self._count
        self._count += 1
        image = self._product(self._inverse(self._basis[:, j]))
        column, w, norm = self._orthogonalised(image, j + 1)
        exhausted = norm <= 10 * self._systems.eps * self._scale
        norm = torch.where(exhausted, 0.0, norm)
        self._basis[:, j + 1] = w * spread(torch.where(exhausted, 0.0, 1 / norm), w)
        self._append(torch.cat([column, norm[:, None]], 1))
        if self._count < self._room:
            return {"converged": self.size <= self.tolerance, "stagnation": exhausted}
        y = self._coordinates(torch.ones_like(exhausted))
        self.x = self.x + self._inverse(combined(y, self._basis))
        left = self._r - combined((self._hessenberg @ y[:, :, None])[:, :, 0], self._basis)
        before = self._before
        self._begin(left)
        slow = ~(self.size <= SLOW * before)
        return {"converged": self.size <= self.tolerance, "stagnation": exhausted | slow}

    def _orthogonalised(self, w: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The vectors without their parts in the basis, and these; again where much cancels."""
        total, norm, basis = coefficients(len(w), count), norms(w), self._basis[:, :count]
        for _ in range(3):
            before = norm
            with as_given(w):
                part = (basis @ w[:, :, None])[:, :, 0]
            w = w - combined(part, basis)
            total += part.to("cpu", torch.float64)
            norm = norms(w)
            if bool(((norm > 0.5 * before) | (norm <= self._systems.eps * self._scale)).all()):
                break
        self._scale = self._scale.maximum(total.abs().amax(1)).maximum(norm)
        return total, w, norm

    def _append(self, column: Tensor) -> None:
        """Take one more column of H, and give `size`, the least |e - H y|."""
        j = self._count - 1
        self._hessenberg[:, : j + 2, j] = column
        turned = (self._rotations[:, : j + 2, : j + 2] @ column[:, :, None])[:, :, 0]
        a, b = turned[:, j], turned[:, j + 1]
        length = torch.hypot(a, b)
        self._largest = self._largest.maximum(length)
        counts = length > 10 * self._systems.eps * self._largest
        c, s = torch.where(counts, a / length, 0.0)[:, None], torch.where(counts, b / length, 1.0)[:, None]
        upper, lower = self._rotations[:, j].clone(), self._rotations[:, j + 1].clone()
        self._rotations[:, j] = c * upper + s * lower
        self._rotations[:, j + 1] = c * lower - s * upper
        self.size = self._before * self._rotations[:, j + 1, 0].abs()

    def _coordinates(self, chosen: Tensor) -> Tensor:
        """The y; zero at columns that do not count."""
        j = self._count
        rotations = self._rotations[chosen, :j, : j + 1]
        triangle, right = rotations @ self._hessenberg[chosen, : j + 1, :j], rotations[:, :, 0]
        lengths = triangle.diagonal(dim1=1, dim2=2).abs()
        counts = lengths > 10 * self._systems.eps * self._largest[chosen, None]
        ones = torch.eye(j, dtype=torch.float64, device="cpu")
        triangle = torch.where(counts[:, :, None], triangle, ones)
        right = torch.where(counts, right * self._before[chosen, None], 0.0)
        return torch.linalg.solve_triangular(triangle, right[:, :, None], upper=True)[:, :, 0]

    def solution(self, chosen: Tensor) -> Tensor:
        """The iterates of some."""
        if not self._count:
            return self.x[chosen]
        basis = self._basis[:, : self._count]
        step = combined(self._coordinates(chosen), basis if bool(chosen.all()) else basis[chosen])
        return self.x[chosen] + self._inverse(step, self.numbers[chosen])


def combined(numbers: Tensor, basis: Tensor) -> Tensor:
    """The vectors with these coordinates, each in its basis."""
    numbers = numbers.to(basis)
    with as_given(numbers):
        return (numbers[:, None] @ basis[:, : numbers.shape[1]])[:, 0]


# --- numbers of systems: floats of a single one, lines of several --------------------------------


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product of two flat vectors."""
    return float(torch.dot(a, b))


def dots(a: Tensor, b: Tensor) -> Number:
    """The inner products of rows."""
    if a.shape[0] == 1:
        return dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum(1).to("cpu", torch.float64)


def coefficients(*shape: int) -> Tensor:
    """Zeros, to be numbers of systems."""
    return torch.zeros(shape, dtype=torch.float64, device="cpu")


def norms(rows: Tensor) -> Tensor:
    """The lengths of rows, as a line."""
    return torch.linalg.vector_norm(rows, dim=1).to("cpu", torch.float64)


def lines(number: Number) -> Tensor:
    """Numbers as a line of them."""
    return torch.as_tensor(number, dtype=torch.float64, device="cpu").reshape(-1)


def spread(number: Number, rows: Tensor) -> Number:
    """Numbers as a column that goes with rows."""
    return number.to(rows).unsqueeze(1) if isinstance(number, Tensor) else number


def along(rows: Tensor, steps: Number, directions: Tensor) -> Tensor:
    """The rows, moved by so many steps along the directions."""
    if isinstance(steps, Tensor):
        return torch.addcmul(rows, spread(steps, rows), directions)
    return torch.add(rows, directions, alpha=steps)


def select(where: Number, a: Any, b: Any) -> Any:
    """Numbers, or rows, of the one or the other."""
    if not isinstance(where, Tensor):
        return a if where else b
    rows = isinstance(b, Tensor) and b.ndim == 2
    return torch.where(where.to(b.device).unsqueeze(1) if rows else where, a, b)


def larger(a: Number, b: Number) -> Number:
    """The larger number of two."""
    if not isinstance(b, Tensor):
        return max(a, b)
    return torch.as_tensor(a, dtype=torch.float64, device="cpu").maximum(b)


def anywhere(where: Number) -> bool:
    """Whether something is true of a system."""
    return bool(where.any()) if isinstance(where, Tensor) else where


def check_definite(forms: Number) -> None:
    """Raise unless a preconditioner's r'Mr are positive."""
    if anywhere(forms <= 0):
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")


# --- an orthonormal basis of a Krylov space with full reorthogonalisation; the engine of `eigsh` and `eigs` ----


class Basis:
    r"""An orthonormal basis \(V\) of a Krylov space, and the operator's projection \(T = V A V^\top\) on it.

    Of a symmetric operator (Lanczos) the projection is kept symmetric; of another one (Arnoldi) it
    is a Hessenberg matrix, but for what a restart leaves.

    Every new vector is made orthogonal to all before, and to the locked ones, so that no eigenvalue
    appears twice unless it is so. When the space is exhausted (the remainder vanishes: a
    breakdown), it goes on with a random vector orthogonal to all, by `draw`: thus the
    identity and matrices of low rank are no special case, and multiplicities come out.

    Attributes:
        vectors: The basis as rows, `(room + 1, D)`; the first `size` are in use, one more is the next.
        projection: `T`, with one row more, on the CPU in double precision.
        size: How many columns of `T` are known.
        scale: The largest |T| seen: an estimate of |A|, below it.
        exhausted: Whether the basis and the locked vectors span everything.
    """

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        start: Tensor,
        max_basis: int,
        eps: float,
        *,
        symmetric: bool,
        draw: Callable[[], Tensor],
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
        if count + len(self._locked) >= self.vectors.shape[1]:
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
