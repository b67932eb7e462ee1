"""Numerical derivatives along a line, with an estimate of their own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Slope(NamedTuple):
    """A derivative found numerically, and how far off it may be."""

    value: float
    error: float


def slope(function: Callable[[float], float], step: float, levels: int = 7) -> Slope:
    """The derivative of `function` at 0 by Ridders' method.

    Central differences at steps that halve, extrapolated to step 0; the entry of the tableau whose
    neighbours differ least is the answer, and that difference its error. Rounding shows as entries
    that diverge again, so the estimate covers it.

    Reference:
        Ridders, C. J. F. (1982). Accurate computation of F'(x) and F'(x)F''(x).
        Advances in Engineering Software 4(2). doi:10.1016/S0141-1195(82)80057-0.
    """
    best = Slope(0.0, float("inf"))
    above: list[float] = []
    for _ in range(levels):
        row = [(function(step) - function(-step)) / (2 * step)]
        factor = 4.0
        for k, upper in enumerate(above):
            row.append((factor * row[k] - upper) / (factor - 1))
            factor *= 4
            error = max(abs(row[k + 1] - row[k]), abs(row[k + 1] - upper))
            if error < best.error:
                best = Slope(row[k + 1], error)
        above = row
        step /= 2
    return best
