"""`Pattern`: the entries of a matrix that can be other than zero."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _call
from hodiff._core._arguments import kind
from hodiff.errors import InputError


def sorted_unique(keys: Tensor) -> Tensor:
    """The different numbers among some, ascending."""
    try:
        import numpy

        # an order of magnitude faster than torch.sort
        ordered = torch.from_numpy(numpy.sort(keys.numpy()))
    except (ImportError, RuntimeError):  # neither hodiff nor PyTorch needs NumPy
        ordered = keys.sort().values
    return torch.unique_consecutive(ordered)


class Pattern:
    """The entries of a matrix that can be nonzero.

    Attributes:
        shape: Rows and columns of the matrix.
        rows: The row of each place, ascending.
        columns: The column of each, ascending within a row.
        without_rule: PyTorch operations without a sparsity rule: each is assumed to couple all of
            its inputs, so the pattern may be wider than necessary.
        values_read: How Python read values that depend on the point, as an `if` does: the pattern
            holds as long as `f` does the same with them. Empty if the pattern holds everywhere.

    Examples:
        >>> import torch, hodiff
        >>> pattern = hodiff.sparse.sparsity_pattern(
        ...     lambda x: (x[1:] * x[:-1]).sum(), torch.ones(4)
        ... )
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
        keys = sorted_unique(rows.long() * shape[1] + columns.long())  # fewer bits would overflow
        self.shape = shape
        self.rows = torch.div(keys, max(1, shape[1]), rounding_mode="floor")
        self.columns = keys - self.rows * shape[1]
        self.without_rule, self.values_read = without_rule, values_read

    @property
    def nnz(self) -> int:
        """The number of places."""
        return len(self.rows)

    @property
    def keys(self) -> Tensor:
        """Each place as one number, row by row."""
        return self.rows * self.shape[1] + self.columns

    def starts(self) -> Tensor:
        """The beginning of each row among the places, and the end of the last one."""
        counts = torch.bincount(self.rows, minlength=self.shape[0])
        return torch.cat([self.rows.new_zeros(1), counts.cumsum(0)])

    def transposed(self) -> Pattern:
        """The pattern of the transposed matrix."""
        return Pattern(
            self.columns,
            self.rows,
            (self.shape[1], self.shape[0]),
            self.without_rule,
            self.values_read,
        )

    def to_torch(self) -> Tensor:
        """A sparse boolean tensor in coordinate format."""
        ones = torch.ones(self.nnz, dtype=torch.bool, device="cpu")
        indices = torch.stack([self.rows, self.columns])
        return torch.sparse_coo_tensor(
            indices, ones, self.shape, device="cpu", is_coalesced=True, check_invariants=False
        )

    def to_scipy(self) -> Any:
        """The pattern as a boolean `scipy.sparse.csr_array`."""
        import numpy

        return scipy_sparse().csr_array(
            (numpy.ones(self.nnz, dtype=bool), self.columns.numpy(), self.starts().numpy()),
            shape=self.shape,
        )

    def picture(self) -> str:
        """The pattern in characters, for a small matrix."""
        if max(self.shape) > 100:
            raise InputError(
                f"picture: {self.shape} is too large; use plt.spy(pattern.to_scipy())."
            )
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


GIVEN = (
    "a hodiff Pattern, a SciPy sparse matrix, a sparse tensor, or a pair (rows, "
    "columns) of index vectors"
)


def _is_scipys(value: Any) -> bool:
    if "scipy.sparse" not in sys.modules:
        return False
    from scipy.sparse import issparse  # which waits where another thread has only begun to load it

    return bool(issparse(value))


def given(value: Any, shape: tuple[int, int], *, symmetric: bool) -> Pattern:
    """A pattern as the caller gives it: every place that is stored counts,
    whatever is stored there.
    """
    _call.refuse_stand_ins()
    if isinstance(value, Pattern):
        pattern = value
    elif isinstance(value, Tensor):
        pattern = _of_tensor(value)
    elif _is_scipys(value):
        entries = value.tocoo()
        pattern = _of_pairs(entries.row, entries.col, tuple(entries.shape))
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        pattern = _of_pairs(value[0], value[1], shape)
    else:
        raise InputError(f"pattern: got {kind(value)}, expected {GIVEN}.")
    if tuple(pattern.shape) != tuple(shape):
        wanted = (
            "a row and a column for each number in x."
            if symmetric
            else "a row for each output of f, a column for each number in x."
        )
        raise InputError(
            f"pattern is {pattern.shape[0]} x {pattern.shape[1]}, "
            f"expected {shape[0]} x {shape[1]}: {wanted}"
        )
    if symmetric:
        check_symmetric(pattern)
    return pattern


def check_symmetric(pattern: Pattern) -> None:
    """Raise for a pattern that a Hessian cannot have."""
    if pattern.shape[0] != pattern.shape[1]:
        raise InputError(
            f"pattern is {pattern.shape[0]} x {pattern.shape[1]}, expected a symmetric matrix."
        )
    turned = pattern.transposed()
    if pattern.nnz == turned.nnz and torch.equal(pattern.keys, turned.keys):
        return
    alone = ~torch.isin(pattern.keys, turned.keys)
    i, j = int(pattern.rows[alone][0]), int(pattern.columns[alone][0])
    raise InputError(
        f"pattern holds ({i}, {j}) but not ({j}, {i}), and a Hessian is symmetric. Give both "
        f"triangles (pattern + pattern.T for a SciPy matrix)."
    )


def check_layout(value: Tensor) -> None:
    """Raise for a tensor that PyTorch cannot make sparse, or ask for its shape."""
    if value.is_nested or value.is_mkldnn:
        raise InputError(
            f"pattern: got a {'nested' if value.is_nested else 'mkldnn'} tensor, expected {GIVEN}."
        )


def _of_tensor(value: Tensor) -> Pattern:
    check_layout(value)
    if value.layout is torch.strided or value.ndim != 2:
        raise InputError(
            f"pattern: got a {'dense' if value.layout is torch.strided else 'sparse'} tensor of "
            f"shape {tuple(value.shape)}, expected {GIVEN}; convert a dense two-dimensional matrix "
            f"with .to_sparse()."
        )
    entries = value.detach().to_sparse_coo()
    indices = entries._indices().cpu()
    return Pattern(indices[0], indices[1], (value.shape[0], value.shape[1]))


def _of_pairs(rows: Any, columns: Any, shape: tuple[int, int]) -> Pattern:
    entries = []
    for indices, name, size in ((rows, "rows", shape[0]), (columns, "columns", shape[1])):
        try:
            vector = torch.as_tensor(indices)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"pattern: the {name} are {kind(indices)}, expected integers."
            ) from error
        other = vector.is_floating_point() or vector.is_complex() or vector.dtype is torch.bool
        if vector.ndim != 1 or (other and len(vector)):
            raise InputError(
                f"pattern: the {name} have shape {tuple(vector.shape)} and dtype {vector.dtype}, "
                f"expected a vector of integers."
            )
        vector = vector.detach().cpu()
        if len(vector) and not 0 <= int(vector.min()) <= int(vector.max()) < size:
            wrong = int(vector[(vector < 0) | (vector >= size)][0])
            raise InputError(
                f"pattern: the {name} hold {wrong}, expected numbers from 0 to {size - 1}."
            )
        entries.append(vector)
    if len(entries[0]) != len(entries[1]):
        raise InputError(
            f"pattern: got {len(entries[0])} row and {len(entries[1])} column indices, "
            "expected as many of each."
        )
    return Pattern(entries[0], entries[1], shape)


def scipy_sparse() -> Any:
    """The module `scipy.sparse`, imported on demand."""
    try:
        import scipy.sparse
    except ImportError as error:
        raise ImportError("sparse matrices for SciPy need SciPy: pip install scipy") from error
    return scipy.sparse
