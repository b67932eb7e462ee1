"""`trace`: stochastic estimates with a standard error."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hodiff._core._options import Probes
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import (
    BLOCK,
    RandomVectors,
    check_rtol,
    check_square,
    exact_diagonal,
    flat_product,
    warn_not_converged,
)
from hodiff.curvature._records import TraceRecord
from hodiff.curvature._space import sum_dtype
from hodiff.errors import InputError

Method = Literal["hutchinson", "hutch++"]


def trace(
    operator: LinearOperator,
    *,
    samples: int = 100,
    probes: Probes = "rademacher",
    vectors: Any = None,
    method: Method = "hutchinson",
    rtol: float | None = None,
    generator: torch.Generator | None = None,
) -> TraceRecord:
    r"""The trace of an operator, \(\operatorname{tr} A = \mathbb{E}\, z^\top A z\) over random *z*.

    Args:
        operator: A square operator.
        method: `"hutchinson"`, the mean of \(z^\top A z\); or `"hutch++"`, which takes half of the vectors for
            a sketch of the largest eigenvalues, takes their part exactly, and estimates the rest: better
            where the spectrum decays.
        samples: How many random vectors to draw. Where as many products as the operator has columns, or
            fewer, give the trace exactly, they do.
        rtol: Stop as soon as the standard error is below `rtol * |value|` (looked at every 8 vectors,
            after the first 16). None: spend all.
        probes: The law of their entries: `"rademacher"` (1 and -1) or `"gaussian"`.
        vectors: Random vectors of your own, as columns `(D, K)` or `K` stacked ones, whose entries are
            independent, of mean 0 and variance 1; then nothing is drawn.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.

    Returns:
        A record: `value` and `stderr`, tensors of shape `()` in single precision at least, `converged`,
        `products`.

    Raises:
        InputError: The operator is not square, fewer than 4 samples, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached.

    Cost:
        A product for each vector, for Hutch++ two for each of the sketch; memory for a few vectors, for
        Hutch++ for `samples`.

    Examples:
        Rademacher probes find the trace of a diagonal matrix without error:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.arange(1.0, 201.0))
        >>> hodiff.trace(A, samples=4).value
        tensor(20100.)

    Reference:
        Hutchinson, M. F. (1990). Communications in Statistics 19(2). doi:10.1080/03610919008812866.
        Meyer, R. A., Musco, C., Musco, C., Woodruff, D. P. (2021). Hutch++: optimal stochastic trace
        estimation. SOSA. arXiv:2010.09649.
    """
    check_square(operator, "trace")
    check_rtol(rtol)
    if method not in get_args(Method):
        raise InputError(f"method: got {method!r}, expected {' or '.join(map(repr, get_args(Method)))}.")
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    before, dtype = operator.products, sum_dtype(operator.dtype)
    sketched = drawn.number // 2 if method == "hutch++" else 0
    if not drawn.given and drawn.number + sketched >= operator.shape[0]:
        value = exact_diagonal(operator).sum(dtype=torch.float64)
        return TraceRecord(value.to(dtype), torch.zeros_like(value, dtype=dtype), True, operator.products - before)
    basis = _sketch(operator, drawn.take(sketched)) if sketched else None
    known = 0.0 if basis is None else float((basis * flat_product(operator, basis)).sum(dtype=torch.float64))
    found = _hutchinson(operator, basis, drawn, drawn.number - sketched, rtol, known)
    value = found.mean() + known
    stderr = found.std() / len(found) ** 0.5
    converged = rtol is None or bool(stderr <= rtol * value.abs())
    if not converged:
        warn_not_converged(
            f"trace: after {operator.products - before} products the standard error is "
            f"{float(stderr / value.abs()):.2g} of the value, more than rtol={rtol:g}; allow more samples."
        )
    return TraceRecord(value.to(dtype), stderr.to(dtype), converged, operator.products - before)


def _hutchinson(
    operator: LinearOperator, basis: Tensor | None, drawn: RandomVectors, number: int, rtol: float | None, known: float
) -> Tensor:
    """Z'Az for each random vector z, in float64; with a basis, for what its projection leaves of z."""
    found: list[Tensor] = []
    for start in range(0, number, BLOCK):
        count = min(BLOCK, number - start)
        z = drawn.take(count).to(sum_dtype(operator.dtype))
        if basis is not None:
            z = z - (z @ basis.T) @ basis
        found.append((z * flat_product(operator, z)).sum(1, dtype=torch.float64))
        done = start + count
        if rtol is not None and done >= 2 * BLOCK:
            so_far = torch.cat(found)
            if so_far.std() / done**0.5 <= rtol * (so_far.mean() + known).abs():
                break
    return torch.cat(found)


def _sketch(operator: LinearOperator, rows: Tensor) -> Tensor:
    """An orthonormal basis, as rows, of the range of A on random vectors."""
    basis, _ = torch.linalg.qr(flat_product(operator, rows).T)
    return basis.T.contiguous()
