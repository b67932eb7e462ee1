"""`Pattern`: the entries of a matrix that can be other than zero, given, drawn and colored.

A matrix whose rows repeat, as on a grid, is colored by a formula (`_by_formula`), others greedily.
There the colors around a vertex are the bits of one Python integer, so that what a vertex may not
have is found by one "or" for each neighbor, however many colors there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise, product
from typing import Any, Literal

import torch
from torch import Tensor

from hodiff._core import _call
from hodiff._core._arguments import check_option, kind
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
        return "\n".join(
            "".join("x" if entry else "·" for entry in row)
            for row in self.to_torch().to_dense().tolist()
        )

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
    indices = value.detach().to_sparse_coo()._indices().cpu()
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


# --- columns (or rows) that one product can share -------------------------------------------------


Kind = Literal["star", "columns", "rows"]
Order = Literal["largest", "natural"]

PART = 1500
"""Of more columns, those on which the ways to color them are compared."""


def color(pattern: Any, kind: Kind = "star") -> Tensor:
    r"""Colors for the columns of a sparse matrix: one product gives all columns of one color.

    Args:
        pattern: A `Pattern`, a SciPy sparse matrix, or a sparse tensor.
        kind: `"columns"`: columns with a common row have different colors, so that the products
            with the sums of the columns of each color contain all entries. `"rows"`: the same for
            rows, with products from the left. `"star"`, for a symmetric matrix with a diagonal:
            neighbors have different colors, and no path of four vertices has only two; each entry
            is then in the product of its column or of its row, and fewer colors are needed.

    Returns:
        For each column (row) its color, integers from 0 on, shape `(columns,)` or `(rows,)`. On
        bands and grids a formula gives as many as a row has entries, or a few more. Elsewhere it
        is the lowest possible one, in the order that needs the fewest colors on the first 1,500
        columns. Vertices with far more neighbors than the others (more than 20 times the median,
        and 64) have a color of their own.

    Raises:
        InputError: *pattern* is not a pattern, or not symmetric for a star coloring.

    Cost:
        On the CPU: of a matrix with a handful of entries per row about 0.2 µs for each column by
        the formula, 2 µs greedily, in Python.

    Examples:
        An arrow, whose first row and column are full, takes two products; columns alone would take
        all four:

        >>> import torch, hodiff
        >>> arrow = hodiff.sparse.sparsity_pattern(lambda x: x[0] * (x**2).sum(), torch.ones(4))
        >>> hodiff.sparse.color(arrow)
        tensor([0, 1, 1, 1])
        >>> hodiff.sparse.color(arrow, "columns")
        tensor([0, 1, 2, 3])

    Reference:
        Gebremedhin, A. H., Tarafdar, A., Pothen, A., Walther, A. (2009). Efficient computation of
        sparse Hessians using coloring and automatic differentiation. INFORMS Journal on Computing
        21(2). doi:10.1287/ijoc.1080.0286. Goldfarb, D., Toint, P. L. (1984). Optimal estimation of
        Jacobian and Hessian matrices that arise in finite difference calculations. Mathematics of
        Computation 43(167), 69-88.
    """
    check_option(kind, Kind, "kind")
    pattern = given(pattern, _shape(pattern), symmetric=False)
    if kind == "star":
        check_symmetric(pattern)
        return _star(pattern)
    return _best(_COLUMNS, pattern if kind == "columns" else pattern.transposed(), star=False)


def _shape(pattern: Any) -> tuple[int, int]:
    if isinstance(pattern, Tensor):
        check_layout(pattern)
    shape = getattr(pattern, "shape", ())
    if len(shape) != 2:
        raise InputError(
            f"pattern: got {kind(pattern)}, expected one with a shape: a hodiff Pattern, a SciPy "
            f"sparse matrix, or a sparse tensor."
        )
    return int(shape[0]), int(shape[1])


def _best(ways: Sequence[Callable[[Pattern], Tensor]], pattern: Pattern, *, star: bool) -> Tensor:
    """The colors of the way that needs the fewest; of many columns, on the first of them."""
    large, formula = pattern.shape[1] > PART, _by_formula(pattern)
    if large and formula is not None:
        return formula
    part = _first(pattern, star=star) if large else pattern
    least = 0 if star or not part.nnz else int(torch.bincount(part.rows).max())
    colors: list[Tensor] = []
    for way in ways:
        colors.append(way(part))
        if count_of(colors[-1]) == least:  # the columns of a row all differ
            break
    colors += [] if formula is None else [formula]
    best = min(range(len(colors)), key=lambda n: count_of(colors[n]))
    return ways[best](pattern) if large else colors[best]


def _first(pattern: Pattern, *, star: bool) -> Pattern:
    """The first columns; for a star coloring, the matrix of those alone."""
    rows = PART if star else pattern.shape[0]
    held = (pattern.columns < PART) & (pattern.rows < rows)
    return Pattern(pattern.rows[held], pattern.columns[held], (rows, PART))


def _by_formula(pattern: Pattern) -> Tensor | None:
    """Colors `(k + a (k // s) + b (k // t)) % m` of column k, for the matrix of a band or a grid.

    The color of a column less that of its row's number depends, modulo m, on the *move* from one
    to the other alone: on the differences of k, k // s and k // t. So where all moves differ in
    that, the columns of each row differ, and with them those of a path of three vertices,
    whatever s, t and m are; good ones keep m near the entries of a row. A stride s is a move that
    makes each move cross as many multiples of s everywhere: a line of a grid, or a plane.
    """
    rows, columns, origin = pattern.rows, pattern.columns, pattern.shape[0]
    met = torch.bincount(columns - rows + origin, minlength=sum(pattern.shape)) > 0
    moves = [met.nonzero().flatten() - origin]
    count = len(moves[0])
    if count > int(torch.bincount(rows, minlength=1).max()):  # not all moves in any row
        return None
    kinds = (met.cumsum(0) - 1)[columns - rows + origin]
    forms = [torch.arange(max(pattern.shape), device="cpu")]
    few = slice(None, None, 1 + pattern.nnz // PART)
    for stride in moves[0][moves[0] > 1].tolist():
        for part in few, slice(None):
            crossed = columns[part] // stride - rows[part] // stride
            each = torch.zeros_like(moves[0]).scatter_(0, kinds[part], crossed)
            if not torch.equal(each[kinds[part]], crossed):
                break
        else:
            forms, moves = [*forms, forms[0] // stride], [*moves, each]
    for m in range(max(1, count), count * 5 // 4 + 1):
        for weights in islice(product(range(m), repeat=len(forms) - 1), 1000):
            if len((_sum(weights, moves) % m).unique()) == count:
                return (_sum(weights, forms) % m)[: pattern.shape[1]]
    return None


def _sum(weights: Sequence[int], terms: Sequence[Tensor]) -> Tensor:
    """The first of some terms, and multiples of the others."""
    return sum((w * term for w, term in zip(weights, terms[1:], strict=True)), terms[0])


def count_of(colors: Tensor) -> int:
    return int(colors.max()) + 1 if len(colors) else 0


def _sequence(degrees: Tensor, order: Order) -> list[int]:
    """The order in which vertices are colored."""
    if order == "natural":
        return list(range(len(degrees)))
    return degrees.argsort(descending=True, stable=True).tolist()


def _crowded(degrees: Tensor) -> Tensor:
    """The vertices with far more neighbors than most."""
    return degrees > max(64, 20 * int(degrees.median()) if len(degrees) else 0)


def _lists(heads: Tensor, tails: Tensor, count: int) -> list[list[int]]:
    """The tails of each head, from pairs in the order of their heads."""
    flat, ends = tails.tolist(), torch.bincount(heads, minlength=count).cumsum(0).tolist()
    return [flat[begin:end] for begin, end in pairwise([0, *ends])]


# --- symmetric matrices


def _star(pattern: Pattern) -> Tensor:
    count = pattern.shape[0]
    degrees = torch.bincount(pattern.rows[pattern.rows != pattern.columns], minlength=count)
    private = _crowded(degrees)
    crowd = int(private.sum())
    rest = pattern
    if crowd:  # such a vertex lies on no path of two colors, so the others may forget it
        kept = ~(private[pattern.rows] | private[pattern.columns])
        rest = Pattern(pattern.rows[kept], pattern.columns[kept], pattern.shape)
    colors = _best(_STAR, rest, star=True)
    if crowd:
        first = count_of(colors[~private])
        colors[private] = torch.arange(first, first + crowd, device="cpu")
        colors = torch.unique(colors, return_inverse=True)[1]
    return colors


def _by_stars(pattern: Pattern, order: Order, *, wary: bool) -> Tensor:
    count = pattern.shape[0]
    off = pattern.rows != pattern.columns
    heads, tails = pattern.rows[off], pattern.columns[off]
    degrees = torch.bincount(heads, minlength=count)
    return _greedy_star(_lists(heads, tails, count), _sequence(degrees, order), wary=wary)


def _greedy_star(neighbors: list[list[int]], sequence: list[int], *, wary: bool) -> Tensor:
    """The least color for each vertex that closes no path of four vertices in two colors.

    Such a path is closed by *v* in color c at its end, c-d-c-d, or as its second, d-c-d-c. So of a
    neighbor *w* in color d, *v* may not have
        the color d itself;
        where another neighbor of *v* has d too: any color around *w*;
        else, the color of a neighbor of *w* that has two neighbors in d (`shut[w]`).
    A neighbor without a color forbids nothing. To be wary of it, and not to take a color around
    it, leaves it more choice: that needs fewer colors on irregular graphs, and more on grids.
    """
    count = len(neighbors)
    bit = [0] * count  # of a vertex's color; 0 while it has none
    around = [0] * count  # the colors of its neighbors
    twice = [0] * count  # those that two of its neighbors have
    shut = [0] * count  # the colors of those neighbors around which its own color occurs twice
    for v in sequence:
        near = neighbors[v]
        repeated, taken = twice[v], around[v]
        for w in near:
            d = bit[w]
            if d:
                taken |= around[w] if d & repeated else shut[w]
            elif wary:
                taken |= around[w]
        free = ~taken & (taken + 1)
        bit[v] = free
        for w in near:
            d = bit[w]
            # v has two neighbors in d: its color is shut to the other neighbors of both
            if d & repeated:
                shut[w] |= free
            if not around[w] & free:
                around[w] |= free
            elif twice[w] & free:
                shut[v] |= d
            else:
                twice[w] |= free
                if d:
                    for x in neighbors[w]:
                        if bit[x] == free:
                            shut[x] |= d
    return torch.tensor([b.bit_length() - 1 for b in bit], dtype=torch.int64, device="cpu")


# --- any matrix


def _by_rows(pattern: Pattern, order: Order) -> Tensor:
    """A color for each column that none of those has which it meets in a row."""
    rows, columns = pattern.shape
    turned = pattern.transposed()
    rows_of = _lists(turned.rows, turned.columns, columns)
    met = torch.zeros(columns, dtype=torch.int64, device="cpu").index_add(
        0, pattern.columns, torch.bincount(pattern.rows, minlength=rows)[pattern.rows]
    )
    around = [0] * rows  # the colors in each row
    bits = [0] * columns
    for column in _sequence(met, order):
        taken = 0
        for row in rows_of[column]:
            taken |= around[row]
        bits[column] = free = ~taken & (taken + 1)
        for row in rows_of[column]:
            around[row] |= free
    return torch.tensor([b.bit_length() - 1 for b in bits], dtype=torch.int64, device="cpu")


_COLUMNS = [partial(_by_rows, order="largest"), partial(_by_rows, order="natural")]
_STAR = [
    partial(_by_stars, order="largest", wary=False),
    partial(_by_stars, order="largest", wary=True),
    partial(_by_stars, order="natural", wary=False),
]
"""Ways to color all columns of a pattern."""


# --- where in the compressed products each entry of a matrix stands: one gather, worked out once --


def places(pattern: Pattern, colors: Tensor, kind: str) -> Tensor:
    """The place of each entry in the flat products: `B[color, row]` with sums of columns,
    `B[color, column]` with sums of rows.

    Of a star coloring entry (i, j) is B[c(j), i] where c(j) occurs once among the columns of row i,
    else B[c(i), j].
    """
    rows, columns = pattern.rows, pattern.columns
    if kind == "rows":
        rows, columns = columns, rows
    count = pattern.shape[kind == "rows"]
    here = colors[columns] * count + rows
    there = colors[rows] * count + columns if kind == "star" else here
    alone = _alone(here)
    apart = alone | _alone(there)
    if not bool(apart.all()):
        entry = int((~apart).nonzero()[0, 0])
        raise AssertionError(
            f"the coloring does not separate entry ({int(pattern.rows[entry])}, "
            f"{int(pattern.columns[entry])})"
        )
    return torch.where(alone, here, there)


def seeds(colors: Tensor, count: int, like: Tensor) -> Tensor:
    """The sums of the unit vectors of each color, `(colors, n)`,
    of the dtype and on the device of a tensor.
    """
    return like.new_zeros(count, len(colors)).scatter_(0, colors.to(like.device).reshape(1, -1), 1)


def _alone(places: Tensor) -> Tensor:
    """The places that occur once."""
    return torch.bincount(places)[places] == 1 if len(places) else places.bool()
