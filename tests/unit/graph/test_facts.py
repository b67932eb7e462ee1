"""The facts of a failing pass, as a watch records them: asked as data, their words left aside."""

import re
import runpy
import sys

import pytest
import torch
from torch import nn

import hodiff
from hodiff.graph import _names, _record, _saved, explain, watch
from hodiff.graph._names import TensorNames
from tests.programs import OF_AUTOGRAD
from tests.support.limits import in_threads
from tests.support.releases import CHANGES, since

ANY = f"{OF_AUTOGRAD}|NoneType|leaf|mine|shape|tensor|library"
START = "import torch\nfrom torch import nn\n\ntorch.manual_seed(0)\n"


@pytest.fixture
def told(tmp_path):
    """The explanation of a program; line 6 is the second line of its text."""

    def of(text, context=None):
        path = tmp_path / "program.py"
        path.write_text(START + text, "utf-8")
        errors = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError)
        with pytest.raises(errors, match=ANY) as caught, context or watch():
            runpy.run_path(str(path), run_name="__main__")
        return explain(caught.value)

    return of


def lines(found, kind):
    """The texts of the lines of the facts of a kind."""
    return [fact.line.text for fact in found.facts if fact.kind == kind and fact.line is not None]


def facts(found, kind):
    return [fact for fact in found.facts if fact.kind == kind]


def leaves(found, kind):
    """The leaves of the facts of a kind, with who steps them."""
    return [(fact.leaves, fact.owners) for fact in facts(found, kind) if fact.leaves]


# --- cuts: each call is one of its own --------------------------------------------------------------------------------


def test_a_helper_that_detaches_is_a_cut_at_each_call(told):
    found = told("""
x1, x2, w = (torch.ones(3, requires_grad=True) for _ in range(3))
constant = lambda x: x.detach()
a, b = constant(x1), constant(x2)
torch.autograd.grad((b * w).sum(), x1)
""")
    assert found.cause == "not used"
    assert [fact.name for fact in facts(found, "unused")] == ["x1"]
    assert not facts(found, "cut")  # a is no part of this loss
    found = told("""
x1, x2, w = (torch.ones(3, requires_grad=True) for _ in range(3))
constant = lambda x: x.detach()
a, b = constant(x1), constant(x2)
torch.autograd.grad((b * w).sum(), x2)
""")
    assert lines(found, "cut") == ["constant = lambda x: x.detach()"]
    assert leaves(found, "cut") == [(("x2",), ())]
    found = told("""
x1, x2 = (torch.ones(3, requires_grad=True) for _ in range(2))
constant = lambda x: x.detach()
(constant(x1) + constant(x2)).sum().backward()
""")
    assert leaves(found, "cut") == [(("x1", "x2"), ())]


SERIES = """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
fast = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
inner = (torch.ones(4, 3) @ fast["weight"].T + fast["bias"]).square().mean()
grads = torch.autograd.grad(inner, list(fast.values()))
loss = sum(g.square().sum() for g in grads)
loss.backward()
"""


def test_a_cut_behind_a_cut_is_named_and_who_steps_what_lies_behind(told):
    found = told(SERIES)
    assert found.cause == "first gradient"
    assert [each[:5] for each in lines(found, "cut")] == ["grads", "fast "]
    first, second = leaves(found, "cut")
    assert set(first[0]) == {"fast['weight']", "fast['bias']"} and first[1] == ()
    assert set(second[0]) == {"net.weight", "net.bias"} and second[1] == ("opt",)
    assert "would reach nothing that an optimizer steps" in facts(found, "behind")[0].text
    untrained = SERIES.replace("opt = torch.optim.SGD(net.parameters(), lr=0.1)\n", "")
    assert not facts(told(untrained), "behind")


def test_where_an_optimizer_steps_what_lies_behind_the_first_cut_it_alone_may_be_the_one(told):
    found = told("""
net, head = nn.Linear(3, 3), nn.Linear(3, 1)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
hidden = net(torch.ones(2, 3)).detach()
loss = head(hidden).sum().detach()
loss.backward()
""")
    assert lines(found, "cut") == ["loss = head(hidden).sum().detach()", "hidden = net(torch.ones(2, 3)).detach()"]
    assert not facts(found, "behind")


def test_behind_the_gradient_of_a_copy_lies_what_was_copied(told):
    found = told("""
x = torch.ones(3, requires_grad=True)
point = x.detach().requires_grad_()
point.exp().sum().backward()
slope = point.grad
slope.sum().backward()
""")
    assert lines(found, "cut") == ["slope = point.grad", "point = x.detach().requires_grad_()"]
    assert leaves(found, "cut") == [(("point",), ()), (("x",), ())]


def test_two_lines_that_cut_in_one_way_are_two_cuts(told):
    found = told("""
x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
a = x.detach()
b = y.detach()
(a + b).sum().backward()
""")
    assert lines(found, "cut") == ["a = x.detach()", "b = y.detach()"]
    assert leaves(found, "cut") == [(("x",), ()), (("y",), ())]


def test_what_is_behind_a_cut_is_as_of_an_earlier_call_once_a_line_has_looked_at_many_nodes(told, monkeypatch):
    monkeypatch.setattr(_record, "WALKED", 3)
    found = told("""
a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
for x in (a, a, b):
    y = x.exp().exp().detach()
y.sum().backward()
""")
    assert leaves(found, "cut") == [(("a",), ())]
    assert "as of an earlier call" in facts(found, "cut")[0].text


@pytest.mark.parametrize("again", ["y.detach()", "y.data", "y + torch.zeros(3)", "torch.stack([y]).sum(0)"])
def test_what_was_cut_before_is_cut_there(told, again):
    found = told(f"x = torch.ones(3, requires_grad=True)\ny = x.exp().detach()\nz = {again}\nz.sum().backward()")
    assert (found.cause, lines(found, "cut")) == ("detached", ["y = x.exp().detach()"])


@pytest.mark.parametrize("write", ["buffer[:] = w.detach()", "buffer.copy_(w.detach())", "buffer.data.copy_(w)"])
def test_what_is_written_into_a_tensor_without_a_graph_was_cut(told, write):
    found = told(f"w, buffer = torch.ones(3, requires_grad=True), torch.zeros(3)\n{write}\nbuffer.sum().backward()")
    if ".data" not in write:
        assert leaves(found, "cut") == [(("w",), ())]
    assert found.cause in ("detached", "no graph", "nothing requires grad")


def test_cuts_of_several_kinds_are_all_shown(told):
    found = told("""
w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
prediction = w.exp().detach()
with torch.no_grad():
    target = v.exp()
(prediction - target).square().sum().backward()
""")
    assert lines(found, "cut") == ["prediction = w.exp().detach()", "target = v.exp()"]
    assert lines(found, "off since") == ["with torch.no_grad():"]


def test_another_tensor_at_the_same_address_lost_nothing():
    a = torch.ones(2, requires_grad=True)
    with watch() as record:
        cut, other = a.detach(), torch.zeros(2)
        record.record.cuts.known[id(other)] = record.record.cuts.known[id(cut)]
    assert record.record.cuts.places(cut)[0].kind == "detached"
    assert record.record.cuts.places(other) == ()


@pytest.mark.parametrize("leave", ["y.detach().cpu().numpy()", "np.asarray(y.detach())", "y.tolist()"])
def test_what_left_pytorch_may_be_what_came_back(told, leave):
    found = told(f"""
import numpy as np

x = torch.ones(3, requires_grad=True)
y = x.exp()
kept = {leave}
back = torch.as_tensor(kept).float()
back.sum().backward()
""")
    assert lines(found, "left") == [f"kept = {leave}"]
    assert not facts(found, "cut")


@pytest.mark.parametrize("logged", ["loss.detach()", "loss.data", "torch.ones(3).sum().item()"])
def test_what_was_only_logged_is_not_said_to_have_cut_another(told, logged):
    found = told(f"""
x, history = torch.ones(3, requires_grad=True), []
loss = x.exp().sum()
history.append({logged})
loss.backward()
other = torch.zeros(3).exp().sum()
other.backward()
""")
    assert found.cause == "nothing requires grad"
    assert not facts(found, "cut")
    assert lines(found, "made") == ["other = torch.zeros(3).exp().sum()"]


def test_in_a_function_the_line_is_that_of_its_forward(told):
    found = told("""
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        inner = x.exp()
        torch.autograd.grad(inner.sum(), x)

Own.apply(torch.ones(3, requires_grad=True))
""")
    assert (found.cause, lines(found, "cut")) == ("inside a Function", ["inner = x.exp()"])


ONCE = """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v):
        return 3 * v * ctx.saved_tensors[0] ** 2

x, w = (torch.ones(3, requires_grad=True) for _ in range(2))
"""


@pytest.mark.parametrize(
    "text",
    [
        "(g,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)\ng.sum().backward()\n",
        "(g,) = torch.autograd.grad((Cube.apply(x) + w**2 * x).sum(), x, create_graph=True)\n"
        "torch.autograd.grad(g.sum(), x)\n",
        "(g,) = torch.autograd.grad(Cube.apply(x), x, w, create_graph=True)\ng.sum().backward()\n",
    ],
)
def test_a_gradient_whose_function_recorded_nothing_is_not_called_constant(told, text):
    found = told(ONCE + text)
    assert found.cause == "Function differentiable once"
    assert "Cube" in {fact.name for fact in found.facts}


def test_of_the_leaves_behind_a_cut_those_that_are_stepped_are_told_apart(told):
    found = told("""
net, x = nn.Linear(2, 1), torch.ones(3, 2, requires_grad=True)
opt = torch.optim.SGD([x], lr=0.1)
net(x).detach().sum().backward()
""")
    (cut,) = facts(found, "cut")
    assert cut.leaves[: cut.stepped] == ("x",) and set(cut.leaves[1:]) == {"net.weight", "net.bias"}
    words = r"behind it `x` \(stepped by `opt`\), `net\.\w+`, `net\.\w+` \(in no live optimizer\)"
    assert re.search(words, " ".join(str(cut).split()))


def test_a_switch_in_a_loop_is_told_once(told):
    found = told("""
w, losses = torch.ones(2, requires_grad=True), []
for scale in range(3):
    with torch.no_grad():
        losses.append((w * scale).sum())
sum(losses).backward()
""")
    assert lines(found, "cut") == ["losses.append((w * scale).sum())"]
    assert lines(found, "off since") == ["with torch.no_grad():"]


# --- who switched gradients off: told by what ran, and no source is read ----------------------------------------------

OFF = {
    "a context": ("with torch.no_grad():\n    h = w.exp()\nh.sum().backward()", "with torch.no_grad():"),
    "a context with a name": ("off = torch.no_grad()\nwith off:\n    h = w.exp()\nh.sum().backward()", "with off:"),
    "a statement": ("torch.set_grad_enabled(False)\nw.exp().sum().backward()", "torch.set_grad_enabled(False)"),
    "a decorator": ("@torch.no_grad()\ndef f():\n    return w.exp()\nf().sum().backward()", "@torch.no_grad()"),
    "a decorator with an argument": (
        "@torch.set_grad_enabled(False)\ndef f():\n    return w.exp()\nf().sum().backward()",
        "@torch.set_grad_enabled(False)",
    ),
    "inference": ("with torch.inference_mode():\n    h = w.exp()\nh.sum().backward()", "with torch.inference_mode():"),
    "inference, decorated": (
        "@torch.inference_mode()\ndef f():\n    return w.exp()\nf().sum().backward()",
        "@torch.inference_mode()",
    ),
    "gradients on within inference": (
        "with torch.inference_mode():\n    with torch.set_grad_enabled(True):\n        w.exp().sum().backward()",
        "with torch.inference_mode():",
    ),
    "an argument": (
        "for phase in (True, False):\n    with torch.set_grad_enabled(phase):\n"
        "        h = w.exp()\n    h.sum().backward()",
        "with torch.set_grad_enabled(phase):",
    ),
    "on again, and off again": (
        "torch.set_grad_enabled(False)\nwith torch.enable_grad():\n    warm = w.exp()\nh = w.exp()\nh.sum().backward()",
        "torch.set_grad_enabled(False)",
    ),
    "off in off": (
        "with torch.no_grad():\n    with torch.no_grad():\n        pass\n    h = w.exp()\nh.sum().backward()",
        "with torch.no_grad():",
    ),
    "a generator": (
        "@torch.no_grad()\ndef f():\n    yield w.exp()\nfor h in f():\n    pass\nh.sum().backward()",
        "@torch.no_grad()",
    ),
}


@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", OFF)
def test_who_switched_gradients_off(told, name):
    text, off = OFF[name]
    before = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    with torch.enable_grad():
        found = told(f"w = torch.ones(2, requires_grad=True)\n{text}")
    assert found.cause == "gradients off"
    assert lines(found, "off since") == [off]
    assert leaves(found, "cut") == [(("w",), ())]
    assert (torch.inference_mode.__enter__, torch.inference_mode.__exit__) == before


def test_a_switch_of_another_thread_is_another_s():
    def other():
        off = torch.no_grad()
        off.__enter__()
        torch.inference_mode().__enter__()

    with watch() as record:
        in_threads(other)
        assert record.record.cuts.off is record.record.cuts.inference is None


FREEZE = """
enc = nn.Linear(3, 3)
{optimizer}
def freeze(model, on):
    for p in model.parameters():
        if p.requires_grad: p.requires_grad = on
freeze(enc, False)
loss = enc(torch.randn(4, 3)).square().mean()
loss.backward()
"""


def test_frozen_parameters_are_named_with_the_line_that_froze_them(told):
    found = told(FREEZE.format(optimizer="opt = torch.optim.SGD(enc.parameters(), lr=0.1)"))
    assert found.cause == "frozen"
    assert leaves(found, "frozen") == [(("enc.weight", "enc.bias"), ("opt",))]
    assert lines(found, "off since") == ["if p.requires_grad: p.requires_grad = on"]


def test_a_frozen_network_of_features_is_not_the_cause(told):
    found = told("""
g, vgg = nn.Linear(2, 3), nn.Linear(3, 3).requires_grad_(False)
fake = g(torch.randn(4, 2)).detach()
loss = (vgg(fake) - vgg(torch.randn(4, 3))).square().mean()
loss.backward()
""")
    assert found.cause == "detached"
    assert not facts(found, "frozen")


# --- parts that were freed --------------------------------------------------------------------------------------------


def test_a_pass_that_retained_freed_nothing(told):
    found = told("""
y = nn.Linear(3, 3)(torch.ones(1, 3)).tanh()
u = y.exp()
u.sum().backward(retain_graph=True)
y.square().sum().backward()
u.mean().backward()
""")
    assert (found.cause, found.variable) == ("shared part", "y")
    assert lines(found, "freed by") == ["y.square().sum().backward()"]


ROLLED_OUT = """
pre, cell, head = nn.Linear(3, 3), nn.GRUCell(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*pre.parameters(), *cell.parameters(), *head.parameters()], lr=0.1)
for step in range(2):
    h, outs = torch.zeros(2, 4), []
    for t in range(3):
        z = pre(torch.randn(2, 3)).tanh()
        h = cell(z, h)
        outs.append(h)
    loss = head(torch.stack(outs)).square().mean()
    {first}
    aux = torch.stack(outs).square().mean()
    aux.backward()
    opt.step()
"""


@CHANGES
def test_what_a_loop_of_this_step_made_is_no_state_of_an_earlier_one(told):
    assert told(ROLLED_OUT.format(first="loss.backward()")).cause == "shared part"
    found = told(ROLLED_OUT.format(first="loss.backward(retain_graph=True); opt.step()"))
    assert found.cause == "changed parameter"


RECURRENT = """
cell, head = nn.GRUCell(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([cell.weight_hh, *head.parameters()], lr=0.1)
h = torch.zeros(2, 4)
for step in range(3):
    h = cell(torch.randn(2, 3), h)
    loss = head(h).square().mean()
    opt.zero_grad()
    {call}
    opt.step()
"""


@CHANGES
def test_state_whose_graph_was_kept(told):
    found = told(RECURRENT.format(call="loss.backward(retain_graph=True)"))
    assert (found.cause, found.variable) == ("carried over", "h")
    assert lines(found, "kept by") == ["loss.backward(retain_graph=True)"]
    (behind,) = facts(found, "behind")
    assert behind.leaves[: behind.stepped] == ("cell.weight_hh",)  # the others no optimizer steps
    assert len(behind.leaves) == 4 and behind.owners == ("opt",)
    assert found.line("freed by") is None
    found = told(RECURRENT.format(call="loss.backward()"))
    assert (found.cause, found.variable) == ("carried over", "h")
    assert lines(found, "freed by") == ["loss.backward()"]
    assert lines(found, "changed") == ["opt.step()"]
    assert "call #0 on that line" in facts(found, "freed by")[0].text


def test_a_line_is_not_said_to_have_called_itself(told):
    found = told("""
encoder = nn.Linear(3, 2)
x = torch.randn(4, 3)
made = [encoder(x[i::2]).tanh() for i in range(2)]
for _ in range(2):
    sum(m.sum() for m in made).backward()
""")
    assert found.cause == "made once"
    assert not facts(found, "called")


def test_a_line_that_ran_before_the_value_was_made_makes_no_rounds(told):
    found = told("""
w, x = nn.Linear(3, 3), torch.randn(3)
for i in range(2):
    y = w(x).tanh()
    if i:
        y.sum().backward()
    y.square().sum().backward()
""")
    assert found.cause == "shared part"


def test_a_transpose_has_a_line_and_a_name(told):
    found = told("""
h = nn.Linear(3, 3)(torch.ones(3, 3))
turned = h.mT
for _ in range(2):
    turned.exp().sum().backward()
    h = None
""")
    assert (found.variable, lines(found, "made")) == ("turned", ["turned = h.mT"])


def test_a_line_without_source_is_only_placed():
    a = torch.ones(3, requires_grad=True)
    code = compile("y = a.exp()\ny.sum().backward()\ny.mean().backward()", "nowhere.py", "exec")
    with watch(), pytest.raises(RuntimeError, match="second time") as caught:
        exec(code, {"a": a})
    (note,) = caught.value.__notes__
    assert "made         nowhere.py:1   (`y`)\n" in note
    assert not re.search(r" \n| $", note)


def test_what_was_made_before_the_watch_has_the_line_that_assigns_it():
    a = torch.ones(3, requires_grad=True)
    y = a.exp()
    with watch(), pytest.raises(RuntimeError, match="second time") as caught:
        for _ in range(2):
            y.square().sum().backward()
    found = explain(caught.value)
    assert (found.variable, lines(found, "made")) == ("y", ["y = a.exp()"])  # the one line that assigns it


def test_what_is_freed_is_counted_by_kind(told):
    found = told("""
x = torch.ones(3, requires_grad=True)
y = x.exp().exp().sin().cos().tanh().sigmoid().sqrt().log().atan()
y.sum().backward()
y.mean().backward()
""")
    kinds = [f"{name}Backward0" for name in ("Atan", "Log", "Sqrt", "Sigmoid", "Tanh", "Cos")]
    assert facts(found, "freed nodes")[0].text == ", ".join(kinds) + " and 2 more kinds"


def test_the_nearest_and_the_outermost_caller_are_told(told):
    found = told("""
def innermost(x):
    return x.exp()

def middle(x):
    return innermost(x) * 1

def outer(x):
    return middle(x) * 1

y = outer(torch.ones(3, requires_grad=True))
y.sum().backward()
y.mean().backward()
""")
    assert lines(found, "made") == ["return middle(x) * 1"]
    assert lines(found, "called") == ["y = outer(torch.ones(3, requires_grad=True))"]


COMPILED = """
encoder, critic = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)}), nn.Linear(3, 1)
def both(z): return encoder["a"](z).tanh(), encoder["b"](z).tanh()
fake, other = torch.compile(both, backend="aot_eager")(torch.randn(4, 2))
critic(fake).square().mean().backward()
other.square().mean().backward()
"""


def test_two_outputs_are_one_node_by_torch_compile(told):
    torch.compiler.reset()
    found = told(COMPILED)
    torch.compiler.reset()
    assert any("one node of all outputs" in fact.text for fact in facts(found, "part"))


# --- values that were changed -----------------------------------------------------------------------------------------


@CHANGES
def test_the_last_changes_are_told_each_by_its_line(told):
    found = told("""
p = nn.Parameter(torch.ones(3))
with torch.no_grad():
    p.zero_()  # before it was saved
y = p.square().sum()
with torch.no_grad():
    p.add_(1)
    p.mul_(2)
y.backward()
""")
    assert (found.cause, found.variable) == ("changed parameter", "p")
    assert lines(found, "changed") == ["p.add_(1)", "p.mul_(2)"]
    assert lines(found, "saved") == ["y = p.square().sum()"]


@CHANGES
def test_an_operation_that_saves_its_own_result_in_place_is_no_change_after_it(told):
    found = told("x = torch.ones(3, requires_grad=True) * 1\ny = x.exp_()\ny += 1\ny.sum().backward()")
    assert found.cause == "changed value"
    assert lines(found, "changed") == ["y += 1"]


@CHANGES
def test_a_value_of_a_function_that_has_returned_is_named_by_the_line_that_changed_it(told):
    found = told("""
a = torch.ones(3, requires_grad=True)

def loss():
    e = a.exp()
    out = e.sum()
    e += 1
    return out

found = loss()
found.backward()
""")
    assert (found.variable, lines(found, "called")) == ("e", ["found = loss()"])


def test_an_explanation_of_an_operation_that_is_refused(told):
    found = told("w = torch.ones(3, requires_grad=True)\nw += 1")
    assert (found.cause, found.variable, lines(found, "refused")) == ("refused in place", "w", ["w += 1"])


@CHANGES
def test_an_item_that_is_assigned_changes_all_of_the_tensor(told):
    found = told("""
class Head(nn.Linear):
    def forward(self, x):
        y = super().forward(x).sigmoid()
        y[0] = y[0] * 2
        return y

Head(2, 2)(torch.ones(3, 2)).sum().backward()
""")
    (saved,), (changed,) = facts(found, "saved"), facts(found, "changed")
    assert (saved.name, changed.name, changed.text) == ("y", "y", "__setitem__")
    assert "of shape (3, 2)" in saved.text
    found = told("""
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad

y = Scale.apply(torch.ones(3, requires_grad=True).exp())
y[torch.tensor([0, 1])] += 1
""")
    assert (found.cause, found.variable) == ("refused in place", "y")


def test_a_result_that_is_written_into_what_has_a_graph(told):
    found = told("""
w = torch.ones(3, requires_grad=True)
gaps = w * 2
torch.exp(w, out=gaps)
""")
    assert (found.cause, found.variable) == ("refused in place", "gaps")
    assert lines(found, "refused") == ["torch.exp(w, out=gaps)"]
    assert lines(found, "made") == ["gaps = w * 2"]


def test_what_can_not_be_copied_is_named_as_its_owner_does(told):
    found = told("""
import copy

class Kept(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_forward_hook(self.keep)

    def keep(self, module, given, result):
        self.hidden = result

net = Kept()
net(torch.ones(1, 2))
copy.deepcopy(net)
""")
    assert (found.cause, found.variable) == ("copied", "net.hidden")


def test_a_view_that_was_made_without_gradients(told):
    found = told("""
w, x = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3)
with torch.no_grad():
    rows = x.view(3, 2)
rows[0] = w.sum() * torch.ones(2)
""")
    assert (found.cause, found.variable) == ("view made without gradients", "rows")
    assert lines(found, "made") == ["rows = x.view(3, 2)"]
    assert lines(found, "off since") == ["with torch.no_grad():"]


# --- inputs, leaves and gradients that are None -----------------------------------------------------------------------


def test_a_gradient_that_is_none_as_the_leaf_was_cut_off(told):
    start = """
x, w = torch.rand(3).requires_grad_(), torch.ones(3, requires_grad=True)

@torch.no_grad()
def tower(x):
    return x * 2

loss = (HERE * w).sum()
loss.backward()
x.grad.sign()
"""
    found = told(start.replace("HERE", "tower(x)"))
    assert (found.cause, found.variable) == ("no gradient yet", "x")
    assert (lines(found, "cut"), leaves(found, "cut")) == (["return x * 2"], [(("x",), ())])
    assert lines(found, "off since") == ["@torch.no_grad()"]
    assert lines(told(start.replace("HERE", "tower(torch.ones(3))")), "cut") == []
    (fact,) = facts(told("w = torch.ones(2)\nw -= w.grad * 0.1"), "no grad")
    assert "it does not require grad" in fact.text
    assert "does not require" not in str(facts(found, "no grad"))


def test_an_input_that_is_cast_to_integers_is_cut_there(told):
    found = told("""
table, x = torch.randn(5, requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
index = x.long()
torch.autograd.grad(table[index].sum(), x)
""")
    assert (found.cause, lines(found, "cut")) == ("not used", ["index = x.long()"])
    assert lines(found, "read") == ["index = x.long()"]
    assert "seen to read" not in str(found)


def test_an_input_that_no_operation_read(told):
    found = told("""
w = torch.ones(2, requires_grad=True)
x = torch.ones(2, requires_grad=True)
torch.autograd.grad(w.sum(), [w, x])
""")
    (unused,) = facts(found, "unused")
    assert (unused.name, unused.line.text) == ("x", "x = torch.ones(2, requires_grad=True)")
    assert unused.text == "no operation was seen to read it"
    assert leaves(found, "in graph") == [(("w",), ())]


@pytest.mark.parametrize("read", ["torch.mul(w, other=x)", "torch.stack([w, x])", "x.long()", "x > 0", "x.detach()"])
def test_an_operation_that_read_an_input_is_named_however_that_was_given(told, read):
    found = told(f"""
w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
y = {read}
torch.autograd.grad(w.sum(), [w, x])
""")
    assert lines(found, "read") == [f"y = {read}"]


def test_an_input_that_was_made_after_the_loss(told):
    found = told("x = torch.ones(2, requires_grad=True)\nloss = x.exp().sum()\ntorch.autograd.grad(loss, -x)")
    assert facts(found, "unused")[0].text == "made after the loss"


def test_the_last_lines_that_read_a_leaf_are_kept():
    x = torch.ones(2, requires_grad=True)
    with watch() as record:
        for f in (torch.sin, torch.cos, torch.exp, torch.tan):
            f(x)
            _ = x + 1, x * 2
            _ = x - 1
            _ = x / 2
        assert len(record.record.cuts.uses(x)) == _record.USES
        assert record.record.cuts.uses(x)[-1].text == "_ = x / 2"


NONE = {
    "a result": (
        "x = torch.ones(3, requires_grad=True)\ny = x * 2\ny.sum().backward()\ny.grad.sign()",
        ("not a leaf", "y", "y = x * 2"),
    ),
    "in arithmetic": (
        "x = torch.ones(3, requires_grad=True)\ny = x * 2\ny.sum().backward()\ny = y - 0.1 * y.grad",
        ("not a leaf", "y", "y = x * 2"),
    ),
    "no pass yet": (
        "w = torch.ones(3, requires_grad=True)\nw.exp().sum()\nw.grad.zero_()",
        ("no gradient yet", "w", "w = torch.ones(3, requires_grad=True)"),
    ),
    "for an optimizer": (
        "x = torch.ones(3, requires_grad=True)\ny = x[:2]\ntorch.optim.SGD([y], lr=0.1)",
        ("not a leaf", "y", "y = x[:2]"),
    ),
    "a flag": (
        "x = torch.ones(3, requires_grad=True)\ny = x[:2]\ny.requires_grad = False",
        ("not a leaf", "y", "y = x[:2]"),
    ),
    "a flag, by a method": (
        "x = torch.ones(3, requires_grad=True)\ny = x[:2]\ny.requires_grad_(False)",
        ("not a leaf", "y", "y = x[:2]"),
    ),
    "a start of another shape": (
        "x = torch.ones(3, requires_grad=True)\none = torch.ones(1)\nx.sum().backward(one)",
        ("wrong start", "one", "one = torch.ones(1)"),
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", NONE)
def test_what_is_taken_for_a_leaf_or_a_gradient(told, name):
    text, right = NONE[name]
    found = told(text)
    assert (found.cause, found.variable) == right[:2]
    assert right[2] in [*lines(found, "made"), *lines(found, "shape")]


def test_an_error_of_the_user_s_own_is_left_alone(told):
    assert told("x = torch.ones(2, requires_grad=True)\nx.grad\nNone.sign()") is None
    assert told("raise ValueError('mine')") is None
    assert told("x = None\nx.sign()", torch.enable_grad()) is None


@pytest.mark.filterwarnings("ignore:Using backward")
@since((2, 13), "the error has no message")
def test_what_is_no_tensor_among_the_outputs(told):
    found = told("""
net, extra = nn.Linear(3, 1), nn.Linear(3, 1)
net(torch.ones(2, 3)).exp().sum().backward(create_graph=True)
grads = [0.0 if p.grad is None else p.grad for p in (*net.parameters(), *extra.parameters())]
torch.autograd.grad(grads, list(net.parameters()), [torch.ones_like(p) for m in (net, extra) for p in m.parameters()])
""")
    assert found.cause == "no tensor"
    assert {fact.name for fact in facts(found, "no grad")} == {"extra.weight", "extra.bias"}


def test_inside_a_transform(told):
    found = told("def f(r):\n    y = r.sum()\n    return torch.autograd.grad(y, r)[0]\ntorch.vmap(f)(torch.ones(2, 3))")
    assert found.cause == "inside a transform"
    found = told("torch.vmap(lambda x: x.requires_grad_() * 1)(torch.ones(2, 3))")
    assert found.cause == "inside a transform"


def test_a_loss_of_several_elements_says_its_shape_and_its_line(told):
    found = told("""
net = nn.Linear(3, 2)
loss = nn.functional.cross_entropy(net(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]), reduction="none")
loss.backward()
""")
    assert (found.cause, found.variable) == ("several numbers", "loss")
    assert "(4,)" in facts(found, "shape")[0].text
    assert lines(found, "made")[0].startswith("loss = nn.functional")


OWN = """
class Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x): return g * x
    @staticmethod
    def backward(ctx, *_): raise {error}("of this library")
class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x / 2
    @staticmethod
    def backward(ctx, g): return Second.apply(g, ctx.saved_tensors[0])
x = torch.ones(3, requires_grad=True)
y = First.apply(x) * 1
(g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
(y.sum() + g.sum()).backward()
"""


@pytest.mark.parametrize("error", ["RuntimeError", "NotImplementedError"])
def test_a_function_whose_second_derivative_raises(told, error):
    found = told(OWN.format(error=error))
    assert (found.cause, found.variable) == ("Function differentiable once", "Second")
    assert lines(found, "read") == ["y = First.apply(x) * 1"]


CHECKPOINT = """
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, *args):
        ctx.run, ctx.inputs = run, args
        with torch.no_grad(): return run(args[0])
    @staticmethod
    def backward(ctx, grad):
        x = ctx.inputs[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        return None, *torch.autograd.grad(out, (x, *ctx.inputs[1:]), grad)
a, b = nn.Linear(3, 3), nn.Linear(3, 3)
x = torch.randn(2, 3, requires_grad=True)
Checkpoint.apply(lambda t: a(t), x, *a.parameters(), *b.parameters()).sum().backward()
"""


def test_a_pass_that_a_function_asks_for_names_what_it_does_not_reach(told):
    found = told(CHECKPOINT)
    assert found.cause == "inside a pass"
    assert {fact.name for fact in facts(found, "unused")} == {"b.weight", "b.bias"}


# --- saved tensors that were read too late ----------------------------------------------------------------------------


def test_a_saved_tensor_that_was_read_too_late(told):
    found = told("""
x = torch.ones(3, requires_grad=True)
y = x.exp()

def read(kept):
    return kept._saved_result

y.sum().backward()
read(y.grad_fn)
""")
    assert (found.cause, found.variable) == ("read after freeing", "kept")
    assert lines(found, "read") == ["return kept._saved_result"]
    assert lines(found, "freed by") == ["y.sum().backward()"]


def test_what_is_said_of_a_saved_tensor_is_certain():
    y = torch.ones(3, requires_grad=True).exp()
    node = y.grad_fn
    y.sum().backward()
    with pytest.raises(RuntimeError, match="directly access") as caught:
        _ = node._saved_result
    found = hodiff.graph.explain(caught.value)
    assert (found.cause, found.certain) == ("read after freeing", True)
    assert found.line("failed").text == "_ = node._saved_result"


# --- how it prints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SERIES, FREEZE.format(optimizer=""), RECURRENT.format(call="loss.backward()")])
def test_an_explanation_is_short_and_no_wider_than_a_console(told, text):
    said = str(told(text)).splitlines()
    assert len(said) <= 21
    assert max(map(len, said)) <= 120


def test_without_a_record_the_class_and_the_names_are_told(told):
    found = told(RECURRENT.format(call="loss.backward()"), torch.enable_grad())
    assert (found.cause, found.certain, found.watched) == ("freed before", False, False)
    assert "nothing recorded: `hodiff explain SCRIPT`" in str(found)
    found = told("x = torch.ones(2, requires_grad=True)\nz = x.detach().sum()\nz.backward()", torch.enable_grad())
    assert (found.cause, found.variable, found.certain) == ("no graph", "z", False)


# --- what a record is made of -----------------------------------------------------------------------------------------


def test_to_say_that_a_leaf_requires_no_grad_changes_no_value():
    w = torch.ones(2, requires_grad=True)
    with watch() as record:
        w.requires_grad_(False)
        w.requires_grad = True
        assert record.record.changed(w) is None
        assert record.record.switched(w)[0].line.text == "w.requires_grad = True"


def test_which_passes_look_for_names():
    w = torch.rand(3, requires_grad=True)
    with watch() as record:
        built, freed = w.exp(), w.sin()
        torch.autograd.grad(built.sum(), w, create_graph=True)
        assert record.record.tags.held(built.grad_fn)[0] is None  # the gradient's graph is differentiated at once
        torch.autograd.grad(freed.sum(), w, create_graph=True, retain_graph=False)
        assert record.record.tags.held(freed.grad_fn)[0] is record.passes[1]


def test_what_a_shell_keeps_is_no_name():
    space = {"sys": sys, "_": (t := torch.ones(2)), "_12": t, "Out": {3: t}, "here": t, "get_ipython": None}
    exec("def frame():\n    return sys._getframe()", space)
    assert TensorNames([space["frame"]()]).paths[id(t)] == ["here"]
    del space["get_ipython"]
    assert TensorNames([space["frame"]()]).paths[id(t)] == ["_", "_12", "here", "Out[3]"]


def test_nodes_of_one_kind_are_freed_alike_but_each_is_looked_at():
    x = torch.ones(3, requires_grad=True)
    spent, kept, other = x.sin(), x.sin(), x.sin() * 2
    (spent.sum() + other.sum()).backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        kept_through_hooks = x.sin()
    troubles = [_saved.trouble(value.grad_fn) for value in (spent, kept, other, kept_through_hooks)]
    assert _saved.trouble(other.grad_fn.next_functions[0][0]) == "freed"
    assert troubles == ["freed", "", "freed", ""]
    linear = nn.Linear(3, 2)
    linear(torch.ones(1, 3)).sum().backward()
    spent = linear(torch.ones(1, 3))
    spent.sum().backward()
    linear.weight.requires_grad_(False)
    assert _saved.trouble(spent.grad_fn) == "freed"
    assert _saved.trouble(linear(torch.ones(1, 3)).grad_fn) == ""  # its kind of node has nothing to save
    with torch.no_grad():
        x += 1
    assert _saved.trouble(kept.grad_fn) == "stale"


def test_paths_are_found_again_and_forgotten(monkeypatch):
    monkeypatch.setattr(_names, "REMEMBERED", 3)
    paths = _names.Paths()
    space = {"sys": sys}
    numbers = []
    for line in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5):  # code that is compiled anew each time, but equal
        exec("\n" * line + "frame = sys._getframe()", space)
        numbers.append(paths.number(space.pop("frame"), _names.marked(None)))
    assert numbers[:5] == numbers[5:]
    assert len(set(numbers)) == 5
    assert len(paths._numbers) <= 3
    assert [paths[number][0].number for number in numbers[:5]] == [2, 3, 4, 5, 6]


def test_whoever_names_the_recorder_still_has_compiled_code():
    assert hodiff.graph.Watch is not None  # to name it marks it for the tracer
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)
    with watch():
        compiled(torch.ones(3))
    assert len(graphs) == 1


def test_a_lazy_module_is_initialized_under_a_watch(told):
    lazy = torch.nn.LazyLinear(2)
    with watch():
        assert lazy(torch.ones(1, 3)).shape == (1, 2)
    found = told(
        "spare, x = nn.LazyLinear(2), torch.ones(2, requires_grad=True)\n"
        "y = x.exp()\ny.sum().backward()\ny.mean().backward()"
    )
    assert found.variable == "y"  # parameters that have no values yet are passed over


def test_what_another_thread_does_is_not_recorded():
    w = torch.ones(2, requires_grad=True)
    with watch() as record:
        in_threads(lambda: w.detach().sum())
        assert not record.record.cuts.known
