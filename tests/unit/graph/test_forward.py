"""What is said of operations that autograd refuses in the forward: the value, and the lines."""

import pytest
import torch

from hodiff.graph import explain, watch
from tests.unit.graph.test_facts import facts, lines, told  # noqa: F401 -- the last is a fixture


def test_a_leaf_that_is_changed_by_numbers(told):  # noqa: F811
    found = told("w = torch.ones(3, requires_grad=True)\nw -= 0.1\nw.mul_(2)\n")
    assert (found.call, found.cause, found.variable) == ("sub_", "refused in place", "w")
    assert lines(found, "refused") == ["w -= 0.1"]
    assert lines(found, "made") == ["w = torch.ones(3, requires_grad=True)"]


@pytest.mark.parametrize("change", ["w.add_(v)", "w.add_(other=v)", "w += v"])
def test_a_leaf_that_is_to_get_a_graph_of_its_own(told, change):  # noqa: F811
    found = told(f"w, v = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)\n{change}\n")
    assert (found.cause, found.variable) == ("refused in place", "w")


def test_the_way_to_it(told):  # noqa: F811
    found = told("""
def innermost(w):
    w.zero_()


def middle(w):
    innermost(w)


def outer(w):
    middle(w)


outer(torch.ones(3, requires_grad=True))
""")
    assert lines(found, "refused") == ["w.zero_()"]
    nearest, outermost = lines(found, "called")
    assert nearest == "innermost(w)"
    assert outermost == 'runpy.run_path(str(path), run_name="__main__")'  # where the watch was entered


def test_a_line_was_not_called_from_itself():
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf") as caught, watch():
        w.zero_()
    found = explain(caught.value)
    assert lines(found, "refused") == ["w.zero_()"]
    assert not facts(found, "called")


def test_one_of_several_views(told):  # noqa: F811
    found = told("""
x = torch.ones(2, 3, requires_grad=True) * 1
parts = x.unbind(0)
[parts[i].squeeze_(0) for i in range(2)]
""")
    assert (found.call, found.cause, found.variable) == ("squeeze_", "refused in place", "parts[i]")
    assert lines(found, "made") == ["parts = x.unbind(0)"]


MADE = "net = nn.Linear(3, 3)\nwith torch.inference_mode():\n    x = torch.ones(3, 3)\n"


@pytest.mark.parametrize("call", ["net.weight * x", "torch.mul(net.weight, other=x)", "torch.mul(x, net.weight)"])
def test_the_inference_tensor_is_named(told, call):  # noqa: F811
    found = told(MADE + call)
    assert (found.cause, found.variable) == ("inference tensor", "x")
    assert lines(found, "made") == ["x = torch.ones(3, 3)"]
    assert lines(found, "off since") == ["with torch.inference_mode():"]


def test_an_activation_that_would_change_an_inference_tensor(told):  # noqa: F811
    found = told(MADE + "nn.functional.relu_(x)")
    assert (found.cause, found.variable) == ("inference tensor", "x")
