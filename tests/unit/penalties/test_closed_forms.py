"""Every penalty against an answer known in closed form, and against its formula written out with `autograd.grad`."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hodiff
from hodiff._core._vectors import draw
from hodiff.penalties import _gradient
from tests.support.differences import gradient_by_differences
from tests.unit.penalties.oracles import (
    DOUBLE,
    conv,
    gradient,
    hessians,
    jacobian,
    mlp,
    norms,
    same,
)


def linear(*weights: float) -> nn.Linear:
    critic = nn.Linear(len(weights), 1).double()
    critic.weight.data.copy_(torch.tensor([weights], dtype=DOUBLE))
    return critic


def quadratic(A):
    return lambda x: 0.5 * torch.einsum("ni,ij,nj->n", x, A, x)


# --- closed forms ----------------------------------------------------------------------------------------------------

W = (3.0, 4.0)
X = torch.randn(6, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
LINEAR = {  # of a linear critic, |w| = 5
    "penalty": (lambda D: hodiff.gradient_penalty(D, X), 25),
    "sum": (lambda D: hodiff.gradient_penalty(D, X, reduction="sum"), 150),
    "target": (lambda D: hodiff.gradient_penalty(D, X, target=7.0), 4),
    "one sided, below": (lambda D: hodiff.gradient_penalty(D, X, target=7.0, one_sided=True), 0),
    "one sided, above": (lambda D: hodiff.gradient_penalty(D, X, target=3.0, one_sided=True), 4),
    "power 1": (lambda D: hodiff.gradient_penalty(D, X, target=7.0, power=1), 2),
    "power 3": (lambda D: hodiff.gradient_penalty(D, X, target=2.0, power=3), 27),
    "power 2.5": (lambda D: hodiff.gradient_penalty(D, X, target=1.0, power=2.5), 32),
    "power 6 (WGAN-div)": (lambda D: hodiff.gradient_penalty(D, X, power=6, weight=2.0), 2 * 5**6),
    "1-norm": (lambda D: hodiff.gradient_penalty(D, X, ord=1), 49),
    "max-norm": (lambda D: hodiff.gradient_penalty(D, X, ord=math.inf, target=1.0), 9),
    "WGAN-GP": (lambda D: hodiff.wgan_gp_penalty(D, X, Y), 160),
    "WGAN-LP": (lambda D: hodiff.wgan_gp_penalty(D, X, Y, one_sided=True, target=6.0), 0),
    "DRAGAN": (lambda D: hodiff.dragan_penalty(D, X), 160),
    "R1": (lambda D: hodiff.r1_penalty(D, X), 125),
    "R2": (lambda D: hodiff.r2_penalty(D, X, gamma=1.0), 12.5),
    "eikonal": (lambda D: hodiff.eikonal_penalty(D, X), 1.6),
    "eikonal (SIREN)": (lambda D: hodiff.eikonal_penalty(D, X, weight=50.0, power=1), 200),
    "Jacobian, exact": (lambda D: hodiff.jacobian_penalty(D, X, samples=None, weight=1.0), 12.5),
    "Jacobian, one output": (lambda D: hodiff.jacobian_penalty(D, X, weight=1.0), 12.5),  # on a sphere of R: +-1
}


@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_critic(name):
    call, expected = LINEAR[name]
    torch.testing.assert_close(call(linear(*W)), torch.tensor(float(expected), dtype=DOUBLE))


def test_linear_critic_gradient_by_the_weight():
    critic = linear(*W)
    hodiff.wgan_gp_penalty(critic, X, Y).backward()
    w = torch.tensor([W], dtype=DOUBLE)
    torch.testing.assert_close(critic.weight.grad, 2 * 10 * (5 - 1) * w / 5)


@pytest.mark.parametrize("name", [name for name, (_, expected) in LINEAR.items() if expected])
def test_gradient_by_differences(name):
    def value(weight):
        torch.manual_seed(0)
        critic = linear(*weight.flatten().tolist())
        with torch.no_grad():
            return LINEAR[name][0](critic)

    critic = linear(*W)
    torch.manual_seed(0)
    LINEAR[name][0](critic).backward()
    expected = gradient_by_differences(value, torch.tensor([W], dtype=DOUBLE))
    torch.testing.assert_close(critic.weight.grad, expected, rtol=1e-7, atol=1e-7)


def test_quadratic():
    A = torch.randn(4, 4, dtype=DOUBLE)
    A = A + A.T
    x = torch.randn(9, 4, dtype=DOUBLE)
    f = quadratic(A.requires_grad_())
    g = x @ A
    z = g.sign() / 2  # of four signs the norm is 2
    torch.testing.assert_close(hodiff.r1_penalty(f, x, gamma=3.0), 1.5 * g.square().sum(1).mean())
    torch.testing.assert_close(hodiff.wgan_gp_penalty(f, x, x), 10 * (g.norm(dim=1) - 1).square().mean())
    torch.testing.assert_close(hodiff.curvature_penalty(f, x), 4 * 1.5**2 * (z @ A).square().sum(1).mean())


def test_one_hidden_layer():
    a, W1, b = (torch.randn(*s, dtype=DOUBLE, requires_grad=True) for s in [(6,), (6, 3), (6,)])
    x = torch.randn(7, 3, dtype=DOUBLE)
    critic = lambda x: torch.tanh(x @ W1.T + b) @ a
    g = (a * (1 - torch.tanh(x @ W1.T + b).square())) @ W1
    expected = 10 * (g.square().sum(1).sqrt() - 1).square().mean()
    found = hodiff.gradient_penalty(critic, x, target=1.0, weight=10.0)
    torch.testing.assert_close(found, expected)
    for p, q in zip(torch.autograd.grad(found, (a, W1, b)), torch.autograd.grad(expected, (a, W1, b)), strict=True):
        torch.testing.assert_close(p, q)


def test_least_squares():
    data, target = torch.randn(8, 3, dtype=DOUBLE), torch.randn(8, dtype=DOUBLE)
    theta = torch.randn(3, dtype=DOUBLE, requires_grad=True)
    loss = lambda t: (data @ t - target).square().sum() / 16
    penalty, value = hodiff.gradient_norm_penalty(loss, theta, return_outputs=True)
    g = data.T @ (data @ theta - target) / 8
    torch.testing.assert_close(value, loss(theta))
    torch.testing.assert_close(penalty, g @ g)
    penalty.backward()
    torch.testing.assert_close(theta.grad, 2 * data.T @ data / 8 @ g.detach())


def test_linear_softmax():
    W1 = torch.randn(4, 3, dtype=DOUBLE, requires_grad=True)
    x, y = torch.randn(5, 3, dtype=DOUBLE), torch.tensor([0, 1, 2, 3, 0])
    per_sample = lambda x: F.cross_entropy(x @ W1.T, y, reduction="none")
    g = (torch.softmax(x @ W1.T, 1) - F.one_hot(y, 4)) @ W1
    torch.testing.assert_close(hodiff.gradient_penalty(per_sample, x), g.square().sum(1).mean())


def test_distances_solve_the_eikonal_equation_in_any_batch_shape():
    c = torch.tensor(3.0, dtype=DOUBLE, requires_grad=True)
    for shape in [(7, 3), (2, 7, 3), (2, 2, 2, 2)]:
        points = torch.randn(shape, dtype=DOUBLE)
        for f in (lambda x: c * x.norm(dim=-1), lambda x: c * x.norm(dim=-1, keepdim=True)):
            torch.testing.assert_close(hodiff.eikonal_penalty(f, points, weight=1.0), torch.tensor(4.0, dtype=DOUBLE))
        assert hodiff.eikonal_penalty(lambda x: c * x.norm(dim=-1), points, reduction="none").shape == shape[:-1]


# --- the formulas, with plain autograd.grad --------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gan_recipes_of_a_conv_critic(reduction):
    D, real, fake = conv(), torch.randn(3, 2, 8, 8, dtype=DOUBLE), torch.randn(3, 2, 8, 8, dtype=DOUBLE)
    total = getattr(torch, reduction)

    torch.manual_seed(7)
    points = hodiff.interpolate(real, fake)
    torch.manual_seed(7)
    found = hodiff.wgan_gp_penalty(D, real, fake, reduction=reduction)
    same(found, 10 * total((norms(gradient(D, points)) - 1).square()), D)

    torch.manual_seed(7)
    u, alpha = torch.rand(3, 2, 8, 8, dtype=DOUBLE), torch.rand(3, 1, 1, 1, dtype=DOUBLE)
    points = real + alpha * 0.5 * real.std(correction=0) * u
    torch.manual_seed(7)
    found = hodiff.dragan_penalty(D, real, reduction=reduction)
    same(found, 10 * total((norms(gradient(D, points)) - 1).square()), D)

    same(hodiff.r1_penalty(D, real, reduction=reduction), 5 * total(gradient(D, real).flatten(1).square().sum(1)), D)
    same(hodiff.r2_penalty(D, fake, reduction=reduction), 5 * total(gradient(D, fake).flatten(1).square().sum(1)), D)
    patches = hodiff.r1_penalty(D, real, patch_reduction="mean", reduction=reduction)
    same(patches * 9**2, 5 * total(gradient(D, real).flatten(1).square().sum(1)), D)


def test_jacobian_exact_and_projected():
    f, x = mlp(4, 3), torch.randn(5, 4, dtype=DOUBLE)
    same(hodiff.jacobian_penalty(f, x, samples=None, weight=2.0), jacobian(f, x).square().sum((1, 2)).mean(), f)
    torch.manual_seed(3)
    v = draw((6, 5, 3), x, "gaussian", None)
    torch.manual_seed(3)
    found = hodiff.jacobian_penalty(f, x, samples=6, probes="gaussian", weight=2.0)
    same(found, torch.einsum("knc,nci->kni", v, jacobian(f, x)).square().sum(2).mean(), f)


def test_jacobian_estimate_is_unbiased():
    f, x = mlp(4, 3), torch.randn(1, 4, dtype=DOUBLE)
    for probes in ("rademacher", "gaussian"):
        with torch.no_grad():
            exact = hodiff.jacobian_penalty(f, x, samples=None)
            many = hodiff.jacobian_penalty(f, x, samples=20000, probes=probes)
        assert abs(many / exact - 1) < 0.05, probes


def test_jacobian_of_images_and_containers():
    f = lambda p: torch.cat([p["a"] * 2, p["b"].flatten(1)], 1)[:, :, None]
    p = {"a": torch.randn(4, 3, dtype=DOUBLE), "b": torch.randn(4, 2, 2, dtype=DOUBLE)}
    with torch.no_grad():
        values = hodiff.jacobian_penalty(f, p, samples=None, weight=2.0, reduction="none")
    assert values.tolist() == [16.0] * 4  # 3 · 2² + 4


@pytest.fixture
def all_signs(monkeypatch):
    """Instead of random vectors: each of the 2^d vectors of signs, once."""

    def every(shape, like, probes, generator):
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=like.dtype)] * like.shape[-1])
        return signs.reshape(-1, 1, like.shape[-1]).expand(-1, *like.shape)

    monkeypatch.setattr(_gradient, "draw", every)


@pytest.mark.parametrize("reduction", ["max", "mean", "sum", "none"])
def test_hessian_penalty_of_all_signs_is_the_off_diagonal(all_signs, reduction):
    f, z = mlp(3, 4), torch.randn(5, 3, dtype=DOUBLE)
    H = hessians(f, z)
    off = H - torch.diag_embed(H.diagonal(dim1=-2, dim2=-1))
    expected = 2 * off.square().sum((-2, -1)) * 8 / 7  # unbiased variance of 8 vectors
    reduce = {"max": torch.max, "mean": torch.mean, "sum": torch.sum, "none": lambda t: t}[reduction]
    found = hodiff.hessian_penalty(f, z, samples=8, reduction=reduction)
    if reduction == "none":
        torch.testing.assert_close(found, expected)
    else:
        same(found, reduce(expected), f)
    near = hodiff.hessian_penalty(f, z, samples=8, method="differences", epsilon=1e-3, reduction=reduction)
    torch.testing.assert_close(near, found, rtol=1e-4, atol=1e-9)


def test_published_hessian_penalty():
    """The reference's own test: z0 z1 and z0² z1 have penalties of 4 and 16 z0²."""
    z = torch.randn(5, 2, dtype=DOUBLE)
    G = lambda z: torch.stack([z[:, 0] * z[:, 1], z[:, 0] ** 2 * z[:, 1]], 1)
    for method in ("exact", "differences"):
        with torch.no_grad():
            found = hodiff.hessian_penalty(G, z, samples=600, method=method, reduction="none")
        torch.testing.assert_close(found[:, 0], torch.full((5,), 4.0, dtype=DOUBLE), rtol=0.1, atol=0)
        torch.testing.assert_close(found[:, 1], 16 * z[:, 0] ** 2, rtol=0.15, atol=0)


def test_curvature_of_a_network():
    f, x = mlp(4, 3), torch.randn(5, 4, dtype=DOUBLE)
    y = torch.tensor([0, 1, 2, 0, 1])
    loss = lambda x: F.cross_entropy(f(x), y, reduction="none")
    g = gradient(loss, x)
    z = g.detach().sign() / 2
    same(
        hodiff.curvature_penalty(loss, x, h=3.0, weight=0.5),
        0.5 * (gradient(loss, x + 3 * z) - g).square().sum(1).mean(),
        f,
    )


@pytest.mark.parametrize("variance_reduced", [True, False])
@pytest.mark.parametrize("projections", [1, 3])
def test_score_matching(variance_reduced, projections):
    x = torch.randn(6, 4, dtype=DOUBLE)

    def expected(J, s, v):
        trace = torch.einsum("kni,nij,knj->kn", v, J, v).mean(0)
        plain = (v * s).sum(2).square().mean(0)
        return (trace + (s.square().sum(1) if variance_reduced else plain) / 2).mean()

    options = {"variance_reduced": variance_reduced, "samples": projections}
    score = mlp(4, 4)
    torch.manual_seed(5)
    v = draw((projections, *x.shape), x, "rademacher", None)
    torch.manual_seed(5)
    same(hodiff.sliced_score_matching_loss(score, x, **options), expected(jacobian(score, x), score(x), v), score)

    logp = mlp(4, 1)
    torch.manual_seed(5)
    found = hodiff.sliced_score_matching_loss(logp, x, log_density=True, **options)
    same(found, expected(hessians(logp, x)[:, 0], gradient(logp, x), v), logp)


def test_score_matching_of_a_gaussian():
    """-tr P + |Px|² / 2, and what the unit sphere would give instead."""
    B = torch.randn(5, 5, dtype=DOUBLE)
    P, x = B @ B.T, torch.randn(1, 5, dtype=DOUBLE)
    right = -P.trace() + (x @ P).square().sum() / 2
    wrong = -P.trace() / 5 + (x @ P).square().sum() / 2
    for probes in ("rademacher", "gaussian"):
        with torch.no_grad():
            many = hodiff.sliced_score_matching_loss(lambda x: -x @ P, x, samples=20000, probes=probes)
        assert abs(many - right) < 0.03 * P.trace()
        assert abs(many - wrong) > 0.5 * P.trace()


# --- shapes ----------------------------------------------------------------------------------------------------------


@given(
    batch=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    events=st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=3),
    ending=st.lists(st.just(1), max_size=2),
    power=st.sampled_from([1, 2, 3]),
    target=st.sampled_from([0.0, 0.7]),
)
def test_any_batch_and_any_container(batch, events, ending, power, target):
    point = [torch.randn((*batch, *event), dtype=DOUBLE) for event in events]
    a = torch.randn((), dtype=DOUBLE, requires_grad=True)

    def f(point):
        rows = [leaf.reshape(*batch, -1) for leaf in point]
        return sum(torch.sin(a * row).sum(-1) for row in rows).reshape(*batch, *ending)

    flat = torch.cat([leaf.reshape(*batch, -1) for leaf in point], -1)
    n = (a * torch.cos(a * flat)).square().sum(-1).sqrt()
    found = hodiff.gradient_penalty(
        f, point, batch_ndim=len(batch), power=power, target=target, reduction="none", weight=2.0
    )
    expected = 2 * (n - target).abs() ** power
    torch.testing.assert_close(found, expected)
    first, second = (torch.autograd.grad(value.sum(), a)[0] for value in (found, expected))
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-8)


def test_conditional_critic_and_a_module_as_where():
    D = mlp(5)
    x, label = torch.randn(4, 3, dtype=DOUBLE), torch.randn(4, 2, dtype=DOUBLE, requires_grad=True)
    critic = lambda x, c, *, scale: scale * D(torch.cat([x, c], 1))
    found = hodiff.gradient_penalty(critic, x, target=1.0, args=(label,), kwargs={"scale": 2.0})
    expected = (norms(gradient(lambda x: critic(x, label, scale=2.0), x)) - 1).square().mean()
    same(found, expected, D)
    assert torch.autograd.grad(hodiff.r1_penalty(critic, x, args=(label,), kwargs={"scale": 1.0}), label)[0].any()

    loss = lambda model: model(torch.cat([x, label], 1)).square().mean()
    whole = parameter_gradients_squared(loss(D), D)
    same(hodiff.gradient_norm_penalty(loss, D), whole, D)


def parameter_gradients_squared(loss, model):
    return sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True))


def test_gradient_by_the_points_themselves():
    """Where x requires grad the penalty is differentiable by it; the GAN recipes detach."""
    D, x = mlp(3), torch.randn(4, 3, dtype=DOUBLE, requires_grad=True)
    (found,) = torch.autograd.grad(hodiff.gradient_penalty(D, x), x)
    expected = gradient_by_differences(lambda p: hodiff.gradient_penalty(D, p), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    for penalty in (hodiff.r1_penalty, hodiff.r2_penalty, hodiff.dragan_penalty):
        (none,) = torch.autograd.grad(penalty(D, x, detach=True), x, allow_unused=True)
        assert none is None


def test_computed_tensor_instead_of_a_function():
    D, x = conv(), torch.randn(3, 2, 8, 8, dtype=DOUBLE, requires_grad=True)
    logits = D(x)
    penalty = hodiff.gradient_penalty(logits, x, target=1.0)
    same(
        penalty + logits.mean(),  # the caller's graph is whole
        (norms(gradient(D, x)) - 1).square().mean() + D(x).mean(),
        D,
    )


D = torch.float64


def test_both_draws_of_a_curvature_penalty_are_one():
    linear = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).double()
    found = hodiff.curvature_penalty(lambda x: linear(x).squeeze(1), torch.randn(8, 3, dtype=D), create_graph=False)
    torch.testing.assert_close(found, torch.zeros((), dtype=D))
