"""What is said of operations that autograd refuses in the forward: the value, the lines, and what is sound instead."""

import re

import pytest
import torch

from hodiff.graph import watch
from tests.unit.graph.test_fixes import said  # noqa: F401 -- a fixture


def test_a_leaf_that_is_changed_by_numbers(said):  # noqa: F811
    note = said("w = torch.ones(3, requires_grad=True)\nw -= 0.1\nw.mul_(2)\n")
    assert "refused: sub_, of `w`\n    at           program.py:6   w -= 0.1\n" in note
    assert (
        "fix 1: change its value without recording: put program.py:6 (w -= 0.1) into `with torch.no_grad():`." in note
    )
    assert "\n           The same goes for program.py:7 (w.mul_(2))." in note
    assert "not known" not in note


@pytest.mark.parametrize("change", ["w.add_(v)", "w.add_(other=v)", "w += v"])
def test_a_leaf_that_is_to_get_a_graph_of_its_own(said, change):  # noqa: F811
    note = said(f"w, v = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)\n{change}\n")
    assert "of `w`" in note
    assert not re.search(r"^ *fix", note, re.MULTILINE)
    assert "not known: should the new value be part of the graph?" in note


def test_the_way_to_it(said):  # noqa: F811
    note = said("""
def innermost(w):
    w.zero_()


def middle(w):
    innermost(w)


def outer(w):
    middle(w)


outer(torch.ones(3, requires_grad=True))
""")
    at, nearest, outermost = re.findall(r"^    (?:at|called from) +(.*)$", note, re.MULTILINE)
    assert at == "program.py:7   w.zero_()"
    assert nearest == "program.py:11   innermost(w)"
    assert "runpy.run_path(" in outermost  # where the watch was entered


def test_a_line_was_not_called_from_itself():
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf") as caught, watch():
        w.zero_()
    (note,) = caught.value.__notes__
    assert "w.zero_()" in note
    assert "called from" not in note


def test_one_of_several_views(said):  # noqa: F811
    note = said("""
x = torch.ones(2, 3, requires_grad=True) * 1
parts = x.unbind(0)
[parts[i].squeeze_(0) for i in range(2)]
""")
    assert "refused: squeeze_, of `parts[i]`" in note
    assert "use squeeze instead of squeeze_ at program.py:8" in note


MADE = "net = nn.Linear(3, 3)\nwith torch.inference_mode():\n    x = torch.ones(3, 3)\n"


@pytest.mark.parametrize("call", ["net.weight * x", "torch.mul(net.weight, other=x)", "torch.mul(x, net.weight)"])
def test_the_inference_tensor_is_named(said, call):  # noqa: F811
    note = said(MADE + call)
    assert "of `x`\n    at           program.py:8 " in note
    assert "it was made under inference_mode, so no graph can save it." in note
    assert "not known: where it was made." in note


def test_an_activation_that_would_change_an_inference_tensor(said):  # noqa: F811
    note = said(MADE + "nn.functional.relu_(x)")
    assert "refused: relu_, of `x`" in note
    assert "inplace=False" not in note
    assert "or change a .clone() of it" in note
