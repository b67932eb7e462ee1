"""`per_sample_grad` by rows in factors, against a pass for each number on the graph of the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.calculus import _per_sample
from tests.support.passes import Count
from tests.unit.calculus.test_per_sample import Twice
from tests.unit.calculus.test_per_sample import models as networks

D = torch.float64
N = 7
X = torch.linspace(-1, 1, 3 * N, dtype=D).reshape(N, 3).mul(9).sin()


def models() -> dict[str, nn.Module]:
    """Those of the other routes too, and one with a layer that no reader knows."""
    wide = nn.Sequential(nn.Linear(3, N), nn.Tanh(), nn.Linear(N, 2))
    return networks() | {
        "as wide as samples": wide,
        "PReLU": nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)),
        "grouped": nn.Sequential(
            nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 6, 1, groups=3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)
        ),
    }


NOT_READ = {"batch norm", "straight", "PReLU", "routed"}

SHAPES: dict[str, Callable[[Any, Any], Tensor]] = {
    "(N,)": lambda m, x: m(x).sin().sum(1),
    "(N, 1)": lambda m, x: m(x).sin().sum(1, keepdim=True),
    "(N, K)": lambda m, x: m(x).sin(),
}


def agree_with_passes(rows: dict[str, Tensor], f: Callable[..., Tensor], model: nn.Module, x: Tensor) -> None:
    values = f(model, x)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values.squeeze(1)
    own = list(model.parameters())
    each = [torch.autograd.grad(v, own, retain_graph=True) for v in values.flatten()]
    for (name, parameter), column in zip(model.named_parameters(), zip(*each, strict=True), strict=True):
        expected = torch.stack(column).view(*values.shape, *parameter.shape)
        torch.testing.assert_close(rows[name], expected, rtol=1e-12, atol=1e-13)
        assert not rows[name].requires_grad


@pytest.fixture
def other_routes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    taken, inner = list[str](), _per_sample._rows
    monkeypatch.setattr(_per_sample, "_rows", lambda *given: taken.append("rows") or inner(*given))
    return taken


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", models())
@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_against_a_pass_for_each_number(name: str, shape: str, other_routes: list[str]) -> None:
    model, f = models()[name].double(), SHAPES[shape]
    for _ in range(2):
        agree_with_passes(hodiff.per_sample_grad(f, model, X), f, model, X)
    assert other_routes == (["rows"] * 2 if name in NOT_READ else [])


def test_rows_of_one_draw(other_routes: list[str]) -> None:
    """Those of the call's own draw, in two passes."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    f = SHAPES["(N, K)"]
    torch.manual_seed(3)
    rows = hodiff.per_sample_grad(f, model, X)
    torch.manual_seed(3)
    agree_with_passes(rows, f, model, X)
    assert not other_routes


def test_a_function_that_differentiates_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `torch.autograd`, on the whole batch."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def f(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1)

    hodiff.per_sample_grad(f, model, X)
    count = Count(monkeypatch)
    rows = hodiff.per_sample_grad(count.of(f), model, X)
    assert (count.evaluations, count.passes) == (1, 1 + 1 + 1)  # that of f is one of them
    rows.pop("2.bias").zero_()  # which no slope depends on
    values, own = f(model, X), [*model.parameters()][:3]
    each = [torch.autograd.grad(v, own, retain_graph=True) for v in values]
    for row, column in zip(rows.values(), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(row, torch.stack(column), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("parameters", [torch.float32, torch.float64])
def test_rows_have_their_parameter_s_dtype(parameters: torch.dtype) -> None:
    """Beside data of another one; whichever came first."""
    for dtype in (torch.float64, parameters):
        w = torch.tensor([0.3, -0.2, 0.5], dtype=dtype)
        row = hodiff.per_sample_grad(lambda w, x: (x * w).sin().sum(1), w, X)
        assert row.dtype == dtype
        torch.testing.assert_close(row, ((X * w).cos() * X).to(dtype))


def test_a_chunk_bounds_what_is_at_hand(other_routes: list[str]) -> None:
    """Rows in factors take all samples at once, so that a number of one's own takes the other route."""
    model = Twice().double()
    agree_with_passes(hodiff.per_sample_grad(SHAPES["(N,)"], model, X, chunk_size=3), SHAPES["(N,)"], model, X)
    assert other_routes == ["rows"]


def test_patches_of_large_images_are_not_made(monkeypatch: pytest.MonkeyPatch, other_routes: list[str]) -> None:
    model = networks()["convolution"].double()
    monkeypatch.setattr(_per_sample._factors, "PATCHES", 8 * N * 2 * 2)  # two places of two entries
    hodiff.per_sample_grad(SHAPES["(N,)"], model, X)
    assert not other_routes
    monkeypatch.setattr(_per_sample._factors, "PATCHES", 8 * N * 2 * 2 - 1)
    agree_with_passes(hodiff.per_sample_grad(SHAPES["(N,)"], model, X), SHAPES["(N,)"], model, X)
    assert other_routes == ["rows"]


@pytest.mark.parametrize("numbers", [N, N - 1])
def test_a_hook_on_parameters_acts_once(numbers: int) -> None:
    """Of as many numbers as samples the function is called with fewer samples as well."""
    w = torch.linspace(-1, 1, 3 * N, dtype=D).reshape(3, N)[:, :numbers]

    def f(w: Tensor, x: Tensor) -> Tensor:
        if w.requires_grad:
            w.register_hook(lambda gradient: 3 * gradient)
        return (x @ w).sin()

    plain = torch.autograd.functional.jacobian(lambda w: (X @ w).sin(), w)
    rows = hodiff.per_sample_grad(f, w, X)
    torch.testing.assert_close(rows, 3 * plain)
    flat = rows.reshape(N, numbers, -1)
    torch.testing.assert_close(hodiff.gram(f, w, X), torch.einsum("nkp,mlp->nkml", flat, flat))
