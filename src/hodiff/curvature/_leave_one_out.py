"""XTrace, XNysTrace and XDiag: each random vector in turn estimates what a sketch of all the others leaves.

Written from Epperly, Tropp, Webber (2024), with their names: Y = A Ω = Q R; column i of S is the
unit vector in the range of R that is orthogonal to all columns of R but i, so that Q (I - s s') Q'
projects on the range of Y without i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import flat_product, power_of_two
from hodiff.errors import InputError


def xtrace(operator: LinearOperator, rows: Tensor, *, gaussian: bool) -> tuple[Tensor, Tensor | None]:
    """The trace and its standard error, by two products for each random vector."""
    omega, images, unit = _doubled(operator, rows)
    q, r = torch.linalg.qr(images)
    z = flat_product(operator, q.T).T.to(q) / unit
    w = q.T @ omega
    h = q.T @ z
    t = z.T @ omega
    squares = omega.square().sum(0) if gaussian else None

    def estimates(some: Tensor) -> Tensor:
        turn, own = torch.linalg.qr(r[:, some])  # all that follows lies in the range of Y
        parts = (turn.T @ w[:, some], turn.T @ h @ turn, turn.T @ t[:, some])
        return _xtrace(own, *parts, None if squares is None else squares[some], len(omega))

    return _in_units(_with_error(estimates, len(rows)), unit)


def _xtrace(r: Tensor, w: Tensor, h: Tensor, t: Tensor, squares: Tensor | None, size: int) -> Tensor:
    """One estimate for each random vector, from what Q shows of A Ω, Ω, A and A'Ω."""
    s = _directions(r)
    x = w - s * (s * w).sum(0)  # Q x is ω in the range of the others
    inside = h.diagonal().sum() - (s * (h @ s)).sum(0)
    # (ω - Q x)'A(ω - Q x), with A ω = Q R and A Q = Z
    outside = (w * r).sum(0) - (t * x).sum(0) - (x * r).sum(0) + (x * (h @ x)).sum(0)
    if squares is not None:
        outside = outside * _resphered(size, len(s), squares - x.square().sum(0))
    return inside + outside


def xnystrace(operator: LinearOperator, rows: Tensor, *, gaussian: bool) -> tuple[Tensor, Tensor | None]:
    """XNysTrace: the trace of a positive semidefinite operator, from its Nyström approximation; one product each."""
    omega, images, unit = _doubled(operator, rows)
    size = len(omega)
    shift = float(torch.finfo(operator.dtype).eps * images.norm() / size**0.5) or torch.finfo(omega.dtype).tiny
    y = images + shift * omega  # A + shift is definite, and its trace is known
    h = omega.T @ y
    _, r = torch.linalg.qr(y)
    gram = omega.T @ omega if gaussian else None

    def estimates(some: Tensor) -> Tensor:
        return _xnystrace(h[some][:, some], r[:, some], None if gram is None else gram[some][:, some], size)

    value, error = _with_error(estimates, len(rows))
    return _in_units((value - shift * size, error), unit)


def _xnystrace(h: Tensor, r: Tensor, gram: Tensor | None, size: int) -> Tensor:
    """One estimate for each random vector, from H = Ω'Y and the factor R of Y: A is about Y H⁻¹ Y'."""
    factor, failed = torch.linalg.cholesky_ex((h + h.T) / 2, upper=True)
    if int(failed):
        raise InputError(
            "method='xnystrace' is for positive semidefinite operators, but this one has a "
            "direction of negative curvature; use method='xtrace'."
        )
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(h), dtype=h.dtype, device=h.device), upper=True)
    b = r @ inverse
    left = inverse.square().sum(1)  # the diagonal of H⁻¹; 1 / left is ω'(A - A without i) ω
    outside = 1 / left
    if gram is not None:
        outside = outside * _resphered(size, len(h), 1 / torch.linalg.inv(gram).diagonal())
    return b.square().sum() - (b @ inverse.T).square().sum(0) / left + outside


def _with_error(estimates: Callable[[Tensor], Tensor], number: int) -> tuple[Tensor, Tensor | None]:
    """The mean of the estimates, and its standard error.

    Estimates that share all vectors but one are alike, so their spread says too little: 0.3 to 0.9
    of the true error, over spectra that are flat, clustered or decay. Leaving out each vector in
    turn (the jackknife) says too much, by theory (Efron and Stein, 1981): 1.3 to 5 times. The
    geometric mean of both was 1.0 to 1.4 (once 1.9) of it.
    """
    every = torch.arange(number, device="cpu")
    estimate = estimates(every)
    if number == 1:
        return estimate[0], None
    without = torch.stack([estimates(every[every != i]).mean() for i in range(number)])
    jackknife = ((number - 1) * (without - without.mean()).square().mean()).sqrt()
    return estimate.mean(), (jackknife * estimate.std() / number**0.5).sqrt()


def xdiag(operator: LinearOperator, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and standard error of the diagonal, each `(D,)`; two products for each random vector.

    Of one eigenvalue the error is a sum over pairs of vectors, each pair alike in the estimates of
    both. So their spread says half of the variance, and leaving out a vector twice of it: the
    geometric mean is right.
    """
    omega, images, unit = _doubled(operator, rows)
    q, r = torch.linalg.qr(images)
    s = _directions(r)
    z = flat_product(operator.T, q.T).T.to(q) / unit
    p = q @ s
    m = z @ s
    length = (s * r).sum(0)
    known = (q * z).sum(1, keepdim=True)  # diag(Q Q'A)
    mine = omega * p * length  # ω times what the others leave of A ω
    diagonals = known - p * m + mine
    number = len(rows)
    means = known + _without_two(p, m, omega * length, mine, s.T @ s) / (number - 1)
    jackknife = (number - 1) / number * (means - means.mean(1, keepdim=True)).square().sum(1)
    error = (jackknife.sqrt() * diagonals.std(1) / number**0.5).sqrt()
    return _in_units((diagonals.mean(1), error), unit)


def _without_two(p: Tensor, m: Tensor, scaled: Tensor, mine: Tensor, cosines: Tensor) -> Tensor:
    """Column i: what the estimates of all others add up to without vector i, beyond diag(Q Q'A).

    The range of Y without i and j is orthogonal in Q to s_i and to t, the part of s_j outside s_i.
    Both parts are written out and summed over j, so that no vector is left out by another
    factorization.
    """
    eye = torch.eye(len(cosines), dtype=p.dtype, device=p.device)
    c = cosines - cosines.diagonal() * eye
    weight = (1 - eye) / (1 - c.square()).clamp_min(torch.finfo(p.dtype).eps ** 0.5)
    cross = weight * c
    along = p * (m @ cross - scaled @ cross) + m * (p @ cross)
    return (mine - p * m) @ weight + along - p * m * (len(c) - 1 + (cross * c).sum(0))


def _doubled(operator: LinearOperator, rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """The random vectors and their images as columns, in double precision, and the unit that images are measured in."""
    double = torch.float64 if operator.device.type != "mps" else torch.float32
    images = flat_product(operator, rows).T.to(double)
    unit = power_of_two(images) or 1.0
    return rows.T.to(double), images / unit, unit


def _in_units(estimate: tuple[Tensor, Tensor | None], unit: float) -> tuple[Tensor, Tensor | None]:
    value, error = estimate
    return value * unit, None if error is None else error * unit


def _directions(r: Tensor) -> Tensor:
    """S. Where vectors are dependent, the range without one is that of all, and its direction may be any."""
    small = torch.finfo(r.dtype).eps * float(r.abs().max()) or 1.0
    safe = r + torch.diag(torch.where(r.diagonal().abs() < small, small, 0.0))
    eye = torch.eye(len(r), dtype=r.dtype, device=r.device)
    s = torch.linalg.solve_triangular(safe, eye, upper=True).T
    return s / s.norm(dim=0)


def _resphered(size: int, number: int, squared: Tensor) -> Tensor:
    """What gives the part of a Gaussian vector outside the others' range the length that it has on average."""
    return (size - number + 1) / squared.clamp_min(torch.finfo(squared.dtype).tiny)
