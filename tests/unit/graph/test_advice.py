"""What is advised, where programs of no report showed that it could harm; and evidence that advice stands on."""

import runpy

import pytest
import torch

import hodiff
from hodiff.graph import watch

START = "import torch\nfrom torch import nn\n\ntorch.manual_seed(0)\n"


@pytest.fixture
def said(tmp_path):
    """What is said of a program."""

    def of(text):
        path = tmp_path / "program.py"
        path.write_text(START + text, "utf-8")
        with pytest.raises(RuntimeError, match=r".") as caught, watch():
            runpy.run_path(str(path), run_name="__main__")
        return "\n".join(caught.value.__notes__)

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
    assert "where the gradient of w is to end" in note


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
    assert "belongs to both losses" in note
