"""Damped steps of least squares: the linear model of residuals, and the two rules that choose the
damping and the length.

The Jacobian stays in factors or is held in rows; the damped equations are solved in the space of
samples or of parameters, by Cholesky and one refinement.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core._graph import OutputGraph
from hodiff.calculus._factors import Outer, Stack
from hodiff.curvature import _memory
from hodiff.curvature._records import LeastSquaresRecord
from hodiff.errors import InputError

# --- the linear model -----------------------------------------------------------------------------


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
        damping: Its damping.
    """

    change: Tensor
    moved: Tensor
    norm: float
    decrease: float
    residual: float
    damping: float


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
        return DampedStep(change, moved, self.norm(change), decrease, residual, damping)

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


# --- the two rules --------------------------------------------------------------------------------


ROUNDING = 1e-12
"""Decreases below this part of the loss are rounding: a step is then judged by its length."""
DEVIATIONS = 4
"""How many standard deviations of the loss, by rounding of the residuals, are rounding."""
SHORTER = 0.9
"""Steps below rounding go on while each is shorter than the last by this factor."""
SUFFICIENT, POOR, GOOD = 1e-4, 0.25, 0.75
"""What part of the promised decrease a step must keep to be taken; for the radius to stay;
for it to grow.
"""
CUT = 0.25
"""Of a poor step, the part that is the next radius."""
SHORT = 0.1
"""The length of the trial that shows the residuals' second order, beside the first length."""
BENT = 0.25
"""The most that a path turns aside, as a part of its length:
what is known of second order holds no further.
"""
LOWER_FROM, RAISE_BELOW = 0.25, 0.125
"""The lengths of steps from which the damping falls, and below which it grows."""
FALL, GROWTH, AFTER_FAILURE = 0.1, 4.0, 100.0
FREER = 100.0
"""How many times less damping is tried before a minimum is said to be reached."""
FIRST = 1e-3
"""The first damping."""
LEAST, MOST = 1e-13, 1e8
"""The bounds of the search's damping."""
NONE = 1e-30
"""Less damping than this holds no parameter back."""
ROUNDED, SOLVED = 1e-3, 1e-6
"""A residual of equations whose solution is rounding, as where rows of J depend on each other and
damping is next to nothing; and that up to which they are then solved.
"""


State = dict[str, Any]
"""What a step leaves to the next: damping, scale, radius, the columns' largest norms,
the last length and norm.
"""


class Trial(NamedTuple):
    """Parameters after a step, and by how much the loss is smaller there; -inf: not finite."""

    leaves: list[Tensor]
    gain: float
    length: float = 1.0
    r: Any = None


class StepRule:
    """A rule that chooses a step by the residuals at other parameters.

    Attributes:
        leaves: The parameters after the step that it took.
    """

    def __init__(
        self,
        graph: OutputGraph,
        system: DampedSystem,
        state: State,
        damping: float | None,
        least: float | None,
        tries: int,
    ) -> None:
        self.graph, self.system = graph, system
        self.state, self.tries = state, tries
        self.damping, self.least = damping, least
        self.number = 0
        self.leaves: list[Tensor] = []
        self.start = flat(graph.leaves, system.r.device)
        state.setdefault("damping", FIRST if damping is None else damping)

    @abstractmethod
    def take(self, drift: Tensor | None) -> LeastSquaresRecord:
        """Choose a step, or none, with a part of the last one added before it is solved for."""

    def at(self, change: Tensor) -> Trial:
        """The residuals after a step."""
        self.number += 1
        leaves = [
            part.reshape(leaf.shape).to(leaf)
            for part, leaf in zip(
                (self.start + change).split([leaf.numel() for leaf in self.graph.leaves]),
                self.graph.leaves,
                strict=True,
            )
        ]
        self.graph.context.random.restore()
        r, new = self.system.r, flat(self.graph.context.at(leaves), self.start.device)
        gain = float((r - new) @ (r + new)) / 2  # not a difference of sums, which would round
        return Trial(leaves, gain if math.isfinite(gain) else -math.inf, r=new)

    def outcome(
        self, step: DampedStep, trial: Trial, *, accepted: bool, converged: bool = False
    ) -> LeastSquaresRecord:
        """The record of a step that is taken, or refused."""
        system, length = self.system, trial.length
        promised = step.decrease * length * (2 - length)
        self.leaves = trial.leaves
        return LeastSquaresRecord(
            system.loss,
            trial.gain if accepted else 0.0,
            trial.gain / promised if promised > 0 else math.nan,
            step.damping,
            length,
            accepted,
            converged,
            system.cosine(),
            step.residual,
            self.number,
            "samples" if system.in_samples else "parameters",
            [] if system.jacobian is None else [system.jacobian],
        )

    def rounding(self) -> float:
        """A change of the loss that rounding makes, of the residuals or of the parameters."""
        loss, rows = self.system.loss, max(1, len(self.system.r))
        eps = max(torch.finfo(leaf.dtype).eps for leaf in self.graph.leaves)
        # About what the residuals round by: they may be small differences of large terms.
        change = eps * float((self.system.norms * self.start).norm())
        return max(ROUNDING * loss, change**2, DEVIATIONS * change * math.sqrt(2 * loss / rows))

    def polished(self, step: DampedStep, trial: Trial) -> LeastSquaresRecord | None:
        """The result of a step below rounding, taken while steps shorten; None: a larger one."""
        least, state = self.rounding(), self.state
        if step.decrease > least or abs(trial.gain) > least:
            return None
        still = all(map(torch.equal, trial.leaves, self.graph.leaves))
        if still or not 0 < step.norm < SHORTER * state.get("norm", math.inf):
            return self._freer(step, least)
        state["norm"] = step.norm
        return self.outcome(step, trial, accepted=True)

    def _freer(self, step: DampedStep, least: float) -> LeastSquaresRecord:
        """Take a step of less damping that gains more than rounding; none: the loss is at its
        minimum.

        The step in hand promises nothing: for there is nothing to gain, or since its damping holds
        back parameters that are large beside the others.
        """
        damping, floor = step.damping, self.least or NONE
        while damping > floor and self.number < self.tries:
            damping = max(floor, damping / FREER)
            freer = self.system.step(damping, None)
            trial = self.at(freer.change) if freer.decrease > least else None
            if trial is not None and trial.gain > least:
                self.state["damping"] = damping
                self.state["norm"] = self.state["radius"] = freer.norm
                return self.outcome(freer, trial, accepted=True)
        return self.outcome(step, Trial([], 0.0), accepted=False, converged=True)


class GainRatio(StepRule):
    """Steps as long as a radius, which follows what came true of the promised decrease (Moré)."""

    def take(self, drift: Tensor | None) -> LeastSquaresRecord:
        """Take a step as long as the radius, bent where little of the promise comes true;
        else a shorter one.
        """
        system, state = self.system, self.state
        if self.damping is None and self.start.any():
            state.setdefault("radius", system.norm(self.start))
        while True:
            if "radius" in state:
                state["damping"] = system.damping_of(
                    state["radius"], state["damping"], self.least or NONE
                )
            step = system.step(state["damping"], drift)
            rounding = system.in_samples and step.residual > ROUNDED
            while rounding and step.residual > SOLVED:
                state["damping"] = 10 * step.damping + 1e-16
                step = system.step(state["damping"], drift)
            trial = self.at(step.change)
            polished = self.polished(step, trial) if self.number == 1 else None
            if polished:
                return polished
            if -math.inf < trial.gain < GOOD * step.decrease and self.number < self.tries:
                bend = system.bend(trial.r - system.r - step.moved)
                if system.norm(bend) <= BENT * step.norm:
                    trial = max(trial, self.at(step.change + bend), key=lambda trial: trial.gain)
            ratio = trial.gain / step.decrease if step.decrease > 0 else -math.inf
            state.setdefault("radius", step.norm)
            if ratio < POOR:
                state["radius"] = CUT * step.norm or state["radius"]
            elif ratio > GOOD:
                state["radius"] = max(state["radius"], 2 * step.norm)
            accepted = ratio > SUFFICIENT
            if accepted or self.number >= self.tries:
                state["norm"] = step.norm if accepted else state.get("norm", math.inf)
                return self.outcome(step, trial, accepted=accepted)
            drift = None  # which may have led uphill


class PathSearch(StepRule):
    """Steps halved until the loss falls, along a path that bends as the residuals do.

    A short trial shows what they are of second order, and the bend undoes that, as far as the
    model can. It stays small beside the way ahead: a long one leads to where no model holds,
    and networks end with all their units saturated. The damping follows the length.
    """

    def take(self, drift: Tensor | None) -> LeastSquaresRecord:
        """Take the longest step of the path by which the loss falls most."""
        system, state = self.system, self.state
        damping, least = state["damping"], LEAST if self.least is None else self.least
        step = system.step(damping, drift)
        if step.decrease <= self.rounding():
            polished = self.polished(step, self.at(step.change))
            if polished:
                return polished
        length = min(1.0, 4 * state.get("length", 1.0))
        best = self.at(SHORT * length * step.change)._replace(length=SHORT * length)
        bend = torch.zeros_like(step.change)
        if best.gain > -math.inf:
            bend = system.bend((best.r - system.r - best.length * step.moved) / best.length**2)
        if best.gain <= 0:
            best = Trial([], 0.0, 0.0)
        most = BENT * step.norm / max(system.norm(bend), torch.finfo(bend.dtype).tiny)
        while self.number < self.tries and length > best.length:
            trial = self.at(length * (step.change + min(length, most) * bend))
            if trial.gain > best.gain:
                best = trial._replace(length=length)
            length /= 2
        if not best.leaves:
            state["damping"], state["length"] = min(MOST, damping * AFTER_FAILURE), 1.0
            return self.outcome(step, best, accepted=False)
        if best.length >= LOWER_FROM:
            state["damping"] = max(least, damping * FALL)
        elif best.length < RAISE_BELOW:
            state["damping"] = min(MOST, damping * GROWTH)
        state["length"], state["norm"] = best.length, step.norm
        return self.outcome(step, best, accepted=True)
