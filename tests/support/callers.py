"""One way to call every public name: with a function of the test's choosing, or with nothing but a point.

A test that goes over `CALLERS` goes over the whole library; `tests/contract/test_road.py` fails for a public name that
is in none of the three tables below, so that the next one cannot be forgotten.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import hodiff
import hodiff.plotting
from tests.support.releases import LACKING

D = torch.float64
Form = Literal["scalar", "rows", "same"]
Entrywise = Callable[..., Tensor]
"""A function whose result has its argument's shape, `(N, 3)`; each entry depends on its own entry alone."""


@dataclass(frozen=True)
class Caller:
    """How a public name is called with a function.

    Attributes:
        name: The name, from `hodiff` on.
        form: What it wants of `f`: a number, a number for each row, or a result of the argument's shape.
        order: How many derivatives of `f` it takes, those that a loss builds its graph for not counted.
        run: The call: `run(f, x, args)`.
        draws: Whether it draws random numbers of its own (from a generator that `run` gives it).
    """

    name: str
    form: Form
    order: int
    run: Callable[[Callable[..., Any], Any, Sequence[Any]], Any]
    draws: bool = False

    def __repr__(self) -> str:
        return self.name

    def shaped(self, g: Entrywise) -> Callable[..., Any]:
        """The function that this caller wants, made from an entrywise one."""
        return {
            "scalar": lambda z, *rest: g(z, *rest).sum(),
            "rows": lambda z, *rest: g(z, *rest).sum(-1),
            "same": g,
        }[self.form]

    def __call__(self, g: Entrywise, x: Tensor, args: Sequence[Any] = ()) -> list[Tensor]:
        """The tensors of the result."""
        return tensors(self.run(self.shaped(g), x, args))


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a result, whatever holds them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    if hasattr(value, "checks"):
        return [torch.tensor([check.computed for check in value.checks], dtype=D)]
    if hasattr(value, "value"):
        return [torch.as_tensor(value.value)]
    return []


SCALE = torch.tensor(1.3, dtype=D, requires_grad=True)
"""What the functions of the tests depend on besides their argument."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def place(x: Any) -> torch.device:
    """Where a point is, a module too."""
    return x.device if isinstance(x, Tensor) else next(x.parameters()).device


def direction(x: Any) -> Tensor:
    """A fixed vector like `x`."""
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype, device=x.device)).reshape(x.shape)


def _weight(x: Tensor) -> Tensor:
    return torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 3.0]], dtype=D, device=place(x))


def _hessian_operator(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    return hodiff.HessianOperator(f, x, args=args) @ direction(x)


def _jacobian_operator(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    operator = hodiff.JacobianOperator(lambda z, batch: f(z, *batch), x, data=[tuple(args)])
    return operator @ direction(x).reshape(-1)


def _gauss_newton(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    loss = lambda outputs, batch: ((outputs**2).sum() / 2, 1)
    operator = hodiff.GaussNewtonOperator(lambda z, batch: f(z, *batch), loss, x, data=[tuple(args)])
    return operator @ direction(x)


def _fisher(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    targets = torch.zeros(2, 3, dtype=D, device=place(x))
    operator = hodiff.FisherOperator(
        lambda z, batch: f(z, *batch[0]), nn.MSELoss(), x, data=[(tuple(args), targets)], kind="exact"
    )
    return operator @ direction(x)


def _argmin(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    """Near a minimum of nothing in particular: a strong quadratic keeps the system definite."""
    return _seen(hodiff.implicit.argmin, lambda z, *rest: f(z, *rest) + 4 * z.square().sum(), x, args)


def _root(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    return _seen(hodiff.implicit.root, lambda z, *rest: f(z, *rest) + 4 * z, x, args)


def _fixed_point(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    return _seen(hodiff.implicit.fixed_point, lambda z, *rest: 0.1 * f(z, *rest), x, args)


def _seen(solution: Any, f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    """What a solution depends on is told by its derivative alone: that by `SCALE`, beside the value."""
    with torch.inference_mode(False), torch.enable_grad():
        value = solution(f, x, args=args, gradient_tol=1e9)
        (by,) = torch.autograd.grad(value.sum(), SCALE, allow_unused=True)
    return torch.cat([value.detach().reshape(-1), value.new_zeros(1) if by is None else by.reshape(1).to(value)])


def _path_length(f: Any, x: Any, args: Sequence[Any]) -> Tensor:
    images = lambda z, *rest: f(z, *rest)[:, None, None]
    return hodiff.PathLengthPenalty().to(x)(images, x, generator=generator(), args=args)


CALLERS: tuple[Caller, ...] = (
    Caller("grad", "scalar", 1, lambda f, x, a: hodiff.grad(f, x, args=a)),
    Caller("value_and_grad", "scalar", 1, lambda f, x, a: hodiff.value_and_grad(f, x, args=a)),
    Caller("vjp", "same", 1, lambda f, x, a: hodiff.vjp(f, x, direction(x), args=a)),
    Caller("jvp", "same", 1, lambda f, x, a: hodiff.jvp(f, x, direction(x), args=a)),
    Caller("jacobian", "same", 1, lambda f, x, a: hodiff.jacobian(f, x, args=a)),
    Caller(
        "per_sample_grad", "rows", 1,
        lambda f, x, a: hodiff.per_sample_grad(
            lambda z, batch, *r: f(z, *r), x, torch.zeros(2, dtype=D, device=place(x)), args=a
        ),
    ),
    Caller(
        "gram", "rows", 1,
        lambda f, x, a: hodiff.gram(
            lambda z, batch, *r: f(z, *r), x, torch.zeros(2, dtype=D, device=place(x)), args=a
        ),
    ),
    Caller("hessian", "scalar", 2, lambda f, x, a: hodiff.hessian(f, x, args=a)),
    Caller("value_grad_and_hessian", "scalar", 2, lambda f, x, a: hodiff.value_grad_and_hessian(f, x, args=a)),
    Caller("hvp", "scalar", 2, lambda f, x, a: hodiff.hvp(f, x, direction(x), args=a)),
    Caller(
        "cross_hessian", "scalar", 2,
        lambda f, x, a: hodiff.cross_hessian(
            lambda z, y, *rest: (f(z, *rest) * y).sum(), x, torch.ones(2, dtype=D, device=place(x)), args=a
        ),
    ),
    Caller(
        "cross_hvp", "scalar", 2,
        lambda f, x, a: hodiff.cross_hvp(
            lambda z, y, *rest: (f(z, *rest) * y).sum(), x, *(torch.ones(2, dtype=D, device=place(x)),) * 2, args=a
        ),
    ),
    Caller("implicit.argmin", "scalar", 2, _argmin),
    Caller("implicit.root", "same", 1, _root),
    Caller("implicit.fixed_point", "same", 1, _fixed_point),
    Caller(
        "unroll", "scalar", 1, lambda f, x, a: hodiff.unroll(f, x, hodiff.rules.SGD(lr=0.1), 2, args=a)
    ),
    Caller("hessian_diagonal", "scalar", 2, lambda f, x, a: hodiff.hessian_diagonal(f, x, args=a)),
    Caller("sparse_hessian", "scalar", 2, lambda f, x, a: hodiff.sparse_hessian(f, x, args=a).to_dense()),
    Caller("sparse_jacobian", "same", 1, lambda f, x, a: hodiff.sparse_jacobian(f, x, args=a).to_dense()),
    Caller("sparse.sparsity_pattern", "scalar", 2, lambda f, x, a: hodiff.sparse.sparsity_pattern(f, x, args=a).rows),
    Caller("sparse.plan_hessian", "scalar", 2, lambda f, x, a: hodiff.sparse.plan_hessian(f, x, args=a)(x).to_dense()),
    Caller("sparse.plan_jacobian", "same", 1, lambda f, x, a: hodiff.sparse.plan_jacobian(f, x, args=a)(x).to_dense()),
    Caller("nth_derivative", "same", 2, lambda f, x, a: hodiff.nth_derivative(f, x, 2, args=a)),
    Caller("derivatives", "same", 3, lambda f, x, a: hodiff.derivatives(f, x, 3, args=a)),
    Caller("HessianOperator", "scalar", 2, _hessian_operator),
    Caller("JacobianOperator", "same", 1, _jacobian_operator),
    Caller("GaussNewtonOperator", "same", 1, _gauss_newton),
    Caller("FisherOperator", "same", 1, _fisher),
    Caller("gradient_penalty", "rows", 1, lambda f, x, a: hodiff.gradient_penalty(f, x, args=a)),
    Caller(
        "wgan_gp_penalty", "rows", 1,
        lambda f, x, a: hodiff.wgan_gp_penalty(f, x, x, generator=generator(), args=a), draws=True,
    ),
    Caller(
        "dragan_penalty", "rows", 1,
        lambda f, x, a: hodiff.dragan_penalty(f, x, generator=generator(), args=a), draws=True,
    ),
    Caller("r1_penalty", "rows", 1, lambda f, x, a: hodiff.r1_penalty(f, x, args=a)),
    Caller("r2_penalty", "rows", 1, lambda f, x, a: hodiff.r2_penalty(f, x, args=a)),
    Caller("eikonal_penalty", "rows", 1, lambda f, x, a: hodiff.eikonal_penalty(f, x, args=a)),
    Caller("gradient_norm_penalty", "scalar", 1, lambda f, x, a: hodiff.gradient_norm_penalty(f, x, args=a)),
    Caller(
        "jacobian_penalty", "same", 1, lambda f, x, a: hodiff.jacobian_penalty(f, x, generator=generator(), args=a),
        draws=True,
    ),
    Caller(
        "hessian_penalty", "same", 2, lambda f, x, a: hodiff.hessian_penalty(f, x, generator=generator(), args=a),
        draws=True,
    ),
    Caller("curvature_penalty", "rows", 1, lambda f, x, a: hodiff.curvature_penalty(f, x, args=a)),
    Caller("PathLengthPenalty", "same", 1, _path_length, draws=True),
    Caller(
        "sliced_score_matching_loss", "same", 1,
        lambda f, x, a: hodiff.sliced_score_matching_loss(f, x, generator=generator(), args=a), draws=True,
    ),
    Caller("laplacian", "rows", 2, lambda f, x, a: hodiff.laplacian(f, x, args=a)),
    Caller("laplacian, reverse", "rows", 2, lambda f, x, a: hodiff.laplacian(f, x, method="reverse", args=a)),
    Caller("value_grad_and_laplacian", "rows", 2, lambda f, x, a: hodiff.value_grad_and_laplacian(f, x, args=a)),
    Caller("second_order_operator", "rows", 2, lambda f, x, a: hodiff.second_order_operator(f, x, _weight(x), args=a)),
    Caller("biharmonic", "rows", 4, lambda f, x, a: hodiff.biharmonic(f, x, args=a)),
    Caller("divergence", "same", 1, lambda f, x, a: hodiff.divergence(f, x, args=a)),
    Caller("value_and_divergence", "same", 1, lambda f, x, a: hodiff.value_and_divergence(f, x, args=a)),
    Caller(
        "divergence, own vectors", "same", 1,
        lambda f, x, a: hodiff.divergence(f, x, vectors=direction(x), args=a),
    ),
    Caller(
        "laplacian, with an extra", "rows", 2,
        lambda f, x, a: hodiff.laplacian(lambda z, *r: (f(z, *r), None), x, has_aux=True, args=a)[0],
    ),
    Caller("curl", "same", 1, lambda f, x, a: hodiff.curl(f, x, args=a)),
    Caller("partial", "rows", 2, lambda f, x, a: hodiff.partial(f, x, (0, 0), args=a)),
    Caller("partials", "rows", 2, lambda f, x, a: hodiff.partials(f, x, [0, (1, 1)], args=a)),
    Caller(
        "jet", "same", 2, lambda f, x, a: hodiff.jet(lambda z: f(z, *a), x, [direction(x), torch.zeros_like(x)])
    ),
    Caller("multi_grad", "scalar", 1, lambda f, x, a: hodiff.multi_grad([lambda z: f(z, *a)], x)),
    Caller(
        "check_derivatives", "scalar", 2,
        lambda f, x, a: hodiff.check_derivatives(f, x, generator=generator(), args=a), draws=True,
    ),
    Caller("jets.report", "rows", 2, lambda f, x, a: hodiff.jets.report(f, x, args=a)),
)  # fmt: skip
"""The names that take a function, each by one call."""


def _loss(x: Tensor) -> Tensor:
    return (x.detach().clone().requires_grad_() ** 3).sum()


def _view(x: Tensor) -> Tensor:
    points = x.detach().clone().requires_grad_()
    return hodiff.derivatives_of((points**3).sum(-1), points)[0, 0].detach()


def _matrix(x: Tensor) -> hodiff.MatrixOperator:
    return hodiff.MatrixOperator(_weight(x))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()


def _attends(x: Tensor) -> Tensor:
    q = torch.tensor([[0.5], [0.2]], device=place(x)).requires_grad_()
    with hodiff.twice_differentiable():
        value = nn.functional.scaled_dot_product_attention(q, q, q.exp()).sum()
    (gradient,) = torch.autograd.grad(value, q, create_graph=True)
    return torch.autograd.grad(gradient.sum(), q)[0]


def _fitted(x: Tensor) -> Tensor:
    scale = x.new_ones(())
    hodiff.LevenbergMarquardt(lambda s, x: s * x - 2, scale).step(x.detach())
    return scale


def _stepped(x: Tensor) -> Tensor:
    scale = x.new_ones(()).requires_grad_()
    step = hodiff.compile_step(lambda scale, x: ((scale * x - 2) ** 2).sum(), scale, backend="replay")
    with torch.no_grad():  # the loss as it is: what Dynamo does of it takes seconds
        return step(x)


PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "interpolate": lambda x: hodiff.interpolate(x, 2 * x, generator=generator()),
    "sample_norm": lambda x: hodiff.sample_norm(x),
    "derivatives_of": lambda x: _view(x),
    "twice_differentiable": lambda x: _attends(x),
    "compile_step": lambda x: _stepped(x),
    "select": lambda x: len(hodiff.select(_layers(), "0.*")),
    "Selection": lambda x: len(hodiff.Selection(_layers(), ["0.weight"])),
    "MatrixOperator": lambda x: hodiff.MatrixOperator(_weight(x)) @ x[0],
    "LinearOperator": lambda x: (2 * _matrix(x) + 0.1).T @ x[0],
    "trace": lambda x: hodiff.trace(_matrix(x), generator=generator()),
    "diagonal": lambda x: hodiff.diagonal(_matrix(x), generator=generator()),
    "eigsh": lambda x: hodiff.eigsh(_matrix(x), 1, generator=generator()),
    "solve": lambda x: hodiff.solve(_matrix(x), x[0]),
    "LevenbergMarquardt": _fitted,
    "spectral_density": lambda x: hodiff.spectral_density(_matrix(x), samples=4, steps=2, generator=generator()),
    "nystrom": lambda x: hodiff.nystrom(_matrix(x), 2, 0.5, generator=generator()) @ x[0],
    "logdet": lambda x: hodiff.logdet(_matrix(x), shift=1.0, samples=4, steps=2, generator=generator()),
    "sparse.color": lambda x: hodiff.sparse.color(torch.eye(3, device="cpu").to_sparse()),
    "graph.inspect": lambda x: len(hodiff.graph.inspect(_loss(x)).nodes),
    "graph.predict": lambda x: hodiff.graph.predict(_loss(x)).verdict,
    "graph.shared": lambda x: hodiff.graph.shared(_loss(x), _loss(x)).nodes,
    "graph.release": lambda x: hodiff.graph.release(_loss(x)).nodes,
    "graph.explain": lambda x: hodiff.graph.explain(ValueError("not ours")),
}
"""The names that take no function, each by one call at a point."""
for _name in LACKING:
    del PLAIN[_name]

NOT_CALLED = (
    {
        "graph.watch": "a context around the user's own code",
        "graph.lifetime": "the same",
        "graph.monitor": "the same",
        "jets.Report": "a record",
        "sparse.Pattern": "a record",
        "sparse.Plan": "what plan_hessian and plan_jacobian make",
        "plotting.convergence": "draws records",
    }
    | {f"rules.{name}": "a rule: tests/unit/rules" for name in hodiff.rules.__all__}
    | {
        f"graph.{name}": "a record, or the class behind one of the contexts"
        for name in hodiff.graph.__all__
        if inspect.isclass(getattr(hodiff.graph, name))
    }
)
"""The names that are called by nobody, or not for a value."""


def public() -> set[str]:
    """Every public name of the library, but exceptions, warnings, and what this release of PyTorch lacks."""
    places = {
        "": hodiff,
        "graph.": hodiff.graph,
        "jets.": hodiff.jets,
        "rules.": hodiff.rules,
        "sparse.": hodiff.sparse,
        "plotting.": hodiff.plotting,
        "implicit.": hodiff.implicit,
    }
    return {
        prefix + name
        for prefix, module in places.items()
        for name in module.__all__
        if not (inspect.isclass(found := getattr(module, name)) and issubclass(found, BaseException))
        and not inspect.ismodule(found)
    } - LACKING
