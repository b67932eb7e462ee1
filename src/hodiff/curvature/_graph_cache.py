"""The graphs of all batches: built once, kept within a budget, shared by an operator and its blocks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from hodiff._core import _call, _locks, _memory, _nodes, _reverse, _settings
from hodiff._core._graph import Graph
from hodiff._core._settings import RandomState
from hodiff._core._where import Where
from hodiff.curvature._data import NONE, Batches, check_total
from hodiff.curvature._process_group import Shares
from hodiff.curvature._space import Parts, accumulate
from hodiff.curvature._staleness import Modules, Values, buffers_of, culprits, warn_buffers, warn_random
from hodiff.errors import GraphError, InputError

# --- one batch, evaluated ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BatchGraph(ABC):
    """One batch, evaluated: its part of every sum, and a graph through which products run.

    Attributes:
        ev: The evaluation; its graph is kept.
        value: The batch's sum, detached.
        weight: What the sums are divided by, its part of it; None: by nothing.
        gradient: The gradient of the sum by each leaf, detached.
        random: Whether the function drew random numbers.
        calls_back: Whether passes over the graph run Python (activation checkpoints do).
    """

    ev: Graph
    value: Tensor
    weight: float | None
    gradient: Parts
    random: bool
    calls_back: bool

    @property
    @abstractmethod
    def roots(self) -> Parts:
        """The tensors whose graph a product runs through."""

    def ready(self) -> AbstractContextManager[Any]:
        """The state in which a product may run."""
        if self.calls_back:
            return self.ev.resumed()
        return _settings.recording() if torch.is_inference_mode_enabled() else nullcontext()


G = TypeVar("G", bound=BatchGraph)
"""What kind of graph an operator has."""


class Builder(ABC, Generic[G]):
    """Evaluates one batch at a point. What belongs to one evaluation of all batches (labels drawn) it keeps itself."""

    @abstractmethod
    def build(self, where: Where, batch: Any, number: int) -> G:
        """The graph of batch `number`."""

    def begin(self) -> None:
        """Before the first batch of an evaluation; there may be none."""
        return

    def fresh(self) -> Self:
        """The same builder, as it was before anything was built: itself, where it keeps nothing."""
        return self


# --- all batches ------------------------------------------------------------------------------------------------------


B = TypeVar("B", bound=Builder[Any])
R = TypeVar("R")

_VALUES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of values."""


class RankFacts(NamedTuple):
    """What a process says of its own first pass, in numbers, as its line carries them.

    Attributes:
        value: The sum over its batches.
        weight: What it is divided by.
        undivided: Whether it is divided by nothing.
        largest: Elements of the largest tensor that a pass handles, 0 without data.
        complete: Whether the graphs of all its batches are kept.
        free_bytes: The memory that is free.
        dtype: The place of the value's dtype in `_VALUES`, from 1 on; 0 without data.
        buffers: A checksum of the buffers that outputs depend on.
    """

    value: float
    weight: float
    undivided: float
    largest: float
    complete: float
    free_bytes: float
    dtype: float
    buffers: float


class GraphCache(Generic[G, B]):
    """The graphs of an operator, one for each batch: built once, kept within a budget, or built again.

    All batches are kept or none, unless their order is fixed: of shuffled data, kept and new batches
    would overlap (a product was 23-93 % off).

    Of one evaluation: once that has been made, by one thread, nothing of it changes but what can be made again. To
    evaluate anew is to have another cache, so a product that another thread has begun goes on with its own.
    """

    def __init__(
        self, builder: B, point: Any, batches: Batches, memory_budget: float, shares: Shares | None = None
    ) -> None:
        _memory.check_budget(memory_budget)
        self.shares = shares
        self.builder = builder
        self._point = point
        self._batches = batches
        self._budget = memory_budget
        self.where = point if isinstance(point, Where) else Where(point)
        self.device = self.where.tensors[0].device
        self._closed = False
        self._modules = Modules(self.where)
        self._forget()

    def _forget(self) -> None:
        self.builder: B = self.builder.fresh()
        live = any(tensor.grad_fn is not None for tensor in self.where.tensors)
        self.live = "the point has a grad_fn" if live else ""
        self._graphs: dict[int, G] = {}
        self._random: dict[int, RandomState] = {}
        self._autocast = False, torch.bfloat16
        self._values: Values | None = None
        self._largest: int | None = None
        self.bytes = 0
        self.weight, self._undivided = 0.0, False
        self._own = 0.0, 0.0
        self._everywhere: tuple[bool, int] | None = None
        self.value: Tensor | None = None
        self.gradient: Parts = []

    # --- the first pass

    def evaluate(self) -> None:
        """The first pass over the data, unless it has been made; a check that nobody has touched the point."""
        _call.refuse_transforms(batched=True)
        if self._closed:
            with self._together():  # others may be about to evaluate theirs
                raise GraphError("the operator is closed; H.refresh() opens it again, at the point as it is now.")
        if self._values is None:
            with _locks.Held(self._batches):  # of several threads one evaluates, and those of later caches wait too
                if self._values is None:
                    with self._together():
                        self._evaluate()
                    return
        self._modules.check()
        self._values.check_versions()

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self.shares is None else self.shares.together()

    def _evaluate(self) -> None:
        self._modules.check()
        values, kind = Values(self.where), self.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:
            self._first_pass()
            self._own = float(self._total()), self.weight
            if self.shares is not None:
                self._add_others(self.shares)
            check_total(self.weight)
            self._values = values  # others look here
        except BaseException:
            self._forget()
            raise

    def _first_pass(self) -> None:
        keeping = self._budget > 0
        limit = _memory.budget(self._budget, self.device) if self._batches.given and keeping else 0
        self.builder.begin()
        for number, batch in enumerate(self._batches):
            state = RandomState.of(self.device)
            graph, size = self._measured(self.builder, batch, number)
            self._add(graph)
            if self._largest is None:
                self._largest = _nodes.largest_output(_nodes.survey(graph.roots))
            if graph.random:
                self._random[number] = state
            if keeping and self._batches.given and self.bytes + size > limit:
                keeping = False
                if not self._batches.fixed:
                    self._graphs, self.bytes = {}, 0
            if keeping:
                self._graphs[number] = graph
                self.bytes += size
            del graph
        if self._random:
            warn_random(self.where)

    def _measured(self, builder: Builder[G], batch: Any, number: int) -> tuple[G, int]:
        """A new graph, and its bytes (they matter only where there are several batches)."""
        if not self._batches.given:
            return builder.build(self.where, batch, number), 0
        return _memory.measured(lambda: builder.build(self.where, batch, number), self.device)

    def _add(self, graph: G) -> None:
        self.weight = 1.0 if graph.weight is None else self.weight + graph.weight
        self._undivided = graph.weight is None
        if self.value is None:
            self.value, self._value_dtype = graph.value.clone(), graph.value.dtype
            self.gradient = [part.clone() for part in graph.gradient]
            return
        (self.value,) = accumulate([self.value], [graph.value])
        self.gradient = accumulate(self.gradient, graph.gradient)

    def _add_others(self, shares: Shares) -> None:
        """The sums over all processes in place of this one's own."""
        tensors = self.where.tensors
        complete = len(self._graphs) == self._batches.count
        kind = 0 if self.value is None else 1 + _VALUES.index(self._value_dtype)
        room, buffers = _memory.free_bytes(self.device), buffers_of(self.where)
        seen = shares.digest(buffers) if buffers else 0
        own = RankFacts(*self._own, self._undivided, self._largest or 0, complete, room, kind, seen)
        gradient = self.gradient or [torch.zeros_like(tensor) for tensor in tensors]
        found, lines = shares.sum("evaluates", gradient, digest=shares.digest(tensors), facts=own)
        ranks = [RankFacts(*line.facts) for line in lines]
        odd = [number for number, rank in enumerate(ranks) if rank.buffers != ranks[0].buffers]
        if odd:
            warn_buffers(odd)
        self.weight = 1.0 if any(rank.undivided for rank in ranks) else sum(rank.weight for rank in ranks)
        kind = next((rank.dtype for rank in ranks if rank.dtype), 0)  # a rank without data rounds as the others do
        self._value_dtype = _VALUES[int(kind) - 1] if kind else tensors[0].dtype
        self.value = torch.tensor(sum(rank.value for rank in ranks), dtype=torch.float64, device=self.device)
        self.gradient = [part.clone() for part in found]
        self._largest = int(max(rank.largest for rank in ranks)) or 1
        self._everywhere = all(rank.complete for rank in ranks), int(min(rank.free_bytes for rank in ranks))

    # --- later passes

    def check(self) -> None:
        """The first pass, unless it has been made; else raise where the point has other values than then."""
        first = self._values is None
        self.evaluate()
        if not first and self._values is not None:
            self._values.check()

    def mean(self) -> Tensor:
        """The value: the sum over all batches by their weight."""
        self.check()
        return (self._total() / self.weight).to(self._value_dtype)

    def mean_gradient(self, chosen: Sequence[int]) -> Parts:
        """The gradient of that by some of the leaves."""
        self.check()
        tensors = self.where.tensors
        return [(self.gradient[index] / self.weight).to(tensors[index].dtype) for index in chosen]

    def _total(self) -> Tensor:
        return torch.zeros((), device="cpu") if self.value is None else self.value

    def __iter__(self) -> Iterator[Callable[[], G]]:
        """For each batch what gives its graph, one that is kept or another.

        No generator runs `f`: it would turn a StopIteration of `f` into a RuntimeError.
        """
        self.check()
        if len(self._graphs) == self._batches.count:
            return iter([partial(self._graphs.__getitem__, number) for number in self._graphs])
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[Callable[[], G]]:
        value, weight, scale = 0.0, 0.0, 1e-30
        for number, batch in enumerate(self._batches):
            seen: list[Any] = []
            yield partial(self._seen, batch, number, seen)
            own, some = seen
            value, scale = value + own, scale + abs(own)
            weight = 1.0 if some is None else weight + some
        self._compare(value, weight, scale)

    def _seen(self, batch: Any, number: int, seen: list[Any]) -> G:
        graph = self._graphs.get(number)
        if graph is None:
            graph = self._again(batch, number)
        seen += [float(graph.value), graph.weight]
        return graph

    def _again(self, batch: Any, number: int) -> G:
        return self._replayed(number, lambda: self.builder.build(self.where, batch, number))

    def _replayed(self, number: int, make: Callable[[], R]) -> R:
        """A batch evaluated once more, as the first time: with its precision, and its random numbers."""
        enabled, dtype = self._autocast
        with _settings.autocast(self.device.type, dtype, enabled=enabled):
            if not self._random:
                return make()
            now = RandomState.of(self.device)
            self._random.get(number, now).restore()
            try:
                return make()
            finally:
                now.restore()

    def each(self, make: Callable[[Any, int], R]) -> list[R]:
        """What `make` makes of each batch and its number, evaluated as in the first pass, if there was one."""
        if self.evaluated or self._closed:
            self.check()
        else:
            self._modules.check()
        return [
            self._replayed(number, lambda batch=batch, number=number: make(batch, number))
            for number, batch in enumerate(self._batches)
        ]

    def _compare(self, value: float, weight: float, scale: float) -> None:
        """Raise where a pass over the data found another function than the first pass."""
        first, first_weight = self._own
        eps = torch.finfo(self.where.tensors[0].dtype).eps
        if abs(weight - first_weight) > 1e-6 * first_weight or abs(value - first) > 1e3 * eps * scale:
            raise GraphError(
                f"two passes over data disagree: the sum was {first:.8g} (weight {first_weight:g}) and is now "
                f"{value:.8g} (weight {weight:g}), so products would belong to different operators."
                f"{culprits(self.where)} Use model.eval(), data without random augmentation, a list of fixed batches, "
                f"or a memory_budget= that keeps all graphs."
            )

    # --- what a product needs

    def auto_chunk(self, elements: int) -> int:
        """How many vectors of so many elements one pass should take."""
        if self._largest is None:
            self.evaluate()
        itemsize = max(tensor.element_size() for tensor in self.where.tensors)
        return _reverse.fitting(self._largest or 1, elements, itemsize, self.device)

    def largest(self) -> int:
        """Elements of the largest tensor that a pass handles."""
        self.auto_chunk(1)
        return self._largest or 1

    @property
    def evaluated(self) -> bool:
        """Whether the first pass over the data has been made."""
        return self._values is not None

    @property
    def kept(self) -> int:
        """How many batches have their graph kept."""
        return len(self._graphs)

    @property
    def complete(self) -> bool:
        """Whether every batch has."""
        return self.evaluated and len(self._graphs) == self._batches.count

    @property
    def complete_everywhere(self) -> bool:
        """Whether that is so in all processes."""
        return self.complete if self._everywhere is None else self._everywhere[0]

    def free_bytes(self) -> int:
        """The memory that is free; of several processes the least that one had when it evaluated."""
        return _memory.free_bytes(self.device) if self._everywhere is None else self._everywhere[1]

    @property
    def batches(self) -> int | None:
        """How many batches there are, if that is known."""
        return self._batches.count

    def cached_bytes(self) -> int:
        """Bytes that the kept graphs hold; of a function without data they are counted by evaluating it again."""
        if self._graphs and not self._batches.given and not self.bytes and self._graphs[0].ev.owned:
            _, self.bytes = _memory.measured(lambda: self._again(NONE, 0), self.device)
        return self.bytes

    def first_batch_bytes(self) -> int:
        """Bytes of one batch's graph, by evaluating it."""
        batch = next(iter(self._batches), None)
        if batch is None and self._batches.shared:  # an empty share
            self._largest = self._largest or 1
            return 0
        builder = self.builder.fresh()  # it may be another batch than the one that comes first later
        graph, size = _memory.measured(lambda: builder.build(self.where, batch, 0), self.device)
        self._largest = _nodes.largest_output(_nodes.survey(graph.roots))
        return size

    # --- lifetime

    def anew(self) -> Self:
        """An empty one in its place, whose first product evaluates at the point as it is then."""
        found = copy.copy(self)
        if not isinstance(self._point, Where):
            found.where = now = Where(self._point)
            if now.names != self.where.names or [t.shape for t in now.tensors] != [t.shape for t in self.where.tensors]:
                raise InputError(
                    "refresh: the point has other leaves than when the operator was made (parameters were frozen, "
                    "added or resized); make a new operator."
                )
        found._forget()
        found._closed = False
        found._modules = Modules(found.where)
        return found

    def closed(self) -> Self:
        """An empty one in its place, that evaluates nothing."""
        found = copy.copy(self)
        found._forget()
        found._closed = True
        return found
