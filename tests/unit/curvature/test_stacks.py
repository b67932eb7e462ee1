"""Stacks of matrices, one for each sample: products for all at once, and a result for each."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.curvature import _density, _solve
from tests.support.operators import D, draw
from tests.support.properties import agree

BATCHES = [(3,), (2, 3), (0,), (1,)]
METHODS = ["cg", "minres", "gmres"]


def matrices(batch: tuple[int, ...], size: int, kind: str = "definite") -> Tensor:
    """Of conditions that differ from sample to sample, and of sizes that differ much."""
    A = draw(*batch, size, size)
    q, _ = torch.linalg.qr(A)
    values = torch.linspace(1, 20, size, dtype=D) * torch.rand(*batch, 1, dtype=D).add(0.1)
    if kind == "indefinite":
        values = values * torch.tensor([1.0, -1.0], dtype=D).repeat(size)[:size]
    A = q @ (values.unsqueeze(-1) * q.mT)
    A = (A + A.mT) / 2 if kind != "any" else A + 0.1 * torch.triu(draw(*batch, size, size, seed=2), 1)
    return (
        A * torch.logspace(-6, 6, max(1, A[..., 0, 0].numel()), dtype=D).reshape(*batch, 1, 1)[..., :1, :1]
        if A.numel()
        else A
    )


KINDS = {"cg": "definite", "minres": "indefinite", "gmres": "any"}


def each(A: Tensor, B: Tensor) -> Tensor:
    """A⁻¹ b of each, for vectors in front."""
    return torch.linalg.solve(A, B.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("method", METHODS)
def test_solutions_of_each(method: str, batch: tuple[int, ...], dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "DENSE", dense)
    A = matrices(batch, 12, KINDS[method])
    operator = hodiff.MatrixOperator(A, batch_ndim=len(batch))
    assert operator.shape == A.shape and operator.symmetric == (method != "gmres" or not A.numel())
    b, B, C = draw(*batch, 12), draw(5, *batch, 12), draw(*batch, 12, 5)
    options = {"method": method, "rtol": 1e-12}
    for given, x, shape in (
        (b, each(A, b), batch),
        (B, each(A, B), (5, *batch)),
        (C, torch.linalg.solve(A, C), (*batch, 5)),
    ):
        found = hodiff.solve(operator, given, **options)
        scale = x.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300) if x.numel() else 1.0
        agree(found.value / scale, x / scale, 1e-9)
        assert found.converged.shape == found.residual.shape == shape and bool(found.converged.all())
        assert found.status == "converged" and repr(found)


def test_a_sample_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "DENSE", 0)
    A = torch.stack([torch.eye(6, dtype=D), torch.diag(torch.arange(1.0, 7.0, dtype=D)), torch.diag(draw(6).sign())])
    b = torch.ones(3, 6, dtype=D)
    with pytest.warns(hodiff.ConvergenceWarning, match="for 1 of 3 systems"):
        found = hodiff.solve(hodiff.MatrixOperator(A, batch_ndim=1), b)
    assert found.converged.tolist() == [True, True, False] and found.status == "negative curvature"
    assert not found.direction[:2].any() and found.direction[2].any()
    agree(found.value[:2], each(A[:2], b[:2]), 1e-7)


def test_samples_that_have_converged_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight takes twenty steps, the others one; products are counted one for all."""
    monkeypatch.setattr(_solve, "DENSE", 0)
    A = torch.eye(20, dtype=D).repeat(2, 4, 1, 1)
    A[1, 2] = torch.diag(torch.arange(1.0, 21.0, dtype=D))
    read: list[tuple[int, ...]] = []
    inner = hodiff.MatrixOperator._times_matrix
    monkeypatch.setattr(
        hodiff.MatrixOperator, "_times_matrix", lambda A, m, rows: (read.append(m.shape), inner(A, m, rows))[1]
    )
    operator, b = hodiff.MatrixOperator(A, batch_ndim=2), draw(3, 2, 4, 20)
    found = hodiff.solve(operator, b)
    agree(found.value, each(A, b), 1e-6)
    assert read[0] == read[-1] == (2, 4, 20, 20) and set(read[1:-1]) == {(1, 20, 20)}
    assert found.products == operator.products == 3 * len(read)


@pytest.mark.parametrize("condition", [1.2, 1e4])
@pytest.mark.parametrize(("method", "size"), [("cg", 40), ("minres", 40), ("gmres", 40), ("cg", 16)])
def test_matrices_of_functions_come_after_a_few_steps(
    method: Any, size: int, condition: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are large, or their products do not fit into one pass."""
    if size < 40:
        monkeypatch.setattr(hodiff.HessianOperator, "_chunk", lambda H, count: 3)
    scale = torch.linspace(1, condition, size, dtype=D)
    H = hodiff.HessianOperator(lambda x: (0.5 * scale * x * x).sum(-1), draw(3, size), batch_ndim=1)
    b = draw(3, size, seed=1)
    found = hodiff.solve(H, b, method=method)
    agree(found.value, b / scale, 1e-7)
    assert bool(found.converged.all())
    assert found.products <= 8 if condition < 2 else size <= found.products <= size + 10


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_singular_matrices_among_others_do_not_lie(dtype: torch.dtype) -> None:
    A = matrices((4,), 6).to(dtype)
    A[1] = 0
    A[2, :, 0] = A[2, 0] = 0
    b = torch.ones(4, 6, dtype=dtype)
    for method in METHODS:
        for given in (b, (A @ b.unsqueeze(-1)).squeeze(-1)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = hodiff.solve(hodiff.MatrixOperator(A, batch_ndim=1), given, method=method)
            true = (given - (A @ found.value.unsqueeze(-1)).squeeze(-1)).norm(dim=1) / given.norm(dim=1).clamp_min(
                1e-30
            )
            assert bool((true[found.converged] <= (2e-8 if dtype == D else 2e-4)).all())
            assert bool(found.converged[[0, 3]].all()) and bool(found.converged.all()) == (not said)
        assert found.converged.tolist() == [True] * 4  # the last is in the range


def test_a_singular_matrix_keeps_no_other_from_its_solution_by_factors() -> None:
    """Steps would find all of them from zeros, too: many products later."""
    A, b = matrices((4,), 6), torch.ones(4, 6, dtype=D)
    A[1] = 0
    stack = hodiff.MatrixOperator(A, batch_ndim=1)
    found = _solve._dense_solutions(stack, 0.0, _solve.Sides(stack, b), False)
    assert found is not None and not found[1].any()
    agree(found[[0, 2, 3]], each(A[[0, 2, 3]], b[[0, 2, 3]]), 1e-12)


def samples(batch: tuple[int, ...]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    return (lambda x: (x**4).sum(-1) + x.sin().sum(-1).square() + 3 * x.square().sum(-1)), draw(*batch, 5)


@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
@pytest.mark.parametrize("batch", BATCHES)
def test_hessians_of_each(batch: tuple[int, ...], dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "DENSE", dense)
    (f, x), k = samples(batch), len(batch)
    H, K = hodiff.HessianOperator(f, x, batch_ndim=k), hodiff.hessian(f, x, batch_ndim=k)
    b, B = draw(*batch, 5, seed=1), draw(4, *batch, 5, seed=2)
    agree(H.dense(), K, 1e-12)
    agree(H @ b, (K @ b.unsqueeze(-1)).squeeze(-1), 1e-12)
    agree(H.value, f(x))
    agree(H.gradient, hodiff.grad(f, x, batch_ndim=k))
    shifted = K + 20 * torch.eye(5, dtype=D)
    for given in (b, B):
        found = hodiff.solve(H + 20.0, given, rtol=1e-12)
        agree(found.value, each(shifted, given), 1e-10)
    agree(hodiff.trace(H).value, K.diagonal(dim1=-2, dim2=-1).sum(-1), 1e-12)
    agree(hodiff.diagonal(H, method="exact").value, K.diagonal(dim1=-2, dim2=-1).contiguous(), 1e-12)
    agree(hodiff.logdet(H, shift=20.0).value, torch.logdet(shifted), 1e-12)
    for record in (hodiff.trace(H), hodiff.trace(H, samples=2), hodiff.logdet(H, shift=20.0), hodiff.diagonal(H)):
        assert repr(record)


@pytest.mark.parametrize("batch", BATCHES)
def test_jacobians_of_each(batch: tuple[int, ...]) -> None:
    W, x, k = draw(5, 5) / 4, draw(*batch, 5, seed=1), len(batch)
    f = lambda x: x + torch.tanh(x @ W)
    J, K = hodiff.JacobianOperator(f, x, batch_ndim=k), hodiff.jacobian(f, x, batch_ndim=k)
    b, B = draw(*batch, 5, seed=2), draw(3, *batch, 5, seed=3)
    agree(J.dense(), K, 1e-12)
    agree(J.T @ b, (K.mT @ b.unsqueeze(-1)).squeeze(-1), 1e-12)
    for given in (b, B):
        agree(hodiff.solve(J, given, method="gmres", rtol=1e-12).value, each(K, given), 1e-10)
        agree(
            hodiff.solve(J.T, given, method="gmres", iterations=6, damping=1.0).value,
            each(K.mT + torch.eye(5, dtype=D), given),
            1e-8,
        )
    agree(hodiff.trace(J).value, K.diagonal(dim1=-2, dim2=-1).sum(-1), 1e-10)
    agree(hodiff.logdet(J.T @ J).value, torch.logdet(K.mT @ K), 1e-10)


def test_points_of_several_tensors_and_dimensions() -> None:
    point = {"a": draw(3, 2), "b": draw(3, 2, 2, seed=1)}
    f = lambda p: (p["a"].pow(4).sum(-1) + p["b"].flatten(1).pow(4).sum(-1) + p["a"].prod(-1) * p["b"].sum((1, 2))) / 4
    H = hodiff.HessianOperator(f, point, batch_ndim=1) + 9.0
    one = lambda p: f({name: part[None] for name, part in p.items()})
    rows = [{name: part[i] for name, part in point.items()} for i in range(3)]
    K = torch.stack([hodiff.hessian(one, row, matrix=True) for row in rows]) + 9 * torch.eye(6, dtype=D)
    b = {"a": draw(3, 2, seed=3), "b": draw(3, 2, 2, seed=4)}
    flat = torch.cat([b["a"], b["b"].flatten(1)], 1)
    agree(H.dense(), K, 1e-12)
    agree(H @ flat, (K @ flat.unsqueeze(-1)).squeeze(-1), 1e-12)
    found = hodiff.solve(H, b, rtol=1e-12).value
    assert list(found) == ["a", "b"] and found["b"].shape == (3, 2, 2)
    agree(H.flatten(found), each(K, flat), 1e-10)
    agree(hodiff.solve(H, flat, rtol=1e-12).value, each(K, flat), 1e-10)
    many = {name: torch.stack([part, 2 * part]) for name, part in b.items()}
    found = hodiff.solve(H, many, rtol=1e-12)
    agree(found.value["a"][1], 2 * H.unflatten(each(K, flat))["a"], 1e-9)
    assert found.converged.shape == (2, 3)
    agree(hodiff.diagonal(H).value["b"].flatten(1), K.diagonal(dim1=1, dim2=2)[:, 2:].contiguous(), 1e-10)


def test_a_preconditioner_and_a_start_for_each() -> None:
    A = matrices((4,), 30)
    operator, b = hodiff.MatrixOperator(A, batch_ndim=1), draw(4, 30)
    M = hodiff.MatrixOperator(1 / A.diagonal(dim1=1, dim2=2), batch_ndim=1)
    found = hodiff.solve(operator, b, preconditioner=M)
    again = hodiff.solve(operator, b, preconditioner=M, start=found.value, rtol=1e-7)
    assert bool(found.converged.all()) and bool(again.converged.all()) and again.products == 1
    with pytest.raises(hodiff.InputError, match=r"preconditioner has shape \(30, 30\)"):
        hodiff.solve(operator, b, preconditioner=hodiff.MatrixOperator(A[0]))


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
@pytest.mark.parametrize("method", METHODS)
def test_derivatives_of_solutions_of_each(method: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "DENSE", dense)
    A = (torch.eye(3, dtype=D) * 4 + 0.5 * draw(2, 3, 3)).requires_grad_()
    b = draw(2, 2, 3, seed=1).requires_grad_()

    def loss(A: Tensor, b: Tensor) -> Tensor:
        A = A if method == "gmres" else (A + A.mT) / 2
        record = hodiff.solve(
            hodiff.MatrixOperator(A, batch_ndim=1), b, method=method, create_graph=True, rtol=1e-13, damping=0.2
        )
        return record.value.sin().sum()

    assert torch.autograd.gradcheck(loss, (A, b), eps=1e-6, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (A, b), eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("form", ["trace", "diagonal", "logdet"])
def test_derivatives_of_what_is_known_of_each(form: str) -> None:
    A = (torch.eye(3, dtype=D) * 4 + 0.5 * draw(2, 3, 3)).requires_grad_()
    estimate = {"trace": hodiff.trace, "diagonal": hodiff.diagonal, "logdet": hodiff.logdet}[form]

    def loss(A: Tensor) -> Tensor:
        operator = hodiff.MatrixOperator((A @ A.mT + A + A.mT) / 2, batch_ndim=1)
        return estimate(operator, create_graph=True).value.sin().sum()

    assert torch.autograd.gradcheck(loss, (A,), eps=1e-6, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (A,), eps=1e-6, atol=1e-5, fast_mode=True)


def test_newton_steps_of_samples_are_differentiated_by_the_function() -> None:
    x, w = draw(4, 3), torch.tensor(2.0, dtype=D, requires_grad=True)

    def step(w: Tensor) -> Tensor:
        f = lambda x: w * (x**4).sum(-1) + 5 * x.square().sum(-1)
        H = hodiff.HessianOperator(f, x, batch_ndim=1)
        return hodiff.solve(H, 4 * w * x**3 + 10 * x, create_graph=True, rtol=1e-13).value.sum()

    assert torch.autograd.gradcheck(step, (w,), eps=1e-6, atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


def stack(*batch: int) -> hodiff.MatrixOperator:
    return hodiff.MatrixOperator(matrices(batch, 4), batch_ndim=len(batch))


REFUSED: dict[str, Callable[[], object]] = {
    r"where: got a module, whose parameters are not samples": lambda: hodiff.HessianOperator(
        lambda m: m(draw(1, 2)).sum(), nn.Linear(2, 1).double(), batch_ndim=1
    ),
    r"batch_ndim=1 cannot be combined with data=": lambda: hodiff.JacobianOperator(
        lambda x, b: x, draw(2, 3), data=[1], batch_ndim=1
    ),
    r"x has shape \(3,\), too few dimensions": lambda: hodiff.HessianOperator(lambda x: x, draw(3), batch_ndim=2),
    r"f returned shape \(\).*expected one element per sample": lambda: hodiff.HessianOperator(
        lambda x: x.sum(), draw(3, 2), batch_ndim=1
    ).dense(),
    r"predict returned shape \(2, 3\)": lambda: hodiff.JacobianOperator(lambda x: x.T, draw(3, 2), batch_ndim=1).shape,
    r"eigsh takes one matrix at a time, but the operator is a stack of \(3,\)": lambda: hodiff.eigsh(stack(3)),
    r"spectral_density takes one matrix": lambda: hodiff.spectral_density(stack(3)),
    r"nystrom takes one matrix": lambda: hodiff.nystrom(stack(3), 2, 0.1),
    r"to_scipy takes one matrix at a time": lambda: stack(3).to_scipy(),
    r"method='hutch\+\+' takes one matrix at a time.*'hutchinson'": lambda: hodiff.trace(stack(3), method="hutch++"),
    r"b has shape \(4, 4, 4\), which could be 4 stacked vectors or columns": lambda: hodiff.solve(
        stack(4), draw(4, 4, 4)
    ),
    r"b has shape \(4,\), expected \(3, 4\) for one vector": lambda: hodiff.solve(stack(3), draw(4)),
    r"A \+ B: got stacks of \(3,\) and \(\) matrices": lambda: stack(3) + hodiff.MatrixOperator(draw(4, 4)),
    r"A: got .* each with 2 leading dimensions": lambda: hodiff.MatrixOperator(draw(4, 4), batch_ndim=2),
    r"logdet: the operator has an eigenvalue": lambda: hodiff.logdet(
        hodiff.MatrixOperator(torch.tensor([[1.0, 2.0], [1.0, -1.0]]), batch_ndim=1)
    ),
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_refused(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        REFUSED[pattern]()


def test_the_ways_out_of_two_readings() -> None:
    A, V = matrices((4,), 4), draw(4, 4, 4)
    operator = hodiff.MatrixOperator(A, batch_ndim=1)
    rows, columns = hodiff.solve(operator, [V]).value, hodiff.solve(operator, [V.movedim(-1, 0)]).value
    agree(rows[0], each(A, V), 1e-6)
    agree(columns[0].movedim(0, -1), torch.linalg.solve(A, V), 1e-6)


def test_samples_that_mix_are_warned_of() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    with pytest.warns(hodiff.HodiffWarning, match="BatchNorm in training mode"):
        hodiff.JacobianOperator(lambda x: net(x), draw(4, 3), batch_ndim=1).dense()


def test_an_error_of_each() -> None:
    """Where as many samples are taken as there is noise, the errors are those of each matrix alone."""
    A = matrices((3,), 40)
    operator, Z = hodiff.MatrixOperator(A, batch_ndim=1), torch.randn(6, 3, 40, dtype=D).sign()
    with pytest.warns(hodiff.ConvergenceWarning, match="of the value, more than rtol"):
        found = hodiff.trace(operator, vectors=Z, rtol=1e-2)
    for i in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hodiff.ConvergenceWarning)
            alone = hodiff.trace(hodiff.MatrixOperator(A[i]), vectors=Z[:, i].T, rtol=1e-2)
        agree(found.value[i], alone.value, 1e-9)
        agree(found.stderr[i], alone.stderr, 1e-9)
        assert bool(found.converged[i]) == alone.converged


# --- beyond what is dense: random vectors and Krylov spaces of each ---------------------------------------------------


def large(count: int, size: int, seed: int = 0) -> Tensor:
    """Definite, of sizes that differ much."""
    A = draw(count, size, size, seed=seed)
    A = A @ A.mT / size + torch.eye(size, dtype=D)
    return A * torch.logspace(-6, 6, count, dtype=D)[:, None, None]


@pytest.mark.parametrize("batch", [(3,), (2, 2)])
def test_log_determinants_by_vectors_are_those_of_each_alone(batch: tuple[int, ...]) -> None:
    A = large(batch[0] * batch[-1] if len(batch) > 1 else 3, 60).reshape(*batch, 60, 60)
    operator, Z = hodiff.MatrixOperator(A, batch_ndim=len(batch)), draw(4, *batch, 60, seed=3).sign()
    found = hodiff.logdet(operator, vectors=Z, steps=12)
    assert found.products == 4 * 12 and found.stderr.shape == found.value.shape == batch
    for place in torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)).tolist():
        at = tuple(place)
        alone = hodiff.logdet(hodiff.MatrixOperator(A[at]), vectors=Z[:, *at].T, steps=12)
        agree(found.value[at], alone.value, 1e-10)
        agree(found.stderr[at], alone.stderr, 1e-6)
    assert bool(((found.value - torch.logdet(A)).abs() < 6 * found.stderr).all())


def test_log_determinants_that_do_not_converge_are_named() -> None:
    A = large(3, 60)
    A[1] = torch.eye(60, dtype=D) + 1e-3 * A[1] / A[1].norm()
    operator = hodiff.MatrixOperator(A, batch_ndim=1)
    with pytest.warns(hodiff.ConvergenceWarning, match=r"more than rtol=1e-06 of the value for . of 3 samples"):
        found = hodiff.logdet(operator, vectors=draw(8, 3, 60).sign(), steps=12, rtol=1e-6)
    assert found.converged.shape == (3,) and not bool(found.converged[[0, 2]].any())
    A[2, 0, 0] = -1e9
    with pytest.raises(hodiff.InputError, match="logdet: the operator has an eigenvalue of about -1e"):
        hodiff.logdet(operator, samples=2, steps=20)


@pytest.mark.parametrize("processes", [2, 12], ids=["one by one", "batched"])
def test_processes_of_each_stay_orthogonal(processes: int) -> None:
    """Isolated eigenvalues converge at once, and would be found again and again."""
    q, _ = torch.linalg.qr(draw(3, 80, 80))
    values = torch.cat([torch.logspace(-6, 1, 77, dtype=D), torch.tensor([3e2, 4e3, 5e4], dtype=D)])
    A = q @ (values[:, None] * q.mT) * torch.tensor([1.0, 1e-9, 1e9], dtype=D)[:, None, None]
    operator = hodiff.MatrixOperator((A + A.mT) / 2, batch_ndim=1)
    diagonal, beside, _, unit, _ = _density.lanczos(operator, draw(processes, 3, 80, seed=1), 60, "test")
    T = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    top = torch.linalg.eigvalsh(T)[:, -4:] * unit[:, None]
    sizes = torch.tensor([1.0, 1e-9, 1e9], dtype=D).repeat(processes)[:, None]
    agree(top[:, 1:] / sizes, values[-3:].expand(3 * processes, 3), 1e-9)
    assert bool((top[:, 0] < 11 * sizes[:, 0]).all())


def test_the_gradient_of_log_determinants_by_vectors() -> None:
    """The mean of z' A⁻¹ dA z over the vectors of each."""
    A, Z = large(3, 30), draw(5, 3, 30, seed=2).sign()
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    operator = hodiff.MatrixOperator(A + scale[:, None, None].square() * torch.eye(30, dtype=D), batch_ndim=1)
    record = hodiff.logdet(operator, vectors=Z, steps=20, create_graph=True)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=D)
    (g,) = torch.autograd.grad((record.value * weights).sum(), scale)
    inverse = torch.linalg.inv(A + scale.detach()[:, None, None].square() * torch.eye(30, dtype=D))
    agree(g, weights * 2 * scale.detach() * torch.einsum("kbi,bij,kbj->b", Z, inverse, Z) / 5, 1e-6)
