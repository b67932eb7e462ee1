"""Elementwise operations put together from pieces: their derivatives at a kink are those of PyTorch, or zero."""

from __future__ import annotations

import math
from typing import Any

import torch

from hodiff.jets._series import Series
from hodiff.jets.rules.elementwise import elementwise


@elementwise("elu")
def elu(x: Any, order: int, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Series:
    """An exponential below zero, linear above."""
    below = torch.exp(torch.clamp(x, max=0) * input_scale)
    value = torch.where(x > 0, x * scale, (below - 1) * (alpha * scale))
    found = [value]
    for m in range(1, order + 1):
        part = below * (alpha * scale * input_scale**m / math.factorial(m))
        found.append(torch.where(x > 0, scale, part) if m == 1 else torch.where(x < 0, part, 0.0))
    return found


@elementwise("celu")
def celu(x: Any, order: int, alpha: float = 1.0) -> Series:
    """Elu with a smooth first derivative."""
    return elu(x, order, alpha, 1.0, 1 / alpha)


@elementwise("selu")
def selu(x: Any, order: int) -> Series:
    """Elu with the self-normalising constants."""
    return elu(x, order, 1.6732632423543772, 1.0507009873554805)


def _piecewise_linear(value: Any, slope: Any, order: int) -> Series:
    return [value, slope, *[None] * (order - 1)]


@elementwise("relu")
def relu(x: Any, order: int) -> Series:
    """Slope 0 or 1; higher derivatives are zero almost everywhere."""
    return _piecewise_linear(torch.relu(x), (x > 0).to(x.dtype), order)


@elementwise("relu6")
def relu6(x: Any, order: int) -> Series:
    """Clamp to [0, 6]."""
    return _piecewise_linear(torch.clamp(x, 0, 6), ((x > 0) & (x < 6)).to(x.dtype), order)


@elementwise("hardtanh")
def hardtanh(x: Any, order: int, min_val: float = -1.0, max_val: float = 1.0) -> Series:
    """A clamp with open ends."""
    inside = (x > min_val) & (x < max_val)
    return _piecewise_linear(torch.clamp(x, min_val, max_val), inside.to(x.dtype), order)


@elementwise("leaky_relu")
def leaky_relu(x: Any, order: int, negative_slope: float = 0.01) -> Series:
    """Two slopes."""
    slope = torch.where(x > 0, torch.ones_like(x), negative_slope)
    return _piecewise_linear(x * slope, slope, order)


@elementwise("threshold")
def threshold(x: Any, order: int, threshold: float, value: float) -> Series:
    """X above the threshold, a constant below."""
    above = x > threshold
    return _piecewise_linear(torch.where(above, x, value), above.to(x.dtype), order)


@elementwise("hardshrink")
def hardshrink(x: Any, order: int, lambd: float = 0.5) -> Series:
    """X outside the interval, zero inside."""
    outside = ((x > lambd) | (x < -lambd)).to(x.dtype)
    return _piecewise_linear(x * outside, outside, order)


@elementwise("softshrink")
def softshrink(x: Any, order: int, lambd: float = 0.5) -> Series:
    """Shifted towards zero outside the interval."""
    outside = ((x > lambd) | (x < -lambd)).to(x.dtype)
    return _piecewise_linear((x - torch.sign(x) * lambd) * outside, outside, order)


@elementwise("abs", "fabs")
def absolute(x: Any, order: int) -> Series:
    """|x|."""
    return _piecewise_linear(torch.abs(x), torch.sign(x), order)


@elementwise("nan_to_num")
def nan_to_num(x: Any, order: int, *args: Any, **kwargs: Any) -> Series:
    """The identity where finite."""
    return _piecewise_linear(torch.nan_to_num(x, *args, **kwargs), torch.isfinite(x).to(x.dtype), order)
