"""`eigsh` and `eigs`: some eigenvalues and eigenvectors; `spectral_radius`."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff._core import _checks, _modes, _nesting, _random_vectors
from hodiff._core._options import check_option
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import (
    check_detached,
    check_rtol,
    check_square,
    default_rtol,
    kept_vectors,
    warn_not_converged,
)
from hodiff.curvature._records import EigenRecord, RadiusRecord
from hodiff.curvature._search import Pairs, Search, Which
from hodiff.curvature._space import sum_dtype
from hodiff.curvature._watch import Callback, Watch
from hodiff.errors import GraphError, InputError


def eigsh(
    operator: LinearOperator,
    k: int = 6,
    *,
    which: Which = "largest",
    create_graph: bool | None = None,
    rtol: float | None = None,
    products: int | None = None,
    basis: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> EigenRecord:
    r"""Some eigenvalues of a symmetric operator and their vectors, \(A x = \lambda x\), by restarted Lanczos iteration.

    The basis is kept orthogonal throughout, so that no eigenvalue appears more often than it occurs. When
    all *k* have converged, the search goes on from a random vector orthogonal to them, until nothing better
    shows: a Krylov space holds only one vector of each eigenspace, and multiplicities are found that way.

    Args:
        operator: A symmetric operator.
        k: How many eigenpairs.
        which: The `"largest"`, the `"smallest"` (most negative), or those of largest `"magnitude"`.
        create_graph: Whether `value` can be differentiated, as in `hodiff.trace`: a loss to train with. The derivative
            is that of \(x^\top H x\) with the eigenvector held fixed (Hellmann and Feynman). For `"largest"` and
            `"smallest"`; `vectors` are detached.
        rtol: When a pair has converged: \(\lVert A x - \lambda x \rVert \le\) `rtol` times the largest
            eigenvalue seen (in magnitude). None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half
            (5e-2 in bfloat16).
        products: How many products to spend at most; None: 50 for each pair, and 1000.
        basis: How many vectors to keep before a restart; None: as many as fit into 8 MiB, between
            `max(2 k + 10, 30)` and 300.
        generator: Where the start is drawn from; None is the default generator of the operator's
            device.
        callback: A function that is given the record as it stands, every five products of the first search.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value`, of shape `(k,)`, in the order asked for; `vectors`, orthonormal columns of
        shape `(D, k)` (`A.unflatten(vectors)` gives them the structure of the point); `residual`, true
        ones of shape `(k,)`; `converged`; `products`.

    Raises:
        InputError: The operator is not symmetric, or has fewer than *k* columns.
        GraphError: With `create_graph`, an eigenvalue so close to another that it has no derivative of its own, or
            none that the tolerance can tell; the message gives the gap.

    Warns:
        ConvergenceWarning: The products ran out. The record then holds the best pairs found, with their
            residuals.
        HodiffWarning: It is detached, although the operator requires grad (see `create_graph`).

    Cost:
        Often 30 to 150 products; memory for `basis` vectors in double precision, on the operator's
        device. Below `basis` columns, one product for each, and an exact answer.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> hodiff.eigsh(A, k=2).value.round(decimals=4)
        tensor([3., 1.])

    Reference:
        Wu, K., Simon, H. (2000). Thick-restart Lanczos method for large symmetric eigenvalue problems.
        SIAM J. Matrix Anal. Appl. 22(2). doi:10.1137/S0895479898334605.
    """
    operator = check_square(operator, "eigsh", symmetric=True, instead="hodiff.eigs")
    if not _nesting.recorded(create_graph):
        check_detached("eigsh", operator, create_graph)
        return _eigenpairs("eigsh", operator, k, which, rtol, products, basis, generator, callback, progress)
    if which == "magnitude":
        raise InputError("create_graph: goes with which='largest' or 'smallest', whose order tells how far others are.")
    with _modes.grad_mode(False):  # one pair more, to know the gap
        more = min(k + 1, operator.shape[0])
        found = _eigenpairs("eigsh", operator, more, which, rtol, products, basis, generator, callback, progress)
    before = operator.products
    _check_gaps(found.value, default_rtol(operator.dtype) if rtol is None else rtol, k)
    rows = found.vectors.T[:k].contiguous()
    value = operator._recorded_forms(rows)
    spent = found.products + operator.products - before
    return EigenRecord(value, found.vectors[:, :k], found.residual[:k], found.converged, spent)


def _check_gaps(values: Tensor, rtol: float, k: int) -> None:
    """Raise where one of the first k eigenvalues is too close to its neighbour for its vector to be known."""
    gaps = (values[1:] - values[:-1]).abs()[:k]
    least = 100 * rtol * float(values.abs().max())
    if len(gaps) and float(gaps.min()) <= least:
        first = int(gaps.argmin())
        raise GraphError(
            f"eigsh: eigenvalues {first + 1} and {first + 2} are {float(values[first]):.8g} and "
            f"{float(values[first + 1]):.8g}, {float(gaps[first]):.2g} apart: equal ones have no derivative of their "
            f"own, and residuals of rtol={rtol:g} do not tell apart what is within {least:.2g}. Train with "
            f"hodiff.trace, or give a smaller rtol."
        )


def eigs(
    operator: LinearOperator,
    k: int = 6,
    *,
    which: Which = "magnitude",
    create_graph: bool | None = None,
    rtol: float | None = None,
    products: int | None = None,
    basis: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> EigenRecord:
    r"""Some eigenvalues of an operator that need not be symmetric, and their vectors, by restarted Arnoldi iteration.

    The basis is restarted by Schur vectors, which are orthonormal however far from orthogonal the eigenvectors
    are; what has converged is locked, and the search goes on beside it, as in `hodiff.eigsh`.

    Args:
        operator: A square operator.
        k: How many eigenpairs.
        which: Those of largest `"magnitude"`, or of `"largest"` or `"smallest"` real part.
        create_graph: The result is detached. None warns where that makes a constant of something that requires grad;
            False says that a constant is meant; True is refused, and names the way to the derivative.
        rtol: When a pair has converged: \(\lVert A x - \lambda x \rVert \le\) `rtol` times the largest
            entry of the projection seen. None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half
            (5e-2 in bfloat16).
        products: How many products to spend at most; None: 50 for each pair, and 1000.
        basis: How many vectors to keep before a restart; None: as many as fit into 8 MiB, between
            `2 k + 10` and 100.
        generator: Where the start is drawn from; None is the default generator of the operator's
            device.
        callback: A function that is given the record as it stands, every five products of the first search.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value`, complex, of shape `(k,)`, in the order asked for; `vectors`, complex columns of shape
        `(D, k)` and length 1, not orthogonal in general; `residual`, true ones of shape `(k,)`; `converged`;
        `products`. Of a conjugate pair that *k* divides, the one with a positive imaginary part.

    Raises:
        InputError: The operator is not square, or has fewer than *k* columns.

    Warns:
        ConvergenceWarning: The products ran out. The record then holds the best pairs found, with their
            residuals.
        HodiffWarning: It is detached, although the operator requires grad (see `create_graph`).

    Cost:
        Often 30 to 150 products; memory for `basis` vectors in double precision, on the operator's
        device. Below `basis` columns, one product for each, and an exact answer.

    Note:
        A small residual is a small error in the matrix. Where that is far from normal, its eigenvalues may be
        off by much more: by the residual times their condition number, and an eigenvalue that is defective
        with *m* vectors missing by about the residual's root of order *m* + 1.

    Examples:
        A rotation by 90 degrees has the eigenvalues i and -i:

        >>> import torch, hodiff
        >>> turn = hodiff.MatrixOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> hodiff.eigs(turn, 2).value.imag.round(decimals=4)
        tensor([ 1., -1.])

    Reference:
        Stewart, G. W. (2002). A Krylov-Schur algorithm for large eigenproblems. SIAM J. Matrix Anal. Appl.
        23(3). doi:10.1137/S0895479800371529.
    """
    operator = check_square(operator, "eigs")
    check_detached("eigs", operator, create_graph)
    return _eigenpairs("eigs", operator, k, which, rtol, products, basis, generator, callback, progress)


def spectral_radius(
    operator: LinearOperator,
    *,
    create_graph: bool | None = None,
    rtol: float | None = None,
    products: int | None = None,
    basis: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> RadiusRecord:
    r"""The largest magnitude of an eigenvalue, \(\rho(A) = \max |\lambda|\): below 1, powers of \(A\) die out.

    Args:
        operator: A square operator: the Jacobian of a map whose iteration is to converge, for example.
        create_graph: The result is detached. None warns where that makes a constant of something that requires grad;
            False says that a constant is meant; True is refused, and names the way to the derivative.
        rtol: As for `hodiff.eigs`.
        products: How many products to spend at most; None: 1050.
        basis: How many vectors to keep before a restart, as for `hodiff.eigs`.
        generator: Where the start is drawn from; None is the default generator of the operator's
            device.
        callback: A function that is given the record as it stands, every five products of the first search.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value` and `residual`, tensors of shape `()`; `converged`; `products`.

    Raises:
        InputError: The operator is not square.

    Warns:
        ConvergenceWarning: The products ran out.
        HodiffWarning: It is detached, although the operator requires grad (see `create_graph`).

    Cost:
        Often 20 to 100 products; memory for `basis` vectors in double precision.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[0.0, -0.5], [0.5, 0.0]]))
        >>> hodiff.spectral_radius(A).value
        tensor(0.5000)

    Reference:
        As for `hodiff.eigs`; of a symmetric operator, as for `hodiff.eigsh`.
    """
    operator = check_square(operator, "spectral_radius")
    check_detached("spectral_radius", operator, create_graph)

    def of(found: EigenRecord) -> RadiusRecord:
        return RadiusRecord(found.value[0].abs(), found.residual[0], found.converged, found.products)

    watching = (lambda found: callback(of(found))) if callable(callback) else callback
    return of(
        _eigenpairs("spectral_radius", operator, 1, "magnitude", rtol, products, basis, generator, watching, progress)
    )


def _eigenpairs(
    name: str,
    operator: LinearOperator,
    k: int,
    which: Which,
    rtol: float | None,
    products: int | None,
    basis: int | None,
    generator: torch.Generator | None,
    callback: Callback | None,
    progress: bool,
) -> EigenRecord:
    """Check what is common to all, search, and say how it went."""
    symmetric = operator.symmetric and name != "eigs"
    _checks.check_integer(k, "k", least=1)
    _random_vectors.check_generator(generator)
    check_rtol(rtol)
    check_option(which, Which, "which")
    size = operator.shape[0]
    if k > size:
        raise InputError(f"k: got {k}, and the operator has {size} columns.")
    room = _room(size, k, symmetric) if basis is None else _checks.check_integer(basis, "basis", least=k + 2)
    budget = 50 * k + 1000 if products is None else _checks.check_integer(products, "products", least=2 * k + 2)
    if rtol is None:
        rtol = default_rtol(operator.dtype)
    dtype = sum_dtype(operator.dtype)
    kinds = (dtype, operator.dtype) if symmetric else (torch.promote_types(dtype, torch.complex64),) * 2

    def record(pairs: Pairs, converged: bool | None, spent: int) -> EigenRecord:
        value, vectors, residual = pairs
        return EigenRecord(value.to(kinds[0]), vectors.T.to(kinds[1]), residual.to(dtype), converged, spent)

    with Watch(name, operator, budget, callback, progress) as watch:
        limit = operator.products + budget - k - (not symmetric)  # the last projection; a conjugate pair is not divided
        search = Search(
            operator, k, which, rtol, min(room, size), limit, generator,
            lambda best: watch(lambda spent: record(best(), None, spent)), symmetric=symmetric, name=name,
        )  # fmt: skip
        search.run()
        pairs = search.polished()
        residual, scale = pairs[2], search.scale * search.unit
        converged = search.complete and bool((residual <= 2 * rtol * scale).all())
        if not converged:
            warn_not_converged(
                f"{name}: after {watch.spent} products the largest residual is "
                f"{float(residual.max()) / (scale or 1.0):.2g} of the largest eigenvalue (rtol={rtol:g}); allow more "
                f"products, or a larger basis."
            )
        return record(pairs, converged, watch.spent)


def _room(size: int, k: int, symmetric: bool) -> int:
    room = kept_vectors(size, least=max(2 * k + 10, 30))
    return room if symmetric else min(room, max(2 * k + 10, 100))  # a restart by Schur vectors takes room⁴ operations
