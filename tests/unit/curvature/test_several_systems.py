"""`solve` with several right-hand sides: each as if it were alone, in every spelling, and all in one product."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff.curvature._records import SolveRecord
from tests.support.modules import two_layers
from tests.support.operators import D, X, draw
from tests.support.properties import agree

METHODS = ["cg", "minres", "gmres"]


def with_values(values: Tensor, seed: int = 0) -> Tensor:
    q, _ = torch.linalg.qr(draw(len(values), len(values), seed=seed))
    return q @ torch.diag(values) @ q.T


def matrix(method: str, size: int, seed: int = 0) -> Tensor:
    """Definite, indefinite, or not symmetric."""
    values = torch.linspace(1, 30, size, dtype=D)
    if method == "minres":
        values[::2] *= -1
    A = with_values(values, seed)
    return A + (torch.triu(draw(size, size, seed=seed + 1), 1) if method == "gmres" else 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 7, 40, 200])
def test_against_dense_linear_algebra(method: str, size: int) -> None:
    A, B = matrix(method, size), draw(size, 5, seed=3)
    found = hodiff.solve(hodiff.MatrixOperator(A), B, method=method, rtol=1e-13, damping=0.3)
    agree(found.value, torch.linalg.solve(A + 0.3 * torch.eye(size, dtype=D), B), 1e-10)
    assert found.converged.shape == found.residual.shape == (5,) and bool(found.converged.all())
    assert found.status == "converged" and float(found.residual.max()) <= 1e-13


@pytest.mark.parametrize("method", METHODS)
def test_each_is_solved_as_if_it_were_alone(method: str) -> None:
    """Right-hand sides of all sizes, a zero and an eigenvector; products are counted one by one."""
    A = matrix(method, 60)
    B = draw(60, 6, seed=4) * torch.tensor([1.0, 1e-30, 1e30, 0.0, 1.0, 1.0], dtype=D)
    B[:, 4] = A @ torch.linalg.eig(A)[1][:, 0].real
    B[:, 5] = A @ (A @ B[:, 0])
    operator = hodiff.MatrixOperator(A)
    options = {"restart": 60} if method == "gmres" else {}  # not by the matrix, which all have in common
    found = hodiff.solve(operator, B, method=method, **options)
    alone = [hodiff.solve(operator, b, method=method, **options) for b in B.T]
    for k, one in enumerate(alone):
        agree(found.value[:, k] / B[:, k].norm().clamp_min(1e-300), one.value / B[:, k].norm().clamp_min(1e-300), 1e-6)
    assert found.converged.tolist() == [one.converged for one in alone] == [True] * 6
    assert found.value[:, 3].abs().max() == 0 and found.residual[3] == 0
    assert abs(found.products - sum(one.products for one in alone)) <= 6  # rounding may take a step more


def test_one_product_with_all_that_have_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    inner = hodiff.LinearOperator._times_rows
    monkeypatch.setattr(
        hodiff.LinearOperator, "_times_rows", lambda A, rows: (asked.append(len(rows)), inner(A, rows))[1]
    )
    values = torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0], dtype=D)
    H = hodiff.HessianOperator(lambda x: 0.5 * (values * x**2).sum(), torch.zeros(5, dtype=D))
    B = torch.zeros(5, 3, dtype=D)
    B[:2, 0] = 1  # one step
    B[[0, 2, 3], 1] = 1  # three
    B[:, 2] = torch.arange(1.0, 6.0)  # four
    found = hodiff.solve(H, B)
    assert asked == [3, 2, 2, 1, 3] and bool(found.converged.all())  # the last are the residuals of all
    assert found.products == H.products == sum(asked)


SPELLINGS: dict[str, Callable[[hodiff.LinearOperator, Tensor], Any]] = {
    "columns": lambda H, V: V,
    "an array": lambda H, V: V.numpy(),
    "lists of numbers": lambda H, V: V.tolist(),
    "stacked in front": lambda H, V: H.unflatten(V),
    "a list of leaves": lambda H, V: list(H.unflatten(V).values()),
    "a tuple of leaves": lambda H, V: tuple(H.unflatten(V).values()),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_answers_are_laid_out_as_the_right_hand_sides_came(name: str) -> None:
    model = two_layers(3, 2)
    H = hodiff.HessianOperator(lambda m: m(X).square().sum() / 100, model) + 5.0
    V = draw(H.shape[0], 4)
    given = SPELLINGS[name](H, V)
    found = hodiff.solve(H, given, method="minres", rtol=1e-12).value
    assert type(found) is (type(given) if "leaves" in name or "front" in name else Tensor)
    agree(H.flatten(found), torch.linalg.solve(H.dense(), V), 1e-9)
    again = hodiff.solve(H, given, method="minres", start=found, rtol=1e-10)
    assert again.products == 4 and bool(again.converged.all())


@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one(count: int) -> None:
    A = hodiff.MatrixOperator(matrix("cg", 5))
    for method in METHODS:
        found = hodiff.solve(A, draw(5, count), method=method)
        assert found.value.shape == (5, count) and found.converged.shape == (count,) and found.status == "converged"
        assert repr(found)


def test_rows_are_refused_and_the_columns_that_are_named_instead_are_solved() -> None:
    A, B = matrix("cg", 40), draw(7, 40, seed=5)
    with pytest.raises(hodiff.InputError, match=r"b has shape \(7, 40\).*several vectors are columns: give b\.T\.$"):
        hodiff.solve(hodiff.MatrixOperator(A), B)
    agree(hodiff.solve(hodiff.MatrixOperator(A), B.T, rtol=1e-13).value, torch.linalg.solve(A, B.T), 1e-10)


def test_options_are_of_each() -> None:
    A, M, B = matrix("cg", 30), torch.linspace(0.5, 2, 30, dtype=D), draw(30, 3)
    operator, S = hodiff.MatrixOperator(A), draw(30, 3, seed=8)
    for options in ({"iterations": 4}, {"products": 6}, {"rtol": 1e-3}, {"method": "gmres", "restart": 3}):
        options = {**options, "preconditioner": hodiff.MatrixOperator(M), "start": S}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hodiff.ConvergenceWarning)
            found = hodiff.solve(operator, B, **options)
            alone = [hodiff.solve(operator, B[:, k], **{**options, "start": S[:, k]}) for k in range(3)]
        agree(found.value, torch.stack([one.value for one in alone], 1), 1e-9)
        agree(found.residual, torch.tensor([one.residual for one in alone], dtype=D), 1e-9)
        assert found.products == sum(one.products for one in alone)


@pytest.mark.parametrize("terms", [0, 3])
def test_terms_of_a_series_for_each(terms: int) -> None:
    A, B = matrix("cg", 12) / 30, draw(12, 3)
    found = hodiff.solve(hodiff.MatrixOperator(A), B, method="neumann", iterations=terms)
    expected = sum(torch.linalg.matrix_power(torch.eye(12, dtype=D) - A, j) @ B for j in range(terms + 1))
    agree(found.value, expected, 1e-12)
    assert (found.converged, found.status, found.products) == (None, "iterations", 3 * terms)


def test_who_looks_on_sees_all_of_them() -> None:
    A, B = matrix("cg", 20), draw(20, 3)
    B[:, 1] = with_values(torch.ones(20, dtype=D))[:, 0]
    seen: list[SolveRecord] = []
    found = hodiff.solve(hodiff.MatrixOperator(A), B, callback=seen.append)
    for record in seen:
        true = (B - A @ record.value).norm(dim=0) / B.norm(dim=0)
        agree(record.residual, true, 1e-9)
        assert (record.status, record.converged) == ("running", None)
    agree(seen[-1].value, found.value, 1e-12)


def test_one_that_fails_is_named_among_those_that_do_not() -> None:
    A = hodiff.MatrixOperator(torch.tensor([1.0, 2.0, -3.0], dtype=D))
    B = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=D)
    with pytest.warns(
        hodiff.ConvergenceWarning, match=r"for 1 of 2 systems, the largest .* negative or zero curvature"
    ):
        found = hodiff.solve(A, B)
    assert found.converged.tolist() == [True, False] and found.status == "negative curvature"
    assert not found.direction[:, 0].any() and found.direction[2, 1] != 0
    agree(found.value[:, 0], torch.tensor([1.0, 0.5, 0.0], dtype=D), 1e-7)
    assert "residual 1" in repr(found) and "negative curvature" in repr(found)


WORST = {"negative curvature": ("cg", "nze"), "stagnation": ("minres", "nze"), "budget": ("minres", "ze")}
"""How the worst of some right-hand sides ends: one outside the range, one that needs all products, an eigenvector."""


@pytest.mark.parametrize("worst", WORST)
def test_the_status_of_several_is_the_worst(worst: str) -> None:
    (method, names), unit = WORST[worst], torch.eye(9, dtype=D)
    sides = {"n": unit[0], "z": 1 - unit[0], "e": unit[1]}
    A = hodiff.MatrixOperator(torch.arange(9).to(D))
    with pytest.warns(hodiff.ConvergenceWarning, match=rf"for {len(names) - 1} of {len(names)} systems"):
        found = hodiff.solve(A, torch.stack([sides[name] for name in names], 1), method=method, products=7)
    assert found.status == worst and found.converged.tolist() == [name == "e" for name in names]


# --- what a record says is so, whatever the problem -------------------------------------------------------------------


def problem(seed: int) -> tuple[Tensor, Tensor, str, torch.dtype]:
    """A drawn one: definite, indefinite, singular, ill-conditioned, not symmetric; sizes 1 to 30, of any scale."""
    source = torch.Generator().manual_seed(seed)
    pick = lambda *values: values[int(torch.randint(len(values), (), generator=source))]
    size, kind = pick(1, 2, 3, 8, 30), pick("definite", "indefinite", "singular", "ill", "skew", "any", "low rank")
    normal = lambda *shape: torch.randn(*shape, dtype=D, generator=source)
    q, _ = torch.linalg.qr(normal(size, size))
    values = torch.rand(size, dtype=D, generator=source) + 0.1
    if kind in ("indefinite", "skew"):
        values = values * normal(size).sign()
    if kind in ("singular", "low rank"):
        values[: 1 if kind == "singular" else max(1, size - 2)] = 0
    if kind == "ill":
        values = torch.logspace(0, pick(4, 8, 14), size, dtype=D)
    A = q @ torch.diag(values) @ q.T
    method = pick("cg", "minres", "gmres")
    if kind in ("skew", "any"):
        A, method = (normal(size, size), "gmres") if kind == "any" else (A - A.T + normal(size, size) * 0.1, "gmres")
    A = (A + A.T) / 2 if method != "gmres" else A
    B = normal(size, pick(1, 2, 5)) * pick(1e-12, 1.0, 1e12)
    if pick(True, False):
        B = A @ B
    if pick(True, False, False):
        B[:, 0] = 0
    dtype = pick(D, D, torch.float32)
    return (A * pick(1e-6, 1.0, 1e6)).to(dtype), B.to(dtype), method, dtype


def check_honest(seed: int) -> None:
    A, B, method, dtype = problem(seed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = hodiff.solve(hodiff.MatrixOperator(A), B, method=method)
    rtol = {D: 1e-8, torch.float32: 1e-4}[dtype]
    A, B, x = A.to(D), B.to(D), found.value.to(D)
    # What no arithmetic of this precision sees: the rounding of the product and of x itself.
    rounding = 30 * torch.finfo(dtype).eps * (A.norm() * x.norm(dim=0) + B.norm(dim=0))
    true = (B - A @ x).norm(dim=0)
    assert bool((true[found.converged] <= (1.01 * rtol * B.norm(dim=0) + rounding)[found.converged]).all()), seed
    assert bool((found.residual <= rtol)[found.converged].all()) and bool(
        (found.residual > rtol)[~found.converged].all()
    )
    assert bool(((found.residual.to(D) * B.norm(dim=0) - true).abs() <= 1e-2 * true + rounding).all()), seed
    assert bool(found.converged.all()) == (not said) == (found.status == "converged"), seed
    assert bool(x.isfinite().all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_nothing_solves_a_zero_matrix(method: str, dtype: torch.dtype) -> None:
    A, b = hodiff.MatrixOperator(torch.zeros(2, 2, dtype=dtype)), torch.ones(2, dtype=dtype)
    for given in (b, torch.stack([b, 0 * b], 1)):
        with pytest.warns(hodiff.ConvergenceWarning, match="relative residual is 1 "):
            found = hodiff.solve(A, given, method=method)
        assert not found.value.any()


HALF, SINGLE = torch.float16, torch.float32
OUT_OF_ROOM = [(HALF, 1e-3, 1e3), (HALF, 1e3, 1e-3), (SINGLE, 1e-9, 1e36), (SINGLE, 1e9, 1e-35), (SINGLE, 1e-9, 1e37)]


@pytest.mark.parametrize("layout", ["one", "columns", "stack", "preconditioned"])
@pytest.mark.parametrize(("dtype", "a", "b"), OUT_OF_ROOM)
def test_a_solution_that_its_dtype_has_no_place_for(dtype: torch.dtype, a: float, b: float, layout: str) -> None:
    """It was infinite, or lost its digits, and counted as converged."""
    A, one = torch.diag(torch.tensor([a, 2 * a, 3 * a], dtype=D)).to(dtype), torch.full((3,), b, dtype=D).to(dtype)
    operator = hodiff.MatrixOperator(A[None], batch_ndim=1) if layout == "stack" else hodiff.MatrixOperator(A)
    given = {"stack": one[None], "columns": torch.stack([0 * one, one], 1)}.get(layout, one)
    options = {"preconditioner": hodiff.MatrixOperator(torch.ones_like(one))} if layout == "preconditioned" else {}
    with pytest.raises(hodiff.InputError, match=r"the solution's largest entry is about .* cannot represent"):
        hodiff.solve(operator, given, **options)
    room = hodiff.solve(operator * (1 / a), given, **options).value.double() / a if layout != "stack" else None
    if room is not None:
        column = room[:, -1] if layout == "columns" else room
        agree(column, torch.linalg.solve(A.double(), one.double()), 1e-2 if dtype is HALF else 1e-4)


def test_small_solutions_that_have_a_place() -> None:
    A = hodiff.MatrixOperator(torch.diag(torch.tensor([100.0, 200.0])).half())
    found = hodiff.solve(A, torch.tensor([2e-3, 2e-3]).half())
    agree(found.value.double(), torch.tensor([2e-5, 1e-5], dtype=D), 1e-2)
    assert found.converged


def test_gradients_of_a_backward_pass_underflow_as_in_pytorch() -> None:
    b = torch.ones(2).half().requires_grad_()
    x = hodiff.solve(hodiff.MatrixOperator(torch.full((2,), 1e3).half()), b, create_graph=True).value
    (found,) = torch.autograd.grad(x.sum() * 1e-3, b)
    agree(found.double(), torch.full((2,), 1e-6, dtype=D), 0.1)


@pytest.mark.parametrize("block", range(10))
def test_records_do_not_lie(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        check_honest(seed)


@pytest.mark.nightly
def test_records_of_two_thousand_problems_do_not_lie() -> None:
    for seed in range(100, 2100):
        check_honest(seed)


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_of_all_solutions_at_once(method: str) -> None:
    A, B, c = matrix(method, 3), draw(3, 2), draw(3, 2, seed=5)
    symmetric = method != "gmres"

    def loss(a: Tensor, b: Tensor, damping: Tensor) -> Tensor:
        a = (a + a.T) / 2 if symmetric else a
        x = hodiff.solve(hodiff.MatrixOperator(a), b, method=method, damping=damping, create_graph=True, rtol=1e-13)
        return (x.value.sin() * c).sum()

    point = [A.requires_grad_(), B.requires_grad_(), torch.tensor(0.3, dtype=D, requires_grad=True)]
    assert torch.autograd.gradcheck(loss, point, eps=1e-6, atol=1e-6)
    assert torch.autograd.gradgradcheck(loss, point, eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", SPELLINGS)
def test_derivatives_by_stacks_of_right_hand_sides(name: str) -> None:
    model, w = two_layers(3, 2), torch.tensor(1.3, dtype=D, requires_grad=True)
    H = hodiff.HessianOperator(lambda m: w * m(X).square().sum() / 100, model) + 5.0
    V = draw(H.shape[0], 3)
    found = hodiff.solve(H, SPELLINGS[name](H, V), method="minres", rtol=1e-12, create_graph=True).value
    c = draw(H.shape[0], 3, seed=7)
    (by_w,) = torch.autograd.grad((H.flatten(found) * c).sum(), w)
    with torch.no_grad():
        K = H.dense()
        x = torch.linalg.solve(K, V)
        expected = -(c * torch.linalg.solve(K, ((K - 5 * torch.eye(len(K), dtype=D)) / w) @ x)).sum()
    agree(by_w, expected, 1e-8)


def test_small_and_large_columns_of_a_backward_pass_are_solved_to_their_own_tolerance() -> None:
    A, B = matrix("cg", 30), draw(30, 2).requires_grad_()
    x = hodiff.solve(hodiff.MatrixOperator(A), B, create_graph=True).value
    c = draw(30, 2, seed=1) * torch.tensor([1.0, 1e-9], dtype=D)
    (found,) = torch.autograd.grad((x * c).sum(), B)
    expected = torch.linalg.solve(A, c)
    for k in range(2):
        agree(found[:, k] / expected[:, k].norm(), expected[:, k] / expected[:, k].norm(), 1e-8)


def test_who_asks_one_of_many_for_its_derivative_gets_zeros_of_the_others() -> None:
    A, B = matrix("cg", 8), draw(8, 3).requires_grad_()
    x = hodiff.solve(hodiff.MatrixOperator(A), B, create_graph=True, rtol=1e-12).value
    (found,) = torch.autograd.grad(x[:, 1].sum(), B)
    agree(found[:, 1], torch.linalg.solve(A, torch.ones(8, dtype=D)), 1e-9)
    assert not found[:, [0, 2]].any()


def test_the_systems_of_a_log_determinant_are_solved_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.tensor([1.0, 4.0, 7.0] * 50, dtype=D).requires_grad_()
    value = hodiff.logdet(hodiff.MatrixOperator(a), samples=4, steps=3, create_graph=True).value
    asked: list[int] = []
    inner = hodiff.LinearOperator._times_rows
    monkeypatch.setattr(
        hodiff.LinearOperator, "_times_rows", lambda A, rows: (asked.append(len(rows)), inner(A, rows))[1]
    )
    (found,) = torch.autograd.grad(value, a)
    agree(found, 1 / a.detach(), 1e-6)  # of a diagonal matrix, signs know it
    assert asked == [4]  # the processes have solved them; one look at what is left


def test_who_looks_on_changes_no_solution_that_begins_anew() -> None:
    """Of systems by GMRES, of which one has ended when the others begin anew."""
    A = torch.eye(12, dtype=D) + 0.3 * torch.triu(torch.ones(12, 12, dtype=D), 1)
    sides = torch.stack([torch.eye(12, dtype=D)[0], *draw(2, 12, seed=3)])
    options = {"method": "gmres", "restart": 4, "rtol": 1e-10}
    alone = hodiff.solve(hodiff.MatrixOperator(A), sides.T, **options)
    seen: list[Tensor] = []
    looked = hodiff.solve(hodiff.MatrixOperator(A), sides.T, callback=lambda r: seen.append(r.value.clone()), **options)
    assert torch.equal(alone.value, looked.value) and len(seen) > 4
    agree(A @ looked.value, sides.T, 1e-8)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_who_looks_on_changes_no_solution_of_systems_that_end_apart(method: str) -> None:
    """One side is zero, and has ended before the first step: what is shown is put together from both."""
    A, sides = matrix(method, 12, seed=4), torch.stack([torch.zeros(12, dtype=D), *draw(2, 12, seed=5)]).T
    seen: list[Tensor] = []
    alone = hodiff.solve(hodiff.MatrixOperator(A), sides, method=method)
    looked = hodiff.solve(hodiff.MatrixOperator(A), sides, method=method, callback=lambda r: seen.append(r.value))
    assert torch.equal(alone.value, looked.value) and alone.products == looked.products
    assert len({tuple(value.flatten().tolist()) for value in seen}) == len(seen) > 4
    agree(A @ looked.value, sides, 1e-6)
