"""`solve`: linear systems, never unconverged without a word; `nystrom`, a preconditioner for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _nodes, _reverse, _settings, _tree, _vectors
from hodiff._core._vectors import Leaves, Space, Vectors, near, sum_dtype
from hodiff.curvature._krylov import (
    GMRES,
    MINRES,
    Block,
    ConjugateGradients,
    Neumann,
    Product,
    Solutions,
    Systems,
    norms,
    run,
    spread,
)
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
from hodiff.curvature._records import SolveRecord, Status
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
    progress: bool | None = None,
) -> SolveRecord[V]:
    r"""The solution of the linear system \((A + \lambda I)\, x = b\).

    Conjugate gradients are for positive definite operators. They stop where they meet a direction
    *d* with \(d^\top (A + \lambda I)\, d \le 0\), up to rounding, say so, and return the best solution
    until then. MINRES is for symmetric indefinite operators, GMRES for those that are not symmetric.

    Args:
        operator: A symmetric operator; for GMRES, a square one.
        b: The right-hand side: like the point, or flat `(D,)`. Or several, as columns `(D, K)`, or
            stacked in one extra leading dimension: they are solved side by side, and who has
            converged costs no more.
        create_graph: Whether `value` can be differentiated, once and twice, in *b*, `damping`, and all that the
            operator is made of: the matrix of a `hodiff.MatrixOperator`, what the functions of a
            `hodiff.HessianOperator`, `hodiff.GaussNewtonOperator` or `hodiff.JacobianOperator` use;
            also of their blocks, sums, products, multiples and transposes. None: only inside the
            function of another hodiff call, as often as that takes; elsewhere it warns of a
            constant that is made of something that requires grad, and False says that a constant
            is meant.
        method: `"cg"`, `"minres"` or `"gmres"`; or `"neumann"`, the first terms of the series
            \(\sum_j (I - A / s)^j\, b / s\), inexact on purpose: it goes with `iterations`, and needs all eigenvalues
            of \(A / s\) within the unit circle around 1.
        damping: The \(\lambda\) that is added.
        preconditioner: An operator close to the inverse of \(A + \lambda I\): `hodiff.nystrom(A, rank, damping)`,
            or `hodiff.MatrixOperator(1 / (d + damping))` with a diagonal *d*. Positive definite, except for GMRES,
            where it stands on the right.
        start: Where to begin, as many as *b*; None is zero.
        restart: For GMRES, how many vectors to keep before it begins anew; None: as many as fit into 8 MiB,
            between 30 and 300. For each right-hand side.
        iterations: Take exactly so many steps, of one product each, whatever they reach: a step of TRPO, an inner
            solver of fixed length. Fewer only where nothing but rounding is left of the residual. Of a Neumann series,
            0 is its first term, \(b / s\). With `create_graph` the backward pass takes as many; its derivative is then
            as inexact as the solution.
        scale: The \(s\) of a Neumann series: at least half the largest eigenvalue, as LiSSA's scale.
        rtol: The solution has converged when \(\lVert b - (A + \lambda I) x \rVert \le\) `rtol`
            \(\lVert b \rVert\). None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half (5e-2 in bfloat16).
        products: How many products to spend at most on each right-hand side; None: `10 D + 10`, at
            most 1000.
        callback: A function that is given the record as it stands after each step: its `value` is the iterate.
        progress: Whether to show a bar over the products. None: where a terminal waits for more than two seconds.

    Returns:
        A record: `value` in the structure and shape of *b*; `residual`, relative and true, from a
        product at the end (with `iterations`, by the method's own recurrence where it has one); `converged`,
        None where `iterations` were asked for; `products`; `status`; and the `direction` of
        negative curvature. Of several right-hand sides `residual` and `converged` are tensors
        `(K,)`, and `status` is the worst.

    Raises:
        InputError: The operator is not symmetric (not square, for GMRES), *b* does not fit, the method is unknown,
            `iterations` go with `rtol` or `products`, or a solution is too small or too large for its dtype.

    Warns:
        ConvergenceWarning: The solution has not converged; the message says why, and what to do. With
            `iterations`: only where the steps could not be taken.
            In a backward pass it names the line of this call.
        HodiffWarning: The solution is detached, although the operator or *b* requires grad (see `create_graph`).

    Cost:
        A product per iteration, and one for the residual; of several right-hand sides, one product
        with all that have not converged. Memory: a few vectors for each; for GMRES, `restart` of
        them.

        Of a stack of matrices (`batch_ndim=` of its operator) with up to 64 columns, for GMRES
        without `restart` 256, a product for each column: the dense matrices are solved, and what
        fails goes the way of the others. Not with `iterations`, a `preconditioner`, a `start` or
        a `callback`.

        With `create_graph`, two differentiable products more (of a Hessian an evaluation and two
        passes each), and in the backward pass one more system with the transpose, two for a second
        derivative, to a hundredth of the tolerance:
        \(\bar b = A^{-\top} \bar x,\ \bar A = -\bar b\, x^\top\).

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[4.0, 1.0], [1.0, 3.0]]))
        >>> found = hodiff.solve(A, torch.tensor([5.0, 4.0]))
        >>> found.value.round(decimals=4), found.status, found.products
        (tensor([1., 1.]), 'converged', 3)
        >>> turn = hodiff.MatrixOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> hodiff.solve(turn, torch.tensor([1.0, 2.0]), method="gmres").value.round(decimals=4)
        tensor([ 2., -1.])

        Two right-hand sides, as columns:

        >>> found = hodiff.solve(A, torch.tensor([[5.0, 4.0], [4.0, 1.0]]).T)
        >>> found.value.round(decimals=4), found.converged
        (tensor([[1., 1.],
                [1., 0.]]), tensor([True, True]))

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
        stacked=True,
    )
    return replace(record, value=_linked(operator, b, record.value, damping, system))


def _linked(operator: LinearOperator, b: Any, value: Any, damping: float | Tensor, system: ImplicitSystem) -> Any:
    """The solution as a function of the right-hand side, of the damping, and of what the operator is made of."""
    with _settings.recording():
        given = operator._domain.parse(b, "b")
        right = normal(flat_rows(operator, given))
        rows = before = normal(flat_rows(operator, operator._domain.parse(value)))
        chain = Chain(system, [before])
        for number in range(1, system.order + 1):
            residual = operator._recorded_rows(rows) + damping * rows - right
            (rows,) = chain.link(number, [rows], [residual])
        solutions = spelled(operator, rows, given)
    _nodes.mark_results([part for part in _tree.flatten(solutions)[0] if isinstance(part, Tensor)])
    return solutions


def attempt(
    operator: LinearOperator,
    b: V,
    *,
    method: Method,
    damping: float,
    preconditioner: LinearOperator | None,
    rtol: float | Tensor | None,
    products: int | None,
    start: Any = None,
    restart: int | None = None,
    iterations: int | None = None,
    scale: float = 1.0,
    callback: Callback | None = None,
    progress: bool | None = False,
) -> tuple[SolveRecord[V], str | None]:
    """`solve`, and in words why it has not converged, for who has more to say than a warning.

    A tensor as `rtol` has one for each right-hand side.
    """
    _arguments.check_option(method, Method, "method")
    symmetric = method in ("cg", "minres")
    operator = check_square(operator, "solve", symmetric=symmetric, instead="method='gmres'", stacks=True)
    as_float(damping, "damping")
    tolerance, limit = _limits(operator, method, rtol, products, iterations)
    sides = Sides(operator, b)
    x = torch.zeros_like(sides.rows) if start is None else sides.beginning(operator, start)
    inverse, product = _preconditioning(preconditioner, operator, method), _damped(operator, damping)
    plain = start is None and preconditioner is None
    dense = plain and iterations is None and callback is None
    dense = dense and is_small(operator, limit, method, restart)
    measured = Measured(product, len(x)) if plain and not dense else None
    systems = Systems(measured or product, inverse, torch.finfo(operator.dtype).eps)
    make, units = (
        _method(method, operator, restart, scale),
        measured.units if measured else torch.ones((), device="cpu"),
    )

    with EstimatorProgress("solve", operator, limit, callback, progress) as watch:

        def attempt(r: Tensor, tolerance: Tensor, left: Tensor, numbers: Tensor, so_far: Solutions) -> Solutions:
            def show(current: Callable[[], tuple[Tensor, Tensor]]) -> None:
                watch(lambda spent: sides.record(so_far.running(numbers, *current(), size), units, spent, False))

            size = lengths(sides.rows)[numbers]
            return run(make(systems, r, numbers, tolerance), left, show)

        if dense:
            x = _dense_solutions(operator, float(damping), sides.rows)
        if iterations is None:
            end = solved(attempt, systems, sides.rows, x, tolerance, limit)
        else:
            end = stepped(attempt, systems, sides.rows, x, iterations, method)
        sides.check_room(end, units)
        made = sides.record(end, units, watch.spent, iterations is None)
        if made.status in ("converged", "iterations"):
            return made, None
        wanted = f"rtol={float(tolerance.max()):g}" if iterations is None else f"iterations={iterations}"
        return made, _explanation(made, wanted)


WORST: tuple[Status, ...] = (
    "running",
    "divergence",
    "negative curvature",
    "stagnation",
    "budget",
    "iterations",
    "converged",
)
"""The status of several systems is that which stands first."""


class Sides:
    """The right-hand sides of one call.

    Attributes:
        rows: As rows, in the precision of sums, in units of their largest entries.
        unit: These; squares of very small or large ones have no place in their dtype.
    """

    def __init__(self, operator: LinearOperator, b: Any) -> None:
        self._operator = operator
        rows, self._given = _parsed(operator, b, "b")
        largest = rows.abs().amax(1)
        self.unit = torch.where(largest > 0, largest, 1.0)
        self.rows = rows / self.unit[:, None]

    def beginning(self, operator: LinearOperator, start: Any) -> Tensor:
        """Where to begin, in the same units; at zero, where the right-hand side is."""
        rows, given = _parsed(operator, start, "start")
        if given.number != self._given.number:
            raise InputError(f"start: holds {given.number or 1} vectors, and b holds {self._given.number or 1}.")
        return torch.where(self.rows.any(1)[:, None], rows / self.unit[:, None], 0.0)

    def record(self, end: Solutions, units: Tensor, spent: int, asked: bool) -> SolveRecord[Any]:
        """The record of solutions in these units; `asked` is whether a tolerance was."""
        scale = self.unit.to("cpu", torch.float64) / units
        along = None
        if end.direction is not None and "negative curvature" in end.status:
            along = self._spelled(end.direction)
        statuses: list[Status] = [*end.status, "converged"]
        worst = min(statuses, key=WORST.index)
        met = None
        if asked:
            reached = [status == "converged" for status in end.status]
            met = self._told(torch.tensor(reached, dtype=torch.bool, device="cpu"))
        value = self._spelled(end.x * spread(scale, end.x))
        return SolveRecord(value, self._told(end.size), met, spent, worst, along)

    def check_room(self, end: Solutions, units: Tensor) -> None:
        """Raise where what is a solution, in these units, is too small or too large for its dtype.

        In a backward pass gradients underflow and overflow, as all of PyTorch's do.
        """
        dtype = self._operator.dtype
        bounds, largest = torch.finfo(dtype), end.x.abs().amax(1).cpu().double()
        sizes = largest * (self.unit.cpu().double() / units)
        least = bounds.tiny * bounds.eps / default_rtol(dtype)  # the step between numbers there, and what may be lost
        lost = (largest > 0) & ~((sizes >= least) & (sizes <= bounds.max))
        lost &= torch.tensor([status in ("converged", "iterations") for status in end.status], device="cpu").bool()
        if bool((lost & ((units != 1) | (self._given.kind != "rows"))).any()):
            raise InputError(
                f"solve: the solution's largest entry is about {float(sizes[lost][0]):.1g}, which {dtype} has no place "
                f"for; divide the operator by its size, and multiply the solution yourself: hodiff.solve(A * s, "
                f"b).value.double() * s."
            )

    def _spelled(self, rows: Tensor) -> Any:
        return spelled(self._operator, rows, self._given)

    def _told(self, numbers: Tensor) -> Any:
        """A number for each right-hand side; of a single one, as Python's own."""
        batch, count = self._operator._domain.batch, self._given.number
        if not batch and count is None:
            return numbers.item()
        if self._given.kind == "rows":
            return numbers.to(self.rows.device)
        numbers = numbers.to(self.rows.device).reshape(batch if count is None else (count, *batch))
        return numbers.movedim(0, -1) if self._given.kind == "columns" else numbers


def _parsed(operator: LinearOperator, b: Any, name: str) -> tuple[Tensor, Vectors]:
    """Vectors as rows in the precision of sums, and how they were spelled."""
    given = b if isinstance(b, Vectors) else operator._domain.parse(b, name)
    rows = flat_rows(operator, given).detach()
    if not torch.isfinite(rows).all():
        raise InputError(f"{name}: has entries that are not finite.")
    return rows.to(sum_dtype(rows.dtype)), given


def flat_rows(operator: LinearOperator, given: Vectors) -> Tensor:
    """Vectors in any spelling as flat rows; of a stack of matrices, a row for each."""
    domain = operator._domain
    if given.kind == "rows":
        return given.parts[0]
    if given.kind == "columns" and not domain.batch:
        return given.parts[0].T
    rows = domain.join(given.parts, given.number)
    return rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])


def spelled(operator: LinearOperator, rows: Tensor, given: Vectors) -> Any:
    """Flat rows as `given` was spelled."""
    rows, domain = rows.to(operator.dtype), operator._domain
    if given.kind == "rows":
        return rows
    lead = domain.batch if given.number is None else (given.number, *domain.batch)
    rows = rows.reshape((*lead, domain.size))
    if given.kind == "columns":
        return rows.movedim(0, -1)
    return rows if given.kind == "flat" else domain.result(domain.split(rows), given.tree)


def as_float(value: Any, name: str) -> float:
    """A number, which may be given as a tensor of one real element."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        value = value.detach().item()
    _arguments.check_number(value, name)
    return float(value)


def _damped(operator: LinearOperator, damping: float) -> Product:
    product = _rounded(operator)
    if not damping:
        return product
    return lambda v, numbers: torch.add(product(v, numbers), v, alpha=float(damping))


def _rounded(operator: LinearOperator) -> Product:
    """Its product with rows of the precision of sums; it rounds as the operator does."""

    def product(v: Tensor, numbers: Tensor) -> Tensor:
        rows = v.to(operator.dtype)
        images = operator._times_some(rows, numbers) if operator._domain.batch else operator._times_rows(rows)
        return check_finite(images.to(v.dtype), "solve")

    return product


class Measured:
    """Products in units of their own, where their squares have no place in the dtype.

    The solutions of the systems are then in these units, too.

    Attributes:
        units: One for each system.
    """

    def __init__(self, product: Product, count: int) -> None:
        self._product = product
        self.units = torch.ones(count, dtype=torch.float64, device="cpu")
        self._known = self._plain = False

    def __call__(self, v: Tensor, numbers: Tensor) -> Tensor:
        image = self._product(v, numbers)
        if not self._known:
            self._known = True
            unit, room = near(image.abs().amax(1)).cpu().double(), torch.finfo(image.dtype).max ** 0.25
            self.units[numbers] = torch.where((1 / room < unit) & (unit < room), 1.0, unit)
            self._plain = bool((self.units == 1).all())
        return image if self._plain else image / spread(self.units[numbers], image)


def _preconditioning(preconditioner: Any, operator: LinearOperator, method: Method) -> Product | None:
    if preconditioner is None:
        return None
    preconditioner = check_square(
        preconditioner, "preconditioner", symmetric=method in ("cg", "minres"), instead="method='gmres'", stacks=True
    )
    if preconditioner.shape != operator.shape or preconditioner.dtype != operator.dtype:
        raise InputError(
            f"preconditioner: is {tuple(preconditioner.shape)}, {preconditioner.dtype}; the operator is "
            f"{tuple(operator.shape)}, {operator.dtype}."
        )
    return _rounded(preconditioner)


def _method(method: Method, operator: LinearOperator, restart: int | None, scale: float) -> Callable[..., Block]:
    if not _arguments.is_number(scale) or scale <= 0 or (scale != 1 and method != "neumann"):
        raise InputError(f"scale: got {scale!r}; it is a positive number, an option of method='neumann'.")
    if method == "neumann":
        return functools.partial(Neumann, scale=float(scale))
    if restart is not None and method != "gmres":
        raise InputError(f"restart: is an option of method='gmres', not of {method!r}.")
    if method != "gmres":
        return ConjugateGradients if method == "cg" else MINRES
    size = operator.shape[-1]
    room = kept_vectors(size, least=30) if restart is None else _arguments.check_integer(restart, "restart", least=1)
    return functools.partial(GMRES, room=min(room, size))


def is_small(operator: LinearOperator, products: int, method: Method, restart: int | None) -> bool:
    """Whether the matrices of a stack take fewer products, or less time, than systems with them."""
    most = 4 * DENSE if method == "gmres" and restart is None else DENSE
    return bool(operator._domain.batch) and operator.shape[-1] <= min(most, products)


DENSE = 64
"""Of systems up to this size side by side, matrices and factors are cheaper than iterations.

GMRES, whose basis is as large as the matrix, takes longer up to four times that.
"""


def _dense_solutions(operator: LinearOperator, damping: float, b: Tensor) -> Tensor:
    """The solutions by the dense matrices of a stack; zeros where these are singular."""
    matrices = operator._dense().flatten(0, -3).to(torch.promote_types(b.dtype, torch.float32))
    matrices.diagonal(dim1=-2, dim2=-1).add_(damping)
    columns = b.reshape(-1, len(matrices), b.shape[-1]).movedim(0, -1) if len(matrices) else b[:, :, None]
    x, _ = torch.linalg.solve_ex(matrices, columns)
    with as_given(x):
        rest = (columns - matrices @ x).norm(dim=-2, keepdim=True)
    x = torch.where(rest < columns.norm(dim=-2, keepdim=True), x, 0.0)
    return x.movedim(-1, 0).reshape(b.shape)


def _limits(operator: LinearOperator, method: Method, rtol: Any, products: Any, iterations: Any) -> tuple[Tensor, int]:
    """The tolerance, and how many products, or steps, there may be."""
    if iterations is None:
        if method == "neumann":
            raise InputError("method='neumann': is a number of terms, not a tolerance; say how many by iterations=.")
        if not isinstance(rtol, Tensor):
            check_rtol(rtol)
        default = min(10 * operator.shape[-1] + 10, 1000)
        limit = default if products is None else _arguments.check_integer(products, "products", least=2)
        rtol = default_rtol(operator.dtype) if rtol is None else rtol
        return torch.as_tensor(rtol, dtype=torch.float64, device="cpu"), limit
    if rtol is not None or products is not None:
        other = "products" if rtol is None else "rtol"
        raise InputError(f"iterations: are taken whatever they reach, so there is no {other} beside them; give one.")
    return torch.zeros((), device="cpu"), _arguments.check_integer(
        iterations, "iterations", least=0 if method == "neumann" else 1
    )


Attempt = Callable[[Tensor, Tensor, Tensor, Tensor, Solutions], Solutions]
"""A run of a method: first residuals, tolerances, products that are left, which systems, all so far."""


def lengths(rows: Tensor) -> Tensor:
    """Of vectors; 1 of zeros, whose residuals are zero."""
    sizes = norms(rows)
    return torch.where(sizes > 0, sizes, 1.0)


def _begun(product: Product, b: Tensor, x: Tensor) -> tuple[Solutions, Tensor]:
    """Solutions at x, none of which counts as such yet, and their residuals."""
    end, known = Solutions.like(x), bool(x.any())
    r = b - product(x, torch.arange(len(b), device="cpu")) if known else b.clone()
    end.size = norms(r) / lengths(b)
    end.taken = end.taken + known
    end.status = ["converged"] * len(b)
    return end, r


def some(rows: Tensor, numbers: Tensor) -> Tensor:
    """The rows with these numbers, without a copy where these are all."""
    return rows if len(numbers) == len(rows) else rows[numbers]


def stepped(run: Attempt, systems: Systems, b: Tensor, x: Tensor, steps: int, method: Method) -> Solutions:
    """So many steps from x; the residuals are the method's own, where it has them."""
    end, r = _begun(systems.product, b, x)
    eps = systems.eps
    rows = (end.size > eps).nonzero()[:, 0]
    if not len(rows):
        return end
    size = lengths(b)[rows]
    ends = run(some(r, rows), eps * size, torch.full_like(rows, steps), rows, end)
    moved, left = some(end.x, rows) + ends.x, ends.size
    if method == "minres":  # whose own are measured by the preconditioner
        left = norms(some(b, rows) - systems.product(moved, rows))
    end.put(rows, moved, left / size, ends.taken, ends.direction)
    rounded = left <= 1e3 * eps * size
    for place, row in enumerate(rows.tolist()):
        status = ends.status[place]
        if status == "stagnation" and rounded[place]:  # nothing but rounding is left, which is no failure
            end.status[row] = "converged"
        else:
            end.status[row] = "iterations" if status == "budget" else status
    return end


def solved(run: Attempt, systems: Systems, b: Tensor, x: Tensor, rtol: Tensor, limit: int) -> Solutions:
    """Run the method, look at the true residuals, and begin anew from there while that helps.

    Rounding makes the residual of a recurrence drift from the true one; a fresh start cures it.
    """
    size, rtol = lengths(b), rtol.expand(len(b))
    end, r = _begun(systems.product, b, x)
    rows = (end.size > rtol).nonzero()[:, 0]
    while len(rows):
        spent = limit - end.taken[rows] < 2
        for row in rows[spent].tolist():
            end.status[row] = "budget"
        rows = rows[~spent]
        if not len(rows):
            break
        # The last product is kept for the true residual.
        ends = run(some(r, rows), 0.5 * (rtol * size)[rows], limit - end.taken[rows] - 1, rows, end)
        moved = some(end.x, rows) + ends.x
        rest = some(b, rows) - systems.product(moved, rows)
        before, after = end.size[rows], norms(rest) / size[rows]
        taken = end.taken[rows] + ends.taken + 1
        better = (after < before)[:, None].to(rest.device)
        end.put(rows, torch.where(better, moved, some(end.x, rows)), after.minimum(before), taken, ends.direction)
        r[rows] = rest
        met, slow = after <= rtol[rows], ~(after < 0.5 * before)
        over = limit - taken < 2
        for place, row in enumerate(rows.tolist()):
            if met[place]:
                end.status[row] = "converged"
            elif ends.status[place] == "negative curvature":
                end.status[row] = "negative curvature"
            elif slow[place]:
                end.status[row] = "budget" if over[place] else "stagnation"
            met[place] |= slow[place] | (ends.status[place] == "negative curvature")
        rows = rows[~met]
    return end


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
    residual, which = torch.as_tensor(record.residual, device="cpu"), "the"
    if residual.ndim:
        lost = (
            residual.numel()
            if record.converged is None
            else int((~torch.as_tensor(record.converged, device="cpu")).sum())
        )
        which = f"for {lost} of {residual.numel()} systems, the largest"
    said = f"{which} relative residual is {float(residual.max()):.2g} ({wanted})"
    return f"solve: after {record.products} products {said}; {advice}."


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
