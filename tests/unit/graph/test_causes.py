"""Causes that a record names: parameters that are frozen, casts, losses of several elements, passes inside passes."""

import runpy
import types

import pytest
import torch

import hodiff
from hodiff.graph import watch
from hodiff.graph._case import Evidence

START = "import torch\nfrom torch import nn\n\ntorch.manual_seed(0)\n"
OF_GRADIENTS = "does not require grad|a second time|appears to not have been used|only for scalar outputs"


def run(tmp_path, text, context):
    path = tmp_path / "program.py"
    path.write_text(START + text, "utf-8")
    with pytest.raises(RuntimeError, match=OF_GRADIENTS) as caught, context:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value


@pytest.fixture
def explained(tmp_path):
    """The explanation of a program, its lines joined."""

    def of(text):
        (note,) = run(tmp_path, text, watch()).__notes__
        return " ".join(note.split())

    return of


FREEZE = """
enc = nn.Linear(3, 3)
{optimizer}
def freeze(model, on):
    for p in model.parameters():
        if p.requires_grad: p.requires_grad = on
def evaluate():
    loss = nn.Linear(3, 1)(enc(torch.randn(4, 3))).square().mean()
    return loss.item()
freeze(enc, False); evaluate(); freeze(enc, True)
loss = enc(torch.randn(4, 3)).square().mean()
loss.backward()
"""


def test_frozen_parameters_are_named_with_the_line_that_froze_them(explained):
    note = explained(FREEZE.format(optimizer=""))
    assert "frozen `enc.weight`, `enc.bias` switched off program.py:10 if p.requires_grad: p.requires_grad = on" in note
    assert "cut at" not in note
    assert "loss.item()" not in note
    assert "hodiff explain" not in note
    assert "not known: what this loss should train" in note


def test_what_is_frozen_on_purpose_is_not_to_be_trained(explained):
    note = explained(FREEZE.format(optimizer="opt = torch.optim.SGD(enc.parameters(), lr=0.1)"))
    assert "fix" not in note
    assert "a layer on top of them" in note


def test_what_the_line_has_trained_before_is_to_be_trained_again(explained):
    note = explained("""
g, d = nn.Linear(2, 3), nn.Linear(3, 1)
opt_g, opt_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
for _ in range(2):
    fake = g(torch.randn(4, 2))
    d_loss = d(fake.detach()).mean()
    d_loss.backward(); opt_d.step()
    d.requires_grad_(False)
    g_loss = -d(fake).mean()
    g_loss.backward(); opt_g.step()
""")
    assert "switched off program.py:12 d.requires_grad_(False)" in note
    assert "fix 1: call requires_grad_(True) on them before program.py:10 (d_loss" in note
    assert "detach()`" not in note
    assert "leave out" not in note


def test_frozen_parameters_are_likely_without_a_record(tmp_path):
    found = hodiff.graph.explain(run(tmp_path, FREEZE.format(optimizer=""), torch.enable_grad()))
    assert (found.cause, found.certain) == ("frozen", False)
    assert "`enc.weight`, `enc.bias`" in str(found)


GAN = """
g, d, vgg = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 3).requires_grad_(False)
opt_g, opt_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
fake = g(torch.randn(4, 2)).detach()
{line}
loss.backward()
"""


def test_a_cut_beside_what_is_frozen_is_a_question_where_both_are_to_be_trained(explained):
    note = explained(GAN.format(line="d.requires_grad_(False); loss = d(fake).mean()"))
    assert "cut at program.py:8 fake = g(torch.randn(4, 2)).detach() frozen in program.py:9" in note
    assert "what was cut off, or `d.weight`, `d.bias`, which is frozen" in note
    assert "fix" not in note


def test_a_frozen_network_of_features_is_not_the_cause(explained):
    note = explained(GAN.format(line="loss = (vgg(fake) - vgg(torch.randn(4, 3))).square().mean()"))
    assert "fix 1: remove the detach()" in note
    assert "frozen" not in note


def test_of_a_detached_copy_for_statistics_the_value_itself_is_to_be_used(explained):
    """Without the detach() the buffers of an observer would hold the graphs of all steps."""
    note = explained("""
class Observer(nn.Module):
    def forward(self, x_orig):
        x = x_orig.detach()
        self.least = x.min()
        return x
net, observer = nn.Linear(3, 1), Observer()
loss = observer(net(torch.randn(4, 3))).mean()
loss.backward()
""")
    assert "fix 1: remove the detach() or .data at program.py:" in note
    assert "If x is only stored (statistics), leave it, and return or use x_orig afterwards." in note


def test_a_cut_that_leads_to_nothing_that_is_trained_is_left_out(explained):
    note = explained("""
net, teacher = nn.Linear(3, 1), nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
target = teacher(torch.randn(4, 3)).detach()
loss = ((net(torch.randn(4, 3)) > 0) == (target > 0)).float().mean()
loss.backward()
""")
    assert "target = teacher" not in note
    assert "fix 1: write a smooth function for `gt`" in note


def test_an_input_that_is_cast_to_integers_is_cut_there(explained):
    note = explained("""
table, x = torch.randn(5, requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
index = x.long()
torch.autograd.grad(table[index].sum(), x)
""")
    assert "cut at program.py:7 index = x.long()" in note
    assert "integers or booleans, which have no derivative" in note
    assert "another tensor of that name" not in note


def test_a_number_that_is_only_printed_cuts_nothing_off(explained):
    note = explained("""
w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
print(x.sum().item())
torch.autograd.grad(w.sum(), x)
""")
    assert "cut at" not in note
    assert "the loss was computed without it" in note


def test_a_loss_of_several_elements_says_its_shape_and_its_line(explained):
    note = explained("""
net = nn.Linear(3, 2)
loss = nn.functional.cross_entropy(net(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]), reduction="none")
loss.backward()
""")
    assert "`loss` has shape (4,) computed at program.py:7 loss =" in note
    assert "fix 1: differentiate loss.mean() or loss.sum(): the second gives gradients 4 times as large." in note
    note = explained("x = torch.ones(3, requires_grad=True)\ntorch.autograd.grad(x * 2, x)")
    assert "fix 2: take each element's gradient with hodiff.jacobian." in note


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
{line}
x = torch.randn(2, 3, requires_grad=True)
Checkpoint.apply(lambda t: a(t), x, *a.parameters(), *b.parameters()).sum().backward()
"""


@pytest.mark.parametrize(
    ("line", "names", "fix"),
    [
        ("", "`b.weight`, `b.bias`", "fix 1: pass allow_unused=True there"),
        ("a.requires_grad_(False)", "`a.weight`, `a.bias`", "[p for p in inputs if p.requires_grad]"),
    ],
)
def test_a_pass_that_a_function_asks_for_names_what_it_does_not_reach(explained, line, names, fix):
    note = explained(CHECKPOINT.format(line=line))
    assert f"not in the graph: {names}" in note
    assert fix in note


TWO_NETWORKS = """
g, d = nn.Linear(2, 3), nn.Linear(3, 1)
opt_g, opt_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
fake = g(torch.randn(4, 2)).tanh()
score = d(fake)
g_loss, d_loss = (score - 1).square().mean(), score.square().mean() + d(torch.randn(4, 3)).mean()
{between}
d_loss.backward()
"""


def test_the_second_network_s_pass_begins_behind_what_the_first_optimizer_changed(explained):
    note = explained(TWO_NETWORKS.format(between="g_loss.backward(); opt_g.step(); opt_d.zero_grad()"))
    assert "fix 1: compute `score` and `d_loss` again, from fake.detach(): this pass trains d.bias, d.weight" in note
    assert "has changed g.bias, g.weight since" in note
    assert "not known" not in note


def test_only_what_was_changed_is_said_to_be(explained):
    note = explained(TWO_NETWORKS.format(between="g_loss.backward(); opt_g.step()"))  # what d was given is there still
    assert "reach g.bias, g.weight, which" in note
    assert "fix" not in note


def test_the_call_whose_gradient_is_used_stays(explained):
    note = explained("""
net = nn.Linear(3, 1)
loss = net(torch.randn(4, 3)).square().mean()
loss.backward()
gradients = torch.autograd.grad(loss, list(net.parameters()))
""")
    assert "remove the first call, provided that the program uses `gradients` and no `.grad`" in note


def test_sentences_are_wrapped_and_code_is_not(explained, tmp_path):
    (note,) = run(tmp_path, FREEZE.format(optimizer=""), watch()).__notes__
    assert max(map(len, note.splitlines())) <= 120


def test_to_say_that_a_leaf_requires_no_grad_changes_no_value():
    w = torch.ones(2, requires_grad=True)
    with watch() as record:
        w.requires_grad_(False)
        w.requires_grad = True
        assert record.record.changed(w) is None
        assert record.record.switched(w)[0].line.text == "w.requires_grad = True"


def test_an_output_of_a_compiled_call_is_not_what_the_first_loss_reads():
    """All outputs of such a call are one node, and a variable that holds one may be that of the second loss alone."""
    compiled = type("CompiledFunctionBackward", (), {})()
    for node, words in ((compiled, "those outputs of the compiled call"), (object(), "aux.detach()")):
        evidence = types.SimpleNamespace(first=types.SimpleNamespace(node=node), variables=["aux"])
        assert Evidence.detached.fget(evidence).startswith(words)


COMPILED = """
encoder, critic = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)}), nn.Linear(3, 1)
opt_e, opt_c = torch.optim.SGD(encoder.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
def both(z): return encoder["a"](z).tanh(), encoder["b"](z).tanh()
fake, other = torch.compile(both, backend="aot_eager")(torch.randn(4, 2))
"""
CRITIC_FIRST = """
d_loss = critic(fake).square().mean()
d_loss.backward(); opt_c.step(); opt_e.zero_grad()
loss = other.square().mean()
loss.backward(); opt_e.step()
"""
BOTH_FOR_THE_ENCODER = """
opt_e.zero_grad()
loss = other.square().mean()
loss.backward()
g_loss = critic(fake).square().mean()
g_loss.backward(); opt_e.step()
"""


def test_two_outputs_are_one_node_by_torch_compile(explained, tmp_path):
    """Each program is right without it, and detach() is a fix only where the first pass was for the critic alone."""
    same = "torch.compile makes one node of all outputs of a call: a pass through one frees what the others need. => "
    torch.compiler.reset()
    note = explained(COMPILED + CRITIC_FIRST)
    assert same in note
    assert "fake.detach(), at program.py:11 (d_loss = critic(fake).square().mean()): that pass trains critic." in note
    note = explained(COMPILED + BOTH_FOR_THE_ENCODER)
    assert same in note
    assert "fix" not in note
    assert "those outputs of the compiled call that it reads, detached. If so, keep the graph with retain_graph" in note
    torch.compiler.reset()
    eager = COMPILED.replace("aot_eager", "eager")
    for k, program in enumerate((CRITIC_FIRST, BOTH_FOR_THE_ENCODER)):
        (tmp_path / f"{k}.py").write_text(START + eager + program, "utf-8")
        runpy.run_path(str(tmp_path / f"{k}.py"))
    torch.compiler.reset()
