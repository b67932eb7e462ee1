"""`solve`: linear systems by conjugate gradients or MINRES, never unconverged without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import check_rtol, check_square, default_rtol, warn_not_converged
from hodiff.curvature._records import SolveRecord, Status
from hodiff.curvature._space import Vectors, sum_dtype
from hodiff.errors import InputError

Method = Literal["cg", "minres"]
Product = Callable[[Tensor], Tensor]
V = TypeVar("V")


class Run(NamedTuple):
    """Where a run of a method ended."""

    x: Tensor
    status: Status  # "converged" is by its own recurrence
    direction: Tensor | None = None


def solve(
    operator: LinearOperator,
    b: V,
    *,
    method: Method = "cg",
    damping: float = 0.0,
    preconditioner: LinearOperator | None = None,
    start: Any = None,
    rtol: float | None = None,
    products: int | None = None,
) -> SolveRecord[V]:
    r"""The solution of \((A + \lambda I)\, x = b\) for a symmetric operator.

    Conjugate gradients are for positive definite operators. They stop where they meet a direction
    *d* with \(d^\top (A + \lambda I)\, d \le 0\), up to rounding, say so, and return the best solution
    until then. MINRES is for indefinite ones.

    Args:
        operator: A symmetric operator.
        b: The right-hand side: like the point, or flat `(D,)`.
        method: `"cg"` or `"minres"`.
        damping: The \(\lambda\) that is added.
        preconditioner: A positive definite operator close to the inverse of \(A + \lambda I\), for
            example `hodiff.MatrixOperator(1 / (d + damping))` with a diagonal *d*.
        start: Where to begin, like *b*; None is zero.
        rtol: The solution has converged when \(\lVert b - (A + \lambda I) x \rVert \le\) `rtol`
            \(\lVert b \rVert\). None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half (5e-2 in bfloat16).
        products: How many products to spend at most; None: `10 D`, at most 1000.

    Returns:
        A record: `value` in the structure and shape of *b*; `residual`, relative and true, from a
        product at the end; `converged`; `products`; `status`; and the `direction` of negative curvature.

    Raises:
        InputError: The operator is not symmetric, *b* does not fit, or the method is unknown.

    Warns:
        ConvergenceWarning: The solution has not converged; the message says why, and what to do.

    Cost:
        A product per iteration, and one for the residual. Memory: a few vectors.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[4.0, 1.0], [1.0, 3.0]]))
        >>> found = hodiff.solve(A, torch.tensor([5.0, 4.0]))
        >>> found.value.round(decimals=4), found.status, found.products
        (tensor([1., 1.]), 'converged', 3)

    Reference:
        Hestenes, M. R., Stiefel, E. (1952). J. Res. Nat. Bur. Standards 49. doi:10.6028/jres.049.044.
        Paige, C. C., Saunders, M. A. (1975). SIAM J. Numer. Anal. 12(4). doi:10.1137/0712047.
    """
    check_square(operator, "solve", symmetric=True)
    if method not in get_args(Method):
        raise InputError(f"method: got {method!r}, expected {' or '.join(map(repr, get_args(Method)))}.")
    check_rtol(rtol)
    _check_damping(damping)
    right, given = _vector(operator, b, "b")
    unit = float(right.abs().max()) or 1.0  # squares of very small or large entries have no place in their dtype
    right = right / unit
    x = torch.zeros_like(right) if start is None else _vector(operator, start, "start")[0] / unit
    size = operator.shape[0]
    limit = min(10 * size + 10, 1000) if products is None else _checks.check_integer(products, "products", least=2)
    if rtol is None:
        rtol = default_rtol(operator.dtype)
    before = operator.products
    inverse, eps = _preconditioning(preconditioner, operator), torch.finfo(operator.dtype).eps
    x, residual, status, direction = _iterate(
        (conjugate_gradients if method == "cg" else minres), _damped(operator, damping), inverse, right, x, rtol, eps,
        lambda: before + limit - operator.products,
    )  # fmt: skip
    converged = status == "converged"
    if not converged:
        warn_not_converged(_explanation(status, residual, rtol, operator.products - before))
    return SolveRecord(
        value=_spelled(operator, x * unit, given),
        residual=residual,
        converged=converged,
        products=operator.products - before,
        status=status,
        direction=None if direction is None else _spelled(operator, direction, given),
    )


def _vector(operator: LinearOperator, b: Any, name: str) -> tuple[Tensor, Vectors]:
    """One vector, flat and in the precision of sums, and how it was spelled."""
    vectors = operator._domain.parse(b, name)
    if vectors.number is not None:
        raise InputError(f"{name}: holds {vectors.number} vectors; solve takes one right-hand side at a time.")
    flat = operator._domain.join([part.detach() for part in vectors.parts], None)
    if not torch.isfinite(flat).all():
        raise InputError(f"{name}: has entries that are not finite.")
    return flat.to(sum_dtype(flat.dtype)), vectors


def _spelled(operator: LinearOperator, x: Tensor, given: Vectors) -> Any:
    """A flat vector as `given` was spelled."""
    x = x.to(operator.dtype)
    return x if given.kind == "flat" else operator._domain.result(operator._domain.split(x), given.tree)


def _check_damping(damping: Any) -> None:
    if isinstance(damping, bool) or not isinstance(damping, (int, float)) or not math.isfinite(damping):
        raise InputError(f"damping: got {damping!r}, expected a number.")


def _damped(operator: LinearOperator, damping: float) -> Product:
    product = _rounded(operator)
    return (lambda v: torch.add(product(v), v, alpha=damping)) if damping else product


def _rounded(operator: LinearOperator) -> Product:
    """Its product with vectors of the precision of sums; it rounds as the operator does."""
    return lambda v: (operator @ v.to(operator.dtype)).to(v.dtype)


def _preconditioning(preconditioner: Any, operator: LinearOperator) -> Product:
    if preconditioner is None:
        return lambda r: r
    check_square(preconditioner, "preconditioner", symmetric=True)
    if preconditioner.shape != operator.shape or preconditioner.dtype != operator.dtype:
        raise InputError(
            f"preconditioner: is {tuple(preconditioner.shape)}, {preconditioner.dtype}; the operator is "
            f"{tuple(operator.shape)}, {operator.dtype}."
        )
    return _rounded(preconditioner)


def _iterate(
    method: Callable[..., Run],
    product: Product,
    inverse: Product,
    b: Tensor,
    x: Tensor,
    rtol: float,
    eps: float,
    left: Callable[[], int],
) -> tuple[Tensor, float, Status, Tensor | None]:
    """Run a method, look at the true residual, and begin anew from there while that helps.

    Rounding makes the residual of a recurrence drift from the true one; a fresh start cures it.
    """
    size = float(b.norm())
    if size == 0:
        return torch.zeros_like(b), 0.0, "converged", None
    r = b - product(x) if bool(x.any()) else b.clone()
    residual = float(r.norm()) / size
    while residual > rtol:
        if left() < 2:
            return x, residual, "budget", None
        # The last product is kept for the true residual.
        run = method(product, inverse, r, 0.5 * rtol * size, eps, lambda: left() - 1)
        r = b - product(x + run.x)
        before, residual = residual, float(r.norm()) / size
        if residual < before:
            x = x + run.x
        if residual <= rtol:
            break
        if run.status == "negative curvature":
            return x, residual, run.status, run.direction
        if not residual < 0.5 * before:
            if not residual < before:
                residual = before
            return x, residual, "budget" if left() < 2 else "stagnation", None
    return x, residual, "converged", None


def _explanation(status: Status, residual: float, rtol: float, products: int) -> str:
    advice = {
        "negative curvature": (
            "conjugate gradients met a direction of negative or zero curvature: the operator is not positive definite. "
            "Add damping, use method='minres', or take hodiff.GaussNewtonOperator"
        ),
        "budget": "the products ran out. Allow more, add damping, or give a preconditioner",
        "stagnation": (
            "the residual no longer falls: the system is singular (b lies partly outside its range) or rounding allows "
            "no better. Add damping, or use double precision"
        ),
    }[status]
    return f"solve: after {products} products the relative residual is {residual:.2g} (rtol={rtol:g}); {advice}."


def conjugate_gradients(
    product: Product, inverse: Product, b: Tensor, tolerance: float, eps: float, left: Callable[[], int]
) -> Run:
    """A x = b from zero, until |r| <= tolerance; `d'Ad <= 0` ends it. Products round by `eps`."""
    x, r = torch.zeros_like(b), b.clone()
    z = inverse(r)
    d, rz = z.clone(), _dot(r, z)
    if rz <= 0:
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")
    largest = 0.0
    best, least = x, float(r.norm())
    while left() > 0:
        image = product(d)
        curvature, length = _dot(d, image), float(d.norm())
        # Along a null vector the curvature is what rounding leaves of the largest, and steps towards it are huge.
        largest = max(largest, float(image.norm()) / length)
        if not curvature > eps * largest * length**2:
            return Run(best, "negative curvature", d)
        step = rz / curvature
        x = torch.add(x, d, alpha=step)
        r = torch.add(r, image, alpha=-step)
        size = float(r.norm())
        if size <= tolerance:
            return Run(x, "converged")
        if size < least:
            best, least = x, size
        z = inverse(r)
        before, rz = rz, _dot(r, z)
        if rz <= 0:
            return Run(x, "stagnation")
        d = torch.add(z, d, alpha=rz / before)
    return Run(x, "budget")


def minres(product: Product, inverse: Product, b: Tensor, tolerance: float, eps: float, left: Callable[[], int]) -> Run:
    """A x = b from zero, least |r| in the Krylov space at each step; the Lanczos matrix is reduced by rotations."""
    x = torch.zeros_like(b)
    r1 = r2 = b.clone()
    y = inverse(b)
    beta = _dot(b, y)
    if beta <= 0:
        raise InputError("preconditioner: is not positive definite (r'Mr <= 0 for the first residual r).")
    beta = first = beta**0.5
    phi, beta_old, epsilon, dbar, cs, sn = beta, 0.0, 0.0, 0.0, -1.0, 0.0
    w, w_old = torch.zeros_like(b), torch.zeros_like(b)
    # phi is the residual in the preconditioner's norm; the caller looks at the true one.
    target, scale = tolerance * first / float(b.norm()), 0.0
    while left() > 0:
        v = y / beta
        y = product(v)
        if beta_old:
            y = torch.add(y, r1, alpha=-beta / beta_old)
        alpha = _dot(v, y)
        y = torch.add(y, r2, alpha=-alpha / beta)
        r1, r2 = r2, y
        y = inverse(r2)
        beta_old, beta = beta, max(_dot(r2, y), 0.0) ** 0.5
        scale = max(scale, abs(alpha), beta)
        epsilon_old, delta = epsilon, cs * dbar + sn * alpha
        gbar, epsilon, dbar = sn * dbar - cs * alpha, sn * beta, -cs * beta
        gamma = max((gbar**2 + beta**2) ** 0.5, eps * scale * 1e-3, 1e-300)
        cs, sn = gbar / gamma, beta / gamma
        step, phi = cs * phi, sn * phi
        w_new = (v - epsilon_old * w_old - delta * w) / gamma
        w_old, w = w, w_new
        x = torch.add(x, w, alpha=step)
        if abs(phi) <= target:
            return Run(x, "converged")
        # The Krylov space is exhausted; or x, along a null vector, has grown so that A x rounds like the residual.
        if beta <= 10 * eps * scale or eps * scale * float(x.norm()) > 0.1 * abs(phi):
            return Run(x, "stagnation")
    return Run(x, "budget")


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))
