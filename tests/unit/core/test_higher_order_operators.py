"""Control flow in operators: refused inside of `f`; in a graph of the caller's, PyTorch's own.

All of them, and all public names: tests/contract/test_inside.py.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import create_block_mask, noop_mask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hodiff
from hodiff._core import _settings
from hodiff._core._hooks import DEFINITIONS, _instead
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


PLAIN = {
    cond: lambda x: x**3,
    looped: lambda x: x**4,
    scanned: lambda x: x.cumprod(0)[1:],
    mapped: lambda x: x.reshape(3, 2).prod(1),
}
CAPTURED = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda: x**3, lambda: x.sin(), ()),
    "cond in vmap": lambda x: torch.vmap(lambda row: torch.cond(row[0] > 0.6, lambda: row**3, lambda: row.sin(), ()))(
        x.reshape(3, 2)
    ),
    "while_loop": lambda x: while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * x), (torch.tensor(0), x * 1))[1],
    "scan": lambda x: scan(lambda c, i: (c.clone(), c * x[i]), torch.ones(()).to(x), torch.arange(len(x)))[1],
    "map": lambda x: map_(lambda i: x[i] ** 2, torch.arange(len(x))),
}
REFUSED = {
    cond: r"torch\.cond.*; write a Python `if`, or use torch\.where\.$",
    looped: r"while_loop .*; write a Python loop\.$",
    scanned: r"scan .*; write a Python loop\.$",
}
INSIDE = "(?s)(torch\\.cond|while_loop|scan|map) .*inside the function of a hodiff call.* constants; write a Python "
CALLS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: hodiff.grad(f, X),
    "jacobian": lambda f: hodiff.jacobian(f, X),
    "jvp": lambda f: hodiff.jvp(f, X, X),
    "hvp": lambda f: hodiff.hvp(f, X, X),
    "laplacian": lambda f: hodiff.laplacian(f, X, batch_ndim=0, method="reverse"),
    "sparse_hessian": lambda f: hodiff.sparse_hessian(f, X),
    "HessianOperator": lambda f: hodiff.HessianOperator(f, X) @ X,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("f", [*PLAIN, *CAPTURED])
def test_control_flow_inside_is_refused_by_name(f: Any, call: str) -> None:
    """And what stands for it is named."""
    function = CAPTURED.get(f, f) if isinstance(f, str) else f
    with pytest.raises(hodiff.GraphError, match=INSIDE):
        CALLS[call](lambda x: function(x).sum())


SLOW = [pytest.param(f, marks=pytest.mark.nightly) if f is looped else f for f in PLAIN]


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


def test_an_associative_scan_of_a_gpu_is_refused() -> None:
    """The function around it takes other ways on a CPU."""
    scanned = torch.ops.higher_order.associative_scan
    with pytest.raises(hodiff.GraphError, match=r"associative_scan .*; write a Python loop"):
        hodiff.hessian(lambda x: scanned(lambda a, b: [a * b * SCALE], [x], ())[0].sum(), X.reshape(3, 2))


def test_the_operators_are_as_they_were_outside_of_any_call() -> None:
    """What PyTorch traces has the operators in it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    operators = lambda f: [str(node.target) for node in make_fx(f)(X).graph.nodes if node.op == "call_function"]
    branch: Any = lambda x: torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))
    assert "cond" in operators(branch)
    hodiff.grad(lambda x: x.square().sum(), X)
    assert "cond" in operators(branch)


def test_in_another_thread_meanwhile_it_is_refused_as_well() -> None:
    """Compiled functions run as they are in every thread then, and what branches capture would be lost there."""
    import torch._dynamo  # the switch is set where it is loaded

    found: list[str] = []

    def elsewhere() -> None:
        x = X.clone().requires_grad_()
        try:
            torch.cond(x.sum() > 0, lambda: (x**3).sum(), lambda: x.sin().sum(), ())
        except hodiff.GraphError as error:
            found.append(str(error))

    def f(x: Tensor) -> Tensor:
        in_threads(elsewhere)
        return x.square().sum()

    hodiff.grad(f, X)
    assert len(found) == 1 and "in another thread meanwhile" in found[0]


@pytest.mark.nightly
def test_the_first_call_in_a_process() -> None:
    """Before anything has loaded the compiler, and after."""
    program = (
        "import sys, torch, hodiff\n"
        "x = torch.tensor([0.3, 0.5], dtype=torch.float64)\n"
        "f = lambda z: torch.cond(z.sum() > 0, lambda: (z**3).sum(), lambda: z.sin().sum(), ()) + z.sum()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "for call in (hodiff.grad, lambda f, x: hodiff.hvp(f, x, x)) * 2:\n"
        "    try:\n"
        "        call(f, x)\n"
        "    except hodiff.GraphError as error:\n"
        "        assert 'torch.cond inside' in str(error)\n"
        "    else:\n"
        "        raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_operator_is_there(name: str) -> None:
    """A release that calls one by another name is met here."""
    if name == "switch" and RELEASE < (2, 15):
        pytest.skip("new in 2.15")
    operator = getattr(torch.ops.higher_order, name)
    inside = lambda x: (met.append(operator.dispatch), x.sum())[1]
    met: list[Any] = []
    hodiff.grad(inside, X)
    assert met[0].func is _instead and "dispatch" not in vars(operator)


def test_selective_checkpoints_let_one_pass_through() -> None:
    contexts: Callable[[], Any] = lambda: create_selective_checkpoint_contexts([torch.ops.aten.sin.default])
    f = lambda x: checkpoint(lambda y: (y.sin() * y).sum(), x, use_reentrant=False, context_fn=contexts)
    assert torch.allclose(hodiff.grad(f, X), X.cos() * X + X.sin())  # type: ignore[arg-type]
    with pytest.raises(hodiff.GraphError, match=r"selective activation checkpoint \(context_fn=\)"):
        hodiff.hvp(f, X, X)  # type: ignore[arg-type]


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
