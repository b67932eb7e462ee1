"""In one graph of `torch.compile` each public function equals itself outside, or says in our words why it cannot.

The tables begin at `hodiff.__all__`, so that the next name cannot be forgotten: it traces, and has its call here or
among the callers, or it stays out for a reason.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff._core import _compiled_callers
from hodiff._core._versions import RELEASE
from tests.support.callers import D, tensors
from tests.support.releases import since

pytestmark = [
    since((2, 13), "the tracer follows no passes"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo, and of Functions
]

TRACED = {function.__name__ for function in _compiled_callers.TRACED} - {"Derivatives"}
OPERATORS = "a matrix-free operator keeps graphs of its own, estimators look at numbers"
STAYS_OUT = {
    **dict.fromkeys(
        ("FisherOperator", "GaussNewtonOperator", "HessianOperator", "JacobianOperator", "LinearOperator",
         "MatrixOperator", "diagonal", "eigsh", "logdet", "nystrom", "solve", "spectral_density",
         "trace"), OPERATORS,
    ),
    **dict.fromkeys(("sparse_hessian", "sparse_jacobian"), "a pattern is found by watching operations"),
    **dict.fromkeys(
        ("PathLengthPenalty", "curvature_penalty", "hessian_penalty", "jacobian_penalty",
         "sliced_score_matching_loss"), "a penalty that is no gradient penalty",
    ),
    "LevenbergMarquardt": "an optimizer decides by numbers",
    "check_derivatives": "it compares numbers",
    "compile_step": "it compiles by itself",
    "multi_grad": "it frees graphs one by one",
    "twice_differentiable": "a context of kernels",
    "unroll": "its steps replace parameters",
}  # fmt: skip


def test_each_name_traces_or_stays_out_for_a_reason() -> None:
    callable_names = {
        name
        for name in hodiff.__all__
        if not (inspect.isclass(getattr(hodiff, name)) and issubclass(getattr(hodiff, name), BaseException))
    }
    assert callable_names == TRACED | STAYS_OUT.keys()
    assert not TRACED & STAYS_OUT.keys()
    fields_and_penalties = {"interpolate", "jet", "sample_norm"} | {
        name for name in TRACED if getattr(hodiff, name).__module__.startswith(("hodiff.fields", "hodiff.penalties"))
    }
    assert TRACED - fields_and_penalties - {"Selection"} <= {name.partition(",")[0] for name in CALLS}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    logging.disable(logging.NOTSET)


# --- equal to eager: values, and the gradient by all parameters, inside and outside of the region -

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5], [-0.3, 1.1, 0.6]], dtype=D)
V = X.flip(0).cos()
KEEP: Any = {"create_graph": True}


def net(*layers: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 1)).double()


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "layer norm": lambda: net(nn.LayerNorm(4)),
    "batch norm, fixed": lambda: net(nn.BatchNorm1d(4)).eval(),
    "group norm": lambda: net(nn.GroupNorm(2, 4)),
    "dropout": lambda: net(nn.Dropout(0.3)),
    "attention": lambda: net(_Attends()),
}


class _Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(1, 3, 2, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads.sin(), heads.cos()).transpose(1, 2).reshape(3, 4)


def energy(m: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda z: m(z).square().sum()


def of_module(m: Any) -> Tensor:
    return m(X).square().sum()


def like(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().sin() for name, p in m.named_parameters()}


def column(m: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda z: m(z * torch.ones(3, dtype=D)).tanh()


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: hodiff.grad(energy(m), X, **KEEP),
    "grad, module": lambda m: hodiff.grad(of_module, m, **KEEP),
    "value_and_grad": lambda m: hodiff.value_and_grad(lambda p: energy(m)(p["a"] * p["b"]), {"a": X, "b": V}, **KEEP),
    "value_and_grad, module": lambda m: hodiff.value_and_grad(of_module, m, **KEEP),
    "vjp": lambda m: hodiff.vjp(m, X, V[:, :1], **KEEP),
    "jvp": lambda m: hodiff.jvp(m, X, V, **KEEP),
    "jvp, module": lambda m: hodiff.jvp(lambda m: m(X), m, like(m), **KEEP),
    "jacobian": lambda m: hodiff.jacobian(m, X, **KEEP),
    "jacobian, module": lambda m: hodiff.jacobian(lambda m: m(X), m, **KEEP),
    "hvp": lambda m: hodiff.hvp(energy(m), X, V, **KEEP),
    "hvp, module": lambda m: hodiff.hvp(of_module, m, like(m), **KEEP),
    "hvp, several": lambda m: hodiff.hvp(energy(m), X, torch.stack([V, X, V]), chunk_size=2, **KEEP),
    "cross_hvp": lambda m: hodiff.cross_hvp(lambda x, m: energy(m)(x), X, m, like(m), **KEEP),
    "cross_hessian": lambda m: hodiff.cross_hessian(lambda x, y: energy(m)(x * y), X[0], V[0], **KEEP),
    "hessian": lambda m: hodiff.hessian(energy(m), X, **KEEP),
    "hessian, samples": lambda m: hodiff.hessian(lambda z: m(z).square(), X, batch_ndim=1, **KEEP),
    "hessian, module": lambda m: hodiff.hessian(
        lambda s: of_module(s.module), hodiff.select(m, "0.bias"), matrix=True, **KEEP
    ),
    "value_grad_and_hessian": lambda m: hodiff.value_grad_and_hessian(energy(m), X[:1], **KEEP),
    "hessian_diagonal": lambda m: hodiff.hessian_diagonal(energy(m), X[:1], **KEEP),
    "nth_derivative": lambda m: hodiff.nth_derivative(column(m), X[:, :1], 2, **KEEP),
    "derivatives": lambda m: hodiff.derivatives(column(m), X[:, :1], 3, **KEEP),
    "per_sample_grad": lambda m: hodiff.per_sample_grad(lambda m, b: m(b).square().sum(-1), m, X, **KEEP),
    "select": lambda m: hodiff.grad(lambda s: of_module(s.module), hodiff.select(m, "0", exclude="*.bias"), **KEEP),
    "derivatives_of": lambda m: [(d := hodiff.derivatives_of(m(POINTS), POINTS))[0, 1], d[2], d[1, 1]],
    "laplacian": lambda m: hodiff.laplacian(m, X),
    "gradient_penalty": lambda m: hodiff.gradient_penalty(m, X),
    "partials": lambda m: [*hodiff.partials(m, X, [0, (0, 1)])],
    "detached": lambda m: [hodiff.hvp(of_module, m, like(m)), m(hodiff.grad(energy(m), X))],
    "nested": lambda m: hodiff.grad(lambda z: hodiff.hvp(energy(m), z, V).square().sum(), X, **KEEP),
    "no_grad": lambda m: torch.no_grad()(lambda: hodiff.grad(energy(m), X, **KEEP))(),
    "extra": lambda m: hodiff.grad(lambda z: (energy(m)(z), m(z)), X, has_aux=True, **KEEP),
    "unused": lambda m: hodiff.grad(lambda p: energy(m)(p[0]), (X, V), **KEEP),
    "nothing": lambda m: [hodiff.grad(lambda z: energy(m)(X), V, strict=False, **KEEP), m(X)],
    "linear": lambda m: [hodiff.hvp(lambda z: (z * m(X)).sum(), X, V, **KEEP), m(X)],
    "tensor given": lambda m: hodiff.hvp(energy(m)(POINTS), POINTS, V, **KEEP),
    "f differentiates": lambda m: hodiff.grad(
        lambda z: torch.autograd.grad(energy(m)(z), z, create_graph=True)[0].square().sum(), X, **KEEP
    ),
    "f uses torch.func": lambda m: hodiff.grad(lambda z: torch.func.grad(energy(m))(z).square().sum(), X, **KEEP),
    "f detaches": lambda m: hodiff.grad(lambda z: (m(z) * m(z).detach()).sum(), X, **KEEP),
    "functional_call": lambda m: hodiff.grad(
        lambda p: torch.func.functional_call(m, p, (X,)).square().sum(), dict(m.named_parameters()), **KEEP
    ),
    "attention": lambda m: hodiff.hvp(
        lambda z: F.scaled_dot_product_attention(m(z)[None] * z, z[None], z[None]).sin().sum(), X, V, **KEEP
    ),
    "powers": lambda m: hodiff.hvp(lambda z: (z.abs() ** m(z).exp()).sum(), X, V, **KEEP),
    "products": lambda m: hodiff.hvp(lambda z: (m(z).exp() * z).prod(-1).sum(), X, V, **KEEP),
    "a write to a view": lambda m: hodiff.hvp(lambda z: _written(m(z) * z), X, V, **KEEP),
}  # fmt: skip
"""Results that are differentiable, if only in part."""

POINTS = X.clone().requires_grad_()


def _written(h: Tensor) -> Tensor:
    h[0].pow_(3)
    return h.sin().sum()


def loss_of(value: Any) -> Tensor:
    return sum((t.sin().sum() for t in tensors(value)), torch.zeros((), dtype=D))


def both(name: str, m: nn.Module, inside: bool, backend: str = "aot_eager") -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradient of a loss, compiled (the gradient inside or outside), and as they are."""
    trained, run = [*m.parameters(), POINTS], CALLS[name]

    def step() -> tuple[Tensor, ...]:
        loss = loss_of(run(m))
        return loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)

    results = []
    for compiles in (True, False):
        torch.manual_seed(3)
        if compiles and inside:
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                results.append(torch.compile(step, backend=backend, fullgraph=True)())
        elif compiles:
            loss = torch.compile(lambda: loss_of(run(m)), backend=backend, fullgraph=True)()
            if not loss.requires_grad:  # all of it came out detached
                return [loss], [loss_of(run(m))]
            gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            results.append((loss.detach(), *gradients))
        else:
            results.append(step())
    return [*results[0]], [*results[1]]


QUICK = {("hvp, module", "plain"), ("grad", "layer norm"), ("select", "plain"), ("nth_derivative", "plain")}
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else [pytest.mark.nightly])
    for name in CALLS
    for kind in NETS
    if kind in ("plain", "layer norm") or name in ("grad", "grad, module", "hvp", "hvp, module", "jacobian, module")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_value_and_gradient(name: str, kind: str) -> None:
    m = NETS[kind]()
    inside = name != "no_grad" and len(name + kind) % 2 == 0  # each way with half of the cases
    for got, expected in zip(*both(name, m, inside), strict=True):
        size = max(1.0, float(expected.detach().abs().max()))
        assert float((got - expected).detach().abs().max()) <= 1e-13 * size


def test_the_flag_of_the_tracer_is_as_it_was_and_a_second_call_compiles_nothing() -> None:
    m, traces = net(), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        traces.append(1)
        return graph.forward

    step = torch.compile(lambda x: loss_of(hodiff.grad(energy(m), x, **KEEP)), backend=backend, fullgraph=True)
    for x in (X, V):
        assert torch.equal(step(x), loss_of(hodiff.grad(energy(m), x, **KEEP)))
    assert traces == [1] and not torch._dynamo.config.trace_autograd_ops
    with pytest.raises(Exception, match="does not depend on x"):
        torch.compile(lambda x: hodiff.grad(lambda z: energy(m)(X), x), backend=backend, fullgraph=True)(V)
    assert not torch._dynamo.config.trace_autograd_ops


@pytest.mark.parametrize("kind", ["leaf", "parameter", "detached", "nested"])
@pytest.mark.parametrize(("n", "keep"), [(2, False), (3, False), (3, True), (4, True)])
def test_orders_at_a_point_that_requires_grad(kind: str, n: int, keep: bool) -> None:
    """In one graph and right, also where `f` reaches a tensor that the point was detached from."""
    scale = torch.tensor(1.3, dtype=D, requires_grad=True)
    x = {"parameter": nn.Linear(3, 3).double().weight, "detached": POINTS.detach()}.get(kind, POINTS)

    def run() -> Tensor:
        f = lambda z: scale * (POINTS.cos() * z if kind == "detached" else z).sin()
        found = lambda z: hodiff.nth_derivative(f, z, n, create_graph=keep)
        return hodiff.grad(lambda z: found(z).sum(), x, **KEEP) if kind == "nested" and keep else found(x)

    got, expected = torch.compile(run, backend="aot_eager", fullgraph=True)(), run()
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    assert got.requires_grad == expected.requires_grad
    if keep:
        by = [POINTS, scale, x][: 2 + (kind == "parameter")]
        each = [torch.autograd.grad(v.sum(), by, allow_unused=True, materialize_grads=True) for v in (got, expected)]
        torch.testing.assert_close(*each, rtol=1e-13, atol=1e-13)


def test_a_penalty_that_depends_on_nothing_trained_requires_grad() -> None:
    m = net()
    run = lambda: hodiff.gradient_penalty(lambda z: (z.detach() * z.sin() + m(X)).sum(-1), X)
    got, expected = torch.compile(run, backend="aot_eager", fullgraph=True)(), run()
    torch.testing.assert_close(got, expected)
    got.backward()
    expected.backward()
    assert all(p.grad is None for p in m.parameters())


def test_results_are_nobody_elses() -> None:
    step = torch.compile(
        lambda x, v: hodiff.hvp(lambda z: (z * z).sum() / 2, x, v), backend="aot_eager", fullgraph=True
    )
    v = V.clone()
    product = step(X, v)
    product.add_(1)
    assert torch.equal(v, V)


@pytest.mark.parametrize("point", ["module", "f"])
def test_buffers_of_the_point_and_of_f_stay(point: str) -> None:
    m = net(nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in m.named_buffers()}
    run = (lambda: hodiff.grad(of_module, m)["0.weight"]) if point == "module" else (lambda: hodiff.jacobian(m, X))
    found = torch.compile(run, backend="eager", fullgraph=True)()
    torch.testing.assert_close(found, run(), rtol=0, atol=1e-14)
    assert all(torch.equal(buffer, before[name]) for name, buffer in m.named_buffers())


# --- refused by name; and right, where the graph may break ----------------------------------------


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 3 * ctx.saved_tensors[0] ** 2 * g


M: Any
M, TRAINING = net(), net(nn.BatchNorm1d(4))
LEAF = X.clone().requires_grad_()
DOUBLE = 2 * LEAF
WEIGHT = M[0].weight


def beside(m: Any) -> Tensor:
    return of_module(m) * WEIGHT.sum()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Function": (lambda: hodiff.grad(lambda z: Cubed.apply(M(z)).sum(), X, **KEEP), "autograd.Function"),
    "bypass": (lambda: hodiff.grad(lambda z: (M(z) * LEAF).sum(), LEAF, **KEEP), "other than through its argument"),
    "bypass, detached": (lambda: hodiff.grad(lambda z: (M(z) * LEAF).sum(), LEAF), "other than through its argument"),
    **{
        f"bypass, order {n}, create_graph={keep}, {kind}": (
            lambda f=f, x=x, n=n, keep=keep: hodiff.nth_derivative(f, x, n, create_graph=keep), words,
        )
        for kind, x, f in (
            ("leaf", LEAF, lambda z: LEAF * z.sin()),
            ("constant", LEAF, lambda z: (LEAF.exp() * z).sin()),
            ("not a leaf", DOUBLE, lambda z: DOUBLE * z.sin()),
            ("parameter", M[0].weight, lambda z: M[0].weight * z.sin()),
        )
        for n, keep, words in (
            (2, False, "other than through its argument"), (3, False, "other than through its argument"),
            (3, True, "other than through its argument"), (6, False, "past its argument"),
            (6, True, "past its argument"),
        )
    },
    "beside its module": (lambda: hodiff.grad(beside, M), "reaches 0.weight other than through its argument"),
    "beside its module, second": (lambda: hodiff.hvp(beside, M, like(M), **KEEP), "other than through its argument"),
    "beside its module, further down": (
        lambda: hodiff.grad(lambda m: tensors(hodiff.grad(beside, m, **KEEP))[0].sum(), M),
        "other than through its argument",
    ),
    "parameter": (lambda: hodiff.grad(lambda w: M(X).sum() * w.sum(), M[0].weight), "other than through its argument"),
    "in place": (lambda: hodiff.grad(lambda z: M(z.mul_(2)).sum(), X), "in place"),
    "buffers": (lambda: hodiff.grad(lambda z: TRAINING(z).square().sum(), X), "changes a buffer"),
    "buffers, third order": (lambda: hodiff.hvp(lambda z: TRAINING(z).sum(), X, V, **KEEP), "changes a buffer"),
    "inside vmap": (lambda: torch.vmap(lambda w: hodiff.grad(energy(M), w))(X), "transform"),
    "inside torch.func": (
        lambda: torch.func.grad(lambda w: tensors(hodiff.grad(energy(M), w))[0].sum())(X), "transform",
    ),
    "inside a penalty": (
        lambda: hodiff.gradient_penalty(lambda z: tensors(hodiff.grad(energy(M), z))[0].sum(-1), X), "transform",
    ),
    "penalty inside": (lambda: hodiff.grad(lambda z: hodiff.gradient_penalty(M, z), X), "past its argument"),
    "field inside": (lambda: hodiff.grad(lambda z: hodiff.laplacian(M, z).sum(), X), "past its argument"),
    "nothing": (lambda: hodiff.grad(lambda z: M(X).sum(), V), "does not depend on x"),
    "strict": (lambda: hodiff.grad(lambda p: M(p[0]).sum(), (X, V), strict=True), "strict=True"),
    "no second derivative": (lambda: hodiff.hvp(lambda z: torch.cdist(M(z) * z, X).sum(), X, V), "cdist"),
    "constant": (lambda: hodiff.grad(lambda z: torch.special.airy_ai(M(z)).sum(), X), "airy_ai"),
    "determinants": (
        lambda: hodiff.hvp(lambda z: torch.linalg.det(M(z) * torch.eye(4, dtype=D) + 1), X[:1], V[:1]), "LinalgDet",
    ),
    "eigenvalues": (lambda: hodiff.hvp(lambda z: torch.linalg.eigvalsh(z.T @ z)[0], X, V), "LinalgEigh"),
    "weight_norm": (
        lambda: hodiff.hvp(of_module, WEIGHTED, {n: p.detach() for n, p in WEIGHTED.named_parameters()}), "weight_norm",
    ),
    "entries mix": (lambda: hodiff.nth_derivative(lambda z: z * z.sum(), X, 2), "not elementwise"),
    "independence": (
        lambda: hodiff.grad(lambda z: M(z).square(), X, batch_ndim=1, check_independence=True), "check_independence=",
    ),
    "checkpoint": (lambda: hodiff.hvp(of_module, M, like(M), checkpoint="0"), "checkpoint="),
    "several losses": (lambda: hodiff.multi_grad([energy(M)], X), "PyTorch's own graphs"),
    "an operator": (lambda: hodiff.HessianOperator(energy(M), X) @ V, "PyTorch's own graphs"),
}  # fmt: skip
"""What one graph cannot do, and the word by which the refusal names it."""

if RELEASE >= (2, 15):  # which has that second derivative
    del REFUSED["no second derivative"]

WEIGHTED = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).double()
RAISES = {
    "beside its module", "beside its module, second", "beside its module, further down",
    "bypass", "bypass, detached", "parameter", "in place", "inside vmap", "inside torch.func", "nothing", "strict",
    "no second derivative", "constant", "entries mix",
} | {name for name in REFUSED if name.startswith("bypass, order")}  # fmt: skip
"""Outside, too."""
OUTSIDE = {"in place": "in-place|in place"} | {
    name: "other than through its argument" for name in REFUSED if name.startswith("bypass, order")
}
SHOWN = {
    "bypass, order 2, create_graph=False, leaf", "bypass, order 3, create_graph=True, parameter",
    "bypass, order 6, create_graph=True, constant",
    "Function", "beside its module", "bypass", "buffers", "entries mix", "eigenvalues", "penalty inside",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHOWN else [pytest.mark.nightly]) for n in REFUSED])
def test_one_graph_is_refused_by_name_and_else_all_is_right(name: str) -> None:
    run, words = REFUSED[name]
    with pytest.raises(Exception, match=words) as caught:
        torch.compile(run, backend="eager", fullgraph=True)()
    assert "fullgraph=True" in str(caught.value) or "hodiff: " in str(caught.value)
    torch.compiler.reset()
    broken = torch.compile(run, backend="eager")
    if name in RAISES:
        for plain in (run, broken):
            with pytest.raises(Exception, match=OUTSIDE.get(name, words)):
                plain()
        return
    for got, expected in zip(tensors(broken()), tensors(run()), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
