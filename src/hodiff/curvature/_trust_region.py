"""The step of a trust region: where a quadratic model is small, not further than a radius."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.curvature._krylov import dot
from hodiff.curvature._probes import check_finite, power_of_two
from hodiff.curvature._records import End


class Step(NamedTuple):
    """Where conjugate gradients left the trust region, or stopped inside.

    Attributes:
        step: The step s, flat.
        decrease: What the model promises: -(g's + s'As/2), never negative.
        end: Why they stopped.
    """

    step: Tensor
    decrease: float
    end: End


def steihaug(
    product: Callable[[Tensor], Tensor], gradient: Tensor, radius: float, tolerance: float, products: int
) -> Step:
    """Minimise g's + s'As/2 over |s| <= radius, roughly: conjugate gradients from zero, in flat vectors.

    They stop inside once |g + As| <= tolerance, and where they meet negative curvature, or the radius, they go on along
    that direction to the boundary (Steihaug 1983). The model falls, and |s| grows, with every product.
    """
    unit = power_of_two(gradient) or 1.0  # of the model: squares of large numbers have no place in their dtype
    g, tolerance = gradient / unit, tolerance / unit
    s, image = torch.zeros_like(g), torch.zeros_like(g)  # and A s
    r = g.clone()
    d, rr = -r, dot(r, r)
    end: End = "budget"
    for _ in range(products):
        if math.sqrt(rr) <= tolerance:
            end = "interior"
            break
        turned = product(d) / unit
        curvature = dot(d, turned)
        check_finite(torch.tensor(curvature, device="cpu"), "NewtonCG")
        to_boundary = _to_boundary(s, d, radius)
        length = rr / curvature if curvature > 0 else math.inf
        if curvature <= 0:
            end = "negative curvature"
        elif length >= to_boundary:
            end = "boundary"
        length = min(length, to_boundary)
        s, image = torch.add(s, d, alpha=length), torch.add(image, turned, alpha=length)
        if end != "budget":
            break
        r = torch.add(r, turned, alpha=length)
        before, rr = rr, dot(r, r)
        d = torch.add(-r, d, alpha=rr / before)
    return Step(s, max(0.0, -(dot(g, s) + 0.5 * dot(s, image)) * unit), end)


def _to_boundary(s: Tensor, d: Tensor, radius: float) -> float:
    """The positive t with |s + t d| = radius, by the root that does not cancel."""
    dd = dot(d, d)
    sd = dot(s, d)
    gap = max(0.0, radius**2 - dot(s, s))
    root = math.sqrt(sd**2 + dd * gap)
    return gap / (sd + root) if sd > 0 else (root - sd) / dd
