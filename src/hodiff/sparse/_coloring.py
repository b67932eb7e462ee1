"""`color`: columns (or rows) that one product can share, with each entry's place in the products.

Colors are assigned greedily. The colors around a vertex are the bits of one Python integer, so
that what a vertex may not have is found by one "or" for each neighbor, however many colors there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hodiff._core._arguments import check_option, kind
from hodiff.errors import InputError
from hodiff.sparse._pattern import Pattern, check_layout, check_symmetric, given

Kind = Literal["star", "columns", "rows"]
Order = Literal["best", "largest", "natural"]

PART = 1500
"""Of more columns, those on which the ways to color them are compared."""


def color(pattern: Any, kind: Kind = "star", *, order: Order = "best") -> Tensor:
    r"""Colors for the columns of a sparse matrix: one product gives all columns of one color.

    Args:
        pattern: A `Pattern`, a SciPy sparse matrix, or a sparse tensor.
        kind: `"columns"`: columns with a common row have different colors, so that the products
            with the sums of the columns of each color contain all entries. `"rows"`: the same for
            rows, with products from the left. `"star"`, for a symmetric matrix with a diagonal:
            neighbors have different colors, and no path of four vertices has only two; each entry
            is then in the product of its column or of its row, and fewer colors are needed.
        order: The order in which vertices take the lowest possible color: `"natural"`, or
            `"largest"` degree first. `"best"` uses the order with the fewest colors on the first
            1,500 columns.

    Returns:
        For each column (row) its color, integers from 0 on, shape `(columns,)` or `(rows,)`.
        Vertices with far more neighbors than the others (more than 20 times the median, and 64)
        have a color of their own.

    Raises:
        InputError: *pattern* is not a pattern, or not symmetric for a star coloring.

    Cost:
        On the CPU, in Python: about 5 µs for each column of a matrix with a handful of entries per
        row.

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
        21(2). doi:10.1287/ijoc.1080.0286.
    """
    check_option(kind, Kind, "kind")
    check_option(order, Order, "order")
    pattern = given(pattern, _shape(pattern), symmetric=False)
    if kind == "star":
        check_symmetric(pattern)
        return _star(pattern, order)
    return _best(
        _COLUMNS, pattern if kind == "columns" else pattern.transposed(), order, star=False
    )


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


class _Way(NamedTuple):
    """One way to color all columns of a pattern."""

    run: Callable[[Pattern], Tensor]
    order: Order


def _best(ways: Sequence[_Way], pattern: Pattern, order: Order, *, star: bool) -> Tensor:
    """The colors of the way that needs the fewest; of many columns, on the first of them."""
    ways = [way for way in ways if order in ("best", way.order)]
    part = _first(pattern, star=star) if len(ways) > 1 and pattern.shape[1] > PART else pattern
    least = 0 if star or not part.nnz else int(torch.bincount(part.rows).max())
    colors: list[Tensor] = []
    for way in ways:
        colors.append(way.run(part))
        if _count(colors[-1]) == least:  # the columns of a row all differ
            break
    best = min(range(len(colors)), key=lambda n: _count(colors[n]))
    return colors[best] if part is pattern else ways[best].run(pattern)


def _first(pattern: Pattern, *, star: bool) -> Pattern:
    """The first columns; for a star coloring, the matrix of those alone."""
    rows = PART if star else pattern.shape[0]
    held = (pattern.columns < PART) & (pattern.rows < rows)
    return Pattern(pattern.rows[held], pattern.columns[held], (rows, PART))


def _count(colors: Tensor) -> int:
    return int(colors.max()) + 1 if len(colors) else 0


def _sequence(degrees: Tensor, order: Order) -> list[int]:
    """The order in which vertices are colored."""
    if order == "natural":
        return list(range(len(degrees)))
    return degrees.argsort(descending=True, stable=True).tolist()


def _crowded(degrees: Tensor) -> Tensor:
    """The vertices with far more neighbors than most."""
    if not len(degrees):
        return degrees.bool()
    return degrees > max(64, 20 * int(degrees.median()))


def _lists(heads: Tensor, tails: Tensor, count: int) -> list[list[int]]:
    """The tails of each head, from pairs in the order of their heads."""
    flat, ends = tails.tolist(), torch.bincount(heads, minlength=count).cumsum(0).tolist()
    begin, lists = 0, []
    for end in ends:
        lists.append(flat[begin:end])
        begin = end
    return lists


# --- symmetric matrices


def _star(pattern: Pattern, order: Order) -> Tensor:
    count = pattern.shape[0]
    degrees = torch.bincount(pattern.rows[pattern.rows != pattern.columns], minlength=count)
    private = _crowded(degrees)
    crowd = int(private.sum())
    rest = pattern
    if crowd:  # such a vertex lies on no path of two colors, so the others may forget it
        kept = ~(private[pattern.rows] | private[pattern.columns])
        rest = Pattern(pattern.rows[kept], pattern.columns[kept], pattern.shape)
    colors = _best(_STAR, rest, order, star=True)
    if crowd:
        first = _count(colors[~private])
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
    lengths = torch.bincount(pattern.rows, minlength=rows)
    met = torch.zeros(columns, dtype=torch.int64, device="cpu").index_add(
        0, pattern.columns, lengths[pattern.rows]
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


def _with_diagonal(pattern: Pattern, order: Order) -> Tensor:
    """Columns that meet in a row, or are neighbors, differ: that is a star coloring too."""
    diagonal = torch.arange(pattern.shape[0], device="cpu")
    whole = Pattern(
        torch.cat([pattern.rows, diagonal]), torch.cat([pattern.columns, diagonal]), pattern.shape
    )
    return _by_rows(whole, order)


_COLUMNS = [_Way(partial(_by_rows, order=order), order) for order in ("largest", "natural")]
_STAR = [
    _Way(partial(_by_stars, order="largest", wary=False), "largest"),
    _Way(partial(_by_stars, order="largest", wary=True), "largest"),
    _Way(partial(_by_stars, order="natural", wary=False), "natural"),
    _Way(partial(_with_diagonal, order="natural"), "natural"),
]


# --- where in the compressed products each entry of a matrix stands: one gather, worked out once --


def symmetric(pattern: Pattern, colors: Tensor) -> Tensor:
    """The place of each entry in the flat products `B[color, row]` of a symmetric matrix.

    Entry (i, j) is B[c(j), i] where c(j) occurs once among the columns of row i, else B[c(i), j].
    """
    count = pattern.shape[0]
    here = colors[pattern.columns] * count + pattern.rows
    there = colors[pattern.rows] * count + pattern.columns
    alone = _alone(here)
    turned = _alone(there)
    _check(alone | turned, pattern)
    return torch.where(alone, here, there)


def by_columns(pattern: Pattern, colors: Tensor) -> Tensor:
    """The place of each entry in the flat products `B[color, row]` with sums of columns."""
    here = colors[pattern.columns] * pattern.shape[0] + pattern.rows
    _check(_alone(here), pattern)
    return here


def by_rows(pattern: Pattern, colors: Tensor) -> Tensor:
    """The place of each entry in the flat products `B[color, column]` with sums of rows."""
    here = colors[pattern.rows] * pattern.shape[1] + pattern.columns
    _check(_alone(here), pattern)
    return here


def seeds(colors: Tensor, count: int, like: Tensor) -> Tensor:
    """The sums of the unit vectors of each color, `(colors, n)`,
    of the dtype and on the device of a tensor.
    """
    return like.new_zeros(count, len(colors)).scatter_(0, colors.to(like.device).reshape(1, -1), 1)


def _alone(places: Tensor) -> Tensor:
    """The places that occur once."""
    return torch.bincount(places)[places] == 1 if len(places) else places.bool()


def _check(colors: Tensor, pattern: Pattern) -> None:
    if not bool(colors.all()):
        entry = int((~colors).nonzero()[0, 0])
        raise AssertionError(
            f"the coloring does not separate entry ({int(pattern.rows[entry])}, "
            f"{int(pattern.columns[entry])})"
        )
