"""Conjugate gradients and MINRES: what `solve` iterates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.curvature._records import Status
from hodiff.errors import InputError

Product = Callable[[Tensor], Tensor]
Show = Callable[[Callable[[], Tensor], float], None]
"""Is called after each step with the solution so far, to be computed if wanted, and the norm of its residual."""


class Run(NamedTuple):
    """Where a run of a method ended."""

    x: Tensor
    status: Status  # "converged" is by its own recurrence
    size: float | None  # of the residual, by the recurrence; None where that measures it otherwise
    direction: Tensor | None = None


def conjugate_gradients(
    product: Product, inverse: Product, b: Tensor, tolerance: float, eps: float, left: Callable[[], int], show: Show
) -> Run:
    """A x = b from zero, until |r| <= tolerance; `d'Ad <= 0` ends it. Products round by `eps`."""
    x, r = torch.zeros_like(b), b.clone()
    z = inverse(r)
    d, rz = z.clone(), dot(r, z)
    if rz <= 0:
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")
    largest = 0.0
    size = least = dot(r, r) ** 0.5
    best = x
    while left() > 0:
        image = product(d)
        curvature, length = dot(d, image), dot(d, d)
        # Along a null vector the curvature is what rounding leaves of the largest, and steps towards it are huge.
        largest = max(largest, (dot(image, image) / length) ** 0.5)
        if not curvature > eps * largest * length:
            return Run(best, "negative curvature", least, d)
        step = rz / curvature
        x = torch.add(x, d, alpha=step)
        r = torch.add(r, image, alpha=-step)
        square = dot(r, r)
        size = square**0.5
        show(lambda x=x: x, size)
        if size <= tolerance:
            return Run(x, "converged", size)
        if size < least:
            best, least = x, size
        z, before = inverse(r), rz
        rz = square if z is r else dot(r, z)
        if rz <= 0:
            return Run(x, "stagnation", size)
        d = torch.add(z, d, alpha=rz / before)
    return Run(x, "budget", size)


def minres(
    product: Product, inverse: Product, b: Tensor, tolerance: float, eps: float, left: Callable[[], int], show: Show
) -> Run:
    """A x = b from zero, least |r| in the Krylov space at each step; the Lanczos matrix is reduced by rotations."""
    x = torch.zeros_like(b)
    r1 = r2 = b.clone()
    y = inverse(b)
    beta = dot(b, y)
    if beta <= 0:
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")
    beta = first = beta**0.5
    phi = beta
    beta_old = 0.0
    epsilon = 0.0
    dbar = 0.0
    cs = -1.0
    sn = 0.0
    w, w_old = torch.zeros_like(b), torch.zeros_like(b)
    # phi is the residual in the preconditioner's norm; the caller looks at the true one.
    unit = float(b.norm()) / first
    target, scale = tolerance / unit, 0.0
    while left() > 0:
        v = y / beta
        y = product(v)
        if beta_old:
            y = torch.add(y, r1, alpha=-beta / beta_old)
        alpha = dot(v, y)
        y = torch.add(y, r2, alpha=-alpha / beta)
        r1, r2 = r2, y
        y = inverse(r2)
        beta_old, beta = beta, max(dot(r2, y), 0.0) ** 0.5
        scale = max(scale, abs(alpha), beta)
        epsilon_old, delta = epsilon, cs * dbar + sn * alpha
        gbar = sn * dbar - cs * alpha
        epsilon = sn * beta
        dbar = -cs * beta
        gamma = max(math.hypot(gbar, beta), eps * scale * 1e-3, 1e-300)
        cs, sn = gbar / gamma, beta / gamma
        step, phi = cs * phi, sn * phi
        w_new = (v - epsilon_old * w_old - delta * w) / gamma
        w_old, w = w, w_new
        x = torch.add(x, w, alpha=step)
        show(lambda x=x: x, abs(phi) * unit)
        if abs(phi) <= target:
            return Run(x, "converged", None)
        # The Krylov space is exhausted; or x, along a null vector, has grown so that A x rounds like the residual.
        if beta <= 10 * eps * scale or eps * scale * float(x.norm()) > 0.1 * abs(phi):
            return Run(x, "stagnation", None)
    return Run(x, "budget", None)


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product of two flat vectors."""
    return float(torch.dot(a, b))
