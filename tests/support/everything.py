"""Every public name, by one call: with a module in its function, with a module as the point, or with no function.

The tables of `callers.py`, and what those leave out: names that are called for no value, and modules as points.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hodiff
import hodiff.plotting
from tests.support.callers import CALLERS, PLAIN, SCALE, Caller, D, direction, generator
from tests.support.scene import Model, X


def _stepped(rule: Any) -> Any:
    return hodiff.unroll(lambda z: (z**2).sum(), X, rule(lr=0.1), 2)


def _step(context: Any) -> None:
    with context:
        loss = (X.clone().requires_grad_() ** 2).sum()
        loss.backward()
    if isinstance(context, hodiff.graph.Lifetime):
        str(context)


def _monitored(*_: Any) -> str:
    monitor = hodiff.graph.monitor()
    monitor.step(loss=(X.clone().requires_grad_() ** 2).sum())
    return str(monitor)


def _drawn(*_: Any) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    record = hodiff.trace(hodiff.MatrixOperator(torch.eye(3, dtype=D)), generator=generator())
    with pyplot.style.context("default"):
        hodiff.plotting.convergence([record])
    pyplot.close("all")


OTHERS: dict[str, Callable[..., Any]] = {
    "graph.watch": lambda x: _step(hodiff.graph.watch()),
    "graph.lifetime": lambda x: _step(hodiff.graph.lifetime()),
    "graph.monitor": _monitored,
    "plotting.convergence": _drawn,
    "sparse.Pattern": lambda x: hodiff.sparse.sparsity_pattern(lambda z: (z**3).sum(), x).rows,
    "sparse.Plan": lambda x: hodiff.sparse.plan_hessian(lambda z: (z**3).sum(), x).values(x),
    "jets.Report": lambda x: str(hodiff.jets.report(lambda z: (z**3).sum(-1), x)),
    **{f"rules.{name}": lambda x, name=name: _stepped(getattr(hodiff.rules, name)) for name in hodiff.rules.__all__},
    "rules.Rule": lambda x: hodiff.rules.SGD(),
    **{
        f"graph.{name}": lambda x, call=call: call((x.clone().requires_grad_() ** 2).sum())
        for call, names in (
            (hodiff.graph.inspect, ("Graph", "NodeRecord", "Leaf", "Saved")),
            (hodiff.graph.predict, ("Prediction", "Finding")),
            (lambda loss: hodiff.graph.shared(loss, 2 * loss), ("Shared",)),
            (hodiff.graph.release, ("Released",)),
            (lambda _: hodiff.graph.explain(ValueError("not ours")), ("Explanation",)),
            (lambda _: _step(hodiff.graph.watch()), ("Watch",)),
            (lambda _: _step(hodiff.graph.lifetime()), ("Lifetime",)),
            (_monitored, ("Monitor", "Step")),
        )
        for name in names
    },
}
"""The names of `callers.NOT_CALLED`, each where it is used."""

ALONE = {**PLAIN, **OTHERS}


def of_module(caller: Caller) -> Callable[..., Any]:
    """The function of a module that this caller wants."""
    return lambda model, *rest: caller.shaped(model)(X, *rest)


POINT_IS_TENSORS = {
    name: reason
    for reason, names in {
        "each entry of the point is a variable": "nth_derivative derivatives sparse.sparsity_pattern jets.report",
        "a function of coordinates": "laplacian value_grad_and_laplacian second_order_operator biharmonic divergence "
        "value_and_divergence curl partial partials jet",
        "a function of samples": "gradient_penalty wgan_gp_penalty dragan_penalty r1_penalty r2_penalty "
        "eikonal_penalty jacobian_penalty hessian_penalty curvature_penalty PathLengthPenalty "
        "sliced_score_matching_loss",
    }.items()
    for name in names.split()
}
ONE = torch.ones(2, 3, dtype=D)
CALLED_WITH_A_MODULE: dict[str, Callable[[Callable[..., Any], nn.Module], Any]] = {
    "vjp": lambda f, m: hodiff.vjp(f, m, ONE),
    "jvp": lambda f, m: hodiff.jvp(f, m, like(m)),
    "hvp": lambda f, m: hodiff.hvp(f, m, like(m)),
    "HessianOperator": lambda f, m: hodiff.HessianOperator(f, m) @ like(m),
    "JacobianOperator": lambda f, m: hodiff.JacobianOperator(lambda m, batch: f(m), m, data=[()]) @ like(m),
    "GaussNewtonOperator": lambda f, m: (
        hodiff.GaussNewtonOperator(
            lambda m, batch: f(m), lambda outputs, batch: ((outputs**2).sum() / 2, 1), m, data=[()]
        )
        @ like(m)
    ),
    "FisherOperator": lambda f, m: (
        hodiff.FisherOperator(lambda m, batch: f(m), nn.MSELoss(), m, data=[((), ONE)], kind="exact") @ like(m)
    ),
    "implicit.argmin": lambda f, m: hodiff.implicit.argmin(
        lambda m: SCALE * f(m) + 4 * _square(m), m, gradient_tol=1e9
    ),
    "implicit.root": lambda f, m: hodiff.implicit.root(_scaled(4.0), m, gradient_tol=1e9),
    "implicit.fixed_point": lambda f, m: hodiff.implicit.fixed_point(_scaled(0.1), m, gradient_tol=1e9),
    "sparse_jacobian": lambda f, m: hodiff.sparse_jacobian(f, m).to_dense(),
    "sparse.plan_hessian": lambda f, m: hodiff.sparse.plan_hessian(f, m).values(m),
    "sparse.plan_jacobian": lambda f, m: hodiff.sparse.plan_jacobian(f, m).values(m),
}


def like(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: direction(p) for name, p in model.named_parameters() if p.requires_grad}


def _square(model: nn.Module) -> torch.Tensor:
    return sum((p**2).sum() for p in model.parameters() if p.requires_grad)  # type: ignore[return-value]


def _scaled(factor: float) -> Callable[[nn.Module], dict[str, torch.Tensor]]:
    def residual(model: Any) -> dict[str, torch.Tensor]:
        names = [n for n, p in model.named_parameters() if n != "table.frozen"]
        parameters = dict(model.named_parameters())
        return {n: factor * parameters[n] + SCALE * model.table().sin() * 0.01 for n in names}

    return residual


def with_a_module(caller: Caller, model: Model, f: Callable[..., Any]) -> Any:
    call = CALLED_WITH_A_MODULE.get(caller.name)
    return call(f, model) if call else caller.run(f, model, ())


WITH_MODULES = [caller for caller in CALLERS if caller.name.partition(",")[0] not in POINT_IS_TENSORS]
