"""`eigsh`: eigenpairs by restarted Lanczos iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hodiff._core import _arguments, _settings, _vectors
from hodiff.curvature import _krylov
from hodiff.curvature._krylov import Inner
from hodiff.curvature._matrix import MatrixOperator
from hodiff.curvature._operator import WAYS, LinearOperator, as_given, normal
from hodiff.curvature._probes import (
    UNSYMMETRIC,
    Callback,
    EstimatorProgress,
    check_finite,
    check_rtol,
    check_square,
    default_rtol,
    flat_product,
    is_recorded,
    kept_vectors,
    source,
    warn_not_converged,
)
from hodiff.curvature._records import EigenRecord
from hodiff.curvature._solve import USUAL, solve
from hodiff.errors import GraphError, InputError


def eigsh(
    operator: LinearOperator,
    k: int = 6,
    *,
    which: Which = "largest",
    create_graph: bool | None = None,
    rtol: float | None = None,
    products: int | None = None,
    basis: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> EigenRecord:
    r"""Some eigenvalues of a symmetric operator and their vectors, A x = λ x, by restarted Lanczos
    iteration.

    The basis is kept orthogonal, so that no eigenvalue appears more often than it occurs. When all
    *k* have converged, the search continues from a random vector orthogonal to them until it finds
    nothing better. A Krylov space contains only one vector of each eigenspace, so this finds
    multiple eigenvalues.

    Args:
        operator: A symmetric operator.
        k: The number of eigenpairs.
        which: The `"largest"`, the `"smallest"` (most negative), or those of largest `"magnitude"`.
        create_graph: Whether `value` can be differentiated, for example as a loss. The first
            derivative is that of \(x^\top H x\) with the eigenvector held fixed (Hellmann-Feynman);
            the second adds \(dx = -(H - \lambda)^{-1} dH\, x\), orthogonal to *x*; a third is
            refused. For `"largest"` and `"smallest"`; `vectors` are detached.
        rtol: When a pair has converged: \(\lVert A x - \lambda x \rVert \le\) `rtol` times the
            largest eigenvalue seen (in magnitude). None: 1e-8 in double precision, 1e-4 in single,
            1e-2 in half (5e-2 in bfloat16).
        products: The maximal number of products; None: 1000, plus 50 for each pair.
        basis: How many vectors to keep before a restart; None: as many as fit into 8 MiB, between
            `max(2 k + 10, 30)` and 300.
        generator: The source of the random start; None: the default generator of the operator's
            device.
        callback: A function that receives the current record, every five products of the first
            search.
        progress: Whether to show a progress bar. None: in a terminal, after two seconds.

    Returns:
        A record: `value`, of shape `(k,)`, in the order asked for; `vectors`, orthonormal columns
        of shape `(D, k)` (`A.unflatten(vectors)` gives them the structure of the point, which those
        of a sharded model have); `residual`, true ones of shape `(k,)`; `converged`; `products`.

    Raises:
        InputError: The operator is not symmetric, or has fewer than *k* columns.
        GraphError: With `create_graph`, an eigenvalue is too close to another to have a derivative,
            or to be distinguished within the tolerance; the message states the gap. Also for a
            third derivative.

    Warns:
        ConvergenceWarning: The maximal number of products was reached. The record then holds the
            best pairs found, with their residuals.
        HodiffWarning: The result is detached, although the operator requires grad (see
            `create_graph`).

    Cost:
        Often 30 to 150 products. Memory, on the operator's device: `basis` vectors, some *k* more,
        and the memory of products with *k* vectors, in the operator's precision (at least single;
        double if *rtol* is below a hundred of its rounding units). For a million parameters, one
        pair takes the memory of 30 vectors and six pairs that of 49; with `basis=10` and `basis=16`
        it is 19 and 41, with as many products. An operator with fewer than `basis` columns takes
        one product for each, and the result is exact. So it is for the largest eigenvalues of
        Gauss-Newton and Fisher matrices of few rows, in the passes that
        `hodiff.GaussNewtonOperator` names and a product for each pair, unless a `basis` or a
        `callback` is given.

        With `create_graph`, two more differentiable products for each pair. A first derivative is
        one pass. A second derivative solves the systems with \(H - \lambda\) for all pairs in
        parallel by MINRES: the closer the eigenvalues, the more products.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> hodiff.eigsh(A, k=2).value.round(decimals=4)
        tensor([3., 1.])

    Reference:
        Wu, K., Simon, H. (2000). Thick-restart Lanczos method for large symmetric eigenvalue
        problems. SIAM J. Matrix Anal. Appl. 22(2). doi:10.1137/S0895479898334605.
    """
    operator = check_square(operator, "eigsh", symmetric=True, instead=UNSYMMETRIC)
    if not is_recorded("eigsh", operator, create_graph):
        options = products, basis, generator, callback, progress
        return _eigenpairs(operator, k, which, rtol, *options, thin=True)
    if which == "magnitude":
        raise InputError("create_graph needs which='largest' or which='smallest'.")
    with _settings.grad_mode(False):  # one pair more, to know the gap
        more = min(k + 1, operator.shape[0])
        record = _eigenpairs(
            operator, more, which, rtol, products, basis, generator, callback, progress
        )
    before, rtol = operator.products, default_rtol(operator.dtype) if rtol is None else rtol
    rtol += 10 * torch.finfo(operator.dtype).eps / _relative_gap(record.value, rtol, k)
    rows = record.vectors.T[:k].contiguous()
    moved = partial(_moved, operator, record.value, rows, rtol)
    with _settings.recording():
        live = operator._halves()
        images, dtype = live._recorded_rows(rows), _vectors.sum_dtype(operator.dtype)
        u = _Eigenvector.apply(moved, normal(rows), images)
        value = _Eigenvalue.apply(u.to(dtype), images.to(dtype), live._recorded_rows(u).to(dtype))
    spent = record.products + operator.products - before
    return EigenRecord(value, record.vectors[:, :k], record.residual[:k], record.converged, spent)


Moved = Callable[[Tensor], Tensor]


def _moved(
    operator: LinearOperator, values: Tensor, rows: Tensor, rtol: float, w: Tensor
) -> Tensor:
    r"""\(-(A - \lambda)^{-1} w\), of each *w* beside an eigenvector *u*.

    The system has a multiple of \(u u^\top\) more, so that it is regular.
    """
    size, beside = float(values.abs().max()), w - (w * rows).sum(-1, keepdim=True) * rows
    columns = (MatrixOperator(u.unsqueeze(1)) for u in rows)
    pairs = zip(values, columns, strict=False)
    systems = (A @ A.T * (size or 1.0) + operator - value for value, A in pairs)
    options: dict[str, Any] = {"method": "minres", "rtol": rtol, "create_graph": False}
    x = torch.stack([solve(A, b, **options).value for A, b in zip(systems, beside, strict=True)])
    return (x * rows).sum(-1, keepdim=True) * rows - x


class _Eigenvector(torch.autograd.Function):
    """u, as a function of A u; in a pass of a first derivative a constant: λ is stationary in u."""

    @staticmethod
    def forward(ctx: Any, moved: Moved, rows: Tensor, images: Tensor) -> Tensor:
        ctx.moved = moved
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> tuple[Any, ...]:
        return None, None, None if torch.is_grad_enabled() else ctx.moved(w[0])  # see `_Twice`


class _Eigenvalue(torch.autograd.Function):
    """u'Au, whose derivative is u'(dA)u; `live` are the images of u that is not constant."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, images: Tensor, live: Tensor) -> Tensor:
        ctx.save_for_backward(u, images)
        return (u * images).sum(-1)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Any, ...]:
        u, images = ctx.saved_tensors
        through = v[0].unsqueeze(-1) * u
        if torch.is_grad_enabled():
            return None, None, _Twice.apply(through, images)
        return None, through, None


class _Twice(torch.autograd.Function):
    """The identity; raises where the pass through it is differentiated: u has one derivative."""

    @staticmethod
    def forward(ctx: Any, through: Tensor, images: Tensor) -> Tensor:
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise GraphError(
                f"eigsh: a third derivative of an eigenvalue needs the second derivative of its "
                f"vector, which is unknown here. If you need it, use {WAYS['spectral_density']}; "
                f"if not, leave create_graph=True out of the second pass."
            )
        return w[0], None


def _relative_gap(values: Tensor, rtol: float, k: int) -> float:
    """The relative gaps of the first k; raise where one is too close to another
    to know its vector.
    """
    gaps, size = values.diff().abs()[:k], float(values.abs().max())
    least = 100 * rtol * size
    if len(gaps) and float(gaps.min()) <= least:
        first = int(gaps.argmin())
        raise GraphError(
            f"eigsh: eigenvalues {first + 1} and {first + 2} are {float(values[first]):.8g} and "
            f"{float(values[first + 1]):.8g}, {float(gaps[first]):.2g} apart. Equal eigenvalues "
            f"have no derivatives of their own, and rtol={rtol:g} separates only those more than "
            f"{least:.2g} apart. Train with hodiff.trace, or give a smaller rtol."
        )
    return float(gaps.min()) / size if len(gaps) else 1.0


def _eigenpairs(
    operator: LinearOperator,
    k: int,
    which: Which,
    rtol: float | None,
    products: int | None,
    basis: int | None,
    generator: torch.Generator | None,
    callback: Callback | None,
    progress: bool | None,
    *,
    thin: bool = False,
) -> EigenRecord:
    """Check the options, search, and say how it went."""
    _arguments.check_integer(k, "k", least=1)
    _vectors.check_generator(generator)
    check_rtol(rtol)
    _arguments.check_option(which, Which, "which")
    size = operator.shape[0]
    if k > size:
        raise InputError(f"k: got {k}, but the operator has {_arguments.plural(size, 'column')}.")
    room = kept_vectors(size, least=max(2 * k + 10, 30))
    max_basis = room if basis is None else _arguments.check_integer(basis, "basis", least=k + 2)
    budget = (
        50 * k + 1000
        if products is None
        else _arguments.check_integer(products, "products", least=2 * k + 2)
    )
    if rtol is None:
        rtol = default_rtol(operator.dtype)
    dtype = _vectors.sum_dtype(operator.dtype)

    def record(pairs: Pairs, converged: bool | None, spent: int) -> EigenRecord:
        value, vectors, residual = pairs
        rows, domain = vectors.to(operator.dtype), operator._domain
        shaped = rows.T if domain.layout is None else domain.result(domain.split(rows))
        return EigenRecord(value.to(dtype), shaped, residual.to(dtype), converged, spent)

    with EstimatorProgress("eigsh", operator, budget, callback, progress) as watch:
        limit = operator.products + budget - k  # the last projection
        search = Search(
            operator, k, which, rtol, min(max_basis, size), limit, generator,
            lambda best: watch(lambda spent: record(best(), None, spent)),
        )  # fmt: skip
        if not (thin and which == "largest" and basis is callback is None and search.by_rows()):
            search.run()
        pairs = search.polished()
        residual, scale = pairs[2], search.scale * search.unit
        converged = search.complete and bool((residual <= 2 * rtol * scale).all())
        if not converged:
            warn_not_converged(
                f"eigsh: after {watch.spent} products the largest residual is "
                f"{float(residual.max()) / (scale or 1.0):.2g} of the largest eigenvalue "
                f"(rtol={rtol:g}); allow more products, or a larger basis."
            )
        return record(pairs, converged, watch.spent)


# --- some eigenpairs of an operator, by restarted Lanczos iteration -------------------------------


Which = Literal["largest", "smallest", "magnitude"]
Pairs = tuple[Tensor, Tensor, Tensor]
"""Eigenvalues, vectors as rows, and the norms of their residuals."""
Look = Callable[[Callable[[], Pairs]], None]
"""Is called after some steps, with the best pairs so far, to be computed if wanted."""


class Search:
    """The locked pairs, and the basis that looks for better ones.

    Attributes:
        locked: The vectors that have converged, as rows.
        inner: The inner products of vectors.
        eps: The rounding of products; a basis may be more precise.
        scale: The largest entry of a projection seen: an estimate of |A|, below it.
        complete: Whether nothing better is left.
        unit: What products are measured in; 0 until one is not zero.
    """

    def __init__(
        self,
        operator: LinearOperator,
        k: int,
        which: Which,
        rtol: float,
        max_basis: int,
        limit: int,
        generator: torch.Generator | None,
        look: Look,
    ) -> None:
        self._operator = operator
        self._k = k
        self._which = which
        self._rtol = rtol
        self._max_basis = max_basis
        self._limit = limit
        self._generator, self.inner = source(operator, generator), _krylov.of(operator)
        self._look = look
        self.scale = 0.0
        self.complete = False
        self.unit = 0.0
        self.eps = torch.finfo(operator.dtype).eps
        # Products round as the operator does; a basis that rounds less keeps residuals at that
        # level.
        dtype = (
            _vectors.sum_dtype(operator.dtype)
            if rtol >= 100 * self.eps or operator.device.type == "mps"
            else torch.float64
        )
        self.locked = torch.empty((0, operator._domain.width), dtype=dtype, device=operator.device)
        self._values = torch.empty(0, dtype=torch.float64, device="cpu")

    def run(self) -> None:
        """Search, lock what has converged, and search again beside it,
        until nothing better is left.
        """
        while not self.complete and self.left() and self._operator.products < self._limit:
            # no name keeps one basis while the next is made
            self._grow_and_restart(Basis(self, min(self._max_basis, self.left())))
        self.complete = self.complete or not self.left()

    def left(self) -> int:
        """The number of eigenvectors beside the locked ones."""
        return self._operator.shape[0] - len(self.locked)

    def by_rows(self) -> bool:
        """Whether the operator's thin side has told the vectors, all at once."""
        thin = self._operator._by_rows(min(self._limit - self._operator.products, USUAL))
        pairs = None if thin is None else thin.largest(self._k)
        if pairs is None:
            return False
        values, rows = pairs
        self.unit = _unit(values, self.inner) or 1.0
        self.scale, self.complete = float(values.abs().max()) / self.unit, True
        self.locked = self.inner.orthonormal(rows.to(self.locked))
        return True

    def draw(self) -> Tensor:
        """A random vector to start from."""
        return self.inner.draw(self.locked.shape[1:], self.locked, "gaussian", self._generator)

    def images(self, rows: Tensor) -> Tensor:
        """A times a flat vector, which its norm will check, or each row; in a unit by the first."""
        products = flat_product(self._operator, rows).to(rows.dtype)
        if rows.ndim == 2:
            check_finite(products, "eigsh", inner=self.inner)
        unit = self.unit = self.unit or _unit(products, self.inner)
        return products / unit if unit not in (0, 1) else products

    def _rank(self, values: Tensor) -> Tensor:
        """The quantity that is to be large."""
        return {"largest": values, "smallest": -values, "magnitude": values.abs()}[self._which]

    def _order(self, values: Tensor) -> Tensor:
        return self._rank(values).argsort(descending=True, stable=True)

    def _grow_and_restart(self, basis: Basis) -> None:
        """One search: it ends with new locked vectors, or with the proof that none is missing."""
        max_basis, first = len(basis.vectors) - 1, not len(self._values)
        looked = 0
        while True:
            left = self._limit - self._operator.products
            looked = min(max_basis, max(basis.size, looked) + 5, basis.size + left)
            basis.grow(looked)
            values, coordinates = torch.linalg.eigh(basis.square)
            residuals = (basis.remainder @ coordinates).abs()
            order = self._order(values)
            tolerance = self._rtol * self.scale
            whole = basis.exhausted or self._operator.products >= self._limit
            wanted = order[: self._k]
            if first:
                best = values[wanted], coordinates[:, wanted], residuals[wanted]
                self._look(
                    lambda best=best: (
                        best[0] * self.unit,
                        basis.combine(best[1]),
                        best[2] * self.unit,
                    )
                )
            if not first and self._nothing_better(values, residuals, order, tolerance):
                self.complete = True
                return
            better = (
                wanted if first else wanted[self._rank(values[wanted]) > self._worst() + tolerance]
            )
            done = bool((residuals[better] <= 0.5 * tolerance).all()) and len(better) >= (
                min(self._k, max_basis) if first else 1
            )
            if done or whole:
                self._lock(basis, values[better], coordinates[:, better])
                if basis.exhausted:
                    self.complete = True
                return
            if basis.size >= max_basis:
                keep = order[: min(max_basis - 3, self._k + (max_basis - self._k) // 2)]
                basis.restart(coordinates[:, keep], values[keep])
                looked = basis.size

    def _worst(self) -> float:
        """The rank of the last of the k best values locked;
        below everything while there are fewer.
        """
        if len(self._values) < self._k:
            return -float("inf")
        return float(self._rank(self._values).sort(descending=True).values[self._k - 1])

    def _nothing_better(
        self, values: Tensor, residuals: Tensor, order: Tensor, tolerance: float
    ) -> bool:
        """Whether the best value beside the locked ones is, within its error,
        no better than the k-th of them.
        """
        if len(self._values) < self._k or len(order) < 4:
            return False
        best = order[0]
        bound = float(self._rank(values[best])) + float(residuals[best])
        return bound <= self._worst() + 2 * tolerance

    def _lock(self, basis: Basis, values: Tensor, coordinates: Tensor) -> None:
        if not len(values):
            return
        rows = torch.cat([self.locked, basis.combine(coordinates)])
        self.locked = self.inner.orthonormal(rows)
        self._values = torch.cat([self._values, values])

    def polished(self) -> Pairs:
        """The k best pairs, by one more projection on all that were found, and their true
        residuals.

        In single precision rounding may leave them above the tolerance; their residuals then show
        the way.
        """
        space, inner = self.locked, self.inner
        images = self.images(space)
        values, vectors, rest = self._projected(space, images)
        for _ in range(3):
            lengths = inner.norms(rest).to(rest)
            large = lengths > self._rtol * self.scale
            missing = rest[large]
            size = len(space) + len(missing)
            room = size <= self._operator.shape[0]
            affordable = room and self._operator.products + size <= self._limit
            if not bool(large.any()) or not affordable:
                break
            # A part without a length becomes an arbitrary direction, which does no harm.
            tiny = torch.finfo(missing.dtype).tiny
            missing = missing / lengths[large].clamp_min(tiny).unsqueeze(1)
            space = inner.orthonormal(torch.cat([space, missing]))
            images = self.images(space)
            values, vectors, rest = self._projected(space, images)
        residuals = inner.norms(rest).to(rest) * self.unit
        return values.to(images.device) * self.unit, vectors, residuals

    def _projected(self, space: Tensor, images: Tensor) -> Pairs:
        """The k best Ritz pairs in a space, and what is left of their images."""
        with as_given(space):
            projection = self.inner.gram(space, images).cpu().double()
            values, coordinates = torch.linalg.eigh((projection + projection.T) / 2)
            best = self._order(values)[: self._k]
            turn = coordinates[:, best].T.to(space)
            vectors, images = turn @ space, turn @ images
        values = values[best].to(turn.device)
        return values, vectors, images - values.to(turn)[:, None] * vectors


def _unit(products: Tensor, inner: Inner) -> float:
    """The unit of products: 1 where their squares have room, 0 where all are 0."""
    largest = inner.amax(products.reshape(-1))
    if 2**-20 < largest < 2**20 or not largest:
        return float(largest > 0)
    return float(_vectors.near(products.new_tensor(largest)))


# --- an orthonormal basis of a Krylov space with full reorthogonalization -------------------------


class Basis:
    r"""An orthonormal basis \(V\) of a Krylov space, and the operator's projection \(T = V A
    V^\top\) on it.

    The operator is symmetric: Lanczos' iteration with thick restarts, Wu and Simon (2000),
    doi:10.1137/S0895479898334605. The lower half of the projection is kept.

    Different from there:

    1. Every new vector is made orthogonal to all before, and to the locked ones, so that no
       eigenvalue appears twice unless it is so.
    2. When the space is exhausted (the remainder vanishes: a breakdown), it goes on with a random
       vector orthogonal to all: thus the identity and matrices of low rank are no special case,
       and multiplicities come out.
    3. A product whose rest has no finite length is refused.

    Attributes:
        vectors: The basis as rows, `(room + 1, D)`; the first `size` are in use, one more is the
            next.
        projection: The lower half of `T`, with one row more, on the CPU in double precision.
        size: How many columns of `T` are known.
        exhausted: Whether the basis and the locked vectors span everything.
    """

    def __init__(self, search: Search, room: int) -> None:
        """A basis of one random vector, for a search, with room for so many."""
        self._search = search
        start = search.draw()
        self.vectors = _vectors.empty(
            "eigsh: the basis",
            (room + 1, len(start)),
            start,
            "Ask for fewer eigenvalues, or give basis=.",
        )
        self.projection = torch.zeros((room + 1, room + 1), dtype=torch.float64, device="cpu")
        self.size, self.exhausted = 0, False
        if not self._put(0, start):
            self._fresh(0)

    def grow(self, stop: int) -> None:
        """Extend the basis to `stop` vectors, or until everything is spanned."""
        while self.size < stop and not self.exhausted:
            self._step()

    def _step(self) -> None:
        """One product; its remainder is the next vector."""
        search, j = self._search, self.size
        image = search.images(self.vectors[j])
        column, w, norm = self._orthogonalized(image, j + 1)
        if not math.isfinite(norm):
            check_finite(image, "eigsh", inner=search.inner)
        self.projection[j, : j + 1] = column
        search.scale = max(search.scale, norm, *map(abs, column.tolist()))
        self.size = j + 1
        if norm > 10 * search.eps * search.scale:
            self.projection[j + 1, j] = norm
            torch.div(w, norm, out=self.vectors[j + 1])
        else:
            self._fresh(j + 1)

    def _orthogonalized(self, w: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
        """`w` without its parts in the basis and the locked vectors."""
        search = self._search
        bases = [self.vectors[:count], search.locked][: 1 + bool(len(search.locked))]
        return search.inner.orthogonalized(w, bases, search.eps * search.scale)

    def _fresh(self, count: int) -> None:
        """Put a random vector orthogonal to all others at `count`, if there is one left."""
        if count >= self._search.left():
            self.exhausted = True
            self.vectors[count].zero_()
            return
        self.exhausted = not any(self._put(count, self._search.draw()) for _ in range(5))

    def _put(self, count: int, w: Tensor) -> bool:
        """Put what the others leave of a vector at `count`; False where that is nothing."""
        _, w, norm = self._orthogonalized(w / self._search.inner.norms(w), count)
        if norm > 0:
            torch.div(w, norm, out=self.vectors[count])
        return norm > 0

    @property
    def remainder(self) -> Tensor:
        """The part of `A V'` along the next vector, `(size,)`: what the projection leaves out."""
        return self.projection[self.size, : self.size]

    @property
    def square(self) -> Tensor:
        """The projection on the vectors in use, `(size, size)`."""
        return self.projection[: self.size, : self.size]

    def combine(self, coordinates: Tensor) -> Tensor:
        """The vectors, as rows, with these coordinates in the basis, as columns."""
        coordinates = coordinates.to(self.vectors)
        with as_given(coordinates):
            return coordinates.T @ self.vectors[: len(coordinates)]

    def restart(self, coordinates: Tensor, values: Tensor) -> None:
        """Keep only these eigenvectors of the projection, with their values,
        and the vector that was next.
        """
        count = coordinates.shape[1]
        kept, left = self.combine(coordinates), self.remainder @ coordinates
        following = self.vectors[self.size].clone()
        self.vectors[:count] = kept
        self.vectors[count] = following
        self.projection.zero_()
        self.projection.diagonal()[:count] = values
        self.projection[count, :count] = left
        self.size = count
