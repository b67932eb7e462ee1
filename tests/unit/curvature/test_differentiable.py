"""Traces, v'Hv, eigenvalues, solutions and determinants that one trains with: gradients against central differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from tests.support.operators import LABELS, D, X, draw, split, sum_of_cross_entropy
from tests.support.properties import agree

V = draw(39, 3, seed=8)


def network(norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.LayerNorm(4) if norm else nn.Identity()
    model = nn.Sequential(nn.Linear(3, 4), middle, nn.Tanh(), nn.Linear(4, 3)).double()
    if norm:  # generic affine parameters: with ones and zeros a wrong third derivative may be right by chance
        with torch.no_grad():
            middle.weight.copy_(draw(4, seed=5) + 1)
            middle.bias.copy_(draw(4, seed=6))
    return model


def operator(model: nn.Module) -> hodiff.HessianOperator:
    return hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS))


def gradient(loss: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(loss(model), list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in grads])


def differences(loss: Callable[[nn.Module], Tensor], model: nn.Module, along: Tensor, step: float = 1e-4) -> float:
    """The derivative of a detached loss along a direction of all parameters."""
    found = []
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for sign in (1, -1, 2, -2):
        with torch.no_grad():
            nn.utils.vector_to_parameters(start + sign * step * along, model.parameters())
        found.append(float(loss(model)))
    with torch.no_grad():
        nn.utils.vector_to_parameters(start, model.parameters())
    return (8 * (found[0] - found[1]) - (found[2] - found[3])) / (12 * step)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


LOSSES: dict[str, Callable[[nn.Module, bool], Tensor]] = {
    "trace of three vectors": lambda m, graph: hodiff.trace(
        operator(m), vectors=draw(size(m), 3, seed=8), create_graph=graph
    ).value,
    "v'Hv": lambda m, graph: hodiff.trace(operator(m), vectors=draw(size(m), seed=8), create_graph=graph).value,
    "exact trace": lambda m, graph: hodiff.trace(operator(m), create_graph=graph).value,
    "largest eigenvalue": lambda m, graph: hodiff.eigsh(operator(m), 1, create_graph=graph).value[0],
    "smallest eigenvalues": lambda m, graph: (
        hodiff.eigsh(operator(m), 2, which="smallest", create_graph=graph).value * torch.tensor([1.0, -3.0])
    ).sum(),
    "of a block": lambda m, graph: hodiff.eigsh(operator(m).block("3"), 1, create_graph=graph).value[0],
    "of a combination": lambda m, graph: hodiff.trace(
        -2 * operator(m) + 0.5 + hodiff.HessianOperator(lambda q: (q[0].weight ** 4).sum(), m),
        vectors=draw(size(m), 2, seed=8), create_graph=graph,
    ).value,
    "solution": lambda m, graph: hodiff.solve(
        operator(m), draw(size(m), seed=8), damping=30.0, rtol=1e-12, create_graph=graph
    ).value @ draw(size(m), seed=9),
    "solution of an indefinite system": lambda m, graph: hodiff.solve(
        operator(m) + 0.3, draw(size(m), seed=8), method="minres", rtol=1e-11, create_graph=graph
    ).value @ draw(size(m), seed=9),
    "log-determinant": lambda m, graph: hodiff.logdet(operator(m), shift=30.0, create_graph=graph).value,
    "diagonal": lambda m, graph: torch.cat([
        part.reshape(-1) for part in hodiff.diagonal(
            operator(m), vectors=draw(size(m), 3, seed=8), create_graph=graph
        ).value.values()
    ]) @ draw(size(m), seed=9),
}  # fmt: skip


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "through LayerNorm"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_against_differences(name: str, norm: bool) -> None:
    model, loss = network(norm), LOSSES[name]
    attached, plain = loss(model, True), loss(model, False)
    assert attached.requires_grad and not plain.requires_grad
    agree(attached.detach(), plain, 1e-6)
    found = gradient(lambda m: loss(m, True), model)
    for seed in range(2):
        along = draw(size(model), seed=20 + seed)
        assert float(found @ along) == pytest.approx(
            differences(lambda m: loss(m, False), model, along), rel=2e-5, abs=1e-6
        )


def test_the_record_beside_a_graph() -> None:
    model = network(False)
    H = operator(model)
    found = hodiff.trace(H, vectors=draw(size(model), 3), create_graph=True)
    plain = hodiff.trace(H, vectors=draw(size(model), 3))
    agree(found.stderr, plain.stderr, 1e-9)
    assert found.converged is None and found.products == 3 and not found.stderr.requires_grad
    pairs = hodiff.eigsh(H, 2, create_graph=True)
    same = hodiff.eigsh(H, 2)
    agree(pairs.value.detach(), same.value, 1e-9)
    assert pairs.vectors.shape == (size(model), 2) and pairs.residual.shape == (2,) and pairs.converged
    assert all(p.grad is None for p in model.parameters())


def test_in_closed_form() -> None:
    """H = diag(12 x²): the trace's gradient is 24 x, the largest eigenvalue's 24 x at its entry."""
    x = torch.tensor([1.0, -3.0, 2.0], dtype=D, requires_grad=True)
    c = torch.tensor(2.0, dtype=D, requires_grad=True)
    H = hodiff.HessianOperator(lambda x: c * (x**4).sum(), x)
    value = hodiff.trace(H, samples=5, create_graph=True).value
    found = torch.autograd.grad(value, [x, c])
    agree(found[0], 48 * x.detach(), 1e-10)
    agree(found[1], torch.tensor(12.0 * 14, dtype=D), 1e-10)
    (top,) = torch.autograd.grad(hodiff.eigsh(H, 1, create_graph=True).value[0], [x])
    agree(top, torch.tensor([0.0, -144.0, 0.0], dtype=D), 1e-7)


def mixed(a: Tensor, s: Tensor) -> Tensor:
    """A symmetric matrix whose eigenvalues are apart."""
    root = torch.outer(a, s) + torch.diag(a.exp() * torch.arange(1.0, 5, dtype=D))
    return root @ root.T


def quartic(x: Tensor, s: Tensor) -> Tensor:
    return (x * s).cosh().sum() + (x**4).sum() + x.sum() ** 3


def squared(J: Any) -> Any:
    return J.T @ J


EIGENVALUES: dict[str, tuple[Callable[..., hodiff.LinearOperator], Callable[..., Tensor]]] = {
    "a matrix": (lambda a, s: hodiff.MatrixOperator(mixed(a, s)), mixed),
    "point, closure, a diagonal": (
        lambda a, s: 2 * hodiff.HessianOperator(quartic, a, args=(s,)) + hodiff.MatrixOperator(s**3),
        lambda a, s: 2 * hodiff.hessian(quartic, a, args=(s,), create_graph=True) + torch.diag(s**3),
    ),
    "J'J": (
        lambda a, s: squared(hodiff.JacobianOperator(lambda z: mapped(z, s), a)) + 0.5,
        lambda a, s: squared(hodiff.jacobian(mapped, a, args=(s,), create_graph=True)) + 0.5 * torch.eye(4, dtype=D),
    ),
}


@pytest.mark.parametrize(("k", "which"), [(1, "largest"), (2, "smallest"), (4, "largest")])
@pytest.mark.parametrize("name", EIGENVALUES)
def test_eigenvalues_twice(name: str, k: int, which: Any) -> None:
    """Against the dense matrix, and differences of first derivatives; any function of these has the right one."""
    ours, dense = EIGENVALUES[name]
    point = [draw(4, seed=1).requires_grad_(), (draw(4, seed=2).abs() + 0.5).requires_grad_()]
    w, v = draw(k, seed=3), draw(8, seed=4)

    def loss(a: Tensor, s: Tensor) -> Tensor:
        values = hodiff.eigsh(ours(a, s), k, which=which, rtol=1e-12, create_graph=True).value
        return values.sin() @ w

    def expected(a: Tensor, s: Tensor) -> Tensor:
        values = torch.linalg.eigvalsh(dense(a, s))
        return (values[:k] if which == "smallest" else values.flip(0)[:k]).sin() @ w

    found = []
    for f in (loss, expected):
        first = torch.cat(torch.autograd.grad(f(*point), point, create_graph=True))
        found.append([first.detach(), *torch.autograd.grad(first.sin() @ v + f(*point), point)])
    agree(*found, 1e-8)
    assert torch.autograd.gradgradcheck(loss, point, atol=1e-5, fast_mode=True)


def test_second_derivatives_of_eigenvalues_inside_other_calls() -> None:
    x = torch.tensor([0.5, -0.3, 1.1], dtype=D)
    f = lambda z: (z**4).sum() + z.prod()
    top = lambda z: hodiff.eigsh(hodiff.HessianOperator(f, z), 1).value.sum()
    wanted = lambda z: torch.linalg.eigvalsh(hodiff.hessian(f, z, create_graph=True))[-1]
    agree(hodiff.hessian(top, x), hodiff.hessian(wanted, x), 1e-8)
    agree(hodiff.hvp(top, x, torch.ones_like(x)), hodiff.hvp(wanted, x, torch.ones_like(x)), 1e-8)
    third = lambda z: hodiff.hvp(top, z, torch.ones_like(z)).sum()
    with pytest.raises(hodiff.GraphError, match=r"third derivative of an eigenvalue .*torch\.linalg\.eigvalsh"):
        hodiff.grad(third, x)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "through LayerNorm"])
def test_second_derivatives_of_eigenvalues_by_parameters(norm: bool) -> None:
    model = network(norm)

    def slope(model: nn.Module) -> Tensor:
        value = hodiff.eigsh(operator(model), 2, rtol=1e-11, create_graph=True).value @ torch.tensor([1.0, -2.0]).to(D)
        first = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return torch.cat([part.reshape(-1) for part in first]) @ draw(size(model), seed=31)

    def detached(model: nn.Module) -> Tensor:
        with torch.enable_grad():
            return slope(model).detach()

    found, along = gradient(slope, model), draw(size(model), seed=32)
    assert float(found @ along) == pytest.approx(differences(detached, model, along), rel=2e-5)


def test_second_derivatives_of_eigenvalues_take_products_alone() -> None:
    """Of a matrix of 200 columns, each system in fewer products than it has; a first derivative takes none."""
    a = torch.linspace(1, 3, 200, dtype=D).square().requires_grad_()
    u = torch.linalg.qr(draw(200, 200)).Q[0]
    H = hodiff.MatrixOperator(a) + hodiff.MatrixOperator(0.5 * torch.outer(u, u), symmetric=True)
    value = hodiff.eigsh(H, 2, rtol=1e-12, create_graph=True).value.sum()
    spent = H.products
    (first,) = torch.autograd.grad(value, a, create_graph=True)
    assert H.products == spent
    (second,) = torch.autograd.grad(first @ u, a)
    assert spent < H.products <= spent + 400
    dense = lambda a: torch.linalg.eigvalsh(torch.diag(a) + 0.5 * torch.outer(u, u))[-2:].sum()
    agree(second, hodiff.hvp(dense, a, u), 1e-8)


def test_inside_the_function_of_another_call_it_is_differentiated_by_default() -> None:
    x = torch.tensor([1.0, 3.0], dtype=D)
    laplacian = lambda x: hodiff.trace(hodiff.HessianOperator(lambda y: (y**4).sum(), x)).value
    agree(hodiff.grad(laplacian, x), 24 * x, 1e-10)
    top = lambda x: hodiff.eigsh(hodiff.HessianOperator(lambda y: (y**4).sum(), x), 1).value[0]
    agree(hodiff.grad(top, x), torch.tensor([0.0, 72.0], dtype=D), 1e-7)


def test_equal_eigenvalues_are_refused_with_their_gap() -> None:
    x = torch.ones(3, dtype=D, requires_grad=True)
    H = hodiff.HessianOperator(lambda x: (x**4).sum(), x)
    with pytest.raises(
        hodiff.GraphError, match=r"eigenvalues 1 and 2 are 12 and 12, .* apart\. Equal eigenvalues have no"
    ):
        hodiff.eigsh(H, 1, create_graph=True)
    assert not hodiff.eigsh(H, 1).value.requires_grad
    with pytest.raises(hodiff.GraphError, match="eigenvalues 1 and 2 are 0 and 0, 0 apart"):
        hodiff.eigsh(hodiff.MatrixOperator(torch.zeros(3, 3, dtype=D, requires_grad=True)), 1, create_graph=True)
    near = torch.tensor([1.0, 1.0 + 1e-9, 3.0], dtype=D, requires_grad=True)
    close = hodiff.HessianOperator(lambda x: (x**4).sum(), near)
    assert hodiff.eigsh(close, 1, create_graph=True).value.requires_grad
    with pytest.raises(hodiff.GraphError, match="eigenvalues 2 and 3 are 12"):
        hodiff.eigsh(close, 2, create_graph=True)
    assert hodiff.eigsh(hodiff.HessianOperator(lambda x: (x**4).sum(), x[:1]), 1, create_graph=True).value.requires_grad


def test_a_model_learns_a_flat_minimum() -> None:
    model = network(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sharpness = []
    for step in range(15):
        optimizer.zero_grad()
        top = hodiff.eigsh(operator(model), 1, create_graph=True, generator=torch.Generator().manual_seed(step))
        sharpness.append(float(top.value.detach()))
        (F.cross_entropy(model(X), LABELS) + top.value.sum()).backward()
        optimizer.step()
    assert sharpness[-1] < 0.8 * sharpness[0]


def test_an_operator_of_another_point_is_refused() -> None:
    model = network(False)
    H = operator(model)
    H @ draw(size(model))
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(hodiff.GraphError, match="parameters have changed"):
        hodiff.trace(H, samples=2, create_graph=True)
    assert hodiff.trace(H.refresh(), samples=2, create_graph=True).value.requires_grad
    H.close()
    with pytest.raises(hodiff.GraphError, match="closed"):
        hodiff.trace(H, samples=2, create_graph=True)


def test_a_solution_keeps_the_matrix_that_it_is_of() -> None:
    """Its backward pass solves with that also once the operator is closed."""
    x = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    b, expected = torch.ones(3, dtype=D, requires_grad=True), 1 / (12 * x.detach() ** 2)
    H = hodiff.HessianOperator(lambda x: (x**4).sum(), x)
    found = hodiff.solve(H, b, rtol=1e-12, create_graph=True).value.sum()
    H.close()
    agree(torch.autograd.grad(found, b)[0], expected)


BAD = {
    "create_graph: products of a NystromOperator cannot": lambda H: hodiff.trace(
        hodiff.nystrom(hodiff.MatrixOperator(torch.ones(3)), 2, 1.0), create_graph=True
    ),
    "a differentiable diagonal takes no rtol": lambda H: hodiff.diagonal(H, samples=3, rtol=0.1, create_graph=True),
    "create_graph needs method='hutchinson', without": lambda H: hodiff.trace(H, method="hutch++", create_graph=True),
    "without blocks= and rtol=": lambda H: hodiff.trace(H, rtol=0.1, create_graph=True),
    "which='largest' or which='smallest'": lambda H: hodiff.eigsh(H, 1, which="magnitude", create_graph=True),
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_calls(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD[pattern](operator(network(False)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_who_asks_for_a_graph_gets_one_in_any_mode(mode: Callable) -> None:
    model = network(True)
    losses = (
        lambda model: hodiff.trace(2 * operator(model) + 0.5, vectors=V, create_graph=True).value,
        lambda model: hodiff.trace(operator(model).block("3.*"), create_graph=True).value,
        lambda model: hodiff.eigsh(operator(model), 1, create_graph=True, rtol=1e-10).value,
    )
    for loss in losses:
        with mode():
            value = loss(model)
        agree(flat_gradient(value, model), flat_gradient(loss(model), model), 1e-7)


def flat_gradient(value: Tensor, model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in grads])


# --- through linear systems: b, the matrix, the damping, the shift ----------------------------------------------------


HADAMARD = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=D)
for _ in range(2):
    HADAMARD = torch.kron(HADAMARD, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=D))
"""Eight vectors whose mean of z'Az is the trace, for any A."""


def matrix(size: int, seed: int, *, symmetric: bool) -> Tensor:
    root = draw(size, size, seed=seed) / size**0.5
    return (root @ root.T if symmetric else root) + torch.eye(size, dtype=D)


def systems(method: str) -> Callable[..., Tensor]:
    def solution(A: Tensor, b: Tensor, damping: Tensor) -> Tensor:
        A = A if method == "gmres" else (A + A.T) / 2
        return hodiff.solve(
            hodiff.MatrixOperator(A), b, damping=damping, method=method, rtol=1e-13, create_graph=True
        ).value

    return solution


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_a_solution_by_all_that_makes_the_system(method: str, order: int) -> None:
    A = matrix(3, 1, symmetric=method != "gmres").requires_grad_()
    b, damping = draw(3, seed=2).requires_grad_(), torch.tensor(0.25, dtype=D, requires_grad=True)
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(systems(method), (A, b, damping), atol=1e-6)


def curved(c: Tensor, x: Tensor) -> Tensor:
    return (x * c).cosh().sum() + x.sum() ** 4 * c.square().sum()


def dense(c: Tensor, x: Tensor) -> Tensor:
    """The Hessian of `curved` in closed form."""
    return torch.diag(c**2 * (x * c).cosh()) + 12 * x.sum() ** 2 * c.square().sum() * torch.ones(4, 4, dtype=D)


@pytest.mark.parametrize("form", ["solve", "logdet", "diagonal"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_inside_other_calls_as_often_as_they_take(form: str, order: int) -> None:
    x, b, c = draw(4, seed=3), draw(4, seed=4), draw(4, seed=5).abs() + 0.5

    def ours(c: Tensor) -> Tensor:
        H = hodiff.HessianOperator(lambda x: curved(c, x), x)
        if form == "logdet":
            return hodiff.logdet(H).value
        return (hodiff.solve(H, b, rtol=1e-13) if form == "solve" else hodiff.diagonal(H)).value.square().sum()

    def closed(c: Tensor) -> Tensor:
        H = dense(c, x)
        if form == "logdet":
            return torch.logdet(H)
        return (torch.linalg.solve(H, b) if form == "solve" else H.diagonal()).square().sum()

    calls = {
        1: lambda f: hodiff.grad(f, c),
        2: lambda f: hodiff.hessian(f, c),
        3: lambda f: hodiff.grad(lambda c: hodiff.hessian(f, c).square().sum(), c),
    }
    agree(calls[order](ours), calls[order](closed), 1e-7)


def test_one_derivative_of_a_solution_too_many_names_the_way_out() -> None:
    x, b = torch.tensor([2.0], dtype=D, requires_grad=True), torch.tensor([12.0], dtype=D)
    solved = lambda x: hodiff.solve(hodiff.MatrixOperator(x), b, create_graph=True).value.sum()
    value = solved(x)
    with pytest.raises(hodiff.GraphError, match=r"solve, called at .* Call solve inside the function"):
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    inside = lambda x: hodiff.grad(lambda x: hodiff.hvp(solved, x, torch.ones(1, dtype=D)).sum(), x)
    agree(inside(x.detach()), -6 * b / x.detach() ** 4, 1e-9)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("vectors", [None, HADAMARD], ids=["dense", "by vectors"])
def test_a_log_determinant_by_all_that_makes_it(vectors: Tensor | None, order: int) -> None:
    A, scale = matrix(8, 6, symmetric=True), torch.tensor(1.5, dtype=D, requires_grad=True)
    diagonal, shift = draw(8, seed=7).abs().requires_grad_(), torch.tensor(0.25, dtype=D, requires_grad=True)

    def value(scale: Tensor, diagonal: Tensor, shift: Tensor) -> Tensor:
        operator = hodiff.MatrixOperator(scale * A) + hodiff.MatrixOperator(diagonal)
        return hodiff.logdet(operator, shift=shift, vectors=vectors, create_graph=True).value

    expected = torch.logdet(scale * A + diagonal.diag() + shift * torch.eye(8, dtype=D))
    agree(value(scale, diagonal, shift).detach(), expected.detach(), 1e-9)
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(value, (scale, diagonal, shift), atol=1e-6)


# --- a matrix that is symmetric at its values, as one that begins as the identity, and a free argument all the same ---


def turned(W: Tensor) -> hodiff.LinearOperator:
    return hodiff.MatrixOperator(W).T


OF_TURNED: dict[str, tuple[Callable[..., hodiff.LinearOperator], Callable[..., Tensor]]] = {
    "W'": (turned, lambda W: W.T),
    "W'W": (lambda W: turned(W) @ hodiff.MatrixOperator(W), lambda W: W.T @ W),
    "(WW)'": (lambda W: (turned(W).T @ turned(W).T).T, lambda W: W.T @ W.T),
    "(2W + d)'": (
        lambda W: (2 * hodiff.MatrixOperator(W) + hodiff.MatrixOperator(draw(3, seed=1).abs())).T,
        lambda W: 2 * W.T + torch.diag(draw(3, seed=1).abs()),
    ),
}


@pytest.mark.parametrize("start", [torch.eye(3, dtype=D), matrix(3, 2, symmetric=True)], ids=["the identity", "any"])
@pytest.mark.parametrize("name", OF_TURNED)
def test_transposes_of_a_matrix_that_is_symmetric_at_its_values(name: str, start: Tensor) -> None:
    """They were the matrix itself, and the derivative that of the transpose."""
    ours, dense = OF_TURNED[name]
    b, v = draw(3, seed=3), draw(3, 3, seed=4)
    loss = lambda W: hodiff.solve(ours(W), b, method="gmres", rtol=1e-13).value.sin().sum()
    expected = lambda W: torch.linalg.solve(dense(W), b).sin().sum()
    agree(hodiff.grad(loss, start), hodiff.grad(expected, start), 1e-9)
    agree(hodiff.hvp(loss, start, v), hodiff.hvp(expected, start, v), 1e-8)
    assert ours(start).symmetric == ours(start.clone().requires_grad_()).symmetric
    assert ours(start).T.T.symmetric == ours(start).symmetric


OF_HALVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "eigsh": (
        lambda W: hodiff.eigsh(hodiff.MatrixOperator(W), 2, rtol=1e-12).value.sin().sum(),
        lambda W: torch.linalg.eigvalsh((W + W.T) / 2)[-2:].sin().sum(),
    ),
    "logdet": (
        lambda W: hodiff.logdet(hodiff.MatrixOperator(W), vectors=HADAMARD).value.sin(),
        lambda W: torch.logdet((W + W.T) / 2).sin(),
    ),
    "of W + W'": (
        lambda W: hodiff.logdet(hodiff.MatrixOperator(W) + turned(W), vectors=HADAMARD).value.sin(),
        lambda W: torch.logdet(W + W.T).sin(),
    ),
    "of a stack": (
        lambda W: hodiff.logdet(hodiff.MatrixOperator(W[None], batch_ndim=1), vectors=HADAMARD[:, None]).value.sin(),
        lambda W: torch.logdet((W + W.T) / 2).sin(),
    ),
}


@pytest.mark.parametrize("name", OF_HALVES)
def test_second_derivatives_by_a_matrix_that_is_symmetric_at_its_values(name: str) -> None:
    """They are those of its half sum with its transpose; they had another skew part than the gradient that moves."""
    (ours, dense), W, v = OF_HALVES[name], matrix(8, 5, symmetric=True), draw(8, 8, seed=4)
    agree(hodiff.grad(ours, W), hodiff.grad(dense, W), 1e-9)
    agree(hodiff.hvp(ours, W, v), hodiff.hvp(dense, W, v), 1e-8)


def test_who_says_that_a_matrix_is_symmetric_means_always() -> None:
    told = hodiff.MatrixOperator(torch.eye(2, requires_grad=True), symmetric=True)
    assert told.T is told


def test_the_gradient_of_an_estimated_log_determinant_is_of_the_vectors_that_were_drawn() -> None:
    """The mean of (A⁻¹z)' dA z over them, by a dense inverse."""
    A = matrix(40, 8, symmetric=True)
    scale = torch.ones(40, dtype=D, requires_grad=True)
    operator = hodiff.MatrixOperator(A) + hodiff.MatrixOperator(scale)
    value, plain = (
        hodiff.logdet(
            operator, samples=4, steps=9, generator=torch.Generator().manual_seed(3), create_graph=graph
        ).value
        for graph in (True, False)
    )
    assert torch.equal(value.detach(), plain)
    z = hodiff._core._vectors.draw((4, 40), scale.detach(), "rademacher", torch.Generator().manual_seed(3))
    expected = (torch.linalg.solve(A + torch.eye(40, dtype=D), z.T).T * z).mean(0)
    agree(torch.autograd.grad(value, scale)[0], expected, 1e-7)


@pytest.mark.parametrize("layout", ["one", "stack"])
def test_a_log_determinant_ends_with_the_solutions_that_its_derivative_takes(layout: str) -> None:
    """Ten vectors, in blocks of eight and two; of the fifty steps that each may take, few are."""
    a, Z, shift = torch.linspace(1, 2, 300, dtype=D), draw(10, 2, 300), torch.tensor(0.1, dtype=D, requires_grad=True)
    a = torch.stack([a, a**6]) if layout == "stack" else a
    Z = Z if layout == "stack" else Z[:, 0]
    a.requires_grad_()
    operator = hodiff.MatrixOperator(a, batch_ndim=a.ndim - 1)
    value = hodiff.logdet(operator, vectors=[Z] if layout == "stack" else Z.T, shift=shift, create_graph=True).value
    spent, least = operator.products, 10 * a[..., 0].numel()
    assert spent <= 40 * least
    agree(value.detach(), (Z**2 * (a + shift).log()).mean(0).sum(-1).detach(), 1e-10)
    first = torch.autograd.grad(value.sum(), (a, shift), create_graph=True)
    expected = (Z**2 / (a + shift)).mean(0)
    agree([part.detach() for part in first], [expected.detach(), expected.sum().detach()], 1e-7)
    second = torch.autograd.grad(first[1], a)[0]
    agree(second, -((Z / (a + shift)) ** 2).mean(0).detach(), 1e-6)
    spent = operator.products
    torch.autograd.grad(hodiff.logdet(operator, vectors=[Z], shift=0.1, create_graph=True).value.sum(), a)
    assert operator.products - spent <= 44 * least


def test_the_value_of_a_differentiable_solution_is_that_of_the_detached_one() -> None:
    A = hodiff.MatrixOperator(matrix(5, 9, symmetric=True).requires_grad_())
    for b in (draw(5, seed=1), [1.0, 2.0, 3.0, 4.0, 5.0]):
        record, plain = (hodiff.solve(A, b, create_graph=graph) for graph in (True, False))
        assert (
            torch.equal(record.value, plain.value) and record.value.requires_grad and record.residual == plain.residual
        )
    named = hodiff.HessianOperator(lambda p: (p["a"] ** 4).sum() + p["b"].square().sum(), {"a": draw(2), "b": draw(2)})
    found = hodiff.solve(named + 3, {"a": draw(2).requires_grad_(), "b": draw(2)}, create_graph=True).value
    assert set(found) == {"a", "b"} and found["a"].requires_grad


def test_a_solution_of_so_many_steps_has_a_derivative_of_as_many() -> None:
    A, b = matrix(30, 10, symmetric=True).requires_grad_(), draw(30, seed=1).requires_grad_()
    solution = hodiff.solve(hodiff.MatrixOperator(A), b, iterations=4, create_graph=True)
    g = draw(30, seed=2)
    found = torch.autograd.grad(solution.value @ g, b)[0]
    agree(found, hodiff.solve(hodiff.MatrixOperator(A.detach()), g, iterations=4).value, 1e-12)


def test_a_system_that_fails_in_the_backward_pass_names_the_line_of_the_call() -> None:
    """In 40 products the first right-hand side, an eigenvector, is done; the backward pass has another."""
    A = torch.logspace(0, 12, 60, dtype=D).requires_grad_()
    x = hodiff.solve(hodiff.MatrixOperator(A), torch.eye(60, dtype=D)[0], products=20, create_graph=True).value
    with pytest.warns(
        hodiff.ConvergenceWarning, match=r"solve, called at .*test_differentiable.py:\d+: after .* products"
    ):
        x.sum().backward()


def test_a_changed_operator_is_refused_in_the_backward_pass() -> None:
    model = network(False)
    value = LOSSES["solution"](model, True)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(RuntimeError, match=r"parameters have changed|modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", ["solve", "named", "logdet", "estimated", "diagonal"])
def test_a_graph_that_is_asked_for_is_whole_in_any_mode(form: str, mode: Callable) -> None:
    """By the matrix and by the right-hand side; b without its graph gave the derivative another sign."""
    t = torch.tensor([2.0, 4.0], dtype=D, requires_grad=True)
    A, b = hodiff.MatrixOperator(t * 1), t**2
    named = hodiff.HessianOperator(lambda p: (p["x"].square() * t).sum() / 2, {"x": torch.zeros(2, dtype=D)})
    runs = {
        "solve": lambda: hodiff.solve(A, b, create_graph=True).value,
        "named": lambda: hodiff.solve(named, {"x": b}, create_graph=True).value["x"],
        "logdet": lambda: hodiff.logdet(A, create_graph=True).value,
        "estimated": lambda: hodiff.logdet(A, vectors=torch.ones(2, dtype=D), create_graph=True).value,
        "diagonal": lambda: hodiff.diagonal(A, create_graph=True).value,
    }
    with mode():
        found = runs[form]()
    (gradient,) = torch.autograd.grad(found.sum(), t, retain_graph=True)
    (expected,) = torch.autograd.grad(runs[form]().sum(), t)
    agree(gradient, expected, 1e-9)
    if form in ("solve", "named", "diagonal"):
        agree(gradient, torch.ones(2, dtype=D), 1e-7)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_more_steps_than_a_system_needs_are_no_failure(method: str) -> None:
    for seed in range(20):
        A = hodiff.MatrixOperator(matrix(5, seed, symmetric=True))
        record = hodiff.solve(A, draw(5, seed=seed), method=method, iterations=20)
        assert record.residual < 1e-12 and record.status in ("iterations", "converged")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_log_determinant_in_few_digits(dtype: torch.dtype) -> None:
    A = (2 * torch.eye(3)).to(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(hodiff.logdet(hodiff.MatrixOperator(A), create_graph=True).value, A)
    torch.testing.assert_close(gradient, (torch.eye(3) / 2).to(dtype))


# --- Jacobian and Gauss-Newton operators ------------------------------------------------------------------------------


def mapped(x: Tensor, t: Tensor) -> Tensor:
    return 3 * x + torch.tanh(x @ MIX + t) * x.flip(-1)


MIX = draw(4, 4, seed=11) / 4
OF_JACOBIANS: dict[str, tuple[Callable[[hodiff.LinearOperator], Tensor], Callable[[Tensor], Tensor]]] = {
    "solve": (
        lambda J: hodiff.solve(J, draw(4), method="gmres", rtol=1e-13, create_graph=True).value.sin().sum(),
        lambda J: torch.linalg.solve(J, draw(4)).sin().sum(),
    ),
    "solve, transposed": (
        lambda J: hodiff.solve(J.T, draw(4), method="gmres", rtol=1e-13, create_graph=True).value.sin().sum(),
        lambda J: torch.linalg.solve(J.T, draw(4)).sin().sum(),
    ),
    "logdet of J'J + 1": (
        lambda J: hodiff.logdet(J.T @ J + 1.0, create_graph=True).value,
        lambda J: torch.logdet(J.T @ J + torch.eye(4, dtype=D)),
    ),
    "trace": (lambda J: hodiff.trace(J, create_graph=True).value, torch.trace),
    "diagonal": (
        lambda J: hodiff.diagonal(J, create_graph=True).value.square() @ draw(4),
        lambda J: J.diagonal().square() @ draw(4),
    ),
}


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", OF_JACOBIANS)
def test_of_jacobians_by_the_point_and_the_function(name: str, batches: int) -> None:
    ours, dense = OF_JACOBIANS[name]
    x, t = draw(4, seed=1).requires_grad_(), draw(4, seed=2).requires_grad_()
    rows = lambda x, t, part: mapped(x, t).reshape(batches, -1)[part]
    data = {} if batches == 1 else {"data": [0, 1]}

    def loss(x: Tensor, t: Tensor) -> Tensor:
        predict = (lambda x: mapped(x, t)) if batches == 1 else (lambda x, part: rows(x, t, part))
        return ours(hodiff.JacobianOperator(predict, x, **data))

    expected = lambda x, t: dense(hodiff.jacobian(mapped, x, args=(t,), create_graph=True))
    for one, other in zip(
        *(torch.autograd.grad(f(x, t), (x, t), create_graph=True) for f in (loss, expected)), strict=True
    ):
        agree(one.detach(), other.detach(), 1e-9)
    assert torch.autograd.gradcheck(loss, (x, t), atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (x, t), atol=1e-5, fast_mode=True)


def test_of_the_jacobians_of_samples() -> None:
    x, t, b = draw(3, 4, seed=1), draw(4, seed=2).requires_grad_(), draw(3, 4, seed=3)
    J = hodiff.JacobianOperator(lambda x: mapped(x, t), x, batch_ndim=1)
    K = hodiff.jacobian(mapped, x, batch_ndim=1, args=(t,), create_graph=True)
    pairs = [
        (hodiff.solve(J, b, method="gmres", create_graph=True, rtol=1e-13).value, torch.linalg.solve(K, b)),
        (hodiff.logdet(J.T @ J, create_graph=True).value, torch.logdet(K.mT @ K)),
    ]
    for ours, dense in pairs:
        (got,), (expected,) = (torch.autograd.grad(part.cos().sum(), t, retain_graph=True) for part in (ours, dense))
        agree(got, expected, 1e-9)


LIKELIHOODS: dict[str, object] = {
    "cross-entropy": nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 0.5, 2.0], dtype=D)),
    "squared error": nn.MSELoss(),
    "a sum": nn.MSELoss(reduction="sum"),
    "binary": nn.BCEWithLogitsLoss(),
    "Poisson": nn.PoissonNLLLoss(),
    "a function": lambda outputs, batch: ((outputs - 1).pow(4).sum(), len(outputs)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_of_gauss_newton_matrices_by_the_point_and_the_function(name: str) -> None:
    """Evidence of a Laplace approximation, for one: by central differences, and with the detached values."""
    data = []
    for rows in (3, 2):
        inputs, labels = draw(rows, 2, seed=rows), torch.arange(rows) % 3
        targets = {"squared error": draw(rows, 3), "a sum": draw(rows, 3), "cross-entropy": labels}
        data.append((inputs, targets.get(name, F.one_hot(labels, 3))))
    P, w = draw(2, 3, seed=7).requires_grad_(), torch.tensor(1.3, dtype=D, requires_grad=True)

    def operator(P: Tensor, w: Tensor) -> hodiff.GaussNewtonOperator:
        return hodiff.GaussNewtonOperator(lambda P, b: torch.tanh(b[0] @ P) * w, LIKELIHOODS[name], P, data=data)

    def losses(P: Tensor, w: Tensor, *, graph: bool = True) -> Tensor:
        G = operator(P, w)
        options = {"create_graph": graph}
        return torch.stack([
            hodiff.logdet(G, shift=w.square() if graph else 1.69, **options).value,
            hodiff.trace(G, vectors=draw(6, 2), **options).value,
            hodiff.solve(G, draw(6), damping=0.5, rtol=1e-13, **options).value.sum(),
            (hodiff.diagonal(G, method="exact", **options).value * draw(2, 3)).sum(),
        ])  # fmt: skip

    agree(losses(P, w).detach(), losses(P, w, graph=False), 1e-9)
    one = lambda P, w: losses(P, w) @ torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=D)
    assert torch.autograd.gradcheck(one, (P, w), atol=1e-6, fast_mode=True)
    if name in ("cross-entropy", "a function"):
        evidence = lambda P, w: hodiff.logdet(operator(P, w), shift=w.square(), create_graph=True).value
        assert torch.autograd.gradgradcheck(evidence, (P, w), atol=1e-5, fast_mode=True)


def test_a_gauss_newton_matrix_of_a_module_with_two_outputs() -> None:
    model, X = nn.Linear(3, 2).double(), draw(6, 3)
    predict = lambda m, b: (m(b[0])[:, 0], m(b[0])[:, 1].exp())
    G = hodiff.GaussNewtonOperator(predict, nn.GaussianNLLLoss(), model, data=[(X, draw(6, seed=1))])
    value = hodiff.trace(G, create_graph=True).value
    (found,) = torch.autograd.grad(value, model.weight)
    step = 1e-5
    for i in range(2):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                model.weight[i, 1] += sign * step
            ends.append(float(hodiff.trace(G.refresh(), create_graph=False).value))
            with torch.no_grad():
                model.weight[i, 1] -= sign * step
        assert float(found[i, 1]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("kind", ["mc", "empirical"])
def test_a_fisher_matrix_of_draws_has_no_derivative(kind: str) -> None:
    data = [(draw(5, 4), torch.arange(5) % 3)]
    F_ = hodiff.FisherOperator(lambda P, b: b[0] @ P, nn.CrossEntropyLoss(), draw(4, 3), data=data, kind=kind)
    with pytest.raises(hodiff.InputError, match=r"create_graph: a Fisher matrix made of .*kind='exact'"):
        hodiff.trace(F_, create_graph=True)
    exact = hodiff.FisherOperator(lambda P, b: b[0] @ P, nn.CrossEntropyLoss(), draw(4, 3), data=data, kind="exact")
    assert hodiff.trace(exact, create_graph=True).value.requires_grad


MADE_OF = {
    "alone": lambda H: H, "a shift": lambda H: H + 3.0, "a multiple": lambda H: 2 * H, "a sum": lambda H: H + H,
    "a product": lambda H: H @ H, "a block": lambda H: H.block("x"), "the transpose": lambda H: H.T,
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE_OF)
@pytest.mark.parametrize("estimate", [hodiff.trace, hodiff.diagonal])
def test_products_are_counted_whether_recorded_or_not(estimate: Any, kind: str) -> None:
    A = MADE_OF[kind](hodiff.HessianOperator(lambda x: x.sin().sum() ** 2, torch.linspace(1, 2, 5, dtype=D)))
    for options, number in (({}, 5), ({"samples": 3}, 3)):
        counts = [estimate(A, create_graph=recorded, **options).products for recorded in (False, True)]
        assert counts == [number, number]
