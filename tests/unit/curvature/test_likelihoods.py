"""Every likelihood that is written out: Gauss-Newton and Fisher against `torch.distributions` and autograd."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, Poisson, kl_divergence

import hodiff
from hodiff.curvature._losses import LIKELIHOODS
from tests.support.operators import D

X = torch.linspace(-1, 1, 15, dtype=D).reshape(5, 3).cos()


def affine(columns):
    torch.manual_seed(0)
    return nn.Linear(3, columns).double()


def pair(m, batch):
    mean, raw = m(batch[0]).chunk(2, -1)
    return mean, torch.nn.functional.softplus(raw) + 0.1


def linear(m, batch):
    return m(batch[0])


REAL = torch.linspace(-2, 2, 10, dtype=D).reshape(5, 2)
COUNTS = torch.arange(10.0, dtype=D).reshape(5, 2) % 4
normal = lambda o: Normal(o[0], o[1].sqrt())
CASES = {
    "gaussian": (nn.GaussianNLLLoss, {}, pair, 4, REAL, normal),
    "gaussian, full": (nn.GaussianNLLLoss, {"full": True}, pair, 4, REAL, normal),
    "poisson": (nn.PoissonNLLLoss, {}, linear, 2, COUNTS, lambda z: Poisson(z.exp())),
    "poisson, full": (nn.PoissonNLLLoss, {"full": True}, linear, 2, COUNTS, lambda z: Poisson(z.exp())),
    "poisson, rates": (nn.PoissonNLLLoss, {"log_input": False}, lambda m, b: m(b[0]).exp(), 2, COUNTS, Poisson),
    "classes": (nn.CrossEntropyLoss, {}, linear, 4, torch.arange(5) % 4, lambda z: Categorical(logits=z)),
    "squares": (nn.MSELoss, {}, linear, 2, REAL, lambda z: Normal(z, 0.5**0.5)),
    "binary": (nn.BCEWithLogitsLoss, {}, linear, 2, COUNTS % 2, lambda z: Bernoulli(logits=z)),
}
"""Of each likelihood: the loss, its options, predict, columns of the outputs, targets, the distribution that it is."""


def test_every_likelihood_has_its_oracle_here_and_its_name_in_the_docstring():
    assert {case[0] for case in CASES.values()} == set(LIKELIHOODS)
    for kind in LIKELIHOODS:
        assert f"`nn.{kind.__name__}`" in str(hodiff.GaussNewtonOperator.__doc__)


def as_loss(loss):
    """The same as a function, whose Hessian is differentiated."""

    def function(outputs, batch):
        if isinstance(loss, nn.GaussianNLLLoss):
            return loss(outputs[0], batch[1], outputs[1]), batch[1].numel()
        return loss(outputs, batch[1]), batch[1].numel()

    return function


@pytest.mark.parametrize("name", CASES)
def test_written_out_is_differentiated(name):
    make, options, predict, columns, Y, _ = CASES[name]
    model, data = affine(columns), [(X[:3], Y[:3]), (X[3:], Y[3:])]
    G = hodiff.GaussNewtonOperator(predict, make(**options), model, data=data)
    function = as_loss(make(**options, reduction="sum"))
    other = hodiff.GaussNewtonOperator(predict, function, model, data=data)
    assert "closed-form" in repr(G) and "differentiated" in repr(other)
    summed = hodiff.GaussNewtonOperator(predict, make(**options, reduction="sum"), model, data=data)
    torch.testing.assert_close(summed.dense(), G.dense() * Y.numel())
    torch.testing.assert_close(G.dense(), other.dense())
    torch.testing.assert_close(G.value, other.value)
    torch.testing.assert_close(G.gradient, other.gradient)
    V = torch.randn(G.shape[1], 3, dtype=D)
    torch.testing.assert_close(G @ V, G.dense() @ V)


@pytest.mark.parametrize("name", CASES)
def test_fisher_is_the_expectation_over_the_models_labels(name):
    """The Hessian of the divergence from the model as it is (of a policy: TRPO), by a Gauss-Newton product."""
    make, given, predict, columns, Y, distribution = CASES[name]
    model, data = affine(columns), [(X, Y)]

    def divergence(outputs, batch):
        fixed = tuple(part.detach() for part in outputs) if isinstance(outputs, tuple) else outputs.detach()
        return kl_divergence(distribution(fixed), distribution(outputs)).sum(), Y.numel()

    exact = hodiff.FisherOperator(predict, make(**given), model, data=data, kind="exact").dense()
    torch.testing.assert_close(exact, hodiff.GaussNewtonOperator(predict, divergence, model, data=data).dense())
    options = {"data": data, "kind": "mc", "samples": 4000, "generator": torch.Generator().manual_seed(0)}
    sampled = hodiff.FisherOperator(predict, make(**given), model, **options).dense()
    assert float((sampled - exact).norm() / exact.norm()) < 0.08
    assert float(torch.linalg.eigvalsh(exact)[0]) > -1e-12


def test_a_module_of_ones_own_is_differentiated_and_says_so():
    class Own(nn.Module):
        def forward(self, outputs, batch):
            return (outputs - batch[1]).square().sum(), batch[1].numel()

    data = [(X, REAL)]
    G = hodiff.GaussNewtonOperator(linear, Own(), affine(2), data=data)
    torch.testing.assert_close(
        G.dense(), hodiff.GaussNewtonOperator(linear, nn.MSELoss(), affine(2), data=data).dense()
    )
    assert "differentiated loss" in repr(G)


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
    with pytest.raises(hodiff.InputError, match=r"takes a mean and a variance of the same shape.*\[\(5, 4\)\]"):
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
