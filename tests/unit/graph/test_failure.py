"""The errors of the calculus name the line and the variable; where that is impossible they are as they were."""

import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff._core import _messages, _nodes, _versions
from hodiff.errors import GraphError
from hodiff.graph import _failure, _names, _saved, watch
from tests.support.releases import CHANGES

X = torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64)
V = torch.ones_like(X)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def detached(x):
    h = x.detach() * 2
    return h.square().sum()


def by_data(x):
    h = x.sin().data
    return h.sum()


def under_no_grad(x):
    with torch.no_grad():
        h = x * 2
    return h.sum()


@torch.inference_mode()
def under_inference_mode(x):
    h = x * 2
    return h.sum()


def by_item(x):
    total = x.sum().item()
    return torch.tensor(total**2)


def by_float(x):
    total = float(x.square().sum())
    return torch.tensor(total)


def by_numpy(x):
    h = x.detach().numpy().copy()
    return torch.from_numpy(h).sum()


def by_tensor(x):
    h = torch.tensor([x[0] * 2, x[1]])
    return h.sum()


def by_argmax(x):
    index = x.argmax()
    return index.double()


def by_comparison(x):
    mask = x > 0.5
    return mask.double().sum()


def by_gradient(x):
    (g,) = torch.autograd.grad(x.pow(3).sum(), x)
    return g.sum()


def by_own_gradient(x):
    x.pow(3).sum().backward()
    g = x.grad
    return g.sum()


def by_constant_gradient(x):
    (g,) = torch.autograd.grad(x.sum(), x, create_graph=True)
    return g.sum()


CUT = {
    detached: ("h = x.detach() * 2", "drop the detach()"),
    by_data: ("h = x.sin().data", "drop the detach()"),
    under_no_grad: ("h = x * 2", "out of the no_grad block"),
    under_inference_mode: ("h = x * 2", "out of the no_grad block"),
    by_item: ("total = x.sum().item()", "tensor operations: item(), float(), NumPy"),
    by_float: ("total = float(x.square().sum())", "tensor operations: item(), float(), NumPy"),
    by_numpy: ("h = x.detach().numpy().copy()", "tensor operations: item(), float(), NumPy"),
    by_tensor: ("h = torch.tensor([x[0] * 2, x[1]])", "torch.stack and torch.cat do not"),
    by_argmax: ("index = x.argmax()", "smooth substitute"),
    by_comparison: ("mask = x > 0.5", "smooth substitute"),
    by_gradient: ("(g,) = torch.autograd.grad(x.pow(3).sum(), x)", "hodiff.grad, which is differentiable inside f"),
    by_own_gradient: ("g = x.grad", "hodiff.grad, which is differentiable inside f"),
    by_constant_gradient: ("(g,) = torch.autograd.grad(x.sum(), x, create_graph=True)", "gives zeros there"),
}


def said(line: str, fix: str, label: str = "cut at") -> str:
    words = r"\s+".join(map(re.escape, fix.split()))
    return rf"(?s)\n  {label} +test_failure\.py:\d+ +{re.escape(line)}\n.*helps: .*{words}"


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("call", [hodiff.grad, lambda f, x: hodiff.hvp(f, x, V), hodiff.hessian])
@pytest.mark.parametrize("f", CUT, ids=lambda f: f.__name__)
def test_where_f_cut_the_graph(f, call):
    with pytest.raises(hodiff.GraphError, match=said(*CUT[f])) as caught:
        call(f, X)
    assert "the output of f carries no graph: every path from x to the result" in str(caught.value)
    assert "Usual causes" not in str(caught.value)  # the guess gives way
    assert caught.value.__cause__ is None


def test_several_cuts_and_no_others():
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def f(x):
        norm = scale.detach().norm()  # cuts nothing of x
        a = x.detach() * norm
        b = x.data
        return (a + b).sum()

    with pytest.raises(hodiff.GraphError, match=r"a = x\.detach\(\)") as caught:
        hodiff.grad(f, X)
    assert "b = x.data" in str(caught.value)
    assert "norm = scale" not in str(caught.value)


def test_another_tensor_than_the_argument():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(hodiff.GraphError, match=r"no operation in f was given x(?s:.*)leads to: `w`"):
        hodiff.grad(lambda x: (w * 2).sum(), X)
    with pytest.raises(hodiff.GraphError, match=said("return (w * x.detach()).sum()", "drop the detach()")):
        hodiff.grad(cut_beside(w), X)


def cut_beside(w):
    def f(x):
        return (w * x.detach()).sum()

    return f


def test_strict():
    def f(pair):
        a, b = pair
        return (a * b.detach()).sum()

    with pytest.raises(hodiff.GraphError, match=r"strict=True(?s:.*)cut at .*return \(a \* b\.detach\(\)\)"):
        hodiff.grad(f, (X, X.clone()), strict=True)


def test_the_caller_s_own_parameters():
    model = nn.Linear(3, 1).double()

    def f(p):
        return model(X).sum()

    with pytest.raises(hodiff.GraphError, match=r"other than through its argument(?s:.*)used at .*return model\(X\)"):
        hodiff.grad(f, list(model.parameters()))


INDICES = torch.tensor([[0, 1], [2, 2]])


def bags(x):
    z = x.reshape(3, 1)
    d = F.embedding_bag(INDICES, z)
    return d.exp().sum()


def test_a_missing_second_derivative():
    with pytest.raises(
        hodiff.GraphError,
        match=r"derivative of embedding_bag(?s:.*)recorded at .*d = F\.embedding_bag\(",
    ):
        hodiff.hvp(bags, X, V)
    x = X.clone().requires_grad_()
    z = x.reshape(3, 1)
    d = F.embedding_bag(INDICES, z)
    with pytest.raises(
        hodiff.GraphError, match=r"derivative of embedding_bag(?s:.*)recorded as  `d` = EmbeddingBagBackward0 \(2, 1\)"
    ):
        hodiff.hvp(d.exp().sum(), x, V)


def test_a_nested_call_and_an_input_that_does_not_matter():
    x = X.clone().requires_grad_()
    words = r"derivative of embedding_bag(?s:.*)recorded at .*d = F\.embedding_bag\("
    with pytest.raises(hodiff.GraphError, match=words):
        hodiff.grad(lambda x: hodiff.hvp(bags, x, V).sum(), x, create_graph=True)
    with pytest.raises(hodiff.GraphError, match=words) as caught:
        hodiff.hvp(lambda pair: bags(pair[0]) + pair[1].detach().sum(), (X, X.clone()), (V, V))
    assert "cut at" not in str(caught.value)


def test_a_function_that_is_once_differentiable():
    def f(x):
        y = Once.apply(x)
        return y.sum()

    with pytest.raises(hodiff.GraphError, match=r"Once is @once(?s:.*)result is used at .*return y\.sum\(\)"):
        hodiff.hvp(f, X, V)


@CHANGES
def test_a_value_that_f_changed():
    def f(x):
        h = x.exp()
        total = (h * h).sum()
        h.mul_(2)
        return total

    words = r"saved +test_failure.*total = \(h \* h\)\.sum\(\)(?s:.*)\n +changed +test_failure.*h\.mul_\(2\)"
    with pytest.raises(hodiff.GraphError, match=words) as caught:
        hodiff.grad(f, X)
    assert "modified by an inplace operation" in str(caught.value.__cause__)


def test_a_pass_inside_f():
    def f(x):
        y = x.square().sum()
        y.backward()
        return y

    with pytest.raises(
        hodiff.GraphError, match=r"freed by .*y\.backward\(\)\n(?s:.*)leave that pass out of f"
    ) as caught:
        hodiff.grad(f, X)
    assert "Call hodiff before that pass" not in str(caught.value)
    assert "second time" in str(caught.value.__cause__)


def test_a_graph_that_was_freed():
    x = X.clone().requires_grad_()
    h = x.sin()
    first, second = h.sum(), h.square().sum()
    first.backward()
    words = r"already been freed(?s:.*)\(`h`: SinBackward0, output shape \(3,\); freed\)(?s:.*)=> freed before"
    with pytest.raises(hodiff.GraphError, match=words) as caught:
        hodiff.hvp(second, x, V)
    assert "second time" in str(caught.value.__cause__)
    assert "\n  freed by" not in str(caught.value)  # which pass, is told by a record alone


def test_a_graph_that_was_freed_out_of_sight():
    x = X.clone().requires_grad_()

    def spent():
        total = x.sin().square().sum()
        total.backward()
        return total

    losses = [spent()]
    with pytest.raises(
        hodiff.GraphError, match=r"`losses\[0\]`: SumBackward0(?s:.*)PowBackward0, output shape \(3,\); freed"
    ):
        hodiff.grad(losses[0], x)


@CHANGES
def test_a_value_that_was_changed():
    x = X.clone().requires_grad_()
    h = x.exp()
    total = (h * h).sum()
    h.mul_(2)
    with pytest.raises(hodiff.GraphError, match=r"saved +`h`: of shape \(3,\); MulBackward0 saved it"):
        hodiff.grad(total, x)


def test_of_what_pytorch_does_not_tell_before_212_the_node_and_its_line_are_said(monkeypatch):
    monkeypatch.undo()  # what tests/conftest.py does on such a release
    monkeypatch.setattr(_nodes, "saved", _versions._read)
    x = X.clone().requires_grad_()
    with watch():
        h = x.exp()
        total = (h * h).sum()
        h.mul_(2)
        words = r"saved +test_failure.*total = .*\n +\(MulBackward0 saved it as '\w+'; which tensor it was is not told"
        with pytest.raises(hodiff.GraphError, match=words):
            hodiff.grad(total, x)


@CHANGES
def test_a_record_is_used():
    x = X.clone().requires_grad_()
    with watch():
        h = x.exp()
        total = (h * h).sum()
        h.mul_(2)
        with pytest.raises(hodiff.GraphError, match=r"changed +test_failure\.py:\d+ +h\.mul_\(2\)") as caught:
            hodiff.grad(total, x)
    assert "likely" not in str(caught.value)


def test_an_input_or_a_loss_that_was_cut():
    x = X.clone().requires_grad_()
    w = torch.ones_like(x, requires_grad=True)
    h = x.detach()
    loss = (h * w).sum()
    with pytest.raises(hodiff.GraphError, match=r"does not require grad, so f was computed without .* as well\.$"):
        hodiff.grad(loss, h)  # which line cut it, is told by a record alone
    with watch():
        h = x.detach()
        loss = (h * w).sum()
        with pytest.raises(hodiff.GraphError, match=r"(?s)does not require grad.*`h`\n +cut +test_f\S+ +h = x\.detach"):
            hodiff.grad(loss, h)
        loss = x.detach().sum()
        with pytest.raises(hodiff.GraphError, match=r"(?s)carries no graph.*\n +cut +test_fail\S+ +loss = x\.detach"):
            hodiff.grad(loss, x)
    with pytest.raises(hodiff.GraphError, match=r"f\(x\) does as well\.$"):  # nothing to add: it is a plain constant
        hodiff.grad((X * w).sum(), X)


def test_an_input_that_was_not_used():
    x = X.clone().requires_grad_()
    w = torch.ones_like(x, requires_grad=True)
    y = x * 2
    loss = (x * w).sum()
    with pytest.raises(hodiff.GraphError, match=r"unused +`y`\n +in graph +`x`, `w`"):
        hodiff.grad(loss, y)


def test_one_more_call_and_nothing_else():
    """The random numbers go on as after one call; the statistics of a batch norm stay; no .grad, no mode."""
    calls = []
    norm = nn.BatchNorm1d(3).double()

    def f(x):
        calls.append(torch.rand(1).item())
        return norm(x.detach().expand(4, 3) * torch.rand(4, 3)).detach().sum()

    torch.manual_seed(0)
    f(X)
    after = torch.rand(1)
    norm.reset_running_stats()
    calls.clear()
    torch.manual_seed(0)
    with pytest.raises(hodiff.GraphError, match="cut at"):
        hodiff.grad(f, X)
    assert torch.equal(torch.rand(1), after)
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert norm.num_batches_tracked == 0
    assert torch.is_grad_enabled()
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_call_that_succeeds_calls_once():
    calls = []

    def f(x):
        calls.append(1)
        return x.square().sum()

    hodiff.hvp(f, X, V)
    assert calls == [1]


def test_nested_calls_explain_once():
    calls = []

    def inner(x):
        calls.append(1)
        return x.detach().sum()

    def outer(x):
        return hodiff.grad(inner, x).sum()

    with pytest.raises(hodiff.GraphError, match=r"cut at .*return x\.detach\(\)\.sum\(\)") as caught:
        hodiff.grad(outer, X)
    assert len(calls) == 2
    assert str(caught.value).count("cut at") == 1


def test_an_exception_of_f_is_left_alone():
    error = hodiff.GraphError("mine")

    def f(x):
        raise error

    with pytest.raises(hodiff.GraphError, match=r"^mine$"):
        hodiff.grad(f, X)


def test_a_second_call_that_fails():
    batches = iter([torch.ones(3)])

    def f(x):
        return (next(batches) * x.detach()).sum()

    with pytest.raises(hodiff.GraphError, match="Usual causes") as caught:
        hodiff.grad(f, X)
    assert caught.value.__context__ is None or "StopIteration" not in repr(caught.value.__context__)


@pytest.mark.parametrize("how", ["broken", "silent"])
def test_an_explainer_that_does_not_help(monkeypatch, how):
    def broken(failure):
        raise ZeroDivisionError

    monkeypatch.setattr(_messages, "explainer", {"broken": broken, "silent": lambda failure: ""}[how])
    with pytest.raises(hodiff.GraphError, match=r"carries no graph.*Usual causes: .*of a result\.$"):
        hodiff.grad(detached, X)


def test_f_is_not_called_again_where_other_processes_would_wait(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(hodiff.GraphError, match="Usual causes"):
        hodiff.grad(detached, X)


def test_aux_and_modules_and_operators():
    model = nn.Linear(3, 1).double()

    def with_aux(m):
        y = m(X).detach()
        return y.sum(), y

    with pytest.raises(hodiff.GraphError, match=said("y = m(X).detach()", "drop the detach()")):
        hodiff.value_and_grad(with_aux, model, has_aux=True)
    with pytest.raises(hodiff.GraphError, match=r"cut at .*h = x\.detach\(\)"):
        _ = hodiff.HessianOperator(detached, X) @ V
    with pytest.raises(hodiff.GraphError, match=r"cut at .*h = x\.detach\(\)"):
        hodiff.gradient_penalty(per_sample, X.reshape(3, 1))


def per_sample(x):
    h = x.detach()
    return h.square().sum(-1)


def test_the_search_ends(monkeypatch):
    """Each walk is linear in the graph, and a long function makes many values that have no graph."""
    walks = []
    reaches = _failure._nodes.reaches
    monkeypatch.setattr(_failure._nodes, "reaches", lambda *given: walks.append(1) or reaches(*given))
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def f(x, unrelated):
        for _ in range(1000):
            x = x + (x > 0.5)
            if unrelated:
                other.detach()
        return x.detach().sum()

    with pytest.raises(hodiff.GraphError, match=r"cut at .*return x\.detach\(\)\.sum\(\)"):
        hodiff.grad(f, X, args=(False,))
    with pytest.raises(hodiff.GraphError, match=r"Usual causes"):
        hodiff.grad(f, X, args=(True,))
    assert len(walks) <= _failure.WALKS + 10


# --- what is said is made from data: an error in other words has the same explanation ---------------------------------


def bypassed():
    w = X.clone().requires_grad_()
    hodiff.grad(lambda x: (w * 2).sum() + x.sum(), w)


def strictly():
    hodiff.grad(lambda pair: (pair[0] * pair[1].detach()).sum(), (X, X.clone()), strict=True)


def without_a_second_derivative():
    hodiff.hvp(bags, X, V)


def without_a_second_derivative_as_a_tensor():
    x = X.clone().requires_grad_()
    z = x.reshape(3, 1)
    d = F.embedding_bag(INDICES, z)
    hodiff.hvp(d.exp().sum(), x, V)


def once():
    def f(x):
        y = Once.apply(x)
        return y.sum()

    hodiff.hvp(f, X, V)


def third_order(norm):
    x = X.clone().requires_grad_()
    y = norm(x.expand(2, 3))
    gradient = hodiff.grad((y**3).sum(), x, create_graph=True)
    hodiff.hvp(gradient.sum(), x, V, create_graph=True)


def layer_norm():
    third_order(lambda x: torch.nn.functional.layer_norm(x, (3,)))


def batch_norm():
    third_order(lambda x: torch.nn.functional.batch_norm(x.T, None, None, training=True))


def weight_norm():
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3).double())
    weight = linear.weight
    weights = list(linear.parametrizations.weight.parameters())
    hodiff.hvp(weight.square().sum(), weights, [torch.ones_like(each) for each in weights])


def freed():
    x = X.clone().requires_grad_()
    h = x.sin()
    first, second = h.sum(), h.square().sum()
    first.backward()
    hodiff.hvp(second, x, V)


def freed_in_f():
    def f(x):
        y = x.square().sum()
        y.backward()
        return y

    hodiff.grad(f, X)


def changed():
    x = X.clone().requires_grad_()
    h = x.exp()
    total = (h * h).sum()
    h.mul_(2)
    hodiff.grad(total, x)


def changed_in_f():
    def f(x):
        h = x.exp()
        total = (h * h).sum()
        h.mul_(2)
        return total

    hodiff.grad(f, X)


def untracked():
    with watch():
        x = X.clone().requires_grad_()
        h = x.detach()
        hodiff.grad((h * x).sum(), h)


def not_used():
    x = X.clone().requires_grad_()
    y = x * 2
    hodiff.grad((x * 3).sum(), y)


FAILING = [
    *[bypassed, strictly, without_a_second_derivative, without_a_second_derivative_as_a_tensor, once],
    *[layer_norm, batch_norm, weight_norm, freed, freed_in_f, changed, changed_in_f, untracked, not_used],
    *[lambda f=f: hodiff.grad(f, X) for f in CUT],
]


def explained(call) -> tuple[str, str]:
    with pytest.raises(hodiff.GraphError, match=r"(?s)^.+\n  .*(test_failure\.py|recorded as)") as caught:
        call()
    first, _, rest = str(caught.value).partition("\n")
    return first, rest


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("call", FAILING, ids=lambda f: f.__name__)
def test_an_error_in_other_words_has_the_same_explanation(call, monkeypatch):
    right = explained(call)
    about = hodiff.GraphError.about

    def reworded(self, message):
        if not message.startswith("other words."):
            self.args = ("other words.",)

    def reworded_about(message, *, advice="", **facts):
        return about("other words.", advice="other advice." if advice else "", **facts)

    monkeypatch.setattr(hodiff.GraphError, "__init__", reworded)
    monkeypatch.setattr(hodiff.GraphError, "about", reworded_about)
    first, rest = explained(call)
    assert first in ("other words.", "other words. other advice.")
    assert ("advice" in first) == (call is freed)  # general advice gives way, but for what holds in any case
    assert rest == right[1]


def test_what_was_released_is_told_in_any_words(monkeypatch):
    monkeypatch.setattr(_saved, "RELEASED_TEXT", "other words")
    x = X.clone().requires_grad_()
    loss = x.exp().sum()
    hodiff.graph.release(loss)
    with pytest.raises(hodiff.GraphError, match="other words") as caught:
        loss.backward()
    assert hodiff.graph.explain(caught.value).cause == "released"


def test_an_error_about_a_graph_survives_pickling():
    error = pickle.loads(
        pickle.dumps(hodiff.GraphError.about("stem.", kind="freed", advice="advice.", operations=["cdist"]))
    )
    assert (str(error), error._facts.kind, error._facts.operations) == ("stem. advice.", "freed", {"cdist"})


def test_the_root_of_a_path():
    assert _names.root("net.cell.h") == "net" and _names.root("a[0].b") == "a"


def test_of_several_cuts_the_last_before_the_result_comes_first():
    def f(x):
        aside = torch.tensor(x.tolist())
        assert len(aside) == 3
        return (x * 2).sum().detach()

    with pytest.raises(hodiff.GraphError, match="The value was detached") as caught:
        hodiff.grad(f, torch.ones(3))
    first, second = [line for line in str(caught.value).splitlines() if "cut at" in line]
    assert ".detach()" in first
    assert ".tolist()" in second


THREE = torch.tensor([0.3, -0.7, 1.1])


def test_a_graph_freed_under_a_function_of_the_users():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    x = THREE.clone().requires_grad_()
    loss = Square.apply(x).sum()
    loss.backward()
    with pytest.raises(GraphError, match="already been freed"):
        hodiff.grad(loss, x)


def failure(error):
    return _messages.Failure(error, None, None, [], [], [], [], False)


def test_an_error_is_explained_once(monkeypatch):
    monkeypatch.setattr(_messages, "explainer", lambda failure: "because")
    error = GraphError("it fails.")
    for _ in range(2):
        _messages.complete(failure(error))
    assert str(error).count("because") == 1


def test_an_explanation_asks_for_no_other(monkeypatch):
    asked = []

    def explain(failure):
        asked.append(failure.error)
        if len(asked) < 5:
            _messages.complete(globals()["failure"](GraphError("another")))
        return "because"

    monkeypatch.setattr(_messages, "explainer", explain)
    _messages.complete(failure(GraphError("it fails.")))
    assert len(asked) == 1
