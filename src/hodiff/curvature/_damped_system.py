"""The damped linear system of least squares: the Jacobian's rows, filled in and compared; its solution by Cholesky."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff._core import _reverse
from hodiff._core._graph import OutputGraph
from hodiff._core._vectors import draw
from hodiff.calculus._per_sample import Samples, each_sample, even_weights
from hodiff.curvature._matrix import nystrom_eigenpairs
from hodiff.errors import InputError

DOUBLE = torch.float64
RANK = 100
"""How many directions of J'J are known where it is taken by products."""
LEAST = 10
"""So many of them whatever the budget."""

NARROW = 512
"""Up to so many columns a tall J lies column by column, for its products; more fill slowly."""

ROUNDS, LOOSE = 10, 0.1
"""How often the damping of a radius is sought, and how far the length may be from it, relatively."""

ITERATIONS = 100
RTOL = 1e-6
"""Of conjugate gradients; the step is refined once, which squares it."""


class DampedStep(NamedTuple):
    """What the linear model proposes.

    Attributes:
        change: The step, flat.
        moved: How it changes the residuals, J d; None where J is not kept.
        norm: Its length.
        decrease: By how much the model falls.
        residual: How exactly the damped equations are solved, relatively.
    """

    change: Tensor
    moved: Tensor | None
    norm: float
    decrease: float
    residual: float


class DampedSystem:
    """Residuals r and their Jacobian J, in float64, and the steps of the damped linear model.

    Attributes:
        r: The residuals.
        loss: Half the sum of their squares.
        gradient: J'r.
        in_samples: Whether it is solved with J J', else with J'J.
        compared: Whether all of J was held against what the whole batches give.
        norms: Those of the columns of J.
        scale: The largest of their squares.
        weights: What damping is multiplied by, one number for all columns or one for each; they weigh
            the squares of a step in its `norm` too.
    """

    weights: Tensor | float = 1.0
    _damping = math.nan

    def __init__(self, outputs: Sequence[Tensor], columns: int, budget: float) -> None:
        device = outputs[0].device
        self.r = flat(outputs, device)
        self.loss = float(self.r @ self.r) / 2
        rows = len(self.r)
        self._kept = 8 * rows * columns <= budget
        self.by_products = not self._kept and 16 * columns**2 > budget
        self._rank = min(RANK, columns, max(LEAST, int(budget / 24) // columns))
        self.in_samples = rows <= columns and self._kept
        kept = rows if self._kept else 0
        tall = not self.in_samples and columns <= NARROW
        self._J = self.r.new_empty(columns, kept).T if tall else self.r.new_empty(kept, columns)
        self._block_rows = max(1, int(budget / 4) // (8 * columns))
        self._begin, self._squares, self.compared = 0, 0.0, not self.by_products
        self.gradient = self.r.new_zeros(columns)
        side = 0 if self._kept or self.by_products else columns
        self._matrix = self.r.new_zeros(side, side)

    # --- filling J

    def by_samples(
        self, graph: OutputGraph, samples: Samples, output: Tensor, usual: float, *, full: bool, grouped: bool
    ) -> bool:
        """Fill in rows, each sample with parameters of its own, or in groups; False where that is wrong."""
        before = self._begin, self._squares, self.gradient, self._matrix.clone()
        of_sample = output.shape[1:].numel()
        losses = output.reshape(len(output)) if of_sample == 1 else output
        chunk = None if self._kept else max(1, self._block_rows // max(1, of_sample))

        def collect(part: slice, gradients: list[Tensor]) -> None:
            self._fill((part.stop - part.start) * of_sample, gradients, losses.ndim)

        good = each_sample(graph, samples, losses, chunk, collect, usual, grouped=grouped)
        if not (good and self._agrees(graph, output, before, full)):
            self._begin, self._squares, self.gradient, self._matrix = before
            return False
        return True

    def whole(self, output: Tensor, gradients: list[Tensor]) -> None:
        """Fill in the rows of some residuals, from blocks of the whole Jacobian."""
        self._fill(output.numel(), gradients, output.ndim)
        self.compared = False

    def products(self, graph: OutputGraph, outputs: list[Tensor]) -> None:
        """Take J'J by products alone, and what is large of it from a sketch, as `nystrom`."""
        device = self.r.device
        ones = [torch.ones_like(output, requires_grad=True) for output in outputs]
        pulled = _reverse.transposed_product(graph, outputs, ones)
        sizes = [leaf.numel() for leaf in graph.leaves]

        def multiply(change: Tensor) -> Tensor:
            parts = zip(change.split(sizes), graph.leaves, strict=True)
            tangents = [part.reshape(leaf.shape).to(leaf) for part, leaf in parts]
            moved = _reverse.products(graph, pulled, tangents, None, chunk_size=None, inputs=ones)
            return flat(_reverse.vjp(graph, outputs, moved, more=True), device)

        self._multiply = multiply
        self.gradient = flat(_reverse.vjp(graph, outputs, [*map(Tensor.detach, outputs)], more=True), device)
        drawn = draw((self._rank, sum(sizes)), self.r, "gaussian", torch.Generator().manual_seed(0))
        omega, _ = torch.linalg.qr(drawn.T)
        images = torch.stack([multiply(column) for column in omega.T], dim=1)
        self._sketch = nystrom_eigenpairs(omega, images, graph.leaves[0].dtype)

    def _fill(self, rows: int, gradients: Sequence[Tensor], leading: int) -> None:
        """Add rows, of gradients whose leading dimensions are those of the residuals."""
        begin, columns = self._begin, self._J.shape[1]
        block = self._J[begin : begin + rows] if self._kept else self._J.new_empty(rows, columns)
        column = 0
        for part in gradients:
            width = part.shape[leading:].numel()
            block[:, column : column + width].view(part.shape).copy_(part)
            column += width
        r = self.r[self._begin : self._begin + len(block)]
        self.gradient = torch.addmv(self.gradient, block.T, r)
        self._squares += float(torch.linalg.vector_norm(block)) ** 2
        if not self._kept:
            self._matrix.addmm_(block.T, block)
        self._begin += len(block)

    def _agrees(
        self, graph: OutputGraph, output: Tensor, before: tuple[int, float, Tensor, Tensor], full: bool
    ) -> bool:
        """Whether J'r is what a pass over the whole batch gives; with `full`, J'w where all count.

        Those of the whole batch are right: a sample under `vmap` may miss what others do to it.
        """
        begin, squares = before[:2]
        r, gradient = self.r[begin : self._begin], self.gradient - before[2]
        checks = [(r, gradient)]
        if full and self._kept:
            w = even_weights(torch.linalg.vector_norm(self._J[begin : self._begin], dim=1))
            checks += [(w, w @ self._J[begin : self._begin])]
        usual = math.sqrt((self._squares - squares) / (len(r) * len(gradient)))  # of an entry of J
        for weights, result in checks:
            cotangent = weights.to(output).reshape(output.shape)
            expected = flat(_reverse.vjp(graph, [output], [cotangent], more=True), gradient.device)
            size = usual * float(weights.norm())
            if not _reverse.agree(result, expected, size, [output, *graph.leaves]):
                return False
        return True

    def closed(self) -> DampedSystem:
        """The system, once all rows are in."""
        if not bool(self.gradient.isfinite().all()):
            raise InputError(
                "residuals: the derivative is not finite at the current parameters (a square root "
                "of 0, a norm of 0?). Nothing was changed."
            )
        if self._kept:
            self._matrix = _lower_product(self._J if self.in_samples else self._J.T)
        if self.by_products:
            vectors, values = self._sketch
            squares = vectors.square() @ values
        else:
            squares = self._J.square().sum(0) if self.in_samples else self._matrix.diagonal()
        self.norms, self.scale = squares.sqrt(), float(squares.max()) if len(squares) else 0.0
        return self

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
        for _ in range(1 if self.by_products else ROUNDS):
            self._factor(damping)
            solved = self._solve(self.r if self.in_samples else self.gradient)
            change = self._J.T @ solved if self.in_samples else solved
            part = self.norm(change) / radius
            if part > 1 + LOOSE:
                lower = damping
            elif part < 1 - LOOSE and damping > least:
                upper = damping
            else:
                break
            again = self._solve(self.weights * solved)
            fall = (self.weights * change) @ (self._J.T @ again if self.in_samples else again)
            damping = max(least, damping + (part - 1) * (part * radius) ** 2 / (float(fall) or math.inf))
            if not lower < damping < upper:  # as from far, where J has not full rank
                damping = 10 * lower if upper == math.inf else math.sqrt(max(lower, upper / 1e6) * upper)
        return damping

    def step(self, damping: float, drift: Tensor | None) -> DampedStep:
        """The minimum of |J d + r|^2 + damping |d - drift|^2, of weighted entries."""
        self._factor(damping)
        added = damping * self.weights
        b = self.r if self._kept else self.gradient
        if drift is None:
            change, moved, residual = self._solved(b, added)
        else:
            pushed = self._J @ drift if self._kept else self._pulled(drift, 0.0)
            change, moved, residual = self._solved(b + pushed, added)
            change = change + drift
            moved = moved if moved is None else moved + pushed
        square = change @ self._pulled(change, 0.0) if moved is None else moved @ moved
        decrease = -float(change @ self.gradient + square / 2)
        return DampedStep(change, moved, self.norm(change), decrease, residual)

    def bend(self, second: Tensor) -> Tensor:
        """The change that undoes a term of second order in the residuals, as the last step would."""
        if self.in_samples:
            return -self._J.T @ self._solve(second)
        return -self._solve(self._J.T @ second)

    def _solved(self, b: Tensor, damping: Tensor | float) -> tuple[Tensor, Tensor | None, float]:
        """The minimum d of |J d + b|^2 + damping |d|^2, J d, and how exactly it is solved, refined once.

        Where J is not kept, J'b is given for b. The products with J are what costs, where one side of it is short.
        """
        if self.in_samples:
            y = self._solve(-b)
            y = y - self._solve(b + self._J @ (self._J.T @ y) + damping * y)
            change = self._J.T @ y
            moved = self._J @ change
            rest = b + moved + damping * y
        else:
            slope = b
            if self._kept:
                slope = self.gradient if b is self.r else self._J.T @ b
            change = self._solve(-slope)
            change = change - self._solve(self._pulled(change, b) + damping * change)
            moved = self._J @ change if self._kept else None
            rest = (self._pulled(change, b) if moved is None else self._J.T @ (moved + b)) + damping * change
            b = slope
        size = float(b.norm())
        return change, moved, float(rest.norm()) / size if size else 0.0

    def _pulled(self, change: Tensor, b: Tensor | float) -> Tensor:
        """J'(J d + b), whose sum comes first, for it is small; where J is not kept, J'J d + b."""
        if self.by_products:
            return self._multiply(change) + b
        return self._J.T @ (self._J @ change + b) if self._kept else self._matrix @ change + b

    def _factor(self, damping: float) -> None:
        """Have what solves the equations that are damped so."""
        if damping != self._damping:
            self._damping, self._solve = damping, self._solver(damping * self.weights)

    def _solver(self, damping: Tensor | float) -> Callable[[Tensor], Tensor]:
        """What solves the damped equations, the diagonal divided out; damped more where it must."""
        if self.by_products:
            return partial(_by_gradients, self._multiply, *self._sketch, damping)
        while True:
            damped = self._matrix.clone()
            damped.diagonal().add_(damping)
            d = damped.diagonal().clamp(min=torch.finfo(DOUBLE).tiny).rsqrt()
            factor, failed = torch.linalg.cholesky_ex(damped.mul_(d).mul_(d.unsqueeze(1)))
            if not failed:
                return partial(_by_factor, factor, d)
            damping = 10 * damping + 1e-16 * self.weights


def _by_gradients(
    multiply: Callable[[Tensor], Tensor], vectors: Tensor, values: Tensor, damping: Tensor | float, b: Tensor
) -> Tensor:
    """The solution of (J'J + damping) x = b by conjugate gradients, preconditioned."""
    beyond = (values[-1] + damping) / (values + damping) - 1
    x, rest = torch.zeros_like(b), b
    direction, size = x, math.inf
    for _ in range(ITERATIONS):
        if float(rest.norm()) <= RTOL * float(b.norm()):
            break
        z = rest + vectors @ (beyond * (vectors.T @ rest))
        last, size = size, float(rest @ z)
        direction = z + size / last * direction
        image = multiply(direction) + damping * direction
        length = size / float(direction @ image)
        x = x + length * direction
        rest = rest - length * image
    return x


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
