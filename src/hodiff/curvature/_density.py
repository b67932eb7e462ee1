"""`spectral_density` and `logdet`: what all eigenvalues say together, by stochastic Lanczos quadrature."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff._core._options import Probes
from hodiff._core._random_vectors import standard_error
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import (
    RandomVectors,
    check_detached,
    check_rtol,
    check_square,
    reached,
    warn_not_converged,
)
from hodiff.curvature._quadrature import Rules, exact_rules, rules
from hodiff.curvature._records import DensityRecord, TraceRecord
from hodiff.curvature._space import sum_dtype
from hodiff.curvature._watch import Callback, Watch
from hodiff.errors import InputError


def spectral_density(
    operator: LinearOperator,
    *,
    samples: int = 10,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    steps: int = 50,
    width: float | None = None,
    points: int = 500,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> DensityRecord:
    r"""The density of an operator's eigenvalues, \(\rho(t) = \tfrac1D \sum_i g_\sigma(t - \lambda_i)\).

    Each random vector gives, by a Lanczos process of `steps` products, the nodes and weights of a Gauss rule for the
    measure that it sees; their mean is the density, each node drawn as a Gaussian \(g_\sigma\) of width \(\sigma\).
    Isolated eigenvalues at both ends are found sharply, where they have a weight of their own to be seen by: one
    of *D* has \(1/D\).

    Args:
        operator: A symmetric operator.
        samples: How many random vectors to draw. Where their products are as many as the operator has columns, or
            more, all eigenvalues are computed instead.
        probes: The law of their entries: `"rademacher"` (1 and -1) or `"gaussian"`.
        vectors: Random vectors of your own, one or several, as columns `(D, K)` or `K` stacked ones, whose entries
            are independent, of mean 0 and variance 1; then nothing is drawn. Several that are all the same, up to sign,
            count as one.
        create_graph: The result is detached. None warns where that makes a constant of something that requires grad;
            False says that a constant is meant; True is refused, and names the way to the derivative.
        steps: How many products each vector takes: the nodes of its rule.
        width: The \(\sigma\), in units of the eigenvalues; None: a fiftieth of the spectrum's extent.
        points: How many points the grid has; it reaches four widths beyond the outermost nodes.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.
        callback: A function that is given the record as it stands, after some of the vectors.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value`, the density on `grid`, and its standard error `stderr`, each of shape `(points,)` (`stderr`
        is None for one vector); `nodes` and `weights` of shape `(samples, steps)`, from which every mean
        \(\tfrac1D \sum f(\lambda_i)\) follows: `record.mean(f)`; `width`; `products`; and
        `record.at(grid, width)`, the density elsewhere.

    Raises:
        InputError: The operator is not symmetric.

    Warns:
        HodiffWarning: It is detached, although the operator or *vectors* require grad (see `create_graph`).

    Cost:
        `samples * steps` products, up to eight vectors in one. Memory: `steps` vectors for each of them, within
        256 MiB.

    Note:
        The standard error is that over random vectors. A rule of *m* nodes is exact for polynomials of degree 2m - 1,
        so what is narrower than about the spectrum's extent over `steps` is not resolved inside the bulk, with
        whatever number of vectors.

    Examples:
        Of two eigenvalues, one three times as frequent:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([1.0] * 300 + [5.0] * 100))
        >>> found = hodiff.spectral_density(A, samples=4, steps=2, probes="rademacher")
        >>> found.nodes[0].round(decimals=3), found.weights[0].round(decimals=3)
        (tensor([1., 5.], dtype=torch.float64), tensor([0.7500, 0.2500], dtype=torch.float64))

    Reference:
        Ghorbani, B., Krishnan, S., Xiao, Y. (2019). An investigation into neural net optimization via Hessian
        eigenvalue density. ICML. arXiv:1901.10159.
        Lin, L., Saad, Y., Yang, C. (2016). Approximating spectral densities of large matrices. SIAM Review 58(1).
        doi:10.1137/130934283.
    """
    operator = check_square(operator, "spectral_density", symmetric=True, instead="hodiff.eigs")
    check_detached("spectral_density", operator, create_graph, vectors=vectors)
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    _checks.check_integer(steps, "steps", least=1)
    _checks.check_integer(points, "points", least=2)
    _check_width(width)

    def record(found: Rules, spent: int) -> DensityRecord:
        low, high = extent(found)
        # A spectrum of one value has no extent, but for rounding; its own size is then the unit.
        largest = max(abs(low), abs(high))
        sigma = width or (high - low if high - low > 1e-6 * largest else largest) / 50 or 1.0
        grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, points, dtype=torch.float64, device="cpu")
        exact = found.exact
        empty = torch.empty(0, device="cpu")
        bare = DensityRecord(empty, None, grid, found.nodes, found.weights, sigma, exact, spent)
        value, error = bare.at(grid, sigma)
        return dataclasses.replace(bare, value=value, stderr=error)

    with Watch("spectral_density", operator, drawn.number * steps, callback, progress) as watch:

        def look(so_far: Rules) -> bool:
            watch(lambda spent: record(so_far, spent))
            return False

        exact = not drawn.given and drawn.number * steps >= operator.shape[0]
        return record(
            exact_rules(operator) if exact else rules(operator, drawn, steps, "spectral_density", look), watch.spent
        )


def logdet(
    operator: LinearOperator,
    *,
    shift: float = 0.0,
    samples: int = 10,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    steps: int = 50,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> TraceRecord:
    r"""The log-determinant of a positive definite operator, \(\log\det(A + \mu I) = \operatorname{tr}\log(A + \mu I)\).

    By stochastic Lanczos quadrature, as `hodiff.spectral_density`.

    Args:
        operator: A symmetric operator.
        shift: The \(\mu\) that is added: a prior's precision, a damping.
        samples: How many random vectors to draw. Where their products are as many as the operator has columns, or
            more, all eigenvalues are computed instead.
        probes: The law of their entries: `"rademacher"` (1 and -1) or `"gaussian"`, whose errors are larger.
        vectors: Random vectors of your own, one or several, as columns `(D, K)` or `K` stacked ones, whose entries
            are independent, of mean 0 and variance 1; then nothing is drawn. Several that are all the same, up to sign,
            count as one.
        create_graph: The result is detached. None warns where that makes a constant of something that requires grad;
            False says that a constant is meant; True is refused, and names the way to the derivative.
        steps: How many products each vector takes.
        rtol: Stop as soon as the standard error is below `rtol * |value|` (looked at every 8 vectors). None: spend all.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.
        callback: A function that is given the record as it stands, after some of the vectors.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value` and `stderr`, tensors of shape `()` in single precision at least (`stderr` is None where one
        vector says nothing about it); `converged`, None without `rtol`; and `products`. The standard error holds
        the spread over random vectors, and the error of their rules, judged by what doubling the steps has changed.

    Raises:
        InputError: The operator is not symmetric, or has shown an eigenvalue of \(A + \mu I\) that is negative, or zero
            up to rounding.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached; or the error of the rules is larger than the spread
            over random vectors, so that more steps are needed, not more vectors.
        HodiffWarning: It is detached, although the operator or *vectors* require grad (see `create_graph`).

    Cost:
        `samples * steps` products, up to eight vectors in one. Memory: `steps` vectors for each of them, within
        256 MiB.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([1.0] * 300 + [4.0] * 100))
        >>> hodiff.logdet(A, samples=4, steps=2).value.round(decimals=1), 100 * torch.tensor(4.0).log()
        (tensor(138.6000), tensor(138.6294))

    Reference:
        Ubaru, S., Chen, J., Saad, Y. (2017). Fast estimation of tr(f(A)) via stochastic Lanczos quadrature. SIAM J.
        Matrix Anal. Appl. 38(4). doi:10.1137/16M1104974.
    """
    operator = check_square(operator, "logdet", symmetric=True, instead="the log-determinant of A.T @ A, halved")
    check_detached("logdet", operator, create_graph, vectors=vectors)
    if not _checks.is_number(shift):
        raise InputError(f"shift: got {shift!r}, expected a number.")
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    check_rtol(rtol, drawn.number)
    _checks.check_integer(steps, "steps", least=1)
    size, dtype = operator.shape[0], sum_dtype(operator.dtype)
    eps = torch.finfo(operator.dtype).eps

    def estimate(found: Rules) -> tuple[Tensor, Tensor | None, Tensor]:
        """Value, standard error over vectors, and the error of their rules."""
        logs, error = found.means(lambda nodes, weights: _logs(nodes, weights, shift, eps) * size)
        spread = torch.zeros((), dtype=torch.float64, device="cpu") if found.exact else standard_error(logs)
        return logs.mean(), spread, error

    def record(found: Rules, asked: float | None, spent: int) -> TraceRecord:
        value, spread, rest = estimate(found)
        error = None if spread is None else torch.hypot(spread, rest)
        converged = reached(value, error, asked)
        return TraceRecord(value.to(dtype), None if error is None else error.to(dtype), converged, spent)

    with Watch("logdet", operator, drawn.number * steps, callback, progress) as watch:

        def look(so_far: Rules) -> bool:
            watch(lambda spent: record(so_far, None, spent))
            return rtol is not None and len(so_far.nodes) > 1 and bool(record(so_far, rtol, 0).converged)

        exact = not drawn.given and drawn.number * steps >= size
        found = exact_rules(operator) if exact else rules(operator, drawn, steps, "logdet", look)
        value, spread, rest = estimate(found)
        made = record(found, rtol, watch.spent)
        allowed = 1e-2 * value.abs() if spread is None else spread.clamp_min(1e2 * eps * float(value.abs()))
        if rest > allowed:
            warn_not_converged(
                f"logdet: the error of rules of {steps} steps is about {float(rest):.2g}, more than the spread over "
                f"random vectors; allow more steps, or add a shift."
            )
        elif made.converged is False:
            warn_not_converged(
                f"logdet: after {watch.spent} products the standard error is more than rtol={rtol:g} of the value; "
                f"allow more samples."
            )
        return made


def _logs(nodes: Tensor, weights: Tensor, shift: float, eps: float) -> Tensor:
    """The mean of the logarithm by each rule."""
    shifted = nodes + shift
    seen = torch.where(weights > 0, shifted, math.inf)  # a node without weight stands for nothing
    least = float(seen.min())
    if not least > 10 * eps * max(float(nodes.abs().max()), abs(shift)):
        raise InputError(
            f"logdet: the operator has an eigenvalue of about {least - shift:.3g}, which with shift={shift:g} is not "
            f"positive (up to rounding), so there is no log-determinant; give a larger shift=, or take "
            f"hodiff.GaussNewtonOperator, which is never negative."
        )
    return (weights * torch.where(weights > 0, shifted, 1.0).log()).sum(1)


def extent(found: Rules) -> tuple[float, float]:
    """The outermost nodes that have a weight."""
    seen = found.nodes[found.weights > 1e-14]
    return float(seen.min()), float(seen.max())


def _check_width(width: object) -> None:
    if width is not None and (not _checks.is_number(width) or width <= 0):
        raise InputError(f"width: got {width!r}, expected a positive number, or None.")
