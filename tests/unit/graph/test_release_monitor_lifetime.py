"""release, monitor and lifetime."""

import contextlib
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.graph import lifetime, monitor, predict, release
from tests.support.ledger import Ledger, without_collector
from tests.unit.graph.random_graphs import Cube


def test_release_returns_the_memory_at_once():
    a = torch.rand(1000, requires_grad=True)
    with without_collector(), Ledger() as ledger:
        loss = a.exp().sin().sum()
        assert ledger.alive(besides=loss) == 4000
        assert release(loss) == (2, 4000 + 0 * 4)
        assert ledger.alive(besides=loss) == 0
    with pytest.raises(hodiff.GraphError, match="was released: by hodiff"):
        loss.backward()


def test_release_keeps_what_others_need():
    a = torch.rand(5, requires_grad=True)
    trunk = a.exp()
    first, second = trunk.sin().sum(), trunk.cos().sum()
    expected = torch.autograd.grad(second, a, retain_graph=True)[0]
    assert release(first, keep=second).nodes == 1
    assert predict(first).verdict == "fail"
    second.backward()
    assert torch.equal(a.grad, expected)


def test_release_of_lists_and_functions_but_not_of_packed():
    a = torch.rand(4, requires_grad=True)
    loss = a[torch.tensor([0, 1])].sum() + Cube.apply(a).sum()
    assert release(loss).nodes == 2
    packed = checkpoint(lambda x: x.sin(), a, use_reentrant=False).sum()
    assert release(packed).nodes == 0
    packed.backward()
    assert torch.allclose(a.grad, a.detach().cos())


def test_release_of_a_checkpoint_whose_input_changed():
    h = torch.ones(3, requires_grad=True) * 1
    out = checkpoint(lambda x: x.exp(), h, use_reentrant=False)
    with torch.no_grad():
        h.mul_(2)
    assert release(out.sum() + (h * h).sum()).nodes == 2  # the products: the checkpoint has hooks of its own


def test_release_of_a_freed_graph_is_nothing():
    a = torch.rand(4, requires_grad=True)
    loss = a.exp().sum()
    loss.backward()
    assert release(loss) == (0, 0)


def run_total(detach: bool):
    a = torch.rand(4, requires_grad=True)
    growth = monitor()
    total = torch.zeros(())
    for _ in range(8):
        loss = a.exp().sum()
        total = total + (loss.detach() if detach else loss)
        growth.step(total=total)
    return growth


def test_monitor_names_the_line_of_a_running_total():
    with pytest.warns(hodiff.HodiffWarning, match=r"behind total grows.*total = total \+ \(loss.*extends it") as caught:
        growth = run_total(detach=False)
    assert len(caught) == 1  # once
    assert caught[0].filename == __file__
    nodes = [step.nodes for step in growth.history["total"]]
    assert nodes == [3 * step + 1 for step in range(1, 9)]  # exp, sum, add; and the leaf
    assert growth.history["total"][-1].bytes == 8 * 16
    assert "total: grows" in str(growth)


def test_monitor_is_silent_when_nothing_grows():
    growth = run_total(detach=True)
    assert "total: no growth" in str(growth)


def test_monitor_of_a_state_and_of_gradients():
    cell = nn.RNNCell(3, 4)
    h = torch.zeros(2, 4)
    growth = monitor(h=lambda: h)
    with pytest.warns(hodiff.HodiffWarning, match=r"h grows with every step: .* Line \d+ .* extends it"):
        for _ in range(6):
            h = cell(torch.ones(2, 3), h)
            growth.step()
    model = nn.Linear(2, 1)
    growth = monitor(model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            model(torch.ones(1, 2)).exp().sum().backward(create_graph=True)
            growth.step()
    assert "model: grows" in str(growth)
    for parameter in model.parameters():
        parameter.grad = None


def test_monitor_keeps_nothing_alive():
    a = torch.rand(4, requires_grad=True)
    growth = monitor()
    loss = a.exp().sum()
    growth.step(loss=loss)
    mark = weakref.ref(loss)
    del loss
    assert mark() is None


def test_monitor_input_errors():
    with pytest.raises(hodiff.InputError, match="total: got an object"):
        monitor(total=object())


def recorded():
    a = torch.rand(4, requires_grad=True)
    with lifetime() as record:
        y = a.exp()
        y.sin().sum().backward(retain_graph=True)
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                y.cos().sum().backward()
    return record


def test_lifetime():
    record = recorded()
    spans = {(span.line.text.split(".")[0][:5], span.stop, span.state, span.bytes) for span in record.spans}
    assert spans == {
        ("y = a", 0, "held", 16),
        ("y", 0, "held", 16),
        ("y = a", 1, "freed", 16),
        ("y", 1, "freed", 16),
        ("y", 2, "freed", 16),
        ("y = a", 2, "missing", 0),
    }
    assert "MISSING in pass 2" in str(record)
    assert str(record).startswith("3 backward passes")


def test_a_lifetime_without_a_pass():
    with lifetime() as record:
        pass
    assert str(record) == "0 backward passes"


def test_lifetime_keeps_no_graph_alive():
    a = torch.rand(1000, requires_grad=True)
    with without_collector(), Ledger() as ledger, lifetime() as record:
        loss = a.exp().sin().sum()
        torch.autograd.grad(loss, a, retain_graph=True)
        del loss
        assert ledger.alive() == 0
        assert record.spans
