"""`eigsh`: some eigenvalues and eigenvectors of a symmetric operator."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hodiff._core import _checks, _random_vectors
from hodiff.curvature._basis import Basis
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import (
    check_finite,
    check_rtol,
    check_square,
    default_rtol,
    flat_product,
    kept_vectors,
    warn_not_converged,
)
from hodiff.curvature._records import EigenRecord
from hodiff.curvature._space import sum_dtype
from hodiff.errors import InputError

Which = Literal["largest", "smallest", "magnitude"]


def eigsh(
    operator: LinearOperator,
    k: int = 6,
    *,
    which: Which = "largest",
    rtol: float | None = None,
    products: int | None = None,
    basis: int | None = None,
    generator: torch.Generator | None = None,
) -> EigenRecord:
    r"""Some eigenpairs of a symmetric operator, \(A x = \lambda x\), by restarted Lanczos iteration.

    The basis is kept orthogonal throughout, so that no eigenvalue appears more often than it occurs. When
    all *k* have converged, the search goes on from a random vector orthogonal to them, until nothing better
    shows: a Krylov space holds only one vector of each eigenspace, and multiplicities are found that way.

    Args:
        operator: A symmetric operator.
        k: How many eigenpairs.
        which: The `"largest"`, the `"smallest"` (most negative), or those of largest `"magnitude"`.
        rtol: When a pair has converged: \(\lVert A x - \lambda x \rVert \le\) `rtol` times the largest
            eigenvalue seen (in magnitude). None: 1e-8 in double precision, 1e-4 in single, 1e-2 in half
            (5e-2 in bfloat16).
        products: How many products to spend at most; None: 50 for each pair, and 1000.
        basis: How many vectors to keep before a restart; None: as many as fit into 8 MiB, between
            `max(2 k + 10, 30)` and 300.
        generator: Where the start is drawn from; None is the default generator of the operator's
            device.

    Returns:
        A record: `value`, of shape `(k,)`, in the order asked for; `vectors`, orthonormal columns of
        shape `(D, k)` (`A.unflatten(vectors)` gives them the structure of the point); `residual`, true
        ones of shape `(k,)`; `converged`; `products`.

    Raises:
        InputError: The operator is not symmetric, or has fewer than *k* columns.

    Warns:
        ConvergenceWarning: The products ran out. The record then holds the best pairs found, with their
            residuals.

    Cost:
        Often 30 to 150 products; memory for `basis` vectors in double precision, on the operator's
        device. Below `basis` columns, one product for each, and an exact answer.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> hodiff.eigsh(A, k=2).value
        tensor([3., 1.])

    Reference:
        Wu, K., Simon, H. (2000). Thick-restart Lanczos method for large symmetric eigenvalue problems.
        SIAM J. Matrix Anal. Appl. 22(2). doi:10.1137/S0895479898334605.
    """
    check_square(operator, "eigsh", symmetric=True, instead="hodiff.eigs")
    _checks.check_integer(k, "k", least=1)
    _random_vectors.check_generator(generator)
    check_rtol(rtol)
    if which not in get_args(Which):
        raise InputError(f"which: got {which!r}, expected one of {', '.join(map(repr, get_args(Which)))}.")
    size = operator.shape[0]
    if k > size:
        raise InputError(f"k: got {k}, and the operator has {size} columns.")
    room = (
        kept_vectors(size, least=max(2 * k + 10, 30))
        if basis is None
        else _checks.check_integer(basis, "basis", least=k + 2)
    )
    budget = 50 * k + 1000 if products is None else _checks.check_integer(products, "products", least=2 * k + 2)
    if rtol is None:
        rtol = default_rtol(operator.dtype)
    before = operator.products
    search = Search(operator, k, which, rtol, min(room, size), before + budget - k, generator)
    search.run()
    value, vectors, residual = search.polished()
    converged = search.complete and bool((residual <= 2 * rtol * search.scale).all())
    if not converged:
        worst = float(residual.max()) / max(search.scale, 1e-30)
        warn_not_converged(
            f"eigsh: after {operator.products - before} products the largest residual is {worst:.2g} of the largest "
            f"eigenvalue (rtol={rtol:g}); allow more products, or a larger basis."
        )
    spent, dtype = operator.products - before, sum_dtype(operator.dtype)
    return EigenRecord(value.to(dtype), vectors.T.to(operator.dtype), residual.to(dtype), converged, spent)


class Search:
    """A run of `eigsh`: what has been locked, and the basis that looks for better ones."""

    def __init__(
        self,
        operator: LinearOperator,
        k: int,
        which: Which,
        rtol: float,
        room: int,
        limit: int,
        generator: torch.Generator | None,
    ) -> None:
        self._operator, self._k, self._which, self._rtol = operator, k, which, rtol
        self._room, self._limit, self._generator = room, limit, generator
        self.scale, self.complete = 0.0, False
        # Products round as the operator does; a basis that rounds less keeps the residuals at that level.
        double = sum_dtype(operator.dtype) if operator.device.type == "mps" else torch.float64
        self._eps = torch.finfo(operator.dtype).eps
        self._locked = torch.empty((0, operator.shape[0]), dtype=double, device=operator.device)
        self._values = torch.empty(0, dtype=torch.float64)

    def run(self) -> None:
        """Search, lock what has converged, and search again beside it, until nothing better is left."""
        size = self._operator.shape[0]
        while not self.complete and len(self._values) < size and self._operator.products < self._limit:
            room = min(self._room, size - len(self._values))
            basis = Basis(
                self._multiply, self._draw, room, self._eps, symmetric=True, locked=self._locked, scale=self.scale
            )
            self._grow_and_restart(basis, room)
        if len(self._values) == size:
            self.complete = True

    def _draw(self) -> Tensor:
        return _random_vectors.draw(self._locked.shape[1:], self._locked, "gaussian", self._generator)

    def _multiply(self, v: Tensor) -> Tensor:
        return check_finite((self._operator @ v.to(self._operator.dtype)).to(v.dtype), "eigsh")

    def _images(self, rows: Tensor) -> Tensor:
        return flat_product(self._operator, rows.to(self._operator.dtype)).to(rows.dtype)

    def _rank(self, values: Tensor) -> Tensor:
        """What is to be large."""
        return {"largest": values, "smallest": -values, "magnitude": values.abs()}[self._which]

    def _grow_and_restart(self, basis: Basis, room: int) -> None:
        """One search: it ends with new locked vectors, or with the proof that none is missing."""
        first = not len(self._values)
        looked = 0
        while True:
            left = self._limit - self._operator.products
            looked = min(room, max(basis.size, looked) + 5, basis.size + left)
            basis.grow(looked)
            self.scale = max(self.scale, basis.scale)
            values, coordinates = torch.linalg.eigh(basis.square)
            residuals = (basis.remainder @ coordinates).abs()
            order = self._rank(values).argsort(descending=True)
            tolerance = self._rtol * self.scale
            whole = basis.exhausted or self._operator.products >= self._limit
            wanted = order[: self._k]
            if not first and self._nothing_better(values, residuals, order, tolerance):
                self.complete = True
                return
            better = wanted if first else wanted[self._beats(values[wanted], tolerance)]
            done = bool((residuals[better] <= 0.5 * tolerance).all()) and len(better) >= (
                min(self._k, room) if first else 1
            )
            if done or whole:
                self._lock(basis, values[better], coordinates[:, better])
                if basis.exhausted:
                    self.complete = True
                return
            if basis.size >= room:
                keep = order[: min(room - 3, self._k + (room - self._k) // 2)]
                basis.restart(coordinates[:, keep], torch.diag(values[keep]))
                looked = basis.size

    def _worst(self) -> float:
        """The rank of the last of the k best values locked; below everything while there are fewer."""
        if len(self._values) < self._k:
            return -float("inf")
        return float(self._rank(self._values).sort(descending=True).values[self._k - 1])

    def _beats(self, values: Tensor, tolerance: float) -> Tensor:
        return self._rank(values) > self._worst() + tolerance

    def _nothing_better(self, values: Tensor, residuals: Tensor, order: Tensor, tolerance: float) -> bool:
        """Whether the best value beside the locked ones is, within its error, no better than the k-th of them."""
        if len(self._values) < self._k or len(order) < 4:
            return False
        best = order[0]
        bound = float(self._rank(values[best])) + float(residuals[best])
        return bound <= self._worst() + 2 * tolerance

    def _lock(self, basis: Basis, values: Tensor, coordinates: Tensor) -> None:
        rows = torch.cat([self._locked, basis.combine(coordinates)])
        found = torch.cat([self._values, values])
        self._locked, _ = torch.linalg.qr(rows.T)
        self._locked = self._locked.T.contiguous()
        self._values = found

    def polished(self) -> tuple[Tensor, Tensor, Tensor]:
        """The k best pairs, by one more projection on all that were found, and their true residuals.

        In single precision rounding may leave them above the tolerance; their residuals then show the way.
        """
        space = self._locked
        images = self._images(space)
        values, vectors, rest = self._projected(space, images)
        for _ in range(3):
            residuals = rest.norm(dim=1)
            large = residuals > self._rtol * self.scale
            size = len(space) + int(large.sum())
            affordable = self._operator.products + size <= self._limit and size <= space.shape[1]
            if not bool(large.any()) or not affordable:
                break
            added, _ = torch.linalg.qr(torch.cat([space, rest[large] / residuals[large, None]]).T)
            space, images = added.T.contiguous(), self._images(added.T)
            values, vectors, rest = self._projected(space, images)
        return values.to(images.device), vectors, rest.norm(dim=1)

    def _projected(self, space: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k best Ritz pairs in a space, and their residuals."""
        projection = (space @ images.T).cpu().double()
        values, coordinates = torch.linalg.eigh((projection + projection.T) / 2)
        order = self._rank(values).argsort(descending=True)[: self._k]
        turn, best = coordinates[:, order].T.to(images), values[order]
        vectors = turn @ space
        return best, vectors, turn @ images - best[:, None].to(images) * vectors
