"""What an operation in place changes beside its result, and what PyTorch gets wrong or leaves out silently."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff._core._messages import CONSTANTS
from hodiff.jets._jet import NoRule

X = torch.tensor([[0.5, 1.2], [0.3, -0.7]], dtype=torch.float64)


@pytest.mark.parametrize(
    "name", ["relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardswish", "hardtanh", "threshold"]
)
def test_activations_in_place_change_their_argument(name: str) -> None:
    act = getattr(F, name)
    rest = (0.1, 0.0) if name == "threshold" else ()

    def f(h):
        z = h * 3
        y = act(z, *rest, inplace=True)
        return (z**2 + y.sin()).sum(-1)

    assert torch.allclose(hodiff.value_grad_and_laplacian(f, X)[0], f(X))
    for k in (0, 1, 2):
        mine, theirs = (hodiff.value_grad_and_laplacian(f, X, method=m)[k] for m in ("jets", "reverse"))
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_modules_in_place_and_views() -> None:
    torch.manual_seed(0)
    layer, act = nn.Linear(2, 2).double(), nn.ReLU(inplace=True)

    def residual(h):
        z = layer(h)
        y = act(z)
        return (z**2 + y.sin()).sum(-1)

    assert torch.allclose(hodiff.laplacian(residual, X), hodiff.laplacian(residual, X, method="reverse"))

    def of_a_view(h):
        z = h * 3
        F.relu(z[:, :1], inplace=True)
        return z.sum(-1)

    with pytest.raises(NoRule, match="on a view"):
        hodiff.laplacian(of_a_view, X, method="jets")


def test_einsum_that_is_a_view() -> None:
    def f(h):
        a = h.sin()
        torch.einsum("ij->ji", a).mul_(2.0)
        return (a**2 * h).sum(-1)

    with pytest.raises(NoRule, match="on a view"):
        hodiff.laplacian(f, X, method="jets")


@pytest.mark.parametrize("indices", [(True,), (False,)])
def test_adaptive_pooling_with_indices_by_position(indices: tuple[bool]) -> None:
    x = torch.rand(2, 4, 4, dtype=torch.float64)
    f = lambda z: torch.nn.functional.adaptive_max_pool2d(z, 2, *indices)
    if indices[0]:
        with pytest.raises(hodiff.GraphError, match="return_indices"):
            hodiff.jet(f, x, [x])
    else:
        torch.testing.assert_close(hodiff.jet(f, x, [x])[1][0], f(x))


def test_select_scatter_goes_by_reverse_where_its_batched_derivative_is_wrong() -> None:
    x = X.clone().requires_grad_()
    f = lambda h: h.select_scatter(h[:, 0].sin(), 1, 1)[:, 1]
    with pytest.warns(hodiff.HodiffWarning, match="select_scatter"):
        found = hodiff.laplacian(f, x)
    assert torch.allclose(found, -x[:, 0].sin())
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.allclose(gradient[:, 0], -x[:, 0].cos())


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ("bessel_j0", "modified_bessel_k0", "airy_ai", "spherical_bessel_j0")
        if f"special_{name}" in CONSTANTS  # from 2.15 on two of them have derivatives
    ],
)
def test_functions_that_pytorch_takes_for_constants_are_refused_by_every_method(name: str) -> None:
    f = lambda h: getattr(torch.special, name)(h.abs()).sum(-1) + h.square().sum(-1)
    for method in ("auto", "jets"):
        with pytest.raises(hodiff.GraphError, match=rf"{name}: PyTorch has no derivative of it"):
            hodiff.laplacian(f, X, method=method)
    g = lambda h: torch.special.hermite_polynomial_h(h, 3) + h
    with pytest.raises(hodiff.GraphError, match="hermite_polynomial_h: PyTorch has no derivative"):
        hodiff.derivatives(g, X, 3)
