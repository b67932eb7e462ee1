"""`MatrixOperator`: a matrix that is known entry by entry."""

from __future__ import annotations

import copy
from typing import final

import torch
from torch import Tensor

from hodiff._core import _call, _reverse
from hodiff._core._arguments import check_integer, check_real_tensor, is_set
from hodiff._core._vectors import Leaves, Space
from hodiff.curvature._operator import LinearOperator, as_given
from hodiff.errors import InputError

LARGEST_VIEW = 2**36
"""Bytes that a matrix may have beyond those that its memory holds."""


@final
class MatrixOperator(LinearOperator):
    r"""A matrix as an operator: for sums with others, as a preconditioner, and in tests.

    Args:
        A: A matrix of shape `(M, D)`, or a vector of shape `(D,)` for a diagonal one.
        symmetric: Whether it is its own transpose, up to a few ulps of its norm; by default this is looked at.
        batch_ndim: So many leading dimensions of *A* are a stack of matrices, side by side:
            `(*batch, M, D)`. A vector is then `(*batch, D)`, several are `(K, *batch, D)`, or
            columns `(*batch, D, K)`; `hodiff.solve`, `hodiff.trace`, `hodiff.diagonal`,
            `hodiff.logdet` and `hodiff.spectral_radius` have a result for each.

    Raises:
        InputError: *A* is not a real floating point matrix or vector, is an expanded view of more than 64 GiB, or
            `symmetric=True` is not true.

    Cost:
        A product is a matrix product. The matrix is not copied.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
        >>> (A + 1.0) @ torch.tensor([1.0, 0.0])
        tensor([3., 1.])
        >>> hodiff.eigsh(hodiff.MatrixOperator(torch.tensor([1.0, 5.0, 3.0])), k=1).value.round(decimals=4)
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
        if fits and (A.is_nested or A.is_meta):
            raise InputError(
                f"A: is {'nested' if A.is_nested else 'on the meta device'}; expected a dense real matrix."
            )
        if not fits or A.ndim - batch_ndim not in (1, 2) or not A.shape[batch_ndim:].numel():
            kind = f"{A.layout}, {A.dtype} of shape {tuple(A.shape)}" if isinstance(A, Tensor) else type(A).__name__
            if fits and not A.numel():
                raise InputError(f"A: has shape {tuple(A.shape)}, without entries; expected one of a row at least.")
            stack = f", each with {batch_ndim} leading dimensions of a batch" if batch_ndim else ""
            raise InputError(f"A: is {kind}; expected a dense real matrix (M, D), or the (D,) of a diagonal{stack}.")
        check_real_tensor(A, "A")
        if A.requires_grad:
            _call.refuse_transforms()
        _call.refuse_tangent(A, "A")
        written = A.numel() * A.element_size()
        if written > max(LARGEST_VIEW, A.untyped_storage().nbytes()):
            raise InputError(
                f"A: is an expanded view of shape {tuple(A.shape)}, {written / 2**30:,.0f} GiB when written out, and "
                "each product reads all of it; give hodiff.JacobianOperator a function that computes the product."
            )
        super().__init__()
        self._own = "the matrix requires grad" if A.requires_grad else ""
        self._given = A
        self._matrix = A.detach()
        symmetric = None if symmetric is None else is_set(symmetric, "symmetric")
        self._diagonal = A.ndim == batch_ndim + 1
        symmetric_made = self._diagonal or (A.shape[-2] == A.shape[-1] and _is_symmetric(self._matrix))
        self._symmetric = symmetric is not False and symmetric_made
        if symmetric and not self._symmetric:
            raise InputError("symmetric=True: A differs from its transpose; give (A + A.T) / 2.")
        batch, (rows, *_) = A.shape[:batch_ndim], A.shape[batch_ndim:]
        hollow = self._matrix.new_empty(())
        self._space = Space.line(hollow.expand(*batch, A.shape[-1]), batch_ndim=batch_ndim)
        self._rows = Space.line(hollow.expand(*batch, rows), batch_ndim=batch_ndim)

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is its own transpose."""
        return self._symmetric

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
        """As for any operator; but where few matrices are asked for, the others are not read."""
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
        return MatrixOperator(self._given.mT, symmetric=False, batch_ndim=len(self._space.batch))

    def _chunk(self, count: int) -> int:
        return max(1, _reverse.CHUNK_BYTES // (2 * self._most() * self._matrix.element_size()))

    def _most(self) -> int:
        return max(1, self._space.batch.numel()) * max(self.shape[-2:])

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return copy.copy(self)  # its one leaf

    def _about(self) -> str:
        return "diagonal" if self._diagonal else "matrix"


def _is_symmetric(A: Tensor) -> bool:
    """Whether a matrix is its own transpose, but for rounding: Q diag(d) Q', computed, is so nearly.

    Of a stack, each of them.
    """
    if torch.equal(A, A.mT):
        return True
    # In units of the largest entries: squares may have no place.
    unit = A.abs().amax((-2, -1)).to(torch.promote_types(A.dtype, torch.float32))
    off = (A - A.mT).abs().amax((-2, -1))
    unit = torch.where(unit > 0, unit, 1.0)
    size = (A / unit[..., None, None]).norm(dim=(-2, -1))
    return bool((off / unit <= 8 * torch.finfo(A.dtype).eps * size).all())
