"""Central differences in float64 with Richardson extrapolation: the oracle that trusts no derivative rule.

Order k is checked by differences of order k - 1, itself checked before, so one wrong formula cannot hide
behind another.  The functions here take plain functions of one real number, or of one flat vector.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Curve = Callable[[float], Tensor]


def _richardson(estimate: Callable[[float], Tensor], step: float, levels: int) -> Tensor:
    """Extrapolate an estimate whose error is a series in step**2: after k levels it is O(step**(2k))."""
    row = [estimate(step / 2**level) for level in range(levels)]
    for k in range(1, levels):
        row = [(4**k * fine - coarse) / (4**k - 1) for coarse, fine in pairwise(row)]
    return row[0]


def first_difference(curve: Curve, step: float = 1e-2, levels: int = 3) -> Tensor:
    """The derivative of ``curve`` at 0: d/dt curve(t)."""
    return _richardson(lambda h: (curve(h) - curve(-h)) / (2 * h), step, levels)


def second_difference(curve: Curve, step: float = 2e-2, levels: int = 3) -> Tensor:
    """The second derivative of ``curve`` at 0: d²/dt² curve(t)."""
    middle = curve(0.0)
    return _richardson(lambda h: (curve(h) - 2 * middle + curve(-h)) / h**2, step, levels)


def gradient_by_differences(function: Callable[[Tensor], Tensor], point: Tensor, step: float = 1e-2) -> Tensor:
    """The gradient of a scalar function, one coordinate at a time; shaped like ``point``."""
    flat = point.detach().double().reshape(-1)
    entries = []
    for i in range(flat.numel()):
        unit = torch.zeros_like(flat)
        unit[i] = 1.0
        entries.append(
            first_difference(lambda t, u=unit: function((flat + t * u).reshape(point.shape)).detach().reshape(()), step)
        )
    return torch.stack(entries).reshape(point.shape) if entries else torch.zeros_like(point)


def directional_derivative(
    function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor, step: float = 1e-2
) -> Tensor:
    """d/dt function(point + t * direction) at t = 0: of a gradient, this is a Hessian-vector product."""
    size = float(direction.norm()) or 1.0
    return size * first_difference(lambda t: function(point + t / size * direction).detach(), step)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest deviation over the largest expected entry (over 1 where all of it is zero)."""
    if got.shape != expected.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if got.numel() == 0:
        return 0.0
    scale = float(expected.abs().max())
    error = float((got - expected).abs().max())
    return error / scale if scale > 1e-9 else error


class Estimate(NamedTuple):
    """A derivative by differences, and how far off it may be: infinitely, where a kink lies at the point."""

    value: Tensor
    error: float


def estimated(curve: Curve, step: float = 1e-2, levels: int = 5) -> Estimate:
    """The derivative of ``curve`` at 0, with an error from the last extrapolations, and a look for kinks.

    At a kink the central difference is the mean of two slopes and converges to a number that is not a derivative. So
    the slopes from the right and from the left must approach each other as the step halves.
    """
    middle, sides = curve(0.0), [(curve(h), curve(-h)) for h in (step / 2**level for level in range(levels))]
    row = [(right - left) / (2 * step / 2**level) for level, (right, left) in enumerate(sides)]
    bends = [
        float(((right - 2 * middle + left) / (step / 2**level)).abs().max()) if middle.numel() else 0.0
        for level, (right, left) in enumerate(sides)
    ]
    rounding = 8 * torch.finfo(torch.float64).eps * largest(middle) / (step / 2 ** (levels - 1))
    if bends[-1] > 0.75 * bends[-2] and bends[-1] > 1e-6 * largest(row[-1]) + 100 * rounding:
        return Estimate(row[-1], math.inf)
    for k in range(1, levels):
        last, row = row, [(4**k * fine - coarse) / (4**k - 1) for coarse, fine in pairwise(row)]
    return Estimate(row[0], largest(row[0] - last[1]) + rounding)


def largest(tensor: Tensor) -> float:
    """The largest absolute entry; 0 of none, infinity where one is not finite."""
    return float(tensor.abs().max().nan_to_num(math.inf)) if tensor.numel() else 0.0
