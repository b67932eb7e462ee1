"""Zeros that are no answer: a network of straight pieces has no second derivatives by its inputs, and that is said."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff._core import _nodes, _values

DOUBLE = {"dtype": torch.float64}
X = torch.tensor([[0.3, -0.7], [1.1, 0.4], [-0.9, 0.2]], **DOUBLE)
V = torch.tensor([[0.5, 0.1], [-0.3, 0.8], [0.2, -0.6]], **DOUBLE)
W, U = torch.linspace(-1, 1, 16, **DOUBLE).view(2, 8) + 0.05, torch.linspace(1, 2, 8, **DOUBLE).view(8, 1)


@pytest.fixture(autouse=True)
def no_place_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_values, "_looked", set())


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 8), *between, nn.Linear(8, 1)).double()


def summed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).sum()


def said(call: Callable[[], object], times: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [str(each.message) for each in caught]


DOORS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "hvp": lambda f: hodiff.hvp(summed(f), X, V),
    "hessian": lambda f: hodiff.hessian(summed(f), X),
    "value_grad_and_hessian": lambda f: hodiff.value_grad_and_hessian(summed(f), X),
    "hessian_diagonal": lambda f: hodiff.hessian_diagonal(summed(f), X),
    "of a tensor": lambda f: hodiff.hessian(summed(f)(x := X.clone().requires_grad_()), x),
    "laplacian": lambda f: hodiff.laplacian(f, X),
    "laplacian, reverse": lambda f: hodiff.laplacian(f, X, method="reverse"),
    "value_grad_and_laplacian": lambda f: hodiff.value_grad_and_laplacian(f, X),
    "second_order_operator": lambda f: hodiff.second_order_operator(f, X, torch.eye(2, **DOUBLE)),
    "partial": lambda f: hodiff.partial(f, X, (0, 1)),
    "check_derivatives": lambda f: hodiff.check_derivatives(summed(f), X),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_network_of_straight_pieces_is_said_once_for_each_line(door: str) -> None:
    net = network(nn.ReLU())
    (text,) = said(lambda: DOORS[door](net), times=3)
    assert text.startswith("all second derivatives here are exactly 0, because relu has none")
    assert "use softplus or tanh instead" in text
    assert not said(lambda: DOORS[door](network(nn.Tanh())))


PIECES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "LeakyReLU": (network(nn.LeakyReLU()), "leakyrelu"),
    "PReLU": (network(nn.PReLU()), "prelu|where"),
    "ReLU6": (network(nn.ReLU6()), "hardtanh|relu6"),
    "Hardtanh": (network(nn.Hardtanh()), "hardtanh"),
    "two layers": (network(nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), "relu"),
    "batch norm": (network(nn.ReLU(), nn.BatchNorm1d(8).eval()).eval(), "relu"),
    "abs": (lambda x: (x @ W).abs() @ U, "abs"),
    "clamp": (lambda x: (x @ W).clamp(min=0) @ U, "clamp"),
    "max": (lambda x: torch.maximum(x @ W, -x @ W) @ U, "maximum"),
    "where": (lambda x: torch.where(x @ W > 0, x @ W, 0.1 * (x @ W)) @ U, "where"),
    "round": (lambda x: x.round().square().sum(-1), "round"),
    "floor": (lambda x: (x * 3).floor().sin().sum(-1), "floor"),
}


@pytest.mark.parametrize("door", ["hvp", "laplacian"])
@pytest.mark.parametrize("name", PIECES)
def test_the_operation_is_named(name: str, door: str) -> None:
    f, operation = PIECES[name]
    if operation in ("round", "floor") and door == "laplacian":
        with pytest.raises(hodiff.GraphError, match="the result of f does not depend on x"):
            DOORS[door](f)
        return
    (text,) = said(lambda: DOORS[door](f))
    assert any(f"because {each}" in text for each in operation.split("|")), text


MLP, DEEP = network(nn.ReLU()), network(nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
LINEAR = nn.Linear(2, 1).double()
ONES = {name: torch.ones_like(parameter) for name, parameter in LINEAR.named_parameters()}
KEPT = torch.tensor([[1.0], [0.0], [0.0]], **DOUBLE)

SILENT: dict[str, Callable[[], object]] = {
    "hinge, by parameters": lambda: hodiff.hvp(lambda m: F.relu(2 - m(X)).sum(), LINEAR, ONES),
    "hinge, by weights": lambda: hodiff.hessian(lambda w: F.relu(2 - X @ w).sum(), V[0]),
    "L1, by parameters": lambda: hodiff.hessian(lambda m: F.l1_loss(m(X), X[:, :1]), LINEAR),
    "L1, by weights": lambda: hodiff.hessian(lambda w: (X @ w - 1).abs().sum(), V[0]),
    "the L1 norm": lambda: hodiff.hessian(lambda x: x.abs().sum(), X),
    "a hinge of a linear model, by inputs": lambda: hodiff.hvp(lambda x: F.relu(2 - LINEAR(x)).sum(), X, V),
    "parameters of a network": lambda: hodiff.hvp(
        lambda m: m(X).abs().sum(), MLP, {name: torch.zeros_like(p) for name, p in MLP.named_parameters()}
    ),
    "a layer of a network": lambda: hodiff.hessian(lambda m: DEEP(X).sum(), hodiff.select(DEEP, "2.*")),
    "linear": lambda: hodiff.hessian(summed(LINEAR), X),
    "linear, a field": lambda: hodiff.laplacian(LINEAR, X),
    "separable": lambda: hodiff.laplacian(lambda x: x.relu().sum(-1), X),
    "a vector of zeros": lambda: hodiff.hvp(summed(MLP), X, 0 * V),
    "an operator and zeros": lambda: hodiff.HessianOperator(summed(MLP), X) @ (0 * V),
    "masked rows": lambda: hodiff.hvp(lambda x: (KEPT * network(nn.ReLU(), nn.Tanh())(x)).sum(), X, V * (1 - KEPT)),
    "a square of it": lambda: hodiff.hessian(lambda x: MLP(x).square().sum(), X),
    "smooth": lambda: hodiff.laplacian(network(nn.Softplus()), X),
    "beside something smooth": lambda: hodiff.laplacian(lambda x: MLP(x) + x.sin().sum(-1, True), X),
    "a gradient penalty": lambda: hodiff.gradient_penalty(MLP, X),
    "a first derivative": lambda: hodiff.grad(summed(MLP), X),
}


@pytest.mark.parametrize("case", SILENT)
def test_zeros_that_are_right_are_not_spoken_of(case: str) -> None:
    assert not said(SILENT[case])


def test_the_device_is_read_once_for_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    look = _values._all_zero
    monkeypatch.setattr(_values, "_all_zero", lambda tensors: read.append(1) or look(tensors))
    for door in ("laplacian", "hvp"):
        assert not said(lambda: DOORS[door](lambda x: MLP(x) * x.sum(-1, True)), times=4)  # noqa: B023
    assert len(read) == 2
    said(lambda: hodiff.hvp(summed(network(nn.Tanh())), X, V), times=4)
    assert len(read) == 2


def test_nothing_is_looked_at_inside_of_another_call() -> None:
    assert not said(lambda: hodiff.grad(lambda x: hodiff.laplacian(MLP, x).sum() + x.square().sum(), X))


def test_the_graph_is_walked_once_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    operations = _nodes.Survey.operations
    monkeypatch.setattr(_nodes.Survey, "operations", lambda survey: walks.append(1) or operations(survey))
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(3)
    with pytest.warns(hodiff.HodiffWarning, match="relu has none"):
        for _ in range(3):
            hodiff.hvp(lambda z: net(z).sum(), x, x)
    assert len(walks) == 1
