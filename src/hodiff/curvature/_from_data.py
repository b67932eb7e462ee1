"""What operators over data have in common: by-products, lifetime, cost; and sums over batches."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor

from hodiff._core import _checks
from hodiff.curvature import _memory
from hodiff.curvature._cache import Piece, Source
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._records import Cost
from hodiff.curvature._space import Space, plus

Parts = list[Tensor]


class DataOperator(LinearOperator):
    """An operator made of one graph per batch, kept where there is room."""

    def __init__(self, source: Source, chunk_size: int | str) -> None:
        super().__init__()
        self._source = source
        self._chunk_size = _checks.check_chunk_size(chunk_size)
        self._chosen = list(range(len(source.where.tensors)))
        self._space = Space.of(source.where)

    @property
    @abstractmethod
    def _passes(self) -> tuple[int, int]:
        """Reverse passes: of a product through a graph, and to build that graph."""

    @property
    def _domain(self) -> Space:
        return self._space

    # --- by-products

    @property
    def value(self) -> Any:
        """The value of the function at the point: the weighted mean over all batches."""
        self._source.evaluate()
        return self._source.mean()

    @property
    def gradient(self) -> Any:
        """The gradient of that value, like the point (for a block, its part)."""
        self._source.evaluate()
        tensors, source = self._source.where.tensors, self._source
        return self._space.result(
            [(source.gradient[index] / source.weight).to(tensors[index].dtype) for index in self._chosen]
        )

    # --- lifetime

    def refresh(self) -> Self:
        """Forget all graphs; the next product evaluates at the point as it is then. Returns the operator."""
        self._source.refresh()
        return self

    def close(self) -> None:
        """Free all graphs now; they go with the last reference in any case."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- cost

    def cost(self) -> Cost:
        """What `dense()`, one product and the cache take, before anything large is computed.

        Returns:
            A record with bytes, evaluations and passes; `print` shows it as a small table.

        Cost:
            One evaluation of one batch and a pass, where nothing has been evaluated yet.
        """
        source = self._source
        through, build = self._passes
        batches = source.batches
        if source.kept or source.complete:
            cache = source.cached_bytes() * (batches or 1) // max(1, source.kept)
        else:
            cache = source.first_batch_bytes() * (batches or 1)
        again = (batches or 1) - source.kept if source.evaluated else 0
        itemsize = self._domain.itemsize()
        rows, columns = self.shape
        chunk = self._chunk_size or source.auto_chunk(self._domain.size)
        chunks = -(-min(rows, columns) // chunk)
        return Cost(
            size=columns,
            dense_bytes=rows * columns * itemsize,
            product_bytes=rows * itemsize + 4 * source.largest() * itemsize,
            cache_bytes=cache,
            free_bytes=_memory.free_bytes(self.device),
            batches=batches,
            kept=source.kept,
            evaluations=again,
            passes=(batches or 1) * through + again * build,
            dense_passes=(batches or 1) * through * chunks + again * build,
        )

    # --- products

    def _inner_chunk(self) -> int:
        return self._chunk_size or self._source.auto_chunk(self._domain.size)

    def _chunk(self, count: int) -> int:
        inner = self._inner_chunk()
        if self._source.complete:
            return inner
        # Each batch is evaluated again for every chunk: take as many vectors as there is room for.
        one = 3 * (self._domain.size + self._range.size) * self._domain.itemsize()
        return max(inner, _memory.free_bytes(self.device) // (4 * one))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        block = copy.copy(self)
        block.products = 0
        block._chosen = [self._chosen[index] for index in chosen]
        block._space = self._space.only(chosen)
        return block

    def _about(self) -> str:
        source = self._source
        batches = f", {source.batches} batches" if source.batches not in (None, 1) else ""
        if not source.evaluated:
            return f"{self._route()}{batches}, not evaluated"
        held = f"cached {_memory.readable(source.cached_bytes())}" if source.kept else "nothing cached"
        some = f" ({source.kept} of {source.batches})" if source.kept and not source.complete else ""
        return f"{self._route()}{batches}, {held}{some}"

    @abstractmethod
    def _route(self) -> str:
        """How products are computed, for `repr`."""


class SummedOperator(DataOperator):
    """A symmetric operator that is a weighted mean over batches."""

    @property
    def _range(self) -> Space:
        return self._space

    @property
    def symmetric(self) -> bool:
        """Always."""
        return True

    @abstractmethod
    def _apply(self, piece: Piece, parts: Parts, count: int | None, chunk: int) -> Parts:
        """The product of one batch's sum."""

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        chunk = 1 if count is None else self._inner_chunk()
        total: Parts = []
        for piece in self._source.pieces():
            with piece.ready():
                found = self._apply(piece, parts, count, chunk)
            # An expanded result cannot be added to.
            total = plus(total, found) if total else [part.contiguous() for part in found]
        factor = 1 / self._source.weight
        return [
            (part.mul_(factor) if factor != 1 else part).to(given.dtype)
            for part, given in zip(total, parts, strict=True)
        ]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return self._multiply(parts, count)

    def _of_chosen(self, values: Sequence[Tensor]) -> Parts:
        return [values[index] for index in self._chosen]
