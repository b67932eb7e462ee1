"""The whole penalized step inside `torch.compile`, as one graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from tests.support.releases import ONE_GRAPH
from tests.unit.penalties.oracles import conv, mlp

pytestmark = ONE_GRAPH

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


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compare(step, model, backend):
    compiled = torch.compile(lambda: step(model), fullgraph=True, backend=backend)
    results = []
    for run in (lambda: step(model), compiled, compiled):
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
    compare(STEPS[name], conv(), "aot_eager")


def test_points_and_a_detached_value():
    f, points = mlp(3), torch.randn(2, 6, 3, dtype=torch.float64)
    compare(lambda f: hodiff.eikonal_penalty(f, points), f, "aot_eager")
    value = torch.compile(lambda: hodiff.eikonal_penalty(f, points), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = value()
    assert not found.requires_grad
    torch.testing.assert_close(found, hodiff.eikonal_penalty(f, points).detach())


@pytest.mark.parametrize("create_graph", [False, True])
def test_attention_whose_rows_are_masked_in_full(create_graph):
    """The fused kernel's first gradient is wrong there, and it has no second one."""
    mask = torch.zeros(3, 3, dtype=torch.float64).index_fill(0, torch.tensor([1]), torch.finfo(torch.float64).min)
    x, scale = torch.randn(5, 12, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def written(q, k, v, mask):
        return (q @ k.mT / 2 + mask).softmax(-1) @ v

    def penalty(attention, scale):
        def f(x):
            q = (scale * x).reshape(-1, 1, 3, 4)
            return attention(q, q.sin(), q.cos(), mask).sin().sum((1, 2, 3))

        return hodiff.gradient_penalty(f, x, create_graph=create_graph)

    step = torch.compile(
        lambda scale: penalty(F.scaled_dot_product_attention, scale), fullgraph=True, backend="aot_eager"
    )
    found, expected = step(scale), penalty(written, scale)
    torch.testing.assert_close(found, expected)
    if create_graph:
        torch.testing.assert_close(torch.autograd.grad(found, scale), torch.autograd.grad(expected, scale))


@pytest.mark.nightly
def test_equals_eager_with_inductor():
    compare(STEPS["r1"], conv(), "inductor")  # its random numbers are not those of eager mode


def test_what_a_compiled_region_cannot_do_raises():
    f, x = mlp(5, 5), torch.randn(4, 5, dtype=torch.float64)
    for call, message in [
        (lambda: hodiff.jacobian_penalty(f, x), "of the penalties only gradient_penalty and its recipes"),
        (lambda: hodiff.gradient_norm_penalty(lambda f: f(x).sum(), f), "takes a function and tensors"),
        (lambda: hodiff.gradient_penalty(lambda x: f(x).mean(), x), "already reduced over the batch"),
    ]:
        with pytest.raises((hodiff.InputError, torch._dynamo.exc.TorchRuntimeError, Exception), match=message):
            torch.compile(call, fullgraph=True, backend="aot_eager")()


def test_a_compiled_critic_in_an_eager_penalty():
    """It is run eagerly: compiled code has no second derivative."""
    D = conv()
    torch.testing.assert_close(
        hodiff.r1_penalty(torch.compile(D, backend="aot_eager"), REAL), hodiff.r1_penalty(D, REAL)
    )


def test_buffers_move_not_even_by_a_compiled_batch_norm():
    D = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    x = torch.randn(6, 5, dtype=torch.float64)
    compare(lambda D: hodiff.r1_penalty(D, x), D, "aot_eager")
    D.train()
    before = D[1].running_mean.clone()
    with pytest.raises(Exception, match="mutate a captured Tensor"):
        torch.compile(lambda: hodiff.r1_penalty(D, x), fullgraph=True, backend="aot_eager")()
    assert torch.equal(D[1].running_mean, before)
