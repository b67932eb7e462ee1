"""Derivatives through solutions: of a minimum, a root, a fixed point that any solver found.

The solution is attached to the graph of everything that it depends on, by the implicit function
theorem. `hodiff.unroll` differentiates through the steps of an optimizer instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypedDict, Unpack, final, overload

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _call, _compiled_callers, _nodes, _reverse, _settings, _tree
from hodiff._core._graph import OutputGraph
from hodiff._core._modules import Selection
from hodiff._core._tree import Leaves
from hodiff._core._where import Where
from hodiff.calculus._first import ByName, T
from hodiff.curvature._data_operator import check_stack
from hodiff.curvature._krylov import listed, norms
from hodiff.curvature._links import CallSite, Chain, ImplicitSystem, told
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._records import Status
from hodiff.curvature._solve import Method, as_float, attempt
from hodiff.errors import InputError

__all__ = ["argmin", "fixed_point", "root"]

AnySystem = Literal["gmres", "neumann"]
"""The methods for systems that are not symmetric."""
Function = Callable[..., Any]


class SolutionOptions(TypedDict, total=False):
    """The options that overloads pass on; at run time signatures are spelled out."""

    order: int | None
    batch_ndim: int
    damping: float
    preconditioner: LinearOperator | None
    rtol: float | None
    products: int | None
    iterations: int | None
    restart: int | None
    scale: float
    polish: int
    gradient_tol: float | None
    check_independence: bool
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


@overload
def argmin(
    f: Function,
    x_star: nn.Module | Selection,
    *,
    method: Method = "cg",
    **options: Unpack[SolutionOptions],
) -> ByName: ...


@overload
def argmin(
    f: Function, x_star: T, *, method: Method = "cg", **options: Unpack[SolutionOptions]
) -> T: ...


def argmin(
    f: Function,
    x_star: Any,
    *,
    batch_ndim: int = 0,
    order: int | None = None,
    method: Method = "cg",
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    products: int | None = None,
    iterations: int | None = None,
    restart: int | None = None,
    scale: float = 1.0,
    polish: int = 0,
    gradient_tol: float | None = None,
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A minimum found by any solver, as a function of everything else that `f` depends on.

    With \(\nabla_x f(x^*, \theta) = 0\), the implicit function theorem gives \(\partial x^* /
    \partial \theta = -H^{-1}\, \partial_\theta \nabla_x f\), with the Hessian *H* at the solution.
    The derivative does not depend on the solver, its steps or its start.

    Args:
        f: The function that was minimized, smooth at the minimum: `f(x)` returns one element. The
            solution can be differentiated with respect to everything else that `f` uses (closures,
            arguments, other modules).
        x_star: The minimum: a tensor, a container of tensors, a module (`f` receives the module),
            or `hodiff.select(module, ...)`. It is copied and not changed.
        batch_ndim: How many leading dimensions of *x_star* index independent problems: `f` returns
            one element for each, and the linear systems of all are solved in parallel. If the
            system of a sample has no solution, a warning names the sample and its derivatives are
            NaN; those of the others are not affected. Not for modules, whose parameters are not
            samples.
        order: How many derivatives the result has. None: as many as the enclosing hodiff call
            takes, otherwise 1. A further derivative raises.
        method: `"cg"`; `"minres"` if *H* is indefinite (a stationary point that is not a minimum);
            `"gmres"`; `"neumann"`, the first terms of a series, with `iterations`. These are the
            methods of `hodiff.solve`.
        damping: Added to *H*. The derivative is then that of a solution held near its value by a
            quadratic term, half *damping* times the squared distance.
        preconditioner: An operator close to the inverse of *H*.
        rtol: The relative tolerance of linear systems. None: that of `hodiff.solve`, and a
            hundredth of it for second and higher derivatives.
        products: The maximal number of products for a linear system.
        iterations: Take exactly this many steps in each linear system, without a warning. The
            relative error of derivatives is then that of the system.
        restart: How many vectors GMRES keeps.
        scale: The scale of a Neumann series.
        polish: How many Newton steps to take first. Each squares the error of the solution, and
            changes its value.
        gradient_tol: Warn if the gradient at *x_star* is larger than this times \(H x^*\), which
            estimates its size at zero; None: 1e-3.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The solution, with the structure, shapes and exact values of *x_star* (a dict by parameter
        name for a module; polishing changes the values), and a graph. Under `no_grad`, or if `f`
        depends on nothing that requires grad (a frozen network), it is detached, like the result of
        a PyTorch layer.

    Raises:
        InputError: A value is not finite, *x_star* is not real floating point, or `f` does not
            return one element (per sample).
        GraphError: `f` reaches *x_star* other than through its argument. In the backward pass: *H*
            is singular or, with conjugate gradients, indefinite; or it is one derivative more than
            *order*.

    Warns:
        ConvergenceWarning: *x_star* is not a solution; or, in the backward pass, a linear system
            did not converge. The warning names the line of this call.

    Cost:
        The call takes one gradient (`order + 1` for higher orders) and a product with *H*. The
        backward pass takes a linear system (a reverse pass for each product) and one pass; a
        Hessian-vector product of the result takes three systems in all. Memory: as many graphs of a
        gradient, independent of the solver. For samples (`batch_ndim`) with up to 64 unknowns each
        (256 with GMRES, without `restart`), the matrices of all are computed by one product for
        each unknown, and solved directly, even if indefinite. So is a single system of up to 64
        unknowns (with conjugate gradients only if definite), if these products fit into one batched
        pass, and without `preconditioner` and `iterations`.

    Examples:
        Ridge regression of one number: \(x = b / (1 + \theta)\), with the derivative \(-b / (1 +
            \theta)^2\):

        >>> import torch, hodiff
        >>> theta = torch.tensor(1.0, requires_grad=True)
        >>> f = lambda x: ((x - 8.0) ** 2 + theta * x**2).sum()
        >>> x = hodiff.implicit.argmin(f, torch.tensor([4.0]))
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor(-2.),)

        Three problems at once:

        >>> f = lambda x: ((x - 8.0) ** 2 + theta * x**2).sum(-1)
        >>> x = hodiff.implicit.argmin(f, torch.full((3, 1), 4.0), batch_ndim=1)
        >>> torch.autograd.grad(x[1].sum(), theta)
        (tensor(-2.),)

    Reference:
        Blondel, M. et al. (2022). Efficient and modular implicit differentiation. NeurIPS.
        arXiv:2105.15183. Lorraine, J., Vicol, P., Duvenaud, D. (2020). Optimizing millions of
        hyperparameters by implicit differentiation. AISTATS. arXiv:1911.02590.
    """
    return attached(
        "argmin", f, x_star, args, kwargs, batch_ndim=batch_ndim, order=order, method=method,
        damping=damping, preconditioner=preconditioner, rtol=rtol, products=products,
        iterations=iterations, restart=restart, scale=scale, polish=polish,
        gradient_tol=gradient_tol, check_independence=check_independence,
    )  # fmt: skip


@overload
def root(
    F: Function,
    x_star: nn.Module | Selection,
    *,
    method: AnySystem = "gmres",
    **options: Unpack[SolutionOptions],
) -> ByName: ...


@overload
def root(
    F: Function, x_star: T, *, method: AnySystem = "gmres", **options: Unpack[SolutionOptions]
) -> T: ...


def root(
    F: Function,
    x_star: Any,
    *,
    batch_ndim: int = 0,
    order: int | None = None,
    method: AnySystem = "gmres",
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    products: int | None = None,
    iterations: int | None = None,
    restart: int | None = None,
    scale: float = 1.0,
    polish: int = 0,
    gradient_tol: float | None = None,
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A zero of F(x, θ) found by any solver, as a function of everything else in `F`.

    \(\partial x^* / \partial \theta = -J^{-1}\, \partial_\theta F\), with the Jacobian *J* at the
    solution, by restarted GMRES on products with \(J^\top\). The KKT conditions of a constrained
    minimum are an example of *F*.

    Args:
        F: The function, with as many equations as unknowns: what it returns is like *x_star* (a
            dict by parameter name for a module).
        x_star: The zero: a tensor, a container of tensors, a module, or `hodiff.select(module,
            ...)`.
        batch_ndim: How many leading dimensions index independent problems.
        order: How many derivatives the result has. None: as many as the enclosing hodiff call
            takes, otherwise 1.
        method: `"gmres"`; or `"neumann"`, the first terms of a series, with `iterations`.
        damping: Added to *J*.
        preconditioner: An operator close to the inverse of \(J^\top\).
        rtol: The relative tolerance of linear systems. None: that of `hodiff.solve`, and a
            hundredth of it for second and higher derivatives.
        products: The maximal number of products for a linear system.
        iterations: Take exactly this many steps in each linear system, without a warning.
        restart: How many vectors GMRES keeps, which determines the memory of the backward pass.
        scale: The scale of a Neumann series.
        polish: How many Newton steps to take first. Each squares the error of the solution, and
            changes its value.
        gradient_tol: Warn if \(F(x^*)\) is larger than this times \(J^\top x^*\); None: 1e-3.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `F`.
        kwargs: Keyword arguments for `F`.

    Returns:
        The solution, with the structure and shapes of *x_star*, as for `argmin`.

    Raises:
        InputError: `F` does not return values like *x_star*, or a value is not finite.
        GraphError: The function reaches *x_star* other than through its argument. In the backward
            pass: the system is singular, or it is one derivative more than *order*.

    Warns:
        ConvergenceWarning: *x_star* is not a solution; or, in the backward pass, a linear system
            did not converge.

    Cost:
        The call takes one evaluation (`order + 1` for higher orders) and a product with \(J^\top\).
        The backward pass takes a linear system (a reverse pass for each product) and one pass;
        higher derivatives also take products with *J*, one pass each. Without `restart`,
        a system of up to 64 unknowns is solved by its matrix, and one of up to 256 if it does not
        converge in eight products: one batched pass, if that fits into memory.

    Examples:
        The square root of \(\theta\), whose derivative is \(1 / (2 \sqrt\theta)\):

        >>> import torch, hodiff
        >>> theta = torch.tensor([4.0], requires_grad=True)
        >>> x = hodiff.implicit.root(lambda x: x**2 - theta, torch.tensor([2.0]))
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor([0.2500]),)

    Reference:
        Blondel, M. et al. (2022). Efficient and modular implicit differentiation. NeurIPS.
        arXiv:2105.15183.
    """
    return attached(
        "root", F, x_star, args, kwargs, batch_ndim=batch_ndim, order=order, method=method,
        damping=damping, preconditioner=preconditioner, rtol=rtol, products=products,
        iterations=iterations, restart=restart, scale=scale, polish=polish,
        gradient_tol=gradient_tol, check_independence=check_independence,
    )  # fmt: skip


@overload
def fixed_point(
    g: Function,
    x_star: nn.Module | Selection,
    *,
    method: AnySystem = "gmres",
    **options: Unpack[SolutionOptions],
) -> ByName: ...


@overload
def fixed_point(
    g: Function, x_star: T, *, method: AnySystem = "gmres", **options: Unpack[SolutionOptions]
) -> T: ...


def fixed_point(
    g: Function,
    x_star: Any,
    *,
    batch_ndim: int = 0,
    order: int | None = None,
    method: AnySystem = "gmres",
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    products: int | None = None,
    iterations: int | None = None,
    restart: int | None = None,
    scale: float = 1.0,
    polish: int = 0,
    gradient_tol: float | None = None,
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A fixed point x = g(x, θ) found by any iteration, as a function of everything else in `g`.

    It is the `root` of \(x - g(x)\). The iteration need not converge: a Neumann series diverges if
    the spectral radius of \(\partial g\) is above 1, but GMRES does not.

    Args:
        g: The function; what it returns is like *x_star* (a dict by parameter name for a module).
        x_star: The fixed point: a tensor, a container of tensors, a module, or
            `hodiff.select(module, ...)`.
        batch_ndim: How many leading dimensions index independent problems.
        order: How many derivatives the result has. None: as many as the enclosing hodiff call
            takes, otherwise 1.
        method: `"gmres"`; or `"neumann"`, the first terms of \(\sum_j (\partial g^\top)^j\). With
            `iterations=0` only the first, \(\partial x^* / \partial \theta \approx \partial_\theta
            g\), which is called Jacobian-free.
        damping: Added to \(1 - \partial g\).
        preconditioner: An operator close to the inverse of \((1 - \partial g)^\top\).
        rtol: The relative tolerance of linear systems. None: that of `hodiff.solve`, and a
            hundredth of it for second and higher derivatives.
        products: The maximal number of products for a linear system.
        iterations: Take exactly this many steps in each linear system, without a warning.
        restart: How many vectors GMRES keeps, which determines the memory of the backward pass.
        scale: The scale of a Neumann series.
        polish: How many Newton steps to take first. Each squares the error of the solution, and
            changes its value.
        gradient_tol: Warn if \(x^* - g(x^*)\) is larger than this times its size at zero; None:
            1e-3.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `g`.
        kwargs: Keyword arguments for `g`.

    Returns:
        The solution, with the structure and shapes of *x_star*, as for `argmin`.

    Raises:
        InputError: `g` does not return values like *x_star*, or a value is not finite.
        GraphError: The function reaches *x_star* other than through its argument. In the backward
            pass: the system is singular, or it is one derivative more than *order*.

    Warns:
        ConvergenceWarning: *x_star* is not a solution; or, in the backward pass, a linear system
            did not converge.

    Cost:
        The same as `root`.

    Examples:
        Of \(g(x) = \theta + x / 2\) it is \(2\theta\):

        >>> import torch, hodiff
        >>> theta = torch.tensor([3.0], requires_grad=True)
        >>> x = hodiff.implicit.fixed_point(lambda x: theta + x / 2, torch.tensor([6.0]))
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor([2.]),)

        Of its series \(1 + 1/2 + 1/4 + \dots\), the first two terms:

        >>> x = hodiff.implicit.fixed_point(
        ...     lambda x: theta + x / 2, torch.tensor([6.0]), method="neumann", iterations=1
        ... )
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor([1.5000]),)

    Reference:
        Bai, S., Kolter, J. Z., Koltun, V. (2019). Deep equilibrium models. NeurIPS.
        arXiv:1909.01377. Fung, S. W. et al. (2022). JFB: Jacobian-free backpropagation for implicit
        networks. AAAI. arXiv:2103.12803.
    """
    return attached(
        "fixed_point", g, x_star, args, kwargs, batch_ndim=batch_ndim, order=order, method=method,
        damping=damping, preconditioner=preconditioner, rtol=rtol, products=products,
        iterations=iterations, restart=restart, scale=scale, polish=polish,
        gradient_tol=gradient_tol, check_independence=check_independence,
    )  # fmt: skip


# --- what they share: the residual at a point, its checks, the chain of links ---------------------


Kind = Literal["argmin", "root", "fixed_point"]


def attached(
    kind: Kind,
    f: Callable[..., Any],
    x_star: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    order: int | None,
    **given: Any,
) -> Any:
    """The solution, attached to the graph of everything that `f` depends on."""
    if torch.is_inference_mode_enabled():
        with _settings.recording(), _settings.grad_mode(False):
            return attached(kind, f, x_star, args, kwargs, order=order, **given)
    _call.refuse_stand_ins()
    where, line = Where(x_star, "x_star"), CallSite.now()
    if not callable(f) or isinstance(f, Tensor):
        raise InputError(f"f: got {_arguments.kind(f)}, expected a function, evaluated at x_star.")
    check = _arguments.check_integer
    _arguments.check_option(given["method"], Method if kind == "argmin" else AnySystem, "method")
    order = _call.outer_order() if order is None else check(order, "order", least=1)
    check(given["polish"], "polish", least=0)
    as_float(given["damping"], "damping")
    if check(given["batch_ndim"], "batch_ndim", least=0):
        check_stack(where, None, given["batch_ndim"])
    limit = given["gradient_tol"]
    if limit is not None and not (isinstance(limit, float) and limit == math.inf):
        _arguments.check_number(limit, "gradient_tol", least=0, more=", or None")
    # The residual at the values; and in a differentiable result, with a derivative for each link.
    linked = _call.call(
        f, where, 1, True, args=args, kwargs=kwargs, batch_ndim=given["batch_ndim"],
        check_independence=given["check_independence"],
    )._replace(order=1 + order)  # fmt: skip
    plain = linked._replace(create_graph=False, keep=True, order=2)
    problem = Problem(kind, where, given, order, line)
    values = _values(where)
    for _ in range(given["polish"]):
        values = problem.polished(plain, values)
    if not torch.is_grad_enabled():
        problem.solved(*problem.residual(plain, _leaves(values)), values)
        return where.result(values)
    x = _leaves(values)
    graph, residual = problem.residual(linked, x)
    # Passes of a first derivative free this graph after their linear system: it serves for both.
    first = (graph.kept(), residual) if order == 1 else problem.residual(plain, _leaves(values))
    chain = Chain(problem.solved(*first, values), values)
    survey = _nodes.survey([part for part in residual if part.requires_grad])
    if survey.leaf_ids() <= set(map(id, graph.leaves)):
        return where.result(values)  # a frozen network: as PyTorch's layers, without a graph
    x = chain.link(1, values, residual)
    for number in range(2, order + 1):
        _, residual = problem.residual(linked, x)
        x = chain.link(number, x, problem.held(residual, x, values))
    _nodes.mark_results(x)
    return where.result(x)


def _leaves(values: Leaves) -> Leaves:
    return [value.clone().requires_grad_() for value in values]


def _values(where: Where) -> Leaves:
    """Copies of the solution's tensors, checked to be numbers."""
    for name, tensor in zip(where.names, where.tensors, strict=True):
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} has entries that are not finite, so it is not a solution.")
        _call.refuse_tangent(tensor, name)
    return [tensor.detach().clone() for tensor in where.tensors]


class Problem:
    """The residual whose zero is the solution: a gradient, F(x), or x - g(x)."""

    def __init__(self, kind: Kind, where: Where, given: Any, order: int, line: CallSite) -> None:
        self.kind: Kind = kind
        # Each evaluation draws what the first one drew.
        self._random = _settings.RandomState(where.tensors[0].device)
        self._given = given
        self._order = order
        self._line = line

    def residual(self, request: _call.Call, at: Sequence[Tensor]) -> tuple[OutputGraph, Leaves]:
        """The residual at some leaves, and its graph."""
        self._random.restore()
        with OutputGraph(request, at) as graph:
            if self.kind == "argmin":
                residual = _reverse.gradient(graph, differentiated=True)
            else:
                residual = self._like_x(graph)
            for part in residual:
                _call.refuse_tangent(part, WHAT[self.kind])
            if self.kind == "fixed_point":
                residual = [
                    leaf - output for leaf, output in zip(graph.leaves, residual, strict=True)
                ]
            return graph, residual

    def held(self, residual: Leaves, x: Leaves, values: Leaves) -> Leaves:
        """The residual of the solution that `damping` holds near where it is."""
        damping = self._given["damping"]
        if not damping:
            return residual
        return [
            r + damping * (part - value) for r, part, value in zip(residual, x, values, strict=True)
        ]

    def _like_x(self, graph: OutputGraph) -> Leaves:
        """The result of `f`, in the order of the point's leaves."""
        tree, name = graph.call.where.tree, "F(x)" if self.kind == "root" else "g(x)"
        graph.tensors()
        different = _tree.difference(tree, _tree.flatten(graph.outputs)[2], name)
        outputs = [] if different else _tree.leaves_like(tree, graph.outputs)
        for leaf, output, where in zip(graph.leaves, outputs, graph.call.where.names, strict=False):
            if output.shape != leaf.shape or output.dtype != leaf.dtype:
                got, expected = (f"{part.dtype}, {tuple(part.shape)}" for part in (output, leaf))
                different = f"for {where}, f returned {got}, expected {expected}"
        if different:
            raise InputError(
                f"f must return the structure and shapes of x_star (for a module, a dict by "
                f"parameter name), one equation per unknown: {different}."
            )
        return outputs

    def _system(self, graph: OutputGraph, residual: Leaves) -> ImplicitSystem:
        given = self._given
        return ImplicitSystem(
            Transposed(graph, residual, symmetric=self.kind == "argmin"),
            self.kind,
            self._line,
            solver=functools.partial(
                attempt,
                method=given["method"],
                damping=given["damping"],
                products=given["products"],
                iterations=given["iterations"],
                restart=given["restart"],
                scale=given["scale"],
                soon=0,  # each product is a pass, and all of a small matrix are one
            ),
            preconditioner=given["preconditioner"],
            rtol=given["rtol"],
            steps=given["iterations"] is not None,
            order=self._order,
            fatal=NO_DERIVATIVE,
        )

    def polished(self, plain: _call.Call, values: Leaves) -> Leaves:
        """A step of Newton's method."""
        graph, residual = self.residual(plain, _leaves(values))
        step = self._system(graph, residual).solved(residual, transposed=False)
        pairs = zip(values, step, strict=True)  # where a sample has no step, it stays
        return [torch.where(part.isnan(), value, value - part) for value, part in pairs]

    def solved(self, graph: OutputGraph, residual: Leaves, values: Leaves) -> ImplicitSystem:
        """The linear system at a point. Warn where that is not a solution."""
        system = self._system(graph, residual)
        self._check(system, values, [part.detach() for part in residual])
        return system

    def _check(self, system: ImplicitSystem, values: Leaves, residual: Leaves) -> None:
        """Warn where derivatives are off by about as much as the residual is, relatively."""
        space = system.operator._domain
        r, x = system.vectors(residual), space.join(values, None)
        sizes = listed(norms(r))
        if not any(sizes):
            return
        if not all(map(math.isfinite, sizes)) and not bool(r.isfinite().all()):
            lost = told(~r.isfinite().all(-1).reshape(space.batch))
            raise InputError(f"{self.kind}: {WHAT[self.kind]} is not finite at x_star{lost}.")
        x = torch.where(x.any(-1, keepdim=True), x, 1)
        with _settings.grad_mode(False):
            image = system.operator._times(x)  # of a linear problem, the residual at zero
        scales = listed(norms(image.reshape(r.shape)))
        limit = self._given["gradient_tol"]
        if limit is None:
            limit = 1e-3 if torch.finfo(r.dtype).bits > 16 else 0.1
        pairs = [*zip(sizes, scales, strict=True)]
        far = torch.tensor([size > limit * scale for size, scale in pairs], device="cpu")
        if bool(far.any()):
            off = max(
                size / scale if scale else math.inf for size, scale in pairs if size > limit * scale
            )
            self._line.warn(
                f"{self.kind}: x_star is not the solution{told(far.reshape(space.batch))}: "
                f"{WHAT[self.kind]} has {off:.2g} times its size at zero, and the relative error "
                f"of derivatives is about that or larger. Solve more accurately, take a Newton "
                f"step with polish=1, or accept the error with gradient_tol=. (argmin, root and "
                f"fixed_point solve different equations.)"
            )


WHAT: dict[Kind, str] = {"argmin": "the gradient of f", "root": "F(x)", "fixed_point": "x - g(x)"}
NO_DERIVATIVE: dict[Status, str] = {
    "negative curvature": (
        "the second derivative of f at x_star has a direction of negative or zero curvature, "
        "so x_star is not an isolated minimum: a saddle point (method='minres' differentiates it "
        "as a stationary point), or a flat direction (damping= adds to the curvature)."
    ),
    "stagnation": (
        "the linear system of the derivative is singular: the solution is not isolated, "
        "so that its derivative does not exist. Use damping=, or add a term to f that makes the "
        "solution unique."
    ),
}
"""Why a linear system of the derivative has no solution, by how its solver ended."""


# --- the transposed Jacobian of a residual at a solution, as an operator --------------------------


@final
class Transposed(LinearOperator):
    """Jᵀ at a solution, by reverse passes through the graph of the residual;
    J itself by the derivative of those.
    """

    def __init__(self, graph: OutputGraph, residual: Leaves, *, symmetric: bool) -> None:
        super().__init__()
        self._graph = graph
        self._residual = residual
        self._symmetric = symmetric
        self._space = graph.call.where.space().side(graph.call.batch_ndim)
        self._linear: tuple[Leaves, Leaves] | None = None
        survey = _nodes.survey([part for part in residual if part.requires_grad])
        self._calls_back = _nodes.runs_hooks(survey)
        self._together = _reverse.auto_chunk(survey, graph.leaves)

    @property
    def symmetric(self) -> bool:
        """Whether J is the Hessian of a function."""
        return self._symmetric

    def ready(self) -> AbstractContextManager[Any]:
        """The state in which passes may run."""
        return self._graph.resumed() if self._calls_back else _settings.recording()

    def _chunk(self, count: int) -> int:
        return min(count, self._together)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        with self.ready():
            return _reverse.products(self._graph, self._residual, parts, count, chunk_size=None)

    def _times(self, flat: Tensor) -> Tensor:
        """A product with the transpose; its result is read alone,
        and need not be memory of its own.
        """
        self._count(1)
        with self.ready():
            parts = _reverse.writable(self._graph, self._space.split(flat))
            return self._space.join(_reverse.vjp(self._graph, self._residual, parts), None)

    def _pull(self, parts: Leaves, count: int | None) -> Leaves:
        """The product J v, of the matrix that is not transposed."""
        with self.ready():
            if self._linear is None:
                cotangents = [torch.ones_like(part, requires_grad=True) for part in self._residual]
                self._linear = (
                    cotangents,
                    _reverse.transposed_product(self._graph, self._residual, cotangents),
                )
            cotangents, pulled = self._linear
            return _reverse.products(
                self._graph, pulled, parts, count, chunk_size=None, inputs=cotangents
            )

    def _about(self) -> str:
        return "at a solution"


_compiled_callers.publish(vars())
__getattr__, __dir__ = _compiled_callers.names(vars(), {})
