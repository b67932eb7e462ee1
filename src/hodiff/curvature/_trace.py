"""`trace`: stochastic estimates with a standard error."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import (
    check_distribution,
    check_generator,
    check_square,
    flat_product,
    probes,
    warn_not_converged,
)
from hodiff.curvature._records import TraceRecord
from hodiff.curvature._space import wide
from hodiff.errors import InputError

BLOCK = 8
"""Probes between two looks at the tolerance."""


def trace(
    operator: LinearOperator,
    *,
    method: str = "hutchinson",
    products: int = 100,
    rtol: float | None = None,
    distribution: str = "rademacher",
    generator: torch.Generator | None = None,
) -> TraceRecord:
    r"""The trace of an operator, \(\operatorname{tr} A = \mathbb{E}\, z^\top A z\) over random *z*.

    Args:
        operator: A square operator.
        method: `"hutchinson"`, the mean of \(z^\top A z\); or `"hutch++"`, which spends a third of the
            products on a sketch of the largest eigenvalues, takes their part exactly, and estimates the
            rest: better where the spectrum decays.
        products: How many products to spend. With as many as the operator has columns, or more, the
            trace is computed exactly.
        rtol: Stop as soon as the standard error is below `rtol * |value|` (looked at every 8 probes,
            after the first 16). None: spend all products.
        distribution: Of the probes, `"rademacher"` (entries 1 and -1) or `"normal"`.
        generator: Where the probes are drawn from; None is PyTorch's default generator.

    Returns:
        A record: `value` and `stderr`, tensors of shape `()`, `converged`, `products`.

    Raises:
        InputError: The operator is not square, fewer than 4 products, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached.

    Cost:
        `products` products at most; memory for a few vectors, for Hutch++ for a third of `products`.

    Examples:
        Rademacher probes find the trace of a diagonal matrix without error:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.arange(1.0, 201.0))
        >>> hodiff.trace(A, products=4).value
        tensor(20100.)

    Reference:
        Hutchinson, M. F. (1990). Communications in Statistics 19(2). doi:10.1080/03610919008812866.
        Meyer, R. A., Musco, C., Musco, C., Woodruff, D. P. (2021). Hutch++: optimal stochastic trace
        estimation. SOSA. arXiv:2010.09649.
    """
    check_square(operator, "trace")
    _checks.check_integer(products, "products", least=4)
    check_distribution(distribution)
    check_generator(generator)
    check_rtol(rtol)
    if method not in ("hutchinson", "hutch++"):
        raise InputError(f"method: got {method!r}, expected 'hutchinson' or 'hutch++'.")
    before = operator.products
    size = operator.shape[0]
    if products >= size:
        value, stderr = _exact(operator), torch.zeros((), dtype=operator.dtype, device=operator.device)
        return TraceRecord(value, stderr, True, operator.products - before)
    if method == "hutchinson":
        known, samples = 0.0, _hutchinson(operator, None, products, distribution, generator, rtol, 0.0)
    else:
        basis = _sketch(operator, products // 3, distribution, generator)
        known = float((basis * flat_product(operator, basis)).sum())
        left = products - 2 * (products // 3)
        samples = _hutchinson(operator, basis, left, distribution, generator, rtol, known)
    value = samples.mean() + known
    stderr = samples.std() / len(samples) ** 0.5
    converged = rtol is None or bool(stderr <= rtol * value.abs())
    if not converged:
        warn_not_converged(
            f"trace: after {operator.products - before} products the standard error is "
            f"{float(stderr / value.abs()):.2g} of the value, more than rtol={rtol:g}; allow more products."
        )
    dtype = operator.dtype
    return TraceRecord(value.to(dtype), stderr.to(dtype), converged, operator.products - before)


def check_rtol(rtol: object) -> None:
    """Raise unless the tolerance is a positive number, or None."""
    if rtol is not None and (isinstance(rtol, bool) or not isinstance(rtol, (int, float)) or not rtol > 0):
        raise InputError(f"rtol: got {rtol!r}, expected a positive number, or None.")


def _exact(operator: LinearOperator) -> Tensor:
    """The trace by unit vectors, some at a time."""
    size, total = operator.shape[0], torch.zeros((), dtype=torch.float64, device=operator.device)
    for start in range(0, size, 64):
        stop = min(start + 64, size)
        units = torch.zeros((stop - start, size), dtype=operator.dtype, device=operator.device)
        units[:, start:stop].fill_diagonal_(1)
        total += flat_product(operator, units)[:, start:stop].diagonal().sum(dtype=torch.float64)
    return total.to(operator.dtype)


def _hutchinson(
    operator: LinearOperator,
    basis: Tensor | None,
    products: int,
    distribution: str,
    generator: torch.Generator | None,
    rtol: float | None,
    known: float,
) -> Tensor:
    """Z'Az for each probe z, in float64; with a basis, for what its projection leaves of z."""
    samples: list[Tensor] = []
    done = 0
    while done < products:
        count = min(BLOCK, products - done)
        z = probes(operator, count, distribution, generator)
        if basis is not None:
            z = z - (z @ basis.T) @ basis
        samples.append((z * flat_product(operator, z)).sum(1, dtype=torch.float64))
        done += count
        if rtol is not None and done >= 2 * BLOCK:
            so_far = torch.cat(samples)
            if so_far.std() / done**0.5 <= rtol * (so_far.mean() + known).abs():
                break
    return torch.cat(samples)


def _sketch(operator: LinearOperator, count: int, distribution: str, generator: torch.Generator | None) -> Tensor:
    """An orthonormal basis, as rows, of the range of A on random vectors."""
    image = flat_product(operator, probes(operator, count, distribution, generator))
    basis, _ = torch.linalg.qr(image.to(wide(image.dtype)).T)
    return basis.T.to(image.dtype).contiguous()
