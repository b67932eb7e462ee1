"""Functions whose formula has a removable singularity at 0, written by their series there.

PyTorch differentiates `sinc` and the Bessel functions `i1`, `i1e` by formulas that divide by x: their second or third
derivatives lose all digits near 0 (that of sinc at 1e-7 is 176882 where it should be 6e-7) and are NaN or a wrong
constant at 0, without a word.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SINC = [(-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(10)]
_I1 = [0.5 / (4**k * math.factorial(k) * math.factorial(k + 1)) for k in range(12)]


def sinc(input: Tensor) -> Tensor:
    """`torch.sinc`, by its series for entries below 0.1."""
    small = input.detach().abs() < 0.1
    far = math.pi * torch.where(small, 1.0, input)
    return torch.where(small, _even(torch.where(small, input, 0.0), _SINC), torch.sin(far) / far)


def i1(input: Tensor) -> Tensor:
    """`torch.special.i1`, by its series for entries below 1."""
    small = input.detach().abs() < 1
    far = torch.where(small, 1.0, input)  # by another function than itself, so that Taylor mode may use this
    return torch.where(small, _i1_near(input, small), torch.special.i1e(far) * torch.exp(far.abs()))


def i1e(input: Tensor) -> Tensor:
    """`torch.special.i1e`, by its series for entries below 1."""
    small = input.detach().abs() < 1
    near = _i1_near(input, small) * torch.exp(-input.abs())
    return torch.where(small, near, torch.special.i1e(torch.where(small, 1.0, input)))


def _i1_near(input: Tensor, small: Tensor) -> Tensor:
    near = torch.where(small, input, 0.0)
    return near * _even(near, _I1)


def _even(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's rule for a series in x squared."""
    square, total = x * x, 0 * x + coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * square + coefficient
    return total
