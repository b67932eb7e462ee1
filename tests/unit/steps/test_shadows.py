"""What Dynamo follows in place of a function has its result's structure, shapes, dtypes, and whether it has a graph."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import hodiff
from tests.support.callers import CALLERS, SCALE, D
from tests.unit.steps.support import MARKS

pytestmark = MARKS
X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
V = X.flip(0).cos()
PAIR = {"a": X, "b": V[:, :2]}
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
KEEP = {"create_graph": True}


def number(z: Tensor, *rest: Tensor) -> Tensor:
    return (SCALE * z.sin() * z).sum()


def rows(z: Tensor) -> Tensor:
    return (SCALE * z.sin() * z).sum(-1)


def same(z: Tensor) -> Tensor:
    return SCALE * z.sin() * z


def of_pair(z: dict) -> Tensor:
    return (SCALE * z["a"]).sin().sum() * (z["b"] * SCALE).sin().sum()


def parts(z: Tensor) -> dict:
    return {"twice": 2 * z * SCALE, "row": z.sum(-1)}


def extra(z: Tensor) -> tuple:
    return number(z), {"n": 3, "z": z * 2}


def of_net(net: nn.Module) -> Tensor:
    return net(X).square().sum()


def like(net: nn.Module, *lead: int) -> dict:
    return {name: p.detach().cos().expand(*lead, *p.shape) for name, p in net.named_parameters()}


FORMS = {
    "grad of a pair": lambda: hodiff.grad(of_pair, PAIR, **KEEP),
    "grad with an extra": lambda: hodiff.grad(extra, X, has_aux=True),
    "grad of a module": lambda: hodiff.grad(of_net, NET, **KEEP),
    "grad of a selection": lambda: hodiff.grad(lambda s: of_net(s.module), hodiff.select(NET, "0.*")),
    "grad by name": lambda: hodiff.grad(f=number, x=X),
    "value_and_grad with an extra": lambda: hodiff.value_and_grad(extra, X, has_aux=True),
    "vjp of several": lambda: hodiff.vjp(same, X, torch.stack([X, V, V]), **KEEP),
    "vjp of a structure": lambda: hodiff.vjp(parts, X, parts(V)),
    "jvp of several": lambda: hodiff.jvp(same, X, torch.stack([X, V, V])),
    "jvp of a pair": lambda: hodiff.jvp(of_pair, PAIR, PAIR, **KEEP),
    "jacobian of a structure": lambda: hodiff.jacobian(parts, X),
    "jacobian of a pair": lambda: hodiff.jacobian(of_pair, PAIR),
    "jacobian as a matrix": lambda: hodiff.jacobian(parts, X, matrix=True, **KEEP),
    "jacobian of samples": lambda: hodiff.jacobian(same, X, batch_ndim=1),
    "jacobian of samples as a matrix": lambda: hodiff.jacobian(parts, X, batch_ndim=1, matrix=True),
    "hvp of several": lambda: hodiff.hvp(number, X, torch.stack([X, V, V])),
    "hvp of a module": lambda: hodiff.hvp(of_net, NET, like(NET), **KEEP),
    "hvp of a module, several": lambda: hodiff.hvp(of_net, NET, like(NET, 2)),
    "hvp with an extra": lambda: hodiff.hvp(extra, X, V, has_aux=True, **KEEP),
    "hessian of a pair": lambda: hodiff.hessian(of_pair, PAIR, **KEEP),
    "hessian of a module": lambda: hodiff.hessian(of_net, NET),
    "hessian as a matrix": lambda: hodiff.hessian(of_pair, PAIR, matrix=True),
    "hessian of samples": lambda: hodiff.hessian(rows, X, batch_ndim=1, has_aux=False),
    "hessian with an extra": lambda: hodiff.hessian(extra, X, has_aux=True),
    "value_grad_and_hessian": lambda: hodiff.value_grad_and_hessian(rows, X, batch_ndim=1, matrix=True),
    "cross_hessian of a structure": lambda: hodiff.cross_hessian(lambda x, y: of_pair(y) * number(x), X, PAIR),
    "cross_hvp of several": lambda: hodiff.cross_hvp(lambda x, y: number(x * y), X, V, torch.stack([X, V])),
    "hessian_diagonal of a module": lambda: hodiff.hessian_diagonal(of_net, NET),
    "nth_derivative of order 0": lambda: hodiff.nth_derivative(same, X, 0),
    "per_sample_grad of a module": lambda: hodiff.per_sample_grad(lambda net, x: net(x).square().sum(-1), NET, X),
    "per_sample_grad of several": lambda: hodiff.per_sample_grad(lambda net, x: net[:2](x), NET, X, **KEEP),
    "gram of a module": lambda: hodiff.gram(lambda net, x: net(x).square().sum(-1), NET, X),
    "gram of several": lambda: hodiff.gram(lambda net, x: net[:2](x), NET, X, **KEEP),
    "inside the f of another": lambda: hodiff.grad(lambda z: hodiff.grad(number, z).square().sum(), X, **KEEP),
    "laplacian of a component": lambda: hodiff.laplacian(NET, X),
    "laplacian without its graph": lambda: hodiff.laplacian(NET, X, create_graph=False),
    "laplacian with a weight": lambda: hodiff.laplacian(rows, X, weight=torch.ones(3, dtype=D)),
    "laplacian, estimated": lambda: hodiff.laplacian(rows, X, samples=2),
    "laplacian, estimated by one": lambda: hodiff.laplacian(rows, X, samples=1),
    "value_grad_and_laplacian of several": lambda: hodiff.value_grad_and_laplacian(same, X),
    "value_grad_and_laplacian of a column": lambda: hodiff.value_grad_and_laplacian(NET, X),
    "value_grad_and_laplacian with an extra": lambda: hodiff.value_grad_and_laplacian(
        lambda z: (rows(z), same(z)), X, has_aux=True
    ),
    "laplacian of one point": lambda: hodiff.laplacian(number, X[0], batch_ndim=0),
    "divergence, estimated": lambda: hodiff.divergence(same, X, samples=2),
    "value_and_divergence with an extra": lambda: hodiff.value_and_divergence(
        lambda z: (same(z), rows(z)), X, has_aux=True
    ),
    "curl in the plane": lambda: hodiff.curl(same, X[:, :2]),
    "partials of several orders": lambda: tuple(hodiff.partials(rows, X, [(), 0, (1, 1, 2)])),
    "jet of several arguments": lambda: hodiff.jet(lambda a, b: a * b * SCALE, (X, V), [[V], [X]]),
    "derivatives_of": lambda: _derivatives(),
    "penalty of each sample": lambda: hodiff.gradient_penalty(rows, X, reduction="none"),
    "penalty with outputs": lambda: hodiff.gradient_penalty(NET, X, return_outputs=True),
    "penalty without its graph": lambda: hodiff.gradient_penalty(rows, X, create_graph=False),
    "penalty of a pair": lambda: hodiff.gradient_penalty(lambda z: z["a"].sum(-1) * z["b"].sum(-1), PAIR),
    "gradient_norm_penalty of a module": lambda: hodiff.gradient_norm_penalty(of_net, NET, return_outputs=True),
    "hessian_penalty of each": lambda: hodiff.hessian_penalty(same, X, reduction="none"),
    "curvature_penalty of each": lambda: hodiff.curvature_penalty(rows, X, reduction="none"),
    "sliced_score_matching_loss of each": lambda: hodiff.sliced_score_matching_loss(same, X, reduction="none"),
    "interpolate": lambda: hodiff.interpolate(PAIR, PAIR),
    "sample_norm": lambda: hodiff.sample_norm(PAIR),
}  # fmt: skip


def _derivatives() -> list[Tensor]:
    x = X.clone().requires_grad_()
    d = hodiff.derivatives_of((x**3).sum(-1) * SCALE, x)
    return [d[0], d[1, 1]]


def told(result: object) -> object:
    """All of a result but its numbers."""
    result = vars(result) if isinstance(result, hodiff.fields.Estimate) else result
    leaves, tree = _pytree.tree_flatten(tuple(result) if isinstance(result, tuple) else result)
    kinds = [(x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    return kinds, tree


def shadowed(monkeypatch) -> set[str]:
    """From now on shadows run in place of the functions; those that did."""
    from hodiff.steps import _dynamo

    met = set()

    def replaced(name):
        def run(*args, **kwargs):
            met.add(name)
            return _dynamo.SHADOWS[name](*args, **kwargs)

        return run

    for name in _dynamo.SHADOWS:
        monkeypatch.setattr(hodiff, name, replaced(name))
    return met


def named(name: str) -> str:
    return name.partition(",")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMS)
def test_a_shadow_is_like_what_it_stands_for(name: str, monkeypatch) -> None:
    expected = told(FORMS[name]())
    met = shadowed(monkeypatch)
    assert told(FORMS[name]()) == expected and met


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_a_shadow_is_like_the_function_by_the_catalogue_of_calls(caller, monkeypatch) -> None:
    g, args = (lambda z, *rest: SCALE * z.sin() * z * (rest[0] if rest else 1)), (torch.ones(3, dtype=D),)
    f = caller.shaped(g)
    if caller.draws:  # a torch.Generator is refused by Dynamo
        monkeypatch.setattr("tests.support.callers.generator", lambda: None)
    expected = told(caller.run(f, X, args if caller.name != "jet" else ()))
    met = shadowed(monkeypatch)
    found = told(caller.run(f, X, args if caller.name != "jet" else ()))
    assert found == expected or not met


COUNTED = {
    "nth_derivative of order 0": 0, "inside the f of another": 2, "partials of several orders": 3,
    "jet of several arguments": 1, "derivatives_of": 3, "interpolate": 0, "sample_norm": 0,
}  # fmt: skip
"""The orders of forms that the catalogue of calls does not have; what is read one after another counts as nested."""


@pytest.mark.filterwarnings("ignore")
def test_each_shadow_counts_its_order(monkeypatch) -> None:
    """From order 3 on norm layers are written out, and `report.order` tells it."""
    from hodiff.steps import _dynamo

    monkeypatch.setattr("tests.support.callers.generator", lambda: None)
    met, seen, wrong = shadowed(monkeypatch), set[str](), {}
    g = lambda z, *rest: SCALE * z.sin() * z
    calls = {name: (FORMS[name], order) for name, order in COUNTED.items()}
    for each in (each for each in CALLERS if named(each.name) in _dynamo.SHADOWS):
        of_log_density = each.name == "sliced_score_matching_loss"  # then it takes one more
        run = partial(each.run, each.shaped(g), X, ())
        calls[f"{each.name}, of the catalogue"] = run, each.order + of_log_density
    for name, (call, order) in calls.items():
        monkeypatch.setattr(_dynamo.inside, "order", 0)
        met.clear()
        call()
        seen |= met
        if _dynamo.inside.order != order:
            wrong[name] = _dynamo.inside.order, order
    assert wrong == {} and seen == _dynamo.SHADOWS.keys()


def _by_autograd(z: Tensor, often: int) -> Tensor:
    value = (z**4).sum()
    for _ in range(often):
        (gradient,) = torch.autograd.grad(value, z, create_graph=True)
        value = gradient.sum()
    return value


def _nested(derivative: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], z: Tensor, often: int) -> Tensor:
    f = lambda z: (z**4).sum()
    for _ in range(often):
        f = lambda z, f=f: derivative(f, z).sum()
    return f(z)


WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "torch.autograd.grad": _by_autograd,
    "torch.func.grad": partial(_nested, lambda f, z: torch.func.grad(f)(z)),
    "hodiff.grad": partial(_nested, partial(hodiff.grad, create_graph=True)),
}


@pytest.mark.parametrize("often", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_a_step_is_that_of_its_loss_and_one(way: str, often: int) -> None:
    model = nn.Linear(2, 1, dtype=D)
    step = hodiff.compile_step(lambda model: WAYS[way](model.weight * 1, often), model, backend="replay")
    step()
    assert step.report.order == 1 + often and not step.report.eager
