"""Inside `torch.compile` each public function breaks the graph and is right; where it may not, our reason is raised."""

import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff._core import _versions
from tests.support.callers import CALLERS, PLAIN, Caller, D, tensors
from tests.support.releases import since

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
SCALE = torch.tensor(1.3, dtype=D, requires_grad=True)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
Run = Callable[[Tensor], Any]
RUNS: dict[str, Run] = {
    **{caller.name: lambda x, c=caller: c.run(c.shaped(wave), x, ()) for caller in CALLERS},
    **PLAIN,
}
WORDS = _versions.REASON[:50]

pytestmark = pytest.mark.filterwarnings("ignore")  # of penalties that are constant, and of Dynamo about what it skips


def wave(z: Tensor) -> Tensor:
    return SCALE * z.sin() * z


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # Dynamo logs each break
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    logging.disable(logging.NOTSET)


def compiled(run: Run, fullgraph: bool = False) -> Run:
    return torch.compile(run, backend="eager", fullgraph=fullgraph)


def agree(got: Any, expected: Any) -> None:
    found, wanted = tensors(got), tensors(expected)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad
    if not wanted and isinstance(expected, (int, str)):
        assert got == expected


@pytest.mark.table(wide=20)
@pytest.mark.parametrize("name", RUNS)
def test_the_graph_breaks_around_the_call(name: str) -> None:
    """Between two operations that are compiled, and twice, the second time from the cache."""
    run = RUNS[name]
    around = lambda x: run(x * 2 - x)
    expected = run(X)
    step = compiled(around)
    agree(step(X), expected)
    agree(step(X), expected)


FIRST = {
    "Selection": "it reads a module, and no graph, so that it runs as it is",
    "select": "the module that the caller makes for it is refused first, in PyTorch's words",
    "sparse.color": "so is the sparse tensor",
}


@pytest.fixture
def without_generators(monkeypatch) -> None:
    """Those that a caller makes beside the call are refused first, in PyTorch's words."""
    monkeypatch.setattr("tests.support.callers.generator", lambda: None)


@since((2, 13), "Dynamo refuses the caller's own requires_grad_() first")
@pytest.mark.table(wide=20)
@pytest.mark.parametrize("name", [name for name in RUNS if name not in FIRST])
def test_one_graph_alone_is_refused_in_our_words(name: str, without_generators) -> None:
    with pytest.raises(Exception, match=WORDS):
        compiled(RUNS[name], fullgraph=True)(X)


BEFORE_AND_AFTER = """
import importlib, logging, sys, warnings
import torch
from tests.contract.test_compiled_callers import RUNS, WORDS, X, agree, compiled
from tests.support import callers

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
callers.generator = lambda: None
for shadows in (False, True):
    if shadows:
        importlib.import_module("hodiff.steps._dynamo")  # as the first call of a compiled step does
    assert ("hodiff.steps._dynamo" in sys.modules) is shadows
    for name in sys.argv[1:]:
        torch.compiler.reset()
        torch.manual_seed(0)
        expected = RUNS[name](X)
        torch.manual_seed(0)
        agree(compiled(lambda x: RUNS[name](x * 2 - x))(X), expected)
        torch.compiler.reset()
        try:
            compiled(RUNS[name], fullgraph=True)(X)
        except Exception as error:
            assert WORDS in str(error), (name, shadows, error)
        else:
            raise AssertionError((name, shadows))
"""
SHADOWED = ["grad", "hvp", "per_sample_grad", "nth_derivative", "laplacian", "partials", "jet", "gradient_penalty"]


@pytest.mark.wide
@since((2, 13), "compiled steps ask for it")
def test_a_step_that_was_compiled_before_changes_nothing_for_other_callers() -> None:
    """What Dynamo follows in a step it follows in the whole process."""
    script = [sys.executable, "-W", "ignore", "-c", BEFORE_AND_AFTER, *SHADOWED, "derivatives_of", "sample_norm"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_marks_leave_the_functions_as_they_were() -> None:
    """But for a function around each that has words for arguments that do not fit: in this module it is marked, too."""
    assert inspect.signature(hodiff.grad).parameters["f"].default is inspect.Parameter.empty
    assert hodiff.grad.__module__ == "hodiff" and hodiff.grad.__wrapped__.__module__ == "hodiff.calculus._first"
    assert hodiff.grad._torchdynamo_disable and not hasattr(hodiff.grad.__wrapped__, "__wrapped__")


INSIDE: dict[str, Run] = {
    "operator's methods": lambda x: _operator(x),
    "of a module": lambda x: hodiff.grad(lambda m: m(x).mean(), NET)["0.weight"].norm(),
    "penalty of a module": lambda x: hodiff.gradient_norm_penalty(lambda m: m(x).sum(), NET),
    "field inside the calculus": lambda x: hodiff.grad(lambda z: hodiff.laplacian(_quartic, z).sum(), x),
    "calculus inside a field": lambda x: hodiff.laplacian(
        lambda z: hodiff.grad(lambda y: _quartic(y).sum(), z)[..., 0], x
    ),
    "calculus inside a penalty": lambda x: hodiff.gradient_penalty(
        lambda z: SCALE * hodiff.hvp(lambda y: (y**4).sum(), z, x).sum(-1), x
    ),
    "f breaks the graph in a field": lambda x: hodiff.laplacian(_breaks, x),
    "f breaks the graph in a penalty": lambda x: hodiff.gradient_penalty(_breaks, x),
    "f in place in a field": lambda x: hodiff.laplacian(_in_place, x),
    "a matrix product that Dynamo turns round": lambda x: hodiff.laplacian(lambda z: (z @ _matrix()).sin().sum(-1), x),
    "reverse mode": lambda x: hodiff.laplacian(lambda z: wave(z).sum(-1), x, method="reverse"),
    "tensor form": lambda x: _tensor_form(x),
    "f is compiled as well": lambda x: hodiff.hvp(torch.compile(_quartic_sum, backend="eager"), x, x),
}  # fmt: skip


def _operator(x: Tensor) -> Tensor:
    H = hodiff.HessianOperator(lambda z: (z**4).sum(), x[0])
    H = (2 * H - H + 0.1).T
    return H @ x[1] + H.shape[0] + hodiff.solve(H, x[1]).value


def _quartic(z: Tensor) -> Tensor:
    return (z**4).sum(-1) * z[..., 0]


def _quartic_sum(z: Tensor) -> Tensor:
    return (z**4).sum()


def _breaks(z: Tensor) -> Tensor:
    h = z * 2
    torch._dynamo.graph_break()
    return (SCALE * h.sin()).sum(-1)


def _in_place(z: Tensor) -> Tensor:
    h = z * 2
    h += z
    return (SCALE * h.sin()).sum(-1)


def _matrix() -> Tensor:
    return torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 1.0]], dtype=D)


def _tensor_form(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return hodiff.hvp((x**4).sum(), x, torch.ones_like(x))


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_call_meets_inside(name: str) -> None:
    agree(compiled(INSIDE[name])(X), INSIDE[name](X))


# --- what is wrong is no less wrong in a compiled caller --------------------------------------------------------------


class Trouble(Exception):
    pass


def _raises(z: Tensor) -> Tensor:
    raise Trouble("of the user")


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "cut": (lambda z: SCALE * z.detach() ** 2, hodiff.GraphError, "does not depend|no graph|cut"),
    "not used": (lambda z: SCALE * torch.ones_like(z), hodiff.GraphError, "does not depend|no graph|cut"),
    "detached": (lambda z: (SCALE * z**2).detach(), hodiff.GraphError, "does not depend|no graph|cut"),
    "f raises": (_raises, Trouble, "of the user"),
}
BY_NAME = {caller.name: caller for caller in CALLERS}
NOT_REFUSED = {
    "implicit.argmin": "what it does not find has no graph, and that is what PyTorch says",
    "implicit.root": "the same",
    "jets.report": "it gives no derivative",
}


REFUSALS = [
    pytest.param(caller, wrong, marks=[] if number == place % 4 else [pytest.mark.nightly])
    for place, caller in enumerate(caller for caller in CALLERS if caller.name not in NOT_REFUSED)
    for number, wrong in enumerate(WRONG)
]
"""Each function with one of the four; the rest are slow."""


@pytest.mark.parametrize(("caller", "wrong"), REFUSALS, ids=repr)
def test_what_is_refused_outside_is_refused_inside(caller: Caller, wrong: str) -> None:
    g, kind, words = WRONG[wrong]
    if wrong != "f raises" and caller.name.startswith("cross_"):  # whose result is zero there: of y all depends
        agree(compiled(lambda x: caller.run(caller.shaped(g), x, ()))(X), caller(g, X))
        return
    with pytest.raises(kind, match=words):
        compiled(lambda x: caller.run(caller.shaped(g), x, ()))(X)


@pytest.mark.parametrize("name", ["laplacian", "divergence", "jet", "gradient_penalty"])
def test_a_bypass_is_refused(name: str) -> None:
    x = X.clone().requires_grad_()
    caller = BY_NAME[name]
    with pytest.raises(hodiff.GraphError, match="other than through"):
        compiled(lambda x: caller.run(caller.shaped(lambda z: z * x), x, ()))(x)


def test_nothing_stays_switched() -> None:
    stance = lambda: torch._dynamo.eval_frame._stance.stance
    before = stance(), torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled()
    compiled(RUNS["hvp"])(X)
    compiled(RUNS["laplacian"])(X)
    assert before == (stance(), torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled())
    counter: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counter.append(1)
        return graph.forward

    torch.compile(lambda x: x.sin() + 1, backend=backend)(X)
    assert counter == [1]  # the user's own functions are compiled as before


class Doubled(torch.autograd.Function):
    """Its derivative is its backward's, twice that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 6 * ctx.saved_tensors[0] ** 2 * g


@pytest.mark.parametrize("name", ["gradient_penalty", "divergence", "laplacian"])
def test_a_function_of_the_users_is_not_lost(name: str) -> None:
    """The tracer would forget its second derivative, or its backward."""
    caller = BY_NAME[name]
    penalty = name == "gradient_penalty"
    g = lambda z: SCALE * Doubled.apply(z * SCALE if penalty else z)
    run = lambda x: tensors(caller.run(caller.shaped(g), x, ()))[0].sum()
    (expected,) = torch.autograd.grad(run(X), SCALE)
    got = compiled(run)(X)
    torch.testing.assert_close(got, run(X))
    torch.testing.assert_close(torch.autograd.grad(got, SCALE)[0], expected)


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


@pytest.mark.parametrize("name", ["grad", "hvp", "hessian", "nth_derivative", "partial"])
def test_a_compiled_caller(name: str) -> None:
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "grad": lambda r: hodiff.grad(lambda z: (z**4).sum(), r),
        "hvp": lambda r: hodiff.hvp(lambda z: (z**4).sum(), r, r),
        "hessian": lambda r: hodiff.hessian(lambda z: (z**4).sum(), r),
        "nth_derivative": lambda r: hodiff.nth_derivative(lambda z: z**4, r, 2),
        "partial": lambda r: hodiff.partial(lambda z: (z**4).sum(-1), r[None], (0, 0)),
    }
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(run[name], backend="eager")(POINT), run[name](POINT))
