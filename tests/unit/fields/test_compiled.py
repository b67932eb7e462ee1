"""Field operators inside `torch.compile`, in one graph: the numbers, and what they can be differentiated by."""

import pytest
import torch
from torch import nn

import hodiff
from tests.support.properties import agree
from tests.support.releases import ONE_GRAPH

pytestmark = ONE_GRAPH

D = torch.float64


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def nets():
    torch.manual_seed(0)
    make = lambda out: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, out)).to(D)
    return make(1), make(3)


C, B, MATRIX = torch.tensor([1.0, 2.0, 0.0], dtype=D), torch.ones(3, dtype=D), torch.arange(9.0, dtype=D).reshape(3, 3)

OPERATORS = {
    "laplacian": lambda f, v, x, **kw: hodiff.laplacian(f, x, **kw),
    "laplacian in chunks": lambda f, v, x, **kw: hodiff.laplacian(f, x, chunk_size=2, **kw),
    "laplacian estimated": lambda f, v, x, **kw: hodiff.laplacian(f, x, samples=3, probes="coordinates", **kw).value,
    "value_grad_and_laplacian": lambda f, v, x, **kw: hodiff.value_grad_and_laplacian(f, x, **kw),
    "second_order_operator": lambda f, v, x, **kw: hodiff.second_order_operator(f, x, C, B, 2.0, **kw),
    "of a matrix": lambda f, v, x, **kw: hodiff.second_order_operator(f, x, MATRIX, **kw),
    "divergence": lambda f, v, x, **kw: hodiff.divergence(v, x, **kw),
    "curl": lambda f, v, x, **kw: hodiff.curl(v, x, **kw),
    "biharmonic": lambda f, v, x, **kw: hodiff.biharmonic(f, x, **kw),
    "partial": lambda f, v, x, **kw: hodiff.partial(f, x, (0, 1), **kw),
    "partials": lambda f, v, x, **kw: tuple(hodiff.partials(f, x, [0, (1, 1, 1, 2)], **kw)),
    "jet": lambda f, v, x, **kw: hodiff.jet(f, x, [torch.ones_like(x), x], **kw)[1][1],
}


QUICK = ("laplacian", "value_grad_and_laplacian", "partial")


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.nightly) for n in OPERATORS])
def test_in_one_graph_as_in_eager_mode(name, create_graph, nets):
    x = torch.randn(5, 3, dtype=D)
    call = lambda x: OPERATORS[name](*nets, x, create_graph=create_graph)
    expected, got = call(x), torch.compile(call, fullgraph=True, backend="eager")(x)
    agree(got, expected)
    weight = (nets[1] if name in ("divergence", "curl") else nets[0])[0].weight
    parts = [got, expected] if torch.is_tensor(got) else [got[-1], expected[-1]]
    assert [part.requires_grad for part in parts] == [create_graph] * 2
    if create_graph:
        agree(*(torch.autograd.grad(part.square().sum(), weight)[0] for part in parts))


UNUSED = {(0, 0, 1): [3, 4], (0, 1): [3, 4], (0,): [3], (1,): [3]}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["auto", "jets", "reverse"])
def test_a_mixed_derivative_depends_on_no_more_than_by_nested_passes(method, compiled, nets):
    """What the value alone depends on, or another derivative, has no gradient: None, not zeros."""
    x, scale = torch.randn(5, 3, dtype=D), torch.ones(1, dtype=D, requires_grad=True)
    f = lambda x: nets[0](x) + x[:, :1] * scale
    call = lambda: [*hodiff.partials(f, x, [*UNUSED], method=method)]
    wanted = (*nets[0].parameters(), scale)
    found = torch.compile(call, fullgraph=method != "reverse", backend="eager")() if compiled else call()
    for (index, unused), derivative in zip(UNUSED.items(), found, strict=True):
        theirs = by_hand(f, x, index)
        agree(derivative, theirs)
        ours, theirs = (
            torch.autograd.grad(u.square().sum(), wanted, retain_graph=True, allow_unused=True)
            for u in (derivative, theirs)
        )
        for gradients in (ours, theirs):
            assert [number for number, each in enumerate(gradients) if each is None] == unused
        for mine, other in zip(ours, theirs, strict=True):
            assert mine is None or agree(mine, other) is None


def by_hand(f, x, index):
    x = x.clone().requires_grad_()
    u = f(x)
    for axis in index:
        u = torch.autograd.grad(u.sum(), x, create_graph=True)[0][:, axis : axis + 1]
    return u


def test_a_result_that_is_not_recorded_is_new_memory():
    """While compiling no addresses can be compared."""
    x = torch.ones(2, 3, dtype=D)
    call = lambda x: hodiff.value_grad_and_laplacian(lambda x: x, x, create_graph=False)
    value, _, _ = torch.compile(call, fullgraph=True, backend="eager")(x)
    value.zero_()
    agree(x, torch.ones(2, 3, dtype=D))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in 2.13
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_function_is_not_taken_for_its_forward(create_graph):
    """Dynamo inlines the forward like that of any function: the Laplacian of that would be another."""
    x = torch.ones(2, 3, dtype=D)
    call = lambda x: hodiff.laplacian(lambda x: (Straight.apply(x) * x).sum(-1), x, create_graph=create_graph)
    with pytest.raises(Exception, match=r"f applies a Python autograd\.Function"):
        torch.compile(call, fullgraph=True, backend="eager")(x)
