"""The fixes that an explanation advises: none that would do harm, and what each is concluded from."""

import linecache
import re
import runpy
import sys

import pytest
import torch
from torch import nn

import hodiff
from hodiff.graph import _inspect, _names, watch
from hodiff.graph._names import TensorNames
from tests.programs import OF_AUTOGRAD
from tests.support.releases import CHANGES

START = "import torch\nfrom torch import nn\n\ntorch.manual_seed(0)\n"


@pytest.fixture
def said(tmp_path):
    """What is said of a program."""

    def of(text):
        path = tmp_path / "program.py"
        path.write_text(START + text, "utf-8")
        with pytest.raises(RuntimeError, match=OF_AUTOGRAD) as caught, watch():
            runpy.run_path(str(path), run_name="__main__")
        return "\n".join(caught.value.__notes__)

    return of


@pytest.fixture
def likely(tmp_path):
    """What is said of a program of which nothing was recorded."""

    def of(text):
        path = tmp_path / "program.py"
        path.write_text(START + text, "utf-8")
        linecache.checkcache(str(path))
        with pytest.raises(RuntimeError, match=OF_AUTOGRAD) as caught:
            runpy.run_path(str(path), run_name="__main__")
        return hodiff.graph.explain(caught.value)

    return of


def test_a_loss_that_has_no_other_graph_is_not_to_be_detached(said):
    note = said("""
actor, critic = nn.Linear(3, 2), nn.Linear(5, 1)
a_opt, c_opt = torch.optim.SGD(actor.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
s = torch.randn(4, 3)
q = critic(torch.cat([s, actor(s).tanh()], 1))
c_loss, a_loss = (q - 1).square().mean(), -q.mean()
c_opt.zero_grad()
c_loss.backward()
c_opt.step()
a_opt.zero_grad()
a_loss.backward()
""")
    assert "compute `q` and `a_loss` again before program.py:15" in note
    assert "detach" not in note


def test_gradients_that_were_read_or_reset_are_not_added_up(said):
    text = """
w = nn.Linear(3, 3)
h = w(torch.randn(2, 3)).tanh()
first, second = h.sum(), h.square().sum()
first.backward()
{between}
second.backward()
"""
    assert "(first + second).backward()" in said(text.format(between=""))
    assert "(first + second).backward()" not in said(text.format(between="w.zero_grad()"))
    assert "(first + second).backward()" not in said(text.format(between="norm = w.weight.grad.norm()"))


def test_a_line_is_not_said_to_have_called_itself(said):
    note = said("""
encoder = nn.Linear(3, 2)
x = torch.randn(4, 3)
made = [encoder(x[i::2]).tanh() for i in range(2)]
for _ in range(2):
    sum(m.sum() for m in made).backward()
""")
    assert "called from" not in note


def test_a_line_that_does_more_than_to_call_gives_its_variable_something_else(said):
    note = said("""
w, kept = nn.Linear(3, 3), frozenset()


def hide():
    kept = []

    def table():
        return (w.weight * 2).exp()

    def get():
        if not kept:
            kept[:] = [table()]
        return kept[0]

    return get


get = hide()
for _ in range(2):
    (get() @ torch.randn(3)).sum().backward()
""")
    assert "kept[:]" not in note.partition("created at")[0]


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


def test_a_state_that_alone_leads_to_a_leaf_is_not_cut(said):
    note = said("""
w = torch.randn(3, requires_grad=True)
x = torch.randn(5, 3)
fast = w
for _ in range(2):
    inner = (x @ fast).square().mean()
    (g,) = torch.autograd.grad(inner, fast, create_graph=True)
    fast = fast - 0.1 * g
    (x @ fast).square().mean().backward()
""")
    assert "state from a previous step" in note
    assert "fix" not in note
    assert "where the gradient of w should end" in note


def test_a_line_is_not_moved_where_it_would_read_something_else(said):
    note = said("""
w = nn.Linear(3, 3)
x = torch.randn(3)
y = w(x).tanh()
for x in torch.randn(2, 3):
    (y * x).sum().backward()
""")
    assert "built once, outside the loop" in note
    assert "move program.py" not in note


def test_a_line_that_ran_before_the_value_was_made_makes_no_rounds(said):
    note = said("""
w, x = nn.Linear(3, 3), torch.randn(3)
for i in range(2):
    y = w(x).tanh()
    if i:
        y.sum().backward()
    y.square().sum().backward()
""")
    assert "both losses depend on it" in note


def test_a_state_is_cut_behind_the_last_pass_of_the_step(said):
    note = said("""
cell, other = nn.RNNCell(2, 3), nn.Linear(2, 1)
h = torch.zeros(1, 3)
for step in range(3):
    h = cell(torch.ones(1, 2), h)
    h.sum().backward()
    loss = other(torch.ones(1, 2)).sum()
    loss.backward()
""")
    assert "freed by     program.py:10 " in note
    assert "after program.py:12 (loss.backward()), write\n           " in note


def test_a_pass_that_ran_before_is_in_rounds_though_another_freed_the_part(said):
    note = said("""
w, v = nn.Linear(3, 3), nn.Linear(3, 1)
x = torch.ones(1, 3)
y = w(x).tanh()
for step in range(3):
    if step == 0:
        y.square().sum().backward()
    loss = v(y if step == 2 else x).sum()
    loss.backward()
""")
    assert "freed by     program.py:11 " in note
    assert "it was built once, outside the loop" in note


def test_a_pass_that_retained_freed_nothing(said):
    note = said("""
y = nn.Linear(3, 3)(torch.ones(1, 3)).tanh()
u = y.exp()
u.sum().backward(retain_graph=True)
y.square().sum().backward()
u.mean().backward()
""")
    assert "shared part: `y`" in note
    assert "freed by     program.py:9 " in note


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


def test_a_gradient_whose_function_recorded_nothing_is_not_called_constant(said):
    note = said(f"{ONCE}(g,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)\ng.sum().backward()\n")
    assert "through an autograd.Function whose backward recorded nothing" in note
    assert "fix 1: write Cube with plain operations" in note
    assert "linear" not in note
    note = said(
        f"{ONCE}(g,) = torch.autograd.grad((Cube.apply(x) + w**2 * x).sum(), x, create_graph=True)\n"
        "torch.autograd.grad(g.sum(), x)\n"
    )
    assert "not in the graph: `x`\n    gradient at  program.py:18 " in note
    assert "through Cube, whose backward recorded nothing that leads to `x`." in note


def test_a_function_that_forbids_a_second_derivative_has_no_substitute(said):
    note = said(f"{ONCE}(g,) = torch.autograd.grad(Cube.apply(x), x, w, create_graph=True)\ng.sum().backward()\n")
    assert "a second derivative of Cube: its backward forbids one. Write it without the Function." in note


@CHANGES
def test_the_last_of_several_changes_counts(said):
    note = said("""
p = nn.Parameter(torch.ones(3))
y = p.square().sum()
with torch.no_grad():
    p.add_(1)
    p.mul_(2)
y.backward()
""")
    assert "changed at   program.py:10 " in note
    assert "compute `y` again after program.py:10 (p.mul_(2))" in note


@CHANGES
@pytest.mark.parametrize(
    "text",
    [
        "v = nn.Linear(3, 3)(torch.ones(2, 3)).sigmoid().select(0, 0)\nv += 1\nv.sum().backward()",
        "b = nn.Linear(3, 3)(torch.ones(2, 3)) * 2\nu = b.view(-1).sin()\nb += 1\nu.sum().backward()",
    ],
    ids=["a view is changed", "a view was saved"],
)
def test_of_views_no_copy_is_advised(said, text):
    note = said(text)
    assert "was changed in place" in note
    assert "clone()" not in note
    assert "which value the later lines should see" in note


def test_another_tensor_at_the_same_address_lost_nothing():
    a = torch.ones(2, requires_grad=True)
    with watch() as record:
        cut, other = a.detach(), torch.zeros(2)
        record.record.cuts.known[id(other)] = record.record.cuts.known[id(cut)]
    assert record.record.cuts.of(cut).kind == "detached"
    assert record.record.cuts.of(other) is None


def test_what_a_shell_keeps_is_no_name():
    space = {"sys": sys, "_": (t := torch.ones(2)), "_12": t, "Out": {3: t}, "here": t, "get_ipython": None}
    exec("def frame():\n    return sys._getframe()", space)
    assert TensorNames([space["frame"]()]).paths[id(t)] == ["here"]
    del space["get_ipython"]
    assert TensorNames([space["frame"]()]).paths[id(t)] == ["_", "_12", "here", "Out[3]"]


def test_a_line_without_source_is_only_placed():
    a = torch.ones(3, requires_grad=True)
    code = compile("y = a.exp()\ny.sum().backward()\ny.mean().backward()", "nowhere.py", "exec")
    with watch(), pytest.raises(RuntimeError, match="second time") as caught:
        exec(code, {"a": a})
    (note,) = caught.value.__notes__
    assert "created at   nowhere.py:1\n" in note
    assert "()" not in note
    assert not re.search(r" \n| $", note)


def test_what_was_made_before_the_watch_is_not_said_to_be_made_at_the_failing_call(said):
    a = torch.ones(3, requires_grad=True)
    y = a.exp()
    with watch(), pytest.raises(RuntimeError, match="second time") as caught:
        for _ in range(2):
            y.square().sum().backward()
            with torch.no_grad():
                a -= 0.1
    assert "made at" not in caught.value.__notes__[0]


def test_nodes_of_one_kind_are_freed_alike_but_each_is_looked_at():
    x = torch.ones(3, requires_grad=True)
    spent, kept, other = x.sin(), x.sin(), x.sin() * 2
    (spent.sum() + other.sum()).backward()
    kept_through_hooks = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        kept_through_hooks = x.sin()
    troubles = [_inspect.trouble(value.grad_fn) for value in (spent, kept, other, kept_through_hooks)]
    assert _inspect.trouble(other.grad_fn.next_functions[0][0]) == "freed"
    assert troubles == ["freed", "", "freed", ""]
    linear = nn.Linear(3, 2)
    linear(torch.ones(1, 3)).sum().backward()
    spent = linear(torch.ones(1, 3))
    spent.sum().backward()
    linear.weight.requires_grad_(False)
    assert _inspect.trouble(spent.grad_fn) == "freed"
    assert _inspect.trouble(linear(torch.ones(1, 3)).grad_fn) == ""  # its kind of node has nothing to save
    with torch.no_grad():
        x += 1
    assert _inspect.trouble(kept.grad_fn) == "stale"


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
    assert len(paths._alive) <= 3
    assert [paths[number][0].number for number in numbers[:5]] == [2, 3, 4, 5, 6]


def test_a_saved_tensor_that_was_read_too_late(said):
    note = said("""
x = torch.ones(3, requires_grad=True)
y = x.exp()


def read(kept):
    return kept._saved_result


y.sum().backward()
read(y.grad_fn)
""")
    assert "what `kept` saved was read after it was freed\n    at           program.py:11 " in note
    assert "freed by     program.py:14 " in note
    assert "read it before the pass" in note


def test_what_is_said_of_a_saved_tensor_is_certain():
    y = torch.ones(3, requires_grad=True).exp()
    node = y.grad_fn
    y.sum().backward()
    with pytest.raises(RuntimeError, match="directly access") as caught:
        _ = node._saved_result
    found = hodiff.graph.explain(caught.value)
    assert (found.cause, found.certain) == ("read after freeing", True)
    assert found.failed.text == "_ = node._saved_result"
    assert "called from" not in str(found)


def test_one_line_that_asks_twice_wants_it_twice_or_not_the_same(said):
    text = "w = nn.Linear(3, 3)\nloss = w(torch.ones(2, 3)).square().sum()\n{passes}"
    again = said(text.format(passes="for _ in range(2):\n    torch.autograd.grad(loss, w.weight)"))
    lines = said(text.format(passes="a = torch.autograd.grad(loss, w.weight)\nb = torch.autograd.grad(loss, w.weight)"))
    assert "the same loss is differentiated twice" in again
    assert "the same loss is differentiated twice" in lines
    assert "not known" not in again
    assert "not known: do you want the same gradient twice?" in lines


def test_a_transpose_has_a_line_and_a_name(said):
    note = said("""
h = nn.Linear(3, 3)(torch.ones(3, 3))
turned = None
turned = h.mT
for _ in range(2):
    turned.exp().sum().backward()
    h = None
""")
    assert "shared part: `turned`" in note
    assert "created at   program.py:8 " in note


@CHANGES
def test_a_value_of_a_function_that_has_returned_is_named_by_the_line_that_changed_it(said):
    note = said("""
a = torch.ones(3, requires_grad=True)


def loss():
    e = a.exp()
    out = e.sum()
    e += 1
    return out


found = loss()
found.backward()
""")
    assert "`e` was changed in place" in note
    assert "called from  program.py:16 " in note


def test_the_step_that_changed_a_shared_part_is_named(said):
    note = said("""
body, head = nn.Linear(3, 2), nn.Linear(2, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
h = body(torch.ones(4, 3)).tanh()
head(h).square().mean().backward()
optimizer.step()
norm = head.weight.grad.norm()
head(h).mean().backward()
""")
    assert "which\n               program.py:10 (optimizer.step()) has changed" in note


def test_state_that_an_object_carries_is_likely_without_a_record(likely):
    found = likely("""
class Trainer:
    def __init__(self):
        self.cell, self.h = nn.RNNCell(2, 3), torch.zeros(1, 3)

    def run(self):
        for step in range(3):
            self.h = self.cell(torch.ones(1, 2), self.h)
            self.h.sum().backward()


Trainer().run()
""")
    assert (found.cause, found.variable, found.certain) == ("carried", "self.h", False)


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


def test_what_a_loop_of_this_step_made_is_no_state_of_an_earlier_one(said):
    note = said(ROLLED_OUT.format(first="loss.backward()"))
    assert "both losses depend on it" in note
    assert "an earlier step" not in note
    note = said(ROLLED_OUT.format(first="loss.backward(retain_graph=True); opt.step()"))
    assert "was changed in place" in note
    assert "step put it" not in note
    assert "previous step" not in note


RECURRENT = """
cell, head = nn.GRUCell(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
h = torch.zeros(2, 4)
for step in range(3):
    h = cell(torch.randn(2, 3), h)
    loss = head(h).square().mean()
    opt.zero_grad()
    {call}
    opt.step()
"""


@CHANGES
def test_state_whose_graph_was_kept(said):
    note = said(RECURRENT.format(call="loss.backward(retain_graph=True)"))
    assert "kept by      program.py:13   loss.backward(retain_graph=True)   (call #1 on that line)\n" in note
    assert re.search(r"^ +changed since: cell\.\S+ cell\.\S+ cell\.\S+ and 1 more$", note, re.MULTILINE)  # not the head
    assert "state from a previous step, whose pass kept its graph, of values that have changed since;" in note
    assert "after program.py:13 (loss.backward(retain_graph=True)), write\n               h = h.detach()" in note
    note = said(RECURRENT.format(call="loss.backward()"))
    assert "freed by     program.py:13   loss.backward()   (call #0 on that line)\n" in note
    assert "whose pass freed its graph;" in note
    assert "changed since: " not in note


STORED = """
cell, head = nn.GRUCell(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([cell.weight_hh, *head.parameters()], lr=0.1)
states = [torch.zeros(2, 4)]
for step in range(3):
    states.append(cell(torch.randn(2, 3), states[-1]))
    loss = head(states[-1]).square().mean()
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
"""


@CHANGES
def test_states_in_a_list_whose_graphs_were_kept(said):
    note = said(STORED)
    assert "changed since: cell.weight_hh\n" in note  # nothing that the optimizer leaves alone
    assert "an earlier step put it into `states`, and its pass kept its graph, of values that have changed" in note
    assert "states[:] = [value.detach() for value in states]" in note


def test_which_passes_look_for_names():
    w = torch.rand(3, requires_grad=True)
    with watch() as record:
        built, freed = w.exp(), w.sin()
        torch.autograd.grad(built.sum(), w, create_graph=True)
        assert record.record.tags.held_at(built.grad_fn) is None  # the gradient's graph is differentiated at once
        torch.autograd.grad(freed.sum(), w, create_graph=True, retain_graph=False)
        assert record.record.tags.held_at(freed.grad_fn) is record.passes[1]


SUM = """
w = torch.ones(3, requires_grad=True)
loss = 0
for x in torch.ones(2, 3):
    loss += (w * x).exp().sum()
loss.backward()
{between}
for x in torch.ones(2, 3):
    loss += (w * x).exp().sum()
loss.backward()
"""


def test_a_sum_that_goes_on_after_its_pass(said):
    stepped = said(SUM.format(between="with torch.no_grad():\n    w -= 0.1 * w.grad"))
    assert "both losses depend on it" in stepped
    assert "not known: should what `loss` was at program.py:10 (loss.backward()) count again" in stepped
    assert "reset `loss` between the two" in stepped
    assert "program.py:12 (w -= 0.1 * w.grad) has changed what it was computed from." in stepped
    assert "fix" not in stepped
    assert "`loss` and `loss`" not in stepped
    as_written = said(SUM.format(between=""))
    assert "fix 1: pass retain_graph=True at program.py:10" in as_written
    assert "`loss` and `loss`" not in as_written


def test_a_value_that_is_made_anew_from_itself_is_one_value(said):
    note = said("""
w = torch.ones(3, requires_grad=True)
loss = w.exp().sum()
loss.backward()
with torch.no_grad():
    w -= 0.1 * w.grad
loss = loss * 2
loss.backward()
""")
    assert "`loss` and `loss`" not in note


READ_HERE = """
class Batch:
    def __init__(self):
        self.data, self.grad = torch.ones(4, 3), torch.zeros(())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))


def train(net, batch, data, item, scaled):
    {cut}
    loss = out.sum()
    loss.backward()


net = nn.Linear(3, 2).requires_grad_(False)
train(net, Batch(), torch.ones(4, 3), torch.ones(4, 3), Scaled())
"""


@pytest.mark.parametrize("harmless", ["net(data)", "net(item) * 2", "net(batch.data) + batch.grad", "net(scaled.mean)"])
def test_a_name_that_sounds_like_a_cut_is_none(likely, harmless):
    found = likely(READ_HERE.format(cut=f"out = {harmless}"))
    assert (found.cause, found.created) == ("no graph", None)


@pytest.mark.parametrize(
    ("cut", "cause"),
    [
        ("net(data.data)", "detached"),
        ("net(scaled.mean.data)", "detached"),
        ("net.weight.data * 2", "detached"),
        ("net(data).data", "detached"),
        ("net(data.detach())", "detached"),
        ("net(data) * data[0, 0].item()", "constant"),
        ("torch.tensor([net(data).sum()])", "constant"),
        ("net(data).argmax(1)", "constant"),
    ],
)
def test_what_cuts_is_likely_without_a_record(likely, cut, cause):
    found = likely(READ_HERE.format(cut=f"out = {cut}"))
    assert (found.cause, found.created.number, found.certain) == (cause, 18, False)


def test_a_loss_computed_by_a_trained_module_was_cut_off(likely):
    text = """
def accuracy(out, target):
    return (out.argmax(1) == target).float().mean()


net, x, target = nn.Linear(3, 2){frozen}, torch.ones(4, 3), torch.zeros(4)
loss = 1 - accuracy(net(x), target)
loss.backward()
"""
    (trained,) = likely(text.format(frozen="")).unknown
    assert trained.startswith("where it was cut off. `net`, which program.py:11 (loss = 1")
    assert "hodiff explain" in trained
    frozen = likely(text.format(frozen=".requires_grad_(False)"))
    assert frozen.cause == "frozen"
    assert "`net.weight`, `net.bias`" in str(frozen)


def test_a_value_kept_behind_a_flag_of_its_own_is_not_known_to_be_emptied(said):
    note = said("""
class Kept:
    def __init__(self):
        self.w, self.ready = torch.ones(3, requires_grad=True), False

    def value(self):
        if not self.ready:
            self.made, self.ready = self.w.exp() * 1, True
        return self.made


kept = Kept()
for _ in range(2):
    kept.value().sum().backward()
""")
    assert "an object computed it once and keeps it" in note
    assert "not known: how to empty `kept.made`. Compute it again in each step" in note
    assert "if it were detached, kept.w would get no gradient through it." in note
    assert "fix" not in note


# --- where a graph ended ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["y.detach()", "y.data", "y + torch.zeros(3)", "torch.stack([y]).sum(0)"])
def test_what_was_cut_before_is_cut_there(said, again):
    note = said(f"x = torch.ones(3, requires_grad=True)\ny = x.exp().detach()\nz = {again}\nz.sum().backward()")
    assert "cut at       program.py:6   y = x.exp().detach()" in note
    assert "(likely" not in note


def test_of_several_that_were_cut_the_first_is_named(said):
    note = said("""
x = torch.ones(3, requires_grad=True)
y = x.exp().detach()
with torch.no_grad():
    z = x.sin()
(z * y).sum().backward()
""")
    assert "cut at       program.py:9   z = x.sin()" in note


@pytest.mark.parametrize("leave", ["y.detach().cpu().numpy()", "np.asarray(y.detach())", "y.tolist()"])
def test_what_left_pytorch_may_be_what_came_back(said, leave):
    note = said(f"""
import numpy as np

x = torch.ones(3, requires_grad=True)
y = x.exp()
kept = {leave}
back = torch.as_tensor(kept).float()
back.sum().backward()
""")
    assert "cut at       program.py:10   kept = " in note
    assert "failed (likely)" in note
    assert "fix" not in note


@pytest.mark.parametrize("logged", ["loss.detach()", "loss.data", "torch.ones(3).sum().item()"])
def test_what_was_only_logged_is_not_said_to_have_cut_another(said, logged):
    note = said(f"""
x, history = torch.ones(3, requires_grad=True), []
loss = x.exp().sum()
history.append({logged})
loss.backward()
other = torch.zeros(3).exp().sum()
other.backward()
""")
    assert "cut at" not in note
    assert "computed at  program.py:10   other = " in note


def test_in_a_function_the_line_is_that_of_its_forward(said):
    note = said("""
def helped(x):
    return x.exp()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        inner = helped(x)
        torch.autograd.grad(inner.sum(), x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def apply(x):
    return Own.apply(x)


apply(torch.ones(3, requires_grad=True))
""")
    assert "cut at       program.py:7   return x.exp()" in note


@CHANGES
def test_with_nothing_recorded_a_changed_weight_leaves_both_ways_open(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(START + RECURRENT.format(call="loss.backward(retain_graph=True)"), "utf-8")
    with pytest.raises(RuntimeError, match="inplace operation") as caught:
        runpy.run_path(str(path), run_name="__main__")
    found = hodiff.graph.explain(caught.value)
    assert (found.cause, found.variable, found.certain, found.fixes) == (
        "changed in place",
        "cell.weight_hh",
        False,
        (),
    )
    assert "a recurrent\nstate" in found.unknown[0]
    assert "computed again" in found.unknown[0]


# --- what programs after further reports showed ---------------------------------------------------------------------


def test_a_lazy_module_is_initialized_under_a_watch():
    lazy = torch.nn.LazyLinear(2)
    with watch():
        assert lazy(torch.ones(1, 3)).shape == (1, 2)


def test_an_explanation_passes_over_parameters_that_have_no_values_yet(tmp_path):
    note = explained_script(
        tmp_path,
        "import torch\nspare, x = torch.nn.LazyLinear(2), torch.ones(2, requires_grad=True)\n"
        "y = x.exp()\ny.sum().backward()\ny.mean().backward()\n",
    )
    assert "shared part: `y`" in note


BLOCKS = {
    "decorated": """
@torch.no_grad()
def evaluate():
    loss = w.exp().sum()
    loss.backward()
evaluate()
""",
    "with": """
with torch.no_grad():
    hidden = w.exp()
hidden.sum().backward()
""",
    "inference": """
with torch.inference_mode():
    hidden = w.exp()
hidden.sum().backward()
""",
}


@pytest.mark.parametrize(
    ("name", "off", "fix"),
    [
        ("decorated", "@torch.no_grad()", "put `with torch.enable_grad():` around everything that"),
        ("with", "with torch.no_grad():", "put `with torch.enable_grad():` around everything that"),
        ("inference", "with torch.inference_mode():", "put `with torch.inference_mode(False):` around everything"),
    ],
)
def test_a_block_without_gradients_is_shown_and_left_as_a_whole(name, off, fix, tmp_path):
    note = explained_script(tmp_path, f"import torch\nw = torch.ones(2, requires_grad=True)\n{BLOCKS[name]}")
    assert re.search(rf"switched off script\.py:\d+   {re.escape(off)}\n", note)
    assert fix in note
    assert ("to script.py:7 (loss.backward())." in note) == (name == "decorated")


def explained_script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text, "utf-8")
    with watch(), pytest.raises(RuntimeError, match=OF_AUTOGRAD) as caught:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value.__notes__[0]


def test_cuts_of_several_kinds_are_shown_and_none_is_called_the_fault(tmp_path):
    note = explained_script(
        tmp_path,
        "import torch\n"
        "w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)\n"
        "prediction = w.exp().detach()\n"
        "with torch.no_grad():\n    target = v.exp()\n"
        "loss = (prediction - target).square().sum()\n"
        "loss.backward()\n",
    )
    assert "cut at       script.py:3   prediction" in note
    assert "cut at       script.py:5   target" in note
    assert "not known: whether either is intended" in note
    assert "fix" not in note


def test_no_grad_blocks_of_two_functions_are_not_both_left(tmp_path):
    note = explained_script(
        tmp_path,
        "import torch\nw = torch.ones(2, requires_grad=True)\n"
        "@torch.no_grad()\ndef teacher():\n    return w.exp()\n"
        "def student():\n    with torch.no_grad():\n        return w.sin()\n"
        "loss = (student() - teacher()).sum()\nloss.backward()\n",
    )
    assert "not known: whether either is intended" in note
    assert "fix" not in note


def test_what_an_object_keeps_from_the_first_step_is_no_cache(tmp_path):
    note = explained_script(
        tmp_path,
        "import torch\nw = torch.ones(2, requires_grad=True)\n"
        "class Balance:\n    initial = None\n    def weigh(self, loss):\n"
        "        if self.initial is None:\n            self.initial = loss\n        return loss / self.initial\n"
        "balance = Balance()\n"
        "for step in range(2):\n    loss = w.exp().sum()\n    ratio = balance.weigh(loss)\n    ratio.backward()\n",
    )
    assert "it is state from a previous step" in note
    assert "balance.initial = balance.initial.detach()" in note
    assert "= None" not in note.replace("initial = None", "", 0).split("=>")[1]


def test_a_stored_loss_whose_baseline_a_pass_has_freed_says_where_that_was_computed(tmp_path):
    note = explained_script(
        tmp_path,
        "import torch\nw, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)\n"
        "terms = []\n"
        "def step():\n    value = v.exp().sum()\n    value.backward()\n    terms.append(w.sum() * value)\n"
        "for _ in range(3):\n    step()\n"
        "objective = torch.stack(terms).sum()\nobjective.backward()\n",
    )
    assert "should a gradient flow on to what was computed at script.py:5" in note
    assert "script.py:6 (value.backward()) has differentiated already" in note


# --- the words --------------------------------------------------------------------------------------------------------


def test_what_is_freed_is_counted_by_kind(said):
    note = said("""
x = torch.ones(3, requires_grad=True)
y = x.exp().exp().sin().cos().tanh().sigmoid().sqrt().log().atan()
y.sum().backward()
y.mean().backward()
""")
    (line,) = re.findall(r"freed nodes it needs: (.*)", note)
    kinds = [f"{name}Backward0" for name in ("Atan", "Log", "Sqrt", "Sigmoid", "Tanh", "Cos")]
    assert line == ", ".join(kinds) + " and 2 more kinds"
    note = said("x = torch.ones(3, requires_grad=True)\ny = x.exp().exp()\ny.sum().backward()\ny.mean().backward()")
    assert "freed nodes it needs: ExpBackward0 x2\n" in note


def test_the_nearest_and_the_outermost_caller_are_told(said):
    note = said("""
def innermost(x):
    return x.exp()


def middle(x):
    return innermost(x) * 1


def outer(x):
    return middle(x) * 1


def losses(x):
    return outer(x)


y = losses(torch.ones(3, requires_grad=True))
y.sum().backward()
y.mean().backward()
""")
    called = re.findall(r"called from +(\S+)", note)
    assert called == ["program.py:19", "program.py:22"]
    assert "created at   program.py:15   return middle(x) * 1" in note


@CHANGES
def test_who_called_what_changed_a_value(said):
    note = said("""
def change(e):
    e.add_(1)


def around(e):
    change(e)


def whole(e):
    around(e)


e = torch.ones(3, requires_grad=True).exp()
loss = e.sum()
whole(e)
loss.backward()
""")
    assert "changed at   program.py:7   e.add_(1)" in note
    assert re.findall(r"called from +(\S+)", note) == ["program.py:11"]


@CHANGES
def test_no_copy_of_what_a_list_holds_too(said):
    text = """
kept = []


def loss(x):
    e = x.exp()
    {also}
    out = e.sum()
    e += 1
    return out


loss(torch.ones(3, requires_grad=True)).backward()
"""
    assert "e = e.clone()" in said(text.format(also="pass"))
    assert "clone" not in said(text.format(also="kept.append(e)"))


def test_a_method_that_functools_keeps(said):
    note = said("""
import functools


def made():
    class Kernel:
        def __init__(self):
            self.w = torch.ones(3, requires_grad=True)

        @functools.cache
        def values(self):
            return self.w.exp()

    return Kernel()


kernel = made()
for _ in range(2):
    kernel.values().sum().backward()
""")
    assert "functools keeps the function's first result" in note
    assert "Kernel.values.cache_clear()" in note  # whose class no variable holds
