"""Stochastic Lanczos quadrature: `spectral_density`, `logdet`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff._core import _arguments, _settings, _tree
from hodiff._core._arguments import Probes
from hodiff._core._vectors import empty, near, standard_error, sum_dtype
from hodiff.curvature import _krylov
from hodiff.curvature._krylov import FEW, Inner, axpy, column
from hodiff.curvature._links import told
from hodiff.curvature._operator import LinearOperator, as_given, constant, normal
from hodiff.curvature._probes import (
    UNSYMMETRIC,
    Callback,
    EstimatorProgress,
    RandomVectors,
    all_reached,
    check_detached,
    check_finite,
    check_rtol,
    check_square,
    default_rtol,
    flat_product,
    is_recorded,
    reached,
    refuse_live,
    warn_not_converged,
)
from hodiff.curvature._records import DensityRecord, TraceRecord
from hodiff.curvature._solve import as_float, solve
from hodiff.curvature._thin import ThinMatrix
from hodiff.errors import InputError


def spectral_density(
    operator: LinearOperator,
    *,
    samples: int = 10,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    steps: int = 50,
    width: float | None = None,
    points: int = 500,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> DensityRecord:
    r"""The density of an operator's eigenvalues, ρ(t) = 1/D · Σᵢ g(t - λᵢ) with a narrow Gaussian
    g.

    For each random vector, a Lanczos process of `steps` products gives the nodes and weights of a
    Gauss quadrature rule. The density is their mean, with each node drawn as a Gaussian
    \(g_\sigma\) of width \(\sigma\). Isolated eigenvalues at both ends are resolved sharply if
    their weight is visible: one of *D* has \(1/D\).

    Args:
        operator: A symmetric operator.
        samples: How many random vectors to draw. If they take at least as many products as the
            operator has columns, all eigenvalues are computed instead.
        probes: The distribution of their entries: `"rademacher"` (1 and -1) or `"gaussian"`.
        vectors: Your own random vectors, one or several, in a form that `A @ v` accepts (several
            flat ones are columns `(D, K)`), with independent entries of mean 0 and variance 1; then
            none is drawn. Vectors that are all equal up to sign count as one.
        create_graph: The result is detached. None warns if that makes a constant of something that
            requires grad; False accepts it silently; True raises, and the error says how to get the
            derivative.
        steps: The number of products for each vector, which is the number of nodes of its rule.
        width: \(\sigma\), in units of the eigenvalues; None: a fiftieth of the spectrum's extent.
        points: How many points the grid has; it reaches four widths beyond the outermost nodes.
        generator: The source of the random vectors; None: the default generator of the operator's
            device.
        callback: A function that receives the current record, after some of the vectors.
        progress: Whether to show a progress bar. None: in a terminal, after two seconds.

    Returns:
        A record: `value`, the density on `grid`, and its standard error `stderr`, each of shape
        `(points,)` (`stderr` is None for one vector); `nodes` and `weights` of shape
        `(samples, steps)`, from which every mean \(\tfrac1D \sum f(\lambda_i)\) follows:
        `record.mean(f)`; `width`; `products`; and `record.at(grid, width)`, the density elsewhere.

    Raises:
        InputError: The operator is not symmetric.

    Warns:
        HodiffWarning: The result is detached, although the operator or *vectors* require grad (see
            `create_graph`).

    Cost:
        `samples * steps` products, up to eight vectors in one. Memory: `steps` vectors for each of
        them, within 256 MiB.

    Note:
        The standard error covers the random vectors only. A rule of *m* nodes is exact for
        polynomials of degree 2m - 1, so structure narrower than about the spectrum's extent divided
        by `steps` is not resolved inside the bulk, however many vectors there are.

    Examples:
        Of two eigenvalues, one three times as frequent:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([1.0] * 300 + [5.0] * 100))
        >>> found = hodiff.spectral_density(A, samples=4, steps=2, probes="rademacher")
        >>> found.nodes[0].round(decimals=3), found.weights[0].round(decimals=3)
        (tensor([1., 5.], dtype=torch.float64), tensor([0.7500, 0.2500], dtype=torch.float64))

    Reference:
        Ghorbani, B., Krishnan, S., Xiao, Y. (2019). An investigation into neural net optimization
        via Hessian eigenvalue density. ICML. arXiv:1901.10159. Lin, L., Saad, Y., Yang, C. (2016).
        Approximating spectral densities of large matrices. SIAM Review 58(1).
        doi:10.1137/130934283.
    """
    operator = check_square(operator, "spectral_density", symmetric=True, instead=UNSYMMETRIC)
    check_detached("spectral_density", operator, create_graph, vectors=vectors)
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    _arguments.check_integer(steps, "steps", least=1)
    _arguments.check_integer(points, "points", least=2)
    if width is not None:
        _arguments.check_number(width, "width", positive=True, more=", or None")

    def record(quadrature: GaussRules, spent: int) -> DensityRecord:
        seen = quadrature.nodes[quadrature.weights > 1e-14]
        low, high = float(seen.min()), float(seen.max())
        # A spectrum of one value has no extent, but for rounding; its own size is then the unit.
        largest = max(abs(low), abs(high))
        sigma = width or (high - low if high - low > 1e-6 * largest else largest) / 50 or 1.0
        grid = torch.linspace(
            low - 4 * sigma, high + 4 * sigma, points, dtype=torch.float64, device="cpu"
        )
        exact = quadrature.exact
        empty = torch.empty(0, device="cpu")
        bare = DensityRecord(
            empty, None, grid, quadrature.nodes, quadrature.weights, sigma, exact, spent
        )
        value, error = bare.at(grid, sigma)
        return replace(bare, value=value, stderr=error)

    with EstimatorProgress(
        "spectral_density", operator, drawn.number * steps, callback, progress
    ) as watch:

        def look(so_far: GaussRules) -> bool:
            watch(lambda spent: record(so_far, spent))
            return False

        return record(rules(operator, drawn, steps, "spectral_density", look), watch.spent)


def logdet(
    operator: LinearOperator,
    *,
    shift: float | Tensor = 0.0,
    samples: int = 10,
    probes: Probes = "rademacher",
    vectors: Any = None,
    create_graph: bool | None = None,
    steps: int = 50,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> TraceRecord:
    r"""The log-determinant of a positive definite operator, log det(A + μI) = tr log(A + μI).

    Computed by stochastic Lanczos quadrature, like `hodiff.spectral_density`; of Gauss-Newton and
    Fisher matrices of few rows (see `hodiff.GaussNewtonOperator`) exactly, without `vectors`.

    Args:
        operator: A symmetric operator.
        shift: \(\mu\), added to the operator: a prior's precision or a damping.
        samples: How many random vectors to draw. If they take at least as many products as the
            operator has columns, all eigenvalues are computed instead.
        probes: The distribution of their entries: `"rademacher"` (1 and -1) or `"gaussian"`, whose
            errors are larger.
        vectors: Your own random vectors, one or several, in a form that `A @ v` accepts (several
            flat ones are columns `(D, K)`), with independent entries of mean 0 and variance 1; then
            none is drawn. Vectors that are all equal up to sign count as one.
        create_graph: Whether `value` can be differentiated, once and twice, with respect to `shift`
            and everything that the operator uses, as for `hodiff.solve`: for example an evidence to
            maximize. None: only inside the function of another hodiff call; elsewhere a warning
            says if something that requires grad becomes a constant, and False accepts that
            silently.
        steps: The maximal number of products for each vector. Fewer are taken if they solve \((A +
            \mu I)\, x = z\) to the tolerance of `hodiff.solve`.
        rtol: Stop as soon as the standard error is below `rtol * |value|` (checked every 8
            vectors). None: use all samples.
        generator: The source of the random vectors; None: the default generator of the operator's
            device.
        callback: A function that receives the current record, after some of the vectors.
        progress: Whether to show a progress bar. None: in a terminal, after two seconds.

    Returns:
        A record: `value` and `stderr`, tensors of shape `()`, of a stack of matrices of the batch's
        shape, in single precision at least (`stderr` is None where one vector says nothing about
        it); `converged`, None without `rtol`; and `products`. The standard error holds the spread
        over random vectors, and the error of their rules, judged by what doubling the steps has
        changed.

    Raises:
        InputError: The operator is not symmetric, or has shown an eigenvalue of \(A + \mu I\) that
            is negative, or zero up to rounding.

    Warns:
        ConvergenceWarning: `rtol` was not reached; or the error of the rules is larger than the
            spread over random vectors, so that more steps are needed, not more vectors.
        HodiffWarning: The result is detached, although the operator or *vectors* require grad (see
            `create_graph`).

    Cost:
        At most `samples * steps` products, for all vectors at once (with `rtol`, for eight).
        Memory: `steps` vectors for each of them, within 256 MiB. A stack of matrices takes as many
        products, each for all matrices, which have separate vectors. With `create_graph`, a
        differentiable product with each vector, and in the backward pass one more, or the rest of a
        linear system, for all vectors in parallel: the derivative is the mean of \((A^{-1}
        z)^\top\, \mathrm{d}A\; z\) over the same vectors, an unbiased estimate of the derivative,
        not the derivative of the estimate.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([1.0] * 300 + [4.0] * 100))
        >>> (
        ...     hodiff.logdet(A, samples=4, steps=2).value.round(decimals=1),
        ...     100 * torch.tensor(4.0).log(),
        ... )
        (tensor(138.6000), tensor(138.6294))

        The derivative of \(\log a b\) by *a* is \(1 / a\):

        >>> diagonal = torch.tensor([4.0, 5.0], requires_grad=True)
        >>> value = hodiff.logdet(hodiff.MatrixOperator(diagonal), create_graph=True).value
        >>> torch.autograd.grad(value, diagonal)
        (tensor([0.2500, 0.2000]),)

    Reference:
        Ubaru, S., Chen, J., Saad, Y. (2017). Fast estimation of tr(f(A)) via stochastic Lanczos
        quadrature. SIAM J. Matrix Anal. Appl. 38(4). doi:10.1137/16M1104974.
    """
    instead = "half the log-determinant of A.T @ A"
    operator = check_square(operator, "logdet", symmetric=True, instead=instead, stacks=True)
    recorded = is_recorded("logdet", operator, create_graph, vectors=vectors, shift=shift)
    drawn = RandomVectors(operator, samples, probes, vectors, generator)
    if recorded:
        refuse_live("there is no derivative with respect to it", vectors=vectors)
        drawn.kept()
    check_rtol(rtol, drawn.number)
    _arguments.check_integer(steps, "steps", least=1)
    number = as_float(shift, "shift")
    with EstimatorProgress("logdet", operator, drawn.number * steps, callback, progress) as watch:
        exact = drawn.exhaust(drawn.number * steps) or not operator._domain.numel
        rows = operator._domain.units(0, operator.shape[-1]) if exact and recorded else None
        columns = None if rows is None else operator._recorded_rows(rows)
        thin = None if recorded or drawn.given else operator._by_rows(drawn.number * steps)
        known = columns if thin is None else thin
        made, quadrature = _estimated_logdet(operator, number, drawn, steps, rtol, watch, known)
    if not recorded:
        return made
    rows = drawn.kept()[: len(quadrature.nodes)] if rows is None else rows
    value = _differentiable_logdet(operator, rows, shift, made.value, columns, quadrature.solutions)
    return replace(made, value=value)


def _estimated_logdet(
    operator: LinearOperator,
    shift: float,
    drawn: RandomVectors,
    steps: int,
    rtol: float | None,
    watch: EstimatorProgress,
    known: Tensor | ThinMatrix | None,
) -> tuple[TraceRecord, GaussRules]:
    """The record, and the rules that it is the mean of; by all columns, or rows, where known."""
    size, dtype = operator.shape[-1], sum_dtype(operator.dtype)
    eps = torch.finfo(operator.dtype).eps

    def estimate(quadrature: GaussRules) -> tuple[Tensor, Tensor | None, Tensor]:
        """Value, standard error over vectors, and the error of their rules."""
        logs, error = quadrature.means(
            lambda nodes, weights: _logs(nodes, weights, shift, eps) * size
        )
        spread = torch.zeros_like(logs[0]) if quadrature.exact else standard_error(logs)
        return logs.mean(0), spread, error

    def record(quadrature: GaussRules, rtol_asked: float | None, spent: int) -> TraceRecord:
        value, spread, rest = estimate(quadrature)
        error = None if spread is None else torch.hypot(spread, rest)
        converged = reached(value, error, rtol_asked, value.ndim)
        value = value.to(operator.device, dtype)
        return TraceRecord(value, None if error is None else error.to(value), converged, spent)

    def look(so_far: GaussRules) -> bool:
        watch(lambda spent: record(so_far, None, spent))
        several = rtol is not None and len(so_far.nodes) > 1
        return several and all_reached(record(so_far, rtol, 0).converged)

    everywhere = operator._domain.layout is not None  # whoever looks on, all take as many vectors
    seen = look if watch.seen or rtol is not None or everywhere else None
    if isinstance(known, ThinMatrix):
        quadrature = thin_rules(known, size)
    else:
        quadrature = rules(operator, drawn, steps, "logdet", seen, known, shift)
    value, spread, rest = estimate(quadrature)
    made = record(quadrature, rtol, watch.spent)
    allowed = 1e-2 * value.abs() if spread is None else spread.maximum(1e2 * eps * value.abs())
    if bool((rest > allowed).any()):
        warn_not_converged(
            f"logdet: the error of rules of {steps} steps is about "
            f"{float(rest.max()):.2g}{told(rest > allowed)}, more than the spread over random "
            "vectors; allow more steps, or add a shift."
        )
    elif not all_reached(made.converged):
        warn_not_converged(
            f"logdet: after {watch.spent} products the standard error is more than rtol={rtol:g} "
            f"of the value{told(~torch.as_tensor(made.converged))}; allow more samples."
        )
    return made, quadrature


def _differentiable_logdet(
    operator: LinearOperator,
    rows: Tensor,
    shift: float | Tensor,
    value: Tensor,
    columns: Tensor | None,
    start: Tensor,
) -> Tensor:
    """The value with its graph: of the matrix where its columns are known,
    else of the estimate over these vectors.
    """
    with _settings.recording():
        rows, value = normal(rows.to(operator.dtype)), normal(value)
        live = operator._halves()
        images = (live._recorded_rows(rows) if columns is None else columns) + shift * rows
        if columns is not None:
            # PyTorch has no determinant of half precision
            matrix = images.to(value.dtype).movedim(0, -1)
            return torch.logdet((matrix + matrix.mT) / 2)
        return _LogDeterminant.apply((operator, live, rows, shift, start), value, images)


class _LogDeterminant(torch.autograd.Function):
    """The value; its derivative by the products A z is A⁻¹ z, of the mean over vectors."""

    @staticmethod
    def forward(ctx: Any, given: tuple[Any, ...], value: Tensor, images: Tensor) -> Tensor:
        ctx.given = given
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Any, ...]:
        (operator, live, rows, shift, start), recorded = ctx.given, torch.is_grad_enabled()
        parts, near = (operator._domain.split(part.to(rows)) for part in (rows, start))
        operator = live if recorded else operator
        record = solve(operator, parts, damping=shift, start=near, create_graph=recorded)
        solutions = operator._domain.join(record.value, len(rows))
        return None, None, v[0].unsqueeze(-1) * solutions / len(solutions)


def _logs(nodes: Tensor, weights: Tensor, shift: float, eps: float) -> Tensor:
    """The mean of the logarithm by each rule."""
    shifted = nodes + shift
    seen = torch.where(weights > 0, shifted, math.inf)  # a node without weight stands for nothing
    lost = ~(seen.amin(-1) > 10 * eps * nodes.abs().amax(-1).clamp_min(abs(shift)))
    if bool(lost.any()):
        least, largest = float(seen.amin(-1)[lost][0]), float(nodes.abs().amax(-1)[lost][0])
        below = shift - least > 10 * eps * largest
        other = (
            " hodiff.GaussNewtonOperator approximates a Hessian and is never negative."
            if below
            else ""
        )
        raise InputError(
            f"logdet: the operator has an eigenvalue of about {least - shift:.3g}, which with "
            f"shift={shift:g} is not positive (up to rounding), so the log-determinant does not "
            f"exist; give a larger shift=.{other}"
        )
    return (weights * torch.where(weights > 0, shifted, 1.0).log()).sum(-1)


# --- stochastic Lanczos quadrature: eigenvalues and weights of Krylov spaces of random vectors ----
# A Lanczos process from z / |z| gives a tridiagonal matrix T; with its eigenvalues θ and the
# squares τ of the first entries of its eigenvectors, |z|² Σ τ f(θ) is Gauss's rule for z'f(A)z,
# whose mean over z is the trace of f(A).


BASIS_BYTES = 256 * 2**20
"""What the bases of the random vectors that are advanced together may hold."""


class GaussRules(NamedTuple):
    """One Gauss rule for each random vector: nodes and weights `(K, *batch, steps)`, on the CPU.

    They are in double precision. Weights are of the mean over eigenvalues: they add up to 1 in
    expectation. `coarser` are the rules of half and of a quarter of the steps, by which the error
    of a rule is judged (none where nodes are the eigenvalues); `whole` says which vectors have no
    part outside their rule, so that there is no such error. With a shift, `solutions` are those of
    (A + shift) x = z that lie in the spaces.
    """

    nodes: Tensor
    weights: Tensor
    whole: Tensor
    coarser: tuple[tuple[Tensor, Tensor], ...]
    solutions: Tensor

    @property
    def exact(self) -> bool:
        """Whether the nodes are the eigenvalues."""
        return not self.coarser

    def means(self, f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The mean of a function (of nodes and weights) by each vector, `(K,)`, and its error by
        the rule.

        Of rules with ever twice as many nodes the differences fall by a factor r; those to come add
        up to r / (1 - r) of the last one, as in a geometric series.
        """
        fine = f(self.nodes, self.weights)
        if self.exact:
            return fine, torch.zeros_like(fine[0])
        half, quarter = (f(*rule) for rule in self.coarser)
        pairs = ((fine, half), (half, quarter))
        last, before = (((a - b) * ~self.whole).mean(0).abs() for a, b in pairs)
        ratio = torch.where(before > 0, last / before, 1).clamp_max(0.75)
        return fine, last * ratio / (1 - ratio)


def exact_rules(operator: LinearOperator, name: str, columns: Tensor | None = None) -> GaussRules:
    """All eigenvalues, each with the weight of one."""
    matrix = constant(operator._dense()) if columns is None else columns.detach().movedim(0, -1)
    values = eigenvalues(check_finite(matrix, name))[None]
    whole = torch.ones(values.shape[:-1], dtype=torch.bool, device="cpu")
    return GaussRules(values, torch.full_like(values, 1 / values.shape[-1]), whole, (), values[:0])


def thin_rules(thin: ThinMatrix, size: int) -> GaussRules:
    """All eigenvalues, those of M M' and one for all others, with the weight of these."""
    values = F.pad(eigenvalues(thin.gram).clamp_min(0), (0, 1)) + thin.shift
    weights = torch.full_like(values, 1 / size)
    weights[-1] = 1 - (len(values) - 1) / size
    return GaussRules(
        values[None], weights[None], torch.ones(1, dtype=torch.bool, device="cpu"), (), values[:0]
    )


def eigenvalues(matrix: Tensor) -> Tensor:
    """All of a symmetric matrix, rising, or of each of a stack; in double precision on the CPU."""
    precise = torch.float64 if matrix.device.type != "mps" else torch.float32
    matrix = matrix.to(precise).cpu().double()
    unit = matrix.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(unit > 0, unit, 1.0)
    return torch.linalg.eigvalsh((matrix + matrix.mT) / (2 * unit)) * unit[..., 0]


def rules(
    operator: LinearOperator,
    drawn: RandomVectors,
    steps: int,
    name: str,
    look: Callable[[GaussRules], bool] | None,
    columns: Tensor | None = None,
    shift: float | None = None,
) -> GaussRules:
    """All eigenvalues where that costs no more; else the rules of random vectors.

    They are taken some at a time where `look` sees what there is so far, and may end it. For the
    `shift` see `lanczos`.
    """
    size, dtype = operator._domain.numel, sum_dtype(operator.dtype)
    whole = operator._domain.layout is None and drawn.exhaust(drawn.number * steps)
    if whole or not size:
        return exact_rules(operator, name, columns)
    steps = min(steps, operator.shape[-1])
    together = max(1, BASIS_BYTES // (size * (steps + 1) * dtype.itemsize))
    count = min(together, 8 if look else drawn.number)
    quadrature = _of(operator, drawn.take(min(count, drawn.number)).to(dtype), steps, name, shift)
    while not (look and look(quadrature)) and len(quadrature.nodes) < drawn.number:
        more = drawn.take(min(count, drawn.number - len(quadrature.nodes))).to(dtype)
        quadrature = _joined(quadrature, _of(operator, more, steps, name, shift))
    return quadrature


def _joined(first: GaussRules, second: GaussRules) -> GaussRules:
    """The rules of both, one behind the other."""
    tensors, _, tree = _tree.flatten(first)
    pairs = zip(tensors, _tree.flatten(second)[0], strict=True)
    return _tree.rebuild(tree, iter([torch.cat(pair) for pair in pairs]))


def _of(
    operator: LinearOperator, rows: Tensor, steps: int, name: str, shift: float | None
) -> GaussRules:
    """The rules of some vectors; steps that were not needed are nodes without a weight."""
    tridiagonal = lanczos(operator, rows, steps, name, shift)
    diagonal, offdiagonal, whole, unit, _ = tridiagonal
    lead, inner = rows.shape[:-1], _krylov.of(operator)
    squares = inner.sums(lambda z: z.double().square().sum(-1), rows).cpu().unsqueeze(-1)
    rules = list[tuple[Tensor, Tensor]]()
    for part in (1, 2, 4):
        count, most = -(-diagonal.shape[1] // part), -(-steps // part)
        matrices = _matrices(diagonal[:, :count], offdiagonal[:, : count - 1])
        nodes, vectors = torch.linalg.eigh(matrices)  # Golub and Welsch 1969
        nodes, weights = (F.pad(x, (0, most - count)) for x in (nodes, vectors[:, 0].square()))
        nodes = (nodes * unit[:, None]).reshape(*lead, most)
        rules.append((nodes, weights.reshape(*lead, most) * squares / operator.shape[-1]))
    solutions = rows if shift is None else tridiagonal.solutions(rows, shift, inner)
    return GaussRules(*rules[0], whole.reshape(lead), tuple(rules[1:]), solutions)


def _matrices(diagonal: Tensor, offdiagonal: Tensor) -> Tensor:
    beside = torch.diag_embed(offdiagonal, 1)
    return torch.diag_embed(diagonal) + beside + beside.mT


# --- Lanczos processes side by side, each kept as orthogonal as its Gauss rule needs --------------
# With A v_j = β_{j-1} v_{j-1} + α_j v_j + β_j v_{j+1} the vectors of a process are orthogonal but
# for rounding, which grows. To take the parts in all vectors before out of each new one costs as
# much as a product of a small network. But T is right up to rounding as long as all v_j'v_k stay
# below its square root, and how large they are follows from the α and β alone (Simon 1984,
# doi:10.1090/S0025-5718-1984-0725988-X). So the parts are taken out only where that is at stake.


NOISE = 16
"""How many units of rounding each step adds to the overlaps: measured,
they then stay below a tenth of the limit.
"""


class Tridiagonal(NamedTuple):
    """The results of K processes in so many steps; of a stack, K of each matrix.

    Attributes:
        diagonal: The α, `(K, steps)`, in double precision on the CPU.
        offdiagonal: The β between them, `(K, steps - 1)`.
        whole: Whether a process has exhausted its space. It goes on with zeros, to which its rule
            gives no weight.
        unit: What α and β of each are measured in.
        basis: The v, `(K, steps, D)`.
    """

    diagonal: Tensor
    offdiagonal: Tensor
    whole: Tensor
    unit: Tensor
    basis: Tensor

    def solutions(self, rows: Tensor, shift: float, inner: Inner) -> Tensor:
        """The x = |z| V (T + shift)⁻¹ e of the rows z, whose residuals are along the next v."""
        ended = F.pad((self.offdiagonal == 0).cumsum(1) > 0, (1, 0))
        diagonal = torch.where(ended, 1.0, self.diagonal + shift / self.unit[:, None])
        first = inner.norms(rows.flatten(0, -2)) / self.unit
        y, _ = torch.linalg.solve_ex(
            _matrices(diagonal, self.offdiagonal), F.pad(first[:, None], (0, diagonal.shape[1] - 1))
        )
        with as_given(rows):
            return (y.to(rows).unsqueeze(1) @ self.basis).reshape(rows.shape)


def lanczos(
    operator: LinearOperator, rows: Tensor, steps: int, name: str, shift: float | None = None
) -> Tridiagonal:
    """The processes that begin with the given rows z, `(K, *batch, D)`.

    With a shift they end where they know all solutions of (A + shift) x = z: the residual follows
    from the pivots of T + shift.
    """
    shape, rows = rows.shape, rows.flatten(0, -2)
    count, size = rows.shape
    eps = torch.finfo(operator.dtype).eps
    basis = empty(f"{name}: the basis", (count, steps, size), rows, "Pass fewer steps=.")
    diagonal = torch.zeros((count, steps), dtype=torch.float64, device="cpu")
    offdiagonal = torch.zeros_like(diagonal)
    overlaps = Overlaps(diagonal, offdiagonal, eps)
    inner = _krylov.of(operator)
    lengths = inner.norms(rows)
    if not bool(lengths.all()):
        raise InputError("vectors: one of them is zero; no Lanczos process starts from it.")
    torch.div(rows, column(lengths, rows), out=basis[:, 0])
    beta = unit = scale = below = torch.zeros_like(lengths)
    enough = 0.0 if shift is None else default_rtol(operator.dtype)
    left, taken = below + 1, 0

    def largest(sizes: Tensor) -> Tensor:
        """The largest size of all processes with the same matrix."""
        return sizes.reshape(shape[0], -1).amax(0).repeat(shape[0])

    for j in range(steps):
        v, taken = basis[:, j], j + 1
        image = flat_product(operator, v.reshape(shape)).reshape(count, size)
        if not j:
            unit = near(largest(inner.amax(image)).to(image.dtype)).double()
        alpha = check_finite(inner.dots(v, image) / unit, name)
        w = axpy(image / column(unit, image), -alpha, v)
        w = axpy(w, -beta, basis[:, j - 1]) if j else w
        beta = inner.norms(w)
        diagonal[:, j], offdiagonal[:, j] = alpha, beta
        scale = scale.maximum(largest(alpha.abs())).maximum(largest(beta))
        apart = overlaps.to_orthogonalize(j, scale)
        for some in [slice(None)] if len(apart) > FEW else [slice(row, row + 1) for row in apart]:
            _, w[some], beta[some] = inner.orthogonalized(
                w[some], [basis[some, : j + 1]], eps * scale[some]
            )
        offdiagonal[:, j] = beta = torch.where(beta > 10 * eps * scale, beta, 0.0)
        pivot = alpha + (shift or 0.0) / unit - below  # of T + shift, by elimination
        below, left = beta**2 / pivot, beta if shift is None else left * beta / pivot
        if taken == steps or not bool((left.abs() > enough).any()):
            break
        torch.div(w, column(torch.where(beta > 0, beta, math.inf), w), out=basis[:, j + 1])
    whole, beside = ~(left.abs() > enough), offdiagonal[:, : taken - 1]
    return Tridiagonal(diagonal[:, :taken], beside, whole, unit, basis[:, :taken])


class Overlaps:
    """The vectors' distance from orthogonality in each process, by the recurrence for v_j'v_k of
    Simon (1984), doi:10.1090/S0025-5718-1984-0725988-X.

    Different from there:

    1. The term of rounding is a bound by the largest entry of T so far, measured, and not random.
    2. Where orthogonality is at stake, a vector and the next one are made orthogonal to all before.

    Args:
        diagonal: The α as they are found; beside: the β.
        eps: The rounding of products.
    """

    def __init__(self, diagonal: Tensor, offdiagonal: Tensor, eps: float) -> None:
        self._diagonal = diagonal
        self._beside = offdiagonal
        self._eps = eps
        self._now = torch.ones(
            (len(diagonal), 1), dtype=torch.float64, device="cpu"
        )  # v_j'v_k of the last vector, for k <= j
        self._before = self._now[:, :0]
        self._again = torch.zeros(len(diagonal), dtype=torch.bool, device="cpu")

    def to_orthogonalize(self, j: int, scale: Tensor) -> list[int]:
        """The processes whose vector j + 1 has to be made orthogonal to those before;
        that is taken to be done.
        """
        alpha = self._diagonal[:, : j + 1]
        beta = self._beside[:, : j + 1]
        now = self._now
        terms = torch.zeros_like(now)
        if j:
            inner = terms[:, :j]
            inner += beta[:, :j] * now[:, 1:] + (alpha[:, :j] - alpha[:, j:]) * now[:, :j]
            inner -= beta[:, j - 1 : j] * self._before
            inner[:, 1:] += beta[:, : j - 1] * now[:, : j - 1]
        last, scale = beta[:, j:], scale[:, None]
        following = (terms + NOISE * self._eps * scale * torch.where(terms < 0, -1, 1)) / last
        worst = following.abs().amax(1) > self._eps**0.5
        previous = (worst | self._again) & (last > 10 * self._eps * scale)[:, 0]
        self._again = worst & previous  # two vectors in a row, since the next one follows from both
        following[previous] = 0
        self._before, self._now = now, torch.cat([following, torch.ones_like(last)], 1)
        return previous.nonzero()[:, 0].tolist()
