"""Control flow in operators: inside of `f` the Python that they stand for; in a graph of the caller's, PyTorch's own.

All of them, and all public names: tests/contract/test_inside.py.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import create_block_mask, noop_mask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hodiff
from hodiff._core import _settings
from hodiff._core._substitutes import DEFINITIONS, _instead
from hodiff._core._versions import RELEASE
from tests.support.limits import in_threads
from tests.support.releases import since

X = torch.linspace(0.3, 1.4, 6, dtype=torch.float64)
pytestmark = [
    pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # that PyTorch's tracer reads
]


def cond(x: Tensor) -> Tensor:
    found: Any = torch.cond(x.sum() > 0, lambda y: (y**3,), lambda y: (y.sin(),), (x,))
    return found[0]


def looped(x: Tensor) -> Tensor:
    return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * y), (torch.tensor(0), x * 1))[1]


def scanned(x: Tensor) -> Tensor:
    return scan(lambda carry, y: (carry * y, carry * y), x[0] * 1, x[1:], dim=0)[1]


def mapped(x: Tensor) -> Tensor:
    found: Any = map_(lambda row: (row.prod(),), x.reshape(3, 2))
    return found[0]


def folded(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")


PLAIN = {
    cond: lambda x: x**3,
    looped: lambda x: x**4,
    scanned: lambda x: x.cumprod(0)[1:],
    mapped: lambda x: x.reshape(3, 2).prod(1),
    folded: lambda x: x.cumprod(0),
}
REFUSED = {cond: r"torch\.cond; give hodiff", looped: "while_loop .*Python loop", scanned: "scan .*Python loop"}
SLOW = [pytest.param(f, marks=pytest.mark.nightly) if f is looped else f for f in PLAIN]


@pytest.mark.parametrize("f", SLOW)
def test_first_derivatives_and_their_patterns(f: Any) -> None:
    jacobian = hodiff.jacobian(PLAIN[f], X)
    assert torch.allclose(hodiff.jacobian(f, X), jacobian)
    pattern = hodiff.sparse.sparsity_pattern(f, X, order=1)
    assert torch.equal(pattern.to_torch().to_dense().bool(), jacobian.bool()) and not pattern.without_rule
    assert torch.allclose(hodiff.sparse_jacobian(f, X, pattern=pattern.to_torch(), check=True).to_dense(), jacobian)


@pytest.mark.parametrize("f", PLAIN)
def test_second_and_third_derivatives(f: Any) -> None:
    scalar, plain = lambda x: f(x).sum(), lambda x: PLAIN[f](x).sum()
    hessian = hodiff.hessian(plain, X)
    assert torch.allclose(hodiff.hessian(scalar, X), hessian)
    assert torch.allclose(hodiff.sparse_hessian(scalar, X, check=True).to_dense(), hessian)
    third = lambda g: hodiff.grad(lambda x: hodiff.hvp(g, x, X).square().sum(), X)
    assert torch.allclose(third(scalar), third(plain))


@pytest.mark.parametrize("f", SLOW)
def test_a_graph_of_the_callers_is_pytorchs_own(f: Any) -> None:
    """First derivatives are right, second ones right or refused by name; a product J v takes one."""
    x = X.clone().requires_grad_()
    value = f(x).sum()
    assert torch.allclose(hodiff.grad(value, x), hodiff.grad(lambda x: PLAIN[f](x).sum(), X))
    for call in (hodiff.hvp, hodiff.jvp):
        if f in REFUSED:
            with pytest.raises(hodiff.GraphError, match=REFUSED[f]):
                call(value, x, X)
        else:
            assert torch.allclose(call(value, x, X), call(lambda x: PLAIN[f](x).sum(), X, X))


SCALE = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)


def attention(x: Tensor) -> Tensor:
    """By the operator itself: the function around it refuses gradients on a CPU."""
    rows = x.reshape(1, 1, 3, 2)
    mask = create_block_mask(noop_mask, 1, 1, 3, 3, device="cpu").as_tuple()
    return torch.ops.higher_order.flex_attention(rows, rows, rows, lambda s, *_: s * SCALE, mask, 1.0, {})[0].sin()


def softmax(x: Tensor) -> Tensor:
    rows = x.reshape(3, 2)
    return ((rows @ rows.mT * SCALE).softmax(-1) @ rows).sin()


def test_flexible_attention() -> None:
    f, plain = lambda x: attention(x).sum(), lambda x: softmax(x).sum()
    by_scale = lambda g: torch.autograd.grad(hodiff.hvp(g, X, X, create_graph=True).sum(), SCALE)[0]
    for _ in range(2):
        assert torch.allclose(hodiff.grad(f, X), hodiff.grad(plain, X))
        assert torch.allclose(hodiff.hessian(f, X), hodiff.hessian(plain, X))
        assert torch.allclose(by_scale(f), by_scale(plain))
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.GraphError, match="flex_attention; give hodiff the function"):
        hodiff.hvp(f(x), x, X)


# --- what the operators are, in the corners --------------------------------------------------------------------------


def test_no_round_of_a_loop_and_numbers_carried() -> None:
    def f(x: Tensor, rounds: int) -> Tensor:
        number, y = while_loop(lambda i, y: i < rounds, lambda i, y: (i + 1, y * x), (0, x * 1))
        assert number == rounds
        return y.sum()

    for rounds in (0, 1, 3):
        got = hodiff.hvp(f, X, X, args=(rounds,))
        assert torch.allclose(got, X * (rounds + 1) * rounds * X ** max(rounds - 1, 0))


def test_containers_in_a_loop() -> None:
    def f(x: Tensor) -> Tensor:
        step = lambda i, kept: (i + 1, {"y": kept["y"] * x, "n": [kept["n"][0] + 1]})
        return while_loop(lambda i, kept: i < 2, step, (torch.tensor(0), {"y": x * 1, "n": [x * 0]}))[1]["y"].sum()

    assert torch.allclose(hodiff.hessian(f, X), torch.diag(6 * X))


def test_a_condition_that_differs_between_samples() -> None:
    """PyTorch's own rule takes the first row of each branch that returns a tensor and no tuple."""
    pick = lambda row: torch.cond(row[0] > 0.6, lambda: (row**3).sum(), lambda: row.sin().sum(), ())
    f: Any = lambda x: torch.vmap(pick)(x.reshape(3, 2)).sum()
    plain = lambda x: torch.where(x.reshape(3, 2)[:, :1] > 0.6, x.reshape(3, 2) ** 3, x.reshape(3, 2).sin()).sum()
    assert torch.allclose(hodiff.hessian(f, X), hodiff.hessian(plain, X))


def test_a_plan_says_that_another_branch_may_be_taken_elsewhere() -> None:
    f: Any = lambda x: torch.cond(x.sum() > 0, lambda: (x**3).sum(), lambda: x.prod(), ())
    plan = hodiff.sparse.plan_hessian(f, X)
    with pytest.raises(hodiff.DerivativeError, match="the pattern does not hold at this point"):
        plan(-X)


class Held(HigherOrderOperator):
    """An operator of somebody else's, which holds a function."""

    def __init__(self) -> None:
        super().__init__("held_by_the_tests_of_hodiff")

    def __call__(self, f: Any, x: Tensor) -> Any:
        return super().__call__(f, x)  # type: ignore[safe-super]


held = Held()
held.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda f, x: f(x))
held.fallthrough(DispatchKey.AutogradCPU)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return held(lambda g: 3 * ctx.saved_tensors[0] ** 2 * g, g)


@since((2, 12), "no mode sees an operator that has no rule for it: PyTorch raises")
def test_an_operator_whose_inside_is_not_seen_is_named() -> None:
    pattern = hodiff.sparse.sparsity_pattern(Cube.apply, X, order=1)
    assert pattern.without_rule == ("held_by_the_tests_of_hodiff",) and pattern.to_torch().to_dense().all()


def test_an_associative_scan_of_a_gpu() -> None:
    """The function around it takes other ways on a CPU."""
    scanned = torch.ops.higher_order.associative_scan
    for rows in (1, 3):
        x = X[: 2 * rows].reshape(rows, 2)
        got = hodiff.hessian(lambda x: scanned(lambda a, b: [a * b * SCALE], [x], ())[0].sum(), x)
        powers = SCALE.detach() ** torch.arange(rows, dtype=X.dtype)[:, None]
        assert torch.allclose(got, hodiff.hessian(lambda x, powers=powers: (x.cumprod(0) * powers).sum(), x))


def test_under_a_mode_that_counts_memory() -> None:
    from hodiff._core._memory import LiveBytes

    with LiveBytes() as live:
        got = hodiff.hessian(lambda x: cond(x).sum(), X)
    assert torch.allclose(got, torch.diag(6 * X)) and live.peak > 0


def test_the_operators_are_as_they_were_outside_of_any_call() -> None:
    """Another thread's compiler, and what PyTorch traces inside of `f`, see the operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    operators = lambda f: [str(node.target) for node in make_fx(f)(X).graph.nodes if node.op == "call_function"]
    branch: Any = lambda x: torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))
    assert "cond" in operators(branch)
    seen: list[bool] = []
    hodiff.grad(lambda x: seen.append("cond" in operators(branch)) or cond(x).sum(), X)
    assert seen == [True]


def test_another_threads_plain_autograd_meanwhile() -> None:
    """Compiled functions run as they are in every thread then: what branches capture must not be lost there."""
    import torch._dynamo  # the switch is set where it is loaded

    found: list[Tensor] = []

    def elsewhere() -> None:
        x = X.clone().requires_grad_()
        value: Any = torch.cond(x.sum() > 0, lambda: (x**3).sum(), lambda: x.sin().sum(), ())
        found.extend(torch.autograd.grad(value + x.sum(), x))

    def f(x: Tensor) -> Tensor:
        in_threads(elsewhere)
        return x.square().sum()

    hodiff.grad(f, X)
    assert torch.allclose(found[0], 3 * X**2 + 1)


@pytest.mark.nightly
def test_the_first_call_in_a_process() -> None:
    """Before anything has loaded the compiler, and after."""
    program = (
        "import sys, torch, hodiff\n"
        "x = torch.tensor([0.3, 0.5], dtype=torch.float64)\n"
        "f = lambda z: torch.cond(z.sum() > 0, lambda: (z**3).sum(), lambda: z.sin().sum(), ()) + z.sum()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "for _ in range(2):\n"
        "    assert torch.allclose(hodiff.grad(f, x), 3 * x**2 + 1)\n"
        "    assert torch.allclose(hodiff.hvp(f, x, x), 6 * x**2)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_operator_is_there(name: str) -> None:
    """A release that calls one by another name is met here."""
    if name == "switch" and RELEASE < (2, 15):
        pytest.skip("new in 2.15")
    assert getattr(torch.ops.higher_order, name).dispatch.func is _instead


def test_selective_checkpoints_let_one_pass_through() -> None:
    contexts: Callable[[], Any] = lambda: create_selective_checkpoint_contexts([torch.ops.aten.sin.default])
    f = lambda x: checkpoint(lambda y: (y.sin() * y).sum(), x, use_reentrant=False, context_fn=contexts)
    assert torch.allclose(hodiff.grad(f, X), X.cos() * X + X.sin())  # type: ignore[arg-type]
    with pytest.raises(hodiff.GraphError, match=r"selective activation checkpoint \(context_fn=\)"):
        hodiff.hvp(f, X, X)  # type: ignore[arg-type]


POWERS = {
    "cond": lambda p: torch.cond(p[0] > 0, lambda a, b: a**b, lambda a, b: a * b, (p[0] * 1, p[1] * 1)),
    "map": lambda p: map_(lambda a, b: a**b, p[:1] * 1, p[1] * 1).sum(),
    "scan": lambda p: scan(lambda c, a: (c + a ** p[1], c * 1), p[0] * 0, p[:1] * 1)[0],
}


@pytest.mark.parametrize("name", POWERS)
def test_what_is_written_out_is_so_inside(name: str) -> None:
    """The Hessian of a ** b at (2, 0)."""
    expected = torch.tensor([[0.0, 0.5], [0.5, math.log(2) ** 2]], dtype=torch.float64)
    point = torch.tensor([2.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(hodiff.hessian(POWERS[name], point), expected)


@pytest.mark.nightly
def test_operands_that_alias_before_dynamo_was_loaded() -> None:
    """The first `torch.cond` loads it in the middle of a call, and compiles; another run of f has it switched off."""
    program = """
import sys, torch, hodiff
x, runs = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), []
def f(z):
    runs.append(0)
    return torch.cond(z.sum() > 0, lambda a, b: (a * b).sum(), lambda a, b: (a + b).sum(), (z, z[:3]))
assert "torch._dynamo" not in sys.modules
assert torch.equal(hodiff.grad(f, x), 2 * x) and len(runs) == 2
assert torch.equal(hodiff.hvp(f, x, x), 2 * x) and len(runs) == 3
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_run_that_loads_dynamo_and_fails_is_made_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    loaded, runs = sys.modules["torch._dynamo"], []
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    monkeypatch.setattr(_settings.eager, "needs", "torch._dynamo.eval_frame")

    def f(z: Tensor) -> Tensor:
        runs.append(torch._dynamo.eval_frame._stance.stance)
        sys.modules["torch._dynamo"] = loaded
        if len(runs) == 1 or len(runs) > 2:
            raise RuntimeError("as Dynamo does")
        return (z**3).sum()

    torch.testing.assert_close(hodiff.grad(f, X), 3 * X**2)
    assert runs == ["default", "force_eager"]
    with pytest.raises(RuntimeError, match="as Dynamo does"):
        hodiff.grad(f, X)
    assert len(runs) == 3
