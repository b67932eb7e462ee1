"""Random directions of one's own: fixed over many calls, one of them enough."""

import numpy as np
import pytest
import torch

import hodiff
from tests.support.modules import two_layers

D = torch.float64
A = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 1.0], [4.0, 0.0, 5.0]], dtype=D)
X = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)
ROUTES = pytest.mark.parametrize("method", ["jets", "reverse"])


def field(x):
    return torch.tanh(x @ A)


def signs(*shape):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3)).to(D) * 2 - 1


def forms(v):
    """v' J v, sample by sample."""
    J = hodiff.jacobian(field, X, batch_ndim=1)
    return torch.einsum("...ni,nij,...nj->...n", v, J, v)


@ROUTES
def test_divergence_along_given_vectors(method):
    v = signs(4, 3)
    state = torch.get_rng_state()
    found = hodiff.divergence(field, X, vectors=v, method=method)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(found, forms(v))
    many = signs(5, 4, 3)
    torch.testing.assert_close(hodiff.divergence(field, X, vectors=many, method=method), forms(many).mean(0))
    with pytest.raises(hodiff.InputError, match="samples: got 2, but vectors= already gives the directions"):
        hodiff.divergence(field, X, vectors=many, samples=2, method=method)


@ROUTES
def test_laplacian_along_given_vectors(method):
    f = lambda x: field(x).square().sum(-1)
    H = hodiff.hessian(f, X, batch_ndim=1)
    v = signs(2, 4, 3)
    torch.testing.assert_close(
        hodiff.laplacian(f, X, vectors=v, method=method), torch.einsum("kni,nij,knj->kn", v, H, v).mean(0)
    )
    weight = torch.tensor([1.0, 0.0, 4.0], dtype=D)
    w = v * weight.sqrt()
    torch.testing.assert_close(
        hodiff.laplacian(f, X, vectors=v, weight=weight, method=method),
        torch.einsum("kni,nij,knj->kn", w, H, w).mean(0),
    )


@ROUTES
def test_value_and_divergence(method):
    value, exact = hodiff.value_and_divergence(field, X, method=method)
    torch.testing.assert_close(value, field(X))
    torch.testing.assert_close(exact, hodiff.divergence(field, X))
    value, found = hodiff.value_and_divergence(field, X, vectors=signs(4, 3), method=method)
    torch.testing.assert_close(value, field(X))
    torch.testing.assert_close(found, forms(signs(4, 3)))


@ROUTES
def test_both_parts_are_differentiable_by_parameters_and_points(method):
    W, x = A.clone().requires_grad_(), X.clone().requires_grad_()
    f = lambda x: torch.tanh(x @ W)
    value, found = hodiff.value_and_divergence(f, x, vectors=signs(4, 3), method=method)
    loss = value.square().sum() + found.square().sum()
    mine = torch.autograd.grad(loss, [W, x])

    def other(W, x):
        J = 1 - torch.tanh(x @ W).square()
        v = signs(4, 3)
        return torch.tanh(x @ W).square().sum() + ((v @ W) * J * v).sum(-1).square().sum()

    expected = torch.autograd.grad(other(W, x), [W, x])
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        value, found = hodiff.value_and_divergence(f, x, vectors=signs(4, 3), method=method)
    assert not value.requires_grad and not found.requires_grad


def test_a_tensor_already_computed():
    x = X.clone().requires_grad_()
    y = field(x)
    value, found = hodiff.value_and_divergence(y, x)
    torch.testing.assert_close(value, y)
    torch.testing.assert_close(found, hodiff.divergence(field, X))
    y.sum().backward()  # the graph is the caller's


def test_spellings():
    v = signs(4, 3)
    expected = hodiff.divergence(field, X, vectors=v)
    for spelled in (v.reshape(-1), v.numpy(), v.tolist(), v.reshape(12, 1)):
        torch.testing.assert_close(hodiff.divergence(field, X, vectors=spelled), expected)
    with torch.inference_mode():
        inference = v.clone()
    torch.testing.assert_close(hodiff.divergence(field, X, vectors=inference), expected)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.ones(3, dtype=D), r"vectors has shape \(3,\), expected \(4, 3\)"),
        (torch.ones(4, 3), "vectors is torch.float32"),
        (torch.ones(0, 4, 3, dtype=D), "vectors: got none"),
        (np.ones((4, 3), dtype=complex), "expected real numbers"),
        ("x", "got a str"),
    ],
)
def test_what_is_no_vector(vectors, message):
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.divergence(field, X, vectors=vectors)


def test_one_of_all_coordinates_is_exact():
    found = hodiff.laplacian(lambda x: x[:, 0] ** 3, X[:, :1], samples=1, probes="coordinates")
    assert found.stderr is not None and not found.stderr.any()


def test_given_vectors_pass_the_parts_of_a_large_batch():
    """Blocks of samples and chunks of directions take their own rows of the caller's vectors."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).double()
    x, v = torch.randn(600, 20, dtype=D), torch.randn(24, 600, 20, dtype=D)
    with torch.no_grad():
        whole = hodiff.laplacian(net, x, vectors=v)
        chunks = hodiff.laplacian(net, x, vectors=v, chunk_size=7)
        reverse = hodiff.laplacian(net, x, vectors=v, method="reverse")
    torch.testing.assert_close(whole, reverse)
    torch.testing.assert_close(chunks, reverse)


def runge_kutta(f, state, steps, h):
    """The classical method, by hand."""
    add = lambda a, b, c: tuple(x + c * y for x, y in zip(a, b, strict=True))
    for _ in range(steps):
        k1 = f(state)
        k2 = f(add(state, k1, h / 2))
        k3 = f(add(state, k2, h / 2))
        k4 = f(add(state, k3, h))
        state = tuple(x + h / 6 * (a + 2 * b + 2 * c + d) for x, a, b, c, d in zip(state, k1, k2, k3, k4, strict=True))
    return state


def test_ffjord_with_a_probe_that_stays_fixed_over_the_solve():
    net, x = two_layers(3, 3), torch.randn(5, 3, dtype=D)
    e = torch.randint(0, 2, x.shape).to(D) * 2 - 1

    def ours(state):
        value, found = hodiff.value_and_divergence(net, state[0], vectors=e)
        return value, -found

    def theirs(state):
        z = state[0] if state[0].requires_grad else state[0].requires_grad_()
        value = net(z)
        (pulled,) = torch.autograd.grad(value, z, e, create_graph=True)
        return value, -(pulled * e).sum(1)

    losses = []
    for f in (ours, theirs):
        z, log_p = runge_kutta(f, (x.clone(), torch.zeros(5, dtype=D)), 4, 0.25)
        losses.append((0.5 * z.square().sum(1) - log_p).mean())
    torch.testing.assert_close(losses[0], losses[1])
    found, expected = (torch.autograd.grad(loss, list(net.parameters()), allow_unused=True) for loss in losses)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_ffjord_halving_the_step_shows_the_order_of_the_method():
    """With a probe drawn anew at each stage the right-hand side would not be smooth, and no order would show."""
    net, x = two_layers(2, 2), torch.randn(4, 2, dtype=D)
    e = torch.ones_like(x)

    def f(state):
        value, found = hodiff.value_and_divergence(net, state[0], vectors=e, create_graph=False)
        return value, -found

    start = (x, torch.zeros(4, dtype=D))
    coarse, middle, fine = (runge_kutta(f, start, n, 1 / n)[1] for n in (4, 8, 16))
    assert 12 < float((coarse - middle).norm() / (middle - fine).norm()) < 20
