"""Gaussian with variance, and Poisson: Gauss-Newton and Fisher against `torch.distributions` and autograd."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import hodiff
from tests.support.operators import D

X = torch.linspace(-1, 1, 15, dtype=D).reshape(5, 3).cos()


def affine(columns):
    torch.manual_seed(0)
    return nn.Linear(3, columns).double()


def pair(m, batch):
    mean, raw = m(batch[0]).chunk(2, -1)
    return mean, torch.nn.functional.softplus(raw) + 0.1


CASES = {
    "gaussian": (nn.GaussianNLLLoss, pair, 4, torch.linspace(-2, 2, 10, dtype=D).reshape(5, 2)),
    "poisson": (nn.PoissonNLLLoss, lambda m, b: m(b[0]), 2, torch.arange(10.0, dtype=D).reshape(5, 2) % 4),
    "poisson, rates": (
        lambda **o: nn.PoissonNLLLoss(log_input=False, **o), lambda m, b: m(b[0]).exp(), 2,
        torch.arange(10.0, dtype=D).reshape(5, 2) % 4,
    ),
}  # fmt: skip


def as_loss(loss):
    """The same as a function, whose Hessian is differentiated."""

    def function(outputs, batch):
        if isinstance(loss, nn.GaussianNLLLoss):
            return loss(outputs[0], batch[1], outputs[1]), batch[1].numel()
        return loss(outputs, batch[1]), batch[1].numel()

    return function


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_written_out_is_differentiated(name, full):
    make, predict, columns, Y = CASES[name]
    model, data = affine(columns), [(X[:3], Y[:3]), (X[3:], Y[3:])]
    G = hodiff.GaussNewtonOperator(predict, make(full=full), model, data=data)
    other = hodiff.GaussNewtonOperator(predict, as_loss(make(full=full, reduction="sum")), model, data=data)
    torch.testing.assert_close(G.dense(), other.dense())
    torch.testing.assert_close(G.value, other.value)
    torch.testing.assert_close(G.gradient, other.gradient)
    V = torch.randn(G.shape[1], 3, dtype=D)
    torch.testing.assert_close(G @ V, G.dense() @ V)


@pytest.mark.parametrize("name", CASES)
def test_fisher_is_the_expectation_over_the_models_labels(name):
    make, predict, columns, Y = CASES[name]
    model, data = affine(columns), [(X, Y)]
    exact = hodiff.FisherOperator(predict, make(), model, data=data, kind="exact").dense()
    options = {"data": data, "kind": "mc", "samples": 20000, "generator": torch.Generator().manual_seed(0)}
    sampled = hodiff.FisherOperator(predict, make(), model, **options).dense()
    assert float((sampled - exact).norm() / exact.norm()) < 0.04
    assert float(torch.linalg.eigvalsh(exact)[0]) > -1e-12
    J = hodiff.jacobian(lambda m: predict(m, (X,)), model, matrix=True)
    if name == "gaussian":
        v = predict(model, (X,))[1].detach().reshape(-1)
        B = torch.cat([1 / v, 0.5 / v**2])
    else:
        z = predict(model, (X,)).detach().reshape(-1)
        B = z.exp() if name == "poisson" else 1 / z
    torch.testing.assert_close(exact, J.T @ (B[:, None] * J) / 10, rtol=1e-6, atol=1e-9)


def test_a_divergence_of_ones_own_gives_the_fisher_matrix():
    """TRPO: the Hessian of the divergence from the policy as it is, by a Gauss-Newton product."""
    _, predict, columns, Y = CASES["gaussian"]
    model, data = affine(columns), [(X, Y)]

    def divergence(outputs, batch):
        now = Normal(outputs[0], outputs[1].sqrt())
        fixed = Normal(outputs[0].detach(), outputs[1].detach().sqrt())
        return kl_divergence(fixed, now).sum(), outputs[0].numel()

    own = hodiff.GaussNewtonOperator(predict, divergence, model, data=data).dense()
    exact = hodiff.FisherOperator(predict, nn.GaussianNLLLoss(), model, data=data, kind="exact").dense()
    torch.testing.assert_close(own, exact)


def test_redundant_outputs_give_another_matrix():
    """The numbers of the docstring: at log σ = 0 and a residual of 2."""
    where, data = torch.tensor([2.0, 0.0], dtype=D), [torch.zeros(())]
    two = lambda p, b: (p[0], p[1])
    three = lambda p, b: (p[0], p[1], p[1].exp())
    of_two = lambda o, b: (o[1] + 0.5 * o[0] ** 2 / (2 * o[1]).exp(), 1)
    of_three = lambda o, b: (o[1] + 0.5 * o[0] ** 2 / o[2] ** 2, 1)
    found = [
        hodiff.GaussNewtonOperator(p, loss, where, data=data).dense() for p, loss in ((two, of_two), (three, of_three))
    ]
    torch.testing.assert_close(found[0], torch.tensor([[1.0, -4.0], [-4.0, 8.0]], dtype=D))
    torch.testing.assert_close(found[1], torch.tensor([[1.0, -4.0], [-4.0, 12.0]], dtype=D))


def test_what_predict_must_return():
    with pytest.raises(hodiff.InputError, match=r"takes a mean and a variance of one shape.*\[\(5, 4\)\]"):
        hodiff.GaussNewtonOperator(
            lambda m, b: m(b[0]), nn.GaussianNLLLoss(), affine(4), data=[(X, torch.zeros(5, 2, dtype=D))]
        ).dense()


def test_labels_are_drawn_from_the_default_generator_where_none_is_given() -> None:
    x, y = torch.linspace(-1, 1, 6, dtype=D).view(2, 3), torch.ones(2, 3, dtype=D)

    def product() -> Tensor:
        torch.manual_seed(4)
        F_ = hodiff.FisherOperator(lambda x, _: x.sin(), nn.PoissonNLLLoss(), x, data=[((), y)], kind="mc")
        return F_ @ torch.ones(6, dtype=D)

    assert product().any() and torch.equal(product(), product())
