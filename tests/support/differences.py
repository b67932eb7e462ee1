"""Central differences in float64 with Richardson extrapolation: the oracle that trusts no derivative rule.

Order k is checked by differences of order k - 1, itself checked before, so one wrong formula cannot hide
behind another.  The functions here take plain functions of one real number, or of one flat vector.
"""

from collections.abc import Callable
from itertools import pairwise

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
