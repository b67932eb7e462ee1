"""Which variable is said to hold most of some graphs, where several do."""

import runpy
import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from hodiff.graph import Watch, _growth
from hodiff.graph._names import TensorNames


@pytest.fixture
def made():
    """Values of three iterations, and what marks their nodes."""
    x = torch.ones(2, requires_grad=True)
    values = [x.exp() for _ in range(3)]
    return values, {value.grad_fn: object() for value in values}


def holder(names, marks):
    found = _growth.holder(names, marks.get, set(marks.values()))
    return found and found[:2]


def test_the_most_exact_of_those_that_hold_all(made):
    values, marks = made
    other = [values[0].detach().requires_grad_().sin()]
    found = holder(TensorNames(roots={"one": values[0], "kept": {"loss": values, "other": other}}), marks)
    assert found == ("kept['loss']", 3)


def test_of_two_ways_to_the_same_the_shorter(made):
    values, marks = made
    found = holder(TensorNames(roots={"trainer": SimpleNamespace(total=sum(values)), "losses": values}), marks)
    assert found == ("losses", 3)


def test_nothing_is_said_where_nothing_holds_them(made):
    _, marks = made
    assert holder(TensorNames(roots={"other": torch.ones(2, requires_grad=True).sin()}), marks) is None
    assert holder(TensorNames(), marks) is None


@pytest.mark.parametrize("bound", [3, None])
def test_what_forgets_by_itself_does_not_grow(made, bound):
    def keep(values):
        recent = deque(values, maxlen=bound)
        del values
        return recent, TensorNames([sys._getframe()])

    recent, names = keep(made[0])
    found = holder(names, made[1])
    assert (found is None) == (bound is not None)
    assert len(recent) == 3


def grown(tmp_path, start, step, rounds=300):
    path = tmp_path / "program.py"
    path.write_text(f"import torch\nfrom torch import nn\n{start}\nfor _ in range({rounds}):\n    {step}\n", "utf-8")
    growth = _growth.Growth()
    with Watch(growth):
        runpy.run_path(str(path), run_name="__main__")
    return growth.growing()


@pytest.mark.wide
def test_of_several_entries_that_grow_the_container_is_named(tmp_path):
    start = "net, sums = nn.Linear(2, 1), [0, 0]\nopt = torch.optim.SGD(net.parameters(), lr=0.1)"
    step = (
        "a, b = net(torch.randn(1, 2)).sum(), net(torch.randn(1, 2)).abs().sum()\n    (a + b).backward(); opt.step()\n"
        "    for k, v in enumerate((a, b)): sums[k] += v"
    )
    (found,) = grown(tmp_path, start, step, 60)
    assert (found.kind, found.variable) == ("spent", "sums")
    assert found.line.text.endswith("sums[k] += v")
