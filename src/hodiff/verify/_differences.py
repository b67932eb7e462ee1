"""Numerical derivatives: order k against differences of order k - 1, along random directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hodiff._core._arguments import Allowed
from hodiff._core._messages import Reported
from hodiff._core._vectors import draw
from hodiff.calculus._first import grad
from hodiff.graph._source import Line

Point = tuple[Tensor, ...]
Scalar = Callable[[Point], Tensor]

FINER = 1 / 64
"""How much smaller the second try's steps are:
a kink that only the first reached is not a fault.
"""


def derived(function: Scalar, path: Sequence[Point], allow: Allowed) -> Scalar:
    """F_k from F_0: the derivative along each direction of `path` in turn."""
    for direction in path:
        function = _along(function, direction, allow)
    return function


def _along(function: Scalar, direction: Point, allow: Allowed) -> Scalar:
    # The zeros connect a slope that does not depend on the leaves (of a linear function): its
    # derivative is 0.
    return lambda leaves: (
        inner(grad(function, leaves, allow=allow), direction)
        + 0 * sum(leaf.sum() for leaf in leaves)
    )


def compare(
    function: Scalar,
    point: Point,
    direction: Point,
    order: int,
    allow: Allowed,
    names: Sequence[str],
) -> Check:
    """The derivative of `function`, itself of order `order - 1`, along a direction,
    by both ways.
    """
    gradient = grad(function, point, allow=allow)
    first = _judged(function, point, direction, order, gradient, names, 1.0)
    if first.verdict == "agrees":
        return first
    second = _judged(function, point, direction, order, gradient, names, FINER)
    return second if second.verdict == "agrees" else first


def _judged(
    function: Scalar,
    point: Point,
    direction: Point,
    order: int,
    gradient: Point,
    names: Sequence[str],
    finer: float,
) -> Check:
    eps = epsilon(point)
    computed = float(inner(gradient, direction))
    numeric = difference(function, point, direction, finer)
    scale = max(
        abs(float(function(point).detach())),
        abs(computed),
        abs(numeric.value),
        float(norm(gradient) * norm(direction))
        / max(1, sum(leaf.numel() for leaf in point)) ** 0.5,
    )
    tolerance = 10 * numeric.error + eps**0.4 * scale + 100 * eps
    distance = abs(computed - numeric.value)
    if distance <= max(tolerance, 3 * numeric.spread):
        clear = distance <= tolerance and numeric.error <= 1e-2 * scale + 100 * eps
        verdict = "agrees" if clear else "inconclusive"
        return Check(order, computed, numeric.value, tolerance, verdict, direction=direction)
    parts = _parts(function, point, direction, gradient, names) if len(point) > 1 else tuple(names)
    return Check(order, computed, numeric.value, tolerance, "disagrees", parts, direction)


def difference(function: Scalar, point: Point, direction: Point, finer: float = 1.0) -> Slope:
    """The slope of `function` along a direction, numerically."""
    eps = epsilon(point)

    def line(t: float) -> float:
        moved = tuple(leaf + t * part for leaf, part in zip(point, direction, strict=True))
        return float(function(moved).detach())

    return slope(line, finer * first_step(eps), eps)


def first_step(eps: float) -> float:
    """The largest step of the differences."""
    return eps ** (1 / 7)


def _parts(
    function: Scalar, point: Point, direction: Point, gradient: Point, names: Sequence[str]
) -> tuple[str, ...]:
    """The leaves along which alone the disagreement shows."""
    parts, eps = [], epsilon(point)
    for index, name in enumerate(names):
        alone = tuple(
            part if i == index else torch.zeros_like(part) for i, part in enumerate(direction)
        )
        computed, numeric = float(inner(gradient, alone)), difference(function, point, alone)
        if abs(computed - numeric.value) > 10 * numeric.error + eps**0.4 * max(
            abs(computed), abs(numeric.value)
        ):
            parts.append(name)
    return tuple(parts)


def epsilon(point: Point) -> float:
    """The relative precision of a point."""
    return torch.finfo(point[0].dtype).eps


def random_direction(point: Point, generator: torch.Generator | None) -> Point:
    """A random direction of length about 1, so that one step suits every number of variables."""
    parts = tuple(draw(leaf.shape, leaf, "gaussian", generator) for leaf in point)
    length = norm(parts).clamp_min(torch.finfo(torch.float32).tiny)
    return tuple(part / length for part in parts)


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The inner product of two points."""
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()


def norm(parts: Sequence[Tensor]) -> Tensor:
    """The length of a point."""
    return torch.stack([part.detach().double().square().sum() for part in parts]).sum().sqrt()


# --- numerical derivatives along a line, with an estimate of their own error ----------------------


class Slope(NamedTuple):
    """A derivative found numerically, how far off it may be,
    and how much plain differences vary.
    """

    value: float
    error: float
    spread: float = 0.0


def slope(
    function: Callable[[float], float], step: float, eps: float = 2.3e-16, levels: int = 7
) -> Slope:
    """The derivative of `function`, computed with a relative precision of `eps`, at 0 by Ridders'
    method.

    Central differences at steps that halve, extrapolated to step 0; the entry of the tableau whose
    neighbors differ least is the answer, and that difference its error. To it comes what rounding
    can do at that step. The spread is that of the plain differences at the four smallest steps:
    where kinks lie within a step they vary, and two extrapolated entries may agree by chance.

    Reference:
        Ridders, C. J. F. (1982). Accurate computation of F'(x) and F'(x)F''(x).
        Advances in Engineering Software 4(2). doi:10.1016/S0141-1195(82)80057-0.
    """
    best = Slope(0.0, float("inf"))
    above: list[float] = []
    plain: list[float] = []
    for _ in range(levels):
        right, left = function(step), function(-step)
        rounding = 32 * eps * max(abs(right), abs(left)) / step
        row = [(right - left) / (2 * step)]
        factor = 4.0
        for k, upper in enumerate(above):
            row.append((factor * row[k] - upper) / (factor - 1))
            factor *= 4
            error = max(abs(row[k + 1] - row[k]), abs(row[k + 1] - upper)) + rounding
            if error < best.error:
                best = Slope(row[k + 1], error)
        above = row
        plain.append(row[0])
        step /= 2
    return best._replace(spread=max(plain[-4:]) - min(plain[-4:]))


# --- what a check of derivatives says: comparisons, causes, remarks -------------------------------


Kind = Literal["cut", "function", "operation", "kink", "hook", "state", "random"]


@dataclass(frozen=True)
class Check:
    """One comparison: a derivative along one random direction, computed and by differences.

    Attributes:
        order: The order of the derivative.
        computed: By hodiff.
        differences: By finite differences of the order below.
        tolerance: How far apart the two may be, from the differences' own error estimate.
        verdict: `"agrees"`, `"disagrees"`, or `"inconclusive"` where the differences are too rough
            to tell.
        where: For a disagreement, the parts of *x* along which it shows.
        direction: The direction, one tensor for each part of *x*.
    """

    order: int
    computed: float
    differences: float
    tolerance: float
    verdict: str
    where: tuple[str, ...] = ()
    direction: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        place = f"  (along {', '.join(self.where)})" if self.where else ""
        return (
            f"order {self.order}: computed {self.computed:+.10e}, "
            f"differences {self.differences:+.10e}, "
            f"apart {abs(self.computed - self.differences):.1e}, tolerance {self.tolerance:.1e}: "
            f"{self.verdict}{place}"
        )


@dataclass(frozen=True)
class Cause:
    """A place in the user's code that a disagreement, or a remark, is about.

    Attributes:
        kind: `"cut"` (a value that counts as a constant), `"function"` (the backward of an
            `autograd.Function`), `"operation"` (a derivative of PyTorch's), `"kink"`, `"hook"`,
            `"state"` (kept between calls), `"random"`.
        file: The file of the user's code; empty where no line is known.
        line: The number of the line.
        text: What stands there.
        reason: What it does.
        fix: The way out.
    """

    kind: Kind
    file: str
    line: int
    text: str
    reason: str
    fix: str

    def __str__(self) -> str:
        place = [f"{self.file}:{self.line}   {self.text}"] if self.file else []
        return "\n".join([*place, *(f"    {each}" for each in (self.reason, self.fix) if each)])


def cause(kind: Kind, line: Line | None, reason: str, fix: str) -> Cause:
    """A cause at a line of the user's code; None where no line is to blame."""
    line = line or Line("", 0)
    return Cause(kind, line.file, line.number, line.text, f"{reason}.", fix)


@dataclass(frozen=True, repr=False)
class DerivativeReport(Reported):
    """The findings of `check_derivatives`; `print` it for a table.

    Attributes:
        dtype: The precision in which the comparison ran.
        checks: One entry for each order and direction.
        causes: Where a disagreement comes from, as far as it was found; empty where everything
            agrees.
        remarks: What else to know of `f`: state that it keeps, random
            numbers, kinks at *x*.
    """

    dtype: torch.dtype
    checks: tuple[Check, ...]
    causes: tuple[Cause, ...] = ()
    remarks: tuple[Cause, ...] = ()

    @property
    def order(self) -> int:
        """The highest order that was checked."""
        return max(check.order for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether every comparison agrees."""
        return all(check.verdict == "agrees" for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"derivatives against central differences, in {self.dtype}:",
                *map(str, self.checks),
                *(["because of"] if self.causes else []),
                *map(str, self.causes),
                *(["to know of f:"] if self.remarks else []),
                *map(str, self.remarks),
            ]
        )
