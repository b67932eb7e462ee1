"""Copies and pickles of what users hold: right, or refused in words."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.graph import inspect, lifetime, monitor, predict, watch
from hodiff.sparse import plan_hessian, plan_jacobian, sparsity_pattern

D = torch.float64
X, Y = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3), torch.ones(4, 1, dtype=D)
V = torch.linspace(1, 2, 4, dtype=D)
A = torch.diag(torch.arange(1.0, 5.0, dtype=D)) + 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=D)


def outputs(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def squares(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[1])


def cube(x: Tensor) -> Tensor:
    return (x**3).sum() + (x[1:] * x[:-1]).sum()


def pairs(x: Tensor) -> Tensor:
    return x[1:] * x[:-1]


def evaluated(H: hodiff.LinearOperator) -> hodiff.LinearOperator:
    H @ torch.ones(H.shape[1], dtype=D)
    return H


def hessian() -> Any:
    return evaluated(hodiff.HessianOperator(squares, model(), data=[(X, Y)]))


def fisher() -> Any:
    return evaluated(hodiff.FisherOperator(outputs, nn.MSELoss(), model(), data=[(X, Y)], kind="exact"))


def jacobian() -> Any:
    return evaluated(hodiff.JacobianOperator(pairs, V))


def matrix() -> Any:
    return hodiff.MatrixOperator(A)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "HessianOperator": (hessian, "HessianOperator"),
    "GaussNewtonOperator": (
        lambda: evaluated(hodiff.GaussNewtonOperator(outputs, nn.MSELoss(), model(), data=[(X, Y)])),
        "GaussNewtonOperator",
    ),
    "FisherOperator": (fisher, "FisherOperator"),
    "JacobianOperator": (jacobian, "JacobianOperator"),
    "its transpose": (lambda: jacobian().T, "JacobianOperator"),
    "a block": (lambda: hessian().block("weight"), "HessianOperator"),
    "damped": (lambda: hessian() + 0.1, "HessianOperator"),
    "a sum": (lambda: hessian() + matrix(), "HessianOperator"),
    "a product": (lambda: matrix() @ hessian(), "HessianOperator"),
}

PRODUCTS: dict[str, Callable[[], Any]] = {
    "MatrixOperator": matrix,
    "a sum of matrices": lambda: matrix() + matrix(),
    "a damped matrix": lambda: 2 * matrix() + 0.5,
    "a product of matrices": lambda: (M := matrix()) @ M,
    "nystrom": lambda: hodiff.nystrom(matrix(), 2, 0.1, generator=torch.Generator().manual_seed(0)),
}


def report() -> Any:
    return hodiff.check_derivatives(cube, V)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def failing(call: Callable[[], Any]) -> Exception:
    with pytest.raises(hodiff.HodiffError, match=r"^v has shape|f\(x\).*depend|cut") as caught:
        call()
    return caught.value


SHOWN: dict[str, Callable[[], Any]] = {
    "trace": lambda: hodiff.trace(matrix(), samples=2, generator=seeded()),
    "diagonal": lambda: hodiff.diagonal(matrix()),
    "eigsh": lambda: hodiff.eigsh(matrix(), 1, generator=seeded()),
    "solve": lambda: hodiff.solve(matrix(), V),
    "spectral_density": lambda: hodiff.spectral_density(matrix(), samples=2, generator=seeded()),
    "logdet": lambda: hodiff.logdet(matrix(), samples=2, generator=seeded()),
    "cost": lambda: hessian().cost(),
    "sparsity_pattern": lambda: sparsity_pattern(cube, V),
    "check_derivatives": report,
    "rules.SGD": lambda: hodiff.rules.SGD(lr=0.1),
    "rules.Adam": lambda: hodiff.rules.Adam(lr=0.1),
    "monitor": monitor,
    "inspect": lambda: inspect(cube(V.clone().requires_grad_())),
    "predict": lambda: predict(cube(V.clone().requires_grad_())),
    "InputError": lambda: failing(lambda: hodiff.hvp(cube, V, V[:2])),
    "GraphError": lambda: failing(lambda: hodiff.grad(lambda x: x.detach().sum(), V)),
}


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": saved,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_with_graphs(name: str, way: str) -> None:
    make, said = REFUSED[name]
    H = make()
    v = torch.ones(H.shape[1], dtype=D)
    if way == "copy.copy":  # shares what has been computed
        found = copy.copy(H)
        torch.testing.assert_close(found @ v, H @ v)
        return
    with pytest.raises(hodiff.GraphError, match=f"a {said} cannot be pickled or deep-copied") as caught:
        WAYS[way](H)
    assert "Copy the model and build an operator on the copy; in a worker, build the operator" in str(caught.value)
    H @ v  # and is as good as before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_an_operator_of_matrices(name: str, way: str) -> None:
    M = evaluated(PRODUCTS[name]())
    found = WAYS[way](M)
    torch.testing.assert_close(found @ V, M @ V)
    torch.testing.assert_close(found.T @ V, M.T @ V)
    assert found.symmetric == M.symmetric
    before = M.products
    found @ V
    assert M.products == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHOWN)
def test_a_record(name: str, way: str) -> None:
    record = SHOWN[name]()
    assert str(WAYS[way](record)) == str(record)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan(way: str) -> None:
    for plan in (plan_hessian(cube, V), plan_jacobian(pairs, V)):
        torch.testing.assert_close(WAYS[way](plan).values(2 * V), plan.values(2 * V))


@pytest.mark.parametrize("way", WAYS)
def test_a_selection(way: str) -> None:
    chosen = hodiff.select(model(), "weight")
    found = WAYS[way](chosen)
    assert list(found) == list(chosen)
    torch.testing.assert_close(dict(found), dict(chosen))


@pytest.mark.parametrize("way", WAYS)
def test_the_penalty_with_a_state(way: str) -> None:
    penalty = hodiff.PathLengthPenalty(decay=0.5)
    images, noise = (lambda w: w.square()[:, :, None, None]), torch.ones(4, 3, 1, 1, dtype=D)
    penalty(images, X, vectors=noise, create_graph=False)
    found = WAYS[way](penalty)
    assert torch.equal(found.mean_length, penalty.mean_length)
    assert torch.equal(found.lengths, penalty.lengths)


def shifted(x: Tensor) -> Tensor:
    """Residuals that a pickle can name."""
    return (x - 1) ** 2


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_least_squares(way: str) -> None:
    """A copy goes on as the original would; PyTorch keeps of an optimizer what is in its groups alone."""
    x = torch.zeros(2, dtype=D)
    optimizer = hodiff.LevenbergMarquardt(shifted, x, damping=0.1, momentum=0.1, tries=7)
    optimizer.step()
    again = WAYS[way](optimizer)
    (y,) = again.param_groups[0]["params"]
    assert str(again.last) == str(optimizer.last)
    optimizer.step()
    again.step()
    assert torch.equal(x, y)
    assert not torch.equal(x, torch.zeros(2, dtype=D))


@pytest.mark.parametrize("way", WAYS)
def test_what_follows_graphs_of_this_process(way: str) -> None:
    with watch() as record:
        cube(V.clone().requires_grad_()).backward()
    with pytest.raises(
        hodiff.GraphError, match="a Watch cannot be copied or pickled: it follows graphs of this process"
    ):
        WAYS[way](record)


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_what_holds_such_a_record(way: str) -> None:
    with lifetime() as record:
        cube(V.clone().requires_grad_()).backward()
    with pytest.raises(hodiff.GraphError, match="a Watch cannot be copied or pickled"):
        WAYS[way](record)
