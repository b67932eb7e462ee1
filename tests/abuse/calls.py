"""One good call of each public name, argument by argument; any of them may be replaced by something bad."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hodiff
import hodiff.plotting
from tests.support.callers import public

D = torch.float64
X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
V = torch.cos(torch.arange(6, dtype=D)).reshape(2, 3)
A = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 3.0]], dtype=D)


def scalar(z: Any, *rest: Any, **options: Any) -> Tensor:
    return (z.sin() * z).sum()


def rows(z: Any, *rest: Any, **options: Any) -> Tensor:
    return (z.sin() * z).sum(-1)


def same(z: Any, *rest: Any, **options: Any) -> Tensor:
    return z.sin() * z


def small(z: Any, *rest: Any, **options: Any) -> Tensor:
    return 0.1 * z.sin() + 0.1 * SHIFT


def residual(z: Any, *rest: Any, **options: Any) -> Tensor:
    return 4 * z + SHIFT * z.sin()


def energy(z: Any, *rest: Any, **options: Any) -> Tensor:
    return (2 * z.square() + SHIFT * z).sum()


def both(z: Any, y: Any, *rest: Any, **options: Any) -> Tensor:
    return (z.sin() * z).sum() * (y**2).sum()


def samples(z: Any, batch: Any, *rest: Any, **options: Any) -> Tensor:
    return (z.sin() * z).sum() * batch


def images(z: Any, *rest: Any, **options: Any) -> Tensor:
    return (z.sin() * z)[:, None, None]


def predict(z: Any, *rest: Any, **options: Any) -> Tensor:
    return z.sin() * z


def loss(outputs: Tensor, batch: Any) -> Any:
    return (outputs**2).sum() / 2, 1


FUNCTIONS = {
    function.__code__
    for function in (scalar, rows, same, small, residual, energy, both, samples, images, predict, loss)
}
"""What stands for the user's code: what it raises is its own affair."""

SHIFT = torch.tensor(0.3, dtype=D, requires_grad=True)


def _matrix() -> hodiff.MatrixOperator:
    return hodiff.MatrixOperator(A)


def _loss() -> Tensor:
    return (X.clone().requires_grad_() ** 3).sum()


def _fields() -> dict[str, Any]:
    points = X.clone().requires_grad_()
    return {"u": (points**3).sum(-1), "x": points}


def _penalty(f: Any = images, x: Any = X, **options: Any) -> Any:
    return hodiff.PathLengthPenalty().double()(f, x, **options)


def _fitted(batch: Any) -> Any:
    return hodiff.LevenbergMarquardt(lambda v, batch: batch @ v, V[0].clone()).step(batch)


def _product(v: Any) -> Any:
    return hodiff.HessianOperator(scalar, X) @ v


class Target(NamedTuple):
    """A public name, and a good value for each argument that it needs."""

    call: Callable[..., Any]
    given: Callable[[], dict[str, Any]]


def _with(**given: Any) -> Callable[[], dict[str, Any]]:
    return lambda: dict(given)


NEEDED: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(
        ("grad", "value_and_grad", "hessian", "value_grad_and_hessian", "hessian_diagonal", "sparse_hessian",
         "check_derivatives", "HessianOperator_", "sparse.plan_hessian", "sparse.sparsity_pattern"),
        _with(f=scalar, x=X),
    ),
    **dict.fromkeys(("jacobian", "sparse_jacobian", "sparse.plan_jacobian", "curl", "divergence",
                     "value_and_divergence", "jacobian_penalty", "hessian_penalty", "sliced_score_matching_loss"),
                    _with(f=same, x=X)),
    **dict.fromkeys(("laplacian", "value_grad_and_laplacian", "biharmonic", "gradient_penalty", "curvature_penalty",
                     "jets.report"), _with(f=rows, x=X)),
    "hvp": _with(f=scalar, x=X, v=V),
    "jvp": _with(f=same, x=X, v=V),
    "vjp": _with(f=same, x=X, u=V),
    "cross_hessian": _with(f=both, x=X, y=V[0]),
    "cross_hvp": _with(f=both, x=X, y=V[0], v=V[1]),
    "gram": _with(f=samples, where=X, batch=torch.ones(2, dtype=D)),
    "per_sample_grad": _with(f=samples, where=X, batch=torch.ones(2, dtype=D)),
    "nth_derivative": _with(f=same, x=X, n=2),
    "derivatives": _with(f=same, x=X, n=3),
    "derivatives_of": _fields,
    "partial": _with(f=rows, x=X, index=(0, 0)),
    "partials": _with(f=rows, x=X, indices=[0, (1, 1)]),
    "second_order_operator": _with(f=rows, x=X, C=A),
    "jet": _with(f=same, primals=X, series=[V, V]),
    "eikonal_penalty": _with(f=rows, points=X),
    "gradient_norm_penalty": _with(f=scalar, where=X),
    "wgan_gp_penalty": _with(critic=rows, real=X, fake=V),
    "dragan_penalty": _with(critic=rows, real=X),
    "r1_penalty": _with(critic=rows, real=X),
    "r2_penalty": _with(critic=rows, fake=X),
    "interpolate": _with(a=X, b=V),
    "sample_norm": _with(grads=X),
    "multi_grad": _with(losses=[scalar], where=X),
    "unroll": lambda: {"f": scalar, "where": X, "rule": hodiff.rules.SGD(lr=0.1), "steps": 2},
    "implicit.argmin": _with(f=energy, x_star=X, gradient_tol=1e9),
    "implicit.root": _with(F=residual, x_star=X, gradient_tol=1e9),
    "implicit.fixed_point": _with(g=small, x_star=X, gradient_tol=1e9),
    "HessianOperator": _with(f=scalar, where=X),
    "JacobianOperator": _with(predict=predict, where=X),
    "GaussNewtonOperator": _with(predict=predict, loss=loss, where=X, data=[()]),
    "FisherOperator": lambda: {
        "predict": predict, "loss": nn.MSELoss(), "where": X, "data": [((), torch.zeros(2, 3, dtype=D))],
        "kind": "exact",
    },
    "MatrixOperator": _with(A=A),
    "LinearOperator": _with(),
    "LevenbergMarquardt": lambda: {"residuals": residual, "where": X.clone()},
    "PathLengthPenalty": _with(),
    "Selection": lambda: {"module": nn.Linear(3, 2), "names": ["weight"]},
    "select": lambda: {"module": nn.Linear(3, 2)},
    "twice_differentiable": lambda: {},
    "compile_step": lambda: {"loss": residual, "where": X.clone().requires_grad_()},
    **dict.fromkeys(("trace", "diagonal", "spectral_density", "logdet"),
                    lambda: {"operator": _matrix()}),
    "eigsh": lambda: {"operator": _matrix(), "k": 1},
    "nystrom": lambda: {"operator": _matrix(), "rank": 2, "shift": 0.5},
    "solve": lambda: {"operator": _matrix(), "b": V[0]},
    "sparse.color": _with(pattern=torch.eye(3).to_sparse()),
    "graph.explain": _with(exc=None),
    "graph.monitor": _with(),
    "graph.predict": lambda: {"loss": _loss()},
    "graph.release": lambda: {"loss": _loss()},
    "graph.inspect": lambda: {"outputs": _loss()},
    "graph.shared": lambda: {"losses": _loss()},
    "plotting.convergence": lambda: {"records": [hodiff.trace(_matrix(), samples=3)]},
    **{f"rules.{name}": _with() for name in hodiff.rules.__all__ if name != "Rule"},
}  # fmt: skip

METHODS: dict[str, Target] = {
    "PathLengthPenalty.forward": Target(_penalty, _with(f=images, x=X)),
    "LevenbergMarquardt.step": Target(_fitted, lambda: {"batch": X.clone()}),
    "LinearOperator @": Target(_product, _with(v=V)),
    "LinearOperator *": Target(lambda a: a * _matrix(), _with(a=2.0)),
    "LinearOperator +": Target(lambda a: _matrix() + a, _with(a=0.1)),
    "LinearOperator.block": Target(lambda pattern: hodiff.HessianOperator(_of, _linear()).block(pattern),
                                   _with(pattern="weight")),
    "graph.inspect of two": Target(lambda a: hodiff.graph.inspect(_loss(), a), lambda: {"a": _loss()}),
    "graph.shared of two": Target(lambda a: hodiff.graph.shared(_loss(), a), lambda: {"a": _loss()}),
    "graph.monitor.step": Target(lambda a: hodiff.graph.monitor().step(a=a), lambda: {"a": _loss()}),
    "select, pattern": Target(lambda p: hodiff.select(nn.Linear(3, 2), p), _with(p="weight")),
}  # fmt: skip


def _linear() -> nn.Module:
    return nn.Linear(3, 2, dtype=D)


def _of(model: nn.Module) -> Tensor:
    return model(X).sin().sum()


RECORDS = {
    "graph.watch": "takes nothing", "graph.lifetime": "takes nothing", "jets.Report": "a record",
    "sparse.Pattern": "a record", "sparse.Plan": "made by plan_hessian", "rules.Rule": "a base class",
    **{f"graph.{name}": "a record" for name in hodiff.graph.__all__ if inspect.isclass(getattr(hodiff.graph, name))},
}  # fmt: skip


def _found(name: str) -> Any:
    module, _, short = name.rpartition(".")
    return getattr(getattr(hodiff, module) if module else hodiff, short)


def _used(name: str) -> Callable[..., Any]:
    """A public name; an operator with one product, since most of it happens there."""
    found = _found(name)
    if not name.endswith("Operator") or name == "LinearOperator":
        return found

    @functools.wraps(found)
    def used(*args: Any, **options: Any) -> Tensor:
        operator = found(*args, **options)
        return operator @ torch.ones(operator.shape[1], dtype=operator.dtype)

    return used


def targets() -> dict[str, Target]:
    """All of them. A public name that has no row is an error."""
    missing = public() - set(NEEDED) - set(RECORDS)
    if missing:
        raise LookupError(f"say in tests/abuse/calls.py how these are called: {sorted(missing)}")
    return {name: Target(_used(name), NEEDED[name]) for name in sorted(public() & set(NEEDED))} | METHODS


def arguments(target: Target) -> list[str]:
    """The names of the arguments that can be replaced."""
    given = target.given()
    parameters = inspect.signature(target.call).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [name for name in named if name not in ("progress", "process_group", "self") or name in given]


def perform(target: Target, replaced: dict[str, Any]) -> Any:
    """The call with some arguments replaced; variable ones are given as one."""
    given = target.given() | replaced
    variable = [p.name for p in inspect.signature(target.call).parameters.values() if p.kind == p.VAR_POSITIONAL]
    positional = [given.pop(name) for name in variable if name in given]
    return target.call(*positional, **given)
