"""`diagonal`: exact, or estimated with a standard error for each entry."""

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
from hodiff.curvature._records import DiagonalRecord
from hodiff.curvature._space import sum_dtype
from hodiff.errors import InputError

Method = Literal["estimate", "exact"]


def diagonal(
    operator: LinearOperator,
    *,
    samples: int = 100,
    probes: Probes = "rademacher",
    vectors: Any = None,
    method: Method = "estimate",
    rtol: float | None = None,
    generator: torch.Generator | None = None,
) -> DiagonalRecord:
    r"""The diagonal of an operator: \(\mathbb{E}\, z \circ A z\) over random *z*, or exact.

    Args:
        operator: A square operator.
        method: `"estimate"`, or `"exact"`: one product for each column, or fewer passes where the operator
            knows of a way (`hodiff.FisherOperator`).
        samples: How many random vectors to draw. With as many as the operator has columns, or
            more, the diagonal is computed exactly.
        rtol: Stop an estimate as soon as the norm of the standard errors is below `rtol` times that of
            the diagonal (looked at every 8 vectors, after the first 16). None: spend all.
        probes: The law of their entries: `"rademacher"` (1 and -1) or `"gaussian"`, whose errors are
            larger.
        vectors: Random vectors of your own, as columns `(D, K)` or `K` stacked ones, whose entries are
            independent, of mean 0 and variance 1; then nothing is drawn.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.

    Returns:
        A record: `value` and `stderr`, with the structure and shapes of the point, `converged`, `products`.

    Raises:
        InputError: The operator is not square, fewer than 4 samples, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached.

    Cost:
        A product for each vector drawn, or as many as there are columns; memory for a few vectors.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.HessianOperator(lambda x: (x**3).sum() + x.prod(), torch.tensor([1.0, 2.0]))
        >>> hodiff.diagonal(H, method="exact").value
        tensor([ 6., 12.])

    Reference:
        Bekas, C., Kokiopoulou, E., Saad, Y. (2007). An estimator for the diagonal of a matrix. Applied
        Numerical Mathematics 57. doi:10.1016/j.apnum.2007.01.003.
    """
    check_square(operator, "diagonal")
    check_rtol(rtol)
    if method not in get_args(Method):
        raise InputError(f"method: got {method!r}, expected {' or '.join(map(repr, get_args(Method)))}.")
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    before = operator.products
    if method == "exact" or (not drawn.given and drawn.number >= operator.shape[0]):
        value = exact_diagonal(operator)
        stderr = torch.zeros_like(value)
        converged = True
    else:
        value, stderr = _estimate(operator, drawn, rtol)
        converged = rtol is None or bool(stderr.norm() <= rtol * value.norm())
    if not converged:
        warn_not_converged(
            f"diagonal: after {operator.products - before} products the standard error is "
            f"{float(stderr.norm() / value.norm()):.2g} of the diagonal, more than rtol={rtol:g}; allow more samples."
        )
    shaped = [operator.unflatten(part.to(operator.dtype)) for part in (value, stderr)]
    return DiagonalRecord(shaped[0], shaped[1], converged, operator.products - before)


def _estimate(operator: LinearOperator, drawn: RandomVectors, rtol: float | None) -> tuple[Tensor, Tensor]:
    """Mean and standard error of z * Az, by running sums of squared deviations (Welford, block by block)."""
    mean = operator._domain.zeros_flat(operator.shape[0]).to(sum_dtype(operator.dtype))
    squares, done = torch.zeros_like(mean), 0
    while done < drawn.number:
        count = min(BLOCK, drawn.number - done)
        z = drawn.take(count)
        found = z * flat_product(operator, z)
        own = found.mean(0)
        shift = own - mean
        squares += (found - own).square().sum(0) + shift.square() * (done * count / (done + count))
        mean += shift * (count / (done + count))
        done += count
        if rtol is not None and done >= 2 * BLOCK and _stderr(squares, done).norm() <= rtol * mean.norm():
            break
    return mean, _stderr(squares, done)


def _stderr(squares: Tensor, count: int) -> Tensor:
    return (squares / (count - 1) / count).sqrt()
