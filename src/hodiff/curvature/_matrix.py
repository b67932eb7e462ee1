"""Matrices that are known: entry by entry (`MatrixOperator`),
or by some eigenvectors (`nystrom`).
"""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _reverse, _vectors
from hodiff._core._arguments import check_integer, check_real_tensor, is_set
from hodiff._core._tree import Leaves
from hodiff._core._vectors import Space, sum_dtype
from hodiff.curvature._operator import LinearOperator, SymmetricOperator, as_given
from hodiff.curvature._probes import (
    check_square,
    flat_product,
    source,
)
from hodiff.errors import InputError

LARGEST_VIEW = 2**36
"""Bytes that a matrix may have beyond those that its memory holds."""


@final
class MatrixOperator(LinearOperator):
    r"""A matrix as an operator, for sums with other operators or as a preconditioner.

    Args:
        A: A matrix of shape `(M, D)`, or a vector of shape `(D,)` for a diagonal one.
        symmetric: Whether the matrix is symmetric, up to a few ulps of its norm. By default this is
            checked, and derivatives by *A* treat it as symmetric only in its values. True says that
            it always is, like a kernel matrix.
        batch_ndim: How many leading dimensions of *A* index the matrices of a stack, `(*batch, M,
            D)`. A vector is then `(*batch, D)`, several are `(K, *batch, D)`, or columns `(*batch,
            D, K)`. `hodiff.solve`, `hodiff.trace`, `hodiff.diagonal` and `hodiff.logdet` return a
            result for each.

    Raises:
        InputError: *A* is not a real floating point matrix or vector, is an expanded view of more
            than 64 GiB, or `symmetric=True` is not true.

    Cost:
        A product is a matrix product. The matrix is not copied.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
        >>> (A + 1.0) @ torch.tensor([1.0, 0.0])
        tensor([3., 1.])
        >>> hodiff.eigsh(hodiff.MatrixOperator(torch.tensor([1.0, 5.0, 3.0])), k=1).value.round(
        ...     decimals=4
        ... )
        tensor([5.])

        Two systems at once:

        >>> stack = hodiff.MatrixOperator(torch.tensor([[[2.0]], [[4.0]]]), batch_ndim=1)
        >>> hodiff.solve(stack, torch.tensor([[6.0], [8.0]])).value
        tensor([[3.],
                [2.]])
    """

    def __init__(self, A: Tensor, *, symmetric: bool | None = None, batch_ndim: int = 0) -> None:
        check_integer(batch_ndim, "batch_ndim", least=0)
        fits = isinstance(A, Tensor) and A.layout is torch.strided and A.is_floating_point()
        if fits:
            check_real_tensor(A, "A")
        if not fits or A.ndim - batch_ndim not in (1, 2) or not A.shape[batch_ndim:].numel():
            raise _no_matrix(A, batch_ndim, dense=fits)
        if A.requires_grad:
            _call.refuse_transforms()
        if _call.is_hidden(A):
            _call.refuse_stand_ins()
        _call.refuse_tangent(A, "A")
        written = A.numel() * A.element_size()
        if written > max(LARGEST_VIEW, A.untyped_storage().nbytes()):
            raise InputError(
                f"A is an expanded view of shape {tuple(A.shape)}, {written / 2**30:,.0f} GiB when "
                f"written out, and each product reads all of it; give hodiff.JacobianOperator a "
                f"function that computes the product."
            )
        super().__init__()
        self._own = "the matrix requires grad" if A.requires_grad else ""
        self._given = A
        self._matrix = A.detach()
        symmetric = None if symmetric is None else is_set(symmetric, "symmetric")
        self._diagonal = A.ndim == batch_ndim + 1
        symmetric_made = self._diagonal or (
            A.shape[-2] == A.shape[-1] and _is_symmetric(self._matrix)
        )
        self._symmetric, self._told = symmetric is not False and symmetric_made, bool(symmetric)
        if symmetric and not self._symmetric:
            raise InputError("symmetric=True: A differs from its transpose; give (A + A.T) / 2.")
        batch, (rows, *_) = A.shape[:batch_ndim], A.shape[batch_ndim:]
        hollow = self._matrix.new_empty(())
        self._space = Space.line(hollow.expand(*batch, A.shape[-1]), batch_ndim=batch_ndim)
        if rows != A.shape[-1]:
            self._rows = Space.line(hollow.expand(*batch, rows), batch_ndim=batch_ndim)

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is its own transpose."""
        return self._symmetric

    @property
    def _turns(self) -> bool:
        return self._given.requires_grad and not (self._diagonal or self._told)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        return [self._times_matrix(self._matrix, *parts)]

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        self._count(count)
        return [self._times_matrix(self._given, *parts)]

    def _times_matrix(self, matrix: Tensor, rows: Tensor) -> Tensor:
        if self._diagonal:
            return rows * matrix
        with as_given(rows):
            if not self._space.batch:
                return rows @ matrix.mT
            if rows.ndim < matrix.ndim:
                return (matrix @ rows.unsqueeze(-1)).squeeze(-1)
            return (matrix @ rows.movedim(0, -1)).movedim(-1, 0)

    def _times_some(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Products as for any operator; but where few matrices are asked for,
        the others are not read.
        """
        batch, count = self._space.batch, self._space.batch.numel()
        places, inside = (numbers % count).unique(return_inverse=True)
        if 4 * len(places) > count:
            return super()._times_some(rows, numbers)
        few = copy.copy(self)
        few._matrix = self._matrix.flatten(0, len(batch) - 1)[places.to(self.device)]
        hollow = self._matrix.new_empty(()).expand(len(places), self._space.size)
        few._space = few._rows = Space.line(hollow, batch_ndim=1)
        few._fixed_of = self
        return few._times_some(rows, numbers // count * len(places) + inside)

    def _transposed(self) -> LinearOperator:
        turned = copy.copy(self)
        turned._given, turned._matrix = self._given.mT, self._matrix.mT
        turned._space, turned._rows = self._range, self._domain
        return turned

    def _chunk(self, count: int) -> int:
        most = max(1, self._space.batch.numel()) * max(self.shape[-2:])
        return max(1, _reverse.CHUNK_BYTES // (2 * most * self._matrix.element_size()))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return copy.copy(self)  # its one leaf

    def _about(self) -> str:
        return "diagonal" if self._diagonal else "matrix"


def _no_matrix(A: Any, batch_ndim: int, *, dense: bool) -> InputError:
    """The error for what cannot be read as a matrix, with the way out."""
    if dense and not A.numel():
        return InputError(f"A has shape {tuple(A.shape)}, expected at least one row and column.")
    if isinstance(A, Tensor):
        got, way = f"{A.layout}, {A.dtype} of shape {tuple(A.shape)}", ""
    else:
        got, way = _arguments.kind(A), " Make it a tensor: torch.as_tensor(A)."
    if dense and A.ndim > 2 and not batch_ndim:
        way = " For one matrix in each of several systems: batch_ndim=1."
    stack = f", each with {batch_ndim} leading dimensions of a batch" if batch_ndim else ""
    return InputError(
        f"A: got {got}; expected a dense real matrix (M, D), or a diagonal (D,){stack}.{way}"
    )


def _is_symmetric(A: Tensor) -> bool:
    """Whether a matrix is its own transpose, but for rounding: Q diag(d) Q', computed, is so
    nearly.

    Of a stack, each of them.
    """
    if torch.equal(A, A.mT):
        return True
    # what is no number differs from itself, and is said of the products
    if not bool(A.sum().isfinite()):
        A = torch.where(A.isfinite() & A.mT.isfinite(), A, 0)
    # In units of the largest entries: squares may have no place.
    unit = A.abs().amax((-2, -1)).to(torch.promote_types(A.dtype, torch.float32))
    off = (A - A.mT).abs().amax((-2, -1))
    unit = torch.where(unit > 0, unit, 1.0)
    size = (A / unit[..., None, None]).norm(dim=(-2, -1))
    return bool((off / unit <= 8 * torch.finfo(A.dtype).eps * size).all())


# --- `nystrom`: an approximate inverse of A + μ I from a few products, as a preconditioner --------


def nystrom(
    operator: LinearOperator,
    rank: int,
    shift: float,
    *,
    generator: torch.Generator | None = None,
) -> LinearOperator:
    r"""A preconditioner for A + μI: exact for the largest eigenvalues, constant for the others.

    The Nyström approximation from \(r\) random vectors \(\Omega\) is \(A \approx
    A\Omega\,(\Omega^\top A \Omega)^{-1} \Omega^\top A = U \Lambda U^\top\), and \(P^{-1} =
    U(\Lambda + \mu)^{-1}U^\top + (\lambda_r + \mu)^{-1}(I - UU^\top)\). If *r* exceeds about twice
    the number of eigenvalues above \(\mu\), conjugate gradients need few steps, whatever the
    condition of *A*.

    Args:
        operator: A symmetric positive semidefinite operator.
        rank: \(r\), the number of random vectors.
        shift: \(\mu\), positive: the `damping` of `hodiff.solve`.
        generator: The source of the random vectors; None: the default generator of the operator's
            device.

    Returns:
        A symmetric and positive definite operator of the same shape, to be passed as
        `hodiff.solve(A, b, damping=shift, preconditioner=...)` any number of times.

    Raises:
        InputError: The operator is not symmetric or found not to be semidefinite, `rank` exceeds
            its columns, or `shift` is not positive.

    Cost:
        `rank` products, once. Memory: `rank` vectors. Each application: two products with a
            `(D, rank)` matrix.

    Examples:
        Eigenvalues that fall from 1e6 to nothing, of which some 150 are above the shift:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(1e6 * 0.9 ** torch.arange(1000, dtype=torch.float64))
        >>> P = hodiff.nystrom(A, 200, 0.1, generator=torch.Generator().manual_seed(0))
        >>> hodiff.solve(A, torch.ones(1000).double(), damping=0.1, preconditioner=P).products < 10
        True

        Without it the same takes more than a thousand.

    Reference:
        Frangella, Z., Tropp, J. A., Udell, M. (2023). Randomized Nyström preconditioning. SIAM J.
        Matrix Anal. Appl. 44(2). doi:10.1137/21M1466244.
    """
    operator = check_square(
        operator, "nystrom", symmetric=True, instead="a preconditioner of your own", shards=False
    )
    size = operator.shape[0]
    if check_integer(rank, "rank", least=1) > size:
        raise InputError(
            f"rank: got {rank}, but the operator has {_arguments.plural(size, 'column')}."
        )
    more = ": the damping of the system"
    _arguments.check_number(shift, "shift", positive=True, more=more)
    _vectors.check_generator(generator)
    like = operator._domain.zeros_flat(0).to(sum_dtype(operator.dtype))
    rows = _vectors.draw((rank, size), like, "gaussian", source(operator, generator))
    omega, _ = torch.linalg.qr(rows.T)
    vectors, values = nystrom_eigenpairs(omega, flat_product(operator, omega.T).T, operator.dtype)
    return NystromOperator(operator._domain, vectors, values, float(shift), operator._live)


def nystrom_eigenpairs(omega: Tensor, images: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The eigenvectors, as columns, and eigenvalues of Nyström's approximation, falling."""
    double = images.dtype if images.device.type == "mps" else torch.float64
    unit = _vectors.near(images.abs().amax())
    omega, images = omega.to(double), images.to(double) / unit
    least = len(omega) ** 0.5 * torch.finfo(dtype).eps * float(images.norm())
    if least == 0:
        return omega, images.new_zeros(omega.shape[1])
    for nu in (least, 100 * least):  # products may round by more than their last digit
        y = images + nu * omega  # a definite matrix, whose eigenvalues are larger by nu
        inner = omega.T @ y
        factor, failed = torch.linalg.cholesky_ex((inner + inner.T) / 2, upper=True)
        if not failed:
            break
    else:
        raise InputError(
            "nystrom is for positive semidefinite operators, but this one has a direction of "
            "negative curvature; use hodiff.GaussNewtonOperator, or method='minres' without a "
            "preconditioner."
        )
    half = torch.linalg.solve_triangular(factor, y, upper=True, left=False)
    vectors, roots, _ = torch.linalg.svd(half, full_matrices=False)
    return vectors, (roots.square() - nu).clamp_min(0) * unit


@final
class NystromOperator(SymmetricOperator):
    """U (Λ + μ)⁻¹ U' + (I - U U') / (λ + μ), with the last λ."""

    def __init__(
        self, domain: Space, vectors: Tensor, values: Tensor, shift: float, live: str
    ) -> None:
        super().__init__()
        self._space = domain
        self._shift = shift
        self._own = live
        dtype = sum_dtype(domain.dtype)
        self._vectors = vectors.to(dtype)
        self._rest = 1 / (float(values[-1]) + shift)
        self._beyond = (1 / (values + shift) - self._rest).to(dtype)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        rows = self._space.join(parts, count).to(self._vectors.dtype)
        with as_given(rows):
            products = self._rest * rows + ((rows @ self._vectors) * self._beyond) @ self._vectors.T
        return self._space.split(products.to(self._space.dtype))

    def _chunk(self, count: int) -> int:
        return max(1, _reverse.CHUNK_BYTES // (4 * self._space.size * self._vectors.element_size()))

    def _about(self) -> str:
        return f"rank {self._vectors.shape[1]}, shift {self._shift:g}"
