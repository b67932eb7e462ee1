"""`diagonal`: exact, or estimated with a standard error for each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from hodiff._core._options import Probes, check_option
from hodiff._core._random_vectors import near
from hodiff.curvature._leave_one_out import xdiag
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import (
    BLOCK,
    RandomVectors,
    check_detached,
    check_rtol,
    check_square,
    exact_diagonal,
    flat_product,
    reached,
    warn_not_converged,
)
from hodiff.curvature._records import DiagonalRecord
from hodiff.curvature._space import sum_dtype
from hodiff.curvature._watch import Callback, Watch
from hodiff.errors import InputError

Method = Literal["estimate", "xdiag", "exact"]


def diagonal(
    operator: LinearOperator,
    *,
    samples: int = 100,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    method: Method = "estimate",
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> DiagonalRecord:
    r"""The diagonal of an operator: \(\mathbb{E}\, z \circ A z\) over random *z*, or exact.

    Args:
        operator: A square operator.
        method: `"estimate"`, the mean of \(z \circ A z\); `"xdiag"`, which takes the part of a sketch exactly, and
            makes each vector in turn the one that estimates the rest: better where the spectrum decays; or `"exact"`:
            one product for each column, or fewer passes where the operator knows of a way (`hodiff.FisherOperator`).
        samples: How many random vectors to draw. With as many as the operator has columns, or
            more, the diagonal is computed exactly.
        rtol: Stop an estimate as soon as the norm of the standard errors is below `rtol` times that of
            the diagonal (looked at every 8 vectors, after the first 16). None: spend all.
        probes: The law of their entries: `"rademacher"` (1 and -1) or `"gaussian"`, whose errors are
            larger.
        vectors: Random vectors of your own, one or several, as columns `(D, K)` or `K` stacked ones, whose entries
            are independent, of mean 0 and variance 1; then nothing is drawn. Several that are all the same, up to sign,
            count as one.
        create_graph: The result is detached. None warns where that makes a constant of something that requires grad;
            False says that a constant is meant; True is refused, and names the way to the derivative.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.
        callback: A function that is given the record as it stands, every 8 vectors.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value` and `stderr`, with the structure and shapes of the point (`stderr` is None where one vector
        says nothing about it; XDiag's is up to 1.6 times too large where the spectrum decays fast); `converged`, None
        without `rtol`; `products`.

    Raises:
        InputError: The operator is not square, XDiag's probes are not signs, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached.
        HodiffWarning: It is detached, although the operator or *vectors* require grad (see `create_graph`).

    Cost:
        A product for each vector drawn, two for XDiag (one of them with the transpose), or as many as there are
        columns; memory for a few vectors, for XDiag for `samples`, in double precision.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.HessianOperator(lambda x: (x**3).sum() + x.prod(), torch.tensor([1.0, 2.0]))
        >>> hodiff.diagonal(H, method="exact").value
        tensor([ 6., 12.])

    Reference:
        Bekas, C., Kokiopoulou, E., Saad, Y. (2007). An estimator for the diagonal of a matrix. Applied
        Numerical Mathematics 57. doi:10.1016/j.apnum.2007.01.003.
        Epperly, E. N., Tropp, J. A., Webber, R. J. (2024). XTrace: making the most of every sample in stochastic
        trace estimation. SIAM J. Matrix Anal. Appl. 45(1). doi:10.1137/23M1548323.
    """
    operator = check_square(operator, "diagonal")
    check_detached("diagonal", operator, create_graph, vectors=vectors)
    check_option(method, Method, "method")
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    check_rtol(rtol, None if method == "exact" else drawn.number)
    size, needed = operator.shape[0], drawn.number * (2 if method == "xdiag" else 1)
    exact = method == "exact" or (needed >= size and not drawn.given)
    if method == "xdiag" and not exact:
        _check_signs(drawn, probes)

    def record(value: Tensor, stderr: Tensor | None, asked: float | None, spent: int) -> DiagonalRecord:
        shaped = [None if part is None else operator.unflatten(part.to(operator.dtype)) for part in (value, stderr)]
        return DiagonalRecord(shaped[0], shaped[1], reached(value, stderr, asked), spent)

    with Watch("diagonal", operator, size if exact else needed, callback, progress) as watch:
        if exact or (method == "xdiag" and drawn.number >= size):
            value = exact_diagonal(operator)
            stderr = torch.zeros_like(value)
        elif method == "xdiag":
            value, stderr = xdiag(operator, drawn.take(drawn.number))
        else:
            value, stderr = _estimate(
                operator, drawn, rtol, lambda mean, error: watch(lambda spent: record(mean, error, None, spent))
            )
        if reached(value, stderr, rtol) is False:
            error = float("nan") if stderr is None else float(stderr.norm() / value.norm())
            warn_not_converged(
                f"diagonal: after {watch.spent} products the standard error is {error:.2g} of the diagonal, more than "
                f"rtol={rtol:g}; allow more samples."
            )
        return record(value, stderr, rtol, watch.spent)


def _check_signs(drawn: RandomVectors, probes: Probes) -> None:
    if probes != "rademacher" or drawn.number < 2 or not drawn.signs:
        raise InputError(
            "method='xdiag': takes at least two vectors whose entries are 1 and -1 (probes='rademacher'): each "
            "square is to be 1, not only their mean."
        )


def _estimate(
    operator: LinearOperator, drawn: RandomVectors, rtol: float | None, look: Callable[[Tensor, Tensor | None], None]
) -> tuple[Tensor, Tensor | None]:
    """Mean and standard error of z * Az, by running sums of squared deviations (Welford, block by block)."""
    mean = operator._domain.zeros_flat(operator.shape[0]).to(sum_dtype(operator.dtype))
    squares = torch.zeros_like(mean)
    done = 0
    unit = mean
    so_far: tuple[Tensor, Tensor | None] = mean, None
    while done < drawn.number:
        count = min(BLOCK, drawn.number - done)
        z = drawn.take(count)
        found = z * flat_product(operator, z)
        if not done:
            unit = near(found.abs().amax(0))  # of each entry, whose square may have no place
        found = found / unit
        own = found.mean(0)
        shift = own - mean
        squares += (found - own).square().sum(0) + shift.square() * (done * count / (done + count))
        mean += shift * (count / (done + count))
        done += count
        error = (squares / (done - 1) / done).sqrt() if done > 1 else None
        so_far = mean * unit, None if error is None else error * unit
        look(*so_far)
        if rtol is not None and done >= 2 * BLOCK and reached(*so_far, rtol):
            break
    return so_far
