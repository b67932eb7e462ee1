"""watch changes no number and no error, in the company of compile, checkpoints, hooks, Functions and threads."""

import contextlib
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.graph import _explain, _record, explain, watch
from hodiff.graph._case import Explanation
from tests.support.limits import in_threads
from tests.support.releases import since
from tests.unit.graph.random_graphs import Cube, Graphs


def note(error) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def train(steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[p.detach() for p in model.parameters()]]


def test_training_is_the_same():
    plain = train()
    with watch() as record:
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [call.repeat for call in record.passes] == [0, 1, 2]
    assert not any(call.retained for call in record.passes)


def test_random_graphs_are_the_same():
    for seed in range(25):
        outcomes = []
        for context in (torch.enable_grad(), watch()):
            with context:
                graphs = Graphs(seed)
                outcome = []
                for loss in graphs.losses * 2:
                    try:
                        loss.backward(retain_graph=graphs.r.random() < 0.4)
                    except RuntimeError as error:
                        outcome.append(str(error))
                        said = note(error)
                assert context.__class__.__name__ != "Watch" or not outcome or "hodiff: why" in said
                outcomes.append((outcome, [leaf.grad for leaf in graphs.leaves]))
        assert outcomes[0][0] == outcomes[1][0]
        torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_are_the_same(backend):
    def f(x):
        return (x.sin() * x).sum()

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    right = f(x)
    (gradient,) = torch.autograd.grad(right, x)
    torch.compiler.reset()
    with watch():
        compiled = torch.compile(f, backend=backend)
        got = compiled(x)
        (found,) = torch.autograd.grad(got, x)
        again = compiled(x)
    assert got.shape == ()
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(again, right)
    torch.testing.assert_close(found, gradient)
    torch.testing.assert_close(compiled(x), right)


def test_checkpoints_hooks_and_save_on_cpu():
    ran = []

    def block(x):
        ran.append(1)
        return x.sin().exp()

    a = torch.rand(3, requires_grad=True)
    with watch(), torch.autograd.graph.save_on_cpu():
        b = checkpoint(block, a, use_reentrant=False)
        b.register_hook(lambda g: ran.append(2))
        loss = b.square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time") as caught:
            loss.backward()
    assert ran in ([1, 2, 1], [1, 1, 2])
    assert "same loss" in note(caught.value)


def test_functions_and_their_own_exceptions():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError("mine")

    a = torch.rand(3, requires_grad=True)
    with watch():
        Cube.apply(a).sum().backward()
        with pytest.raises(ZeroDivisionError, match=r"^mine$") as caught:
            Fails.apply(a).sum().backward()
    assert note(caught.value) == ""
    assert torch.allclose(a.grad, 3 * a.detach() ** 2)


def test_a_function_that_is_met_again():
    a = torch.rand(3, requires_grad=True)
    with watch():
        y = Cube.apply(a)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time") as caught:
            y.sin().sum().backward()
    assert "part         `y`: CubeBackward" in note(caught.value)


def test_nested_tensors():
    with watch():
        jagged = torch.nested.nested_tensor([torch.rand(2, 3)], layout=torch.jagged, requires_grad=True)
        (jagged * 2).values().sum().backward()


def test_threads_go_their_own_ways():
    caught = []

    def other():
        a = torch.rand(3, requires_grad=True)
        loss = a.exp().sum()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            caught.append(error)

    a = torch.rand(3, requires_grad=True)
    with watch():
        in_threads(other)
        a.exp().sum().backward()
    assert note(caught[0]) == ""
    assert a.grad is not None


def test_one_note_from_nested_watches():
    a = torch.rand(3, requires_grad=True)
    with watch(), watch():
        loss = a.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time") as caught:
            loss.backward()
    assert note(caught.value).count("hodiff: why") == 1


@since((2, 11), "torch.autograd.backward is not seen by a watch (Tensor.backward is)")
def test_autograd_functions_are_seen_as_well():
    a = torch.rand(3, requires_grad=True)
    with watch() as record:
        y = a.exp()
        torch.autograd.grad(y.sum(), a)
        with pytest.raises(RuntimeError, match="second time") as caught:
            torch.autograd.backward(y.sin().sum())
    assert [call.name for call in record.passes] == ["autograd.grad", "autograd.backward"]
    assert "why this autograd.backward failed" in note(caught.value)
    assert "`y`" in note(caught.value)


def test_a_helper_that_is_called_for_everything():
    """The line that made the shared part runs again for others: the variable's own assignments decide."""

    def layer(x):
        return x.exp()

    a, b = (torch.rand(3, requires_grad=True) for _ in "ab")
    with watch():
        y = layer(a)
        with pytest.raises(RuntimeError, match="second time") as caught:
            for _ in range(2):
                loss = (y * layer(b)).sum()
                loss.backward()
    assert "=> made once" in note(caught.value)


def test_one_line_that_differentiates_two_losses():
    def step(loss):
        loss.backward()

    a = torch.rand(3, requires_grad=True)
    with watch():
        y = a.exp()
        first, second = y.sum(), y.sin().sum()
        step(first)
        with pytest.raises(RuntimeError, match="second time") as caught:
            step(second)
    assert "=> shared part" in note(caught.value)


def test_a_failing_pass_is_known_to_have_freed_what_it_ran():
    a, b = (torch.rand(3, requires_grad=True) for _ in "ab")
    with watch():
        old = b.exp()
        old.sum().backward()
        fresh = a.exp()
        loss = (fresh * old).sum()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match="second time") as caught:
            loss.backward()
    assert "same loss" in note(caught.value)


def test_the_log_is_bounded_and_keeps_what_ran_once(monkeypatch):
    monkeypatch.setattr(_record, "LOG", 50)
    a = torch.rand(3, requires_grad=True)
    with watch() as record:
        y = a.exp()
        y.sum().backward(retain_graph=True)
        for _ in range(200):
            z = a.sin()
            z = z.cos()
    assert len(record.record._log._entries) <= 60
    assert record.record.made(y.grad_fn).text == "y = a.exp()"
    assert not record.record.ran_again(y.grad_fn, record.passes[0])
    assert record.record.ran_again(z.grad_fn, record.passes[0])
    assert record.record.made(z.grad_fn).text == "z = z.cos()"


def test_the_log_itself(monkeypatch):
    monkeypatch.setattr(_record, "LOG", 8)
    log, lines = _record.Log(), range(3)
    log.add(0, 2, lines[0])
    log.add(2, 3, lines[0])  # the same line goes on: one entry
    assert len(log._entries) == 1
    for place in range(5, 105, 2):
        log.add(place, place + 1, lines[1 + place // 2 % 2])
    assert len(log._entries) <= 9
    assert [log.line(place) for place in (0, 2, 3, 4, 5, 6, 103, 104)] == [
        *[lines[0], lines[0], None, None],  # nobody was seen at 3 and 4
        *[lines[1], None, lines[2], None],
    ]
    assert [log.ran_again(place, 3) for place in (0, 5, 103)] == [False, True, True]
    assert [log.ran_again(place, 103) for place in (0, 5, 103)] == [False, False, True]
    assert not log.ran_again(103, 104)


def test_passes_that_build_graphs_do_not_outgrow_the_log(monkeypatch):
    monkeypatch.setattr(_record, "LOG", 50)
    a = torch.rand(3, requires_grad=True)
    with watch() as record:
        y = a.exp().sum()
        for _ in range(200):
            torch.autograd.grad(y, a, create_graph=True)
            torch.autograd.grad(y, a, create_graph=True)
    assert len(record.record._log._entries) <= 60


def test_what_was_cut_is_forgotten_with_its_tensor():
    a = torch.rand(3, requires_grad=True)
    with watch() as record:
        kept = a.detach()
        for _ in range(100):
            a.exp().detach()
    assert list(record.record.cuts.known) == [id(kept)]
    (cut,) = record.record.cuts.places(kept)
    assert (cut.kind, cut.line.text, cut.leaves) == ("detached", "kept = a.detach()", [a])


def test_second_derivatives():
    a = torch.rand(3, 2, requires_grad=True)
    with watch():
        y = torch.nn.functional.embedding_bag(torch.tensor([[0, 1]]), a).exp().sum()
        with pytest.raises(RuntimeError, match="not implemented") as caught:
            (g,) = torch.autograd.grad(y, a, create_graph=True)
            g.square().sum().backward()
    said = note(caught.value)
    assert re.search(r"lacks .*embedding_bag\(.*\n.*`_embedding_bag_backward`", said)
    assert re.search(r"failed .*square\(\)\.sum\(\)\.backward\(\)", said)


def test_explain_of_nothing():
    with pytest.raises(hodiff.InputError, match="no exception is being handled"):
        explain()
    assert explain(ValueError("x")) is None


def test_explain_finds_the_exception_being_handled():
    a = torch.rand(3, requires_grad=True)
    loss = a.exp().sum()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError:
        found = explain()
    assert (found.cause, found.variable, found.certain) == ("freed before", "loss", False)


def failing():
    y = torch.ones(3, requires_grad=True).exp()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time") as caught:
        y.mean().backward()
    return caught.value


def test_explain_prefers_the_exception_being_handled_to_the_last_one(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("of another cell"), raising=False)
    try:
        raise failing()
    except RuntimeError:
        assert hodiff.graph.explain().cause == "freed before"
    assert hodiff.graph.explain() is None


def test_explain_looks_behind_an_exception_that_was_made_from_it():
    error = ValueError("of the user's own")
    error.__cause__ = failing()
    found = hodiff.graph.explain(error)
    assert (found.cause, found.variable) == ("freed before", "y")
    assert found.line("failed").text == "y.mean().backward()"


@pytest.mark.parametrize("passes", ["loss.backward(); loss.backward()", "[loss.backward() for _ in range(2)]"])
@pytest.mark.parametrize("watched", [False, True])
def test_both_passes_on_one_line_are_explained(passes, watched):
    program = f"import torch\na = torch.rand(3, requires_grad=True)\nloss = a.exp().sum()\n{passes}\n"
    with watch() if watched else contextlib.nullcontext(), pytest.raises(RuntimeError, match="second time") as caught:
        exec(compile(program, "one_line.py", "exec"), {})
    found = hodiff.graph.explain(caught.value)
    assert found is not None and found.cause == ("same loss twice" if watched else "freed before")
    assert found.variable == "loss"


def test_explain_sees_the_frames_around_the_one_that_caught_it():
    def caught(loss):
        try:
            loss.backward()
        except RuntimeError as error:
            return hodiff.graph.explain(error)

    hidden = torch.ones(3, requires_grad=True).exp()
    hidden.sum().backward()
    found = caught(hidden.mean())
    assert found.variable == "hidden"
    assert found.line("failed").text == "loss.backward()"


def test_an_explanation_is_added_once_beside_notes_of_others():
    error = RuntimeError("failed")
    error.add_note("of the user's")
    for _ in range(2):
        _explain.note(error, lambda: Explanation("this pass", "carried over"))
    assert len(error.__notes__) == 2


def test_explain_of_what_was_released():
    a = torch.rand(3, requires_grad=True)
    loss = a.exp().sum()
    hodiff.graph.release(loss)
    with pytest.raises(hodiff.GraphError, match="was released: by hodiff") as caught:
        loss.backward()
    assert explain(caught.value).cause == "released"


@pytest.mark.parametrize("turned", [False, True])
def test_of_several_old_parts_one_that_is_not_private_is_named_first(turned):
    with watch():
        w = torch.ones(3, requires_grad=True)
        _a, b = w.exp(), (2 * w).exp()
        (_a.sin() + b.sin()).sum().backward()
        with pytest.raises(RuntimeError, match="second time") as info:
            ((b + _a) if turned else (_a + b)).sum().backward()
    first, second = re.findall(r"part +(`\w+`: .*)", "\n".join(info.value.__notes__))
    assert first == "`b`: ExpBackward0, output shape (3,)"
    assert second == "`_a`: ExpBackward0, output shape (3,)"
