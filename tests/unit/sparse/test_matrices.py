"""Sparse matrices equal dense ones, in every form; plans hold at other points; what is wrong is said."""

import sys
from typing import Any

import numpy
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn

import hodiff
from hodiff.sparse import Pattern, _plan, plan_hessian, plan_jacobian, sparsity_pattern
from tests.support.releases import GRID_SAMPLE
from tests.unit.sparse.zoo import ZOO, D, generator

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning", "ignore:Sparse CSR tensor support")
X = torch.randn(12, dtype=D, generator=generator())
Y = X.flip(0) * 0.7
chain = ZOO["chain"]
SMOOTH = [name for name in ZOO if name not in ("a Function in NumPy",)]


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    if not got.numel():
        return
    assert float((got - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", SMOOTH)
def test_hessians_equal_dense_ones_at_this_point_and_another(name: str) -> None:
    plan = plan_hessian(ZOO[name], X)
    for point in (X, Y):
        close(plan(point, check=True).to_dense(), hodiff.hessian(ZOO[name], point))


def test_the_hessian_by_a_module_and_a_plan_at_another() -> None:
    """A module can be called, and is a point."""
    torch.manual_seed(0)
    one, other = (nn.Linear(3, 2, dtype=D) for _ in range(2))
    f = lambda model: model(X.view(4, 3)).sin().sum()
    close(hodiff.sparse_hessian(f, one).to_dense(), hodiff.hessian(f, one, matrix=True))
    close(plan_hessian(f, one)(other).to_dense(), hodiff.hessian(f, other, matrix=True))
    with pytest.raises(hodiff.InputError, match="a plan already has its function; call it with the point alone"):
        plan_hessian(f, one)(f, other)


WIDE = lambda x: torch.cat([x[1:] * x[:-1], x[:3].sum()[None] ** 2])
TALL = lambda x: torch.cat([x.sin(), x.roll(1) * x, (x[0] * x)])
CONTAINER = lambda x: {"a": x[:4].outer(x[4:6]), "b": (x[6:] ** 2, x[0])}


@pytest.mark.parametrize("f", [WIDE, TALL, lambda x: x[:0], lambda x: x[3] ** 2], ids=["wide", "tall", "empty", "one"])
def test_jacobians_equal_dense_ones(f: Any) -> None:
    plan = plan_jacobian(f, X)
    for point in (X, Y):
        close(plan(point, check=True).to_dense(), hodiff.jacobian(f, point).reshape(plan.shape))


def test_a_jacobian_of_a_container() -> None:
    dense = hodiff.jacobian(CONTAINER, X)
    rows = [dense["a"].reshape(-1, 12), dense["b"][0], dense["b"][1].reshape(1, 12)]
    close(hodiff.sparse_jacobian(CONTAINER, X, check=True).to_dense(), torch.cat(rows))


def test_several_colors_of_few_rows() -> None:
    f = lambda x: torch.stack([x[:6].prod(), x[4:].prod(), x[8:].prod()])
    plan = plan_jacobian(f, X)
    assert (plan.kind, plan.products, plan.shape) == ("rows", 2, (3, 12))
    close(plan(Y, check=True).to_dense(), hodiff.jacobian(f, Y))


def test_rows_or_columns_whichever_are_fewer() -> None:
    """One full row takes n colors of columns; one full column n colors of rows."""
    full_row = plan_jacobian(lambda x: torch.cat([x**2, x.sum()[None] ** 2]), X)
    full_column = plan_jacobian(lambda x: x * x[0], X)
    assert (full_row.kind, full_row.products) == ("rows", 2)
    assert (full_column.kind, full_column.products) == ("columns", 2)
    close(full_column(Y).to_dense(), hodiff.jacobian(lambda x: x * x[0], Y))


# --- forms ------------------------------------------------------------------------------------------------------------


def test_forms() -> None:
    dense = hodiff.hessian(chain, X)
    found = hodiff.sparse_hessian(chain, X)
    assert found.layout is torch.sparse_coo and found.is_coalesced()
    close(found.to_dense(), dense)
    rows = hodiff.sparse_hessian(chain, X, output="csr")
    assert rows.layout is torch.sparse_csr
    close(rows.to_dense(), dense)
    array = hodiff.sparse_hessian(chain, X, output="scipy")
    assert isinstance(array, scipy.sparse.csr_array) and array.has_canonical_format
    close(torch.from_numpy(array.toarray()), dense)


def test_a_pattern_of_pairs_where_scipy_was_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = torch.stack([torch.arange(12)] * 2)
    monkeypatch.delitem(sys.modules, "scipy.sparse")
    assert plan_hessian(lambda x: (x**3).sum(), X, pattern=tuple(pairs)).pattern.nnz == 12


def test_a_pattern_is_found_without_a_graph_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is a pass more, by which norms would be written out."""
    graphs, detect = [], _plan.detect
    monkeypatch.setattr(
        _plan, "detect", lambda asked, *rest: (graphs.append(asked.create_graph), detect(asked, *rest))[1]
    )
    entries = hodiff.sparse_hessian(chain, X.clone().requires_grad_(), create_graph=True)
    assert entries.requires_grad and graphs == [False]


def test_scipy_keeps_no_graph_and_says_so() -> None:
    """Inside another call the entries are to be differentiated: as constants they would change its result."""
    plan = plan_hessian(chain, X, output="scipy")
    inside = lambda z, **options: (torch.from_numpy(plan(z, **options).toarray()) @ z).sum()
    for call in (lambda: plan(X, create_graph=True), lambda: hodiff.grad(inside, X)):
        with pytest.raises(hodiff.InputError, match=r'NumPy keeps no graph.*output="csr", or create_graph=False'):
            call()
    with pytest.raises(hodiff.InputError, match="NumPy keeps no graph"):
        hodiff.sparse_hessian(chain, X, output="scipy", create_graph=True)
    constant = hodiff.grad(lambda z: inside(z, create_graph=False), X)
    close(constant, hodiff.hessian(chain, X).sum(0))
    close(torch.from_numpy(plan(X.clone().requires_grad_()).toarray()), hodiff.hessian(chain, X))


def test_a_plan_says_where_the_dense_matrix_is_cheaper() -> None:
    x = torch.linspace(0, 1, 600, dtype=D)
    assert "dense" not in repr(plan_hessian(chain, x))
    assert "the dense matrix is cheaper" in repr(plan_hessian(chain, X))


def test_the_lower_triangle() -> None:
    plan = plan_hessian(chain, X)
    lower = plan.lower()
    assert bool((lower.rows >= lower.columns).all()) and lower.pattern.nnz == 12 + 11
    close(lower(Y).to_dense(), hodiff.hessian(chain, Y).tril())
    assert torch.equal(lower.values(Y), plan.values(Y)[plan.rows >= plan.columns])


@GRID_SAMPLE
def test_the_lower_triangle_still_says_what_has_no_rule() -> None:
    assert plan_hessian(ZOO["grid sample"], X).lower().pattern.without_rule == ("grid_sampler_2d_backward",)


@pytest.mark.parametrize("pattern", [None, "diagonal"])
@pytest.mark.parametrize("plan", [plan_hessian, plan_jacobian])
def test_planning_leaves_what_f_draws_to_the_evaluation(plan: Any, pattern: Any) -> None:
    f = lambda x: (x**2 * torch.rand(())).sum() if plan is plan_hessian else x**2 * torch.rand(())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plan(f, X, pattern=None if pattern is None else (range(12), range(12)))
    assert torch.equal(torch.get_rng_state(), state)


def test_values_stand_where_rows_and_columns_say() -> None:
    plan = plan_hessian(chain, X)
    close(plan.values(Y), hodiff.hessian(chain, Y)[plan.rows, plan.columns])


def test_a_flat_vector_stands_for_the_point() -> None:
    point = {"a": X[:6].reshape(2, 3).float(), "b": X[6:]}
    f = lambda p: chain(torch.cat([p["a"].double().reshape(-1), p["b"]]))
    plan = plan_hessian(f, point)
    other = {"a": Y[:6].reshape(2, 3).float(), "b": Y[6:]}
    flat = torch.cat([other["a"].double().reshape(-1), other["b"]])
    assert torch.equal(plan.values(other), plan.values(flat))
    assert torch.equal(plan.values(other), plan.values(flat.numpy()))


def test_a_module_and_a_selection() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(5, 3, dtype=D)
    f = lambda model: model(inputs).pow(3).sum()
    plan = plan_hessian(f, model)
    with torch.no_grad():
        model[0].bias += 1
    close(plan(model, check=True).to_dense(), hodiff.hessian(f, model, matrix=True))
    head = hodiff.select(model, "2.*")
    g = lambda head: f(head.module)
    close(hodiff.sparse_hessian(g, head, check=True).to_dense(), hodiff.hessian(g, head, matrix=True))


def test_a_tensor_already_computed() -> None:
    x = X.clone().requires_grad_()
    loss = chain(x)
    for _ in range(2):  # its graph stays
        close(hodiff.sparse_hessian(loss, x, check=True).to_dense(), hodiff.hessian(chain, X))
    y = WIDE(x)
    close(hodiff.sparse_jacobian(y, x, check=True).to_dense(), hodiff.jacobian(WIDE, X))
    assert x.grad is None


def test_other_arguments() -> None:
    f = lambda x, weight, power=2: (weight * x[1:] * x[:-1] ** power).sum()
    plan = plan_hessian(f, X, args=(torch.zeros(11, dtype=D),))
    ones = torch.ones(11, dtype=D)
    close(plan(X, args=(ones,)).to_dense(), hodiff.hessian(lambda x: f(x, ones), X))
    close(plan(X, args=(ones,), kwargs={"power": 3}).to_dense(), hodiff.hessian(lambda x: f(x, ones, 3), X))
    assert float(plan.values(X).abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    found = hodiff.sparse_hessian(lambda x: (x**3).sum() + (x[1:] * x[:-1]).sum(), X.to(dtype), check=True)
    assert found.dtype is dtype
    expected = torch.diag(6 * X) + torch.ones(11, dtype=D).diag(1) + torch.ones(11, dtype=D).diag(-1)
    assert float((found.to_dense().double() - expected).abs().max()) < 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("chunk_size", [1, 2, "auto"])
def test_chunks(chunk_size: Any) -> None:
    close(hodiff.sparse_hessian(chain, X, chunk_size=chunk_size).to_dense(), hodiff.hessian(chain, X))


def test_a_plan_passes_its_chunks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from hodiff.sparse import _plan

    seen, products = [], _plan._reverse.products
    monkeypatch.setattr(_plan._reverse, "products", lambda *a, **k: seen.append(k["chunk_size"]) or products(*a, **k))
    plan = plan_hessian(chain, X)
    close(plan(X, chunk_size=2).to_dense(), hodiff.hessian(chain, X))
    assert seen[0] == 2
    with pytest.raises(hodiff.InputError, match="chunk_size: got 0"):
        plan(X, chunk_size=0)


# --- differentiable ---------------------------------------------------------------------------------------------------


def test_entries_can_be_differentiated_again() -> None:
    """The derivative of |H|² against central differences."""
    scale = torch.tensor(1.3, dtype=D, requires_grad=True)
    f = lambda x, s: (torch.sin(s * x[1:] * x[:-1])).sum()
    plan = plan_hessian(f, X, args=(scale,))
    x = X.clone().requires_grad_()
    norm = lambda x, s: plan.values(x, args=(s,), create_graph=True).square().sum()
    by_x, by_scale = torch.autograd.grad(norm(x, scale), (x, scale))
    step = 1e-5
    at = lambda s: float(norm(X, torch.tensor(s, dtype=D)).detach())
    assert abs(float(by_scale) - (at(1.3 + step) - at(1.3 - step)) / (2 * step)) < 1e-6 * abs(float(by_scale))
    unit = torch.zeros(12, dtype=D)
    unit[4] = step
    difference = (float(norm(X + unit, scale).detach()) - float(norm(X - unit, scale).detach())) / (2 * step)
    assert abs(float(by_x[4]) - difference) < 1e-6 * abs(difference)
    matrix = hodiff.sparse_hessian(f, x, args=(scale,), create_graph=True)
    (again,) = torch.autograd.grad(matrix.to_dense().square().sum(), scale)
    assert torch.allclose(again, by_scale)


def test_inside_another_call() -> None:
    plan = plan_hessian(chain, X)
    gradient = hodiff.grad(lambda x: plan.values(x).square().sum(), X)
    (expected,) = torch.autograd.grad(torch.func.hessian(chain)(x := X.clone().requires_grad_()).square().sum(), x)
    close(gradient, expected)
    assert not plan.values(X.clone().requires_grad_()).requires_grad


# --- patterns of the caller's -----------------------------------------------------------------------------------------


def _pairs() -> tuple[list[int], list[int]]:
    pairs = [(i, j) for i in range(12) for j in range(12) if abs(i - j) <= 1]
    return [i for i, _ in pairs], [j for _, j in pairs]


GIVEN = {
    "pattern": lambda: sparsity_pattern(chain, X),
    "pairs": _pairs,
    "arrays": lambda: tuple(numpy.array(part) for part in _pairs()),
    "shuffled, twice": lambda: tuple(torch.tensor(part).flip(0).repeat(2) for part in _pairs()),
    "coo": lambda: torch.sparse_coo_tensor(torch.tensor(_pairs()), torch.zeros(34), (12, 12), check_invariants=True),
    "csr": lambda: hodiff.sparse_hessian(chain, X, output="csr"),
    "scipy": lambda: scipy.sparse.coo_matrix((numpy.zeros(34), _pairs()), shape=(12, 12)),
    "scipy array": lambda: scipy.sparse.csc_array((numpy.zeros(34), _pairs()), shape=(12, 12)),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_given_pattern_is_taken_as_it_is(kind: str) -> None:
    """Also where what is stored is zero, in any order."""
    found = hodiff.sparse_hessian(chain, X, pattern=GIVEN[kind](), check=True)
    close(found.to_dense(), hodiff.hessian(chain, X))
    assert found._nnz() == 34


def test_a_given_pattern_is_not_detected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from hodiff.sparse import _plan

    monkeypatch.setattr(_plan, "detect", None)
    plan_hessian(chain, X, pattern=_pairs())


DIAGONAL = torch.eye(12).to_sparse()
BAD = {
    "shape": (torch.eye(11).to_sparse(), r"pattern is 11 x 11, expected 12 x 12: a row and a column for each number"),
    "asymmetric": (([0, 1], [1, 1]), r"holds \(0, 1\) but not \(1, 0\), and a Hessian is symmetric"),
    "range": (([0, 12], [1, 1]), r"rows hold 12, expected numbers from 0 to 11"),
    "negative": (([0, 1], [-1, 1]), r"columns hold -1, expected numbers from 0 to 11"),
    "lengths": (([0, 1], [1]), r"2 row and 1 column indices"),
    "floats": (([0.5], [1.0]), r"dtype torch.float32, expected a vector of integers"),
    "words": ((["a"], [1]), r"rows are a list of 1, expected integers"),
    "matrix of indices": ((torch.zeros(2, 2).long(), torch.zeros(2, 2).long()), r"shape \(2, 2\)"),
    "dense": (torch.eye(12), r"dense tensor .*to_sparse"),
    "word": ("tridiagonal", r"got a str, expected a hodiff Pattern, a SciPy"),
    "number": (3, r"got an int, expected"),
    "one vector": (torch.ones(12).to_sparse(), r"shape \(12,\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_patterns(case: str) -> None:
    pattern, match = BAD[case]
    with pytest.raises(hodiff.InputError, match=match):
        hodiff.sparse_hessian(chain, X, pattern=pattern)


def test_a_bad_pattern_of_a_jacobian() -> None:
    with pytest.raises(hodiff.InputError, match=r"is 12 x 12, expected 11 x 12: a row for each output"):
        hodiff.sparse_jacobian(lambda x: x[1:] * x[:-1], X, pattern=DIAGONAL)


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_tells_a_missing_entry_from_a_rounding_error() -> None:
    close(hodiff.sparse_hessian(chain, X, pattern=_pairs(), check=True).to_dense(), hodiff.hessian(chain, X))
    rows, columns = _pairs()
    pairs = [(i, j) for i, j in zip(rows, columns, strict=True) if {i, j} != {4, 5}]
    lacking = [i for i, _ in pairs], [j for _, j in pairs]
    with pytest.raises(hodiff.DerivativeError, match=r"rows 4, 5 of the matrix have an entry that it misses"):
        hodiff.sparse_hessian(chain, X, pattern=lacking, check=True)
    f = lambda x: x[1:] * x[:-1]
    with pytest.raises(hodiff.DerivativeError, match=r"of the matrix have an entry that it misses"):
        hodiff.sparse_jacobian(f, X, pattern=(range(11), range(11)), check=True)
    with pytest.raises(hodiff.DerivativeError, match=r"of the matrix have an entry that it misses"):
        hodiff.sparse_jacobian(lambda x: x * x[0], X, pattern=(range(12), [0] * 12), check=True)


def test_check_catches_another_branch() -> None:
    f = lambda x: (x**2).sum() if float(x[0].detach()) > 0 else (x[1:] * x[:-1]).sum()
    positive = torch.ones(4, dtype=D)
    plan = plan_hessian(f, positive)
    close(plan(positive, check=True).to_dense(), 2 * torch.eye(4, dtype=D))
    with pytest.raises(hodiff.DerivativeError, match=r"does not hold at this point.*branches on\s+values"):
        plan(-positive, check=True)


def test_check_catches_a_shape_that_follows_from_values() -> None:
    """As a branch in Python does: with fewer positive entries, what comes after them moves up."""
    f = lambda x: torch.cat([x[x > 0] ** 2, x.roll(1) ** 3])[:12]
    here, there = torch.ones(12, dtype=D), torch.ones(12, dtype=D)
    here[5:], there[2:] = -0.5, -0.5
    plan = plan_jacobian(f, here)
    close(plan(here, check=True).to_dense(), hodiff.jacobian(f, here))
    with pytest.raises(hodiff.DerivativeError, match="does not hold at this point"):
        plan(there, check=True)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_check_is_quiet_where_all_is_well(scale: float, dtype: torch.dtype) -> None:
    x = (X * 3).to(dtype)
    hodiff.sparse_hessian(lambda x: scale * ZOO["pad"](x), x, check=True)
    hodiff.sparse_hessian(lambda x: scale * (x[0] ** 9 + x[1:].pow(2).sum()), x, check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_knows_where_f_computes_in_lower_precision(dtype: torch.dtype) -> None:
    f = lambda x: (x.to(dtype) ** 3).double().sum() + (x[1:] * x[:-1]).sum()
    hodiff.sparse_hessian(f, X, check=True)
    with pytest.raises(hodiff.DerivativeError, match="an entry that it misses"):
        hodiff.sparse_hessian(f, X, pattern=(range(12), range(12)), check=True)


def test_check_says_that_a_small_difference_may_be_rounding() -> None:
    diagonal = (range(12), range(12))
    for factor, said in ((1e-8, True), (1.0, False)):
        f = lambda x: (x**2).sum() + factor * x[0] * x[1]  # noqa: B023
        with pytest.raises(hodiff.DerivativeError, match="an entry that it misses") as caught:
            hodiff.sparse_hessian(f, X, pattern=diagonal, check=True)
        assert ("may also be rounding" in str(caught.value)) is said


def test_check_does_not_touch_the_random_state() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    hodiff.sparse_hessian(chain, X, check=True)
    assert torch.equal(torch.get_rng_state(), before)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [hodiff.sparse_hessian, hodiff.sparse_jacobian])
def test_point_missing(function: Any) -> None:
    with pytest.raises(hodiff.InputError, match=rf"hodiff\.{function.__name__}\(f, x"):
        function(chain)


@pytest.mark.parametrize("output", ["dense", None, 3])
def test_output(output: Any) -> None:
    with pytest.raises(hodiff.InputError, match=r'output: got .*, expected "torch", "csr" or "scipy"'):
        hodiff.sparse_hessian(chain, X, output=output)


def test_a_plan_needs_a_function() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.InputError, match="a plan is for many points"):
        plan_hessian(chain(x), x)


def test_a_point_of_another_shape() -> None:
    plan = plan_hessian(chain, X)
    with pytest.raises(hodiff.InputError, match=r"shape \[\(11,\)\], expected \[\(12,\)\], as when the plan was made"):
        plan(X[1:])
    with pytest.raises(hodiff.InputError, match=r"x has 11 numbers, expected 12"):
        plan(X[1:].numpy())
    lengths = iter([12, 12, 9])
    plan = plan_jacobian(lambda x: x[: next(lengths)] ** 2, X)
    plan(X)
    with pytest.raises(hodiff.InputError, match=r"returned 9 numbers at this point, but 12 when the plan was made"):
        plan(X)


def test_a_module_is_no_vector() -> None:
    model = nn.Linear(2, 1)
    plan = plan_hessian(lambda model: model(torch.ones(2)).pow(2).sum(), model)
    with pytest.raises(hodiff.InputError, match="the plan was made at a module; give the module"):
        plan(numpy.ones(3))


def test_scipy_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    close(hodiff.sparse_hessian(chain, X).to_dense(), hodiff.hessian(chain, X))  # which does not need it
    with pytest.raises(ImportError, match=r"pip install scipy$"):
        hodiff.sparse_hessian(chain, X, output="scipy")
    with pytest.raises(ImportError, match=r"pip install scipy$"):
        plan_hessian(chain, X).pattern.to_scipy()


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sparsity_pattern(ZOO["pad"], X)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert sparsity_pattern(ZOO["pad"], X) == expected


def test_bfloat16_is_not_numpys() -> None:
    with pytest.raises(hodiff.InputError, match="no bfloat16"):
        hodiff.sparse_hessian(chain, X.bfloat16(), output="scipy")


def test_records_say_what_they_are() -> None:
    plan = plan_hessian(chain, X)
    assert repr(plan).startswith("Plan of a Hessian 12 x 12: 34 entries by 3 products (star colors)")
    assert repr(plan_jacobian(WIDE, X)).startswith("Plan of a Jacobian 12 x 12: ")
    assert plan.pattern == Pattern(plan.rows, plan.columns, (12, 12)) and plan.pattern != 3
    assert plan.pattern.to_scipy().nnz == 34
