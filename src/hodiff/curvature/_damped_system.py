"""The damped linear system of least squares: J in factors or in rows; its solution by Cholesky."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.calculus._factors import Outer, Stack
from hodiff.curvature import _memory
from hodiff.errors import InputError

DOUBLE = torch.float64

HELD = 2**24
"""Bytes of a wide J up to which its rows take less time than its factors."""

NARROW = 512
"""Up to so many columns a tall J lies column by column, for its products; more fill slowly."""

ROUNDS, LOOSE = 10, 0.1
"""How often the damping of a radius is sought, and how far the length may be from it,
relatively.
"""


class DampedStep(NamedTuple):
    """The step that the linear model proposes.

    Attributes:
        change: The step, flat.
        moved: How it changes the residuals, J d.
        norm: Its length.
        decrease: By how much the model falls.
        residual: How exactly the damped equations are solved, relatively.
    """

    change: Tensor
    moved: Tensor
    norm: float
    decrease: float
    residual: float


class DampedSystem:
    """Residuals r and their Jacobian J, in float64, and the steps of the damped linear model.

    J is held where it is small, or has more rows than columns and fits. Else it stays in factors,
    for each function the rows by each leaf.

    Attributes:
        r: The residuals.
        loss: Half the sum of their squares.
        gradient: J'r.
        in_samples: Whether it is solved with J J', else with J'J.
        norms: Those of the columns of J.
        scale: The largest of their squares.
        weights: What damping is multiplied by, one number for all columns or one for each; they
            weigh the squares of a step in its `norm` too.
    """

    weights: Tensor | float = 1.0
    _damping = math.nan

    def __init__(self, outputs: Sequence[Tensor], columns: int, budget: float) -> None:
        self.r = flat(outputs, outputs[0].device)
        self.loss = float(self.r @ self.r) / 2
        rows = len(self.r)
        side = min(rows, columns)
        if 16 * side**2 > budget:
            raise InputError(
                f"residuals: a step of {rows:,} residuals and {columns:,} parameters takes a "
                f"matrix {side:,} x {side:,} and its factor in float64, "
                f"{_memory.readable(16 * side**2)}, "
                f"but memory_budget is {_memory.readable(budget)}. Give fewer points a step."
            )
        self.in_samples = rows <= columns
        size = 8 * rows * columns
        self._factored = size > (HELD if self.in_samples else budget)
        self._parts = list[list[Outer]]()
        kept = 0 if self._factored else rows
        tall = columns <= NARROW and not self.in_samples
        self._J = self.r.new_empty(columns, kept).T if tall else self.r.new_empty(kept, columns)
        self._block_rows = max(1, int(min(budget, size) / 4) // max(1, 8 * columns))
        self._begin = 0

    # --- J

    def add(self, rows: list[Outer]) -> None:
        """Take the rows of one function's residuals, by each leaf."""
        if self._factored:
            self._parts += [[of.double(self.r.device) for of in rows]]
            return
        begin, column = self._begin, 0
        self._begin += rows[0].sizes.numel()
        block = self._J[begin : self._begin]
        for of in rows:
            width, part = of.shape.numel(), of.rows()
            block[:, column : column + width].view(part.shape).copy_(part)
            column += width

    def closed(self) -> DampedSystem:
        """The system, once all rows are in."""
        if self._factored:
            self._stack = Stack(self._parts)
        self.gradient = self._pull(self.r)
        if not bool(self.gradient.isfinite().all()):
            raise InputError(
                "residuals: the derivative is not finite at the current parameters (a square root "
                "of 0, a norm of 0?). Nothing was changed."
            )
        if not self.in_samples:
            self._matrix = self._normal() if self._factored else _lower_product(self._J.T)
            squares = self._matrix.diagonal()
        elif self._factored:
            self._matrix, squares = self._stack.gram(), self._stack.squares()
        else:
            self._matrix, squares = _lower_product(self._J), self._J.square().sum(0)
        self.norms, self.scale = squares.sqrt(), float(squares.max()) if len(squares) else 0.0
        return self

    def _normal(self) -> Tensor:
        """J'J, by some rows at a time."""
        matrix = self.r.new_zeros(len(self.gradient), len(self.gradient))
        for rows in self._parts:
            samples, numbers = rows[0].sizes
            step = max(1, self._block_rows // numbers)
            for start in range(0, samples, step):
                some = [of[start : start + step].rows().flatten(2).flatten(0, 1) for of in rows]
                block = torch.cat(some, 1)
                matrix.addmm_(block.T, block)
        return matrix

    def _push(self, change: Tensor) -> Tensor:
        """The change of the residuals by a step in the linear model, J d."""
        return self._stack.push(change) if self._factored else self._J @ change

    def _pull(self, weights: Tensor) -> Tensor:
        """The sum of the rows of J, weighed, J'u."""
        return self._stack.pull(weights) if self._factored else self._J.T @ weights

    @property
    def jacobian(self) -> Tensor | None:
        """J, where it is held."""
        return None if self._factored or self.in_samples else self._J

    # --- solving

    def cosine(self) -> float:
        """The largest cosine between the residuals and a column of J: 0 at a minimum."""
        size = self.norms * math.sqrt(2 * self.loss)
        # A column of nothing, or of squares that underflow, has no direction.
        return float(torch.where(size > 0, self.gradient.abs() / size, 0.0).max())

    def norm(self, change: Tensor) -> float:
        """The length of a step, in the units of the weights."""
        return float((self.weights * change**2).sum().sqrt())

    def damping_of(self, radius: float, damping: float, least: float) -> float:
        """The damping of the step that is as long as the radius, to a tenth (Moré); or the least.

        By Newton's method for the inverse of the length, from the damping given.
        """
        lower, upper = 0.0, math.inf
        for _ in range(ROUNDS):
            self._factor(damping)
            solved = self._solve(self.r if self.in_samples else self.gradient)
            change = self._pull(solved) if self.in_samples else solved
            part = self.norm(change) / radius
            if part > 1 + LOOSE:
                lower = damping
            elif part < 1 - LOOSE and damping > least:
                upper = damping
            else:
                break
            again = self._solve(self.weights * solved)
            fall = (self.weights * change) @ (self._pull(again) if self.in_samples else again)
            damping = max(
                least, damping + (part - 1) * (part * radius) ** 2 / (float(fall) or math.inf)
            )
            if not lower < damping < upper:  # as from far, where J has not full rank
                damping = (
                    10 * lower if upper == math.inf else math.sqrt(max(lower, upper / 1e6) * upper)
                )
        return damping

    def step(self, damping: float, drift: Tensor | None) -> DampedStep:
        """The minimum of |J d + r|^2 + damping |d - drift|^2, of weighted entries."""
        self._factor(damping)
        added = damping * self.weights
        if drift is None:
            change, moved, residual = self._solved(self.r, added)
        else:
            pushed = self._push(drift)
            change, moved, residual = self._solved(self.r + pushed, added)
            change, moved = change + drift, moved + pushed
        decrease = -float(change @ self.gradient + moved @ moved / 2)
        return DampedStep(change, moved, self.norm(change), decrease, residual)

    def bend(self, second: Tensor) -> Tensor:
        """The change that undoes a term of second order in the residuals,
        as the last step would.
        """
        if self.in_samples:
            return -self._pull(self._solve(second))
        return -self._solve(self._pull(second))

    def _solved(self, b: Tensor, damping: Tensor | float) -> tuple[Tensor, Tensor, float]:
        """The minimum d of |J d + b|^2 + damping |d|^2, J d, and how exactly it is solved, refined
        once. The products with J are what costs, where one side of it is short.
        """
        if self.in_samples:
            y = self._solve(-b)
            y = y - self._solve(b + self._push(self._pull(y)) + damping * y)
            change = self._pull(y)
            moved = self._push(change)
            rest = b + moved + damping * y
        else:
            slope = self.gradient if b is self.r else self._pull(b)
            change = self._solve(-slope)
            # of J'(J d + b) the sum comes first, for it is small
            rest = self._pull(self._push(change) + b) + damping * change
            change = change - self._solve(rest)
            moved = self._push(change)
            rest = self._pull(moved + b) + damping * change
            b = slope
        size = float(b.norm())
        return change, moved, float(rest.norm()) / size if size else 0.0

    def _factor(self, damping: float) -> None:
        """Have what solves the equations that are damped so."""
        if damping != self._damping:
            self._damping, self._solve = damping, self._solver(damping * self.weights)

    def _solver(self, damping: Tensor | float) -> Callable[[Tensor], Tensor]:
        """The solver of the damped equations, the diagonal divided out;
        damped more where it must.
        """
        while True:
            damped = self._matrix.clone()
            damped.diagonal().add_(damping)
            d = damped.diagonal().clamp(min=torch.finfo(DOUBLE).tiny).rsqrt()
            factor, failed = torch.linalg.cholesky_ex(damped.mul_(d).mul_(d.unsqueeze(1)))
            if not failed:
                return partial(_by_factor, factor, d)
            damping = 10 * damping + 1e-16 * self.weights


def _by_factor(factor: Tensor, d: Tensor, b: Tensor) -> Tensor:
    """The solution of L L' x / d d' = b, in a tenth of the time of `torch.cholesky_solve`."""
    half = torch.linalg.solve_triangular(factor, (d * b).unsqueeze(1), upper=False)
    return d * torch.linalg.solve_triangular(factor.T, half, upper=True).squeeze(1)


def _lower_product(J: Tensor) -> Tensor:
    """J J', of which only the lower half is needed: the blocks above the diagonal are zero."""
    product, size = J.new_zeros(len(J), len(J)), max(64, -(-len(J) // 4))
    for start in range(0, len(J), size):
        stop = min(start + size, len(J))
        torch.mm(J[start:stop], J[:stop].T, out=product[start:stop, :stop])
    return product


def flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).to(device, DOUBLE) for tensor in tensors])
