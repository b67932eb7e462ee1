"""Graphs of unusual tensors: each function is right about them, or says clearly what is the matter."""

import contextlib

import pytest
import torch

from hodiff._core import _nodes
from hodiff.graph import inspect, lifetime, monitor, predict, release, shared, watch


def plain():
    a = torch.rand(4, requires_grad=True)
    return a, (a * a).sum()


def jagged():
    parts = [torch.rand(2, 3), torch.rand(3, 3)]
    a = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    return a, a.sin().values().sum()


def strided():
    a = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(3, 3)], requires_grad=True)
    return a, (a * a).to_padded_tensor(0.0).sum()


def on_meta():
    a = torch.rand(4, device="meta", requires_grad=True)
    return a, (a * a).sum()


def of_complex():
    a = torch.rand(4, dtype=torch.cfloat, requires_grad=True)
    return a, (a * a).abs().sum()


def half():
    a = torch.rand(4, dtype=torch.float16, requires_grad=True)
    return a, (a * a).sum()


def sparse():
    a = torch.rand(3, 3, requires_grad=True)
    return a, torch.sparse.mm(a.to_sparse(), a).sum()


def without_elements():
    a = torch.rand(0, requires_grad=True)
    return a, (a * a).sum()


KINDS = [plain, jagged, strided, on_meta, of_complex, half, sparse, without_elements]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_each_function_is_right_about(make, mode):
    a, loss = make()
    with mode():
        assert predict(loss).verdict == predict(loss, a).verdict == "ok"
        graph = inspect(loss)
        assert [leaf.name for leaf in graph.leaves] == ["a"]
        assert str(graph)
        assert "loss 0 alone: 0 nodes" in str(shared(loss, loss))
        growth = monitor(loss=lambda: loss)
        growth.step()
        assert growth.history["loss"][0].nodes == len(graph.nodes)
    with lifetime() as record:
        loss.backward()
    assert [span.state for span in record.spans] == ["freed"] * len(record.spans)
    assert str(record).startswith("1 backward passes")
    assert predict(loss).verdict == predict(loss, a).verdict == "fail"
    a, loss = make()
    with mode():
        assert release(loss).nodes >= 1
        assert predict(loss, a).findings[0].reason == "released"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_watch_changes_no_pass_to_an_input(make):
    a, loss = make()
    (right,) = torch.autograd.grad(loss, a, retain_graph=True)
    with watch() as record:
        (found,) = torch.autograd.grad(loss, a)
        assert len(record.passes) == 1
    assert found.layout == right.layout
    assert found.dtype == right.dtype
    assert predict(loss).verdict == "fail"


def test_bytes_that_no_memory_takes_are_not_counted():
    _, loss = on_meta()
    assert inspect(loss).bytes == 0
    assert shared(loss, loss).bytes == 0
    assert release(loss).bytes == 0
    _, loss = plain()
    assert inspect(loss).bytes == 16


def test_a_complex_loss_has_no_gradient_of_its_own():
    a = torch.rand(3, dtype=torch.cfloat, requires_grad=True)
    total = a.exp().sum()
    for found in (predict(total), predict(total, a)):
        assert found.verdict == "fail"
        assert [(finding.reason, finding.variable) for finding in found.findings] == [("complex", "total")]
        assert "total is complex (torch.complex64): backward() needs a gradient for it" in str(found)
    with pytest.raises(RuntimeError, match="only for real scalar outputs"):  # what was foretold
        total.backward()


def test_a_parameter_made_in_inference_mode_is_in_no_graph():
    with torch.inference_mode():
        linear = torch.nn.Linear(2, 2)
    weight = linear.weight
    assert weight.requires_grad
    assert _nodes.node_of(weight) is None
    assert predict(weight.sum(), weight).verdict == "fail"
    with watch(), pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(weight.sum(), weight)


def test_a_leaf_s_node_is_found_in_inference_mode():
    a = torch.rand(2, requires_grad=True)
    node = a.exp().grad_fn.next_functions[0][0]
    with torch.inference_mode():
        assert _nodes.node_of(a) is node
        assert torch.is_inference_mode_enabled()
