"""The common part of estimators: random vectors, checks, who looks on while they loop."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _reverse, _settings, _tree, _values, _vectors
from hodiff.curvature import _krylov
from hodiff.curvature._krylov import ALONE, Inner
from hodiff.curvature._operator import WAYS, LinearOperator, say_detached
from hodiff.curvature._records import Route
from hodiff.errors import ConvergenceWarning, GraphError, HodiffWarning, InputError

BLOCK = 8
"""Vectors between two looks at a tolerance."""
REPEATS_BY_CHANCE = 64
"""Below so many entries independent vectors of signs may well be equal."""


class RandomVectors:
    """The random vectors of one estimate, as rows: drawn when they are needed, or the caller's own.

    Attributes:
        number: How many there are to be.
        given: Whether they are the caller's own.
    """

    def __init__(
        self,
        operator: LinearOperator,
        samples: int,
        probes: _arguments.Probes,
        vectors: Any,
        generator: torch.Generator | None,
        *,
        live: bool = False,
    ) -> None:
        """Draw the vectors; with `live`, the caller's own keep their graph."""
        _arguments.check_integer(samples, "samples", least=1)
        _arguments.check_option(probes, _arguments.Probes, "probes")
        _vectors.check_generator(generator)
        self._size, self._like = operator.shape[-1], operator._domain.zeros_flat(0)
        self._shape = (*operator._domain.batch, operator._domain.width)
        self._inner = _krylov.of(operator)
        self._probes: _arguments.Probes = probes
        self._generator = source(operator, generator)
        self._rows = (
            None
            if vectors is None
            else _distinct(_rows(operator._domain, vectors, self._inner, live=live), self._inner)
        )
        self.given = self._rows is not None
        self.number = samples if self._rows is None else len(self._rows)
        self._taken = 0

    def exhaust(self, products: int) -> bool:
        """Whether so many products, of vectors drawn, are as many as the operator has columns."""
        return not self.given and products >= self._size

    def spare(self, products: int) -> int:
        """Up to how many products an exact result may take in place of so many of vectors drawn."""
        return 0 if self.given else products

    def kept(self) -> Tensor:
        """All of them, which from now on can be taken more than once."""
        if self._rows is None:
            self._rows = self.take(self.number)
            self._taken = 0
        return self._rows

    def take(self, count: int) -> Tensor:
        """The next `count` of them."""
        start, self._taken = self._taken, self._taken + count
        if self._rows is not None:
            return self._rows[start : self._taken]
        return self._inner.draw((count, *self._shape), self._like, self._probes, self._generator)


def source(operator: LinearOperator, generator: torch.Generator | None) -> torch.Generator | None:
    """The generator to draw from: of several processes that share the data all draw the same."""
    layout, group_sum = operator._domain.layout, operator._group_sum
    if layout is not None:
        return layout.generator(generator)
    return (
        generator
        if generator is not None or group_sum is None
        else group_sum.generator(operator.device)
    )


def _rows(domain: _vectors.Space, vectors: Any, inner: Inner, *, live: bool) -> Tensor:
    if live and not torch.is_grad_enabled():
        with _settings.recording():
            return _rows(domain, vectors, inner, live=True)
    kind, parts, number, _ = domain.parse(vectors, "vectors")
    parts = parts if live else [part.detach() for part in parts]
    rows = parts[0].T if kind == "columns" else domain.join(parts, number)
    rows = rows[None] if number is None else rows
    if number == 0 or not bool(inner.amax(rows.detach()).isfinite().all()):
        raise InputError(
            f"vectors: {'got none' if number == 0 else 'some entries are not finite'}."
        )
    return rows


def _distinct(rows: Tensor, inner: Inner) -> Tensor:
    """The first row alone where all are the same, up to sign; with a warning where some repeat
    others.

    What repeats tells nothing more: several that are one would have a standard error of zero.
    """
    number, size = len(rows), rows[:1].numel()
    if number > 1 and all(_same(rows[0], row, inner) for row in rows[1:]):
        return rows[:1]
    if number > 1 and size >= REPEATS_BY_CHANCE and inner is ALONE:
        keys, order = (
            (
                rows.flatten(1)
                @ torch.arange(1, size + 1, dtype=rows.dtype, device=rows.device).cos()
            )
            .abs()
            .sort()
        )
        near = (keys.diff() <= 1e-2 * keys[1:]).nonzero()[:, 0]
        repeated = sum(_same(rows[order[i]], rows[order[i + 1]], inner) for i in near.tolist())
        if repeated:
            warnings.warn(
                f"vectors: {repeated} of {number} repeat others (up to sign), so they are not "
                f"independent and the standard error is too small; give each of them once.",
                HodiffWarning,
                stacklevel=_arguments.outside(),
            )
    return rows


def _same(a: Tensor, b: Tensor, inner: Inner) -> bool:
    return inner.amax((a - b).reshape(-1)) == 0 or inner.amax((a + b).reshape(-1)) == 0


UNSYMMETRIC = "scipy.sparse.linalg.eigs(A.to_scipy())"
"""What gives eigenvalues of an operator that is not symmetric."""


def check_square(
    operator: object, name: str, *, symmetric: bool = False, instead: str = "",
    stacks: bool = False, shards: bool = True,
) -> LinearOperator:  # fmt: skip
    """The operator, fixed (see there), checked to be one, square, and symmetric where that matters
    (else `instead`).

    One of a stack of matrices is refused, unless `stacks` are taken; so are `shards`, if they are
    not.
    """
    if isinstance(operator, torch.Tensor):
        raise InputError(
            f"{name}: got a tensor, expected an operator; wrap it: hodiff.MatrixOperator(A)."
        )
    if not isinstance(operator, LinearOperator):
        raise InputError(
            f"{name}: got {_arguments.kind(operator)}, "
            "expected an operator (hodiff.HessianOperator, ...)."
        )
    if operator._domain.layout is not None and not shards:
        operator._domain.layout.refuse_flat(name)
    *batch, rows, columns = operator.shape
    if batch and not stacks:
        raise InputError(
            f"{name} takes one matrix at a time, but the operator is a stack of {tuple(batch)} "
            f"(batch_ndim=). These take stacks: hodiff.solve, hodiff.trace, hodiff.diagonal, "
            f"hodiff.logdet."
        )
    if rows != columns:
        raise InputError(
            f"{name}: the operator is {rows} x {columns}, expected a square one (J.T @ J?)."
        )
    if not rows:
        raise InputError(f"{name}: the operator has no columns; is it the block of an empty leaf?")
    if symmetric and not operator.symmetric:
        raise InputError(
            f"{name}: this {type(operator).__name__} is not known to be symmetric; use {instead}, "
            f"or, if the matrix is meant to be symmetric, hodiff.MatrixOperator((A + A.T) / 2)."
        )
    return operator._fixed()


def check_detached(name: str, operator: object, create_graph: bool | None, **given: Any) -> None:
    """Say that a result is detached, unless the caller has;
    `given` are the vectors that it is computed from.
    """
    if create_graph is not None:
        if _arguments.is_set(create_graph, "create_graph"):
            raise InputError(
                f"create_graph: {name} cannot be differentiated. For its derivative, "
                f"use {WAYS[name]}."
            )
    elif isinstance(operator, LinearOperator):
        live = [
            f"{argument} requires grad"
            for argument, value in given.items()
            if value is not None and _requires_grad(value, argument)
        ]
        say_detached(name, operator._live or "".join(live[:1]))


def is_recorded(name: str, operator: object, create_graph: bool | None, **given: Any) -> bool:
    """Whether a result keeps its graph; where it does not, it is said to be detached,
    unless the caller has.
    """
    recorded = _call.recorded(create_graph)
    if recorded and isinstance(operator, LinearOperator) and operator._domain.layout is not None:
        raise InputError(
            f"create_graph: the point is sharded over processes, where {name} has no derivative."
        )
    if not recorded:
        check_detached(name, operator, create_graph, **given)
    return recorded


def refuse_live(why: str, **given: Any) -> None:
    """Raise where a differentiable result would count as a constant by one of these arguments."""
    for name, value in given.items():
        if _requires_grad(value, name):
            raise InputError(f"{name} requires grad, but with create_graph=True {why}; detach it.")


def _requires_grad(value: Any, name: str) -> bool:
    """Whether something of it does; raise where it carries a tangent,
    which would be lost likewise.
    """
    if isinstance(value, LinearOperator):
        return bool(value._live)
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    for leaf in leaves:
        _call.refuse_tangent(leaf, name)
    return True in [leaf.requires_grad for leaf in leaves]


def check_rtol(rtol: object, number: int | None = None) -> None:
    """Raise unless the tolerance is a positive number, or None;
    and where so many vectors cannot tell the error.
    """
    if rtol is None:
        return
    _arguments.check_number(rtol, "rtol", positive=True, more=", or None")
    if number == 1:
        raise InputError(
            "rtol: the error of one random vector is unknown; give several, or no rtol."
        )


def reached(
    value: Tensor, error: Tensor | None, rtol: float | None, batch_ndim: int = 0
) -> bool | Tensor | None:
    """Whether an error, in norm, is within a tolerance, for each of a batch; None without one."""
    if rtol is None:
        return None
    if not batch_ndim:
        unit = _vectors.near(value.abs().max())
        return error is not None and bool((error / unit).norm() <= rtol * (value / unit).norm())
    sizes = value.reshape(*value.shape[:batch_ndim], -1)
    if error is None:
        return torch.zeros(sizes.shape[:-1], dtype=torch.bool, device=value.device)
    unit = _vectors.near(sizes.abs().amax(-1, keepdim=True))
    return (error.reshape(sizes.shape) / unit).norm(dim=-1) <= rtol * (sizes / unit).norm(dim=-1)


def all_reached(met: bool | Tensor | None) -> bool:
    """Whether a tolerance is met everywhere, or none was asked for."""
    return met is None or bool(torch.as_tensor(met).all())


def default_rtol(dtype: torch.dtype) -> float:
    """The residual that products of this precision can reach."""
    return {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 5e-2)


def kept_vectors(size: int, *, least: int) -> int:
    """The number of vectors that a basis keeps before a restart: as many as 8 MiB hold,
    at most 300.
    """
    return max(least, min(_reverse.CHUNK_BYTES // (32 * size), 300))


def check_finite(product: Tensor, name: str, why: str = "", inner: Inner = ALONE) -> Tensor:
    """A product, checked to hold numbers."""
    total = product.sum() if inner is ALONE else inner.sums(torch.sum, product)
    if not math.isfinite(float(total)):
        raise GraphError(f"{name}: a product {why or _NOT_FINITE}")
    return product


_NOT_FINITE = (
    "is not finite, so the operator has NaN or infinite entries. Are the parameters finite, "
    "and the function smooth where they are (sqrt at 0, norm at 0)?"
)


def flat_product(operator: LinearOperator, rows: Tensor) -> Tensor:
    """A times a flat vector, or each row of `(K, D)`,
    in the precision of sums (the product itself has its own).
    """
    times = operator._times if rows.ndim == 1 else operator._times_rows
    return times(rows.to(operator.dtype)).to(_vectors.sum_dtype(operator.dtype))


def exact_diagonal(operator: LinearOperator, most: int) -> tuple[Tensor | None, Route]:
    """The diagonal, flat, by rows or by unit vectors, and by which.

    None where both take more than so many products.
    """
    size, domain = operator.shape[-1], operator._domain
    if domain.layout is None:
        rows, thin = operator._crossed(most), operator._thin()
        entries = rows.norms() if rows is not None else thin and thin.diagonal(most)
        if entries is not None:
            return entries, "rows"
    if most < size:
        return None, "vectors"
    entries = domain.zeros_flat(domain.width).expand(*domain.batch, domain.width).contiguous()
    for start in range(0, size, 64):
        stop = min(start + 64, size)
        units = (domain.layout or domain).units(start, stop)
        images = flat_product(operator, units)
        if domain.layout is None:
            entries[..., start:stop] = images[..., start:stop].diagonal(dim1=0, dim2=-1)
        else:
            entries += (units * images).sum(0)
    return entries, "columns"


def warn_not_converged(text: str) -> None:
    """Say that a tolerance was not reached."""
    warnings.warn(text, ConvergenceWarning, stacklevel=_arguments.outside())


# --- who looks on while an estimator loops: a bar, and the caller's own function ------------------


Callback = Callable[[Any], object]
"""`callback=`: is given the record as it stands, again and again; what it returns is ignored."""


WAIT = 2.0
"""Seconds after which a terminal that waits is shown a bar."""


def _a_terminal_waits() -> bool:
    """Whether what is written of progress is read as it is: by no file, no pipe,
    and from one process.
    """
    if not getattr(sys.stderr, "isatty", bool)() or importlib.util.find_spec("tqdm") is None:
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


class EstimatorProgress:
    """The bar and the callback of one call: `with EstimatorProgress(...) as watch`, and
    `watch(record)` at each look.

    Attributes:
        spent: How many products the call has taken.
        seen: Whether anybody may look on.
    """

    def __init__(
        self,
        name: str,
        operator: LinearOperator,
        total: int | None,
        callback: Callback | None,
        progress: bool | None,
    ) -> None:
        if callback is not None and not callable(callback):
            raise InputError(
                f"callback: got {_arguments.kind(callback)}, expected a function of the record so "
                "far."
            )
        self._operator = operator
        self._before, self._said = operator.products, _values.said.times
        self._callback = callback
        self._bar: Any = None
        self._name, self._total = name, total
        self._show_at = (
            time.monotonic() + WAIT if progress is None and _a_terminal_waits() else math.inf
        )
        if progress is not None and _arguments.is_set(progress, "progress"):
            self._show()
        self.seen = callback is not None or self._bar is not None or self._show_at < math.inf
        self._raise_on_all_ranks = operator._raise_on_all_ranks()

    @property
    def spent(self) -> int:
        return self._operator.products - self._before

    def __call__(self, record: Callable[[int], Any]) -> None:
        """Show how far it is; `record` makes the record, given the number of products."""
        if time.monotonic() > self._show_at:
            self._show()
        if self._bar is not None:
            self._bar.update(self.spent - self._bar.n)
        if self._callback is not None:
            self._callback(record(self.spent))

    def warn_if_not_finite(self, value: Tensor) -> None:
        """Say of a result that it is not finite, where the rest of it is worth having; unless a
        product has said so.
        """
        if self._said == _values.said.times and not bool(value.isfinite().all()):
            warnings.warn(
                f"{self._name}: the result {_NOT_FINITE}",
                HodiffWarning,
                stacklevel=_arguments.outside(),
            )

    def _show(self) -> None:
        from tqdm import tqdm

        self._show_at = math.inf
        self._bar = tqdm(
            total=self._total, desc=f"hodiff: {self._name}", unit="product", leave=False
        )

    def __enter__(self) -> EstimatorProgress:
        self._raise_on_all_ranks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._raise_on_all_ranks.__exit__(kind, error, at)
