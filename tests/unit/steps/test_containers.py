"""Every function that Dynamo follows by a shadow, at and into containers: the step compiles, and is its eager loss."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import hodiff
from hodiff._core._modules import Selection
from tests.unit.steps.support import MARKS, off

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]
Pair = namedtuple("Pair", "a b")
KEEP = {"create_graph": True}

POINTS = {
    "tuple": lambda x: (x, x[:, :2].cos()),
    "list": lambda x: [x, x[:, :2].cos()],
    "dict": lambda x: {"a": x, "b": x[:, :2].cos()},
    "ordered dict": lambda x: OrderedDict(b=x, a=x[:, :2].cos()),
    "named tuple": lambda x: Pair(x, x[:, :2].cos()),
    "nested": lambda x: {"a": (x,), "b": [x[:, :2].cos(), ()]},
}
RESULTS = {
    "tuple": lambda y: (y, y.sin().sum(-1)),
    "list": lambda y: [y, y.sin().sum(-1)],
    "dict": lambda y: {"p": y, "q": y.sin().sum(-1)},
    "ordered dict": lambda y: OrderedDict(q=y, p=y.sin().sum(-1)),
    "named tuple": lambda y: Pair(y, y.sin().sum(-1)),
    "nested": lambda y: ({"p": y}, [y.sin().sum(-1)]),
}
PARAMETERS = {
    "module": lambda net: net,
    "selection": lambda selection: selection,  # is made outside of the loss
    "dict": lambda net: dict(net.named_parameters()),
    "tuple": lambda net: tuple(net.parameters()),
    "list": lambda net: list(net.parameters()),
    "named tuple": lambda net: Pair(net[0].weight, {"bias": net[2].bias}),
}


def tensors(z: object) -> list[Tensor]:
    return [each for each in _pytree.tree_leaves(z) if isinstance(each, Tensor)]


class Functions:
    """What the calls take, of a point of any structure, with a result of a structure."""

    def __init__(self, net: nn.Module, result=lambda y: y) -> None:
        self.net, self.result = net, result

    def same(self, z, *_: object) -> Tensor:
        first, *others = tensors(z)
        scale = (others[0] if others else first).cos().sum(-1, keepdim=True)
        return self.net(first) * scale * first

    def number(self, z, *_: object) -> Tensor:
        return self.same(z).square().sum()

    def entries(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.net[0].bias[0])

    def rows(self, z, *_: object) -> Tensor:
        return self.same(z).square().sum(-1)

    def several(self, z, *_: object):
        return self.result(self.same(z))

    def extra(self, z):
        return self.number(z), self.several(z)

    def product(self, z, y) -> Tensor:
        return self.number(z) * self.number(y)


def like(z):
    return _pytree.tree_map(torch.sin, z)


AT_POINTS = {
    "grad": lambda f, z: hodiff.grad(f.number, z, **KEEP),
    "grad with an extra": lambda f, z: hodiff.grad(f.extra, z, has_aux=True, **KEEP),
    "value_and_grad": lambda f, z: hodiff.value_and_grad(f.number, z, **KEEP),
    "vjp": lambda f, z: hodiff.vjp(f.several, z, like(f.several(z)), **KEEP),
    "jvp": lambda f, z: hodiff.jvp(f.several, z, like(z), **KEEP),
    "jacobian": lambda f, z: hodiff.jacobian(f.several, z, **KEEP),
    "jacobian as a matrix": lambda f, z: hodiff.jacobian(f.several, z, matrix=True, **KEEP),
    "jacobian of samples": lambda f, z: hodiff.jacobian(f.several, z, batch_ndim=1, **KEEP),
    "hvp": lambda f, z: hodiff.hvp(f.number, z, like(z), **KEEP),
    "hessian": lambda f, z: hodiff.hessian(f.number, z, **KEEP),
    "hessian as a matrix": lambda f, z: hodiff.hessian(f.number, z, matrix=True, **KEEP),
    "hessian of samples": lambda f, z: hodiff.hessian(f.rows, z, batch_ndim=1, **KEEP),
    "hessian_diagonal": lambda f, z: hodiff.hessian_diagonal(f.number, z, **KEEP),
    "value_grad_and_hessian": lambda f, z: hodiff.value_grad_and_hessian(f.number, z, **KEEP),
    "cross_hvp": lambda f, z: hodiff.cross_hvp(f.product, z, like(z), z, **KEEP),
    "cross_hessian": lambda f, z: hodiff.cross_hessian(f.product, z, like(z), **KEEP),
    "per_sample_grad": lambda f, z: hodiff.per_sample_grad(
        lambda net, z: Functions(net).rows(z), f.net, z, **KEEP
    ),
    "gram": lambda f, z: hodiff.gram(lambda net, z: Functions(net).rows(z), f.net, z, **KEEP),
    "sample_norm": lambda f, z: hodiff.sample_norm(hodiff.grad(f.number, z, **KEEP)),
    "interpolate": lambda f, z: f.number(hodiff.interpolate(z, like(z))),
    "wgan_gp_penalty": lambda f, z: hodiff.wgan_gp_penalty(f.rows, z, like(z)),
    "gradient_norm_penalty": lambda f, z: hodiff.gradient_norm_penalty(f.number, z),
    "jacobian_penalty": lambda f, z: hodiff.jacobian_penalty(f.several, z),
    "hessian_penalty": lambda f, z: hodiff.hessian_penalty(f.several, z),
    **{
        name: lambda f, z, name=name: getattr(hodiff, name)(f.rows, z)
        for name in ("gradient_penalty", "dragan_penalty", "r1_penalty", "r2_penalty", "curvature_penalty")
    },
}  # fmt: skip
AT_TENSORS = {
    "nth_derivative": lambda f, x: hodiff.nth_derivative(f.entries, x, 2, **KEEP),
    "derivatives": lambda f, x: hodiff.derivatives(f.entries, x, 2, **KEEP),
    "laplacian": lambda f, x: hodiff.laplacian(f.same, x),
    "value_grad_and_laplacian": lambda f, x: hodiff.value_grad_and_laplacian(f.same, x),
    "second_order_operator": lambda f, x: hodiff.second_order_operator(f.same, x, torch.eye(3)),
    "biharmonic": lambda f, x: hodiff.biharmonic(f.same, x),
    "partial": lambda f, x: hodiff.partial(f.same, x, (0, 1)),
    "partials": lambda f, x: hodiff.partials(f.same, x, [0, (1, 1)]),
    "divergence": lambda f, x: hodiff.divergence(f.same, x),
    "value_and_divergence": lambda f, x: hodiff.value_and_divergence(f.same, x),
    "curl": lambda f, x: hodiff.curl(f.same, x),
    "jet": lambda f, x: hodiff.jet(f.same, x, [like(x)]),
    "jet of several": lambda f, x: hodiff.jet(lambda a, b: f.same((a, b)), (x, like(x)), ([x], [x])),
    "derivatives_of": lambda f, x: hodiff.derivatives_of(f.rows(y := x.detach().requires_grad_()), y)[0, 1],
    "eikonal_penalty": lambda f, x: hodiff.eikonal_penalty(f.rows, x),
    "sliced_score_matching_loss": lambda f, x: hodiff.sliced_score_matching_loss(f.same, x),
    "penalty with outputs": lambda f, x: hodiff.gradient_penalty(f.rows, x, return_outputs=True),
}  # fmt: skip
OF_PARAMETERS = {
    "grad": lambda g, w: hodiff.grad(g, w, **KEEP),
    "value_and_grad": lambda g, w: hodiff.value_and_grad(g, w, **KEEP),
    "hvp": lambda g, w: hodiff.hvp(g, w, hodiff.grad(g, w), **KEEP),
    "hessian_diagonal": lambda g, w: hodiff.hessian_diagonal(g, w, **KEEP),
    "hessian": lambda g, w: hodiff.hessian(g, w, **KEEP),
    "jacobian": lambda g, w: hodiff.jacobian(lambda w: {"a": g(w), "b": (g(w).sin(),)}, w, **KEEP),
    "gradient_norm_penalty": lambda g, w: hodiff.gradient_norm_penalty(g, w),
}


def test_every_shadow_has_a_call() -> None:
    from hodiff.steps import _dynamo

    assert {name.partition(" ")[0] for name in AT_POINTS | AT_TENSORS} - {"penalty"} == {*_dynamo.SHADOWS}


def compiles(call, selected: bool = False) -> None:
    """A loss of all that the call gives, in a step; of a selection of the net where it is asked for."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return sum(each.square().sum() for each in tensors(call(given, x))) + net(x).square().mean()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    given, x = hodiff.select(net, "0.*") if selected else net, torch.randn(4, 3)
    step = hodiff.compile_step(loss, net, backend="replay")
    torch.manual_seed(1)
    value, gradient = step.value_and_grad(x)
    assert not step.report.eager, step.report
    torch.manual_seed(1)
    exact = loss(net, x)
    expected = torch.autograd.grad(exact, list(net.parameters()))
    assert off([value], [exact.detach()]) <= 1e-12
    assert off(list(gradient.values()), list(expected)) <= 1e-12


@pytest.mark.table(plain=1, wide=12)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", AT_POINTS)
def test_at_containers(name: str, point: str) -> None:
    compiles(lambda net, x: AT_POINTS[name](Functions(net), POINTS[point](x)))


@pytest.mark.table(plain=1, wide=12)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("name", [
    "vjp", "jvp", "jacobian", "jacobian as a matrix", "jacobian of samples",
])  # fmt: skip
def test_into_containers(name: str, result: str) -> None:
    for at in (lambda x: x, POINTS["dict"]):
        compiles(lambda net, x, at=at: AT_POINTS[name](Functions(net, RESULTS[result]), at(x)))


@pytest.mark.table(plain=1, wide=12)
@pytest.mark.parametrize("name", AT_TENSORS)
def test_of_functions_of_a_tensor(name: str) -> None:
    compiles(lambda net, x: AT_TENSORS[name](Functions(net), x))


WITH_AN_EXTRA = {
    "grad": (), "value_and_grad": (), "hessian": (), "hessian_diagonal": (), "hvp": (like,), "laplacian": (),
    "value_grad_and_laplacian": (), "second_order_operator": (lambda x: torch.eye(3),), "biharmonic": (),
    "partial": (lambda x: (0, 1),), "partials": (lambda x: [0, (1, 1)],), "divergence": (),
    "value_and_divergence": (), "curl": (),
}  # fmt: skip
"""What each takes beside the function and the point."""


@pytest.mark.table(plain=1, wide=12)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("name", WITH_AN_EXTRA)
def test_with_an_extra_in_containers(name: str, result: str) -> None:
    def call(net: nn.Module, x: Tensor):
        f, call = Functions(net, RESULTS[result]), getattr(hodiff, name)
        of = f.number if name in OF_PARAMETERS else f.same
        others = [make(x) for make in WITH_AN_EXTRA[name]]
        return call(lambda x: (of(x), f.several(x)), x, *others, has_aux=True, **KEEP)

    compiles(call)


@pytest.mark.table(plain=1, wide=12)
@pytest.mark.parametrize("of", PARAMETERS)
@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_by_parameters(name: str, of: str) -> None:
    """Which a container holds: what is computed of it reads it alone, so that other paths do not help."""

    def number(w) -> Tensor:
        own = w.module if isinstance(w, Selection) else w
        return sum((each**3).sum() for each in (own.parameters() if isinstance(own, nn.Module) else tensors(own)))

    compiles(lambda given, x: OF_PARAMETERS[name](number, PARAMETERS[of](given)), of == "selection")
