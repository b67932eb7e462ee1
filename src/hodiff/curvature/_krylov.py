"""Krylov methods: conjugate gradients, MINRES, GMRES, Neumann's series."""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core._arguments import Probes
from hodiff._core._vectors import draw, empty
from hodiff.curvature._operator import LinearOperator, as_given
from hodiff.curvature._records import Status
from hodiff.errors import InputError

Product = Callable[[Tensor, list[int]], Tensor]
"""The products with vectors, each by the matrix of the system with its number."""
Number = Any
"""Of one system, whose vectors are flat, a float; of several, whose vectors are rows, a line in
double precision on the CPU. Where methods do not run, numbers are lists."""


# --- sums over the entries of vectors, and what follows from them: no method has its own ----------


FEW = 8
"""Up to so many rows go one by one, as a product of a stack makes a copy; of more it is faster."""


def axpy(rows: Tensor, steps: Number, directions: Tensor) -> Tensor:
    """Y + a x: the vectors, moved by so many steps along the directions."""
    if rows.ndim == 1:
        return torch.add(rows, directions, alpha=steps)
    return torch.addcmul(rows, column(steps, rows), directions)


class Inner:
    """Inner products of flat vectors, and what follows from them: every number that scales or
    decides.

    Where processes share the entries, each adds up those that it counts, and all of them get the
    same number, to the last bit: so they go the same way. What acts entry by entry needs none of
    this.
    """

    def __init__(self, layout: Any = None) -> None:
        """The products of vectors laid out so; of one process, without a layout."""
        self._layout = layout
        self._counted = [] if layout is None else layout.counted()

    def sums(self, f: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """The value of a function that adds up over entries, of all entries."""
        if self._layout is None:
            return f(*vectors)
        own = [f(*(v[..., some] for v in vectors)).double() for some in self._counted]
        return self._layout.sums.gathered(torch.stack(own).sum(0)).sum(0)

    def dots(self, a: Tensor, b: Tensor) -> Number:
        """The inner products of vectors."""
        if a.ndim == 1:  # nearly always of one process, in each step of each method
            return float(torch.dot(a, b) if self._layout is None else self.sums(torch.dot, a, b))
        return self.sums(_dots, a, b).to("cpu", torch.float64)

    def norms(self, rows: Tensor) -> Number:
        """The lengths of vectors."""
        if self._layout is None:
            lengths = torch.linalg.vector_norm(rows, dim=-1)
        else:
            lengths = self.sums(lambda x: x.norm(dim=-1).double().square(), rows).sqrt()
        return float(lengths) if rows.ndim == 1 else lengths.to("cpu", torch.float64)

    def amax(self, rows: Tensor) -> Number:
        """The largest entries of vectors, in magnitude."""
        some = self._layout is None or rows.shape[-1]
        largest = rows.abs().amax(-1) if some else rows.new_zeros(rows.shape[:-1])
        if self._layout is not None:
            largest = self._layout.sums.gathered(largest).amax(0)
        return largest.tolist() if rows.ndim == 1 else largest.to("cpu", torch.float64)

    def measure(self, v: Any) -> Any:
        """A vector, or, where others have entries of it too, its length in its place."""
        if self._layout is None or v is None:
            return v
        return v.new_tensor(self.norms(v), dtype=torch.float64)

    def leaf_sums(self, pieces: Sequence[Tensor]) -> Tensor:
        """The sums over the entries of each leaf, in double precision: the first dimension."""
        own = [part.sum(-1, dtype=torch.float64) for part in pieces]
        if self._layout is None:
            return torch.stack(own)
        terms = [part * counts for part, counts in zip(own, self._layout.counts, strict=True)]
        return self._layout.sums.gathered(torch.stack(terms)).sum(0)

    def orthogonalized(
        self, w: Tensor, bases: Sequence[Tensor], negligible: Number
    ) -> tuple[Tensor, Tensor, Number]:
        """Vectors without their parts in orthonormal bases: Gram and Schmidt, again where much
        cancels (Daniel, Gragg, Kaufman, Stewart 1976, doi:10.1090/S0025-5718-1976-0431641-8).

        First their parts in the first of the bases, last their lengths.
        """
        norm, parts = self.norms(w), list[Tensor]()
        for _ in range(3):
            before = norm
            with as_given(w):
                for number, basis in enumerate(bases):
                    part = self.sums(_parts, basis, w).to(w)
                    w = combined(w, basis, part, -1)
                    parts += [] if number else [part.to("cpu", torch.float64)]
            norm = self.norms(w)
            if not any_true(((norm > 0.5 * before) | (norm <= negligible)) ^ True):
                break
        return functools.reduce(operator.add, parts), w, norm

    def orthonormal(self, rows: Tensor) -> Tensor:
        """Orthonormal rows that span what the given ones do; without those that add nothing, where
        processes share the entries.
        """
        if self._layout is None:
            return torch.linalg.qr(rows.T)[0].T.contiguous()
        made, count = torch.empty_like(rows), 0
        for row in rows:
            least = 10 * torch.finfo(row.dtype).eps * self.norms(row)
            _, w, norm = self.orthogonalized(row, [made[:count]], least)
            if norm > least:
                torch.div(w, norm, out=made[count])
                count += 1
        return made[:count]

    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner products of all rows with all others."""
        return self.sums(lambda a, b: a @ b.T, a, b)

    def draw(
        self, shape: Sequence[int], like: Tensor, probes: Probes, generator: torch.Generator | None
    ) -> Tensor:
        """Random vectors, as `_vectors.draw` has them: the same, whatever processes share them."""
        if self._layout is None:
            return draw(shape, like, probes, generator)
        rows = like.new_empty(tuple(shape))
        for row in rows.view(-1, rows.shape[-1]):
            self._layout.fill(row, lambda whole: draw(whole, like, probes, generator))
        return rows


def of(operator: LinearOperator) -> Inner:
    """The inner products of the vectors that an operator multiplies."""
    layout = operator._domain.layout
    return ALONE if layout is None else Inner(layout)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    few = len(a) <= FEW and [torch.dot(x, y) for x, y in zip(a, b, strict=True)]
    return torch.stack(few) if few else (a * b).sum(1)


def _parts(basis: Tensor, w: Tensor) -> Tensor:
    return basis @ w if w.ndim == 1 else (basis @ w.unsqueeze(-1)).squeeze(-1)


ALONE = Inner()
norms = ALONE.norms


def combined(start: Tensor, basis: Tensor, parts: Tensor, sign: int = 1) -> Tensor:
    """Vectors, and beyond them those with such parts in a basis."""
    if start.ndim == 1:
        return torch.addmv(start, basis.T, parts, alpha=sign)
    return torch.baddbmm(start.unsqueeze(1), parts.unsqueeze(1), basis, alpha=sign).squeeze(1)


# --- numbers of systems; conditions on them are bools of Python, or lines: `^ True` denies both ---


def listed(numbers: Number) -> list[Any]:
    """Numbers as a list."""
    values = numbers.tolist() if isinstance(numbers, Tensor) else numbers
    return values if values.__class__ is list else [values]


def number(values: list[Any], like: Tensor) -> Number:
    """A list as numbers that go with such vectors."""
    return values[0] if like.ndim == 1 else torch.tensor(values, dtype=torch.float64, device="cpu")


def zeros(like: Tensor) -> Tensor:
    """Zeros like vectors; one vector is replaced where others are written to,
    and takes no memory.
    """
    return like.new_zeros(()).expand_as(like) if like.ndim == 1 else torch.zeros_like(like)


def column(numbers: Number, rows: Tensor) -> Number:
    """Numbers as what goes with such vectors."""
    return numbers if rows.ndim == 1 else numbers.to(rows).unsqueeze(1)


def masked_where(where: Number, a: Any, b: Any) -> Any:
    """Numbers, or vectors, of the one or the other."""
    if where is True or where is False:
        return a if where else b
    rows = isinstance(b, Tensor) and b.ndim == 2
    return torch.where(where.to(b.device).unsqueeze(1) if rows else where, a, b)


def maximum(a: Number, b: Number) -> Number:
    """The larger number of two."""
    return masked_where(b > a, b, a)


def any_true(where: Number) -> bool:
    """Whether something is true of a system."""
    return where if where is True or where is False else bool(where.any())


def selected(values: Any, at: list[int], count: int) -> Any:
    """The values at some places of so many; without a copy where these are all."""
    if len(at) == count:
        return values
    return values[at] if isinstance(values, Tensor) else [values[place] for place in at]


# --- systems side by side, by one method ----------------------------------------------------------


class Systems(NamedTuple):
    """Linear systems that are solved side by side.

    Attributes:
        product: A v; it rounds by `eps`.
        inverse: M v, with an approximate inverse, if there is one.
        eps: The precision of products.
        scale: That of a Neumann series.
        room: How many vectors GMRES keeps.
        inner: The inner products of its vectors.
    """

    product: Product
    inverse: Product | None
    eps: float
    scale: float
    room: int
    inner: Inner = ALONE


@dataclass
class Solutions:
    """The end of a run of a method, or of several, for each system.

    Attributes:
        x: The solutions.
        status: How they ended; of one run, "converged" is by its own recurrence.
        size: The lengths of the residuals, by the recurrence.
        taken: How many products each took.
        direction: Along which curvature is negative, where it was found to be.
    """

    x: Tensor
    status: list[Status]
    size: list[float]
    taken: list[int]
    direction: list[Tensor | None]

    @classmethod
    def of(cls, count: int, x: Tensor) -> Solutions:
        """Solutions of so many systems, of which nothing is known."""
        return cls(x, ["running"] * count, [0.0] * count, [0] * count, [None] * count)

    def put(self, at: list[int], x: Tensor) -> None:
        """Take some of them."""
        if len(at) == len(self.status):
            self.x = x
        elif at:
            self.x[at] = x

    def running(self, at: list[int], now: Solutions, units: list[float]) -> Solutions:
        """A copy in which some of these go on from there, as far as they are now, in units of
        their own.
        """
        so_far = replace(self, x=self.x.clone(), status=[*self.status], size=[*self.size])
        so_far.put(at, selected(so_far.x, at, len(self.status)) + now.x)
        for place, size in zip(at, now.size, strict=True):
            so_far.status[place], so_far.size[place] = "running", size / units[place]
        return so_far


class Block(ABC):
    """Systems on their way, by one method.

    Attributes:
        numbers: Which of the systems these are.
        tolerance: They have converged where |r| is at most that.
        left: How many steps each may take.
        x: The iterates.
        size: The lengths of their residuals.
        direction: The last directions, where the method has them.
    """

    size: Number
    direction: Tensor | None = None

    def __init__(
        self,
        systems: Systems,
        b: Tensor,
        numbers: list[int],
        tolerance: list[float],
        left: list[int],
    ) -> None:
        self._systems, self._inner = systems, systems.inner
        self.numbers = numbers
        self.tolerance, self.left = number(tolerance, b), number(left, b)
        self._places, self._steps = [*range(len(numbers))], 0
        self.x = zeros(b)
        self._end = Solutions.of(len(numbers), zeros(b))
        self._begin(b)

    @abstractmethod
    def _begin(self, b: Tensor) -> None:
        """Prepare the first step, from zero, with these right-hand sides."""

    @abstractmethod
    def step(self) -> dict[Status, Number]:
        """A product for each system; which have ended, and how: the first that is said counts."""

    def solution(self, at: list[int]) -> Tensor:
        """The iterates of some."""
        return self._some(self.x, at)

    def spent(self, over: Number) -> dict[Status, Number]:
        """The solutions of systems whose products are spent."""
        return {"budget": over}

    def run(self, show: Callable[[], None] | None) -> Solutions:
        """Steps, until each system has ended, or spent what is left to it; `show` looks on,
        if anybody does.
        """
        ends = self.spent(self.left <= 0)
        while True:
            over = functools.reduce(operator.or_, ends.values())
            if any_true(over):
                gone = listed(over)
                self._put([i for i, it in enumerate(gone) if it], ends)
                if all(gone):
                    return self._end
                self._keep([i for i, it in enumerate(gone) if not it])
            ends = self.step()
            self._steps += 1
            if show is not None:
                show()
            ends |= self.spent(self.left <= self._steps)

    def so_far(self) -> Solutions:
        """The present state of all systems."""
        self._put([*range(len(self._places))], {})
        return self._end

    def _put(self, at: list[int], ends: dict[Status, Number]) -> None:
        """Put some into their places; by who ended how."""
        sizes, places = listed(self.size), self._places
        self._end.put([places[i] for i in at], self.solution(at))
        for i in at:
            self._end.size[places[i]] = sizes[i]
            self._end.taken[places[i]] = self._steps
        for status, which in reversed(ends.items()):
            for i in [i for i, it in enumerate(listed(which)) if it]:
                self._end.status[places[i]] = status
                if status == "negative curvature":
                    self._end.direction[places[i]] = self._some(self.direction, [i]).reshape(-1)

    def _keep(self, at: list[int]) -> None:
        """Let some systems alone go on."""
        count = len(self._places)
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, list)):
                setattr(self, name, selected(value, at, count))

    def _some(self, values: Any, at: list[int]) -> Any:
        return selected(values, at, len(self._places))

    def _inverse(self, r: Tensor, at: list[int] | None = None) -> Tensor:
        numbers = self.numbers if at is None else self._some(self.numbers, at)
        return r if self._systems.inverse is None else self._systems.inverse(r, numbers)

    def _form(self, r: Tensor, z: Tensor) -> Number:
        """r'Mr, with z = M r.

        Raise where that shows, by more than rounding, that M is not positive definite.
        """
        forms, eps = self._inner.dots(r, z), self._systems.eps
        if any_true(forms <= 0) and any_true(
            (forms <= -10 * eps * self._inner.norms(r) * self._inner.norms(z))
            & (self._inner.norms(r) > 0)
        ):
            raise InputError(
                "preconditioner is not positive definite (r'Mr <= 0 for a residual r). Give one "
                "that is, such as hodiff.nystrom or a positive diagonal, or use method='gmres', "
                "which allows any."
            )
        return forms


class ConjugateGradients(Block):
    """Conjugate gradients, for positive definite matrices: Saad (2003), Iterative Methods for
    Sparse Linear Systems, algorithm 9.1; without a preconditioner 6.18.

    Different from there:

    1. A curvature d'Ad <= 0, up to rounding, ends it with the best iterate until then.
    2. |d|^2, by which rounding is judged, has a recurrence of its own: r is orthogonal to d.
    """

    def _begin(self, b: Tensor) -> None:
        self._r, self._best = b, self.x
        self._d, square = self._inverse(b), self._inner.dots(b, b)
        self._rz = square if self._d is b else self._form(b, self._d)
        self._length = square if self._d is b else self._inner.dots(self._d, self._d)
        self._largest = 0.0
        self.size = self._least = square**0.5

    def step(self) -> dict[Status, Number]:
        """Along d, to where the residual is orthogonal to it; who goes down ends with the best."""
        self.direction = d = self._d
        image = self._systems.product(d, self.numbers)
        curvature, length = self._inner.dots(d, image), self._length
        # Along a null vector the curvature is what rounding leaves of the largest, and steps
        # towards it are huge.
        self._largest = maximum(self._largest, (self._inner.dots(image, image) / length) ** 0.5)
        down = (curvature > self._systems.eps * self._largest * length) ^ True
        lost = any_true(down)
        step = self._rz / (masked_where(down, math.inf, curvature) if lost else curvature)
        self.x = axpy(self.x, step, d)  # line 4 of algorithm 9.1
        self._r = axpy(self._r, -step, image)  # line 5
        square = self._inner.dots(self._r, self._r)
        self.size = square**0.5
        better = self.size < self._least
        self._best = masked_where(better, self.x, self._best)
        self._least = masked_where(better, self.size, self._least)
        if lost:
            self.x = masked_where(down, self._best, self.x)
            self.size = masked_where(down, self._least, self.size)
        z, before = self._inverse(self._r), self._rz
        self._rz = square if z is self._r else self._form(self._r, z)
        ahead = self._rz / before  # line 7
        self._d = axpy(z, ahead, d)  # line 8
        self._length = (
            square + ahead**2 * length if z is self._r else self._inner.dots(self._d, self._d)
        )
        converged = self.size <= self.tolerance
        return {"negative curvature": down, "converged": converged, "stagnation": self._rz <= 0}


class MINRES(Block):
    """The minimal residual method, for symmetric matrices: Paige and Saunders (1975),
    doi:10.1137/0712047; with a preconditioner Choi, Paige and Saunders (2011),
    doi:10.1137/100787921.

    Different from there:

    1. `size` is of the residual in the preconditioner's norm; the caller looks at the true one.
    2. It ends where the Krylov space is exhausted; or where x, along a null vector, has grown so
       that A x rounds like the residual.
    """

    def _begin(self, b: Tensor) -> None:
        self._r1 = self._r2 = b
        self._y = self._inverse(b)
        self._beta = self._phi = self._form(b, self._y) ** 0.5
        self._beta_old = self._epsilon = self._dbar = self._sn = self._scale = 0 * self._beta
        self._cs = -1.0
        self._w = self._w_old = self.x
        self.size = self._inner.dots(b, b) ** 0.5
        self._unit = self.size / self._beta

    def step(self) -> dict[Status, Number]:
        """One more vector of Lanczos', and the rotation that it takes."""
        v = self._y / column(self._beta, self._y)
        y = self._systems.product(v, self.numbers)
        if self._r1 is not self._r2:
            y = axpy(y, -self._beta / self._beta_old, self._r1)
        alpha = self._inner.dots(v, y)
        y = axpy(y, -alpha / self._beta, self._r2)
        self._r1, self._r2 = self._r2, y
        self._y = self._inverse(y)
        self._beta_old, self._beta = self._beta, maximum(0.0, self._form(y, self._y)) ** 0.5
        self._scale = maximum(maximum(self._scale, abs(alpha)), self._beta)
        self._rotate(v, alpha)
        left = abs(self._phi)
        self.size = left * self._unit
        rounding = self._systems.eps * self._scale
        end = (self._beta <= 10 * rounding) | (
            rounding * self._inner.dots(self.x, self.x) ** 0.5 > 0.1 * left
        )
        return {"converged": self.size <= self.tolerance, "stagnation": end}

    def _rotate(self, v: Tensor, alpha: Number) -> None:
        """Make one more column of Lanczos' matrix triangular, and move x along its direction."""
        epsilon_old, delta = self._epsilon, self._cs * self._dbar + self._sn * alpha
        gbar = self._sn * self._dbar - self._cs * alpha
        self._epsilon, self._dbar = self._sn * self._beta, -self._cs * self._beta
        tiny = torch.finfo(v.dtype).tiny  # of a zero matrix
        gamma = maximum(
            maximum(tiny, self._systems.eps * 1e-3 * self._scale), (gbar**2 + self._beta**2) ** 0.5
        )
        self._cs, self._sn = gbar / gamma, self._beta / gamma
        step, self._phi = self._cs * self._phi, self._sn * self._phi
        w = axpy(axpy(v, -epsilon_old, self._w_old), -delta, self._w) / column(gamma, v)
        self._w_old, self._w = self._w, w
        self.x = axpy(self.x, step, w)


class Neumann(Block):
    """The first terms of the series x = Σ (I - M A / s)^j M b / s: with no product M b / s, with
    each one term more.

    The residual is that of the sum before the last term.
    """

    def _begin(self, b: Tensor) -> None:
        self._r = b
        self.size = self._first = self._inner.dots(b, b) ** 0.5
        self.x = self._term = self._inverse(b) / self._systems.scale

    def step(self) -> dict[Status, Number]:
        """The next term, unless nothing is left of the residual."""
        self._r = self._r - self._systems.product(self._term, self.numbers)
        self.size = self._inner.dots(self._r, self._r) ** 0.5
        done = self.size <= self.tolerance
        self._term = self._inverse(self._r) / self._systems.scale
        self.x = masked_where(done, self.x, self.x + self._term)
        return {"converged": done}

    def spent(self, over: Number) -> dict[Status, Number]:
        """The sums of terms, of which those that have grown add up to nothing."""
        return {"divergence": over & (self.size > self._first), "budget": over}


SLOW = 0.999
"""A whole basis that leaves more of the residual than this has found no way down."""


class GMRES(Block):
    """The least |r| over the Krylov space of A M, anew every `room` steps: Saad (2003), algorithm
    9.5, with the rotations of section 6.5.3; r is the system's own.

    Different from there:

    1. A vector of the basis V is made orthogonal to all before at once, and again where much
       cancels, in place of one after the other (lines 4 to 7).
    2. A column of the Hessenberg matrix H that is, up to rounding, a combination of those before
       has no part in the solution.
    3. At a restart the residual is what the basis says, without a product.
    """

    def _begin(self, b: Tensor) -> None:
        shape = (*b.shape[:-1], self._systems.room, b.shape[-1])
        self._basis = empty("solve: the vectors that GMRES keeps", shape, b, "Give restart=.")
        self._restart(b)

    def _restart(self, r: Tensor) -> None:
        self._count = 0
        self.size = self._before = self._inner.norms(r)
        self._scale = 0 * self.size
        torch.div(r, column(self.size, r), out=self._basis[..., 0, :])
        self._least = [LeastSquares(size, self._systems.eps) for size in listed(self.size)]

    def step(self) -> dict[Status, Number]:
        """One more vector of the basis, and nothing else that keeps it; a new basis,
        where that is full.
        """
        eps, before = self._systems.eps, self._before
        self._count += 1
        parts, w, norm = self._inner.orthogonalized(
            self._systems.product(
                self._inverse(self._basis[..., self._count - 1, :]), self.numbers
            ),
            [self._basis[..., : self._count, :]],
            eps * self._scale,
        )
        columns = torch.atleast_2d(parts).tolist()
        most = number([max(map(abs, column)) for column in columns], w)
        self._scale = maximum(maximum(self._scale, most), norm)
        exhausted = norm <= 10 * eps * self._scale
        length = column(masked_where(exhausted, math.inf, norm), w)
        w = torch.div(
            w,
            length,
            out=w if self._count == self._systems.room else self._basis[..., self._count, :],
        )
        systems = zip(self._least, columns, listed(masked_where(exhausted, 0.0, norm)), strict=True)
        self.size = number([least.append([*column, end]) for least, column, end in systems], w)
        if self._count == self._systems.room:
            everywhere, rests = (
                [*range(len(self._places))],
                [least.solution()[1] for least in self._least],
            )
            self.x = self.solution(everywhere)
            w.mul_(column(number([rest.pop() for rest in rests], w), w))
            self._restart(self._combined(w, rests, everywhere))
            exhausted = exhausted | ((self.size <= SLOW * before) ^ True)
        return {"converged": self.size <= self.tolerance, "stagnation": exhausted}

    def _combined(self, start: Tensor, coordinates: list[list[float]], at: list[int]) -> Tensor:
        """The vectors with these coordinates, each in the basis of one of some systems,
        beyond where they start.
        """
        basis = self._some(self._basis[..., : len(coordinates[0]), :], at)
        lines = torch.tensor(coordinates, dtype=basis.dtype, device=basis.device)
        with as_given(basis):
            return combined(start, basis, lines.reshape(basis.shape[:-1]))

    def solution(self, at: list[int]) -> Tensor:
        """The iterates of some."""
        if not self._count:
            return super().solution(at)
        y, x = [least.solution()[0] for least in self._some(self._least, at)], super().solution(at)
        if self._systems.inverse is None:
            return self._combined(x, y, at)
        return x + self._inverse(self._combined(zeros(x), y, at), at)


class LeastSquares:
    """min |e - H y|, e = (size, 0, 0, ...), H of Hessenberg form; by columns and rotations."""

    def __init__(self, size: float, eps: float) -> None:
        self._right = [size]
        self._eps = eps
        self._largest = 0.0
        self._columns: list[list[float]] = []
        self._rotations: list[tuple[float, float]] = []

    def append(self, column: list[float]) -> float:
        """Take one more column, one entry longer than the last, and give the least |e - H y|."""
        for i, (c, s) in enumerate(self._rotations):
            a, b = column[i : i + 2]
            column[i : i + 2] = c * a + s * b, c * b - s * a
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

    def solution(self) -> tuple[list[float], list[float]]:
        """The y, zero at a column that does not count, and e - H y."""
        y, rest = [0.0] * len(self._columns), [*self._right]
        for i, column in reversed([*enumerate(self._columns)]):
            if self._counts(column[i]):
                y[i] = rest[i] / column[i]
                rest[: i + 1] = [b - y[i] * a for a, b in zip(column, rest, strict=False)]
        for i, (c, s) in reversed([*enumerate(self._rotations)]):
            a, b = rest[i : i + 2]
            rest[i : i + 2] = c * a - s * b, s * a + c * b
        return y, rest
