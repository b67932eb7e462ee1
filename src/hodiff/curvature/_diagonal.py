"""`diagonal`: exact, or estimated with a standard error for each entry."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import check_generator, check_square, flat_product, probes, warn_not_converged
from hodiff.curvature._records import DiagonalRecord
from hodiff.curvature._trace import BLOCK, check_rtol
from hodiff.errors import InputError


def diagonal(
    operator: LinearOperator,
    *,
    method: str = "estimate",
    products: int = 100,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
) -> DiagonalRecord:
    r"""The diagonal of an operator: \(\mathbb{E}\, z \circ A z\) over random signs *z*, or exact.

    Args:
        operator: A square operator.
        method: `"estimate"`, or `"exact"`: one product for each column.
        products: How many products an estimate may spend. With as many as the operator has columns, or
            more, the diagonal is computed exactly.
        rtol: Stop an estimate as soon as the norm of the standard errors is below `rtol` times that of
            the diagonal (looked at every 8 probes, after the first 16). None: spend all products.
        generator: Where the probes are drawn from; None is PyTorch's default generator.

    Returns:
        A record: `value` and `stderr`, with the structure and shapes of the point, `converged`, `products`.

    Raises:
        InputError: The operator is not square, fewer than 4 products, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached.

    Cost:
        `products` products at most, or as many as there are columns; memory for a few vectors.

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
    _checks.check_integer(products, "products", least=4)
    check_generator(generator)
    check_rtol(rtol)
    if method not in ("estimate", "exact"):
        raise InputError(f"method: got {method!r}, expected 'estimate' or 'exact'.")
    before = operator.products
    if method == "exact" or products >= operator.shape[0]:
        value = _exact(operator)
        stderr = torch.zeros_like(value)
        converged = True
    else:
        value, stderr = _estimate(operator, products, rtol, generator)
        converged = rtol is None or bool(stderr.norm() <= rtol * value.norm())
    if not converged:
        warn_not_converged(
            f"diagonal: after {operator.products - before} products the standard error is "
            f"{float(stderr.norm() / value.norm()):.2g} of the diagonal, more than rtol={rtol:g}; allow more products."
        )
    shaped = [operator.unflatten(part.to(operator.dtype)) for part in (value, stderr)]
    return DiagonalRecord(shaped[0], shaped[1], converged, operator.products - before)


def _exact(operator: LinearOperator) -> Tensor:
    size = operator.shape[0]
    entries = torch.empty(size, dtype=operator.dtype, device=operator.device)
    for start in range(0, size, 64):
        stop = min(start + 64, size)
        units = torch.zeros((stop - start, size), dtype=operator.dtype, device=operator.device)
        units[:, start:stop].fill_diagonal_(1)
        entries[start:stop] = flat_product(operator, units)[:, start:stop].diagonal()
    return entries


def _estimate(
    operator: LinearOperator, products: int, rtol: float | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Mean and standard error of z * Az, by running sums of squared deviations (Welford, block by block)."""
    size = operator.shape[0]
    mean = torch.zeros(size, dtype=operator.dtype, device=operator.device)
    squares, done = torch.zeros_like(mean), 0
    while done < products:
        count = min(BLOCK, products - done)
        z = probes(operator, count, "rademacher", generator)
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
