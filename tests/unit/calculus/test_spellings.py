"""Vectors of the calculus in every spelling: like the point, lists of its leaves, flat, columns, arrays, numbers."""

import numpy as np
import pytest
import torch
from torch import nn

import hodiff
from hodiff.errors import InputError
from tests.support.modules import two_layers

D = torch.float64


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


X = torch.linspace(-1, 1, 15, dtype=D).reshape(5, 3)
POINTS = {
    "module": (lambda m: m(X).pow(3).sum(), network()),
    "matrix": (lambda x: (X @ x).pow(3).sum(), torch.linspace(0, 1, 6, dtype=D).reshape(3, 2)),
    "dict": (
        lambda p: (p["b"][0] @ p["a"]).pow(3).sum(),
        {"a": torch.ones(2, dtype=D), "b": [X[:2, :2].contiguous()]},
    ),
    "scalar": (lambda x: x**3, torch.tensor(2.0, dtype=D)),
}


def hessian(name):
    f, x = POINTS[name]
    return hodiff.hessian(f, x, matrix=True)


def flat_of(x):
    leaves = list(x.parameters()) if isinstance(x, nn.Module) else hodiff._core._tree.flatten(x)[0]
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves])


@pytest.mark.parametrize("name", POINTS)
def test_flat_vectors_and_columns(name):
    f, x = POINTS[name]
    H = hessian(name)
    V = torch.randn(len(H), 4, dtype=D)
    for column in (0, 3):
        found = hodiff.hvp(f, x, V[:, column])
        assert found.shape == (len(H),)
        torch.testing.assert_close(found, H @ V[:, column])
    torch.testing.assert_close(hodiff.hvp(f, x, V), H @ V)
    torch.testing.assert_close(hodiff.hvp(f, x, V[:, :1]), H @ V[:, :1])
    array = hodiff.hvp(f, x, V.numpy())
    assert isinstance(array, torch.Tensor)
    torch.testing.assert_close(array, H @ V)
    numbers = hodiff.hvp(f, x, V[:, 0].tolist())
    torch.testing.assert_close(numbers, H @ V[:, 0])


@pytest.mark.parametrize("name", ["module", "dict"])
def test_lists_of_the_leaves_in_their_order(name):
    f, x = POINTS[name]
    H, v = hessian(name), torch.randn(len(hessian(name)), dtype=D)
    shaped = hodiff.HessianOperator(f, x).unflatten(v)
    leaves = list(shaped.values()) if name == "module" else [shaped["a"], shaped["b"][0]]
    found = hodiff.hvp(f, x, leaves)
    assert type(found) is list
    torch.testing.assert_close(torch.cat([part.reshape(-1) for part in found]), H @ v)
    torch.testing.assert_close(hodiff.jvp(f, x, tuple(leaves)), hodiff.jvp(f, x, v))
    many = hodiff.hvp(f, x, [torch.stack([part, 2 * part]) for part in leaves])
    torch.testing.assert_close(many[0][1], 2 * found[0])


def test_products_of_a_jacobian():
    model = network()
    f = lambda m: {"y": m(X), "z": m(X).sum()}
    J = hodiff.JacobianOperator(f, model).dense()
    v, u = torch.randn(J.shape[1], dtype=D), torch.randn(J.shape[0], dtype=D)
    joined = lambda found: torch.cat([part.reshape(-1) for part in found.values()])
    torch.testing.assert_close(joined(hodiff.jvp(f, model, v)), J @ v)
    torch.testing.assert_close(joined(hodiff.vjp(f, model, u)), J.T @ u)
    V, U = torch.randn(J.shape[1], 3, dtype=D), torch.randn(J.shape[0], 3, dtype=D)
    torch.testing.assert_close(hodiff.jvp(f, model, V), J @ V)  # columns of columns
    torch.testing.assert_close(hodiff.vjp(f, model, U.numpy()), J.T @ U)
    pushed = hodiff.jvp(f, model, hodiff.HessianOperator(lambda m: m(X).sum(), model).unflatten(V))  # in front
    assert pushed["y"].shape == (3, 5, 2)
    torch.testing.assert_close(torch.cat([part.reshape(3, -1) for part in pushed.values()], 1), (J @ V).T)


def test_several_vectors_at_a_point_of_one_dimension():
    """Rows or columns, by their shape; as many as entries, in the list of the one leaf they are rows."""
    A = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [3.0, 0.0, 1.0]], dtype=D)
    f, x, V = (lambda x: (A @ x).pow(3).sum()), torch.ones(3, dtype=D), torch.randn(3, 3, dtype=D)
    H = hodiff.hessian(f, x)
    torch.testing.assert_close(hodiff.hvp(f, x, [V]), [V @ H])
    torch.testing.assert_close(hodiff.hvp(f, x, V[:2]), V[:2] @ H)
    torch.testing.assert_close(hodiff.hvp(f, x, [1, 0, 2.5]), H @ torch.tensor([1, 0, 2.5], dtype=D))
    torch.testing.assert_close(hodiff.hvp(f, x, V[:, :2]), H @ V[:, :2])
    with pytest.raises(hodiff.InputError, match=r"\(2, 2\), expected \(3,\), or \(K, 3\) for K vectors"):
        hodiff.hvp(f, x, V[:2, :2])


BAD = {
    "rows": (torch.ones(2, 26, dtype=D), r"shape \(2, 26\), expected \(26,\), or \(26, K\).*columns: give v\.T"),
    "length": (torch.ones(25, dtype=D), r"shape \(25,\), expected \(26,\)"),
    "dtype": (torch.ones(26), "is torch.float32 on cpu, expected torch.float64"),
    "array of objects": (np.array([None] * 26), "expected real numbers"),
    "complex array": (np.ones(26, dtype=complex), "expected real numbers"),
    "ragged": ([[1.0], [1.0, 2.0]], "rows differ in length"),
    "numbers": ([1.0, 2.0], r"shape \(2,\), expected \(26,\)"),
    "text": ("x", "got a str, expected a dict"),
    "too few leaves": ([torch.ones(4, 3, dtype=D)], "is a list of 1, expected a dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_vector(name):
    vector, message = BAD[name]
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.hvp(lambda m: m(X).sum() ** 2, network(), vector)


@pytest.mark.parametrize("name", ["rows", "length", "dtype", "numbers", "ragged"])
def test_functions_and_operators_say_the_same_of_it(name):
    vector, message = BAD[name]
    H = hodiff.HessianOperator(lambda m: m(X).sum() ** 2, network())
    with pytest.raises(hodiff.InputError, match=message) as by_operator:
        H @ vector
    with pytest.raises(hodiff.InputError, match=message) as by_function:
        hodiff.hvp(lambda m: m(X).sum() ** 2, network(), vector)
    assert str(by_operator.value) == str(by_function.value)


def test_the_way_to_convert_a_vector_can_be_run():
    v, x = torch.ones(3), torch.ones(3, dtype=D)
    with pytest.raises(hodiff.InputError, match=r"convert it: v\.to\(") as told:
        hodiff.hvp(lambda x: (x**2).sum(), x, v)
    said = str(told.value).partition("convert it: ")[2].removesuffix(".")
    torch.testing.assert_close(hodiff.hvp(lambda x: (x**2).sum(), x, eval(said)), 2 * x)


def test_flat_vectors_are_differentiated_by():
    f, x = POINTS["matrix"]
    v = torch.randn(6, dtype=D, requires_grad=True)
    found = hodiff.hvp(f, x, v, create_graph=True)
    (by_v,) = torch.autograd.grad(found.sum(), v)
    torch.testing.assert_close(by_v, hessian("matrix").sum(0))


def test_leaves_of_several_dtypes():
    x = {"a": torch.ones(2), "b": torch.ones(2, dtype=D)}
    f = lambda p: (p["a"].double() * p["b"]).pow(2).sum()
    v = torch.arange(4, dtype=D)
    found = hodiff.hvp(f, x, v)
    assert found.dtype == D
    torch.testing.assert_close(found, hodiff.hessian(f, {k: p.double() for k, p in x.items()}, matrix=True) @ v)


def test_penalties_take_them():
    f, x = network(), X
    v = torch.randn(5, 2, dtype=D)
    like = hodiff.jacobian_penalty(f, x, vectors=v)
    torch.testing.assert_close(hodiff.jacobian_penalty(f, x, vectors=v.reshape(-1)), like)
    torch.testing.assert_close(hodiff.jacobian_penalty(f, x, vectors=v.numpy()), like)


THREE = torch.tensor([0.3, -0.7, 1.1])


def test_no_vectors_give_no_products():
    result = hodiff.hvp(lambda x: (x**3).sum(), THREE, torch.empty(0, 3), create_graph=True)
    assert result.shape == (0, 3)


def test_a_vector_by_name_in_another_precision():
    model = nn.Linear(3, 1)
    v = {name: torch.ones_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    with pytest.raises(InputError, match="float64"):
        hodiff.hvp(lambda model: model(THREE).square().sum(), model, v)


def test_adahessian_with_one_probe():
    """z ∘ Hz of a list of parameters, in one product."""
    net, x = two_layers(3, 1), torch.randn(5, 3, dtype=D)
    loss = lambda m: m(x).square().mean()
    z = [torch.randint(0, 2, p.shape).to(D) * 2 - 1 for p in net.parameters()]
    found = [a * b for a, b in zip(z, hodiff.hvp(loss, net, z), strict=True)]
    H = hodiff.hessian(loss, net, matrix=True)
    flat = torch.cat([part.reshape(-1) for part in z])
    torch.testing.assert_close(torch.cat([part.reshape(-1) for part in found]), flat * (H @ flat))
