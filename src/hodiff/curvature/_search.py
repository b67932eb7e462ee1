"""Some eigenpairs of an operator, by restarted Lanczos or Arnoldi iteration; the engine of `eigsh` and `eigs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hodiff._core import _random_vectors
from hodiff.curvature._basis import Basis
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import check_finite, flat_product, power_of_two, source
from hodiff.curvature._space import sum_dtype

Which = Literal["largest", "smallest", "magnitude"]
Pairs = tuple[Tensor, Tensor, Tensor]
"""Eigenvalues, vectors as rows, and the norms of their residuals."""
Look = Callable[[Callable[[], Pairs]], None]
"""Is called after some steps, with the best pairs so far, to be computed if wanted."""


class Search:
    """What has been locked, and the basis that looks for better ones.

    Of an operator that is not symmetric, an invariant subspace is locked: eigenvectors need not be orthogonal, and
    orthonormal vectors that span the same (of Schur's form) carry as much.

    Attributes:
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
        room: int,
        limit: int,
        generator: torch.Generator | None,
        look: Look,
        *,
        symmetric: bool,
        name: str,
    ) -> None:
        self._operator = operator
        self._k = k
        self._which = which
        self._rtol = rtol
        self._room = room
        self._limit = limit
        self._generator = source(operator, generator)
        self._look = look
        self._symmetric, self._name = symmetric, name
        self.scale = 0.0
        self.complete = False
        self.unit = 0.0
        # Products round as the operator does; a basis that rounds less keeps the residuals at that level.
        double = sum_dtype(operator.dtype) if operator.device.type == "mps" else torch.float64
        self._eps = torch.finfo(operator.dtype).eps
        self._locked = torch.empty((0, operator.shape[0]), dtype=double, device=operator.device)
        self._values = torch.empty(0, dtype=torch.float64 if symmetric else torch.complex128, device="cpu")

    def run(self) -> None:
        """Search, lock what has converged, and search again beside it, until nothing better is left."""
        size = self._operator.shape[0]
        while not self.complete and len(self._locked) < size and self._operator.products < self._limit:
            room = min(self._room, size - len(self._locked))
            basis = Basis(
                self._multiply, self._draw, room, self._eps, symmetric=self._symmetric, locked=self._locked,
                scale=self.scale,
            )  # fmt: skip
            self._grow_and_restart(basis, room)
        if len(self._locked) == size:
            self.complete = True

    def _draw(self) -> Tensor:
        return _random_vectors.draw(self._locked.shape[1:], self._locked, "gaussian", self._generator)

    def _multiply(self, v: Tensor) -> Tensor:
        found = check_finite(self._operator._applied(v.to(self._operator.dtype)).to(v.dtype), self._name)
        return self._measured(found)

    def _images(self, rows: Tensor) -> Tensor:
        return self._measured(flat_product(self._operator, rows.to(self._operator.dtype)).to(rows.dtype))

    def _measured(self, product: Tensor) -> Tensor:
        self.unit = self.unit or power_of_two(product)
        return product / (self.unit or 1.0)

    def _rank(self, values: Tensor) -> Tensor:
        """What is to be large."""
        return {"largest": values.real, "smallest": -values.real, "magnitude": values.abs()}[self._which]

    def _order(self, values: Tensor) -> Tensor:
        return self._rank(values).argsort(descending=True, stable=True)

    def _pairs(self, square: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(square) if self._symmetric else torch.linalg.eig(square)

    def _grow_and_restart(self, basis: Basis, room: int) -> None:
        """One search: it ends with new locked vectors, or with the proof that none is missing."""
        first = not len(self._values)
        looked = 0
        while True:
            left = self._limit - self._operator.products
            looked = min(room, max(basis.size, looked) + 5, basis.size + left)
            basis.grow(looked)
            self.scale = max(self.scale, basis.scale)
            values, coordinates = self._pairs(basis.square)
            residuals = (basis.remainder.to(coordinates) @ coordinates).abs()
            order = self._order(values)
            tolerance = self._rtol * self.scale
            whole = basis.exhausted or self._operator.products >= self._limit
            wanted = order[: self._k]
            if first:
                self._show(basis, values[wanted], coordinates[:, wanted], residuals[wanted])
            if not first and self._nothing_better(values, residuals, order, tolerance):
                self.complete = True
                return
            better = wanted if first else wanted[self._beats(values[wanted], tolerance)]
            done = bool((residuals[better] <= 0.5 * tolerance).all()) and len(better) >= (
                min(self._k, room) if first else 1
            )
            if done or whole:
                self._lock(basis, values, coordinates, better)
                if basis.exhausted:
                    self.complete = True
                return
            if basis.size >= room:
                keep = order[: min(room - 3, self._k + (room - self._k) // 2)]
                basis.restart(*self._subspace(basis.square, values, coordinates, keep))
                looked = basis.size

    def _show(self, basis: Basis, values: Tensor, coordinates: Tensor, residuals: Tensor) -> None:
        def best() -> Pairs:
            rows = coordinates.T.to(basis.vectors.device)
            return values * self.unit, rows @ basis.vectors[: len(coordinates)].to(rows), residuals * self.unit

        self._look(best)

    def _subspace(self, square: Tensor, values: Tensor, coordinates: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """An orthonormal basis of an invariant subspace of the projection, and the projection on it."""
        if self._symmetric:
            return coordinates[:, chosen], torch.diag(values[chosen])
        return invariant(square, self._order, len(chosen))

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

    def _lock(self, basis: Basis, values: Tensor, coordinates: Tensor, chosen: Tensor) -> None:
        if not len(chosen):
            return
        inside, square = self._subspace(basis.square, values, coordinates, chosen)
        rows = torch.cat([self._locked, basis.combine(inside)])
        self._locked, _ = torch.linalg.qr(rows.T)
        self._locked = self._locked.T.contiguous()
        found = values[chosen] if self._symmetric else torch.linalg.eigvals(square)
        self._values = torch.cat([self._values, found])

    def polished(self) -> Pairs:
        """The k best pairs, by one more projection on all that were found, and their true residuals.

        In single precision rounding may leave them above the tolerance; their residuals then show the way.
        """
        space = self._locked
        images = self._images(space)
        values, vectors, rest = self._projected(space, images)
        for _ in range(3):
            large = rest.norm(dim=1) > self._rtol * self.scale
            missing = torch.cat([rest.real[large], rest.imag[large]]) if rest.is_complex() else rest[large]
            size = len(space) + len(missing)
            affordable = self._operator.products + size <= self._limit and size <= space.shape[1]
            if not bool(large.any()) or not affordable:
                break
            # A part without a length becomes an arbitrary direction, which does no harm.
            missing = missing / missing.norm(dim=1, keepdim=True).clamp_min(torch.finfo(missing.dtype).tiny)
            added, _ = torch.linalg.qr(torch.cat([space, missing]).T)
            space, images = added.T.contiguous(), self._images(added.T)
            values, vectors, rest = self._projected(space, images)
        return values.to(images.device) * self.unit, vectors, rest.norm(dim=1) * self.unit

    def _projected(self, space: Tensor, images: Tensor) -> Pairs:
        """The k best Ritz pairs in a space, and what is left of their images."""
        projection = (space @ images.T).cpu().double()
        values, coordinates = self._pairs((projection + projection.T) / 2 if self._symmetric else projection)
        order = self._order(values)[: self._k]
        turn, best = coordinates[:, order].T.to(images.device), values[order].to(images.device)
        space, images = space.to(turn.dtype), images.to(turn.dtype)
        vectors = turn @ space
        return best, vectors, turn @ images - best[:, None] * vectors


def invariant(square: Tensor, order: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, Tensor]:
    """An orthonormal basis, as columns, of the invariant subspace of the `count` first eigenvalues, and its block.

    Schur's form in that order, one eigenvector (or one pair of conjugate ones) after the other: each is split off by
    an orthogonal similarity, which is stable however far from orthogonal the eigenvectors are. A pair is not divided,
    so that there may be one vector more.
    """
    turned, basis = square.clone(), torch.eye(len(square), dtype=square.dtype, device="cpu")
    done = 0
    while done < count:
        values, vectors = torch.linalg.eig(turned[done:, done:])
        first = order(values)[0]
        vector = vectors[:, first]
        parts = [vector.real] if values[first].imag == 0 else [vector.real, vector.imag]
        q, _ = torch.linalg.qr(torch.stack(parts, 1), mode="complete")
        turned[:, done:] = turned[:, done:] @ q
        turned[done:] = q.T @ turned[done:]
        basis[:, done:] = basis[:, done:] @ q
        turned[done + len(parts) :, done : done + len(parts)] = 0
        done += len(parts)
    return basis[:, :done], turned[:done, :done]
