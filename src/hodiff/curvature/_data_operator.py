"""Operators over data: one graph for each batch, built once, kept within a budget."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _messages, _nodes, _reverse, _settings
from hodiff._core._arguments import Checkpoint, ChunkSize
from hodiff._core._graph import OutputGraph
from hodiff._core._tree import Leaves
from hodiff._core._vectors import sum_dtype
from hodiff._core._where import Where
from hodiff.curvature import _memory
from hodiff.curvature._data import NONE, Batches, DataReduction, check_total
from hodiff.curvature._operator import LinearOperator, SymmetricOperator, say_detached
from hodiff.curvature._process_group import ProcessGroup, ProcessGroupSum, shared
from hodiff.curvature._staleness import (
    Modules,
    Values,
    buffers_of,
    culprits,
    warn_buffers,
    warn_random,
)
from hodiff.errors import GraphError, InputError

# --- one batch, evaluated -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BatchGraph:
    """One batch, evaluated: its part of every sum, and a graph through which products run.

    Attributes:
        evaluation: The evaluation; its graph is kept.
        value: The batch's sum, detached.
        weight: What the sums are divided by, its part of it; None: by nothing.
        gradient: The gradient of the sum by each leaf, detached; empty, where it is left for later.
        roots: The tensors whose graph a product runs through.
        random: Whether the function drew random numbers.
        calls_back: Whether passes over the graph run Python (activation checkpoints do).
    """

    evaluation: OutputGraph
    value: Tensor
    weight: float | None
    gradient: Leaves
    roots: Leaves
    random: bool
    calls_back: bool

    def slope(self) -> Leaves:
        """The gradient, made now where it was left for later."""
        return self.gradient

    def ready(self) -> AbstractContextManager[Any]:
        """The state in which a product may run."""
        if self.calls_back:
            return self.evaluation.resumed()
        return _settings.recording() if torch.is_inference_mode_enabled() else nullcontext()


G = TypeVar("G", bound=BatchGraph)
"""What kind of graph an operator has."""


class Builder(ABC, Generic[G]):
    """Evaluates one batch at a point.

    What belongs to one evaluation of all batches (labels drawn) it keeps itself.
    """

    @property
    @abstractmethod
    def functions(self) -> Sequence[Any]:
        """The user's functions that it calls."""

    @property
    def by_samples(self) -> bool:
        """Whether each output counts as a sample's."""
        return False

    @abstractmethod
    def evaluation(self, where: Where, batch: Any) -> OutputGraph:
        """A batch's outputs, or its sum, not yet entered."""

    @abstractmethod
    def build(self, where: Where, batch: Any, number: int) -> G:
        """The graph of batch `number`."""

    def fresh(self, *, begins: bool = False) -> Self:
        """The builder before anything was built, or as an evaluation `begins`; itself,
        or a new one.
        """
        return self


def accumulate(total: Leaves, terms: Sequence[Tensor]) -> Leaves:
    """A running sum of the caller's own, in the precision of sums from the second term on."""
    return [
        sum_.to(sum_dtype(sum_.dtype)).add_(term) for sum_, term in zip(total, terms, strict=True)
    ]


def _shape_of(graph: OutputGraph) -> tuple[int, ...]:
    """The shape of the outputs; of a sum, that of what was summed."""
    nodes = _nodes.survey(graph.tensors()).nodes
    return next(
        (shape for node in nodes for shape, _ in _nodes.Use(node, 0).results() if shape), ()
    )


# --- all batches ----------------------------------------------------------------------------------


B = TypeVar("B", bound=Builder[Any])
R = TypeVar("R")


class RankFacts(NamedTuple):
    """The report of a process on its own first pass, or that of all together.

    Attributes:
        value: The sum over its batches.
        weight: What it is divided by.
        undivided: Whether it is divided by nothing.
        largest: Elements of the largest tensor that a pass handles, 0 without data.
        complete: Whether the graphs of all its batches are kept.
        dtype: The dtype of the value; None without data.
        free_bytes: The memory that is free, where processes agree about it.
        buffers: A checksum of the buffers that outputs depend on.
    """

    value: float
    weight: float
    undivided: bool
    largest: int
    complete: bool
    dtype: torch.dtype | None
    free_bytes: int | None = None
    buffers: int = 0


@dataclass(frozen=True, eq=False)
class FirstPass:
    """One evaluation of all batches: what they add up to, and what it takes to evaluate one of them
    once more.

    Attributes:
        value: The sum over all batches, of all processes.
        gradient: The gradient of the sum by each leaf.
        own: What was found in this process; later passes are compared with it.
        everywhere: What was found in all of them: sums, the largest tensor, the least memory.
        point: The values of the point's tensors.
        autocast: The precision of the evaluation, as a context.
        random: The random state before each batch that drew.
    """

    value: Tensor
    gradient: Leaves
    own: RankFacts
    everywhere: RankFacts
    point: Values
    autocast: Callable[[], AbstractContextManager[Any]]
    random: dict[int, _settings.RandomState]


class GraphCache(Generic[G, B]):
    """The graphs of an operator, one for each batch: built once, kept within a budget, or built
    again.

    All batches are kept or none, unless their order is fixed: of shuffled data, kept and new
    batches would overlap (a product was 23-93 % off).

    Of one evaluation: once that has been made, by one thread, nothing of it changes but what can be
    made again. To evaluate anew is to have another cache, so a product that another thread has
    begun goes on with its own.
    """

    def __init__(
        self,
        builder: B,
        point: Any,
        where: Where,
        batches: Batches,
        memory_budget: float,
        group_sum: ProcessGroupSum | None = None,
        undivided: bool = False,
    ) -> None:
        """The graphs at a point, as it is read now; what they add up to is a sum, where that is
        `undivided`.
        """
        _memory.check_budget(memory_budget)
        self.builder = builder
        self.group_sum = group_sum
        self._point = point
        self.batches = batches
        self.budget = memory_budget
        self._undivided = undivided
        self.where = where
        self.device = self.where.tensors[0].device
        self.live = (
            "the point has a grad_fn"
            if any(part.grad_fn is not None for part in self.where.tensors)
            else ""
        )
        self._closed = False
        self._modules = Modules(self.where)
        self.first: FirstPass | None = None
        self.kept: dict[int, G] = {}
        self._bytes = 0
        self._probed: int | None = None
        self._one_batch: tuple[int, int] | None = None

    # --- the first pass

    def evaluate(self, take: Callable[[G, int], object] | None = None) -> FirstPass:
        """The first pass over the data, unless it has been made; then raise where the point is
        another.

        What is to `take` the graphs is shown each as it is made, in a first pass.
        """
        _call.refuse_stand_ins()
        if self.first is None:
            # Of several threads one evaluates, and those of later caches wait too.
            on_all_ranks = (
                nullcontext if self.group_sum is None else self.group_sum.raise_on_all_ranks
            )
            with _settings.owned(self.batches), on_all_ranks():
                return self.first or self._evaluate(take)
        first = self.first
        self._modules.check()
        first.point.check()
        return first

    def _evaluate(self, take: Callable[[G, int], object] | None = None) -> FirstPass:
        if self._closed:
            raise GraphError(
                "the operator is closed; H.refresh() opens it again at the current point."
            )
        self._modules.check()
        if self.where.layout is None:  # else no process may run f by itself
            self.batches.check_items(self._shape)
        builder = self.builder.fresh(begins=True)
        graphs: dict[int, G] = {}
        try:
            first = self._first_pass(builder, graphs, take)
            if self.group_sum is not None:
                first = self._with_others(first, self.group_sum)
            if self.where.layout is not None:
                facts = first.everywhere._replace(free_bytes=_memory.free_bytes(self.device))
                first = replace(first, everywhere=self.where.layout.agreed(facts))
            if self.where.layout is not None and not first.everywhere.complete:
                graphs.clear()  # all processes gather for a batch, or none
                first = replace(first, own=first.own._replace(complete=False))
            check_total(first.everywhere.weight)
        except BaseException:
            graphs.clear()  # the error's traceback has them too
            raise
        self.builder: B = builder
        self.kept = graphs
        self.first = first  # others look here
        return first

    def _first_pass(
        self, builder: B, graphs: dict[int, G], take: Callable[[G, int], object] | None = None
    ) -> FirstPass:
        """The sums over this process's own batches; graphs to keep are put into `graphs`."""
        point = Values(self.where, builder.functions)
        autocast = _settings.autocast_now(self.device.type)
        keeping = self.budget > 0
        limit = _memory.budget(self.budget, self.device) if self.batches.given and keeping else 0
        sums: Leaves = []
        weights: list[float | None] = []
        dtype, largest = None, self._probed or 0
        self._bytes = 0
        random: dict[int, _settings.RandomState] = {}
        for number, batch in enumerate(self.batches):
            state = _settings.RandomState(self.device)
            build = partial(self._built, builder, batch, number)
            counts = self.batches.given and keeping
            graph, size = _memory.measured(build, self.device) if counts else (build(), 0)
            if self.batches.given and not number and self.where.layout is None:
                at = graph.weight, _shape_of(graph.evaluation), self._shape
                self.batches.check_first(batch, *at, by_samples=self.builder.by_samples)
            terms = [graph.value, *graph.gradient]
            dtype = dtype or graph.value.dtype
            sums = accumulate(sums, terms) if sums else [part.clone() for part in terms]
            weights.append(graph.weight)
            largest = largest or _nodes.largest_output(_nodes.survey(graph.roots))
            if graph.random:
                random[number] = state
            if self._bytes + size > limit:
                keeping = False
                if not self.batches.fixed:
                    graphs.clear()
                    self._bytes = 0
            if keeping:
                graphs[number] = graph
                self._bytes += size
            if take is not None:
                with graph.ready():
                    take(graph, number)
            del graph, terms
        point.settle()
        if random:
            warn_random(self.where)
        nothing = torch.zeros((), device="cpu")
        value, *gradient = sums or [nothing, *map(torch.zeros_like, self.where.tensors)]
        complete = len(graphs) == self.batches.count
        weight, undivided = self.divisor(weights), self._undivided or None in weights
        own = RankFacts(float(value.sum()), weight, undivided, largest, complete, dtype)
        return FirstPass(value, gradient, own, own, point, autocast, random)

    def _shape(self, batch: Any) -> tuple[int, ...]:
        """The shape of what a batch gives; `()` where it is not taken.

        Draws of the function leave no trace.
        """
        now = _settings.RandomState(self.device)
        try:
            with now.replayed(), self.builder.fresh().evaluation(self.where, batch) as graph:
                return _shape_of(graph)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            return ()

    def _with_others(self, first: FirstPass, group_sum: ProcessGroupSum) -> FirstPass:
        """The sums over all processes in place of this one's own."""
        tensors, buffers = self.where.tensors, buffers_of(self.where)
        seen = group_sum.digest(buffers) if buffers else 0
        facts = first.own._replace(free_bytes=_memory.free_bytes(self.device), buffers=seen)
        gradient, ranks = group_sum.sum(
            "evaluates", first.gradient, digest=group_sum.digest(tensors), fact=facts
        )
        odd = [number for number, rank in enumerate(ranks) if rank.buffers != ranks[0].buffers]
        if odd:
            warn_buffers(odd)
        everywhere = facts._replace(
            value=sum(rank.value for rank in ranks),
            weight=1.0
            if any(rank.undivided for rank in ranks)
            else sum(rank.weight for rank in ranks),
            largest=max(rank.largest for rank in ranks),
            complete=all(rank.complete for rank in ranks),
            free_bytes=min(rank.free_bytes for rank in ranks),
            # one without data rounds as the others do
            dtype=next((rank.dtype for rank in ranks if rank.dtype), None),
        )
        value = torch.tensor(everywhere.value, dtype=torch.float64, device=self.device)
        return replace(
            first, value=value, gradient=[part.clone() for part in gradient], everywhere=everywhere
        )

    # --- later passes

    def mean(self) -> Tensor:
        """The value: the sum over all batches by their weight."""
        first = self.evaluate()
        return (first.value / first.everywhere.weight).to(first.everywhere.dtype)

    def mean_gradient(self, chosen: Sequence[int]) -> Leaves:
        """The gradient of that by some of the leaves."""
        first, tensors = self.evaluate(), self.where.tensors
        weight, gradient = first.everywhere.weight, first.gradient or self._slopes()
        return [(gradient[index] / weight).to(tensors[index].dtype) for index in chosen]

    def _slopes(self) -> Leaves:
        """The gradient of the sum, where the first pass has left it for later."""
        total: Leaves = []

        def add(graph: G, number: int) -> None:
            own = graph.slope()
            total[:] = accumulate(total, own) if total else own

        self.each_graph(add)
        return total

    def each_graph(self, take: Callable[[G, int], object]) -> FirstPass:
        """Show the graph of each batch, kept or made again,
        in the state in which a product may run.
        """
        if self.first is None and not self.budget and self.group_sum is None:
            shown: list[int] = []

            def show(graph: G, number: int) -> None:
                take(graph, number)
                shown.append(number)

            first = self.evaluate(show)
            if shown:  # and not another thread's
                return first
        first = self.evaluate()
        if first.own.complete:
            for number, graph in self.kept.items():
                with graph.ready():
                    take(graph, number)
            return first
        value, scale = 0.0, 1e-30
        weights: list[float | None] = []
        for number, batch in enumerate(self.batches):
            graph = self.kept.get(number) or self._again(batch, number)
            own = float(graph.value.sum())
            value, scale = value + own, scale + abs(own)
            weights.append(graph.weight)
            with graph.ready():
                take(graph, number)
            del graph  # before the next is built
        self._compare(first, value, self.divisor(weights), scale)
        return first

    def divisor(self, weights: Sequence[float | None]) -> float:
        """The number that a sum over batches is divided by: 1 where that is nothing."""
        return 1.0 if self._undivided or None in weights else sum(filter(None, weights), 0.0)

    def _again(self, batch: Any, number: int) -> G:
        return self._replayed(number, partial(self._built, self.builder, batch, number))

    def _built(self, builder: B, batch: Any, number: int) -> G:
        """The graph of a batch; one that is run for other processes' sake counts nothing."""
        graph = builder.build(self.where, batch, number)
        if not self.batches.muted:
            return graph
        nothing = None if graph.weight is None else 0.0
        return replace(graph, value=torch.zeros_like(graph.value), weight=nothing)

    def _replayed(self, number: int, make: Callable[[], R]) -> R:
        """A batch evaluated as in the first pass, if there was one: with its precision,
        and its random numbers.
        """
        first = self.first
        if first is None:
            return make()
        with first.autocast():
            if not first.random:
                return make()
            state = first.random.get(number) or _settings.RandomState(self.device)
            with state.replayed():
                return make()

    def each(self, make: Callable[[Any, int], R]) -> list[R]:
        """The results of `make` for each batch and its number, evaluated as in the first pass,
        if there was one.
        """
        if self.first is not None or self._closed:
            self.evaluate()
        else:
            self._modules.check()
        return [
            self._replayed(number, partial(make, batch, number))
            for number, batch in enumerate(self.batches)
        ]

    def _compare(self, first: FirstPass, value: float, weight: float, scale: float) -> None:
        """Raise where a pass over the data found another function than the first pass."""
        before, of = first.own.value, first.own.weight
        eps = torch.finfo(self.where.tensors[0].dtype).eps
        if abs(weight - of) > 1e-6 * of or abs(value - before) > 1e3 * eps * scale:
            raise GraphError(
                f"two passes over data disagree: the sum was {before:.8g} (weight {of:g}) and is "
                f"now {value:.8g} (weight {weight:g}), so two products would be of different "
                f"operators.{culprits(self.where)} Use model.eval(), data without random "
                f"augmentation, a list of fixed batches, or a memory_budget= that keeps all graphs."
            )

    # --- what a product needs

    def auto_chunk(self, elements: int) -> int:
        """The number of vectors of so many elements for one pass."""
        itemsize = max(tensor.element_size() for tensor in self.where.tensors)
        return _reverse.fitting(self.largest(), elements, itemsize, self.device)

    def largest(self) -> int:
        """Elements of the largest tensor that a pass handles; of a batch that was only measured,
        if need be.
        """
        if self.first is None and self._probed is not None:
            return self._probed or 1
        return (self.first or self.evaluate()).everywhere.largest or 1

    def cached_bytes(self) -> int:
        """Bytes that the kept graphs hold; of a function without data they are
        counted by evaluating it again.
        """
        if (
            self.kept
            and not (self.batches.given or self._bytes)
            and self.kept[0].evaluation.call.builds_graph
        ):
            _, self._bytes = _memory.measured(lambda: self._again(NONE, 0), self.device)
        return self._bytes

    def one_batch(self, take: Callable[[G], object]) -> tuple[int, int]:
        """Bytes of one batch's graph, and at the peak of it and a product: both are made, once."""
        if self._one_batch is None:
            _call.refuse_stand_ins()
            batch = next(iter(self.batches), None)
            if batch is None and self.batches.shared:  # an empty share
                self._probed = self._probed or 1
                return 0, 0
            builder = self.builder.fresh()  # later another batch may come first
            now = _settings.RandomState(self.device)
            with now.replayed(), _settings.on(_memory.LiveBytes()) as live:
                graph = builder.build(self.where, batch, 0)
                size = live.now
                self._probed = _nodes.largest_output(_nodes.survey(graph.roots))
                # Which a first pass holds.
                _sums = [part.clone() for part in (graph.value, *graph.gradient)]
                with graph.ready():
                    take(graph)
            self._one_batch = size, live.peak
        return self._one_batch

    # --- lifetime

    def anew(self) -> Self:
        """An empty one in its place, whose first product evaluates at the point as it is then."""
        point = self._point
        where = point if isinstance(point, Where) else Where(point, shards=True)
        if where.layout is not None:
            where.layout.ranks = self.group_sum
        copied = type(self)(
            self.builder.fresh(),
            self._point,
            where,
            self.batches,
            self.budget,
            self.group_sum,
            self._undivided,
        )
        tensors, now = self.where.tensors, copied.where
        if now.names != self.where.names or [t.shape for t in now.tensors] != [
            t.shape for t in tensors
        ]:
            raise InputError(
                "refresh: the leaves of the point have changed since the operator was made "
                "(parameters were frozen, added or resized); make a new operator."
            )
        return copied

    def closed(self) -> Self:
        """An empty one in its place, that evaluates nothing."""
        copied = copy.copy(self)
        copied.builder = self.builder.fresh()
        copied.first = None
        copied.kept = {}
        copied._closed = True
        return copied


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


@dataclass(eq=False)
class CurrentGraphs(Generic[G]):
    """The graphs of the evaluation at hand, for an operator and its blocks."""

    graphs: GraphCache[G, Any]

    def _fixed(self, made: dict[int, Any]) -> Self:
        _call.refuse_stand_ins()  # of what takes several products
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
        self._group_sum = shared(process_group, point, data, type(self).__name__, chunk_size)
        batches: Any = Batches(
            data,
            point.tensors[0].device,
            keep=keep,
            progress=progress,
            shared=process_group is not None or self._group_sum is not None,
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
            check_stack(point, data, batch_ndim)
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
        size, peak = graphs.one_batch(partial(self._try, self._space.zeros()))
        if graphs.kept or (first is not None and first.own.complete):
            cache = graphs.cached_bytes() * count // max(1, len(graphs.kept))
        else:
            cache = size * count
        again = 0 if first is None else count - len(graphs.kept)
        itemsize = self._domain.dtype.itemsize
        rows, columns = self.shape[-2:]
        chunk = self._chunk_size or graphs.auto_chunk(self._domain.numel)
        chunks = -(-min(rows, columns) // chunk)
        fits = size * count <= _memory.budget(graphs.budget, graphs.device)
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
            peak_bytes=peak + (size * (count - 1) if fits else 0),
        )

    def _try(self, parts: Leaves, graph: G) -> None:
        """Compute the product of one batch, to see its cost."""

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


def check_stack(where: Where, data: Any, batch_ndim: int) -> None:
    """Raise unless a point can be of samples, each with a matrix of its own."""
    if where.module_slices:
        raise InputError(
            f"where: got a module, whose parameters are not samples; batch_ndim={batch_ndim} is "
            f"for a point of shape (N, ...), each sample with a matrix of its own. Use "
            f"batch_ndim=0 for parameters."
        )
    if data is not None:
        raise InputError(
            f"batch_ndim={batch_ndim} cannot be combined with data=: the point itself holds the "
            f"samples."
        )
    _arguments.check_batch(where.tensors, where.names, batch_ndim)


class SummedOperator(SymmetricOperator, DataOperator[G]):
    """A symmetric operator that is a weighted mean over batches."""

    @abstractmethod
    def _apply(self, graph: G, parts: Leaves, count: int | None, chunk: int) -> Leaves:
        """The product of one batch's sum."""

    def _check_blocks(self, f: Any, checkpoint: Checkpoint) -> None:
        """Raise unless `checkpoint=` says which blocks of `f` there are, if it is given."""
        if checkpoint is not False:
            from hodiff.memory import _blocks

            _blocks.in_blocks(f, self._graphs.where, checkpoint)

    def _try(self, parts: Leaves, graph: G) -> None:
        self._apply(graph, parts, None, 1)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        chunk = 1 if count is None else self._inner_chunk()
        total, group_sum = list[Tensor](), self._group_sum
        if group_sum is not None and self._graphs.where.layout is not None:
            self._graphs.evaluate()  # before others wait in a gather
            group_sum.begin("multiplies", *self._names(), count=count)

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
        if group_sum is not None:
            own = total or [torch.zeros_like(part) for part in parts]
            digest = group_sum.digest(parts, count)
            sums, _ = group_sum.sum(
                "multiplies", own, who=self._names(), count=count, digest=digest
            )
            total = [part.clone() for part in sums]  # out of the buffer
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
        total = graphs.divisor(weights)
        check_total(total)
        return [torch.stack(column).sum(0) / total for column in zip(*products, strict=True)]
