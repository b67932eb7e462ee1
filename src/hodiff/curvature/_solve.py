"""`solve`: linear systems, never unconverged without a word; `nystrom`, a preconditioner for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _nodes, _reverse, _settings, _tree, _vectors
from hodiff._core._vectors import Leaves, Space, Vectors, sum_dtype
from hodiff.curvature._krylov import Product, Solution, conjugate_gradients, gmres, minres, neumann
from hodiff.curvature._links import CallSite, Chain, ImplicitSystem
from hodiff.curvature._operator import LinearOperator, SymmetricOperator, as_given, normal
from hodiff.curvature._probes import (
    Callback,
    EstimatorProgress,
    check_finite,
    check_rtol,
    check_square,
    default_rtol,
    flat_product,
    is_recorded,
    kept_vectors,
    power_of_two,
    refuse_live,
    source,
    warn_not_converged,
)
from hodiff.curvature._records import SolveRecord
from hodiff.errors import InputError

Method = Literal["cg", "minres", "gmres", "neumann"]
V = TypeVar("V")


def solve(
    operator: LinearOperator,
    b: V,
    *,
    create_graph: bool | None = None,
    method: Method = "cg",
    damping: float | Tensor = 0.0,
    preconditioner: LinearOperator | None = None,
    start: Any = None,
    restart: int | None = None,
    iterations: int | None = None,
    scale: float = 1.0,
    rtol: float | None = None,
    products: int | None = None,
    callback: Callback | None = None,
    progress: bool = False,
) -> SolveRecord[V]:
    r"""The solution of the linear system \((A + \lambda I)\, x = b\).

    Conjugate gradients are for positive definite operators. They stop where they meet a direction
    *d* with \(d^\top (A + \lambda I)\, d \le 0\), up to rounding, say so, and return the best solution
    until then. MINRES is for symmetric indefinite operators, GMRES for those that are not symmetric.

    Args:
        operator: A symmetric operator; for GMRES, a square one.
        b: The right-hand side: like the point, or flat `(D,)`.
        create_graph: Whether `value` can be differentiated, once and twice, in *b*, `damping`, and all that the
            operator is made of: the matrix of a `hodiff.MatrixOperator`, what the function of a
            `hodiff.HessianOperator` uses; also of their blocks, sums, products and multiples. None: only inside the
            function of another hodiff call, as often as that takes; elsewhere it warns of a constant that is made of
            something that requires grad, and False says that a constant is meant.
        method: `"cg"`, `"minres"` or `"gmres"`; or `"neumann"`, the first terms of the series
            \(\sum_j (I - A / s)^j\, b / s\), inexact on purpose: it goes with `iterations`, and needs all eigenvalues
            of \(A / s\) within the unit circle around 1.
        damping: The \(\lambda\) that is added.
        preconditioner: An operator close to the inverse of \(A + \lambda I\): `hodiff.nystrom(A, rank, damping)`,
            or `hodiff.MatrixOperator(1 / (d + damping))` with a diagonal *d*. Positive definite, except for GMRES,
            where it stands on the right.
        start: Where to begin, like *b*; None is zero.
        restart: For GMRES, how many vectors to keep before it begins anew; None: as many as fit into 8 MiB,
            between 30 and 300.
        iterations: Take exactly so many steps, of one product each, whatever they reach: a step of TRPO, an inner
            solver of fixed length. Fewer only where nothing but rounding is left of the residual. Of a Neumann series,
            0 is its first term, \(b / s\). With `create_graph` the backward pass takes as many; its derivative is then
            as inexact as the solution.
        scale: The \(s\) of a Neumann series: at least half the largest eigenvalue, as LiSSA's scale.
        rtol: The solution has converged when \(\lVert b - (A + \lambda I) x \rVert \le\) `rtol`
            \(\lVert b \rVert\). None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half (5e-2 in bfloat16).
        products: How many products to spend at most; None: `10 D`, at most 1000.
        callback: A function that is given the record as it stands after each step: its `value` is the iterate.
        progress: Whether to show a bar over the products.

    Returns:
        A record: `value` in the structure and shape of *b*; `residual`, relative and true, from a
        product at the end (with `iterations`, by the method's own recurrence where it has one); `converged`,
        None where `iterations` were asked for; `products`; `status`; and the `direction` of negative curvature.

    Raises:
        InputError: The operator is not symmetric (not square, for GMRES), *b* does not fit, the method is unknown,
            or `iterations` go with `rtol` or `products`.

    Warns:
        ConvergenceWarning: The solution has not converged; the message says why, and what to do. With
            `iterations`: only where the steps could not be taken.
            In a backward pass it names the line of this call.
        HodiffWarning: The solution is detached, although the operator or *b* requires grad (see `create_graph`).

    Cost:
        A product per iteration, and one for the residual. Memory: a few vectors; for GMRES, `restart` of them.
        With `create_graph`, two differentiable products more (of a Hessian an evaluation and two passes each), and in
        the backward pass one more system with the transpose, two for a second derivative, to a hundredth of the
        tolerance: \(\bar b = A^{-\top} \bar x,\ \bar A = -\bar b\, x^\top\).

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[4.0, 1.0], [1.0, 3.0]]))
        >>> found = hodiff.solve(A, torch.tensor([5.0, 4.0]))
        >>> found.value.round(decimals=4), found.status, found.products
        (tensor([1., 1.]), 'converged', 3)
        >>> turn = hodiff.MatrixOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> hodiff.solve(turn, torch.tensor([1.0, 2.0]), method="gmres").value.round(decimals=4)
        tensor([ 2., -1.])

        The derivative of \(b / a\) by *a* is \(-b / a^2\):

        >>> a = torch.tensor([2.0], requires_grad=True)
        >>> x = hodiff.solve(hodiff.MatrixOperator(a), torch.tensor([12.0]), create_graph=True).value
        >>> torch.autograd.grad(x.sum(), a)
        (tensor([-3.]),)

    Reference:
        Hestenes, M. R., Stiefel, E. (1952). J. Res. Nat. Bur. Standards 49. doi:10.6028/jres.049.044.
        Paige, C. C., Saunders, M. A. (1975). SIAM J. Numer. Anal. 12(4). doi:10.1137/0712047.
        Saad, Y., Schultz, M. H. (1986). SIAM J. Sci. Stat. Comput. 7(3). doi:10.1137/0907058.
    """
    inexact = {} if iterations is None else {"start": start, "preconditioner": preconditioner}
    recorded = is_recorded("solve", operator, create_graph, b=b, damping=damping, **inexact)
    if recorded:
        refuse_live("a solution of so many iterations is not differentiated by it", **inexact)
    solver = functools.partial(
        attempt,
        method=method,
        damping=as_float(damping, "damping"),
        restart=restart,
        iterations=iterations,
        scale=scale,
        products=products,
    )
    record, trouble = solver(
        operator, b, preconditioner=preconditioner, start=start, rtol=rtol, callback=callback, progress=progress
    )
    if trouble:
        warn_not_converged(trouble)
    if not recorded:
        return record
    system = ImplicitSystem(
        operator._fixed().T,
        "solve",
        CallSite.now(),
        solver=solver,
        preconditioner=None if preconditioner is None else preconditioner.T,
        rtol=rtol,
        order=max(2, _call.outer_order()),
        steps=iterations is not None,
    )
    return replace(record, value=_linked(operator, b, record.value, damping, system))


def _linked(operator: LinearOperator, b: Any, value: Any, damping: float | Tensor, system: ImplicitSystem) -> Any:
    """The solution as a function of the right-hand side, of the damping, and of what the operator is made of."""
    domain = operator._domain
    with _settings.recording():
        given = domain.parse(b, "b")
        right, flat = normal(domain.join(given.parts, None)), normal(operator.flatten(value))
        before = domain.split(flat)
        chain = Chain(system, before)
        for number in range(1, system.order + 1):
            residual = operator._recorded_rows(flat[None])[0] + damping * flat - right
            before = chain.link(number, before, domain.split(residual))
            flat = domain.join(before, None)
        spelled = _spelled(operator, flat, given)
    _nodes.mark_results([part for part in _tree.flatten(spelled)[0] if isinstance(part, Tensor)])
    return spelled


def attempt(
    operator: LinearOperator,
    b: V,
    *,
    method: Method,
    damping: float,
    preconditioner: LinearOperator | None,
    rtol: float | None,
    products: int | None,
    start: Any = None,
    restart: int | None = None,
    iterations: int | None = None,
    scale: float = 1.0,
    callback: Callback | None = None,
    progress: bool = False,
) -> tuple[SolveRecord[V], str | None]:
    """`solve`, and in words why it has not converged, for who has something else to say than a warning."""
    _arguments.check_option(method, Method, "method")
    operator = check_square(operator, "solve", symmetric=method in ("cg", "minres"), instead="method='gmres'")
    check_rtol(rtol)
    as_float(damping, "damping")
    rtol, limit = _limits(operator, method, rtol, products, iterations)
    right, given = _vector(operator, b, "b")
    unit = float(right.abs().max()) or 1.0  # squares of very small or large entries have no place in their dtype
    right = right / unit
    x = torch.zeros_like(right) if start is None else _vector(operator, start, "start")[0] / unit
    inverse, eps = _preconditioning(preconditioner, operator, method), torch.finfo(operator.dtype).eps
    size = float(right.norm())

    def record(end: Solution, spent: int) -> SolveRecord[V]:
        converged = None if iterations is not None or end.status == "running" else end.status == "converged"
        value = _spelled(operator, end.x * (unit / (measured.unit if measured else 1.0)), given)
        along = None if end.direction is None else _spelled(operator, end.direction, given)
        return SolveRecord(value, end.size or 0.0, converged, spent, end.status, along)

    with EstimatorProgress("solve", operator, limit, callback, progress) as watch:
        method_of = _method(method, operator, restart, scale)

        def run(base: Tensor, r: Tensor, tolerance: float, left: Callable[[], int]) -> Solution:
            def show(current: Callable[[], Tensor], least: float) -> None:
                watch(lambda spent: record(Solution(base + current(), "running", least / size), spent))

            return method_of(product, inverse, r, tolerance, eps, left, show)

        product = _damped(operator, damping)
        measured = Measured(product) if start is None and preconditioner is None else None
        product = measured or product
        if size == 0:
            solution = Solution(torch.zeros_like(right), "converged", 0.0)
        elif iterations is None:
            solution = solved(run, product, right, x, rtol, lambda: limit - watch.spent)
        else:
            exact = method != "minres" or preconditioner is None
            solution = stepped(run, product, right, x, iterations, lambda: watch.spent, eps, exact)
        if measured and measured.unit != 1:
            _check_room(solution.x, unit / measured.unit, operator.dtype)
        made = record(solution, watch.spent)
        wanted = f"rtol={rtol:g}" if iterations is None else f"iterations={iterations}"
        return made, _explanation(made, wanted) if made.status not in ("converged", "iterations") else None


def _check_room(x: Tensor, unit: float, dtype: torch.dtype) -> None:
    """Raise where the solution, measured in this unit, is too small or too large for its dtype."""
    largest, bounds = float(x.abs().max()) * unit, torch.finfo(dtype)
    if bool(x.any()) and not bounds.tiny <= largest <= bounds.max:
        raise InputError(
            f"solve: the solution's largest entry is about {largest:.1g}, which {dtype} has no place for; divide the "
            f"operator by its size, and multiply the solution yourself: hodiff.solve(A * s, b).value * s."
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


def as_float(value: Any, name: str) -> float:
    """A number, which may be given as a tensor of one real element."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        value = value.detach().item()
    _arguments.check_number(value, name)
    return float(value)


def _damped(operator: LinearOperator, damping: float) -> Product:
    product = _rounded(operator)
    return (lambda v: torch.add(product(v), v, alpha=float(damping))) if damping else product


def _rounded(operator: LinearOperator) -> Product:
    """Its product with vectors of the precision of sums; it rounds as the operator does."""
    return lambda v: check_finite(operator._times(v.to(operator.dtype)).to(v.dtype), "solve")


class Measured:
    """A product in a unit of its own, where it is so small or large that squares of it have no place in its dtype.

    The solution of the system is then in that unit, too.
    """

    def __init__(self, product: Product) -> None:
        self._product = product
        self.unit = 1.0
        self._known = False

    def __call__(self, v: Tensor) -> Tensor:
        image = self._product(v)
        if not self._known:
            self._known, near = True, power_of_two(image)
            room = torch.finfo(image.dtype).max ** 0.25
            self.unit = 1.0 if not near or 1 / room < near < room else near
        return image if self.unit == 1 else image / self.unit


def _preconditioning(preconditioner: Any, operator: LinearOperator, method: Method) -> Product:
    if preconditioner is None:
        return lambda r: r
    preconditioner = check_square(
        preconditioner, "preconditioner", symmetric=method in ("cg", "minres"), instead="method='gmres'"
    )
    if preconditioner.shape != operator.shape or preconditioner.dtype != operator.dtype:
        raise InputError(
            f"preconditioner: is {tuple(preconditioner.shape)}, {preconditioner.dtype}; the operator is "
            f"{tuple(operator.shape)}, {operator.dtype}."
        )
    return _rounded(preconditioner)


def _method(method: Method, operator: LinearOperator, restart: int | None, scale: float) -> Callable[..., Solution]:
    if not _arguments.is_number(scale) or scale <= 0 or (scale != 1 and method != "neumann"):
        raise InputError(f"scale: got {scale!r}; it is a positive number, an option of method='neumann'.")
    if method == "neumann":
        return functools.partial(neumann, scale=float(scale))
    if restart is not None and method != "gmres":
        raise InputError(f"restart: is an option of method='gmres', not of {method!r}.")
    if method != "gmres":
        return conjugate_gradients if method == "cg" else minres
    size = operator.shape[0]
    room = kept_vectors(size, least=30) if restart is None else _arguments.check_integer(restart, "restart", least=1)
    return functools.partial(gmres, max_basis=min(room, size))


def _limits(operator: LinearOperator, method: Method, rtol: Any, products: Any, iterations: Any) -> tuple[float, int]:
    """The tolerance, and how many products, or steps, there may be."""
    if iterations is None:
        if method == "neumann":
            raise InputError("method='neumann': is a number of terms, not a tolerance; say how many by iterations=.")
        default = min(10 * operator.shape[0] + 10, 1000)
        limit = default if products is None else _arguments.check_integer(products, "products", least=2)
        return default_rtol(operator.dtype) if rtol is None else rtol, limit
    if rtol is not None or products is not None:
        other = "products" if rtol is None else "rtol"
        raise InputError(f"iterations: are taken whatever they reach, so there is no {other} beside them; give one.")
    return 0.0, _arguments.check_integer(iterations, "iterations", least=0 if method == "neumann" else 1)


Attempt = Callable[[Tensor, Tensor, float, Callable[[], int]], Solution]
"""A run of a method: from where, the residual there, the tolerance, the products that are left."""


def _rest(product: Product, b: Tensor, x: Tensor) -> Tensor:
    return b - product(x) if bool(x.any()) else b.clone()


def stepped(
    run: Attempt, product: Product, b: Tensor, x: Tensor, steps: int, spent: Callable[[], int], eps: float, exact: bool
) -> Solution:
    """So many steps from x; the residual is the method's own, where that is `exact`."""
    r, size = _rest(product, b, x), float(b.norm())
    if float(r.norm()) <= eps * size:
        return Solution(x, "converged", float(r.norm()) / size)
    limit = spent() + steps
    end = run(x, r, eps * size, lambda: limit - spent())
    x = x + end.x
    left = end.size if end.size is not None and exact else float((b - product(x)).norm())
    if end.status == "stagnation" and left <= 1e3 * eps * size:  # nothing but rounding is left, which is no failure
        return Solution(x, "converged", left / size)
    return Solution(x, "iterations" if end.status == "budget" else end.status, left / size, end.direction)


def solved(run: Attempt, product: Product, b: Tensor, x: Tensor, rtol: float, left: Callable[[], int]) -> Solution:
    """Run the method, look at the true residual, and begin anew from there while that helps.

    Rounding makes the residual of a recurrence drift from the true one; a fresh start cures it.
    """
    size = float(b.norm())
    r = _rest(product, b, x)
    residual = float(r.norm()) / size
    while residual > rtol:
        if left() < 2:
            return Solution(x, "budget", residual)
        # The last product is kept for the true residual.
        end = run(x, r, 0.5 * rtol * size, lambda: left() - 1)
        r = b - product(x + end.x)
        before, residual = residual, float(r.norm()) / size
        if residual < before:
            x = x + end.x
        if residual <= rtol:
            break
        if end.status == "negative curvature":
            return Solution(x, end.status, residual, end.direction)
        if not residual < 0.5 * before:
            return Solution(x, "budget" if left() < 2 else "stagnation", residual if residual < before else before)
    return Solution(x, "converged", residual)


def _explanation(record: SolveRecord[Any], wanted: str) -> str:
    advice = {
        "negative curvature": (
            "conjugate gradients met a direction of negative or zero curvature: the operator is not positive definite. "
            "Add damping, use method='minres', or take hodiff.GaussNewtonOperator"
        ),
        "divergence": (
            "the terms of the Neumann series grow: an eigenvalue of A / scale is not within the unit circle around 1. "
            "Give a larger scale=, or damping"
        ),
        "budget": "the products ran out. Allow more, add damping, or give a preconditioner",
        "stagnation": (
            "the residual no longer falls: the system is singular (b lies partly outside its range), rounding allows "
            "no better, or GMRES keeps too few vectors (restart=). Add damping, or use double precision"
        ),
    }[record.status]
    residual = f"the relative residual is {record.residual:.2g} ({wanted})"
    return f"solve: after {record.products} products {residual}; {advice}."


# --- `nystrom`: an approximate inverse of A + μ I from a few products, as a preconditioner ----------------------------


def nystrom(
    operator: LinearOperator, rank: int, shift: float, *, generator: torch.Generator | None = None
) -> LinearOperator:
    r"""A preconditioner for \(A + \mu I\): exact on the largest eigenvalues, a multiple of the identity beside them.

    From \(r\) random vectors \(\Omega\) comes Nyström's approximation
    \(A \approx A\Omega\,(\Omega^\top A \Omega)^{-1} \Omega^\top A = U \Lambda U^\top\), and from that
    \(P^{-1} = U(\Lambda + \mu)^{-1}U^\top + (\lambda_r + \mu)^{-1}(I - UU^\top)\). Where *r* exceeds about twice the
    number of eigenvalues above \(\mu\), conjugate gradients take a few steps, whatever the condition of *A*.

    Args:
        operator: A symmetric positive semidefinite operator.
        rank: The \(r\): how many random vectors.
        shift: The \(\mu\), positive: the `damping` that `hodiff.solve` is given.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.

    Returns:
        An operator, symmetric and positive definite, of the same shape, to be given as
        `hodiff.solve(A, b, damping=shift, preconditioner=...)`, again and again.

    Raises:
        InputError: The operator is not symmetric or found not to be semidefinite, `rank` exceeds its columns, or
            `shift` is not positive.

    Cost:
        `rank` products, once. Memory: `rank` vectors. Each application: two products with a `(D, rank)` matrix.

    Examples:
        Eigenvalues that fall from 1e6 to nothing, of which some 150 are above the shift:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(1e6 * 0.9 ** torch.arange(1000, dtype=torch.float64))
        >>> P = hodiff.nystrom(A, 200, 0.1, generator=torch.Generator().manual_seed(0))
        >>> hodiff.solve(A, torch.ones(1000).double(), damping=0.1, preconditioner=P).products < 10
        True

        Without it the same takes more than a thousand.

    Reference:
        Frangella, Z., Tropp, J. A., Udell, M. (2023). Randomized Nyström preconditioning. SIAM J. Matrix Anal. Appl.
        44(2). doi:10.1137/21M1466244.
    """
    operator = check_square(operator, "nystrom", symmetric=True, instead="a preconditioner of your own")
    size = operator.shape[0]
    if _arguments.check_integer(rank, "rank", least=1) > size:
        raise InputError(f"rank: got {rank}, and the operator has {size} columns.")
    _arguments.check_positive(shift, "shift", ": the damping of the system")
    _vectors.check_generator(generator)
    like = operator._domain.zeros_flat(0).to(sum_dtype(operator.dtype))
    rows = _vectors.draw((rank, size), like, "gaussian", source(operator, generator))
    omega, _ = torch.linalg.qr(rows.T)
    vectors, values = _approximated(omega, flat_product(operator, omega.T).T, operator.dtype)
    return NystromOperator(operator._domain, vectors, values, float(shift), operator._live)


def _approximated(omega: Tensor, images: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The eigenvectors, as columns, and eigenvalues of Nyström's approximation, falling."""
    double = images.dtype if images.device.type == "mps" else torch.float64
    unit = power_of_two(images) or 1.0
    omega, images = omega.to(double), images.to(double) / unit
    nu = float(torch.finfo(dtype).eps * images.norm())
    if nu == 0:
        return omega, images.new_zeros(omega.shape[1])
    y = images + nu * omega  # a definite matrix, whose eigenvalues are larger by nu
    inner = omega.T @ y
    factor, failed = torch.linalg.cholesky_ex((inner + inner.T) / 2, upper=True)
    if int(failed):
        raise InputError(
            "nystrom: is for positive semidefinite operators, and this one has a direction of negative curvature; take "
            "hodiff.GaussNewtonOperator, or method='minres' without a preconditioner."
        )
    half = torch.linalg.solve_triangular(factor, y, upper=True, left=False)
    vectors, roots, _ = torch.linalg.svd(half, full_matrices=False)
    return vectors, (roots.square() - nu).clamp_min(0) * unit


@final
class NystromOperator(SymmetricOperator):
    """U (Λ + μ)⁻¹ U' + (I - U U') / (λ + μ), with the last λ."""

    def __init__(self, domain: Space, vectors: Tensor, values: Tensor, shift: float, live: str) -> None:
        super().__init__()
        self._space = domain
        self._shift = shift
        self._own = live
        dtype = sum_dtype(domain.dtype)
        self._vectors = vectors.to(dtype)
        self._rest = 1 / (float(values[-1]) + shift)
        self._beyond = (1 / (values + shift) - self._rest).to(dtype)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        rows = self._space.join(parts, count).to(self._vectors.dtype)
        with as_given(rows):
            products = self._rest * rows + ((rows @ self._vectors) * self._beyond) @ self._vectors.T
        return self._space.split(products.to(self._space.dtype))

    def _chunk(self, count: int) -> int:
        return max(1, _reverse.CHUNK_BYTES // (4 * self._space.size * self._vectors.element_size()))

    def _about(self) -> str:
        return f"rank {self._vectors.shape[1]}, shift {self._shift:g}"
