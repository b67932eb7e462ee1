"""`trace`: stochastic estimates with a standard error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hodiff._core import _modes, _nesting
from hodiff._core._options import Probes, check_option
from hodiff._core._random_vectors import standard_error
from hodiff.curvature._leave_one_out import xnystrace, xtrace
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
from hodiff.curvature._records import TraceRecord
from hodiff.curvature._space import as_given, sum_dtype
from hodiff.curvature._watch import Callback, Watch
from hodiff.errors import InputError

Method = Literal["hutchinson", "hutch++", "xtrace", "xnystrace"]
_PRODUCTS = {"hutchinson": 2, "hutch++": 3, "xtrace": 4, "xnystrace": 2}
"""For two random vectors."""


def trace(
    operator: LinearOperator,
    *,
    blocks: Sequence[str] = (),
    samples: int = 100,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    method: Method = "hutchinson",
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> TraceRecord:
    r"""The trace of an operator, \(\operatorname{tr} A = \mathbb{E}\, z^\top A z\) over random *z*.

    Args:
        operator: A square operator.
        blocks: Names or patterns of leaves, as for `A.block`: the traces of these diagonal blocks too, from the same
            products. They see the noise of what lies beside the block, which `trace(A.block(name))`, with products
            of its own, does not. For `"hutchinson"`.
        samples: How many random vectors to draw. Where as many products as the operator has columns, or
            fewer, give the trace exactly, they do.
        probes: The law of their entries: `"rademacher"` (1 and -1) or `"gaussian"`.
        vectors: Random vectors of your own, one or several, as columns `(D, K)` or `K` stacked ones, whose entries
            are independent, of mean 0 and variance 1; then nothing is drawn. Several that are all the same, up to sign,
            count as one.
        create_graph: Whether `value` can be differentiated, in the parameters, in *vectors* and all that the operator's
            function uses: a loss to train with, by `"hutchinson"`, of a `hodiff.HessianOperator`, its blocks, sums and
            multiples. With one vector of your own it is \(v^\top H v\). None: only inside the function of another
            hodiff call.
        method: `"hutchinson"`, the mean of \(z^\top A z\); `"hutch++"`, which takes half of the vectors for
            a sketch of the largest eigenvalues, takes their part exactly, and estimates the rest; `"xtrace"`, which
            makes each vector in turn the one that estimates what a sketch by all others leaves; or
            `"xnystrace"`, the same for positive semidefinite operators at half the price. The last three are better
            where the spectrum decays, and the last two are the best there.
        rtol: Stop as soon as the standard error is below `rtol * |value|` (looked at every 8 vectors,
            after the first 16; by the last two methods at the end). None: spend all.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.
        callback: A function that is given the record as it stands, every 8 vectors.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value` and `stderr`, tensors of shape `()` in single precision at least (`stderr` is None where one
        vector says nothing about it); `converged`, None without `rtol`; `products`; and `blocks`, a dict of records
        by pattern.

    Raises:
        InputError: The operator is not square, or found not to be semidefinite by `"xnystrace"`; or an unknown method.

    Warns:
        ConvergenceWarning: `rtol` was asked for and not reached.
        HodiffWarning: It is detached, although the operator or *vectors* require grad (see `create_graph`).

    Cost:
        A product for each vector, two for `"xtrace"` and for each vector of the sketch of `"hutch++"`; memory for a
        few vectors, for all methods but the first for `samples`, in double precision for the last two.

        With `create_graph`, an evaluation and a pass more, and the graphs of all products at once. Third derivatives
        follow: layer, batch and instance norm are then computed from their definition, as by `hodiff.hvp`.

    Note:
        Standard errors are themselves estimates, from few vectors rough ones. Those of the last two methods, whose
        estimates are alike, lie between two bounds; measured over spectra of many kinds they are 1.0 to 1.4 of the
        true ones, and up to 1.9 where hardly anything is left beside the sketch.

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
        Epperly, E. N., Tropp, J. A., Webber, R. J. (2024). XTrace: making the most of every sample in stochastic
        trace estimation. SIAM J. Matrix Anal. Appl. 45(1). doi:10.1137/23M1548323.
    """
    operator = check_square(operator, "trace")
    check_option(method, Method, "method")
    recorded = _nesting.recorded(create_graph)
    if not recorded:
        check_detached("trace", operator, create_graph, vectors=vectors)
    drawn = RandomVectors(operator, samples, probes, vectors, generator, live=recorded)
    check_rtol(rtol, drawn.number)
    leaves = _leaves_of(operator, blocks, method)
    if recorded:
        return _differentiable(operator, drawn, blocks, method, rtol)
    needed = drawn.number * _PRODUCTS[method] // 2
    with Watch("trace", operator, needed, callback, progress) as watch:
        enough = needed >= operator.shape[0] and not drawn.given
        if enough or (method in ("xtrace", "xnystrace") and drawn.number >= operator.shape[0]):
            parts = operator._domain.pieces(exact_diagonal(operator))
            terms = torch.stack([part.sum(dtype=torch.float64) for part in parts])[None]
            return _record(operator, terms, leaves, 0.0, rtol, watch, exact=True)
        if method in ("xtrace", "xnystrace"):
            estimate = xtrace if method == "xtrace" else xnystrace
            gaussian = probes == "gaussian" and not drawn.given
            value, error = estimate(operator, drawn.take(drawn.number), gaussian=gaussian)
            found = _made(operator, value, error, rtol, watch)
        else:
            found = _hutchinson(operator, drawn, method == "hutch++", leaves, rtol, watch)
        if found.converged is False:
            error = "unknown" if found.stderr is None else f"{float(found.stderr / found.value.abs()):.2g} of the value"
            warn_not_converged(
                f"trace: after {watch.spent} products the standard error is {error}, more than rtol={rtol:g}; allow "
                f"more samples."
            )
        return found


def _differentiable(
    operator: LinearOperator, drawn: RandomVectors, blocks: Sequence[str], method: str, rtol: float | None
) -> TraceRecord:
    """The mean of z'Az with its graph, or the sum over unit vectors."""
    if method != "hutchinson" or blocks or rtol is not None:
        raise InputError("create_graph: goes with method='hutchinson', without blocks= and rtol=.")
    before, size = operator.products, operator.shape[0]
    exact = not drawn.given and drawn.number >= size
    rows = operator._domain.units(0, size) if exact else drawn.take(drawn.number).to(operator.dtype)
    forms = operator._recorded_forms(rows)
    with _modes.recording():
        value = forms.sum() if exact else forms.mean()
    error = torch.zeros_like(value.detach()) if exact else standard_error(forms.detach())
    return TraceRecord(value, error, None, operator.products - before)


def _leaves_of(operator: LinearOperator, blocks: Sequence[str], method: str) -> dict[str, list[int]]:
    """The numbers of the leaves of each block."""
    if isinstance(blocks, str) or not isinstance(blocks, Sequence):
        raise InputError(f"blocks: got {blocks!r}, expected a list of patterns: ['layer1.*', 'head'].")
    if blocks and method != "hutchinson":
        raise InputError(f"blocks: come from z * A z, that is method='hutchinson', not {method!r}.")
    return {pattern: operator._domain.numbers_of([pattern]) for pattern in blocks}


def _hutchinson(
    operator: LinearOperator,
    drawn: RandomVectors,
    sketched: bool,
    leaves: dict[str, list[int]],
    rtol: float | None,
    watch: Watch,
) -> TraceRecord:
    """The z'Az of each random vector z, leaf by leaf; with a sketch, of what its projection leaves of z."""
    first = drawn.number // 2 if sketched else 0
    basis = _sketch(operator, drawn.take(first)) if first else None
    known = 0.0 if basis is None else float((basis * flat_product(operator, basis)).sum(dtype=torch.float64))
    found: list[Tensor] = []
    number = drawn.number - first
    for start in range(0, number, BLOCK):
        z = drawn.take(min(BLOCK, number - start)).to(sum_dtype(operator.dtype))
        if basis is not None:
            with as_given(z):
                z = z - (z @ basis.T) @ basis
        terms = operator._domain.pieces(z * flat_product(operator, z))
        found.append(torch.stack([part.sum(1, dtype=torch.float64) for part in terms], 1))
        so_far = torch.cat(found)
        watch(lambda _, so_far=so_far: _record(operator, so_far, leaves, known, None, watch))
        if (
            rtol is not None
            and len(so_far) >= 2 * BLOCK
            and _record(operator, so_far, {}, known, rtol, watch).converged
        ):
            break
    return _record(operator, torch.cat(found), leaves, known, rtol, watch)


def _record(
    operator: LinearOperator,
    terms: Tensor,
    leaves: dict[str, list[int]],
    known: float,
    rtol: float | None,
    watch: Watch,
    *,
    exact: bool = False,
) -> TraceRecord:
    """The record of `(samples, leaves)` terms, and of some of their columns."""
    estimates = terms.sum(1)
    value = estimates.mean() + known
    error = torch.zeros_like(value) if exact else standard_error(estimates)
    parts = {
        name: _record(operator, terms[:, chosen], {}, 0.0, rtol, watch, exact=exact) for name, chosen in leaves.items()
    }
    return _made(operator, value, error, rtol, watch, parts)


def _made(
    operator: LinearOperator,
    value: Tensor,
    error: Tensor | None,
    rtol: float | None,
    watch: Watch,
    blocks: dict[str, TraceRecord] | None = None,
) -> TraceRecord:
    dtype = sum_dtype(operator.dtype)
    converged = reached(value, error, rtol)
    return TraceRecord(
        value.to(dtype), None if error is None else error.to(dtype), converged, watch.spent, blocks or {}
    )


def _sketch(operator: LinearOperator, rows: Tensor) -> Tensor:
    """An orthonormal basis, as rows, of the range of A on random vectors."""
    basis, _ = torch.linalg.qr(flat_product(operator, rows).T)
    return basis.T.contiguous()
