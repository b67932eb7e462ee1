"""The common part of operators over data: by-products, lifetime, cost, sums over batches."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self

import torch

from hodiff._core import _arguments, _messages
from hodiff._core._arguments import Checkpoint, ChunkSize
from hodiff._core._call import refuse_stand_ins
from hodiff._core._tree import Leaves
from hodiff._core._where import Where
from hodiff.curvature import _memory
from hodiff.curvature._data import Batches, DataReduction, check_total
from hodiff.curvature._graph_cache import Builder, G, GraphCache, accumulate
from hodiff.curvature._operator import LinearOperator, SymmetricOperator, say_detached
from hodiff.curvature._process_group import ProcessGroup, ProcessGroupSum, shared
from hodiff.errors import GraphError, InputError

# --- what an operator takes: `H.cost()` -----------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Cost(_messages.Reported):
    """The cost of an operator, in bytes, evaluations of the function, and reverse passes.

    Attributes:
        size: The number of columns, D.
        dense_bytes: The matrix of `dense()`.
        product_bytes: One product: its result, and about its temporaries.
        cache_bytes: The graphs of all batches, if kept; measured on one batch before the first
            product.
        free_bytes: What is free on the device.
        batches: How many batches there are; None if that is unknown.
        kept: How many of them have their graph kept.
        evaluations: Graphs of the function per product.
        passes: Reverse passes per product.
        dense_passes: Reverse passes of `dense()`, batched ones counted once.
        peak_bytes: The most that is alive until the first product is there, beside the point and
            the vector; measured on one batch, once. It tells what `checkpoint=` saves.
    """

    size: int
    dense_bytes: int
    product_bytes: int
    cache_bytes: int
    free_bytes: int
    batches: int | None
    kept: int
    evaluations: int
    passes: int
    dense_passes: int
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"dense(): {_memory.readable(self.dense_bytes)}, {self.dense_passes} passes\n"
            f"one product: {_memory.readable(self.product_bytes)}, "
            f"{self.evaluations} evaluations, {self.passes} passes\n"
            f"peak of the first: {_memory.readable(self.peak_bytes)}\n"
            f"cache: {_memory.readable(self.cache_bytes)}, {self.kept} of {self.batches} batches "
            "kept\n"
            f"free: {_memory.readable(self.free_bytes)}"
        )


# --- what operators over data have in common: by-products, lifetime, cost; and sums over batches --


class CurrentGraphs(Generic[G]):
    """The graphs of the evaluation at hand, for an operator and its blocks."""

    def __init__(self, graphs: GraphCache[G, Any]) -> None:
        self.graphs = graphs

    def _fixed(self, made: dict[int, Any]) -> Self:
        refuse_stand_ins()  # of what takes several products
        return made.setdefault(id(self), type(self)(self.graphs))


class DataOperator(LinearOperator, Generic[G]):
    """An operator made of one graph per batch, kept where there is room."""

    def __init__(
        self,
        where: Any,
        data: Any,
        builder: Callable[[Batches, ProcessGroupSum | None], Builder[G]],
        *,
        memory_budget: float,
        chunk_size: ChunkSize,
        progress: bool,
        process_group: ProcessGroup | None = None,
        keep: bool = False,
        batch_ndim: int = 0,
        reduction: DataReduction = "mean",
    ) -> None:
        super().__init__()
        point = where if type(where) is Where else Where(where, shards=self._takes_shards)
        others = process_group is not None
        self._group_sum = shared(process_group, point, data, type(self).__name__, chunk_size)
        others = others or self._group_sum is not None
        batches: Any = Batches(
            data, point.tensors[0].device, keep=keep, progress=progress, shared=others
        )
        if self._group_sum is not None:
            batches = self._group_sum.padded(batches)
        made = builder(batches, self._group_sum)
        _arguments.check_option(reduction, DataReduction, "reduction")
        graphs: GraphCache[G, Any] = GraphCache(
            made, where, point, batches, memory_budget, self._group_sum, reduction == "sum"
        )
        self._evaluation = CurrentGraphs(graphs)
        self._chunk_size = _arguments.check_chunk_size(chunk_size)
        self._chosen = list(range(len(graphs.where.tensors)))
        if _arguments.check_integer(batch_ndim, "batch_ndim", least=0):
            check_stack(point, data, process_group, batch_ndim)
        self._space = graphs.where.space().side(batch_ndim)

    _passes = 1, 1
    """Reverse passes: of a product through a graph, and to build that graph."""
    _route: str
    """How products are computed, for `repr`."""
    _takes_shards = False
    """Whether its point may be sharded over processes."""

    @property
    def _live(self) -> str:
        return self._graphs.live

    @property
    def _graphs(self) -> GraphCache[G, Any]:
        """The graphs of the evaluation at hand.

        What reads it twice must read it once: `refresh()` puts another in its place.
        """
        return self._evaluation.graphs

    # --- by-products

    @property
    def value(self) -> Any:
        """The value of the function at the point: the weighted mean over all batches."""
        say_detached("A.value", self._live)
        return self._graphs.mean()

    @property
    def gradient(self) -> Any:
        """The gradient of that value, like the point (for a block, its part)."""
        say_detached("A.gradient", self._live)
        return self._space.result(self._graphs.mean_gradient(self._chosen))

    # --- lifetime

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, or copied in depth."""
        raise GraphError(
            f"{_arguments.kind(self)} cannot be pickled or deep-copied (copy.deepcopy, torch.save, "
            f"sending it to a worker): it holds graphs, functions and locks of this process. Copy "
            f"the model and build an operator on the copy; in a worker, build the operator there."
        )

    def refresh(self) -> Self:
        """Forget all graphs; the next product evaluates at the point as it is then.

        Returns the operator.
        """
        self._evaluation.graphs = self._graphs.anew()
        return self

    def close(self) -> None:
        """Free all graphs now; they go with the last reference in any case."""
        self._evaluation.graphs = self._graphs.closed()

    def cost(self) -> Cost:
        """The cost of `dense()`, one product and the cache, before anything large is computed.

        Returns:
            A record with bytes, evaluations and passes; `print` shows it as a small table.

        Cost:
            Of one batch an evaluation and a product, the first time.
        """
        graphs = self._graphs
        through, build = self._passes
        batches = graphs.batches.count
        count = 1 if batches is None else batches
        first = graphs.first
        size, peak = graphs.one_batch(self._try)
        if graphs.kept or (first is not None and first.own.complete):
            cache = graphs.cached_bytes() * count // max(1, len(graphs.kept))
        else:
            cache = size * count
        again = 0 if first is None else count - len(graphs.kept)
        itemsize = self._domain.dtype.itemsize
        rows, columns = self.shape[-2:]
        chunk = self._chunk_size or graphs.auto_chunk(self._domain.numel)
        chunks = -(-min(rows, columns) // chunk)
        return Cost(
            size=columns,
            dense_bytes=self.shape.numel() * itemsize,
            product_bytes=rows * self._domain.batch.numel() * itemsize
            + 4 * graphs.largest() * itemsize,
            cache_bytes=cache,
            free_bytes=_memory.free_bytes(self.device),
            batches=batches,
            kept=len(graphs.kept),
            evaluations=again,
            passes=count * through + again * build,
            dense_passes=count * through * chunks + again * build,
            peak_bytes=peak + (size * (count - 1) if graphs.keeps(size * count) else 0),
        )

    def _try(self) -> Callable[[G], object]:
        """The product of one batch, to see its cost."""
        return lambda graph: None

    # --- products

    def _inner_chunk(self) -> int:
        return self._chunk_size or self._graphs.auto_chunk(self._domain.numel)

    def _chunk(self, count: int) -> int:
        graphs = self._graphs
        if self._group_sum is not None or self._domain.layout is not None:
            graphs.evaluate()  # all ranks must take as many, which they agree about there
        inner = self._inner_chunk()
        first = graphs.first
        if first is not None and first.everywhere.complete:
            return inner
        agreed = None if first is None else first.everywhere.free_bytes
        free = _memory.free_bytes(self.device) if agreed is None else agreed
        # Each batch is evaluated again for every chunk: take as many vectors as there is room for.
        one = 3 * (self._domain.numel + self._range.numel) * self._domain.dtype.itemsize
        return max(inner, free // (4 * one))

    def _names(self) -> Sequence[str]:
        """The leaves that this is a block of."""
        return self._space.names if len(self._chosen) < len(self._graphs.where.tensors) else ()

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        block = copy.copy(self)
        block._transpose_of = None
        block._chosen = [self._chosen[index] for index in chosen]
        block._space = self._space.only(chosen)
        return block

    def _about(self) -> str:
        graphs = self._graphs
        batches = (
            f", {graphs.batches.count} batches" if graphs.batches.count not in (None, 1) else ""
        )
        if graphs.first is None:
            return f"{self._route}{batches}, not evaluated"
        held = (
            f"cached {_memory.readable(graphs.cached_bytes())}" if graphs.kept else "nothing cached"
        )
        partly = graphs.kept and not graphs.first.own.complete
        some = f" ({len(graphs.kept)} of {graphs.batches.count})" if partly else ""
        return f"{self._route}{batches}, {held}{some}"


def check_stack(where: Where, data: Any, process_group: Any, batch_ndim: int) -> None:
    """Raise unless a point can be of samples, each with a matrix of its own."""
    if where.module_slices:
        raise InputError(
            f"where: got a module, whose parameters are not samples; batch_ndim={batch_ndim} is "
            f"for a point of shape (N, ...), each sample with a matrix of its own. Use "
            f"batch_ndim=0 for parameters."
        )
    if data is not None or process_group is not None:
        raise InputError(
            f"batch_ndim={batch_ndim} cannot be combined with data= or process_group=: the point "
            f"itself holds the samples."
        )
    _arguments.check_batch(where.tensors, where.names, batch_ndim)


class SummedOperator(SymmetricOperator, DataOperator[G]):
    """A symmetric operator that is a weighted mean over batches."""

    @abstractmethod
    def _apply(self, graph: G, parts: Leaves, count: int | None, chunk: int) -> Leaves:
        """The product of one batch's sum."""

    def _check_blocks(self, f: Any, checkpoint: Checkpoint) -> None:
        """Raise unless `checkpoint=` says which blocks of `f` there are."""
        from hodiff.memory import _blocks

        _blocks.in_blocks(f, self._graphs.where, checkpoint)

    def _try(self) -> Callable[[G], object]:
        zeros = [torch.zeros_like(self._graphs.where.tensors[index]) for index in self._chosen]
        return lambda graph: self._apply(graph, zeros, None, 1)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        chunk = 1 if count is None else self._inner_chunk()
        total: Leaves = []
        if self._group_sum is not None and self._graphs.where.layout is not None:
            self._graphs.check()  # before others wait in a gather
            self._group_sum.begin("multiplies", *self._names(), count=count)

        def add(graph: G, number: int) -> None:
            products = self._apply(graph, parts, count, chunk)
            # An expanded result cannot be added to.
            total[:] = (
                accumulate(total, products) if total else [part.contiguous() for part in products]
            )

        try:
            factor = 1 / self._graphs.each_graph(add).everywhere.weight
        except RuntimeError as error:
            _messages.note_memory(error)
            raise
        if self._group_sum is not None:
            return self._over_all(self._group_sum, total, parts, count, factor)
        if factor != 1:
            for part in total:
                part.mul_(factor)
        return [
            part if part.dtype is given.dtype else part.to(given.dtype)
            for part, given in zip(total, parts, strict=True)
        ]

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        if self._group_sum is not None:
            raise InputError(
                "create_graph cannot be combined with process_group=: the graph would be that of "
                "this rank's data alone. On each rank, use an operator of its own data without "
                "process_group=, multiply the gradient by the rank's share of the weights, and add "
                "them up with torch.distributed.all_reduce."
            )
        self._count(count)
        graphs = self._graphs
        made = graphs.each(
            lambda batch, number: graphs.builder.recorded(
                graphs.where, batch, number, parts, count, self._chosen, self._chunk_size
            )
        )
        products, weights = zip(*made, strict=True)
        total = 1.0 if graphs.undivided or None in weights else sum(weights)
        check_total(total)
        return [torch.stack(column).sum(0) / total for column in zip(*products, strict=True)]

    def _over_all(
        self,
        group_sum: ProcessGroupSum,
        total: Leaves,
        parts: Leaves,
        count: int | None,
        factor: float,
    ) -> Leaves:
        """The mean over the batches of all processes, from the sum over those of this one."""
        own = total or [torch.zeros_like(part) for part in parts]
        products, _ = group_sum.sum(
            "multiplies", own, who=self._names(), count=count, digest=group_sum.digest(parts, count)
        )
        return [
            (part * factor).to(given.dtype) for part, given in zip(products, parts, strict=True)
        ]
