"""Updates written once for numbers and for tensors: a number takes PyTorch's fused form, and rounds as that does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff._core._faults import is_wrapped


def plus(x: Tensor, a: Any, y: Tensor) -> Tensor:
    """X + a y."""
    return x + a * y if isinstance(a, Tensor) else torch.add(x, y, alpha=a)


def minus(x: Tensor, a: Any, y: Tensor) -> Tensor:
    """X - a y."""
    return x - a * y if isinstance(a, Tensor) else torch.add(x, y, alpha=-a)


def plus_product(x: Tensor, a: Any, y: Tensor, z: Tensor) -> Tensor:
    """X + a y z."""
    return x + a * (y * z) if isinstance(a, Tensor) else torch.addcmul(x, y, z, value=a)


def minus_ratio(x: Tensor, a: Any, y: Tensor, z: Tensor) -> Tensor:
    """X - a y / z."""
    return x - a * (y / z) if isinstance(a, Tensor) else torch.addcdiv(x, y, z, value=-a)


def mixed(x: Tensor, y: Tensor, a: Any) -> Tensor:
    """(1 - a) x + a y."""
    return torch.lerp(x, y, a.to(x) if isinstance(a, Tensor) else a)


def root(v: Tensor) -> Tensor:
    """The square root, with derivative 0 at 0.

    `sqrt` has an infinite one there, which times a zero is NaN: one parameter whose gradients were exactly zero
    (below a layer that begins at zero) would make every derivative through Adam NaN. There v = (1 - b) g², so
    its own derivative is zero, and with it that of the update's denominator.
    """
    if _can_be_read(v) and bool(v.all()):
        return v.sqrt()
    zero = v == 0
    return v.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _can_be_read(v: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device; inside transforms and traces there are none."""
    plain = v.is_cpu and v.__class__ is Tensor and not torch.compiler.is_compiling()
    return plain and not is_wrapped(v)


def decayed(g: Tensor, a: Any, p: Tensor) -> Tensor:
    """The gradient g of a loss to which a |p|² / 2 is added."""
    return plus(g, a, p) if present(a) else g


def present(a: Any) -> bool:
    """Whether a term with the factor `a` is there: a tensor's always is, since it may be differentiated by."""
    return isinstance(a, Tensor) or a != 0
