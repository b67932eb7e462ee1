"""Names, keywords and positions of other libraries: each is told in one sentence what to write.

All public names are asked: nothing that a signature does not have ends in Python's bare words.
"""

import importlib
import inspect
import re

import pytest
import torch
from torch import nn

import hodiff
from hodiff._core._elsewhere import ELSEWHERE
from tests.support.releases import STEPS

DOORS = {
    name: importlib.import_module(f"hodiff.{name}")
    for name in ("graph", "implicit", "jets", "plotting", "rules", "sparse")
}
X = torch.randn(5, 3)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
OPERATORS = ("HessianOperator", "GaussNewtonOperator", "FisherOperator", "JacobianOperator", "MatrixOperator")
CALLED = {
    name: getattr(hodiff, name)
    for name in hodiff.__all__
    if inspect.isfunction(getattr(hodiff, name)) or name in (*OPERATORS, "LevenbergMarquardt", "PathLengthPenalty")
} | {
    f"{door}.{name}": getattr(module, name)
    for door, module in DOORS.items()
    if door not in ("plotting", "rules")
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}


def loss(model):
    return model(X).square().mean()


def step(*names):
    """A compiled step whose loss takes a model and what is so named."""
    body = eval(f"lambda {', '.join(('model', *names))}: model(X).square().mean()", {"X": X})
    return hodiff.compile_step(body, NET, backend="replay")


SAID = {
    "argnums": (lambda: hodiff.grad(loss, NET, argnums=0), r"hodiff\.grad\(f, x\): got an .*'argnums'\. .* one tuple"),
    "allow_unused": (lambda: hodiff.grad(loss, NET, allow_unused=True), "strict=False gives them always"),
    "retain_graph": (lambda: hodiff.hessian(loss, NET, retain_graph=True), "builds the graph and frees it"),
    "grad_outputs": (lambda: hodiff.grad(loss, NET, grad_outputs=X), r"hodiff\.vjp\(f, x, u\)"),
    "seed": (lambda: hodiff.trace(NET, seed=0), r"generator=torch\.Generator"),
    "tol": (lambda: hodiff.eigsh(NET, 2, tol=1e-3), r"'tol'\. Write rtol=\.$"),
    "tol of a solution": (lambda: hodiff.implicit.root(loss, X, tol=1), r"implicit\.root\(F, x_star\): .*rtol="),
    "maxiter": (lambda: hodiff.solve(NET, X, maxiter=3), r"Write iterations=\.$"),
    "maxiter of eigsh": (lambda: hodiff.eigsh(NET, 2, maxiter=3), r"Write products=\.$"),
    "n_samples": (lambda: hodiff.trace(NET, n_samples=3), r"Write samples=\.$"),
    "lambda_gp": (lambda: hodiff.wgan_gp_penalty(NET, X, X, lambda_gp=10), r"Write weight=\.$"),
    "lambda_gp of R1": (lambda: hodiff.r1_penalty(NET, X, lambda_gp=10), r"Write gamma=\.$"),
    "lr": (lambda: hodiff.LevenbergMarquardt(loss, NET, lr=1), r"damping=, which needs no rate"),
    "lr of unroll": (lambda: hodiff.unroll(loss, NET, None, 3, lr=1), r"hodiff\.rules\.SGD\(lr=0\.1\)"),
    "a label": (lambda: hodiff.r1_penalty(NET, X, c=X), r"'c'\. Its keywords: gamma=, .*kwargs=\.$"),
    "k of eigsh": (lambda: hodiff.eigsh(NET, top_n=3), r"hodiff\.eigsh\(H, k\)"),
    "curried": (lambda: hodiff.grad(loss)(X), r"missing 1 .*'x'\. hodiff returns values, not functions"),
    "curried hvp": (lambda: hodiff.hvp(loss)(NET, X), r"missing 2 .*'x' and 'v'\. hodiff returns values"),
    "without a vector": (lambda: hodiff.hvp(loss, NET), r"missing 1 .*'v'\. hodiff returns .* the vector"),
    "two points": (lambda: hodiff.grad(loss, X, X), r"takes 2 .* but 3 were given\. Several points are one tuple"),
    "two batches": (lambda: hodiff.gradient_penalty(NET, X, X), r"hodiff\.wgan_gp_penalty\(D, real, fake\)"),
    "a factor": (lambda: hodiff.r1_penalty(NET, X, 10), r"gamma=10"),
    "x and y": (lambda: hodiff.per_sample_grad(loss, NET, X, X), "The batch is one argument"),
    "coordinates": (lambda: hodiff.laplacian(NET, X, X), r"one tensor, \(N, D\)"),
    "indices": (lambda: hodiff.partial(NET, X, 0, 1), r"one tuple: \(0, 1\)"),
    "a loss for an operator": (lambda: hodiff.eigsh(loss, NET, 3), r"H = hodiff\.HessianOperator\(loss, model\)"),
    "losses": (lambda: hodiff.multi_grad(loss, loss, NET), r"one list: hodiff\.multi_grad\(\[a, b\], model\)"),
    "parameters": (lambda: hodiff.LevenbergMarquardt(NET.parameters()), "Its residuals are a function"),
    "no model": (lambda: hodiff.GaussNewtonOperator(loss, NET), "Outputs and loss are apart"),
    "a step without its model": (lambda: hodiff.compile_step(loss), r"hodiff\.compile_step\(loss, model\)"),
    "no solution": (lambda: hodiff.implicit.argmin(loss), "Solve first"),
    "a rule": (lambda: hodiff.rules.SGD(momentun=0.9), r"hodiff\.rules\.SGD\(lr, .*'momentun'\. Its keywords: "),
    "a root without a name": (lambda: hodiff.graph.monitor(X), r"monitor\(\*\*roots\): .*monitor\(loss=loss\)"),
    "a step of no length": (lambda: hodiff.curvature_penalty(NET, X, h=0.0), "h: got 0.0, expected a positive"),
    "a context": (lambda: hodiff.twice_differentiable(loss), "It is a context"),
    "a watch": (lambda: hodiff.graph.watch(loss), "It is a context"),
    "a plan with its function": (
        lambda: hodiff.sparse.plan_hessian(lambda z: (z**3).sum(), X[0])(loss, X[0]), r"with the point alone: plan\(x\)"
    ),
    "the model of a step": (lambda: step("x", "y")(NET, X, X), r"3 positional.*step\(\*batch\) is loss\(model"),
    "a batch in a tuple": (lambda: step("x", "y")((X, X)), r"missing 1 .*'y'\. .*step\(\*batch\)"),
    "points as residuals": (lambda: hodiff.LevenbergMarquardt(NET, loss), "^where: got a function"),
}  # fmt: skip


COMPILED = ("the model of a step", "a batch in a tuple")


@pytest.mark.parametrize("name", [pytest.param(name, marks=STEPS if name in COMPILED else ()) for name in SAID])
def test_a_habit_is_told_what_to_write(name):
    call, words = SAID[name]
    with pytest.raises(hodiff.InputError, match=f"(?s){words}"):
        call()


@pytest.mark.names
@pytest.mark.parametrize("name", CALLED)
def test_what_a_signature_does_not_have_is_told_in_words(name):
    """Of each public name: a keyword that nobody has, no argument, and too many."""
    short = name.rpartition(".")[2]
    for args, kwargs in (((), {"nonsense": 1}), ((), {}), ((1,) * 9, {})):
        try:
            inspect.signature(CALLED[name]).bind(*args, **kwargs)
        except TypeError:
            with pytest.raises(hodiff.InputError, match=rf"^hodiff\.(\w+\.)?{short}\(.*\): .*\. \S.*\.$") as caught:
                CALLED[name](*args, **kwargs)
            assert isinstance(caught.value, TypeError) and caught.value.__suppress_context__


@pytest.mark.names
@pytest.mark.parametrize("key", [key for key in ELSEWHERE if key.startswith("hodiff.")])
def test_a_name_of_another_library_is_told_what_to_write(key):
    name = key.removeprefix("hodiff.")
    assert name not in dir(hodiff)
    with pytest.raises(AttributeError, match=f"module 'hodiff' has no attribute '{name}'; ") as caught:
        getattr(hodiff, name)
    assert caught.value.obj is None  # so Python adds no name that is near


def test_what_doors_make_public_is_found_from_the_top():
    names = {
        name: door
        for door, module in DOORS.items()
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    names |= {name: "rules" for name in DOORS["rules"].__all__ if name != "Rule"}
    for name, door in names.items():
        assert ELSEWHERE[f"hodiff.{name}"] == f"write hodiff.{door}.{name}."


def test_words_of_the_table_exist():
    """A function that it names is public; a keyword that it gives for another is one of some function."""
    signatures = {name: set(inspect.signature(call).parameters) for name, call in CALLED.items()}
    keywords = set().union(*signatures.values())
    for key, way in ELSEWHERE.items():
        for name in re.findall(r"hodiff\.((?:[a-z]+\.)?\w+)", way):
            place = hodiff
            for part in name.split("."):
                place = getattr(place, part)
        if way.endswith("="):
            assert {word.removesuffix("=") for word in way.split()} <= keywords, key


def test_other_errors_pass_as_they_are():
    """A TypeError of the user's function is the user's, also where it is called wrongly in it."""
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        hodiff.grad(lambda x: x + "a", X)
    assert not isinstance(caught.value, hodiff.HodiffError)

    def f(x):
        return hodiff.grad(loss, x, tol=3)

    with pytest.raises(hodiff.InputError, match=r"hodiff\.grad\(f, x\): got an unexpected keyword argument 'tol'"):
        hodiff.value_and_grad(f, X)


def test_a_public_function_is_what_it_was():
    assert hodiff.grad.__name__ == "grad" and hodiff.grad.__module__ == "hodiff"
    assert "nested container of tensors" in inspect.getdoc(hodiff.grad)
    assert inspect.signature(hodiff.grad).parameters["x"].default is inspect.Parameter.empty


def test_help_shows_names_without_quotes():
    for name, call in CALLED.items():
        text = str(inspect.signature(call))
        assert "missing" not in text and not re.search(r"(: |-> )'", text), (name, text)
    assert str(inspect.signature(hodiff.LinearOperator.block)).endswith("-> LinearOperator")


def test_dir_shows_what_is_public():
    shown = {name for name in dir(hodiff) if not name.startswith("__")}
    assert shown == {*hodiff.__all__, *DOORS}


H = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.ones(3))
NOTED = {
    "two dtypes": (lambda: hodiff.laplacian(lambda x: NET(x).squeeze(-1), X.double()), "several dtypes"),
    "a function of one sample": (
        lambda: hodiff.laplacian(lambda x: torch.ones(4, 3) @ x, X),
        r"all of them at once, \(N, \.\.\.\)",
    ),
    "labels of other samples": (
        lambda: hodiff.hvp(lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(9).long()), X, X),
        r"shapes do not fit in f",
    ),
    "targets of another shape": (
        lambda: hodiff.grad(lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, torch.ones(9)), X),
        r"shapes do not fit in f",
    ),
    "a loss without its batch": (
        lambda: hodiff.per_sample_grad(lambda model: model(X).sum(1), NET, X),
        r"f is called as f\(where, batch\), batch is a Tensor\.$",
    ),
    "a list of samples for a penalty": (lambda: hodiff.r2_penalty(NET, [X, X]), "a list of 2"),
    "a batch by names": (
        lambda: hodiff.HessianOperator(lambda m, b: m(b["x"]).sum(), NET, data=[(X,)]).dense(),
        r"called f\(where, batch\) with this batch: a tuple of 1\.$",
    ),
    "an array for a step": (
        lambda: hodiff.compile_step(lambda m, x: m(x).mean(), NET, backend="replay")(X.numpy()),
        r"what the step was called with: a NumPy array\.$",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=STEPS if "step" in name else ()) for name in NOTED])
def test_an_error_of_the_function_has_a_note_of_what_it_was_given(name):
    call, words = NOTED[name]
    with pytest.raises((TypeError, RuntimeError, ValueError), match=words) as caught:
        call()
    [note] = caught.value.__notes__
    assert note.startswith("hodiff") and re.search(words, note)


@pytest.mark.parametrize("function", [torch.linalg.eigvalsh, torch.trace, torch.diag, torch.Tensor.add_, torch.norm])
def test_functions_of_pytorch_refuse_what_is_no_tensor_in_our_words(function):
    """An operator and a record; what has a tensor on its left is still theirs."""
    for value, words in ((H, "hodiff|H"), (hodiff.trace(H), "record with fields")):
        args = (torch.ones(3), value) if function is torch.Tensor.add_ else (value,)
        with pytest.raises(hodiff.InputError, match=f"^an? {type(value).__name__} is no tensor: .*({words})"):
            function(*args)
    torch.testing.assert_close(torch.ones(3) @ H, H @ torch.ones(3))


def test_a_report_asks_for_the_function():
    with pytest.raises(hodiff.InputError, match=r"^f: got a tensor already computed"):
        hodiff.jets.report(X.sum(-1), X)
