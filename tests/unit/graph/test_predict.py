"""What predict says, and what the engine then does, on random graphs and random calls."""

import collections

import pytest
import torch

import hodiff
from hodiff.graph import predict, shared
from tests.unit.graph.random_graphs import Cube, Graphs

CALLS = 4


def play(seed: int, counts: collections.Counter) -> None:
    """Random calls on a random graph, each foretold."""
    graphs = Graphs(seed)
    r = graphs.r
    for _ in range(CALLS):
        loss = r.choice(graphs.losses)
        kind = r.random()
        retain = r.random() < 0.35
        inputs = None
        if kind < 0.4:
            inputs = r.sample(graphs.values, r.randint(1, min(2, len(graphs.values))))
        if r.random() < 0.15:
            with torch.no_grad():
                r.choice(graphs.leaves).add_(0.5)
        if r.random() < 0.1:
            graphs.losses.append(graphs.scalar())
        verdict = predict(loss, inputs).verdict
        try:
            if inputs is None:
                loss.backward(retain_graph=retain)
            else:
                torch.autograd.grad(loss, inputs, retain_graph=retain)
            ran = True
        except RuntimeError:
            ran = False
        counts[verdict, ran] += 1
        assert (verdict, ran) not in {("ok", False), ("fail", True)}, seed


def fuzz(graphs: range) -> collections.Counter:
    counts: collections.Counter = collections.Counter()
    for seed in graphs:
        play(seed, counts)
    return counts


@pytest.mark.wide
def test_fuzz():
    counts = fuzz(range(800))
    assert counts.total() >= 3000
    assert counts["ok", True] > 800  # the test sees each outcome
    assert counts["fail", False] > 300
    assert counts["maybe", True] + counts["maybe", False] < 0.25 * counts.total()


@pytest.mark.nightly
def test_long_fuzz():
    assert fuzz(range(1000, 4100)).total() >= 12000


def test_freed_names_the_boundary():
    a = torch.rand(4, requires_grad=True)
    b = a**2
    c = b * 2
    d, e = c.mean(), c.sum()
    assert predict(e).verdict == "ok"
    d.backward()
    found = predict(e)
    assert found.verdict == "fail"
    assert {(finding.node, finding.reason, finding.variable) for finding in found.findings} == {
        ("MulBackward0", "freed", "c"),
        ("PowBackward0", "freed", "b"),
    }
    assert found.boundary == ("`c` = MulBackward0 (4,)",)
    assert "freed by an earlier pass" in str(found)


def test_stale():
    a = torch.rand(4, requires_grad=True)
    s = a.exp()
    loss = s.sum()
    s += 1
    found = predict(loss)
    assert (found.verdict, found.findings[0].reason) == ("fail", "stale")
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_only_what_leads_to_the_inputs_counts():
    x, y = (torch.rand(3, requires_grad=True) for _ in "xy")
    u = x.exp()
    loss = (u + y.sin()).sum()
    u.sum().backward()
    assert predict(loss).verdict == "fail"
    assert predict(loss, y).verdict == "ok"
    assert torch.equal(torch.autograd.grad(loss, y)[0], y.detach().cos())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: (x.detach().sum(), None), "no graph"),
        (lambda x: (x.exp(), None), "not a scalar"),
        (lambda x: (x.sum(), torch.rand(2, requires_grad=True)), "unused"),
        (lambda x: (x.sum(), torch.rand(2)), "no graph"),
    ],
)
def test_reasons_about_tensors(make, reason):
    loss, inputs = make(torch.rand(3, requires_grad=True))
    found = predict(loss, inputs)
    assert found.verdict == "fail"
    assert found.findings[-1].reason == reason
    with pytest.raises(RuntimeError, match=r"grad|used"):
        loss.backward() if inputs is None else torch.autograd.grad(loss, inputs)


def test_shared():
    a = torch.rand(1000, requires_grad=True)
    trunk = a.exp()
    found = shared(trunk.sin().sum(), trunk.sum(), a.cos().sum())
    assert found.nodes == 2  # exp, and a's own
    assert found.bytes == 4000
    assert found.private_nodes == (2, 1, 2)
    assert found.private_bytes == (4000, 0, 4000)  # sin saved the trunk's memory, cos a's
    assert any("trunk" in label for label in found.boundary)
    assert "loss 2 alone" in str(found)


def test_input_errors():
    with pytest.raises(hodiff.InputError, match="loss: got a float"):
        predict(1.0)
    with pytest.raises(hodiff.InputError, match="two or more"):
        shared(torch.rand(1))


def test_a_function_that_was_run_need_not_use_what_it_saved():
    loss = Cube.apply(torch.ones(3, requires_grad=True)).sum()
    loss.backward()
    found = predict(loss)
    assert (found.verdict, found.findings[0].reason) == ("maybe", "freed")
    assert "which need not use them" in found.findings[0].text


def test_a_derivative_that_is_missing():
    x = torch.randn(2, 3, requires_grad=True)
    loss = torch.nn.functional.multi_margin_loss(x, torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    found = predict(gradient.square().sum())
    assert found.verdict == "maybe"
    assert [finding.reason for finding in found.findings] == ["missing"]
