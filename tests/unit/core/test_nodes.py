import gc
import warnings
import weakref

import pytest
import torch
from torch.autograd.function import once_differentiable

import hodiff
from hodiff._core import _nodes, _versions
from hodiff.errors import CustomFunctionWarning, GraphError
from tests.support.modules import Cube


class Once(Cube):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_the_walk_finds_every_node_once():
    x = torch.ones(2, requires_grad=True)
    y = x * x
    graph = _nodes.survey([(y + y).sum()])
    assert graph.names() == {"SumBackward0", "AddBackward0", "MulBackward0", "AccumulateGrad"}
    assert len(graph.visited) == 5  # with None
    assert graph.leaf_ids() == {id(x)}


def test_which_of_an_operations_outputs_are_used():
    x = torch.ones(4, requires_grad=True)
    a, b = (2 * x).chunk(2)
    graph = _nodes.survey([a.sum()])
    assert graph.uses(a) and not graph.uses(b)
    assert not graph.uses((3 * x).sum())
    assert _nodes.survey([a]).uses(a)  # no edge leads to a root


def test_the_walk_stops_where_told():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    graph = _nodes.survey([y.sin().sum()], stop=[y.grad_fn])
    assert graph.names() == {"SumBackward0", "SinBackward0", "ExpBackward0"}


def test_a_deep_graph_does_not_recurse():
    y = torch.ones((), requires_grad=True)
    for _ in range(5000):
        y = y + 1
    assert len(_nodes.survey([y]).visited) == 5002


def test_reachability():
    x, z = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y = (x.sin() * z).sum()
    (sine,) = _nodes.survey([y]).named("SinBackward0")
    assert _nodes.reaches([sine], [x])
    assert not _nodes.reaches([sine], [z])


def test_functions_are_told_by_their_class():
    x = torch.ones(2, requires_grad=True)
    found = {function for function, _ in _nodes.survey([Cube.apply(x) + Once.apply(x)]).functions()}
    assert found == {Cube, Once}
    assert _nodes.is_once_differentiable(Once)
    assert not _nodes.is_once_differentiable(Cube)


def test_the_largest_tensor_of_a_graph():
    x = torch.ones(3, requires_grad=True)
    assert _nodes.largest_output(_nodes.survey([(x[:, None] * torch.ones(3, 50)).sum()])) == 150


def test_outputs_of_one_operation_are_told_apart():
    """q and v come from one chunk: to close over v while differentiating by q is not a bypass of q."""
    x = torch.tensor([0.3, 0.7, -1.1, 0.4], dtype=torch.float64)

    def loss(x):
        q, v = x.chunk(2)
        return (hodiff.grad(lambda q: (q**2 * v).sum(), q) ** 2).sum()

    expected = torch.cat([8 * x[:2] * x[2:] ** 2, 8 * x[:2] ** 2 * x[2:]])
    torch.testing.assert_close(hodiff.grad(loss, x), expected)

    def bypassing(x):
        q, v = x.chunk(2)
        return hodiff.grad(lambda z: (z**2 * v * q).sum(), q).sum()

    with pytest.raises(hodiff.GraphError, match="other than through its argument"):
        hodiff.grad(bypassing, x)

    def returning(x):
        q, v = x.chunk(2)
        return hodiff.grad(lambda z: v[0], q).sum()

    with pytest.raises(hodiff.GraphError, match=r"does not depend|other than through its argument"):
        hodiff.grad(returning, x)


def test_by_what_many_numbers_became_one():
    z = torch.rand(4, 3, requires_grad=True)
    assert _versions.reduction(z.sum()) == ("sum", (4, 3)) and _versions.reduction(z.sum((0, 1))) == ("sum", (4, 3))
    assert _versions.reduction(z.mean()) == ("mean", (4, 3)) and _versions.reduction(z.mean(0).mean(0)) == (
        "mean",
        (3,),
    )
    for how in ("mean", "sum"):
        assert _versions.reduction(torch.nn.functional.mse_loss(z, z.detach(), reduction=how)) == (how, None)
    for other in (z.prod(), z, z.detach().sum(), 2 * z.mean(), z[0, 0]):
        assert _versions.reduction(other) == (None, None)


X = torch.tensor([0.3, -0.7, 1.1])


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


class SquareOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def test_what_is_allowed_once_is_not_allowed_later():
    def f(x):
        return (SquareOnce.apply(x) * x).sum()

    for allow in ("SquareOnce", SquareOnce, [SquareOnce]):
        hodiff.hvp(f, X, X, allow=allow)
    with pytest.raises(GraphError, match="once_differentiable"):
        hodiff.hvp(f, X, X)


LOOKS = {
    "grad": lambda f: hodiff.grad(f, X),
    "hvp": lambda f: hodiff.hvp(f, X, X),
    "jvp": lambda f: hodiff.jvp(f, X, X),
    "product": lambda f: hodiff.HessianOperator(f, X) @ X,
    "laplacian": lambda f: hodiff.laplacian(f, X, batch_ndim=0),
    "sparse_hessian": lambda f: hodiff.sparse_hessian(f, X),
    "check_derivatives": lambda f: hodiff.check_derivatives(f, X),
    "inspect": lambda f: str(hodiff.graph.inspect(f(X.clone().requires_grad_()))),
    "predict": lambda f: hodiff.graph.predict(f(X.clone().requires_grad_())),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOKS)
def test_a_class_of_functions_goes_with_its_last_user(name):
    """A cell that is run again makes another, with all that it closes over."""

    def made():
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**2

            @staticmethod
            def backward(ctx, g):
                return 2 * g * ctx.saved_tensors[0]

        LOOKS[name](lambda x: Square.apply(x).sum())
        return weakref.ref(Square)

    seen = [made(), made()]
    gc.collect()  # a class is a part of cycles
    assert [each() for each in seen] == [None, None]


def test_a_function_is_warned_of_where_it_cannot_be_held():
    """Of a tensor there is no f to hold it by: the warning, at each place once."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def vjp(ctx, g):  # as good as `backward`
            return 3 * g * ctx.saved_tensors[0] ** 2

    def f(x):
        return Cube.apply(x).sum()

    first = quietly(hodiff.hvp, f, X, X)
    x = X.clone().requires_grad_()
    with pytest.warns(CustomFunctionWarning, match="Cube"):
        assert torch.equal(hodiff.hvp(f(x), x, X), first)
    again = lambda: hodiff.hvp(f(x), x, X)
    with pytest.warns(CustomFunctionWarning, match="Cube"):
        again()
    assert torch.equal(quietly(again), first)
