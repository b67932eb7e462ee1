"""Functions whose formula has a removable singularity at 0, written by their series there.

PyTorch differentiates `sinc` and the Bessel functions J and I by formulas that divide by x: their second, third or
fourth derivatives lose all digits near 0 (the second of sinc at 1e-7 is 176882 where it should be 6e-7) and are NaN or
a wrong constant at 0, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SINC = [(-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(10)]


def sinc(input: Tensor) -> Tensor:
    """`torch.sinc`, by its series for entries below 0.1."""
    small = input.detach().abs() < 0.1
    far = math.pi * torch.where(small, 1.0, input)
    return torch.where(small, _even(torch.where(small, input, 0.0), _SINC), torch.sin(far) / far)


def _bessel(
    function: Callable[..., Tensor], n: int, sign: int, decay: Callable[[Tensor], Tensor] | None = None
) -> Callable[..., Tensor]:
    """J_n (sign -1) or I_n (sign 1), times `decay`, n being 0 or 1: by its series for entries below 1."""
    series = [sign**k / (2 ** (2 * k + n) * math.factorial(k) * math.factorial(k + n)) for k in range(16)]

    def written(input: Tensor, far: Callable[[Tensor], Tensor] = function, **out: Any) -> Tensor:
        if out:
            return function(input, **out)
        small = input.detach().abs() < 1
        x = torch.where(small, input, 0.0)
        near = x * _even(x, series) if n else _even(x, series)
        near = near if decay is None else near * decay(x)
        return torch.where(small, near, far(torch.where(small, 1.0, input)))

    return written


def _decay(x: Tensor) -> Tensor:
    """exp(-|x|); at its kink, the mean of the derivatives on either side."""
    return torch.where(x.detach() == 0, torch.cosh(x), torch.exp(-x.abs()))


BESSEL: dict[str, Callable[..., Tensor]] = {
    "i0": _bessel(torch.special.i0, 0, 1),
    "i1": _bessel(torch.special.i1, 1, 1),
    "i0e": _bessel(torch.special.i0e, 0, 1, _decay),
    "i1e": _bessel(torch.special.i1e, 1, 1, _decay),
    "bessel_j0": _bessel(torch.special.bessel_j0, 0, -1),
    "bessel_j1": _bessel(torch.special.bessel_j1, 1, -1),
    "modified_bessel_i0": _bessel(torch.special.modified_bessel_i0, 0, 1),
    "modified_bessel_i1": _bessel(torch.special.modified_bessel_i1, 1, 1),
}
"""Those of `torch.special`; `far` is what they call for the other entries."""

NODES = {
    "SincBackward0": ("sinc", 2),
    "SpecialI0EBackward0": ("special.i0e", 3),
    "SpecialI1Backward0": ("special.i1", 2),
    "SpecialI1EBackward0": ("special.i1e", 2),
    "SpecialBesselJ0Backward0": ("special.bessel_j0", 3),
    "SpecialBesselJ1Backward0": ("special.bessel_j1", 2),
    "SpecialModifiedBesselI0Backward0": ("special.modified_bessel_i0", 3),
    "SpecialModifiedBesselI1Backward0": ("special.modified_bessel_i1", 2),
    "I0Backward0": ("special.i0", 3),
}
"""The nodes of PyTorch's own, what they are called, and the order of derivative that is wrong near 0."""


def _even(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's rule for a series in x squared."""
    square, total = x * x, 0 * x + coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * square + coefficient
    return total
