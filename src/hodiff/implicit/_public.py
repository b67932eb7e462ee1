"""`argmin`, `root`, `fixed_point`: solutions that any solver found, attached to the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

from torch import Tensor, nn

from hodiff._core._options import check_option
from hodiff._core._where import Selection
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._solve import Method
from hodiff.implicit._solution import Given, attached

V = TypeVar("V")
ByName = dict[str, Tensor]
Function = Callable[..., Any]


class Options(TypedDict, total=False):
    """What overloads pass on; at run time signatures are spelled out."""

    order: int | None
    damping: float
    preconditioner: LinearOperator | None
    rtol: float | None
    products: int | None
    polish: int
    gradient_tol: float | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


@overload
def argmin(
    f: Function, x_star: nn.Module | Selection, *, method: Method = "cg", **options: Unpack[Options]
) -> ByName: ...


@overload
def argmin(f: Function, x_star: V, *, method: Method = "cg", **options: Unpack[Options]) -> V: ...


def argmin(
    f: Function,
    x_star: Any,
    *,
    order: int | None = None,
    method: Method = "cg",
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    products: int | None = None,
    polish: int = 0,
    gradient_tol: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A minimum that any solver found, as a function of everything that `f` depends on besides.

    With \(\nabla_x f(x^*, \theta) = 0\), the implicit function theorem gives
    \(\partial x^* / \partial \theta = -H^{-1}\, \partial_\theta \nabla_x f\), with the Hessian *H* at the solution.
    How the solution was found does not matter, and is not part of the derivative: neither the steps of the solver nor
    where it began.

    Args:
        f: The function that was minimised, smooth at the minimum: `f(x)` returns one element. What it reaches
            besides (closures, arguments, other modules) is what the solution can be differentiated by.
        x_star: The minimum: a tensor, a container of tensors, a module (`f` receives the module), or
            `hodiff.select(module, ...)`. Copied; neither it nor its history is changed.
        order: How many derivatives the result has. None: as many as the enclosing hodiff call takes; else 1. One
            more raises.
        method: `"cg"`; `"minres"` where *H* is indefinite (a stationary point that is no minimum); `"gmres"`.
        damping: Added to *H*: another derivative, of a solution that is held near where it is (by the gradient of
            half *damping* times its squared distance from there).
        preconditioner: An operator close to the inverse of *H*, as for `hodiff.solve`.
        rtol: The tolerance of linear systems, relative to their right-hand side. None: that of `hodiff.solve`;
            for second and higher derivatives a hundredth of it.
        products: How many products a linear system may take, as for `hodiff.solve`.
        polish: So many steps of Newton's method before; each squares the error of the solution. The values change.
        gradient_tol: Warn where the gradient at *x_star* is larger than this times its size at zero, as \(H x^*\)
            measures it; None: 1e-3.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The solution, with the structure and shapes of *x_star* (a dict by parameter name for a module), its values bit
        for bit (unless polished), and a graph. Under `no_grad` it is detached.

    Raises:
        InputError: Values that are not finite; or as for `hodiff.grad`.
        GraphError: `f` depends on nothing that requires grad, or on *x_star* past its argument. In the backward pass:
            *H* is singular or, with conjugate gradients, indefinite; or it is one derivative more than *order*.

    Warns:
        ConvergenceWarning: *x_star* is not a solution; in the backward pass, a linear system did not converge. It
            names the line of this call.

    Cost:
        Here one gradient (`order + 1` for higher orders), and a product with *H*. In the backward pass a linear system
        (a reverse pass for each product) and one pass; with a product with the Hessian, three systems in all.
        Memory: as many graphs of a gradient, whatever the solver took.

    Examples:
        Ridge regression of one number: \(x = b / (1 + \theta)\), with the derivative \(-b / (1 + \theta)^2\):

        >>> import torch, hodiff
        >>> theta = torch.tensor(1.0, requires_grad=True)
        >>> f = lambda x: ((x - 8.0) ** 2 + theta * x**2).sum()
        >>> x = hodiff.implicit.argmin(f, torch.tensor([4.0]))
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor(-2.),)

    Reference:
        Blondel, M. et al. (2022). Efficient and modular implicit differentiation. NeurIPS. arXiv:2105.15183.
        Lorraine, J., Vicol, P., Duvenaud, D. (2020). Optimizing millions of hyperparameters by implicit
        differentiation. AISTATS. arXiv:1911.02590.
    """
    check_option(method, Method, "method")
    given = Given(order, method, damping, preconditioner, rtol, products, polish, gradient_tol)
    return attached("argmin", f, x_star, args, kwargs, given)


@overload
def root(F: Function, x_star: nn.Module | Selection, **options: Unpack[Options]) -> ByName: ...


@overload
def root(F: Function, x_star: V, **options: Unpack[Options]) -> V: ...


def root(
    F: Function,
    x_star: Any,
    *,
    order: int | None = None,
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    products: int | None = None,
    polish: int = 0,
    gradient_tol: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A zero of \(F(x, \theta)\) that any solver found, as a function of everything that `F` depends on besides.

    \(\partial x^* / \partial \theta = -J^{-1}\, \partial_\theta F\), with the Jacobian *J* at the solution; by
    restarted GMRES, on products with \(J^\top\). The conditions of a constrained minimum are such an *F*.

    Args:
        F: The function, with as many equations as unknowns: what it returns is like *x_star* (a dict by parameter
            name for a module).
        x_star: The zero, as for `argmin`.
        order: How many derivatives the result has, as for `argmin`.
        damping: Added to *J*.
        preconditioner: An operator close to the inverse of \(J^\top\).
        rtol: The tolerance of linear systems, as for `argmin`.
        products: How many products a linear system may take.
        polish: So many steps of Newton's method before, as for `argmin`.
        gradient_tol: Warn where \(F(x^*)\) is larger than this times \(J^\top x^*\); None: 1e-3.
        args: Further positional arguments for `F`.
        kwargs: Keyword arguments for `F`.

    Returns:
        The solution, with the structure and shapes of *x_star*, as for `argmin`.

    Raises:
        InputError: What `F` returns is not like *x_star*; or as for `argmin`.
        GraphError: As for `argmin`.

    Warns:
        ConvergenceWarning: As for `argmin`.

    Cost:
        Here one evaluation (`order + 1` for higher orders), and a product with \(J^\top\). In the backward pass a
        linear system (a reverse pass for each product) and one pass; products with *J*, which higher derivatives take,
        have one as well.

    Examples:
        The square root of \(\theta\), whose derivative is \(1 / (2 \sqrt\theta)\):

        >>> import torch, hodiff
        >>> theta = torch.tensor([4.0], requires_grad=True)
        >>> x = hodiff.implicit.root(lambda x: x**2 - theta, torch.tensor([2.0]))
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor([0.2500]),)

    Reference:
        Blondel, M. et al. (2022). Efficient and modular implicit differentiation. NeurIPS. arXiv:2105.15183.
    """
    given = Given(order, "gmres", damping, preconditioner, rtol, products, polish, gradient_tol)
    return attached("root", F, x_star, args, kwargs, given)


@overload
def fixed_point(g: Function, x_star: nn.Module | Selection, **options: Unpack[Options]) -> ByName: ...


@overload
def fixed_point(g: Function, x_star: V, **options: Unpack[Options]) -> V: ...


def fixed_point(
    g: Function,
    x_star: Any,
    *,
    order: int | None = None,
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    products: int | None = None,
    polish: int = 0,
    gradient_tol: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A fixed point \(x^* = g(x^*, \theta)\) that any iteration found, as a function of what `g` depends on besides.

    It is the `root` of \(x - g(x)\). The iteration itself need not converge: a Neumann series in its place diverges
    where the spectral radius of \(\partial g\) is above 1, and this does not.

    Args:
        g: The function; what it returns is like *x_star* (a dict by parameter name for a module).
        x_star: The fixed point, as for `argmin`.
        order: How many derivatives the result has, as for `argmin`.
        damping: Added to \(1 - \partial g\).
        preconditioner: An operator close to the inverse of \((1 - \partial g)^\top\).
        rtol: The tolerance of linear systems, as for `argmin`.
        products: How many products a linear system may take.
        polish: So many steps of Newton's method before, as for `argmin`.
        gradient_tol: Warn where \(x^* - g(x^*)\) is larger than this times its size at zero; None: 1e-3.
        args: Further positional arguments for `g`.
        kwargs: Keyword arguments for `g`.

    Returns:
        The solution, with the structure and shapes of *x_star*, as for `argmin`.

    Raises:
        InputError: What `g` returns is not like *x_star*; or as for `argmin`.
        GraphError: As for `argmin`.

    Warns:
        ConvergenceWarning: As for `argmin`.

    Cost:
        As for `root`.

    Examples:
        Of \(g(x) = \theta + x / 2\) it is \(2\theta\):

        >>> import torch, hodiff
        >>> theta = torch.tensor([3.0], requires_grad=True)
        >>> x = hodiff.implicit.fixed_point(lambda x: theta + x / 2, torch.tensor([6.0]))
        >>> torch.autograd.grad(x.sum(), theta)
        (tensor([2.]),)

    Reference:
        Bai, S., Kolter, J. Z., Koltun, V. (2019). Deep equilibrium models. NeurIPS. arXiv:1909.01377.
    """
    given = Given(order, "gmres", damping, preconditioner, rtol, products, polish, gradient_tol)
    return attached("fixed_point", g, x_star, args, kwargs, given)
