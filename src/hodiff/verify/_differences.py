"""Numerical derivatives along a line, with an estimate of their own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Slope(NamedTuple):
    """A derivative found numerically, how far off it may be, and how much plain differences vary."""

    value: float
    error: float
    spread: float = 0.0


def slope(function: Callable[[float], float], step: float, eps: float = 2.3e-16, levels: int = 7) -> Slope:
    """The derivative of `function`, computed with a relative precision of `eps`, at 0 by Ridders' method.

    Central differences at steps that halve, extrapolated to step 0; the entry of the tableau whose
    neighbours differ least is the answer, and that difference its error. To it comes what rounding
    can do at that step. The spread is that of the plain differences at the four smallest steps: where
    kinks lie within a step they vary, and two extrapolated entries may agree by chance.

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
