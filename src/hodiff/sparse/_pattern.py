"""`Pattern`: which entries of a matrix can be other than zero; detected, or given by the caller."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.sparse._sets import sorted_unique


class Pattern:
    """The places of a matrix that can hold something other than zero.

    Attributes:
        shape: Rows and columns of the matrix.
        rows: The row of each place, ascending.
        columns: The column of each, ascending within a row.
        without_rule: PyTorch's operations that have no sparsity rule: each was taken to couple all of its inputs, so
            that the pattern may be wider than it need be.
        values_read: How Python read values that follow from the point, such as an `if` does: the pattern holds where
            `f` does the same with them. Empty where it holds anywhere.

    Examples:
        >>> import torch, hodiff
        >>> pattern = hodiff.sparse.sparsity_pattern(lambda x: (x[1:] * x[:-1]).sum(), torch.ones(4))
        >>> pattern
        Pattern 4 x 4, 6 entries
        >>> print(pattern.picture())
        ·x··
        x·x·
        ·x·x
        ··x·
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        shape: tuple[int, int],
        without_rule: tuple[str, ...] = (),
        values_read: tuple[str, ...] = (),
    ) -> None:
        keys = sorted_unique(rows * shape[1] + columns)
        self.shape = shape
        self.rows = torch.div(keys, max(1, shape[1]), rounding_mode="floor")
        self.columns = keys - self.rows * shape[1]
        self.without_rule, self.values_read = without_rule, values_read

    @property
    def nnz(self) -> int:
        """How many places there are."""
        return len(self.rows)

    @property
    def keys(self) -> Tensor:
        """Each place as one number, row by row."""
        return self.rows * self.shape[1] + self.columns

    def starts(self) -> Tensor:
        """Where each row begins among the places, and where the last one ends."""
        return starts(self.rows, self.shape[0])

    def transposed(self) -> Pattern:
        """The pattern of the transposed matrix."""
        return Pattern(self.columns, self.rows, (self.shape[1], self.shape[0]), self.without_rule, self.values_read)

    def to_torch(self) -> Tensor:
        """A sparse boolean tensor in coordinate format."""
        ones = torch.ones(self.nnz, dtype=torch.bool, device="cpu")
        indices = torch.stack([self.rows, self.columns])
        return torch.sparse_coo_tensor(
            indices, ones, self.shape, device="cpu", is_coalesced=True, check_invariants=False
        )

    def to_scipy(self) -> Any:
        """A boolean `scipy.sparse.csr_array`."""
        import numpy

        return scipy_sparse().csr_array(
            (numpy.ones(self.nnz, dtype=bool), self.columns.numpy(), self.starts().numpy()), shape=self.shape
        )

    def picture(self) -> str:
        """The pattern in characters, for a small matrix."""
        if max(self.shape) > 100:
            raise InputError(f"picture: {self.shape[0]} x {self.shape[1]} do not fit; use plt.spy(pattern.to_scipy()).")
        held = self.to_torch().to_dense().tolist()
        return "\n".join("".join("x" if entry else "·" for entry in row) for row in held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pattern):
            return NotImplemented
        return self.shape == other.shape and torch.equal(self.keys, other.keys)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        wide = f", without a rule: {', '.join(self.without_rule)}" if self.without_rule else ""
        return f"Pattern {self.shape[0]} x {self.shape[1]}, {self.nnz} entries{wide}"


def starts(rows: Tensor, count: int) -> Tensor:
    """Where each of `count` rows begins, given the row of each entry, ascending."""
    return torch.cat([rows.new_zeros(1), torch.bincount(rows, minlength=count).cumsum(0)])


GIVEN = "a hodiff Pattern, a SciPy sparse matrix, a sparse tensor, or a pair (rows, columns) of index vectors"


def _is_scipys(value: Any) -> bool:
    if "scipy.sparse" not in sys.modules:
        return False
    from scipy.sparse import issparse  # which waits where another thread has only begun to load it

    return bool(issparse(value))


def given(value: Any, shape: tuple[int, int], *, symmetric: bool) -> Pattern:
    """A pattern as the caller gives it: every place that is stored counts, whatever is stored there."""
    if isinstance(value, Pattern):
        pattern = value
    elif isinstance(value, Tensor):
        pattern = _of_tensor(value)
    elif _is_scipys(value):
        found = value.tocoo()
        pattern = _of_pairs(found.row, found.col, tuple(found.shape))
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        pattern = _of_pairs(value[0], value[1], shape)
    else:
        raise InputError(f"pattern: is a {type(value).__name__}, expected {GIVEN}.")
    if tuple(pattern.shape) != tuple(shape):
        raise InputError(
            f"pattern: is {pattern.shape[0]} x {pattern.shape[1]}, expected {shape[0]} x {shape[1]}, "
            + ("an entry for each pair of numbers in x." if symmetric else "a row for each output of f, a column for "
            "each number in x.")
        )  # fmt: skip
    if symmetric:
        check_symmetric(pattern)
    return pattern


def check_symmetric(pattern: Pattern) -> None:
    """Raise for a pattern that a Hessian cannot have."""
    if pattern.shape[0] != pattern.shape[1]:
        raise InputError(f"pattern: is {pattern.shape[0]} x {pattern.shape[1]}, expected a symmetric matrix.")
    turned = pattern.transposed()
    if pattern.nnz == turned.nnz and torch.equal(pattern.keys, turned.keys):
        return
    alone = ~torch.isin(pattern.keys, turned.keys)
    i, j = int(pattern.rows[alone][0]), int(pattern.columns[alone][0])
    raise InputError(
        f"pattern: holds ({i}, {j}) and not ({j}, {i}), but a Hessian is symmetric. Give both triangles "
        f"(pattern + pattern.T for a SciPy matrix)."
    )


def check_layout(value: Tensor) -> None:
    """Raise for a tensor that PyTorch cannot make sparse, or ask for its shape."""
    if value.is_nested or value.is_mkldnn:
        raise InputError(f"pattern: is a {'nested' if value.is_nested else 'mkldnn'} tensor, expected {GIVEN}.")


def _of_tensor(value: Tensor) -> Pattern:
    check_layout(value)
    if value.layout is torch.strided or value.ndim != 2:
        raise InputError(
            f"pattern: is a {'dense' if value.layout is torch.strided else 'sparse'} tensor of shape "
            f"{tuple(value.shape)}, expected {GIVEN}; a dense matrix of two dimensions has .to_sparse()."
        )
    found = value.detach().to_sparse_coo()
    indices = found._indices().cpu()
    return Pattern(indices[0], indices[1], (value.shape[0], value.shape[1]))


def _of_pairs(rows: Any, columns: Any, shape: tuple[int, int]) -> Pattern:
    found = []
    for indices, name, size in ((rows, "rows", shape[0]), (columns, "columns", shape[1])):
        try:
            vector = torch.as_tensor(indices)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"pattern: its {name} are a {type(indices).__name__}, expected integers.") from error
        if vector.ndim != 1 or vector.is_floating_point() or vector.is_complex() or vector.dtype is torch.bool:
            if not vector.numel() and vector.ndim == 1:
                vector = vector.long()
            else:
                raise InputError(
                    f"pattern: its {name} have shape {tuple(vector.shape)} and dtype {vector.dtype}, expected a vector "
                    f"of integers."
                )
        vector = vector.detach().cpu().long()
        if len(vector) and not 0 <= int(vector.min()) <= int(vector.max()) < size:
            wrong = int(vector[(vector < 0) | (vector >= size)][0])
            raise InputError(f"pattern: its {name} hold {wrong}, expected numbers from 0 to {size - 1}.")
        found.append(vector)
    if len(found[0]) != len(found[1]):
        raise InputError(f"pattern: has {len(found[0])} rows and {len(found[1])} columns, expected as many of each.")
    return Pattern(found[0], found[1], shape)


def scipy_sparse() -> Any:
    """The module `scipy.sparse`."""
    try:
        import scipy.sparse
    except ImportError as error:
        raise ImportError("sparse matrices for SciPy need SciPy: pip install 'hodiff[scipy]'") from error
    return scipy.sparse
