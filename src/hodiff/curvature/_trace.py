"""`trace`, `diagonal`: stochastic estimates with a standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hodiff._core import _settings
from hodiff._core._arguments import Probes, check_option
from hodiff._core._vectors import near, standard_error, sum_dtype
from hodiff.curvature import _krylov
from hodiff.curvature._operator import LinearOperator, as_given, normal
from hodiff.curvature._probes import (
    BLOCK,
    Callback,
    EstimatorProgress,
    RandomVectors,
    all_reached,
    check_rtol,
    check_square,
    exact_diagonal,
    flat_product,
    is_recorded,
    reached,
    warn_not_converged,
)
from hodiff.curvature._records import DiagonalRecord, Route, TraceRecord
from hodiff.errors import InputError

TraceMethod = Literal["hutchinson", "hutch++"]


def trace(
    operator: LinearOperator,
    *,
    blocks: Sequence[str] = (),
    samples: int = 100,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    method: TraceMethod = "hutchinson",
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> TraceRecord:
    r"""The trace of an operator, tr A = E[zᵀA z] over random z.

    Args:
        operator: A square operator.
        blocks: Names or patterns of leaves, as for `A.block`: also return the traces of these
            diagonal blocks, from the same products. Their estimates contain noise from outside the
            block; `trace(A.block(name))`, with its own products, does not. For `"hutchinson"`.
        samples: How many random vectors to draw. If they take at least as many products as the
            exact trace, it is computed exactly: a product for each column, or the passes that
            `hodiff.GaussNewtonOperator` names.
        probes: The distribution of their entries: `"rademacher"` (1 and -1) or `"gaussian"`.
        vectors: Your own random vectors, one or several, in a form that `A @ v` accepts (several
            flat ones are columns `(D, K)`), with independent entries of mean 0 and variance 1; then
            none is drawn. Vectors that are all equal up to sign count as one.
        create_graph: Whether `value` can be differentiated, for example as a loss, with respect to
            the parameters, *vectors* and everything that the operator's function uses. For
            `"hutchinson"` and the operators that `hodiff.solve` names. With one vector of your own
            it is \(v^\top H v\). None: only inside the function of another hodiff call.
        method: `"hutchinson"`, the mean of \(z^\top A z\); or `"hutch++"`, which uses half of the
            vectors for a sketch of the largest eigenvalues, computes their part exactly, and
            estimates the rest. That is better if the spectrum decays.
        rtol: Stop as soon as the standard error is below `rtol * |value|` (checked every 8 vectors,
            after the first 16). None: use all samples.
        generator: The source of the random vectors; None: the default generator of the operator's
            device.
        callback: A function that receives the current record, every 8 vectors.
        progress: Whether to show a progress bar. None: in a terminal, after two seconds.

    Returns:
        A record: `value` and `stderr`, tensors of shape `()` in single precision at least (`stderr`
        is None where one vector says nothing about it); `converged`, None without `rtol`;
        `products`; and `blocks`, a dict of records by pattern.

    Raises:
        InputError: The operator is not square, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was not reached.
        HodiffWarning: The result is detached, although the operator or *vectors* require grad (see
            `create_graph`).
        HodiffWarning: The result is not finite.

    Cost:
        A product for each vector, two for each vector of the sketch of `"hutch++"`.
        `"hutchinson"` needs memory for a few vectors, `"hutch++"` for half of `samples`.

        With `create_graph`, one more evaluation and pass, and the graphs of all products at once.
        Third derivatives may follow, so layer, batch and instance norm are computed from their
        definition.

    Note:
        Standard errors are themselves estimates, and rough ones if there are few vectors.

    Examples:
        Rademacher probes find the trace of a diagonal matrix without error:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.arange(1.0, 201.0))
        >>> hodiff.trace(A, samples=4).value
        tensor(20100.)

    Reference:
        Hutchinson, M. F. (1990). Communications in Statistics 19(2). doi:10.1080/03610919008812866.
        Meyer, R. A., Musco, C., Musco, C., Woodruff, D. P. (2021). Hutch++: optimal stochastic
        trace estimation. SOSA. arXiv:2010.09649.
    """
    operator = check_square(operator, "trace", stacks=True)
    check_option(method, TraceMethod, "method")
    if operator._domain.batch and method != "hutchinson":
        raise InputError(
            f"method={method!r} takes one matrix at a time, but the operator is a stack of "
            f"{tuple(operator._domain.batch)}; use 'hutchinson'."
        )
    recorded = is_recorded("trace", operator, create_graph, vectors=vectors)
    drawn = RandomVectors(operator, samples, probes, vectors, generator, live=recorded)
    check_rtol(rtol, drawn.number)
    leaves = _leaves_of(operator, blocks, method)
    if recorded:
        if method != "hutchinson" or blocks or rtol is not None:
            raise InputError("create_graph needs method='hutchinson', without blocks= and rtol=.")
        exact = drawn.exhaust(drawn.number)
        value, error, spent = _differentiable(operator, drawn, exact=exact, summed=True)
        return TraceRecord(value, error, None, spent)
    # two products for one of the sketch
    needed = drawn.number + (drawn.number // 2 if method == "hutch++" else 0)
    with EstimatorProgress("trace", operator, needed, callback, progress) as watch:
        entries, _ = exact_diagonal(operator, drawn.spare(needed))
        if entries is not None:
            terms = _krylov.of(operator).leaf_sums(operator._domain.pieces(entries))[None]
            record = _record(operator, terms, leaves, 0.0, rtol, watch, exact=True)
        else:
            record = _hutchinson(operator, drawn, method == "hutch++", leaves, rtol, watch)
        watch.warn_if_not_finite(record.value)
        if not all_reached(record.converged):
            error = "unknown"
            if record.stderr is not None:
                error = f"{float((record.stderr / record.value.abs()).max()):.2g} of the value"
            warn_not_converged(
                f"trace: after {watch.spent} products the standard error is {error}, "
                f"more than rtol={rtol:g}; allow more samples."
            )
        return record


def _differentiable(
    operator: LinearOperator, drawn: RandomVectors, *, exact: bool, summed: bool
) -> tuple[Tensor, Tensor | None, int]:
    """The mean of z * Az, or of z'Az (`summed`), with its graph; if `exact`, the sum over unit
    vectors. With its standard error, and how many products it took.
    """
    before, dtype = operator.products, sum_dtype(operator.dtype)
    units = operator._domain.units(0, operator.shape[-1]) if exact else None
    rows = drawn.take(drawn.number).to(operator.dtype) if units is None else units
    with _settings.recording():
        rows = normal(rows)
        forms = rows.to(dtype) * operator._recorded_rows(rows).to(dtype)
        forms = forms.sum(-1) if summed else forms
        value = forms.sum(0) if exact else forms.mean(0)
    known = forms.detach()
    error = torch.zeros_like(known[0]) if exact else standard_error(known)
    return value, error, operator.products - before


def _leaves_of(
    operator: LinearOperator, blocks: Sequence[str], method: str
) -> dict[str, list[int]]:
    """The numbers of the leaves of each block."""
    if isinstance(blocks, str) or not isinstance(blocks, Sequence):
        raise InputError(
            f"blocks: got {blocks!r}, expected a list of patterns: ['layer1.*', 'head']."
        )
    if blocks and method != "hutchinson":
        raise InputError(
            f"blocks: these come from z * A z, so they need method='hutchinson', not {method!r}."
        )
    return {pattern: operator._domain.numbers_of([pattern]) for pattern in blocks}


def _hutchinson(
    operator: LinearOperator,
    drawn: RandomVectors,
    sketched: bool,
    leaves: dict[str, list[int]],
    rtol: float | None,
    watch: EstimatorProgress,
) -> TraceRecord:
    """The z'Az of each random vector z, leaf by leaf; with a sketch,
    of what its projection leaves of z.
    """
    first = drawn.number // 2 if sketched else 0
    basis, known = None, 0.0
    inner = _krylov.of(operator)
    if first:  # Hutch++, algorithm 1: the range of A on random vectors, of which the trace is exact
        basis = inner.orthonormal(flat_product(operator, drawn.take(first)))
        form = basis * flat_product(operator, basis)
        known = float(inner.sums(partial(torch.sum, dtype=torch.float64), form))
    estimates: list[Tensor] = []
    number = drawn.number - first
    for start in range(0, number, BLOCK):
        z = drawn.take(min(BLOCK, number - start)).to(sum_dtype(operator.dtype))
        if basis is not None:
            with as_given(z):
                z = z - inner.gram(z, basis).to(z) @ basis
        terms = operator._domain.pieces(z * flat_product(operator, z))
        estimates.append(inner.leaf_sums(terms).movedim(0, 1))
        so_far = torch.cat(estimates)
        watch(lambda _, so_far=so_far: _record(operator, so_far, leaves, known, None, watch))
        if (
            rtol is not None
            and len(so_far) >= 2 * BLOCK
            and all_reached(_record(operator, so_far, {}, known, rtol, watch).converged)
        ):
            break
    return _record(operator, torch.cat(estimates), leaves, known, rtol, watch)


def _record(
    operator: LinearOperator,
    terms: Tensor,
    leaves: dict[str, list[int]],
    known: float,
    rtol: float | None,
    watch: EstimatorProgress,
    *,
    exact: bool = False,
) -> TraceRecord:
    """The record of `(samples, leaves)` terms, and of some of their columns."""
    estimates = terms.sum(1)
    value = estimates.mean(0) + known
    error = torch.zeros_like(value) if exact else standard_error(estimates)
    parts = {
        name: _record(operator, terms[:, chosen], {}, 0.0, rtol, watch, exact=exact)
        for name, chosen in leaves.items()
    }
    dtype = sum_dtype(operator.dtype)
    converged = reached(value, error, rtol, len(operator._domain.batch))
    return TraceRecord(
        value.to(dtype), None if error is None else error.to(dtype), converged, watch.spent, parts
    )


# --- `diagonal`: exact, or estimated with a standard error for each entry -------------------------


DiagonalMethod = Literal["estimate", "exact"]


def diagonal(
    operator: LinearOperator,
    *,
    samples: int = 100,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    method: DiagonalMethod = "estimate",
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> DiagonalRecord:
    r"""The diagonal of an operator: E[z ∘ A z] over random z, or exact.

    Args:
        operator: A square operator.
        method: `"estimate"`, the mean of \(z \circ A z\); or `"exact"`, one product for each
            column, or the passes that `hodiff.GaussNewtonOperator` and `hodiff.JacobianOperator`
            name.
        samples: How many random vectors to draw. If they are at least as many as the products of
            the exact diagonal, it is computed exactly: so by default that of a Gauss-Newton or
            Fisher matrix of at most 100 outputs of a sample.
        rtol: Stop an estimate as soon as the norm of the standard errors is below `rtol` times that
            of the diagonal (checked every 8 vectors, after the first 16). None: use all samples.
        probes: The distribution of their entries: `"rademacher"` (1 and -1) or `"gaussian"`, whose
            errors are larger.
        vectors: Your own random vectors, one or several, in a form that `A @ v` accepts (several
            flat ones are columns `(D, K)`), with independent entries of mean 0 and variance 1; then
            none is drawn. Vectors that are all equal up to sign count as one.
        create_graph: Whether `value` can be differentiated. None: only inside the function of
            another hodiff call; elsewhere a warning says if something that requires grad becomes a
            constant, and False accepts that silently.
        generator: The source of the random vectors; None: the default generator of the operator's
            device.
        callback: A function that receives the current record, every 8 vectors.
        progress: Whether to show a progress bar. None: in a terminal, after two seconds.

    Returns:
        A record: `value` and `stderr`, with the structure and shapes of the point (`stderr` is None
        where one vector says nothing about it); `converged`, None without `rtol`; `products`;
        `route`, how it was found: `"rows"` and `"columns"` are exact.

    Raises:
        InputError: The operator is not square, or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was not reached.
        HodiffWarning: The result is detached, although the operator or *vectors* require grad (see
            `create_graph`).
        HodiffWarning: The result is not finite.

    Cost:
        A product for each vector drawn, or as many as there are columns; memory for a few vectors.
        With `create_graph`, an evaluation and a pass more, and the graphs of all products at once.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.HessianOperator(lambda x: (x**3).sum() + x.prod(), torch.tensor([1.0, 2.0]))
        >>> hodiff.diagonal(H, method="exact").value
        tensor([ 6., 12.])

    Reference:
        Bekas, C., Kokiopoulou, E., Saad, Y. (2007). An estimator for the diagonal of a matrix.
        Applied Numerical Mathematics 57. doi:10.1016/j.apnum.2007.01.003.
    """
    operator = check_square(operator, "diagonal", stacks=True)
    check_option(method, DiagonalMethod, "method")
    recorded = is_recorded("diagonal", operator, create_graph, vectors=vectors)
    drawn = RandomVectors(operator, samples, probes, vectors, generator, live=recorded)
    check_rtol(rtol, None if method == "exact" else drawn.number)
    domain, inner = operator._domain, _krylov.of(operator)
    exact = method == "exact" or drawn.exhaust(drawn.number)
    most = operator.shape[-1] if exact else drawn.number

    def record(
        value: Tensor, stderr: Tensor | None, rtol_asked: float | None, spent: int, route: Route
    ) -> DiagonalRecord:
        shaped = [
            None if part is None else domain.result(domain.split(part.to(operator.dtype)))
            for part in (value, stderr)
        ]
        met = reached(inner.measure(value), inner.measure(stderr), rtol_asked, len(domain.batch))
        return DiagonalRecord(shaped[0], shaped[1], met, spent, route)

    if recorded and rtol is not None:
        raise InputError("create_graph: a differentiable diagonal takes no rtol=.")
    if recorded:
        with _settings.recording():
            value, stderr, spent = _differentiable(operator, drawn, exact=exact, summed=False)
            return record(value, stderr, None, spent, "columns" if exact else "vectors")
    with EstimatorProgress("diagonal", operator, most, callback, progress) as watch:
        value, route = exact_diagonal(operator, most if exact else drawn.spare(most))
        if value is not None:
            stderr = torch.zeros_like(value)
        else:
            value, stderr = _estimate(
                operator,
                drawn,
                rtol,
                lambda mean, error: watch(lambda spent: record(mean, error, None, spent, route)),
            )
        made = record(value, stderr, rtol, watch.spent, route)
        watch.warn_if_not_finite(value)
        if not all_reached(made.converged):
            error = math.nan if stderr is None else _part_of(stderr, value, inner)
            warn_not_converged(
                f"diagonal: after {watch.spent} products the standard error is {error:.2g} of the "
                f"diagonal, more than rtol={rtol:g}; allow more samples."
            )
        return made


def _part_of(error: Tensor, value: Tensor, inner: _krylov.Inner) -> float:
    """The size of an error beside that of its value, whose squares may have no place."""
    error, value = error.reshape(-1), value.reshape(-1)
    largest = inner.amax(value) or math.nan
    return float(inner.norms(error / largest) / inner.norms(value / largest))


def _estimate(
    operator: LinearOperator,
    drawn: RandomVectors,
    rtol: float | None,
    look: Callable[[Tensor, Tensor | None], None],
) -> tuple[Tensor, Tensor | None]:
    """Mean and standard error of z * Az, by running sums of squared deviations (Welford,
    block by block).
    """
    domain, inner = operator._domain, _krylov.of(operator)
    mean = domain.zeros_flat(domain.width).to(sum_dtype(operator.dtype))
    mean = mean.expand(*domain.batch, -1).contiguous()
    squares = torch.zeros_like(mean)
    done = 0
    unit = mean
    so_far: tuple[Tensor, Tensor | None] = mean, None
    while done < drawn.number:
        count = min(BLOCK, drawn.number - done)
        z = drawn.take(count)
        forms = z * flat_product(operator, z)
        if not done:
            unit = near(forms.abs().amax(0))  # of each entry, whose square may have no place
        forms = forms / unit
        own = forms.mean(0)
        shift = own - mean
        squares += (forms - own).square().sum(0) + shift.square() * (done * count / (done + count))
        mean += shift * (count / (done + count))
        done += count
        error = (squares / (done - 1) / done).sqrt() if done > 1 else None
        so_far = mean * unit, None if error is None else error * unit
        look(*so_far)
        if (
            rtol is not None
            and done >= 2 * BLOCK
            and all_reached(
                reached(inner.measure(so_far[0]), inner.measure(so_far[1]), rtol, mean.ndim - 1)
            )
        ):
            break
    return so_far
