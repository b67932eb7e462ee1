"""`gram` against a pass for each row, by factors and by rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.calculus import _per_sample
from tests.support.passes import Count

D = torch.float64
N = 6
X = torch.linspace(-1, 1, 4 * N, dtype=D).reshape(N, 4).mul(9).sin()


def expected(f: Callable[[Any, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    """The products of the rows, each by a pass of its own on the graph of the whole batch."""
    values = f(model, batch)
    own = list(model.parameters())
    passes = [torch.autograd.grad(v, own, retain_graph=True, allow_unused=True) for v in values.flatten()]
    zero = [torch.zeros_like(p) for p in own]
    rows = [torch.cat([(z if g is None else g).flatten() for g, z in zip(row, zero, strict=True)]) for row in passes]
    return (torch.stack(rows) @ torch.stack(rows).T).view(values.shape * 2)


class Straight(nn.Module):
    """What mixes samples in the gradient alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.mean(0) - x.mean(0).detach())


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "perceptron": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        "as wide as samples": nn.Sequential(nn.Linear(4, N), nn.Tanh(), nn.Linear(N, 2)),
        "convolution": nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 2)),
        "batch norm": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        "PReLU": nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 2)),
        "mixed": nn.Sequential(nn.Linear(4, 5), Straight(), nn.Linear(5, 2)),
        "bilinear": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Twice()),
    }


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(5, 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


SHAPES: dict[str, Callable[[Any, Any], Tensor]] = {
    "(N,)": lambda m, x: m(x).sin().sum(1),
    "(N, K)": lambda m, x: m(x).sin(),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", networks())
@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_against_a_pass_for_each_row(name: str, shape: str) -> None:
    model, f = networks()[name].double(), SHAPES[shape]
    result = hodiff.gram(f, model, X)
    assert not result.requires_grad
    torch.testing.assert_close(result, expected(f, model, X), rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_its_derivative(shape: str) -> None:
    """With `create_graph` by rows: of the squares of the gradients' norms, twice a Hessian's product."""
    model, f = networks()["perceptron"].double(), SHAPES[shape]
    result = hodiff.gram(f, model, X, create_graph=True)
    torch.testing.assert_close(result, expected(f, model, X))
    trace = result.reshape(f(model, X).numel(), -1).trace()
    slopes = torch.autograd.grad(trace, list(model.parameters()))
    numbers = [*f(model, X).flatten()]
    for slope, parameter in zip(slopes, model.parameters(), strict=True):
        total = torch.zeros_like(parameter)
        for number in numbers:
            own = torch.autograd.grad(number, list(model.parameters()), create_graph=True)
            squares = sum(part.square().sum() for part in own)
            total = total + torch.autograd.grad(squares, parameter, retain_graph=True)[0]
        torch.testing.assert_close(slope, total)


def test_inside_of_another_call() -> None:
    """A derivative of the matrix, as by differences."""
    w = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=D)
    f = lambda w: hodiff.gram(lambda w, x: (x @ w).sin(), w, X).sum()
    slope, step = hodiff.grad(f, w), 1e-5
    units = torch.eye(4, dtype=D) * step
    differences = torch.stack([(f(w + unit) - f(w - unit)) / (2 * step) for unit in units])
    torch.testing.assert_close(slope, differences, rtol=1e-7, atol=1e-8)


def test_of_one_draw() -> None:
    """Under dropout the rows are those of the call's own draw."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    f = SHAPES["(N,)"]
    torch.manual_seed(3)
    result = hodiff.gram(f, model, X)
    torch.manual_seed(3)
    torch.testing.assert_close(result, expected(f, model, X))


def test_containers_and_selections() -> None:
    model = networks()["perceptron"].double()
    f = SHAPES["(N, K)"]
    whole = hodiff.gram(f, model, X)
    selected = lambda name: hodiff.gram(lambda _, x: f(model, x), hodiff.select(model, name), X)
    parts = [selected(name) for name in ("0.*", "2.*")]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_without_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of N times the parameters is made: the rows that would be refused are not asked for."""
    monkeypatch.setattr(_per_sample, "_rows", None)
    model = networks()["perceptron"].double()
    torch.testing.assert_close(hodiff.gram(SHAPES["(N, K)"], model, X), expected(SHAPES["(N, K)"], model, X))


def test_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the rows, one that proves them; the first time one more, for the formula."""
    model = networks()["perceptron"].double()
    hodiff.gram(SHAPES["(N,)"], model, X)
    count = Count(monkeypatch)
    hodiff.gram(SHAPES["(N,)"], model, X)
    assert count.passes == 2


def test_lower_precision() -> None:
    """In what the rows are; layers of another kind take theirs."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
    f = lambda m, x: m(x).float().sin()
    result = hodiff.gram(f, model, X.bfloat16())
    torch.testing.assert_close(result, expected(f, model, X.bfloat16()), rtol=5e-2, atol=5e-2, check_dtype=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_samples_and_one(shape: str) -> None:
    model, f = networks()["perceptron"].double(), SHAPES[shape]
    numbers = f(model, X[:1]).shape[1:]
    assert hodiff.gram(f, model, X[:0]).shape == (0, *numbers, 0, *numbers)
    torch.testing.assert_close(hodiff.gram(f, model, X[:1]), expected(f, model, X[:1]))
