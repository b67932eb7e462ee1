"""Derivatives that `f` takes itself raise the order: by central differences, and by how often `f` runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import hodiff
from hodiff import GraphError
from hodiff._core import _versions
from tests.support.differences import directional_derivative, gradient_by_differences, relative_error

D = torch.float64
X = torch.tensor([0.4, -0.9, 1.3, 0.2], dtype=D)
V, U, W = torch.tensor([[0.3, -1.1, 0.8, 0.5], [1.2, 0.4, -0.7, 0.9], [0.6, 1.4, -0.2, 1.1]], dtype=D)

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")

Function = Callable[[Tensor], Tensor]


def _grad(f: Function, x: Tensor) -> Tensor:
    y = x if x.requires_grad else x.clone().requires_grad_()
    return torch.autograd.grad(f(y), y, create_graph=True)[0]


def _backward(f: Function, x: Tensor) -> Tensor:
    y = x.clone() if x.requires_grad else x.clone().requires_grad_()
    y.retain_grad()
    f(y).backward(create_graph=True, inputs=[y])
    assert y.grad is not None
    return y.grad


def _edge(f: Function, x: Tensor) -> Tensor:
    y = x if x.requires_grad else x.clone().requires_grad_()
    edges = [torch.autograd.graph.get_gradient_edge(each) for each in (f(y), y)]
    one = torch.ones((), dtype=D)
    return torch.autograd.grad(edges[0], edges[1], one, create_graph=True)[0]  # type: ignore[arg-type]


def _vjp(f: Function, x: Tensor) -> Tensor:
    return torch.func.vjp(f, x)[1](torch.ones((), dtype=D))[0]  # type: ignore[operator]


WAYS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "autograd.grad": _grad,
    "backward": _backward,
    "an edge": _edge,
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.vjp": _vjp,
    "func.jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


def along(f: Function, way: str = "autograd.grad", times: int = 1) -> Function:
    """The derivative of `f` along V, so many times."""
    for _ in range(times):
        f = lambda x, inner=f: WAYS[way](inner, x) @ V
    return f


def attention(x: Tensor) -> Tensor:
    q, k, v = (x.reshape(1, 1, 2, 2) * scale for scale in (1, 2, 3))
    return F.scaled_dot_product_attention(q, k, v).sin().sum() + (x**3).sum()


def attention_written(x: Tensor) -> Tensor:
    rows = x.reshape(2, 2)
    return ((rows @ (2 * rows).mT / 2**0.5).softmax(-1) @ (3 * rows)).sin().sum() + (x**3).sum()


def weight_norm(x: Tensor) -> Tensor:
    return torch._weight_norm(x.reshape(2, 2), torch.ones(2, 1, dtype=D), 0).tanh().sum()  # type: ignore[attr-defined]


def weight_norm_written(x: Tensor) -> Tensor:
    rows = x.reshape(2, 2)
    return (rows / rows.square().sum(1, keepdim=True).sqrt()).tanh().sum()


def norm(x: Tensor) -> Tensor:
    return (F.layer_norm(x, (4,)).sin() * W).sum()


def norm_written(x: Tensor) -> Tensor:
    centered = x - x.mean()
    return ((centered * (centered.square().mean() + 1e-5).rsqrt()).sin() * W).sum()


def norm_of_batch(x: Tensor) -> Tensor:
    return (F.batch_norm(x[:, None], None, None, training=True)[:, 0].sin() * W).sum()


def norm_of_instance(x: Tensor) -> Tensor:
    return (F.instance_norm(x[None, None])[0, 0].sin() * W).sum()


def cumulated(x: Tensor) -> Tensor:
    return (torch.logcumsumexp(x, 0).sin() * W).sum()


def cumulated_written(x: Tensor) -> Tensor:
    return (x.exp().cumsum(0).log().sin() * W).sum()


SERVED: dict[str, tuple[Function, Function]] = {
    "attention": (attention, attention_written),
    "weight_norm": (weight_norm, weight_norm_written),
    "layer_norm": (norm, norm_written),
    "batch_norm": (norm_of_batch, norm_written),
    "instance_norm": (norm_of_instance, norm_written),
    "logcumsumexp": (cumulated, cumulated_written),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap, in jacrev
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SERVED)
def test_three_orders(name: str, way: str, times: int) -> None:
    f, plain = along(SERVED[name][0], way, times), along(SERVED[name][1], way, times)
    assert relative_error(hodiff.grad(f, X), gradient_by_differences(plain, X, 2e-3)) < 1e-6
    slope = lambda z: torch.autograd.functional.jacobian(plain, z)
    assert relative_error(hodiff.hvp(f, X, U), directional_derivative(slope, X, U, 2e-3)) < 1e-6  # type: ignore[arg-type]
    third = hodiff.grad(lambda z: hodiff.hvp(f, z, U) @ U, X)
    curved = lambda z: torch.autograd.functional.hvp(plain, z, U)[1] @ U  # type: ignore[operator]
    assert relative_error(third, gradient_by_differences(curved, X, 2e-3)) < 1e-5


class Square(torch.autograd.Function):
    """Its derivative is cut off from its argument."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] * ctx.saved_tensors[0]


def once(x: Tensor) -> Tensor:
    return Square.apply(x).sum() + (x**3).sum()  # type: ignore[union-attr,operator]


def sparse(x: Tensor) -> Tensor:
    diagonal = torch.arange(4).repeat(2, 1)
    return torch.sparse_coo_tensor(diagonal, x, (4, 4)).to_dense().pow(3).sum() + x.square().sum()


def cross_entropy(x: Tensor) -> Tensor:
    return F.linear_cross_entropy(  # type: ignore[attr-defined]
        x[:, None],
        W[:3, None],
        torch.tensor([0, 2, 1, 0]),
        options=nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined]
    )


REFUSED: dict[str, tuple[Function, str]] = {
    "once_differentiable": (once, "autograd.Function Square is @once_differentiable: .* allow='Square'"),
    "a sparse constructor": (sparse, r"second derivative through torch\.sparse_coo_tensor .* is silently wrong"),
    **(
        {"linear_cross_entropy": (cross_entropy, "second derivative through linear_cross_entropy in its chunked form")}
        if hasattr(nn, "LinearCrossEntropyOptions")
        else {}
    ),
}


@pytest.mark.parametrize("run", [hodiff.grad, hodiff.hessian, lambda f, x: hodiff.jvp(f, x, U)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused(name: str, way: str, run: Callable[..., Any]) -> None:
    f, words = REFUSED[name]
    if (name, way) == ("a sparse constructor", "func.jacrev"):
        words = "SparseCPU"  # PyTorch's own words, and without hodiff too
    if name == "linear_cross_entropy" and way.startswith("func."):
        words = "must override the setup_context staticmethod"  # the same
    with pytest.raises(RuntimeError, match=words):
        run(along(f, way), X)


def test_what_is_allowed_is_what_is_there() -> None:
    found = hodiff.grad(along(once), X, allow="Square")
    assert relative_error(found, 6 * X * V) < 1e-12


def test_the_refusal_cannot_be_caught_in_f() -> None:
    def f(x: Tensor) -> Tensor:
        try:
            return along(once)(x)
        except GraphError:
            return x.sum()

    with pytest.raises(GraphError, match="once_differentiable"):
        hodiff.grad(f, X)


@pytest.mark.parametrize("create_graph", [False, True])
def test_but_not_where_no_further_derivative_is_taken(create_graph: bool) -> None:
    """A pass without a graph; and one over what does not depend on the point."""

    def f(x: Tensor) -> Tensor:
        y = X.clone() if create_graph else X.clone().requires_grad_()
        constant = (torch.func.grad(once)(y) if create_graph else torch.autograd.grad(once(y), y)[0]).detach()
        return (constant * x).sum()

    assert relative_error(hodiff.grad(f, X), 2 * X + 3 * X**2) < 1e-12


RUNS: dict[str, tuple[Function, int, int]] = {
    "nothing by hand": (norm, 1, 1),
    "nothing that is wrong": (along(lambda x: x.sin().sum(), times=2), 1, 1),
    "a norm, once": (along(norm), 1, 2),
    "a norm, twice": (along(norm, times=2), 2, 2),
    "weight_norm": (along(weight_norm), 2, 2),
    "attention": (along(attention), 1, 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_how_often_f_runs(name: str) -> None:
    f, at_first, at_second = RUNS[name]
    for run, expected in ((hodiff.grad, at_first), (lambda f, x: hodiff.hvp(f, x, U), at_second)):
        calls = []

        def counted(x: Tensor, calls: list[None] = calls) -> Tensor:
            calls.append(None)
            return f(x)

        run(counted, X)
        assert len(calls) == expected


def test_hodiffs_own_calls_are_not_counted_twice() -> None:
    """Inside `f` they have their own order, and run it once."""
    calls: list[None] = []

    def f(x: Tensor) -> Tensor:
        calls.append(None)
        return hodiff.hvp(norm, x, V) @ U

    found = hodiff.grad(f, X)
    assert len(calls) == 1
    oracle = lambda z: torch.autograd.functional.hvp(norm_written, z, V)[1] @ U  # type: ignore[operator]
    assert relative_error(found, gradient_by_differences(oracle, X, 2e-3)) < 1e-6


def test_inside_of_a_nested_call() -> None:
    found = hodiff.grad(lambda x: hodiff.grad(along(norm), x) @ U, X)
    oracle = lambda z: torch.autograd.functional.vjp(along(norm_written), z)[1] @ U  # type: ignore[operator]
    assert relative_error(found, gradient_by_differences(oracle, X, 2e-3)) < 1e-6


def test_by_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(m: Any) -> Tensor:
        return along(lambda x: m(x).sum(), times=2)(X)

    weight: Any = model[0].weight
    moved = lambda w: loss(lambda x: model[1:](F.linear(x, w, model[0].bias)))  # type: ignore[arg-type]
    expected = gradient_by_differences(moved, weight.detach(), 2e-3)  # of two derivatives, which are right
    assert relative_error(hodiff.grad(loss, model)["0.weight"], expected) < 1e-6


def test_an_error_of_f_passes() -> None:
    def f(x: Tensor) -> Tensor:
        along(norm)(x)
        raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError, match=r"^of the user's$"):
        hodiff.grad(f, X)


def test_a_release_where_passes_are_not_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    look = _versions.LOOKS["whether f takes derivatives itself"]
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: ())
    assert not look(X)
    monkeypatch.undo()
    assert look(X)


def test_an_enclosing_call_counts_towards_the_order():
    def f(norm):
        return lambda x: (norm(x) ** 3).sum()

    def nested(norm):
        return lambda x: (hodiff.grad(f(norm), x) ** 2).sum()

    def by_definition(x):
        centered = x - x.mean()
        return centered / (centered.square().mean() + 1e-5).sqrt()

    x = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64)
    found = hodiff.hvp(nested(lambda x: nn.functional.layer_norm(x, (4,))), x, x.cos())
    torch.testing.assert_close(found, hodiff.hvp(nested(by_definition), x, x.cos()))


@pytest.mark.parametrize("inside", [False, True])
def test_hardsigmoid_from_its_definition(inside: bool) -> None:
    """PyTorch has no second derivative of it; at its kinks it is flat, as PyTorch's first derivative is."""
    x = torch.tensor([-4.0, -3.0, -1.0, 0.5, 2.9, 3.0, 5.0], dtype=torch.float64)
    written = lambda z: ((z / 6 + 0.5).clamp(0, 1) * z**2).sin().sum()
    f = lambda z: (F.hardsigmoid(z * 1, inplace=inside) * z**2).sin().sum()
    smooth = x[(x.abs() != 3).nonzero().squeeze()]
    v = smooth.cos()
    torch.testing.assert_close(hodiff.hvp(f, smooth, v), hodiff.hvp(written, smooth, v))
    torch.testing.assert_close(hodiff.hessian(f, smooth), hodiff.hessian(written, smooth))
    third = lambda g: hodiff.grad(lambda z: hodiff.hvp(g, z, v).square().sum(), smooth)
    torch.testing.assert_close(third(f), third(written))
    torch.testing.assert_close(hodiff.jvp(f, x, x.cos()), hodiff.grad(f, x) @ x.cos())
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(hodiff.value_grad_and_hessian(f, x)[1], first)
