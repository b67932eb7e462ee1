"""What is computed and warned of: normalization over a batch of samples, and Functions of the user's own."""

import warnings

import pytest
import torch
from torch import nn

import hodiff
from hodiff import BatchMixingWarning, CustomFunctionWarning, GraphError
from tests.support.modules import Cube, CubeOnce

D = torch.float64
X = torch.linspace(-1, 1.5, 6, dtype=D)
V = torch.cos(torch.arange(6, dtype=D))


def test_batch_norm_under_batch_ndim_warns() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=D)
    with pytest.warns(BatchMixingWarning, match=r"(?is)batch_?norm.*eval"):
        hodiff.grad(lambda t: model(t), x, batch_ndim=1)
    with pytest.warns(BatchMixingWarning, match=r"(?is)batch_?norm.*eval"):
        hodiff.hessian(lambda t: model(t), x, batch_ndim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.grad(lambda t: model(t).sum(), x)
        model.eval()
        hodiff.grad(lambda t: model(t), x, batch_ndim=1)


def test_custom_function_warns_where_it_cannot_be_held() -> None:
    class Fresh(Cube):
        pass

    f = lambda x: Fresh.apply(x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.grad(f, X)  # a first derivative is what the class wrote
    x = X.clone().requires_grad_()
    with pytest.warns(CustomFunctionWarning, match=r"(?is)Fresh.*check_derivatives"):
        got = hodiff.hvp(f(x), x, V)
    torch.testing.assert_close(got, 6 * X * V)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.hvp(f, X, V)  # held, and right

    class Second(Cube):
        pass

    with pytest.warns(CustomFunctionWarning, match=r"(?is)Second"):
        hodiff.hessian(Second.apply(x).sum(), x)


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize("spread", [lambda y, x: y, lambda y, x: y + x**3, lambda y, x: y * x])
def test_once_differentiable_raises_unless_allowed(spread: object) -> None:
    """autograd.grad gives 6x of 2 + 6x and says nothing."""
    f = lambda x: spread(CubeOnce.apply(x), x).sum()
    assert torch.isfinite(hodiff.grad(f, X)).all()
    for call in (
        lambda **k: hodiff.hvp(f, X, V, **k),
        lambda **k: hodiff.hessian(f, X, **k),
        lambda **k: hodiff.hessian_diagonal(f, X, **k),
        lambda **k: hodiff.nth_derivative(lambda x: spread(CubeOnce.apply(x), x), X, 2, **k),
    ):
        with pytest.raises(GraphError, match=r"(?is)CubeOnce.*allow"):
            call()
    try:  # allowed, its own second derivative is dropped: what is left may not need a graph at all
        hodiff.hvp(f, X, V, allow=("CubeOnce",))
        hodiff.hvp(f, X, V, allow=(CubeOnce,))
    except GraphError as error:
        pytest.fail(f"allow= did not allow: {error}")
