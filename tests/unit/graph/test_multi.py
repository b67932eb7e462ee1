"""multi_grad: the same numbers as separate passes, on any topology; and what it leaves in memory."""

import random

import pytest
import torch
from torch import nn

import hodiff
from tests.support.ledger import Ledger, without_collector
from tests.unit.graph.random_graphs import Graphs

METHODS = ("auto", "release", "cut", "retain")


def separately(losses, where):
    rows = []
    for loss in losses:
        row = torch.autograd.grad(loss, where, retain_graph=True, allow_unused=True) if loss.requires_grad else where
        rows.append([torch.zeros_like(w) if g is None else g for g, w in zip(row, where, strict=True)])
    return rows


def compare(seed: int, method: str) -> int:
    graphs = Graphs(seed, wild=seed % 2 == 0)
    graphs.losses.append(graphs.scalar())
    r = graphs.r
    where = r.sample(graphs.values, r.randint(1, min(3, len(graphs.values))))
    try:
        expected = separately(graphs.losses, where)
    except RuntimeError:  # two in-place views of a kind that PyTorch itself refuses
        return 0
    if all(not part.any() for row in expected for part in row):
        return 0
    got = hodiff.multi_grad(graphs.losses, where, method=method)
    for row, right in zip(got, expected, strict=True):
        for part, other in zip(row, right, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-12)
    return 1


@pytest.mark.parametrize("method", METHODS)
def test_random_graphs(method):
    assert sum(compare(seed, method) for seed in range(490)) >= 400


def rebuild(seed: int, leaves):
    """The losses of graph number `seed`, on other leaves."""
    graphs = object.__new__(Graphs)
    graphs.r = random.Random(seed)
    graphs.leaves = list(leaves)
    graphs.r.randint(1, 3)
    graphs.values = list(leaves)
    for _ in range(graphs.r.randint(3, 9)):
        graphs.values.append(graphs.next(False))
    return [graphs.scalar() for _ in range(graphs.r.randint(1, 4))]


def test_sequential_on_random_graphs():
    done = 0
    for seed in range(420):
        graphs = Graphs(seed, wild=False)
        expected = separately(graphs.losses, graphs.leaves)
        if all(not part.any() for row in expected for part in row):
            continue
        calls = [lambda leaves, i=i, seed=seed: rebuild(seed, leaves)[i] for i in range(len(graphs.losses))]
        try:
            got = hodiff.multi_grad(calls, graphs.leaves, method="sequential")
        except hodiff.GraphError as error:  # one loss that depends on nothing: said, not zero
            assert "depend" in str(error)
            continue
        for row, right in zip(got, expected, strict=True):
            torch.testing.assert_close(row, right, rtol=1e-12, atol=1e-12)
        done += 1
    assert done >= 400


def test_each_topology_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for method in METHODS:
        z = w * x**2
        inner, outer, skip = z.sum(), (w * z).sum(), (z * x).sum()  # w and x reach the losses directly, too
        got = hodiff.multi_grad({"inner": inner, "outer": outer, "skip": skip, "itself": inner}, (x, w), method=method)
        right = {
            "inner": (4 * x, (x**2).sum()),
            "outer": (8 * x, 4 * (x**2).sum()),
            "skip": (6 * x**2, (x**3).sum()),
            "itself": (4 * x, (x**2).sum()),
        }
        for name, (by_x, by_w) in right.items():
            torch.testing.assert_close(got[name], (by_x.detach(), by_w.detach()))
        assert x.grad is None


def heads(k: int = 6):
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()).double()
    each = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double() for _ in range(k)])
    return nn.ModuleDict({"trunk": trunk, "heads": each}), torch.randn(64, 8, dtype=torch.float64)


def expected_heads(model, x):
    z = model["trunk"](x)
    losses = [head(z).square().mean() for head in model["heads"]]
    return separately(losses, list(model.parameters()))


@pytest.mark.parametrize("method", [*METHODS, "sequential", "shared"])
def test_a_module(method):
    model, x = heads()
    right = expected_heads(model, x)
    if method == "shared":
        calls = [lambda m, z, i=i: m["heads"][i](z).square().mean() for i in range(6)]
        got = hodiff.multi_grad(calls, model, shared=lambda m: m["trunk"](x))
    else:
        calls = [lambda m, i=i: m["heads"][i](m["trunk"](x)).square().mean() for i in range(6)]
        got = hodiff.multi_grad(calls, model, method=method)
    names = [name for name, _ in model.named_parameters()]
    for row, expected in zip(got, right, strict=True):
        assert list(row) == names
        torch.testing.assert_close(list(row.values()), expected, rtol=1e-12, atol=1e-14)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("method", "spent"), [("cut", True), ("release", True), ("retain", False)])
def test_what_lives_on(method, spent):
    model, x = heads()
    with without_collector(), Ledger() as ledger:
        z = model["trunk"](x)
        losses = [head(z).square().mean() for head in model["heads"]]
        before = ledger.alive(besides=(z, losses))
        got = hodiff.multi_grad(losses, model, method=method)
        after = ledger.alive(besides=(z, losses, got))
    if spent:
        assert after == 0
        with pytest.raises(RuntimeError, match=r"released, by hodiff|second time"):
            losses[0].backward()
    else:
        assert after == before > 0
        losses[0].backward()


def test_zero_where_a_loss_does_not_depend_and_an_error_where_none_does():
    a, b = (torch.ones(2, requires_grad=True) for _ in "ab")
    first, second = hodiff.multi_grad([a.sum(), b.exp().sum()], (a, b))
    assert torch.equal(first[1], torch.zeros(2))
    assert torch.equal(second[0], torch.zeros(2))
    with pytest.raises(hodiff.GraphError, match="depend"):
        hodiff.multi_grad([(b * 2).sum()], a)


def test_a_tensor_that_carries_no_graph_among_losses():
    a = torch.ones(2, requires_grad=True)
    constant, loss = hodiff.multi_grad([torch.tensor(1.0), a.sum()], a)
    assert torch.equal(constant, torch.zeros(2))
    assert torch.equal(loss, torch.ones(2))


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        ([], {}, "losses: is empty"),
        (3, {}, "losses: is a int"),
        ([3], {}, "losses: holds a int"),
        ("mixed", {}, "are mixed"),
        ("tensors", {"method": "fast"}, "method: is 'fast', expected one of"),
        ("tensors", {"method": "sequential"}, "needs functions"),
        ("tensors", {"shared": torch.exp}, "shared: is for losses that are functions"),
        ("vector", {}, "expected one element"),
    ],
)
def test_bad_input(losses, options, message):
    a = torch.ones(2, requires_grad=True)
    given = {"mixed": [a.sum(), torch.sum], "tensors": [a.sum()], "vector": [a * 2]}.get(str(losses), losses)
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.multi_grad(given, a, **options)
