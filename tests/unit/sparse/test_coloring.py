"""Colors: valid by a slow and obvious predicate, as few as theory says where it says so."""

import itertools
import math
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hodiff
from hodiff.sparse import Pattern, _plan, color
from hodiff.sparse import _pattern as coloring


def pattern_of(pairs: Iterable[tuple[int, int]], shape: tuple[int, int]) -> Pattern:
    pairs = list(pairs)
    return Pattern(torch.tensor([i for i, _ in pairs]).long(), torch.tensor([j for _, j in pairs]).long(), shape)


def is_star_coloring(held: list[list[bool]], colors: list[int]) -> bool:
    """Neighbors differ, and each path of four vertices has three colors."""
    n = len(held)
    near = [[j for j in range(n) if held[i][j] and i != j] for i in range(n)]
    if any(colors[i] == colors[j] for i in range(n) for j in near[i]):
        return False
    for a in range(n):
        for b in near[a]:
            for c in near[b]:
                for d in near[c]:
                    if len({a, b, c, d}) == 4 and len({colors[v] for v in (a, b, c, d)}) < 3:
                        return False
    return True


def is_column_coloring(held: list[list[bool]], colors: list[int]) -> bool:
    """In each row, each color once."""
    rows = [[colors[j] for j, there in enumerate(row) if there] for row in held]
    return all(len(set(row)) == len(row) for row in rows)


@st.composite
def symmetric(draw: st.DrawFn) -> list[list[bool]]:
    n = draw(st.integers(1, 11))
    drawn = draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))
    return [[drawn[i * n + j] or drawn[j * n + i] for j in range(n)] for i in range(n)]


@settings(max_examples=150, deadline=None)
@given(symmetric())
def test_star_colorings_are_valid(held: list[list[bool]]) -> None:
    n = len(held)
    pattern = pattern_of([(i, j) for i in range(n) for j in range(n) if held[i][j]], (n, n))
    for colors in (color(pattern), *(way(pattern) for way in coloring._STAR)):
        assert is_star_coloring(held, colors.tolist())
        assert set(colors.tolist()) == set(range(int(colors.max()) + 1))  # each is a product


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=7))
def test_column_and_row_colorings_are_valid(held: list[list[bool]]) -> None:
    pattern = pattern_of([(i, j) for i, row in enumerate(held) for j, t in enumerate(row) if t], (len(held), 6))
    for colors in (color(pattern, "columns"), *(way(pattern) for way in coloring._COLUMNS)):
        assert is_column_coloring(held, colors.tolist())
    turned = [list(column) for column in zip(*held, strict=True)]
    assert is_column_coloring(turned, color(pattern, "rows").tolist())


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_a_pattern_holds_whole_numbers_of_64_bits(dtype: torch.dtype) -> None:
    """Places are multiplied by numbers of columns."""
    found = Pattern(torch.tensor([1, 0], dtype=dtype), torch.tensor([200, 3], dtype=dtype), (2, 300))
    assert found.rows.dtype is found.columns.dtype is torch.int64
    assert found.columns.tolist() == [3, 200]


def test_a_jacobian_is_colored_by_rows_or_by_columns_whichever_takes_fewer() -> None:
    chance, kinds = random.Random(0), set()
    for _ in range(100):
        pattern = pattern_of([(i, j) for i in range(8) for j in range(8) if chance.random() < 0.5], (8, 8))
        colors, kind = _plan._of_jacobian(pattern)
        counts = {kind: len(set(color(pattern, kind).tolist())) for kind in ("rows", "columns")}
        assert len(set(colors.tolist())) == counts[kind] == min(counts.values())
        kinds.add(kind)
    assert kinds == {"rows", "columns"}


# --- as many as theory says -------------------------------------------------------------------------------------------


def banded(n: int, width: int) -> Pattern:
    return pattern_of([(i, j) for i in range(n) for j in range(n) if abs(i - j) <= width], (n, n))


def grid(m: int, reach: list[tuple[int, int]]) -> Pattern:
    pairs = [
        (i * m + j, (i + a) * m + j + b)
        for i in range(m) for j in range(m) for a, b in reach if 0 <= i + a < m and 0 <= j + b < m
    ]  # fmt: skip
    return pattern_of(pairs, (m * m, m * m))


FIVE = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
NINE = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]


def count(pattern: Pattern, kind: str = "star") -> int:
    return len(set(color(pattern, kind).tolist()))


@pytest.mark.parametrize("width", range(6))
def test_banded_matrices(width: int) -> None:
    """2w + 1 for columns (Curtis, Powell, Reid), and for stars of a band no fewer (Coleman, Moré, 1984)."""
    assert count(banded(40, width), "columns") == 2 * width + 1
    assert count(banded(40, width)) == 2 * width + 1


def test_an_arrow() -> None:
    arrow = pattern_of([(0, j) for j in range(9)] + [(i, 0) for i in range(9)] + [(i, i) for i in range(9)], (9, 9))
    assert count(arrow) == 2
    assert count(arrow, "columns") == 9


def test_grids() -> None:
    assert count(grid(12, FIVE)) == count(grid(12, FIVE), "columns") == 5
    assert count(grid(12, NINE)) == count(grid(12, NINE), "columns") == 9


def test_blocks_and_diagonals() -> None:
    blocks = pattern_of([(3 * b + i, 3 * b + j) for b in range(5) for i in range(3) for j in range(3)], (15, 15))
    assert count(blocks) == count(blocks, "rows") == 3
    assert count(banded(10, 0)) == 1
    assert count(pattern_of([], (4, 4))) == 1
    assert color(pattern_of([], (0, 3)), "rows").shape == (0,)


def test_trees_take_few() -> None:
    """Any tree has a star coloring in three (Fertin, Raspaud, Reed, 2004); greedily in not many more."""
    draw = random.Random(0)
    edges = [(i, draw.randrange(i)) for i in range(1, 300)]
    tree = pattern_of([*edges, *[(j, i) for i, j in edges]], (300, 300))
    assert count(tree) <= 5


# --- graphs whose numbers of colors are known ------------------------------------------------------------------------

Edges = list[tuple[int, int]]


def path(n: int) -> Edges:
    return [(i, i + 1) for i in range(n - 1)]


def cycle(n: int) -> Edges:
    return [(i, (i + 1) % n) for i in range(n)]


def bipartite(a: int, b: int) -> Edges:
    return [(i, a + j) for i in range(a) for j in range(b)]


def complete(n: int) -> Edges:
    return [(i, j) for i in range(n) for j in range(i)]


def cube(d: int) -> Edges:
    return [(i, i ^ 1 << b) for i in range(2**d) for b in range(d) if i < i ^ 1 << b]


def lattice(m: int, n: int) -> Edges:
    right = [(i * n + j, i * n + j + 1) for i in range(m) for j in range(n - 1)]
    return right + [(i * n + j, i * n + j + n) for i in range(m - 1) for j in range(n)]


WHEEL = [*cycle(7), *[(7, i) for i in range(7)]]
PETERSEN = [*cycle(5), *[(i, i + 5) for i in range(5)], *[(5 + i, 5 + (i + 2) % 5) for i in range(5)]]
BINARY_TREE = [(i, (i - 1) // 2) for i in range(1, 63)]

KNOWN: dict[str, tuple[Edges, int, int]] = {
    # edges; star chromatic number; colors of columns: the chromatic number of the square of the graph
    "path": (path(10), 3, 3),
    "cycle of 4": (cycle(4), 3, 4),
    "cycle of 5": (cycle(5), 4, 5),
    "cycle of 6": (cycle(6), 3, 3),
    "cycle of 7": (cycle(7), 3, 4),
    "cycle of 10": (cycle(10), 3, 4),
    "star": (bipartite(1, 7), 2, 8),
    "bipartite 3, 5": (bipartite(3, 5), 4, 8),
    "bipartite 4, 4": (bipartite(4, 4), 5, 8),
    "complete": (complete(6), 6, 6),
    "binary tree": (BINARY_TREE, 3, 4),
    "cube": (cube(3), 4, 4),
    "cube of 4 dimensions": (cube(4), 5, 8),
    "wheel": (WHEEL, 4, 8),
    "Petersen": (PETERSEN, 5, 10),
    "lattice 2 x 5": (lattice(2, 5), 4, 4),
}


def symmetric_pattern(edges: Edges) -> Pattern:
    n = 1 + max(max(edge) for edge in edges)
    return pattern_of([*edges, *[(j, i) for i, j in edges], *[(i, i) for i in range(n)]], (n, n))


@pytest.mark.parametrize("name", KNOWN)
def test_as_many_colors_as_are_needed(name: str) -> None:
    """Stars: paths, cycles, K(m, n), trees and lattices by Fertin, Raspaud, Reed (2004), J. Graph Theory 47(3),
    doi:10.1002/jgt.20029; columns: one more than the largest degree at least, 2^k for a cube of 2^k - 1 dimensions
    (Wan, 1997, J. Comb. Optim. 1(2)). All of 16 vertices or fewer were also found by exhaustive search.
    """
    edges, star, columns = KNOWN[name]
    pattern = symmetric_pattern(edges)
    assert is_star_coloring(pattern.to_torch().to_dense().tolist(), color(pattern).tolist())
    assert (count(pattern), count(pattern, "columns")) == (star, columns)


@pytest.mark.parametrize(("m", "n", "star"), [(3, 3, 4), (4, 4, 5), (5, 7, 5), (12, 12, 5)])
def test_lattices(m: int, n: int, star: int) -> None:
    """Stars as few as there can be (Fertin, Raspaud, Reed); columns by (i + 2 j) mod 5."""
    pattern = symmetric_pattern(lattice(m, n))
    held = pattern.to_torch().to_dense().tolist()
    assert is_column_coloring(held, [(k // n + 2 * (k % n)) % 5 for k in range(m * n)])
    assert count(pattern) == star
    assert count(pattern, "columns") == 5


# --- grids: a formula ---------------------------------------------------------------------------------------------

Move = tuple[int, ...]


def stencil(shape: Move, moves: Iterable[Move], kept: float = 1.0, seed: int = 0) -> Pattern:
    """A matrix that couples each point of a grid with those some moves away, or with some of them."""
    n, chance = math.prod(shape), random.Random(seed)
    points = list(itertools.product(*map(range, shape)))
    number = {point: k for k, point in enumerate(points)}
    ends = [(point, tuple(a + b for a, b in zip(point, move, strict=True))) for point in points for move in moves]
    pairs = [(number[a], number[b]) for a, b in ends if b in number and (a <= b) and (a == b or chance.random() < kept)]
    return pattern_of([*pairs, *[(j, i) for i, j in pairs]], (n, n))


def around(dimensions: int, reach: int, norm: float) -> list[Move]:
    """The moves of a norm of at most *reach*."""
    box = itertools.product(range(-reach, reach + 1), repeat=dimensions)
    return [m for m in box if torch.tensor(m, dtype=torch.float64).norm(norm) <= reach]


TRIANGLES = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1)]
GRIDS: dict[str, tuple[Move, list[Move], int]] = {
    # points, moves, colors; as many as moves is the least number of columns that there can be
    "chain": ((70,), around(1, 1, 1), 3),
    "band": ((70,), around(1, 4, 1), 9),
    "four neighbors": ((9, 11), around(2, 1, 1), 5),
    "four neighbors, 5 divides a line": ((11, 10), around(2, 1, 1), 5),
    "triangles": ((9, 10), TRIANGLES, 7),
    "eight neighbors": ((9, 8), around(2, 1, math.inf), 9),
    "plates": ((9, 10), around(2, 2, 1), 13),
    "two along each axis": ((9, 10), [m for m in around(2, 2, 2) if 0 in m], 10),
    "six neighbors in space": ((5, 6, 5), around(3, 1, 1), 7),
    "26 neighbors in space": ((4, 5, 5), around(3, 1, math.inf), 27),
    "four dimensions": ((4, 4, 3, 4), around(4, 1, 1), 9),
}


@pytest.mark.parametrize("kind", ["star", "columns", "rows"])
@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_takes_about_as_many_colors_as_a_row_has_entries(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no column of a large one is looked at by itself."""
    shape, moves, colors = GRIDS[name]
    pattern = stencil(shape, moves)
    assert count(pattern, kind) <= colors
    monkeypatch.setattr(coloring, "PART", 30)
    monkeypatch.setattr(coloring, "_STAR" if kind == "star" else "_COLUMNS", [])
    found = color(pattern, kind)
    assert len(found.unique()) == colors >= len(moves)
    assert is_column_coloring(pattern.to_torch().to_dense().tolist(), found.tolist())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_formula_is_valid_whatever_the_matrix_lacks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    moves = data.draw(st.lists(st.tuples(*[st.integers(-2, 2)] * len(shape)), max_size=6, unique=True))
    pattern = stencil(shape, [*moves, (0,) * len(shape)], data.draw(st.sampled_from([1.0, 0.95, 0.5])))
    if data.draw(st.booleans()):  # no diagonal
        off = pattern.rows != pattern.columns
        pattern = Pattern(pattern.rows[off], pattern.columns[off], pattern.shape)
    held = pattern.to_torch().to_dense().bool()
    wide = held[data.draw(st.integers(0, 3)) :].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coloring, "PART", data.draw(st.sampled_from([2, 9, 2000])))
        star, *others = [coloring._by_formula(whole(part)) for part in (held, wide, wide.T)]
    assert star is None or is_star_coloring(held.tolist(), star.tolist())
    for columns, part in zip(others, (wide, wide.T), strict=True):
        assert columns is None or is_column_coloring(part.tolist(), columns.tolist())
        assert columns is None or columns.unique().tolist() == list(range(int(columns.max()) + 1))


@pytest.mark.parametrize(
    "pattern",
    [
        symmetric_pattern(cycle(40)),
        symmetric_pattern(lattice(2, 20)),
        stencil((6, 6), around(2, 1, math.inf), 0.5),
        pattern_of([(3 * b + i, 3 * b + j) for b in range(9) for i in range(3) for j in range(3)], (27, 27)),
    ],
    ids=["cycle", "ladder", "half of a grid", "blocks"],
)
def test_no_formula_where_rows_hold_less_than_all_moves(pattern: Pattern) -> None:
    """There it would take more colors than greedily."""
    assert coloring._by_formula(pattern) is None


# --- far more neighbors than most ------------------------------------------------------------------------------------


def several_arrows(n: int, heads: list[int]) -> Pattern:
    pairs = {(h, j) for h in heads for j in range(n) if j not in heads or j == h} | {(i, i) for i in range(n)}
    return pattern_of(sorted(pairs | {(j, i) for i, j in pairs}), (n, n))


def test_crowded_vertices_have_their_own_colors() -> None:
    """Three heads that are not neighbors of each other: in one color, they would make all others differ."""
    pattern = several_arrows(300, [0, 100, 299])
    colors = color(pattern).tolist()
    assert len(set(colors)) == 4
    assert all(colors.count(colors[head]) == 1 for head in (0, 100, 299))
    assert set(colors) == set(range(4))
    assert is_star_coloring(pattern.to_torch().to_dense()[:40, :40].tolist(), colors[:40])


# --- large matrices ---------------------------------------------------------------------------------------------------


def test_a_large_matrix_is_colored_in_the_way_that_is_best_on_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coloring, "PART", 30)
    held = grid(9, FIVE).to_torch().to_dense().tolist()
    assert is_star_coloring(held, color(grid(9, FIVE)).tolist())
    assert count(grid(9, FIVE)) <= 6
    assert len(set(color(banded(81, 2), "columns").tolist())) == 5
    tall = pattern_of([(i, i // 3) for i in range(120)] + [(i, min(39, i // 3 + 1)) for i in range(120)], (120, 40))
    assert is_column_coloring(tall.to_torch().to_dense().tolist(), color(tall, "columns").tolist())
    assert len(set(color(tall, "rows").tolist())) >= 3


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("star", (60, 60))]
    + [(kind, shape) for kind in ("columns", "rows") for shape in [(60, 60), (60, 30), (30, 60), (60, 15), (15, 60)]],
)
def test_many_columns_are_colored_in_the_way_that_is_best_on_the_first(
    kind: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is what a dense matrix is cut to; ways see it up to one of the fewest; the best alone sees all."""
    monkeypatch.setattr(coloring, "PART", 20)
    ways, seen = (coloring._STAR if kind == "star" else coloring._COLUMNS), []
    spies = [lambda p, way=way: seen.append((way, p)) or way(p) for way in ways]
    monkeypatch.setattr(coloring, "_STAR" if kind == "star" else "_COLUMNS", spies)
    chosen = set()
    for seed in range(8):
        held = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < torch.linspace(0.02, 0.3, shape[1])
        held = held | held.T if kind == "star" else held
        turned = held.T if kind == "rows" else held
        part = turned[:20, :20] if kind == "star" else turned[:, :20]
        best = min(ways, key=lambda way: len(way(whole(part)).unique()))
        counts = [len(way(whole(part)).unique()) for way in ways]
        least = int(part.sum(1).max()) if kind != "star" else 0
        tried = ways[: counts.index(least) + 1] if least in counts else ways
        expected = [(way, part) for way in tried] + ([(best, turned)] if turned.shape[1] > 20 else [])
        seen.clear()
        assert torch.equal(color(whole(held), kind), best(whole(turned)))
        for (way, pattern), (by, dense) in zip(seen, expected, strict=True):
            assert way is by and torch.equal(pattern.to_torch().to_dense().bool(), dense)
        chosen.add(ways.index(best))
    assert len(chosen) > 1 or kind != "star"


def whole(held: Tensor) -> Pattern:
    return Pattern(*held.nonzero().T, tuple(held.shape))


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_it_takes() -> None:
    import scipy.sparse

    dense = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    expected = color(Pattern(*dense.nonzero().T, (3, 3)))
    assert torch.equal(color(dense.to_sparse()), expected)
    assert torch.equal(color(scipy.sparse.csr_matrix(dense.numpy())), expected)


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        (torch.tensor([[0, 1], [0, 0]]).to_sparse(), "star", r"holds \(0, 1\) but not \(1, 0\).*pattern \+ pattern\.T"),
        (torch.ones(2, 3).to_sparse(), "star", "is 2 x 3, expected a symmetric matrix"),
        (torch.eye(2), "star", "dense tensor"),
        ([[0], [0]], "star", "list of 2, expected one with a shape"),
        (torch.eye(2).to_sparse(), "acyclic", r'kind: got .acyclic., expected "star", "columns" or "rows"'),
    ],
)
def test_bad_input(given: object, kind: str, match: str) -> None:
    with pytest.raises(hodiff.InputError, match=match):
        color(given, kind)


def test_seeds_are_sums_of_unit_vectors() -> None:
    from hodiff.sparse._pattern import seeds

    found: Tensor = seeds(torch.tensor([0, 1, 0, 2]), 3, torch.zeros(0))
    assert found.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]


def test_colors_that_do_not_tell_entries_apart_are_never_read_off() -> None:
    path, pair = banded(4, 1), torch.tensor([0, 1, 0, 1])  # a path of four vertices in two colors
    for kind in ("star", "columns", "rows"):
        with pytest.raises(AssertionError, match=r"does not separate entry \(\d, \d\)"):
            coloring.places(path, pair, kind)


def test_a_vertex_is_crowded_from_twenty_times_what_is_usual() -> None:
    """And more than 64 neighbors."""
    assert coloring._crowded(torch.tensor([5] * 9 + [101])).tolist() == [False] * 9 + [True]
    assert not coloring._crowded(torch.tensor([5] * 9 + [100])).any()
    assert coloring._crowded(torch.tensor([1] * 9 + [64, 65])).tolist() == [False] * 10 + [True]
