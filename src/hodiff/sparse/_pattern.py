"""`Pattern`, which entries of a matrix can be other than zero: given,
or found by `sparsity_pattern`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _call, _reverse, _tree
from hodiff._core._arguments import Allowed, kind
from hodiff._core._call import Call, call
from hodiff._core._graph import OutputGraph
from hodiff._core._settings import on
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.sparse._tracer import Sets, TooMany, Tracer, exits, sorted_unique, tensors_in


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


# --- `sparsity_pattern`: one reverse pass, followed by index sets, tells which entries can be other
# than zero The rows of a Jacobian, or of a Hessian as the Jacobian of the gradient, are what a
# reverse pass makes of unit cotangents. That pass is linear, so which of its results depend on
# which entries of its cotangent is the pattern, and it is followed through the very operations that
# compute the products later.


def sparsity_pattern(
    f: Any,
    x: Any,
    *,
    order: int = 2,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Pattern:
    r"""The entries of a Hessian or Jacobian that can be nonzero.

    Args:
        f: A function of *x* that returns one element for a Hessian, or a tensor or a container of
            tensors for a Jacobian. Or such a tensor already computed; the pattern then holds only
            at this point.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        order: 2 for the Hessian, 1 for the Jacobian.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`. The pattern is valid for all values of dense
            tensors in them.
        kwargs: Keyword arguments for `f`, likewise.

    Returns:
        A `Pattern` of shape `(D, D)`, or `(M, D)` for M outputs, in the order of *x* and `f(x)`. It
        may be wider than necessary, but misses no entry, at *x* and wherever `f` takes the same
        Python branches. If Python reads a value that depends on *x* (an `if`, `.item()`, the index
        in `x[x.argmax()]`, the shape of `x[x > 0]`), `f` may do something else at another point:
        `values_read` records this, and a plan then checks each matrix. A zero in a tensor that `f`
        closes over is assumed to stay zero, unless the tensor requires grad: pass what changes in
        `args`.

    Raises:
        InputError: *order* is neither 1 nor 2, or the pattern has too many entries to store.
        GraphError: As for `hvp` and `jacobian`.

    Cost:
        One evaluation of `f` and one reverse pass, two for a Hessian; about 15 µs for each
        operation, and about 50 ns for each set entry in operations that add, gather or scatter.
        Always on the CPU.

    Examples:
        A chain, each of whose terms couples two neighbors:

        >>> import torch, hodiff
        >>> chain = lambda x: ((x[1:] - x[:-1] ** 2) ** 2).sum()
        >>> print(hodiff.sparse.sparsity_pattern(chain, torch.ones(5)).picture())
        xx···
        xxx··
        ·xxx·
        ··xxx
        ···xx

    Reference:
        Walther, A. (2008). Computing sparse Hessians with automatic differentiation. ACM TOMS
        34(1). doi:10.1145/1322436.1322439. Index sets are propagated there as here; here through
        the linear pass.
    """
    if not isinstance(order, int) or isinstance(order, bool) or order not in (1, 2):
        raise InputError(f"order: got {order!r}, expected 1 (a Jacobian) or 2 (a Hessian).")
    request = call(
        f, Where(x), passes=order, create_graph=False, allow=allow, args=args, kwargs=kwargs
    )
    return detect(request, order)


def detect(request: Call, order: int, noted: list[Any] | None = None) -> Pattern:
    """The pattern of what a call asks for; to `noted` the structure of what `f` returned is added,
    and constants.
    """
    from hodiff.sparse import rules

    _call.refuse_stand_ins()
    given = [*request.where.tensors, *tensors_in((list(request.args), dict(request.kwargs)))]
    tracer = Tracer(rules.find, given, anywhere=request.builds_graph)
    with exits(tracer), on(tracer), OutputGraph(request) as graph:
        outputs = _reverse.gradient(graph, differentiated=True) if order == 2 else graph.tensors()
        if noted is not None:
            noted += [_tree.flatten(graph.outputs)[2], tracer.constants]
        cotangents = [
            torch.ones_like(output, memory_format=torch.contiguous_format) for output in outputs
        ]
        tracer.begin(cotangents)
        try:
            gradients = _reverse.vjp(graph, outputs, cotangents)
            sets = Sets.joined([tracer.read(part) for part in gradients])
            columns, rows = (_everything if tracer.lost else Sets.pairs)(sets)
        except TooMany as error:
            raise _too_many(tracer) from error
    names = tuple(tracer.unknown) + ((tracer.lost,) if tracer.lost else ())
    if order == 1:
        return Pattern(rows, columns, (tracer.width, len(sets)), names, tuple(tracer.values_read))
    both = torch.cat([rows, columns]), torch.cat([columns, rows])
    return Pattern(*both, (len(sets), len(sets)), names, tuple(tracer.values_read))


def _everything(sets: Sets) -> tuple[Tensor, Tensor]:
    """All pairs of an element and a number."""
    if len(sets) * sets.width > _DENSE:
        raise TooMany
    return torch.arange(len(sets), device="cpu").repeat_interleave(sets.width), torch.arange(
        sets.width, device="cpu"
    ).repeat(len(sets))


_DENSE = 2**26


def _too_many(tracer: Tracer) -> InputError:
    named = [*([tracer.lost] if tracer.lost else []), *tracer.unknown]
    blamed = (
        f" Without a sparsity rule, and taken to couple all inputs: {', '.join(named)}."
        if named
        else ""
    )
    return InputError(
        f"f: the matrix of derivatives is not sparse, or does not appear to be: the pattern has "
        f"too many entries to store.{blamed} Give the pattern if you know it (pattern=), or use "
        f"products: hodiff.hvp, hodiff.HessianOperator, hodiff.jvp."
    )
