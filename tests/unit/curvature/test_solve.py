"""`solve` beyond symmetric systems and tolerances: GMRES, so many steps, and who looks on."""

import io
import math
import sys
import warnings
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.modules import two_layers
from tests.support.operators import D, X, draw
from tests.support.properties import agree


def residual(A: hodiff.LinearOperator, x: Tensor, b: Tensor, damping: float = 0.0) -> float:
    return float((b - A @ x - damping * x).norm() / b.norm())


def conjugate_gradients(A: Tensor, b: Tensor, steps: int) -> list[Tensor]:
    """The iterates, by the textbook."""
    x, r, d = torch.zeros_like(b), b.clone(), b.clone()
    found = []
    for _ in range(steps):
        step = (r @ r) / (d @ (A @ d))
        x, before = x + step * d, r
        r = r - step * (A @ d)
        d = r + (r @ r) / (before @ before) * d
        found.append(x)
    return found


# --- GMRES ------------------------------------------------------------------------------------------------------------

N = 80


def rotation(scale: float = 1.0) -> Tensor:
    q, r = torch.linalg.qr(draw(N, N, seed=3))
    return scale * q * r.diagonal().sign()


def jordan(value: float) -> Tensor:
    """One defective eigenvalue; as far from normal as a matrix gets."""
    return value * torch.eye(N, dtype=D) + torch.diag(torch.ones(N - 1, dtype=D), 1)


SYSTEMS = {
    "shifted noise": 4 * torch.eye(N, dtype=D) + 0.2 * draw(N, N),
    "noise": draw(N, N),
    "orthogonal": rotation(),
    "skew": draw(N, N, seed=1) - draw(N, N, seed=1).T,
    "defective": jordan(1.5),
    "clustered": torch.diag(torch.cat([torch.full((N - 2,), 1.0, dtype=D), torch.tensor([50.0, -30.0], dtype=D)]))
    + 1e-3 * draw(N, N),
    "indefinite, symmetric": torch.diag(torch.linspace(-5, 10, N, dtype=D)),
    "tiny": 1e-9 * (4 * torch.eye(N, dtype=D) + 0.2 * draw(N, N)),
    "huge": 1e12 * rotation(),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_gmres_solves_what_is_not_symmetric(name: str) -> None:
    A, b = hodiff.MatrixOperator(SYSTEMS[name]), draw(N, seed=2)
    found = hodiff.solve(A, b, method="gmres")
    assert found.converged and found.status == "converged" and found.products <= N + 18
    assert found.residual == pytest.approx(residual(A, found.value, b), rel=1e-2, abs=1e-14)
    expected = torch.linalg.solve(SYSTEMS[name], b)
    assert (found.value - expected).norm() <= 1e-4 * expected.norm()


def test_a_small_system_that_does_not_end_soon_is_solved_by_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where that is singular, or its products are many passes, it goes on by GMRES."""
    A, b = SYSTEMS["noise"], draw(N, seed=2)
    found = hodiff.solve(hodiff.MatrixOperator(A), torch.stack([b, 3 * b.flip(0)], 1), method="gmres")
    assert found.products == 2 * 8 + N + 2 and bool(found.converged.all())
    agree(found.value, torch.linalg.solve(A, torch.stack([b, 3 * b.flip(0)], 1)), 1e-9)
    easy = hodiff.MatrixOperator(4 * torch.eye(N, dtype=D) + 0.001 * A)
    assert hodiff.solve(easy, b, method="gmres").products < 9
    singular = A.clone()
    singular[:, 0] = singular[:, 1]
    plain = hodiff.solve(hodiff.MatrixOperator(singular), singular @ b, method="gmres", restart=N)
    found = hodiff.solve(hodiff.MatrixOperator(singular), singular @ b, method="gmres")
    assert found.converged and found.products >= plain.products
    agree(found.value, plain.value, 1e-6)
    nilpotent = hodiff.MatrixOperator(torch.diag(torch.ones(N - 1, dtype=D), 1) * 1e-3)
    with pytest.warns(hodiff.ConvergenceWarning, match="after"):
        assert hodiff.solve(nilpotent, b, method="gmres", products=N + 20).products <= N + 20
    monkeypatch.setattr(hodiff.MatrixOperator, "_chunk", lambda self, count: 10)
    many = hodiff.solve(hodiff.MatrixOperator(A), b, method="gmres")
    alone = hodiff.solve(hodiff.MatrixOperator(A), b, method="gmres", restart=N)
    assert abs(many.products - alone.products) <= 32 and many.converged


@pytest.mark.parametrize("restart", [1, 7, 20])
def test_gmres_begins_anew(restart: int) -> None:
    A, b = hodiff.MatrixOperator(SYSTEMS["shifted noise"]), draw(N, seed=2)
    found = hodiff.solve(A, b, method="gmres", restart=restart, damping=0.5)
    assert found.converged and residual(A, found.value, b, 0.5) <= 1.01e-8
    whole = hodiff.solve(A, b, method="gmres", damping=0.5, restart=N)
    assert found.products >= whole.products


def test_each_step_of_gmres_has_the_least_residual_of_its_krylov_space() -> None:
    """The definition, by least squares over b, A b, A² b, ... made orthonormal."""
    A, b = SYSTEMS["shifted noise"], draw(N, seed=2)
    seen: list[tuple[Tensor, float]] = []
    hodiff.solve(
        hodiff.MatrixOperator(A), b, method="gmres", iterations=6, callback=lambda r: seen.append((r.value, r.residual))
    )
    space = [b]
    for x, size in seen:
        basis, _ = torch.linalg.qr(torch.stack(space, 1))
        least = torch.linalg.lstsq(A @ basis, b[:, None]).solution[:, 0]
        agree(x, basis @ least, 1e-9)
        assert size == pytest.approx(float((b - A @ x).norm() / b.norm()), rel=1e-9)
        space.append(A @ space[-1])
    assert len(seen) == 6


def test_gmres_preconditioned_needs_no_symmetry_and_keeps_the_true_residual() -> None:
    values = torch.logspace(0, 5, N, dtype=D)
    A = torch.diag(values) + 0.3 * torch.triu(draw(N, N), 1)
    near = hodiff.MatrixOperator(torch.linalg.inv(torch.diag(values) + 0.29 * torch.triu(draw(N, N), 1)))
    b = draw(N, seed=5)
    found = hodiff.solve(hodiff.MatrixOperator(A), b, method="gmres", preconditioner=near)
    assert found.converged and found.products < 20
    assert residual(hodiff.MatrixOperator(A), found.value, b) <= 1.01e-8
    with pytest.raises(hodiff.InputError, match="preconditioner: this MatrixOperator is not known to be symmetric"):
        hodiff.solve(hodiff.MatrixOperator(values), b, preconditioner=near)


@pytest.mark.parametrize("restart", [1, 2, 4])
def test_gmres_preconditioned_begins_anew(restart: int) -> None:
    """Of later bases, too, what is preconditioned is the change alone."""
    values = torch.logspace(0, 4, N, dtype=D)
    A = torch.diag(values) + 0.3 * torch.triu(draw(N, N), 1)
    near = hodiff.MatrixOperator(torch.linalg.inv(torch.diag(values) * 1.3 + 0.2 * torch.triu(draw(N, N), 1)))
    b = draw(N, seed=5)
    whole = hodiff.solve(hodiff.MatrixOperator(A), b, method="gmres", preconditioner=near)
    found = hodiff.solve(hodiff.MatrixOperator(A), b, method="gmres", preconditioner=near, restart=restart)
    assert found.converged and found.products > restart + 1  # more than one basis
    assert found.products <= 4 * whole.products
    agree(found.value, torch.linalg.solve(A, b), 1e-6)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_a_preconditioner_of_another_dtype_is_refused(method: Literal["cg", "minres", "gmres"]) -> None:
    A, narrow = hodiff.MatrixOperator(torch.ones(4, dtype=D)), hodiff.MatrixOperator(torch.ones(4))
    with pytest.raises(hodiff.InputError, match=r"preconditioner has .*float32, but .*float64"):
        hodiff.solve(A, torch.ones(4, dtype=D), method=method, preconditioner=narrow)


LIMITS = {"products": {"products": 4}, "rtol": {"rtol": 0.3}, "iterations": {"iterations": 3}}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_a_backward_pass_keeps_to_the_limits_of_its_solve(method: Any, limit: str) -> None:
    """The derivative by b is the solution for what arrives, within the same limits: as inexact, and warned of."""
    size = 400  # its matrix is not solved at once
    values = torch.logspace(0, 3, size, dtype=D)
    b, u = draw(size, seed=1).requires_grad_(), draw(size, seed=2)
    A = hodiff.MatrixOperator(values)
    with warnings.catch_warnings(record=True) as forward:
        warnings.simplefilter("always")
        value = hodiff.solve(A, b, method=method, create_graph=True, **LIMITS[limit]).value
    with warnings.catch_warnings(record=True) as backward:
        warnings.simplefilter("always")
        (found,) = torch.autograd.grad(value @ u, b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = hodiff.solve(A, u, method=method, **LIMITS[limit]).value
    agree(found, expected, 1e-10)
    assert float((found - u / values).norm()) > 1e-3 * float(found.norm())
    assert len(backward) == len(forward) == (limit == "products")


def test_gmres_says_where_it_cannot() -> None:
    shift = torch.diag(torch.ones(N - 1, dtype=D), 1)
    shift[-1, 0] = 1
    b = torch.zeros(N, dtype=D)
    b[0] = 1
    with pytest.warns(hodiff.ConvergenceWarning, match=r"no longer falls.*restart="):  # e1 is reached after N steps
        found = hodiff.solve(hodiff.MatrixOperator(shift), b, method="gmres", restart=10)
    assert found.status == "stagnation" and found.residual == pytest.approx(1)
    assert hodiff.solve(hodiff.MatrixOperator(shift), b, method="gmres").converged

    nilpotent = hodiff.MatrixOperator(jordan(0.0))
    with pytest.warns(hodiff.ConvergenceWarning, match="singular"):
        found = hodiff.solve(nilpotent, torch.ones(N, dtype=D), method="gmres")  # the last row is zero
    assert not found.converged and found.residual == pytest.approx(
        residual(nilpotent, found.value, torch.ones(N, dtype=D))
    )
    with pytest.warns(hodiff.ConvergenceWarning, match="budget of products is spent"):
        found = hodiff.solve(hodiff.MatrixOperator(draw(N, N)), draw(N), method="gmres", products=9)
    assert found.status == "budget" and found.products <= 9


def test_a_residual_outside_the_range_is_not_called_converged() -> None:
    """Krylov's space ends at once: A b = 0."""
    A = hodiff.MatrixOperator(torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D))
    with pytest.warns(hodiff.ConvergenceWarning, match="singular"):
        found = hodiff.solve(A, torch.tensor([1.0, 0.0], dtype=D), method="gmres")
    assert not found.converged and found.residual == 1 and found.value.abs().max() == 0


def test_gmres_of_an_operator_with_structure() -> None:
    """(I - ∂f) u = b, as in a fixed point's implicit gradient."""
    W = 0.2 * draw(4, 4)
    point = {"h": draw(3, 4)}
    J = hodiff.JacobianOperator(lambda p: torch.tanh(p["h"] @ W), point)
    square = hodiff.MatrixOperator(J.dense())
    b = {"h": draw(3, 4, seed=9)}
    flat = hodiff.solve(1 - square, b["h"].reshape(-1), method="gmres")
    expected = torch.linalg.solve(torch.eye(12, dtype=D) - J.dense(), b["h"].reshape(-1))
    agree(flat.value, expected, 1e-7)


def test_gmres_in_single_and_half_precision() -> None:
    A = SYSTEMS["shifted noise"]
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        low = hodiff.MatrixOperator(A.to(dtype))
        b = draw(N, seed=2).to(dtype)
        found = hodiff.solve(low, b, method="gmres")
        assert found.converged and found.value.dtype == dtype
        assert residual(hodiff.MatrixOperator(A.to(dtype).double()), found.value.double(), b.double()) <= 2 * rtol


# --- so many steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_so_many_steps_of_conjugate_gradients_are_those_of_the_textbook(steps: int) -> None:
    """The step of TRPO: ten products, no warning, whatever is reached."""
    A = torch.diag(torch.logspace(-3, 3, N, dtype=D))
    b = draw(N)
    operator = hodiff.MatrixOperator(A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hodiff.solve(operator, b, iterations=steps)
    agree(found.value, conjugate_gradients(A, b, steps)[-1], 1e-9)
    assert (found.products, operator.products) == (steps, steps)
    assert (found.converged, found.status) == (None, "iterations")
    assert found.residual == pytest.approx(residual(operator, found.value, b), rel=1e-9)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_so_many_steps_of_each_method(method: str) -> None:
    A = hodiff.MatrixOperator(torch.linspace(0.1, 4, N, dtype=D))
    M, b = hodiff.MatrixOperator(1 / torch.linspace(0.2, 3, N, dtype=D)), draw(N)
    start = draw(N, seed=4)
    for preconditioner in (None, M):
        found = hodiff.solve(
            A, b, method=method, damping=0.3, preconditioner=preconditioner, start=start, iterations=5, restart=None
        )
        assert found.residual == pytest.approx(residual(A, found.value, b, 0.3), rel=1e-9)
        assert found.products in (6, 7) and found.converged is None and found.status == "iterations"
        more = hodiff.solve(A, b, method=method, damping=0.3, preconditioner=preconditioner, start=start, iterations=9)
        assert more.residual < found.residual


def test_gmres_takes_so_many_steps_over_several_bases() -> None:
    A, b = hodiff.MatrixOperator(SYSTEMS["shifted noise"]), draw(N)
    found = hodiff.solve(A, b, method="gmres", restart=4, iterations=10)
    assert found.products == 10 and found.residual == pytest.approx(residual(A, found.value, b), rel=1e-9)


def test_steps_end_where_nothing_but_rounding_is_left() -> None:
    """A projection: one step solves it, and a second one would divide by rounding errors."""
    A = hodiff.MatrixOperator(torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=D))
    b = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in ("cg", "minres", "gmres"):
            found = hodiff.solve(A, b, method=method, iterations=8)
            agree(found.value, b, 1e-12)
            assert found.products <= 2 and (found.status, found.converged) == ("converged", None)
        assert hodiff.solve(A, b, start=b, iterations=3).products == 1


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lowest", [-0.02, 0.0], ids=["below zero", "zero"])
def test_conjugate_gradients_that_find_no_solution_give_their_best_iterate(lowest: float, seed: int) -> None:
    """Their residuals rise before they meet what is not positive; along a null vector a step would be of any size."""
    q, _ = torch.linalg.qr(draw(30, 30, seed=seed))
    A = hodiff.MatrixOperator(q @ torch.diag(torch.linspace(lowest, 10, 30, dtype=D)) @ q.T)
    b, residuals = draw(30, seed=seed + 100), [1.0]
    found = hodiff.solve(A, b, callback=lambda r: residuals.append(residual(A, r.value, b)))
    assert found.status == "negative curvature" and found.products <= 60
    assert found.residual == pytest.approx(min(residuals), rel=1e-6)
    assert found.residual == pytest.approx(residual(A, found.value, b), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_run_that_leads_away_is_not_taken(method: Literal["cg", "minres"], seed: int) -> None:
    """In single precision no step helps here: the record is that of the solution that is returned."""
    q, _ = torch.linalg.qr(draw(30, 30, seed=seed))
    A, b = (q @ torch.diag(torch.logspace(0, -7, 30, dtype=D)) @ q.T).float(), draw(30, seed=seed + 100).float()
    A = (A + A.T) / 2
    with pytest.warns(hodiff.ConvergenceWarning, match="after"):
        found = hodiff.solve(hodiff.MatrixOperator(A), b, method=method, rtol=1e-7)
    true = residual(hodiff.MatrixOperator(A.double()), found.value.double(), b.double())
    assert found.residual <= 1 and found.residual == pytest.approx(true, rel=5e-2)


@pytest.mark.parametrize("scale", [1e-100, 1e-20, 1e20, 1e100])
@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_the_unit_of_a_matrix_does_not_matter(method: str, scale: float) -> None:
    """Nor where its squares have no place in the dtype; GMRES goes on from the solution by the matrix there."""
    values, b = torch.linspace(1, 100, N, dtype=D), draw(N)
    found = hodiff.solve(hodiff.MatrixOperator(scale * values), b, method=method)
    assert found.converged and found.products == hodiff.solve(hodiff.MatrixOperator(values), b, method=method).products
    agree(found.value * scale, b / values, 1e-6)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_multiple_of_the_identity_is_no_preconditioner(method: str) -> None:
    A, b = hodiff.MatrixOperator(torch.linspace(1, 100, N, dtype=D)), draw(N)
    plain = hodiff.solve(A, b, method=method)
    for factor in (1e-4, 1e4):
        found = hodiff.solve(
            A, b, method=method, preconditioner=hodiff.MatrixOperator(torch.full((N,), factor, dtype=D))
        )
        assert found.converged and abs(found.products - plain.products) <= 1


def test_negative_curvature_is_no_step() -> None:
    A = hodiff.MatrixOperator(torch.tensor([1.0, 2.0, -3.0], dtype=D))
    with pytest.warns(hodiff.ConvergenceWarning, match=r"iterations=5\); conjugate gradients met .* negative"):
        found = hodiff.solve(A, torch.ones(3, dtype=D), iterations=5)
    assert found.status == "negative curvature" and found.direction is not None and found.converged is None
    assert not found.value.any() and found.residual == pytest.approx(1.0)


# --- who looks on -----------------------------------------------------------------------------------------------------


def test_the_iterates_of_conjugate_gradients_by_callback() -> None:
    point = {"w": draw(3), "b": draw(1)}
    H = hodiff.HessianOperator(lambda p: ((X @ p["w"] + p["b"]).square()).sum() + p["w"].square().sum(), point)
    seen: list[hodiff.curvature._records.SolveRecord] = []
    b = {"w": draw(3, seed=1), "b": draw(1, seed=1)}
    found = hodiff.solve(H, b, callback=seen.append)
    expected = conjugate_gradients(H.dense(), H.flatten(b), len(seen))
    for record, x in zip(seen, expected, strict=True):
        assert list(record.value) == ["w", "b"]
        agree(H.flatten(record.value), x, 1e-8)
        assert record.residual == pytest.approx(
            float((H.flatten(b) - H.dense() @ x).norm() / H.flatten(b).norm()), rel=1e-3, abs=1e-12
        )
    assert [record.products for record in seen] == list(range(1, len(seen) + 1))
    assert {(record.status, record.converged) for record in seen} == {("running", None)}
    agree(H.flatten(seen[-1].value), H.flatten(found.value), 1e-12)


@pytest.mark.parametrize("start", [None, draw(30, seed=1)], ids=["from zero", "from a start"])
@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_a_callback_changes_nothing_and_its_errors_pass(method: str, start: Tensor | None) -> None:
    A, b = hodiff.MatrixOperator(torch.linspace(1, 9, 30, dtype=D)), draw(30)
    options, seen = {"method": method, "start": start, "restart": 5 if method == "gmres" else None}, list[float]()
    plain = hodiff.solve(A, b, **options)
    found = hodiff.solve(A, b, **options, callback=lambda r: seen.append(residual(A, r.value, b) - r.residual))
    assert torch.equal(plain.value, found.value) and max(map(abs, seen)) < 1e-9

    def enough(record: object) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        hodiff.solve(A, b, **options, callback=enough)


def test_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    hodiff.solve(hodiff.MatrixOperator(torch.linspace(1, 9, 30, dtype=D)), draw(30), progress=True)
    assert "hodiff: solve" in stream.getvalue()


BAD = {
    "iterations: exactly so many are taken, whatever rtol says": {"iterations": 3, "rtol": 1e-3},
    "iterations: exactly so many are taken, whatever products says": {"iterations": 3, "products": 8},
    "iterations: got 0": {"iterations": 0},
    "products: got 1, expected an integer of at least 2": {"products": 1},
    "restart is an option of method='gmres', not of 'cg'": {"restart": 5},
    "restart: got 0": {"restart": 0, "method": "gmres"},
    "callback: got an int": {"callback": 3},
    r"damping: got a tensor of shape \(3,\), torch.float32; expected a number, or .* add a diagonal": {
        "damping": torch.ones(3)
    },
    r"damping: got a tensor of shape \(\), torch.int64; expected a number": {"damping": torch.tensor(1)},
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_calls(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        hodiff.solve(hodiff.MatrixOperator(torch.ones(4)), torch.ones(4), **BAD[pattern])


def test_two_products_are_enough_for_one_step() -> None:
    found = hodiff.solve(hodiff.MatrixOperator(2 * torch.ones(4, dtype=D)), torch.ones(4, dtype=D), products=2)
    assert found.converged and found.value.tolist() == [0.5] * 4


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("several", [False, True])
def test_a_preconditioner_that_is_not_definite_is_named(method: Literal["cg", "minres"], several: bool) -> None:
    """Also where the first residual does not show it: of the operator it was said that it is singular."""
    A, b = hodiff.MatrixOperator(torch.arange(1.0, 6.0, dtype=D)), torch.ones(5, dtype=D)
    M = hodiff.MatrixOperator(torch.tensor([1, 1, 1, 1, -0.5], dtype=D))
    with pytest.raises(hodiff.InputError, match=r"preconditioner is not positive definite.*method='gmres'"):
        hodiff.solve(A, torch.stack([b, 2 * b], 1) if several else b, method=method, preconditioner=M)
    assert hodiff.solve(A, b, method="gmres", preconditioner=M).converged


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
@pytest.mark.parametrize("size", [1e300, math.nan, math.inf])
def test_a_preconditioner_whose_products_overflow_is_named(
    method: Literal["cg", "minres", "gmres"], size: float
) -> None:
    A = hodiff.MatrixOperator(1e10 * torch.arange(1.0, 6.0, dtype=D))
    with pytest.raises(
        hodiff.GraphError, match=r"the operator or the preconditioner has NaN.*Solve without it to find out"
    ):
        hodiff.solve(
            A,
            torch.ones(5, dtype=D),
            method=method,
            preconditioner=hodiff.MatrixOperator(torch.full((5,), size, dtype=D)),
        )


@pytest.mark.parametrize("batch_ndim", [0, 1])
@pytest.mark.parametrize("entries", ["2, 3", "3, 3", "all"])
def test_a_matrix_with_nan_is_not_said_to_be_unsymmetric(entries: str, batch_ndim: int) -> None:
    A = torch.eye(5, dtype=D)
    A[{"2, 3": (2, 3), "3, 3": (3, 3), "all": ...}[entries]] = math.nan
    stack = torch.stack([torch.eye(5, dtype=D), A])
    operator = hodiff.MatrixOperator(stack if batch_ndim else A, batch_ndim=batch_ndim)
    for name, call in {
        "solve": lambda: hodiff.solve(operator, torch.ones(operator.shape[:-1], dtype=D)),
        "logdet": lambda: hodiff.logdet(operator),
    }.items():
        with pytest.raises(hodiff.GraphError, match=f"{name}: a product is not finite, so the operator has NaN"):
            call()
    other = torch.where(stack.isnan(), stack, torch.ones(5, 5, dtype=D).triu())
    assert not hodiff.MatrixOperator(other, batch_ndim=1).symmetric or entries == "all"


def test_a_right_hand_side_of_vmap_is_refused() -> None:
    A = hodiff.MatrixOperator(torch.eye(4, dtype=D))
    with pytest.raises(hodiff.InputError, match=r"b is batched by torch.vmap.*columns \(D, K\).*batch_ndim=1"):
        torch.vmap(lambda b: hodiff.solve(A, b).value)(draw(3, 4))
    b = draw(4)
    assert torch.vmap(lambda c: c * hodiff.solve(A, b).value)(draw(3, 4)).shape == (3, 4)


def test_the_error_for_another_operator_names_the_method() -> None:
    with pytest.raises(hodiff.InputError, match=r"not known to be symmetric; use method='gmres'"):
        hodiff.solve(hodiff.MatrixOperator(draw(4, 4)), draw(4))
    with pytest.raises(hodiff.InputError, match=r"is 2 x 3, expected a square"):
        hodiff.solve(hodiff.MatrixOperator(draw(2, 3)), draw(3), method="gmres")


@pytest.mark.parametrize(("size", "expected"), [(12, 130), (40, 410), (120, 1000)])
def test_how_many_products_there_are_where_none_is_said(size: int, expected: int) -> None:
    A = hodiff.MatrixOperator(torch.diag(torch.logspace(0, 12, size, dtype=D)))
    with pytest.warns(hodiff.ConvergenceWarning, match=f"{expected} products"):
        found = hodiff.solve(A, torch.linspace(1, 2, size, dtype=D), method="minres", rtol=1e-12)
    assert found.products == expected and not found.converged


def test_trpo_ten_steps_of_conjugate_gradients():
    """Fisher products of a Gaussian policy by its divergence, ten steps, and no warning."""
    net, states = two_layers(3, 2), torch.randn(20, 3, dtype=D)
    policy = lambda m, batch: m(batch)
    divergence = lambda mean, batch: (0.5 * (mean - mean.detach()).square().sum(), len(mean))
    g = torch.randn(sum(p.numel() for p in net.parameters()), dtype=D)
    F = hodiff.GaussNewtonOperator(policy, divergence, net, data=[states]) + 0.1
    found = hodiff.solve(F, g, iterations=10).value
    A, x, r = F.dense(), torch.zeros_like(g), g.clone()
    p, rr = r.clone(), r @ r
    for _ in range(10):
        Ap = A @ p
        step = rr / (p @ Ap)
        x, r = x + step * p, r - step * Ap
        p, rr = r + (r @ r) / rr * p, r @ r
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e15, 1e30])
@pytest.mark.parametrize("method", ["cg", "minres"])
def test_right_hand_sides_whose_squares_leave_the_dtype(method: str, scale: float) -> None:
    A, b = torch.linspace(0.5, 2, 10), torch.full((10,), scale)
    found = hodiff.solve(hodiff.MatrixOperator(A), b, method=method, start=b)
    assert found.converged
    agree(found.value.double() / scale, 1 / A.double(), 1e-3)


# --- Neumann's series -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [0, 1, 5])
def test_a_neumann_series_is_its_first_terms(terms: int) -> None:
    torch.manual_seed(0)
    A, b = torch.randn(6, 6, dtype=torch.float64) / 6 + 2 * torch.eye(6, dtype=torch.float64), torch.randn(6).double()
    left = torch.eye(6, dtype=torch.float64) - A / 3
    expected = sum(torch.linalg.matrix_power(left, j) for j in range(terms + 1)) @ b / 3
    record = hodiff.solve(hodiff.MatrixOperator(A), b, method="neumann", iterations=terms, scale=3.0)
    torch.testing.assert_close(record.value, expected)
    assert (record.products, record.status, record.converged) == (terms, "iterations", None)


def test_a_neumann_series_that_diverges_says_so() -> None:
    A = hodiff.MatrixOperator(torch.tensor([1.0, 5.0]))
    with pytest.warns(hodiff.ConvergenceWarning, match=r"the Neumann series diverges: .* Give a larger"):
        record = hodiff.solve(A, torch.ones(2), method="neumann", iterations=3)
    assert record.status == "divergence"
    assert hodiff.solve(A, torch.ones(2), method="neumann", iterations=3, scale=2.6).status == "iterations"


NEUMANN = {
    "method='neumann' sums a fixed number of terms": {"method": "neumann"},
    "scale is an option of method='neumann', not of 'cg'": {"scale": 2.0},
    "scale: got 0": {"method": "neumann", "iterations": 1, "scale": 0},
    "iterations: got 0, expected an integer of at least 1": {"iterations": 0},
}


@pytest.mark.parametrize("pattern", NEUMANN)
def test_bad_options_of_a_neumann_series(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        hodiff.solve(hodiff.MatrixOperator(torch.ones(3)), torch.ones(3), **NEUMANN[pattern])


def test_minres_ends_where_b_lies_outside_the_range() -> None:
    """x grows along a null vector until A x rounds like the residual: further steps are spent on nothing."""
    q, _ = torch.linalg.qr(torch.randn(40, 40, dtype=D, generator=torch.Generator().manual_seed(0)))
    values = torch.cat([torch.linspace(-2, 2, 36, dtype=D)[:35] + 0.03, torch.zeros(5, dtype=D)])
    A = hodiff.MatrixOperator((q * values) @ q.T, symmetric=True)
    b = torch.randn(40, dtype=D, generator=torch.Generator().manual_seed(1))
    with pytest.warns(hodiff.ConvergenceWarning, match="the residual no longer falls"):
        record = hodiff.solve(A, b, method="minres", products=2000)
    assert record.status == "stagnation"
    assert record.products < 200


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_the_solution_for_zero_is_zero_wherever_it_began(method: Literal["cg", "minres", "gmres"]) -> None:
    A = hodiff.MatrixOperator(torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=D)))
    b = torch.stack([torch.zeros(3, dtype=D), torch.ones(3, dtype=D)], -1)
    record = hodiff.solve(A, b, start=torch.ones(3, 2, dtype=D), method=method)
    assert not record.value[:, 0].any()
    torch.testing.assert_close(record.value[:, 1], 1 / torch.tensor([1.0, 2.0, 5.0], dtype=D))
    assert not hodiff.solve(A, torch.zeros(3, dtype=D), start=torch.ones(3, dtype=D), method=method).value.any()
