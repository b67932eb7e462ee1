"""`jacobian(matrix=True)`: one matrix, rows in the order of `f(x)`, columns in that of *x*."""

import pytest
import torch
from torch import nn

import hodiff
from tests.support.modules import two_layers

D = torch.float64


def test_blocks_side_by_side():
    x = {"a": torch.randn(2, dtype=D), "b": torch.randn(3, 1, dtype=D)}
    f = lambda p: (p["a"].outer(p["b"][:, 0]).sin(), [p["b"].sum() ** 2, p["a"] ** 2])
    J = hodiff.jacobian(f, x, matrix=True)
    flat = lambda v: torch.cat([part.reshape(-1) for part in (v[0], *v[1])])

    def of_flat(z):
        return flat(f({"a": z[:2], "b": z[2:].reshape(3, 1)}))

    z = torch.cat([x["a"], x["b"].reshape(-1)])
    torch.testing.assert_close(J, torch.autograd.functional.jacobian(of_flat, z))
    assert J.shape == (6 + 1 + 2, 5)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_a_single_output(shape):
    x = torch.randn(3, 2, dtype=D)
    f = lambda x: x.sum().expand(shape).sin()
    torch.testing.assert_close(
        hodiff.jacobian(f, x, matrix=True), hodiff.jacobian(f, x).reshape(torch.Size(shape).numel(), 6)
    )


def test_of_a_model_and_of_samples():
    model, X = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=D)
    J = hodiff.jacobian(lambda m: m(X), model, matrix=True)
    assert J.shape == (8, 8)
    by_name = hodiff.jacobian(lambda m: m(X), model)
    torch.testing.assert_close(J.unflatten(0, (4, 2)), torch.cat([by_name[n].flatten(2) for n in by_name], -1))
    each = hodiff.jacobian(lambda x: torch.stack([x, x**2], 1), X, matrix=True, batch_ndim=1)
    assert each.shape == (4, 6, 3)
    torch.testing.assert_close(each[:, 3:], torch.diag_embed(2 * X))


def test_it_can_be_differentiated():
    x = torch.randn(3, dtype=D, requires_grad=True)
    J = hodiff.jacobian(lambda x: x.cumsum(0) ** 2, x, matrix=True, create_graph=True)
    (found,) = torch.autograd.grad(J.sum(), x)
    other = hodiff.jacobian(lambda x: x.cumsum(0) ** 2, x, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(other.sum(), x)[0])


def test_laplace_jacobians_of_a_model():
    net, x = two_layers(3, 2), torch.randn(5, 3, dtype=D)
    J = hodiff.jacobian(lambda m: m(x), net, matrix=True).unflatten(0, (5, 2))
    for i in (0, 4):
        rows = hodiff.jacobian(lambda m, i=i: m(x[i]), net, matrix=True)
        torch.testing.assert_close(J[i], rows)
