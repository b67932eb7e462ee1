"""Penalties and `torch.compile`: of a compiled critic, and inside of a step that a user has compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from tests.unit.penalties.oracles import conv, mlp

REAL = torch.randn(4, 2, 8, 8, dtype=torch.float64)
FAKE = torch.randn(4, 2, 8, 8, dtype=torch.float64)
STEPS = {
    "wgan_gp": lambda D: hodiff.wgan_gp_penalty(D, REAL, FAKE, patch_reduction="mean"),
    "r1": lambda D: F.softplus(-D(REAL)).mean() + hodiff.r1_penalty(D, REAL),
    "dragan": lambda D: hodiff.dragan_penalty(D, REAL),
    "pair, none": lambda D: hodiff.gradient_penalty(
        lambda p: D(p["a"] + p["b"]), {"a": REAL, "b": FAKE}, target=0.3, reduction="none"
    ).sum(),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo about what it skips


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compare(step, model):
    """Of a loss that breaks the graph around the penalty, with the gradient by all parameters."""
    compiled = torch.compile(lambda: step(model) * 2, backend="aot_eager")
    results = []
    for run in (lambda: step(model) * 2, compiled, compiled):
        torch.manual_seed(3)
        model.zero_grad()
        loss = run()
        loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
    for later in results[1:]:
        assert len(later) == len(results[0])
        for a, b in zip(later, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", STEPS)
def test_equals_eager(name):
    compare(STEPS[name], conv())


def test_points_and_a_detached_value():
    f, points = mlp(3), torch.randn(2, 6, 3, dtype=torch.float64)
    compare(lambda f: hodiff.eikonal_penalty(f, points), f)
    value = torch.compile(lambda: hodiff.eikonal_penalty(f, points), backend="aot_eager")
    with torch.no_grad():
        found = value()
    assert not found.requires_grad
    torch.testing.assert_close(found, hodiff.eikonal_penalty(f, points).detach())


def test_a_compiled_critic_in_an_eager_penalty():
    """It is run eagerly: compiled code has no second derivative."""
    D = conv()
    torch.testing.assert_close(
        hodiff.r1_penalty(torch.compile(D, backend="aot_eager"), REAL), hodiff.r1_penalty(D, REAL)
    )


def test_buffers_move_not_even_by_a_compiled_batch_norm():
    D = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    for training in (False, True):
        D.train(training)
        before = D[1].running_mean.clone()
        compare(lambda D: hodiff.r1_penalty(D, x), D)
        assert torch.equal(D[1].running_mean, before)
