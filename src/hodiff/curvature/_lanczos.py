"""Lanczos processes side by side, each kept as orthogonal as its Gauss rule needs; the engine of `_quadrature`.

With A v_j = β_{j-1} v_{j-1} + α_j v_j + β_j v_{j+1} the vectors of a process are orthogonal but for rounding, which
grows. To take the parts in all vectors before out of each new one costs as much as a product of a small network. But T
is right up to rounding as long as all v_j'v_k stay below its square root, and how large they are follows from the α and
β alone (Simon 1984, doi:10.1090/S0025-5718-1984-0725988-X). So the parts are taken out only where that is at stake.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.curvature._basis import without
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import check_finite, flat_product, power_of_two
from hodiff.curvature._space import as_given
from hodiff.errors import InputError

NOISE = 16
"""How many units of rounding each step adds to the overlaps: measured, they then stay below a tenth of the limit."""


class Tridiagonal(NamedTuple):
    """What K processes have found in so many steps.

    Attributes:
        diagonal: The α, `(K, steps)`, in double precision on the CPU.
        beside: The β between them, `(K, steps - 1)`.
        whole: Whether a process has exhausted its space. It goes on with zeros, to which its rule gives no weight.
        unit: What α and β are measured in.
    """

    diagonal: Tensor
    beside: Tensor
    whole: Tensor
    unit: float


def lanczos(operator: LinearOperator, rows: Tensor, steps: int, name: str) -> Tridiagonal:
    """The processes that begin with the given rows, `(K, D)`."""
    count, size = rows.shape
    eps = torch.finfo(operator.dtype).eps
    basis = rows.new_empty((count, steps, size))
    diagonal = torch.zeros((count, steps), dtype=torch.float64, device="cpu")
    beside = torch.zeros((count, steps), dtype=torch.float64, device="cpu")
    overlaps = Overlaps(diagonal, beside, eps)
    lengths = rows.norm(dim=1, keepdim=True)
    if not bool(lengths.all()):
        raise InputError("vectors: one of them is zero, from which no Lanczos process begins.")
    torch.div(rows, lengths, out=basis[:, 0])
    norms = rows.new_zeros(count)
    unit = 0.0  # known with the first product
    scale = 0.0
    for j in range(steps):
        v, image = basis[:, j], _products(operator, basis[:, j])
        unit = unit or power_of_two(image) or 1.0
        # One by one: a batched product of vectors makes a copy.
        part = check_finite(torch.stack([torch.dot(a, b) for a, b in zip(v, image, strict=True)]) / unit, name)
        w = _next(image, basis[:, max(j - 1, 0) : j + 1], torch.stack([norms, part], 1)[:, 0 if j else 1 :], unit)
        norms = w.norm(dim=1)
        scale = max(scale, float(part.abs().max()), float(norms.max()))
        diagonal[:, j], beside[:, j] = part.double().cpu(), norms.double().cpu()
        for lost in overlaps.lost(j, scale):
            w[lost] = _orthogonalised(w[lost], basis[lost, : j + 1])
            norms[lost] = w[lost].norm()
        norms = norms.where(norms > 10 * eps * scale, 0.0)
        beside[:, j] = norms.double().cpu()
        if j + 1 == steps or not bool(norms.any()):
            break
        torch.div(w, norms.where(norms > 0, math.inf)[:, None], out=basis[:, j + 1])
    return Tridiagonal(diagonal, beside[:, : steps - 1], (norms == 0).cpu(), unit)


def _next(images: Tensor, last: Tensor, parts: Tensor, unit: float) -> Tensor:
    """The images in their unit, without their parts along the last vectors `(K, 1 or 2, D)`; memory is read once."""
    w = torch.empty_like(images)
    with as_given(images):
        for row, image, basis, part in zip(w, images, last, parts, strict=True):
            torch.addmv(image, basis.T, part, beta=1 / unit, alpha=-1, out=row)
    return w


class Overlaps:
    """How far from orthogonal the vectors of each process are, by Simon's recurrence for v_j'v_k.

    Args:
        diagonal: The α as they are found; beside: the β.
        eps: The rounding of products.
    """

    def __init__(self, diagonal: Tensor, beside: Tensor, eps: float) -> None:
        self._diagonal = diagonal
        self._beside = beside
        self._eps = eps
        self._now = torch.ones(
            (len(diagonal), 1), dtype=torch.float64, device="cpu"
        )  # v_j'v_k of the last vector, for k <= j
        self._before = self._now[:, :0]
        self._again = torch.zeros(len(diagonal), dtype=torch.bool, device="cpu")

    def lost(self, j: int, scale: float) -> list[int]:
        """The processes whose vector j + 1 has to be made orthogonal to those before; that is taken to be done."""
        alpha = self._diagonal[:, : j + 1]
        beta = self._beside[:, : j + 1]
        now = self._now
        terms = torch.zeros_like(now)
        if j:
            inner = terms[:, :j]
            inner += beta[:, :j] * now[:, 1:] + (alpha[:, :j] - alpha[:, j:]) * now[:, :j]
            inner -= beta[:, j - 1 : j] * self._before
            inner[:, 1:] += beta[:, : j - 1] * now[:, : j - 1]
        last = beta[:, j:]
        following = (terms + NOISE * self._eps * scale * torch.where(terms < 0, -1, 1)) / last
        worst = following.abs().amax(1) > self._eps**0.5
        lost = (worst | self._again) & (last[:, 0] > 10 * self._eps * scale)
        self._again = worst & lost  # two vectors in a row, since the next one follows from both
        following[lost] = 0
        self._before, self._now = now, torch.cat([following, torch.ones_like(last)], 1)
        return lost.nonzero()[:, 0].tolist()


def _orthogonalised(w: Tensor, basis: Tensor) -> Tensor:
    """A vector without its parts in the basis; twice where much cancels."""
    for _ in range(2):
        before = w.norm()
        w, _ = without(w, basis)
        if bool(w.norm() > 0.5 * before):
            break
    return w


def _products(operator: LinearOperator, rows: Tensor) -> Tensor:
    if len(rows) == 1:
        return operator._applied(rows[0].to(operator.dtype)).to(rows.dtype)[None]
    return flat_product(operator, rows)
