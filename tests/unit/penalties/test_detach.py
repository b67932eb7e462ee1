"""Samples that require grad: detached with a word, without one on request, or not detached at all."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hodiff
from tests.unit.penalties.oracles import DOUBLE, mlp, parameter_gradients, same

X, Y = (torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) for seed in (1, 2))


def featurizer():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double()


def seeded():
    return torch.Generator().manual_seed(7)


def alpha():
    return torch.rand(6, generator=seeded(), dtype=DOUBLE).unsqueeze(1)


def noisy(x):
    draws = seeded()
    u = torch.rand(x.shape, generator=draws, dtype=DOUBLE)
    far = x + 0.5 * x.std(correction=0) * u
    return torch.lerp(x, far, torch.rand(6, generator=draws, dtype=DOUBLE).unsqueeze(1))


def squared(norms):
    return 5 * norms.square().mean()


def off_one(norms):
    return 10 * (norms - 1).square().mean()


RECIPES = {  # the penalty of features a and b; the points, and the loss of the norms there, by hand
    "wgan_gp": (
        lambda D, a, b, **o: hodiff.wgan_gp_penalty(D, a, b, generator=seeded(), **o),
        lambda a, b: torch.lerp(a, b, alpha()),
        off_one,
    ),
    "dragan": (
        lambda D, a, b, **o: hodiff.dragan_penalty(D, a, generator=seeded(), **o),
        lambda a, b: noisy(a),
        off_one,
    ),
    "r1": (lambda D, a, b, **o: hodiff.r1_penalty(D, a, **o), lambda a, b: a, squared),
    "r2": (lambda D, a, b, **o: hodiff.r2_penalty(D, a, **o), lambda a, b: a, squared),
    "interpolate": (
        lambda D, a, b, **o: hodiff.gradient_penalty(
            D, hodiff.interpolate(a, b, generator=seeded(), **o), target=1.0, weight=10.0
        ),
        lambda a, b: torch.lerp(a, b, alpha()),
        off_one,
    ),
}
recipes = pytest.mark.parametrize("name", RECIPES)


@recipes
def test_a_featurizer_gets_the_gradient_of_a_double_backward(name):
    """The domain-adversarial case: the penalty trains what made the features too."""
    penalty, points, loss = RECIPES[name]
    D, features = mlp(), featurizer()
    at = points(features(X), features(Y))
    (g,) = torch.autograd.grad(D(at).sum(), at, create_graph=True)
    by_hand = loss(g.norm(dim=1))
    found = penalty(D, features(X), features(Y), detach=False)
    same(found, by_hand, nn.ModuleList([features, D]))
    assert any(part.any() for part in parameter_gradients(penalty(D, features(X), features(Y), detach=False), features))


@recipes
def test_detaching_what_requires_grad_is_said(name):
    penalty, D, features = RECIPES[name][0], mlp(), featurizer()
    with pytest.warns(
        hodiff.HodiffWarning, match=r"requires grad but will be detached.*detach=True.*detach=False"
    ) as w:
        silent = penalty(D, features(X), features(Y))
    assert all(warning.filename == __file__ for warning in w)
    silent.backward()
    assert all(p.grad is None for p in features.parameters())
    torch.testing.assert_close(penalty(D, features(X), features(Y), detach=True), silent)  # warnings are errors here
    penalty(D, X, Y)
    with torch.no_grad():
        penalty(D, features(X), features(Y))


def test_the_sample_is_named():
    D, features = mlp(), featurizer()
    for call, name in [
        (lambda: hodiff.wgan_gp_penalty(D, X, features(X)), "fake"),
        (lambda: hodiff.r1_penalty(lambda p: D(p["a"]), {"a": features(X)}), r"real\['a'\]"),
        (lambda: hodiff.r2_penalty(D, features(X)), "fake"),
    ]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert len(caught) == 1
        assert re.match(f"{name} requires grad", str(caught[0].message))


def test_the_argument_of_an_enclosing_call_is_one_that_requires_grad():
    D, a = mlp(), torch.randn(6, 5, dtype=DOUBLE)
    said = pytest.warns(hodiff.HodiffWarning, match="real requires grad but will be detached")
    with said, pytest.raises(hodiff.GraphError, match="depend"):
        hodiff.grad(lambda a: hodiff.r1_penalty(D, a), a)
    found = hodiff.grad(lambda a: hodiff.r1_penalty(D, a, detach=False), a)
    leaf = a.clone().requires_grad_()
    (g,) = torch.autograd.grad(D(leaf).sum(), leaf, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(5 * g.square().sum(1).mean(), leaf)[0])


def test_nothing_is_said_where_nothing_is_recorded():
    D, features = mlp(), featurizer()
    hodiff.r1_penalty(D, features(X), create_graph=False)


D = torch.float64


PENALTIES: dict[str, Callable[..., Any]] = {
    "r1_penalty": lambda D, x, **o: hodiff.r1_penalty(D, x, **o),
    "r2_penalty": lambda D, x, **o: hodiff.r2_penalty(D, x, **o),
    "wgan_gp_penalty": lambda D, x, **o: hodiff.wgan_gp_penalty(D, x, x, **o),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_sample_that_requires_grad_is_told_or_followed(name: str) -> None:
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    features = torch.randn(5, 3, dtype=D, requires_grad=True)
    with pytest.warns(hodiff.HodiffWarning, match="detach"):
        PENALTIES[name](critic, features * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PENALTIES[name](critic, features.detach())
        followed = PENALTIES[name](critic, features * 2, detach=False)
    (gradient,) = torch.autograd.grad(followed, features)
    assert gradient.abs().max() > 0
