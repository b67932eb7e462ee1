"""`solve`: linear systems, never unconverged silently."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _nodes, _settings, _tree, _versions
from hodiff._core._tree import Vectors
from hodiff._core._vectors import near, sum_dtype
from hodiff.curvature import _krylov
from hodiff.curvature._krylov import (
    ALONE,
    GMRES,
    MINRES,
    Block,
    ConjugateGradients,
    Inner,
    Neumann,
    Product,
    Solutions,
    Systems,
    column,
    listed,
    masked_where,
    number,
    selected,
    zeros,
)
from hodiff.curvature._links import CallSite, Chain, ImplicitSystem
from hodiff.curvature._matrix import MatrixOperator
from hodiff.curvature._operator import LinearOperator, as_given, check_places, constant, normal
from hodiff.curvature._probes import (
    Callback,
    EstimatorProgress,
    check_finite,
    check_rtol,
    check_square,
    default_rtol,
    is_recorded,
    kept_vectors,
    refuse_live,
    warn_not_converged,
)
from hodiff.curvature._records import SolveRecord, Status
from hodiff.errors import InputError

Ints = list[int]
Method = Literal["cg", "minres", "gmres", "neumann"]
V = TypeVar("V")

DENSE = 64
"""Of stacks of matrices up to this size, these and their factors are cheaper than iterations.

GMRES, whose basis is as large as the matrix, takes longer up to four times that. Of a single matrix
it does, too, where all products fit into one batched pass; but systems that end soon come first.
So do all methods where each product is a pass (`soon=0`), and there nothing comes first.
"""
SOON = 8
"""So many steps of GMRES: a matrix of 8 to 300 columns and its factors take as long as 1 to 7.

Of a stack, all products in one batched pass take as long as 4 to 20 steps; where they do not fit
into one, each takes as long as alone.
"""

USUAL = 30
"""How many products a system often takes, or some eigenvalues."""


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
    r"""The solution of the linear system (A + λI) x = b.

    Conjugate gradients need a positive definite operator. If they meet a direction *d* with
    \(d^\top (A + \lambda I)\, d \le 0\), up to rounding, they stop, report it, and return the best
    solution so far. Use MINRES for symmetric indefinite operators, and GMRES for unsymmetric ones.

    Args:
        operator: A symmetric operator; for GMRES, a square one.
        b: The right-hand side: like the point, or flat `(D,)`. Or several, as columns `(D, K)`
            (which a matrix always holds where the point is one tensor of one dimension), or else
            stacked in one extra leading dimension: they are solved in parallel, and those
            that have converged cost no more.
        create_graph: Whether `value` can be differentiated, once and twice, with respect to *b*,
            `damping`, and everything that the operator uses: the matrix of a
            `hodiff.MatrixOperator`, what the functions of a `hodiff.HessianOperator`,
            `hodiff.GaussNewtonOperator` or `hodiff.JacobianOperator` use; also through their
            blocks, sums, products, multiples and transposes. None: only inside the function of
            another hodiff call, as often as that takes; elsewhere a warning says if something that
            requires grad becomes a constant, and False accepts that silently.
        method: `"cg"`, `"minres"` or `"gmres"`; or `"neumann"`, the first terms of the series
            \(\sum_j (I - A / s)^j\, b / s\), which is deliberately inexact: it needs `iterations`,
            and all eigenvalues of \(A / s\) within the unit circle around 1.
        damping: \(\lambda\), added to the operator.
        preconditioner: An operator close to the inverse of \(A + \lambda I\), such as
            `hodiff.nystrom(A, rank, shift)`, or `hodiff.MatrixOperator(1 / (d + damping))` with a
            diagonal *d*. Positive definite, except for GMRES, which applies it from the right.
        start: The first iterate, shaped like *b*; None: zero.
        restart: For GMRES, how many vectors to keep for each right-hand side before a restart;
            None: as many as fit into 8 MiB, between 30 and 300.
        iterations: Take exactly this many steps, of one product each, without a tolerance: for a
            TRPO step or an inner solver of fixed length. Fewer only if the residual is down to
            rounding. For a Neumann series, 0 gives the first term, \(b / s\). With `create_graph`,
            the backward pass takes as many steps, and the derivative is as inexact as the solution.
        scale: \(s\) of a Neumann series: at least half the largest eigenvalue (LiSSA's scale).
        rtol: The solution has converged when \(\lVert b - (A + \lambda I) x \rVert \le\) `rtol`
            \(\lVert b \rVert\). None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half (5e-2
            in bfloat16).
        products: The maximal number of products for each right-hand side; None: `10 D + 10`, at
            most 1000.
        callback: A function that receives the current record after each step; its `value` is the
            iterate.
        progress: Whether to show a progress bar. None: in a terminal, after two seconds.

    Returns:
        A record: `value` in the structure and shape of *b*; `residual`, relative and true, from a
        product at the end (with `iterations`, by the method's own recurrence where it has one);
        `converged`, None where `iterations` were asked for; `products`; `status`; and the
        `direction` of negative curvature. Of several right-hand sides `residual` and `converged`
        are tensors `(K,)`, and `status` is the worst.

    Raises:
        InputError: The operator is not symmetric (not square, for GMRES), *b* does not fit, the
            method is unknown, `iterations` go with `rtol` or `products`, or a solution is too small
            or too large for its dtype.

    Warns:
        ConvergenceWarning: The solution has not converged; the message says why, and what to do.
            With `iterations`: only if the steps could not be taken. In a backward pass the warning
            names the line of this call.
        HodiffWarning: The solution is detached, although the operator or *b* requires grad (see
            `create_graph`).

    Cost:
        A product per iteration, and one for the residual. With several right-hand sides, one
        product serves all that have not converged. Memory: a few vectors for each; for GMRES,
        `restart` vectors.

        With damping, Gauss-Newton and Fisher matrices of few rows are solved directly, in the
        passes that `hodiff.GaussNewtonOperator` names and a product for each right-hand side, which
        tells the residual; what that leaves is for conjugate gradients. Not with a
        `preconditioner`, a `start`, `iterations`, a `callback` or `create_graph`. Where conjugate
        gradients would end in ten products, this takes up to three times as long.

        A stack of matrices (`batch_ndim=` of its operator) with up to 64 columns (256 for GMRES
        without `restart`) takes a product for each column: the dense matrices are solved directly,
        and those that fail iteratively. Not with `iterations`, a `preconditioner`, a `start` or a
        `callback`; and functions of 32 or more columns, or whose products do not fit into one
        batched pass, take eight steps first. For a single matrix with up to 256 columns, GMRES that
        does not converge in eight steps also solves the dense matrix, if all products fit into one
        batched pass.

        With `create_graph`, two more differentiable products (for a Hessian an evaluation and two
        passes each). The backward pass solves one more system with the transpose, and two for a
        second derivative, to a hundredth of the tolerance: \(\bar b = A^{-\top} \bar x,\ \bar A =
        -\bar b\, x^\top\).

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
        >>> x = hodiff.solve(
        ...     hodiff.MatrixOperator(a), torch.tensor([12.0]), create_graph=True
        ... ).value
        >>> torch.autograd.grad(x.sum(), a)
        (tensor([-3.]),)

    Reference:
        Hestenes, M. R., Stiefel, E. (1952). J. Res. Nat. Bur. Standards 49.
        doi:10.6028/jres.049.044. Paige, C. C., Saunders, M. A. (1975). SIAM J. Numer. Anal. 12(4).
        doi:10.1137/0712047. Saad, Y., Schultz, M. H. (1986). SIAM J. Sci. Stat. Comput. 7(3).
        doi:10.1137/0907058.
    """
    check_rtol(rtol)
    inexact = {} if iterations is None else {"start": start, "preconditioner": preconditioner}
    recorded = is_recorded("solve", operator, create_graph, b=b, damping=damping, **inexact)
    if recorded:
        refuse_live(
            "a solution after a fixed number of iterations has no derivative with respect to it",
            **inexact,
        )
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
        operator, b, preconditioner=preconditioner, start=start, rtol=rtol, callback=callback,
        progress=progress, thin=not recorded and iterations is callback is None,
    )  # fmt: skip
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


def _linked(
    operator: LinearOperator, b: Any, value: Any, damping: float | Tensor, system: ImplicitSystem
) -> Any:
    """The solution as a function of the right-hand side, of the damping,
    and of what the operator is made of.
    """
    with _settings.recording():
        given = operator._domain.parse(b, "b")
        right = normal(flat_rows(operator, given)).reshape(-1, operator.shape[-1])
        rows = before = normal(flat_rows(operator, operator._domain.parse(value))).reshape(
            right.shape
        )
        chain = Chain(system, [before])
        for number in range(1, system.order + 1):
            residual = operator._recorded_rows(rows) + damping * rows - right
            (rows,) = chain.link(number, [rows], [residual])
        solutions = spelled(operator, rows, given)
    _nodes.mark_results([part for part in _tree.flatten(solutions)[0] if isinstance(part, Tensor)])
    return solutions


def _by_matrix_when(
    operator: LinearOperator, soon: int, small: bool, whole: bool, restart: int | None
) -> tuple[bool, bool, int]:
    """Whether a system is solved by its matrix at once, or later, after so many products."""
    if operator._domain.batch:
        dear = whole and _is_dear(operator)
        return whole and not dear, dear, SOON if dear else soon
    later = small and restart is None
    return False, later, SOON if later and operator.shape[-1] > DENSE else soon


def attempt(
    operator: LinearOperator,
    b: V,
    *,
    method: Method,
    damping: float,
    preconditioner: LinearOperator | None,
    rtol: Any,
    products: int | None,
    start: Any = None,
    restart: int | None = None,
    iterations: int | None = None,
    scale: float = 1.0,
    callback: Callback | None = None,
    progress: bool | None = False,
    soon: int = SOON,
    thin: bool = False,
) -> tuple[SolveRecord[V], str | None]:
    """`solve`, and in words why it has not converged, for who has more to say than a warning.

    `rtol` may be a list, with one for each right-hand side. A small system that does not end in so
    many products as `soon` says is solved by its matrix. With `thin`, by its thin side first.
    """
    _arguments.check_option(method, Method, "method")
    symmetric = method in ("cg", "minres")
    operator = check_square(
        operator, "solve", symmetric=symmetric, instead="method='gmres'", stacks=True
    )
    limit = _limit(operator, method, rtol, products, iterations)
    sides = Sides(operator, b)
    every = [rtol or default_rtol(operator.dtype)] * sides.count
    tolerance = rtol if isinstance(rtol, list) else every
    x = None if start is None else sides.beginning(start)
    inverse = _preconditioning(preconditioner, operator, method)
    product = _rounded(operator, "" if preconditioner is None else _OF_TWO, float(damping))
    plain = start is None and preconditioner is None
    most = 4 * DENSE if method == "gmres" and restart is None else DENSE
    small = plain and bool(operator._domain.batch or most > DENSE or not soon)
    small = small and operator.shape[-1] <= min(most, limit - SOON) and sides.inner is ALONE
    whole = small and iterations is None and callback is None
    dense, later, soon = _by_matrix_when(operator, soon, small, whole, restart)
    product = Measured(product, sides) if plain and not dense else product
    make, room = _method(method, operator, restart, scale)
    systems = Systems(product, inverse, sides.eps, float(scale), room, sides.inner)

    with EstimatorProgress("solve", operator, limit, callback, progress) as watch:

        def run(r: Tensor, goals: list[float], left: Ints, at: Ints, end: Solutions) -> Solutions:
            def shown(spent: int) -> SolveRecord[Any]:
                now = end.running(at, block.so_far(), sides.sizes)
                return sides.record(now, spent, asked=False)

            block = make(systems, r, at, goals, left)
            return block.run((lambda: watch(shown)) if watch.seen else None)

        by_matrix = functools.partial(_dense_solutions, operator, damping, sides, method == "cg")
        if thin and plain and method == "cg":
            x, limit = _by_rows(operator, damping, sides, limit)
        if iterations is None:
            begin, then = by_matrix() if dense else x, by_matrix if later else None
            end = solved(run, systems, sides, begin, tolerance, limit, then, soon)
        else:
            end = stepped(run, systems, sides, x, iterations, method)
        sides.check_room(end)
        made = sides.record(end, watch.spent, asked=iterations is None)
        failed = made.status not in ("converged", "iterations")
        return made, _explanation(made, max(tolerance), iterations) if failed else None


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
        rows: As rows, of a single one flat, in the precision of sums, in units.
        count: How many they are.
        unit: The largest entries of very small or large ones, whose squares have no place.
        units: In which products are then measured, and solutions are.
        lengths: Theirs.
        inner: Their inner products.
        eps: The rounding of products.
        sizes: The same; 1 of zeros, whose residuals are zero.
    """

    def __init__(self, operator: LinearOperator, b: Any) -> None:
        self._operator, self.inner = operator, _krylov.of(operator)
        self.eps = torch.finfo(operator.dtype).eps
        rows, self._given, largest = _parsed(operator, b, "b", self.inner)
        room = torch.finfo(operator.dtype).max ** 0.125
        self.unit = [size if size and not 1 / room < size < room else 1.0 for size in largest]
        self.count = len(self.unit)
        self.units = [1.0] * self.count
        self.rows = self._measured(rows)
        self.lengths = listed(self.inner.norms(self.rows))
        self.sizes = [size or 1.0 for size in self.lengths]

    def beginning(self, start: Any) -> Tensor:
        """The start, in the same units; at zero, where the right-hand side is."""
        rows, given, _ = _parsed(self._operator, start, "start", self.inner)
        if given.number != self._given.number:
            raise InputError(
                f"start: got {_arguments.plural(given.number or 1, 'vector')}, "
                f"but b holds {self._given.number or 1}."
            )
        nonzero = number(self.lengths, rows) != 0
        return masked_where(nonzero, self._measured(rows), torch.zeros_like(rows))

    def _measured(self, rows: Tensor) -> Tensor:
        return rows / column(number(self.unit, rows), rows) if set(self.unit) != {1.0} else rows

    def record(self, end: Solutions, spent: int, *, asked: bool) -> SolveRecord[Any]:
        """The record of solutions; `asked` is whether for a tolerance."""
        along = None
        if "negative curvature" in end.status:
            each = zip(end.direction, torch.atleast_2d(end.x), strict=True)
            along = self._spelled(torch.stack([0 * x if d is None else d for d, x in each]))
        met = (
            self._told([status == "converged" for status in end.status], torch.bool)
            if asked
            else None
        )
        scales = [size / unit for size, unit in zip(self.unit, self.units, strict=True)]
        value = self._spelled(end.x * column(number(scales, end.x), end.x))
        statuses: list[Status] = [*end.status, "converged"]
        worst = min(statuses, key=WORST.index)
        return SolveRecord(value, self._told(end.size, torch.float64), met, spent, worst, along)

    def check_room(self, end: Solutions) -> None:
        """Raise where what is a solution is too small or too large for its dtype.

        In a backward pass gradients underflow and overflow, as all of PyTorch's do.
        """
        dtype = self._operator.dtype
        bounds = torch.finfo(dtype)
        # the step between numbers there, and what may be lost
        least = bounds.tiny * bounds.eps / default_rtol(dtype)
        each = zip(listed(self.inner.amax(end.x)), self.unit, self.units, end.status, strict=True)
        for largest, size, unit, status in each:
            about, meant = largest * (size / unit), status in ("converged", "iterations")
            lost = largest > 0 and not least <= about <= bounds.max
            if lost and meant and (unit != 1 or self._given.kind != "rows"):
                raise InputError(
                    f"solve: the solution's largest entry is about {about:.1g}, which {dtype} "
                    f"cannot represent. Scale the operator by a number s, and the solution in "
                    f"double precision: hodiff.solve(A * s, b).value.double() * s."
                )

    def _spelled(self, rows: Tensor) -> Any:
        return spelled(self._operator, rows, self._given)

    def _told(self, numbers: list[Any], dtype: torch.dtype) -> Any:
        """A number for each right-hand side; of a single one, as Python's own."""
        batch, count = self._operator._domain.batch, self._given.number
        if not batch and count is None:
            return numbers[0]
        line = torch.tensor(numbers, dtype=dtype, device=self.rows.device)
        if self._given.kind == "rows":
            return line
        line = line.reshape(batch if count is None else (count, *batch))
        return line.movedim(0, -1) if self._given.kind == "columns" else line


def _parsed(
    operator: LinearOperator, b: Any, name: str, inner: Inner
) -> tuple[Tensor, Vectors, list[float]]:
    """Vectors as rows, a single one flat, in the precision of sums;
    spelling and largest entries.
    """
    given = b if isinstance(b, Vectors) else operator._domain.parse(b, name)
    rows = flat_rows(operator, given).detach()
    if _versions.is_batched(rows):
        raise InputError(
            f"{name} is batched by torch.vmap, but solve looks at values. Call it once, outside: K "
            f"right-hand sides are columns (D, K), and an operator with batch_ndim=1 holds one "
            f"system per sample."
        )
    rows = rows.to(sum_dtype(rows.dtype))
    if rows.ndim == 2 and len(rows) == 1 and not operator._domain.batch:
        rows = rows[0]
    largest = listed(inner.amax(rows))
    if not all(map(math.isfinite, largest)):
        raise InputError(f"{name} has entries that are not finite.")
    return rows, given, largest


def flat_rows(operator: LinearOperator, given: Vectors) -> Tensor:
    """Vectors as rows, a single one flat; of a stack of matrices, a row for each."""
    domain = operator._domain
    if given.kind == "rows":
        return given.parts[0]
    if given.kind == "columns" and not domain.batch:
        return given.parts[0].T
    rows = domain.join(given.parts, given.number)
    return rows.flatten(0, -2) if domain.batch else rows


def spelled(operator: LinearOperator, rows: Tensor, given: Vectors) -> Any:
    """Flat rows as `given` was spelled."""
    rows, domain = rows.to(operator.dtype), operator._domain
    if given.kind == "rows":
        return rows.reshape(-1, domain.width)
    lead = domain.batch if given.number is None else (given.number, *domain.batch)
    rows = rows.reshape((*lead, domain.width))
    if given.kind == "columns":
        return rows.movedim(0, -1)
    return rows if given.kind == "flat" else domain.result(domain.split(rows), given.tree)


def as_float(value: Any, name: str) -> float:
    """A number of at least 0, which may be given as a tensor of one real element."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        value = value.detach().item()
    elif isinstance(value, Tensor):
        raise InputError(
            f"{name}: got a tensor of shape {tuple(value.shape)}, {value.dtype}; expected a "
            f"number, or a tensor of one real element. For a number per entry, or per system of a "
            f"stack, add a diagonal of the operator's size: A + hodiff.MatrixOperator(d), for a "
            f"stack with its batch_ndim=."
        )
    _arguments.check_number(value, name, least=0)
    return float(value)


_OF_TWO = (
    "is not finite, so the operator or the preconditioner has NaN or infinite entries, or the "
    "preconditioner is so far from the inverse of the operator that products overflow. Solve "
    "without it to find out, and give one that approximates that inverse, including its scale."
)


def _rounded(operator: LinearOperator, why: str, damping: float = 0.0) -> Product:
    """The operator's product with rows of the precision of sums; it rounds as the operator does.

    `why` it may not be finite.
    """
    dtype, inner = operator.dtype, _krylov.of(operator)

    def product(v: Tensor, numbers: list[int]) -> Tensor:
        given = v if v.dtype is dtype else v.to(dtype)
        if v.ndim == 1:
            images = operator._times(given)
        elif operator._domain.batch:
            images = operator._times_some(given, torch.tensor(numbers, device="cpu"))
        else:
            images = operator._times_rows(given)
        images = images if v.dtype is dtype else images.to(v.dtype)
        check_finite(images, "solve", why, inner)
        return torch.add(images, v, alpha=damping) if damping else images

    return product


class Measured:
    """Products in units of their own, where their squares have no place in the dtype.

    The solutions of the systems are then in these units, too.
    """

    def __init__(self, product: Product, sides: Sides) -> None:
        """Measure a product, with the units of systems, all 1, to be changed."""
        self._product, self._inner = product, sides.inner
        self._units = sides.units
        self._known = self._plain = False

    def __call__(self, v: Tensor, numbers: list[int]) -> Tensor:
        image = self._product(v, numbers)
        if not self._known:
            self._known, room = True, torch.finfo(image.dtype).max ** 0.25
            for place, size in zip(numbers, listed(self._inner.amax(image)), strict=True):
                if size and not 1 / room < size < room:
                    self._units[place] = float(
                        near(torch.tensor(size, dtype=image.dtype, device="cpu"))
                    )
            self._plain = set(self._units) == {1.0}
        if self._plain:
            return image
        units = number([self._units[place] for place in numbers], image)
        return image / column(units, image)


def _preconditioning(
    preconditioner: Any, operator: LinearOperator, method: Method
) -> Product | None:
    if preconditioner is None:
        return None
    preconditioner = check_square(
        preconditioner,
        "preconditioner",
        symmetric=method in ("cg", "minres"),
        instead="method='gmres'",
        stacks=True,
    )
    check_places(preconditioner._domain, operator._domain, "preconditioner")
    if preconditioner.shape != operator.shape or preconditioner.dtype != operator.dtype:
        raise InputError(
            f"preconditioner has shape {tuple(preconditioner.shape)} and dtype "
            f"{preconditioner.dtype}, but the operator has {tuple(operator.shape)} and "
            f"{operator.dtype}."
        )
    return _rounded(preconditioner, _OF_TWO)


def _method(
    method: Method, operator: LinearOperator, restart: int | None, scale: float
) -> tuple[Callable[..., Block], int]:
    """The method, and how many vectors GMRES keeps."""
    _arguments.check_number(scale, "scale", positive=True)
    if scale != 1 and method != "neumann":
        raise InputError(f"scale is an option of method='neumann', not of {method!r}.")
    if restart is not None and method != "gmres":
        raise InputError(f"restart is an option of method='gmres', not of {method!r}.")
    size = operator.shape[-1]
    room = (
        kept_vectors(size, least=30)
        if restart is None
        else _arguments.check_integer(restart, "restart", least=1)
    )
    return METHODS[method], min(room, size)


METHODS: dict[Method, type[Block]] = {
    "cg": ConjugateGradients,
    "minres": MINRES,
    "gmres": GMRES,
    "neumann": Neumann,
}


def _is_dear(stack: LinearOperator) -> bool:
    """Whether its matrices take so long that a few steps come first."""
    size = stack.shape[-1]
    return not isinstance(stack, MatrixOperator) and (size >= 4 * SOON or stack._chunk(size) < size)


def _dense_solutions(
    operator: LinearOperator, damping: float, sides: Sides, definite: bool
) -> Tensor | None:
    """The solutions by the dense matrices of a stack; zeros where these are singular.

    Of a single matrix None, where its products do not fit into one pass; zeros, where it has to be
    `definite` and is not.
    """
    b, size = sides.rows, operator.shape[-1]
    single = not operator._domain.batch
    if single and operator._chunk(size) < size:
        return None
    wide = torch.promote_types(b.dtype, torch.float32)
    matrices = constant(operator._dense()).reshape(-1, size, size).to(wide)
    matrices.diagonal(dim1=-2, dim2=-1).add_(damping)
    columns = b.reshape(-1, len(matrices), size).movedim(0, -1) if len(matrices) else b[:, :, None]
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrices)
    ends = factors.diagonal(dim1=-2, dim2=-1).abs()
    eps = torch.finfo(operator.dtype).eps
    bends = single and definite and torch.linalg.cholesky_ex(matrices).info
    if single and (bends or ends.min() <= 10 * size * eps * ends.max()):
        return torch.zeros_like(b)  # steps find the smallest solution, or where it bends
    x = torch.linalg.lu_solve(factors, pivots, columns)
    with as_given(x):
        rest = (columns - matrices @ x).norm(dim=-2, keepdim=True)
    x = torch.where(rest < columns.norm(dim=-2, keepdim=True), x, 0.0)
    x = x.movedim(-1, 0).reshape(b.shape)
    return x * column(number(sides.units, x), x)


def _by_rows(
    operator: LinearOperator, damping: float, sides: Sides, limit: int
) -> tuple[Tensor | None, int]:
    """The solutions by the thin side, where that costs less than so many products;
    how many are left.
    """
    before = operator.products
    thin = operator._by_rows(min(limit - 2, USUAL))
    x = None if thin is None else thin.solved(sides.rows, damping)
    return x, limit - (operator.products - before)


def _limit(
    operator: LinearOperator, method: Method, rtol: Any, products: Any, iterations: Any
) -> int:
    """The most products, or steps, that there may be."""
    if iterations is None:
        if method == "neumann":
            raise InputError(
                "method='neumann' sums a fixed number of terms; give that number as iterations=."
            )
        default = min(10 * operator.shape[-1] + 10, 1000)
        return (
            default if products is None else _arguments.check_integer(products, "products", least=2)
        )
    if rtol is not None or products is not None:
        other = "products" if rtol is None else "rtol"
        raise InputError(
            f"iterations: exactly so many are taken, whatever {other} says; give one of the two."
        )
    return _arguments.check_integer(iterations, "iterations", least=0 if method == "neumann" else 1)


def _begun(
    product: Product, sides: Sides, x: Tensor | None, tolerance: list[float]
) -> tuple[Solutions, Tensor, list[int]]:
    """Solutions at x, the residuals of those that are none yet, and which these are."""
    lengths, r, everywhere = sides.lengths, sides.rows, [*range(sides.count)]
    end = Solutions.of(sides.count, zeros(r) if x is None else x)
    if x is not None and any(listed(sides.inner.amax(x))):
        r = r - product(x, everywhere)
        lengths, end.taken = listed(sides.inner.norms(r)), [1] * sides.count
    end.size = [length / size for length, size in zip(lengths, sides.sizes, strict=True)]
    end.status = ["converged"] * sides.count
    at = [place for place in everywhere if end.size[place] > tolerance[place]]
    return end, selected(r, at, sides.count), at


def stepped(
    run: Callable[..., Solutions],
    systems: Systems,
    sides: Sides,
    x: Tensor | None,
    steps: int,
    method: Method,
) -> Solutions:
    """The solutions after so many steps from x; the residuals are the method's own,
    where it has them.
    """
    end, r, at = _begun(systems.product, sides, x, [systems.eps] * sides.count)
    if not at:
        return end
    ends = run(r, [systems.eps * sides.sizes[place] for place in at], [steps] * len(at), at, end)
    moved, left = selected(end.x, at, sides.count) + ends.x, ends.size
    if method == "minres":  # whose own are measured by the preconditioner
        rest = selected(sides.rows, at, sides.count) - systems.product(moved, at)
        left = listed(sides.inner.norms(rest))
    end.put(at, moved)
    for i, (place, residual, status) in enumerate(zip(at, left, ends.status, strict=True)):
        end.size[place], end.direction[place] = residual / sides.sizes[place], ends.direction[i]
        # rounding is left, which is no failure
        if status == "stagnation" and end.size[place] <= 1e3 * systems.eps:
            status = "converged"
        end.status[place] = "iterations" if status == "budget" else status
    return end


def solved(
    run: Callable[..., Solutions],
    systems: Systems,
    sides: Sides,
    x: Tensor | None,
    rtol: list[float],
    limit: int,
    by_matrix: Callable[[], Tensor | None] | None = None,
    soon: int = 0,
) -> Solutions:
    """Run the method, look at the true residuals, and begin anew from there while that helps.

    Rounding makes the residual of a recurrence drift from the true one; a fresh start cures it.
    What does not end soon begins with the solutions `by_matrix`.
    """
    if by_matrix is not None:
        end = solved(run, systems, sides, x, rtol, soon) if soon else None
        if end is not None and set(end.status) <= {"converged"}:
            return end
        x = by_matrix()
        limit -= soon if x is None else soon + x.shape[-1]
    end, r, at = _begun(systems.product, sides, x, rtol)
    while at:
        # The last product is kept for the true residual.
        left = [limit - end.taken[place] - 1 for place in at]
        ends = run(r, [0.5 * rtol[place] * sides.sizes[place] for place in at], left, at, end)
        moved = selected(end.x, at, sides.count) + ends.x
        rest = selected(sides.rows, at, sides.count) - systems.product(moved, at)
        lengths, following = listed(sides.inner.norms(rest)), list[int]()
        sizes = [length / sides.sizes[place] for place, length in zip(at, lengths, strict=True)]
        better = [i for i, place in enumerate(at) if sizes[i] < end.size[place]]
        end.put([at[i] for i in better], selected(moved, better, len(at)))
        for i, place in enumerate(at):
            before, after = end.size[place], sizes[i]
            end.size[place] = min(before, after)
            end.taken[place] += ends.taken[i] + 1
            if after <= rtol[place]:
                end.status[place] = "converged"
            elif ends.status[i] == "negative curvature":
                end.status[place], end.direction[place] = "negative curvature", ends.direction[i]
            elif limit - end.taken[place] < 2:
                end.status[place] = "budget"
            elif not after < 0.5 * before:
                end.status[place] = "stagnation"
            else:
                following.append(i)
        r, at = selected(rest, following, len(at)), [at[i] for i in following]
    return end


def _explanation(record: SolveRecord[Any], rtol: float, iterations: int | None) -> str:
    wanted = f"rtol={rtol:g}" if iterations is None else f"iterations={iterations}"
    advice = {
        "negative curvature": (
            "conjugate gradients met a direction of negative or zero curvature: "
            "the operator is not positive definite. A semidefinite one, as a Gauss-Newton matrix "
            "is, needs damping; an indefinite one needs method='minres', "
            "or hodiff.GaussNewtonOperator in its place"
        ),
        "divergence": (
            "the Neumann series diverges: an eigenvalue of A / scale is not within the unit circle "
            "around 1. Give a larger scale=, or add damping"
        ),
        "budget": "the budget of products is spent. Allow more, add damping, or give a "
        "preconditioner",
        "stagnation": (
            "the residual no longer falls: the system is singular (b lies partly outside its "
            "range), rounding error limits it, or GMRES keeps too few vectors (restart=). Add "
            "damping, or use double precision"
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
