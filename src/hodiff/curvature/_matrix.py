"""`MatrixOperator`: a matrix that is known entry by entry."""

from __future__ import annotations

import copy
from typing import final

import torch
from torch import Tensor

from hodiff._core import _call, _reverse
from hodiff._core._arguments import check_real_tensor, is_set
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
    """

    def __init__(self, A: Tensor, *, symmetric: bool | None = None) -> None:
        fits = isinstance(A, Tensor) and A.layout is torch.strided and A.is_floating_point()
        if fits and (A.is_nested or A.is_meta):
            raise InputError(
                f"A: is {'nested' if A.is_nested else 'on the meta device'}; expected a dense real matrix."
            )
        if not fits or A.ndim not in (1, 2) or not A.numel():
            kind = f"{A.layout}, {A.dtype} of shape {tuple(A.shape)}" if isinstance(A, Tensor) else type(A).__name__
            if fits and not A.numel():
                raise InputError(f"A: has shape {tuple(A.shape)}, without entries; expected one of a row at least.")
            raise InputError(f"A: is {kind}; expected a dense real matrix (M, D), or the (D,) of a diagonal.")
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
        diagonal, square = A.ndim == 1, A.ndim == 2 and A.shape[0] == A.shape[1]
        self._symmetric = symmetric is not False and (diagonal or (square and _is_symmetric(self._matrix)))
        if symmetric and not self._symmetric:
            raise InputError("symmetric=True: A differs from its transpose; give (A + A.T) / 2.")
        self._space = Space.line(self._matrix.new_empty(()).expand(A.shape[-1]))
        self._rows = Space.line(self._matrix.new_empty(()).expand(A.shape[0]))

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is its own transpose."""
        return self._symmetric

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        (rows,) = parts
        if self._matrix.ndim == 1:
            return [rows * self._matrix]
        with as_given(rows):
            return [rows @ self._matrix.t()]

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        (rows,) = parts
        self._count(count)
        with as_given(rows):
            return [rows * self._given if self._given.ndim == 1 else rows @ self._given.t()]

    def _transposed(self) -> LinearOperator:
        return MatrixOperator(self._given.t(), symmetric=False)

    def _chunk(self, count: int) -> int:
        return max(1, _reverse.CHUNK_BYTES // (2 * max(self.shape) * self._matrix.element_size()))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return copy.copy(self)  # its one leaf

    def _about(self) -> str:
        return "diagonal" if self._matrix.ndim == 1 else "matrix"


def _is_symmetric(A: Tensor) -> bool:
    """Whether a matrix is its own transpose, but for rounding: Q diag(d) Q', computed, is so nearly."""
    if torch.equal(A, A.T):
        return True
    unit = A.abs().max().to(torch.promote_types(A.dtype, torch.float32))  # squares of entries may have no place
    if not (bool(torch.isfinite(unit)) and unit > 0):
        return False
    return bool((A - A.T).abs().max() / unit <= 8 * torch.finfo(A.dtype).eps * (A / unit).norm())
