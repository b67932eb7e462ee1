"""What inspect shows, that it runs nothing, and that an unknown PyTorch makes it say unknown."""

import ast
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _messages, _nodes, _versions
from hodiff.curvature._memory import LiveBytes
from hodiff.graph import _saved, inspect, predict
from tests.meta.source import PACKAGE
from tests.support.releases import SEVERAL
from tests.unit.graph.random_graphs import Cube, Graphs


def states(tensor):
    return [(node.name, saved.name, saved.state) for node in inspect(tensor).nodes for saved in node.saved]


def test_states_of_builtin_nodes():
    a = torch.rand(3, requires_grad=True)
    b = a * torch.rand(3)
    c = (b * b).sum()
    product = [("MulBackward0", "other", "alive"), ("MulBackward0", "self", "alive")]
    assert states(c) == [*product, ("MulBackward0", "other", "alive")]
    c.backward()
    assert {state for *_, state in states(c)} == {"freed"}
    assert inspect(c).state == "freed"
    assert inspect(c).bytes == 0


def test_stale():
    a = torch.rand(3, requires_grad=True)
    s = a.exp()
    loss = s.sum()
    s.mul_(2)
    assert ("ExpBackward0", "result", "stale") in states(loss)


def test_lists_and_functions():
    a = torch.rand(3, requires_grad=True)
    loss = a[torch.tensor([0, 1])].sum() + Cube.apply(a).sum()
    assert states(loss) == [("IndexBackward0", "indices[0]", "alive"), ("CubeBackward", "tensors[0]", "alive")]
    loss.backward()
    assert {state for *_, state in states(loss)} == {"freed"}


class Two(torch.autograd.Function):
    """Saves two tensors and None, which is none."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, None, x * 1)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_read_as_before_212_a_checkpoint_of_what_was_changed_is_stale(monkeypatch):
    """And a mode that looks on, as a counter of memory does, is no hook."""
    monkeypatch.setattr(_nodes, "saved", _versions._read)
    x = torch.rand(3, requires_grad=True) * 1
    y = checkpoint(torch.sin, x, use_reentrant=False)
    with LiveBytes():
        plain = x.exp()
        assert [state for name, _, state in states(plain) if name == "ExpBackward0"] == ["alive"]
    x.detach().mul_(2)
    assert predict(y.sum()).verdict == "fail"
    assert [state for name, _, state in states(y) if name == "SinBackward0"] == ["stale"]


@SEVERAL
def test_of_several_that_a_function_saved_each_has_its_state():
    x = torch.rand(3, requires_grad=True) * 1
    loss = Two.apply(x).sum()
    assert [state for name, _, state in states(loss) if name == "TwoBackward"] == ["alive", "alive"]
    x.mul_(2)
    assert [state for name, _, state in states(loss) if name == "TwoBackward"] == ["stale", "stale"]


def unpacked(packed):
    raise AssertionError("inspect runs no hook")


@SEVERAL
def test_where_one_of_several_is_packed_none_is_unpacked():
    x = torch.rand(3, 1, requires_grad=True) * 1
    picked = x[torch.tensor([0, 1]), torch.tensor([0, 0])]
    picked.grad_fn._raw_saved_indices[1].register_hooks(lambda tensor: tensor, unpacked)
    found = [state for name, _, state in states(picked) if name == "IndexBackward0"]
    assert found == ["alive", "packed"]
    assert inspect(picked).nodes[0].state == "packed"
    y = Two.apply(x)
    y.grad_fn._raw_saved_tensors[0].register_hooks(lambda tensor: tensor, unpacked)
    assert [state for name, _, state in states(y) if name == "TwoBackward"] == ["packed", "alive"]


def test_in_place_on_a_view_is_unknown():
    a = torch.rand(4, requires_grad=True).clone()
    a[1:3] *= 2
    assert inspect(a.sum()).state == "unknown"


def test_who_holds_the_bytes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.randn(5, 10)
    hidden = model[1](model[0](x))
    loss = model[2](hidden).exp().sum()
    graph = inspect(loss)
    # by hand: x and hidden are variables here, both weights are parameters; exp's result belongs to the graph alone
    assert graph.bytes_by_holder == {
        "graph": 5 * 4,
        "python": (5 * 10 + 5 * 20) * 4,
        "parameter": (20 + 20 * 10) * 4 - 800,
    }
    assert {leaf.name for leaf in graph.leaves} == {"model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"}
    assert any(node.variable == "hidden" for node in graph.nodes)
    del hidden
    assert inspect(loss).bytes_by_holder["graph"] == (5 + 5 * 20) * 4


def test_a_value_that_is_saved_twice_is_not_held_by_python_for_that():
    a = torch.rand(3, requires_grad=True)
    e = a.exp()
    loss = (e * e).sum()
    assert inspect(loss).bytes_by_holder == {"graph": 0, "python": 12, "parameter": 0}
    del e
    assert inspect(loss).bytes_by_holder == {"graph": 12, "python": 0, "parameter": 0}


def test_what_python_holds_is_no_graphs_though_another_node_saved_it_too():
    a = torch.rand(3, requires_grad=True)

    def hidden():
        kept = [a.exp()]
        return (kept[0] * kept[0]).sum(), lambda: kept

    loss, keeps = hidden()
    assert inspect(loss).bytes_by_holder == {"graph": 0, "python": 12, "parameter": 0}
    del keeps
    assert inspect(loss).bytes_by_holder == {"graph": 12, "python": 0, "parameter": 0}


def test_the_worst_state_of_any_node_is_that_of_the_graph():
    y = torch.rand(3, requires_grad=True).exp()
    y.sum().backward()
    graph = inspect(y.sin())
    assert [node.state for node in graph.nodes[:2]] == ["alive", "freed"]
    assert graph.state == "freed"


def test_of_several_on_the_same_memory_the_very_tensor_is_named():
    alias = None  # so that it is met first
    e = torch.rand(3, requires_grad=True).exp()
    alias = e.detach()
    (saved,) = inspect(e.sin()).nodes[0].saved
    assert (saved.holder, saved.variable) == ("python", "e")
    assert alias is not None


def test_a_deleted_factor_is_listed():
    a, b = (torch.tensor(v, requires_grad=True) for v in (1.0, 2.0))
    c = a * b
    del b
    (other,) = [saved for saved in inspect(c).saved if saved.name == "other"]
    assert (other.state, other.bytes) == ("alive", 4)


def test_names_from_a_module():
    def of(model):
        return model(torch.ones(1, 2)).sum()

    loss = of(nn.Linear(2, 1))
    assert {leaf.name for leaf in inspect(loss).leaves} == {""}
    model = nn.Linear(2, 1)
    loss = of(model)
    assert {leaf.name for leaf in inspect(loss).leaves} == {"model.weight", "model.bias"}
    held = [model]
    del model
    assert {leaf.name for leaf in inspect(loss, names={"net": held[0]}).leaves} == {"net.weight", "net.bias"}
    assert {leaf.name for leaf in inspect(loss, names=held[0]).leaves} == {"weight", "bias"}


def test_nothing_is_run():
    calls = {"pack": 0, "unpack": 0, "block": 0, "hook": 0, "node": 0}

    def count(name, value=None):
        calls[name] += 1
        return value

    def block(x):
        calls["block"] += 1
        return x.sin().exp()

    a = torch.rand(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: count("pack", t), lambda t: count("unpack", t)):
        b = a.exp()
    c = checkpoint(block, b, use_reentrant=False)
    c.register_hook(lambda g: count("hook", g))
    c.grad_fn.register_hook(lambda *g: count("node"))
    loss = c.square().sum()
    before = dict(calls)
    for _ in range(3):
        graph = inspect(loss)
        predict(loss)
        hodiff.graph.shared(loss, b.sum())
    assert calls == before == {"pack": 1, "unpack": 0, "block": 1, "hook": 0, "node": 0}
    assert sum(saved.state == "packed" for saved in graph.saved) == 3
    assert predict(loss).verdict == "ok"
    loss.backward()
    assert predict(loss).verdict == "fail"
    assert calls["block"] == 2


def test_nothing_is_changed_on_random_graphs():
    for seed in range(60):
        graphs = Graphs(seed)
        left, right = Graphs(seed), graphs
        for loss in right.losses:
            inspect(loss)
            predict(loss)
        for one, other in zip(left.losses, right.losses, strict=True):
            results = []
            for loss, side in ((one, left), (other, right)):
                try:
                    loss.backward(retain_graph=True)
                    results.append([leaf.grad for leaf in side.leaves])
                except RuntimeError as error:
                    results.append(str(error).split(":")[0])
            torch.testing.assert_close(*results)


def test_save_on_cpu_and_other_packs_are_packed():
    a = torch.rand(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = a.exp().sum()
    assert states(loss) == [("ExpBackward0", "result", "packed")]
    loss.backward()
    assert inspect(loss).state == "freed"


def test_a_checkpoint_whose_input_changed():
    a = torch.rand(3, requires_grad=True)
    loss = checkpoint(lambda x: x.sin(), a, use_reentrant=False).sum()
    assert predict(loss).verdict == "ok"
    with torch.no_grad():
        a.add_(1)
    assert predict(loss).verdict == "fail"
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_nested_tensors():
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    graph = inspect((jagged * 2).values().sum())
    assert len(graph.nodes) >= 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype, it says, once
        strided = torch.nested.nested_tensor(parts, requires_grad=True)
        loss = (strided * strided).to_padded_tensor(0.0).sum()
    assert inspect(loss).state in ("unknown", "alive")
    assert predict(loss).verdict in ("maybe", "ok")


def test_the_records_keep_nothing_alive():
    a = torch.rand(3, requires_grad=True)
    marks = []

    def make():
        loss = a.exp().sin().sum()
        graph = inspect(loss)
        assert predict(loss).verdict == "ok"
        temporary = torch.ones(3)
        marks.append(weakref.ref(loss))
        marks.append(weakref.ref(temporary))
        inspect(loss)
        del temporary  # the frame that was searched keeps no copy of its variables
        assert marks[-1]() is None
        return graph

    gc.disable()
    try:
        graph = make()
        assert marks[0]() is None
        assert graph.state == "alive"
    finally:
        gc.enable()


def test_printing():
    a = torch.rand(1, 4, requires_grad=True)
    b = a**2
    graph = inspect(b.sum())
    assert str(graph).splitlines()[0] == "3 nodes, 1 leaves; saved tensors: 1 alive; held by: 16 B parameter"
    assert "PowBackward0  (1, 4)  b         self (1, 4)  alive  16     parameter a" in str(graph)
    assert repr(graph).startswith("<Graph: 3 nodes")
    assert "<td>PowBackward0</td>" in graph._repr_html_()
    loss = b
    for _ in range(60):
        loss = loss.exp()
    assert "more rows" in str(inspect(loss))


def test_input_errors():
    with pytest.raises(hodiff.InputError, match="outputs: got nothing, expected a tensor"):
        inspect()
    with pytest.raises(hodiff.InputError, match="outputs: got a Tensor and an int, expected a tensor"):
        inspect(torch.rand(1), 3)


def test_an_unknown_pytorch_makes_everything_unknown(monkeypatch):
    known = _saved.answers()
    assert known.states and known.sequences
    monkeypatch.setattr(_saved, "answers", lambda: known._replace(states=False))
    a = torch.rand(3, requires_grad=True)
    loss = a.exp().sum()
    assert inspect(loss).state == "unknown"
    assert predict(loss).verdict == "maybe"
    assert predict(a.sum()).verdict == "ok"  # nothing is ever saved there
    assert hodiff.graph.release(loss).nodes == 0
    loss.backward()


@pytest.mark.parametrize("broken", ["unpack_hook", "data"])
def test_the_self_test_finds_a_difference(monkeypatch, broken):
    original = _saved.state_of

    def different(raw):
        state, value = original(raw)
        wrong = {"unpack_hook": ("packed", "alive"), "data": ("freed", "none")}[broken]
        return (wrong[1], value) if state == wrong[0] else (state, value)

    monkeypatch.setattr(_saved, "state_of", different)
    _messages.warn_once.cache_clear()
    with pytest.warns(hodiff.HodiffWarning, match="explanations are off"):
        assert _saved.answers.__wrapped__().states is False


def test_the_self_test_runs_outside_the_callers_hooks():
    calls = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(1) or t, lambda t: t), torch.no_grad():
        assert _saved.answers.__wrapped__().states
    assert not calls


def test_private_attributes_of_pytorch_stay_in_two_modules():
    """Those of our own objects, of Python's, and of named tuples are no PyTorch internals."""
    ours = {"_replace", "_getframe", "_repr_html_", "_repr_pretty_", "_asdict", "_facts"}
    for path in sorted((PACKAGE / "graph").glob("*.py")):
        if path.name == "_saved.py":
            continue
        source = ast.parse(path.read_text("utf-8"))
        modules = {
            alias.asname or alias.name
            for node in ast.walk(source)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(source):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
                mine = owner in {"self", "cls", "super()"} | modules
                assert mine or node.attr in ours, f"{path.name}:{node.lineno}: .{node.attr}"


def test_the_parameters_that_a_loss_does_not_reach():
    net = nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 1), "other": nn.Linear(3, 1)})
    net["body"].bias.requires_grad_(False)
    loss = net["head"](net["body"](torch.ones(2)).tanh()).sum()
    graph = inspect(loss, names=net)
    assert graph.unreached == ("body.bias (frozen)", "other.weight", "other.bias")
    assert "; not reached: body.bias (frozen), other.weight, other.bias" in str(graph)
    hidden = net["body"](torch.ones(2))
    assert inspect(net["head"](hidden).sum(), names={"h": hidden, "cut": hidden * 2}).unreached == ("cut",)
    assert inspect(loss).unreached == ()


def test_control_characters_in_names_are_shown_as_they_are_written():
    net = nn.ParameterDict()
    net.register_parameter("\x1b]0;title\x07", nn.Parameter(torch.ones(2)))
    graph = inspect(next(net.parameters()).sum(), names=net)
    assert "\x1b" not in str(graph) + graph._repr_html_()
    assert r"\x1b]0;title\x07" in str(graph)
