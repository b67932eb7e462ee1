"""An f that reaches x other than through its argument is refused also where Taylor mode records nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff

X = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()


def field(z):
    return (X**3).sum(-1) + 0 * z.sum(-1)


CALLS = {
    "nth_derivative": lambda: hodiff.nth_derivative(lambda z: X**3 + 0 * z, X, 3),
    "derivatives": lambda: hodiff.derivatives(lambda z: z * X, X, 4),
    "laplacian, a constant": lambda: hodiff.laplacian(field, X, create_graph=False),
    "laplacian, a part": lambda: hodiff.laplacian(lambda z: (z * X).square().sum(-1), X, create_graph=False),
    "laplacian, recorded": lambda: hodiff.laplacian(field, X, create_graph=True),
    "value_grad_and_laplacian": lambda: hodiff.value_grad_and_laplacian(field, X, create_graph=False),
    "second_order_operator": lambda: hodiff.second_order_operator(
        field, X, torch.eye(3, dtype=X.dtype), create_graph=False
    ),
    "divergence": lambda: hodiff.divergence(lambda z: X * z, X, create_graph=False),
    "curl": lambda: hodiff.curl(lambda z: X * z, X, create_graph=False),
    "biharmonic": lambda: hodiff.biharmonic(lambda z: (z * X).pow(4).sum(-1), X, create_graph=False),
    "partial, pure": lambda: hodiff.partial(lambda z: (z * X).sum(-1) ** 4, X, (0, 0, 0, 0), create_graph=False),
    "partial, mixed": lambda: hodiff.partial(lambda z: (z * X).sum(-1) ** 4, X, (0, 0, 1, 1), create_graph=False),
    "jet": lambda: hodiff.jet(lambda z: z * X, X, [torch.ones_like(X)], create_graph=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_without_a_graph(name):
    with pytest.raises(hodiff.GraphError, match="other than through its argument"):
        CALLS[name]()


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("laplacian", "value", "partial"))])
def test_refused_under_no_grad(name):
    with torch.no_grad(), pytest.raises(hodiff.GraphError, match="other than through its argument"):
        CALLS[name]()


def test_the_point_as_a_constant_is_no_bypass():
    found = hodiff.laplacian(lambda z: (z * X.detach()).square().sum(-1), X, create_graph=False)
    torch.testing.assert_close(found, 2 * X.detach().square().sum(-1))
    with torch.no_grad():
        frozen = X.sin()
    hodiff.laplacian(lambda z: (z * frozen).square().sum(-1), X, create_graph=False)


class Laplacian(torch.autograd.Function):
    """Taylor mode inside a Function's forward, for which the engine switches forward mode off."""

    @staticmethod
    def forward(ctx, x):
        on = torch._C._is_fwd_grad_enabled()
        found = hodiff.laplacian(lambda z: z.pow(3).sum(-1), x, create_graph=False, method="jets")
        assert torch._C._is_fwd_grad_enabled() == on
        return found

    @staticmethod
    def backward(ctx, g):
        raise AssertionError


def test_taylor_mode_inside_the_forward_of_a_function():
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    torch.testing.assert_close(Laplacian.apply(x).detach(), 6 * x.detach().sum(-1))


D = torch.float64


BYPASSES: dict[str, Callable[[Tensor], Any]] = {
    "nth_derivative": lambda x: hodiff.nth_derivative(lambda z: x**3 + 0 * z, x, 3),
    "derivatives": lambda x: hodiff.derivatives(lambda z: x**3 + 0 * z, x, 4),
    "laplacian, create_graph=False": lambda x: hodiff.laplacian(
        lambda z: (z * x).square().sum(-1), x, create_graph=False
    ),
    "jet, create_graph=False": lambda x: hodiff.jet(lambda z: z * x, x, [torch.ones_like(x)], create_graph=False),
    "divergence, create_graph=False": lambda x: hodiff.divergence(lambda z: z * x, x, create_graph=False),
    "partial, create_graph=False": lambda x: hodiff.partial(
        lambda z: (z * x).sum(-1), x, (0, 0, 0, 0), create_graph=False
    ),
    "biharmonic, create_graph=False": lambda x: hodiff.biharmonic(
        lambda z: (z * x).square().sum(-1), x, create_graph=False
    ),
}


@pytest.mark.parametrize("name", BYPASSES)
def test_taylor_mode_refuses_a_bypass(name: str) -> None:
    x = torch.ones(2, 3, dtype=D, requires_grad=True)
    with pytest.raises(hodiff.GraphError, match="other than through"):
        BYPASSES[name](x)


def test_taylor_mode_refuses_a_bypass_under_no_grad() -> None:
    x = torch.ones(2, 3, dtype=D, requires_grad=True)
    with torch.no_grad(), pytest.raises(hodiff.GraphError, match="other than through"):
        hodiff.laplacian(lambda z: (x**3).sum(-1) + 0 * z.sum(-1), x)
