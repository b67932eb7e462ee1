"""Index sets, followed through a reverse pass, operation by operation.

A reverse pass is linear in its cotangent *u*. While it runs, this mode sees each operation that
PyTorch performs, and knows for each number in memory which entries of *u* it may depend on: its
*set*. Sets belong to memory, not to tensors, so that views and writes in place need no rules.

What the numbers are is not looked at, with one exception: a zero in a constant of the user's ends a
dependence. So it must be known which numbers follow from the point. Those are *variable*: tensors
that were computed from it, or that require grad, or were given as arguments.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _versions
from hodiff._core._faults import is_fault
from hodiff._core._settings import Counted, DispatchMode, Scope, Undo, on
from hodiff.errors import InputError
from hodiff.sparse._pattern import sorted_unique

# --- an index set for each element of a tensor: movement, broadcasting, sums, scatters ------------
# Elements that have the same set share it: a `Sets` is a table of sets, and for each element the
# number of its row there. So a broadcast copies no set, and an operation that couples everything
# makes one.


LIMIT = 2**28
"""The most numbers that sets may hold together, 2 GiB of them."""


class TooMany(Exception):
    """The sets hold more numbers than any matrix that is worth calling sparse."""


@dataclass(slots=True, eq=False)
class Sets:
    """A set of numbers below `width` for each of some elements.

    Attributes:
        rows: For each element the row of the table that is its set; row 0 is the empty set.
        start: Where each row of the table begins in `items`, and where the last one ends.
        items: The members of all rows, one row after the other, ascending.
        width: What all members are below.
    """

    rows: Tensor
    start: Tensor
    items: Tensor
    width: int

    @classmethod
    def empty(cls, count: int, width: int) -> Sets:
        """The empty sets, so many."""
        return cls(_zeros(count), _zeros(2), _zeros(0), width)

    @classmethod
    def singletons(cls, first: int, count: int, width: int) -> Sets:
        """The sets {first}, {first + 1}, ..."""
        items = torch.arange(first, first + count, device="cpu")
        start = torch.cat([_zeros(1), torch.arange(count + 1, device="cpu")])
        return cls(torch.arange(1, count + 1, device="cpu"), start, items, width)

    def __len__(self) -> int:
        return len(self.rows)

    def is_empty(self) -> bool:
        """Whether every set is."""
        return not len(self.items) or not bool(self.rows.any())

    def take(self, elements: Tensor) -> Sets:
        """The sets of some elements, in that order; of element -1 the empty one."""
        rows = self.rows[elements.clamp(min=0)] if len(self) else _zeros(len(elements))
        return Sets(torch.where(elements < 0, 0, rows), self.start, self.items, self.width)

    def put(self, elements: Tensor, sets: Sets) -> Sets:
        """The sets, with those of some elements replaced."""
        whole = Sets.joined([self, sets])
        rows = whole.rows[: len(self)].clone()
        rows[elements] = whole.rows[len(self) :]
        return Sets(rows, whole.start, whole.items, self.width)._compact()

    @staticmethod
    def joined(parts: Sequence[Sets]) -> Sets:
        """The elements of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        rows, starts = [], [_zeros(1)]
        ends = above = 0
        for part in parts:
            rows.append(torch.where(part.rows > 0, part.rows + above, 0))
            # the empty row of each goes along, unused but for the first
            starts.append(part.start[1:] + ends)
            above += len(part.start) - 1
            ends += len(part.items)
        items = torch.cat([part.items for part in parts])
        return Sets(torch.cat(rows), torch.cat(starts), items, parts[0].width)

    def __or__(self, other: Sets) -> Sets:
        """The union, element by element."""
        if other.is_empty() or (self.items is other.items and torch.equal(self.rows, other.rows)):
            return self
        if self.is_empty():
            return other
        count = len(self)
        # few sets: form the union of each pair once
        if max(len(self.start), len(other.start)) < count // 2:
            pairs, of_pair = torch.unique(
                self.rows * len(other.start) + other.rows, return_inverse=True
            )
            left, right = pairs // len(other.start), pairs % len(other.start)
            united = Sets.joined([replace(self, rows=left), replace(other, rows=right)])
            return united.grouped(
                torch.arange(len(pairs), device="cpu").repeat(2), len(pairs)
            ).take(of_pair)
        return Sets.joined([self, other]).grouped(
            torch.arange(count, device="cpu").repeat(2), count
        )

    def grouped(self, groups: Tensor, count: int) -> Sets:
        """The union of the sets in each group."""
        rows = self.rows
        held = rows > 0
        if not bool(held.all()):
            rows, groups = rows[held], groups[held]
        if len(self.start) < len(rows):  # sets are shared: take each once in each group
            keys = sorted_unique(groups * len(self.start) + rows)
            groups = torch.div(keys, len(self.start), rounding_mode="floor")
            rows = keys - groups * len(self.start)
        lengths = (self.start[1:] - self.start[:-1])[rows]
        keys = torch.repeat_interleave(
            groups * self.width, lengths, output_size=_total(lengths)
        ) + self._members(rows, lengths)
        keys = sorted_unique(keys)
        groups = torch.div(keys, self.width, rounding_mode="floor")
        start = torch.cat([_zeros(1), torch.bincount(groups, minlength=count).cumsum(0)])
        items = keys - groups * self.width
        return Sets(
            torch.arange(1, count + 1, device="cpu"),
            torch.cat([_zeros(1), start]),
            items,
            self.width,
        )

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Element and member of all, ordered by both."""
        lengths = (self.start[1:] - self.start[:-1])[self.rows]
        elements = torch.repeat_interleave(
            torch.arange(len(self), device="cpu"), lengths, output_size=_total(lengths)
        )
        return elements, self._members(self.rows, lengths)

    # --- within the table

    def _members(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """The members of some rows, one row after the other."""
        if (
            len(rows)
            and len(rows) == len(self.start) - 2
            and int(rows[0]) == 1
            and bool((rows[1:] > rows[:-1]).all())
        ):
            return self.items  # the whole table, in order
        shift = self.start[rows] - (lengths.cumsum(0) - lengths)
        total = _total(lengths)
        return self.items[
            torch.arange(total, device="cpu")
            + torch.repeat_interleave(shift, lengths, output_size=total)
        ]

    def _compact(self) -> Sets:
        """The sets without the rows that no element has, where those are many."""
        if len(self.start) <= 2 * len(self) + 16:
            return self
        used, rows = torch.unique(self.rows, return_inverse=True)
        if not len(used) or int(used[0]) != 0:
            used, rows = torch.cat([_zeros(1), used]), rows + 1
        lengths = (self.start[1:] - self.start[:-1])[used]
        return Sets(
            rows,
            torch.cat([_zeros(1), lengths.cumsum(0)]),
            self._members(used, lengths),
            self.width,
        )


def _total(lengths: Tensor) -> int:
    total = int(lengths.sum())
    if total > LIMIT:
        raise TooMany
    return total


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cpu")


# --- the pass, followed ---------------------------------------------------------------------------


OutputSets = Sequence[Sets | None] | None
"""The sets of each output (None: nothing live in it);
None where a rule does not apply after all.
"""

Rule = Callable[["OperatorCall"], OutputSets]


READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""What PyTorch says of operations that give Python a number, or a shape,
that follows from values.
"""

READING = {
    "_pack_padded_sequence": "the lengths of sequences",
    "_linalg_check_errors": "whether a matrix has a factorization (which an `except` may ask)",
    **dict.fromkeys(
        ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"),
        "which entries are zero (.to_sparse())",
    ),
}
"""Operations of which PyTorch does not say so, and what they give away."""


@dataclass(slots=True, eq=False)
class Memory:
    """The sets of the numbers in one storage, in units of `size` bytes."""

    storage: weakref.ref[Any]
    sets: Sets
    size: int


class OperatorCall:
    """One call of a PyTorch operator.

    Attributes:
        function: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        outputs: The tensors that it returned, in order.
        live: The sets of those tensors among the arguments that have any, by identity.
        pairs: Those tensors, with their sets.
    """

    def __init__(
        self,
        tracer: Tracer,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        self.tracer = tracer
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.outputs = list(tensors_in(result))
        self.inputs = list(tensors_in((args, kwargs)))
        self.live = {id(t): tracer.read(t) for t in self.inputs if tracer.is_live(t)}
        self.pairs = [(t, self.live[id(t)]) for t in self.inputs if id(t) in self.live]

    @property
    def name(self) -> str:
        """The operator's name without the overload,
        and without the underscore of a write in place.
        """
        return str(self.function._schema.name).removeprefix("aten::").rstrip("_")

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        for index, declared in enumerate(self.function._schema.arguments):
            if declared.name == name:
                if index < len(self.args):
                    return self.args[index]
                return self.kwargs.get(
                    name, declared.default_value if declared.has_default_value() else default
                )
        return default

    def sets(self, tensor: Tensor) -> Sets | None:
        """The sets of an argument; None where it does not depend on *u*."""
        return self.live.get(id(tensor))

    def everything(self, output: Tensor) -> Sets:
        """The sets of an output each of whose elements depends on all that any argument does."""
        return _united(list(self.live.values()), output)


def _united(parts: Sequence[Sets], output: Tensor) -> Sets:
    """The sets of a tensor, each of which is the union of all."""
    whole = Sets.joined(parts)
    return whole.grouped(_zeros(len(whole)), 1).take(_zeros(_length(output)))


class Constants:
    """Tensors that `f` closes over, such as an index or a mask, and how often each had been written
    into; and its variables.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[Callable[[], Tensor | None], int]] = {}
        self._held: dict[str, tuple[Any, str, Any]] = {}

    def __reduce__(self) -> Any:
        """A plan that was stored knows of none: its function closes over others."""
        return Constants, ()

    def __deepcopy__(self, memo: Any) -> Constants:
        copied = Constants()
        copied._met, copied._held = {**self._met}, self._held
        return copied

    def note(self, tensor: Tensor) -> None:
        """Know a tensor from now on, for as long as it lives."""
        known = self._met.get(id(tensor))
        if (known is None or known[0]() is None) and not tensor.is_inference():
            # a parameter for good, as one with a weak reference could not be swapped
            held = isinstance(tensor, nn.Parameter)
            self._met[id(tensor)] = (
                (lambda: tensor) if held else weakref.ref(tensor),
                tensor._version,
            )

    def changed(self, f: Any) -> bool:
        """Whether one of them has gone or was written into, or a variable holds something else."""
        from hodiff.curvature._staleness import same, variables  # plans alone load curvature

        now = variables(f) if self._held else {}
        return any(
            name not in now or not same(now[name][2], value)
            for name, (_, _, value) in self._held.items()
        ) or any(
            (tensor := met()) is None or tensor._version != version
            for met, version in self._met.values()
        )

    def keep(self, f: Any) -> None:
        """Know them as they are now."""
        from hodiff.curvature._staleness import variables

        self._held = variables(f) if callable(f) else {}
        self._met = {
            key: (met, tensor._version)
            for key, (met, _) in self._met.items()
            if (tensor := met()) is not None
        }


class Tracer(DispatchMode):
    """The mode.

    Enter it before `f` runs, so that it learns what is variable, and `begin` before the pass to
    follow.

    Attributes:
        anywhere: Whether what is found is to hold at other points too.
        width: How many entries *u* has.
        unknown: The operators without a rule, by name; all their outputs depend on all their
            arguments.
        lost: Why nothing can be said about what a number depends on, if so.
        values_read: How Python came to know of values that follow from the point: elsewhere `f` may
            do something else.
        constants: What `f` reads that does not follow from the point.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        find_rule: Callable[[Any], Rule | None],
        variable: Iterable[Tensor],
        *,
        anywhere: bool = True,
    ) -> None:
        super().__init__()
        self.anywhere = anywhere
        self.find_rule = find_rule
        self.width = 0
        self.unknown: dict[str, None] = {}
        self.lost: str | None = None
        self.values_read: dict[str, None] = {}
        self.constants = Constants()
        self._memory: dict[int, Memory] = {}
        self._variable: dict[int, Any] = {}
        self._values_left = False
        for tensor in variable:
            self._mark(tensor)

    def begin(self, cotangents: Sequence[Tensor]) -> None:
        """Let the entries of these tensors be those of *u*, in order."""
        self.width, first = sum(tensor.numel() for tensor in cotangents), 0
        for tensor in cotangents:
            self.write(tensor, Sets.singletons(first, tensor.numel(), self.width))
            first += tensor.numel()

    # --- one operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _versions.schema_of(func) is None:
            return self._couple(func, args, kwargs)
        plain: Any = Tensor
        if strange := [
            cls.__name__
            for cls in types
            if cls.__torch_dispatch__ is not plain.__torch_dispatch__
            and not cls.__module__.startswith("hodiff.")
        ]:
            raise InputError(
                f"the pattern of f(x) cannot be followed: got a {strange[0]}, a tensor whose class "
                f"computes by itself. Give pattern=, or use the dense hodiff.hessian or "
                f"hodiff.jacobian."
            )
        for tensor in tensors_in((args, kwargs)):
            if not self.is_variable(tensor):
                self.constants.note(tensor)
        if not READS.isdisjoint(func.tags) or func.overloadpacket.__name__ in READING:
            self._look_at_what_is_read(func, args)
        if not self._memory or not any(self.memory(t) for t in tensors_in((args, kwargs))):
            result = func(*args, **kwargs)
            self._learn(func, args, kwargs, result)
            return result
        return self._follow(func, args, kwargs)

    def _look_at_what_is_read(self, func: Any, args: Any) -> None:
        """Note an operation that gives Python a number,
        a shape or an error that follows from values.
        """
        if torch.Tag.data_dependent_output in func.tags:
            for tensor in tensors_in(args):
                self.leaves(
                    tensor, "a number (.item(), an `if`, an index that is a tensor of no dimension)"
                )
            return
        counted = list(tensors_in(args))
        if func.overloadpacket is torch.ops.aten.index:
            counted = [
                index for index in tensors_in(args[1]) if index.dtype in (torch.bool, torch.uint8)
            ]
        if not self._values_left and any(self.is_variable(tensor) for tensor in counted):
            self.values_read[
                READING.get(func.overloadpacket.__name__, "how many elements a mask selects")
            ] = None

    def _couple(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A higher-order operator (`torch.cond`, `scan`): what it runs inside is not seen,
        and may couple all.
        """
        result, given = func(*args, **kwargs), list(tensors_in((args, kwargs)))
        if any(self.is_variable(tensor) for tensor in given):
            for tensor in tensors_in(result):
                self._mark(tensor)
        live = [self.read(tensor) for tensor in given if self.is_live(tensor)]
        if live:
            self.unknown[str(func)] = None
            for tensor in tensors_in(result):
                self.write(tensor, _united(live, tensor))
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule = self.find_rule(func)
        if rule is None:
            decomposed = self._decomposed(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        result = func(*args, **kwargs)
        self._learn(func, args, kwargs, result)
        operation = OperatorCall(self, func, args, kwargs, result)
        written = [t for t in operation.outputs if not self._is_view(t, operation)]
        given = written_to(func, args, kwargs)
        written += [t for t in given if all(t is not other for other in written)]
        if not written or not operation.live:
            return result
        of_outputs = rule(operation) if rule is not None else None
        if of_outputs is None:
            self.unknown[operation.name] = None
            for tensor in written:
                self.write(tensor, operation.everything(tensor))
            return result
        for tensor, sets in zip(operation.outputs, of_outputs, strict=True):
            self.write(
                tensor, sets if sets is not None else Sets.empty(_length(tensor), self.width)
            )
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation's result out of others, followed one by one;
        NotImplemented where that is not known.
        """
        if func._schema.is_mutable:
            return NotImplemented
        table = decompositions()
        try:
            with on(self):
                return (
                    table[func](*args, **kwargs)
                    if func in table
                    else func.decompose(*args, **kwargs)
                )
        except Exception as error:
            # a definition that does not know these arguments: there is always the plain answer
            if not is_fault(error):
                raise
            return NotImplemented

    def _is_view(self, tensor: Tensor, operation: OperatorCall) -> bool:
        """Whether an output is the memory of an argument, which the operation did not write to."""
        if operation.function._schema.is_mutable or not _has_memory(tensor):
            return False
        own = tensor.untyped_storage()._cdata
        return any(_has_memory(t) and t.untyped_storage()._cdata == own for t in operation.inputs)

    # --- what is variable

    def _learn(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if any(self.is_variable(t) for t in tensors_in((args, kwargs))):
            for tensor in (*tensors_in(result), *written_to(func, args, kwargs)):
                self._mark(tensor)

    def _mark(self, tensor: Tensor) -> None:
        for storage in _storages(tensor):
            self._variable[storage._cdata] = weakref.ref(storage)

    def is_variable(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor follow from the point,
        or may be others at another time.
        """
        # the forward pass has not been seen; but this point's indices are what they are
        if not self.anywhere:
            return tensor.is_floating_point() or tensor.is_complex()
        if tensor.requires_grad or self._values_left:
            return True
        storages = _storages(tensor)
        return not storages or any(
            (reference := self._variable.get(storage._cdata)) is not None
            and reference() is not None
            for storage in storages
        )

    def leaves(self, tensor: Tensor, how: str) -> None:
        """Values leave PyTorch: what comes back later may follow from them."""
        if not self._values_left and self.is_variable(tensor):
            self._values_left = True
            self.values_read[how] = None
        if self.is_live(tensor):
            self.lost = self.lost or f"the backward of f turns a gradient into {how}"

    # --- sets of memory

    def memory(self, tensor: Tensor) -> Memory | None:
        """The sets of a tensor's storage, if that is live."""
        if not _has_memory(tensor):
            return None
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None or memory.storage() is None:
            return None
        return memory

    def is_live(self, tensor: Tensor) -> bool:
        """Whether some number in the tensor's memory depends on *u*."""
        return self.memory(tensor) is not None

    def read(self, tensor: Tensor) -> Sets:
        """The sets of a tensor's elements, row by row."""
        memory = self.memory(tensor)
        if memory is None:
            return Sets.empty(_length(tensor), self.width)
        size = tensor.element_size()
        if size == memory.size and _is_whole(tensor, len(memory.sets)):
            return memory.sets
        places = _places(tensor)
        if size <= memory.size:
            return memory.sets.take(torch.div(places * size, memory.size, rounding_mode="floor"))
        parts = size // memory.size
        sets = memory.sets.take(places * parts)
        for part in range(1, parts):
            sets = sets | memory.sets.take(places * parts + part)
        return sets

    def write(self, tensor: Tensor, sets: Sets) -> None:
        """Let a tensor's elements have these sets."""
        if not _has_memory(tensor):
            # what is on the meta device holds no numbers
            if not tensor.is_meta and not sets.is_empty():
                self.lost = self.lost or f"it passes a {tensor.layout} tensor"
            return
        storage, size = (
            tensor.untyped_storage(),
            tensor.element_size() // (2 if tensor.is_complex() else 1),
        )
        memory = self.memory(tensor)
        if memory is None:
            if sets.is_empty():
                return
            memory = self._memory[storage._cdata] = Memory(
                weakref.ref(storage), Sets.empty(storage.nbytes() // size, self.width), size
            )
            self._sweep()
        if memory.size == size == tensor.element_size() and _is_whole(
            tensor, storage.nbytes() // size
        ):
            memory.sets = sets
            return
        places = torch.div(
            _places(tensor) * tensor.element_size(), memory.size, rounding_mode="floor"
        )
        # a unit of memory is more than what is written: it keeps what it has
        if memory.size > tensor.element_size():
            memory.sets = memory.sets | sets.grouped(places, len(memory.sets))
            return
        for part in range(max(1, tensor.element_size() // memory.size)):
            memory.sets = memory.sets.put(places + part, sets)

    def _sweep(self) -> None:
        """Forget what memory was freed, now and then."""
        if len(self._memory) % 32 == 0:
            self._memory = {
                key: memory for key, memory in self._memory.items() if memory.storage() is not None
            }
            self._variable = {key: ref for key, ref in self._variable.items() if ref() is not None}


def exits(tracer: Tracer) -> Scope[None]:
    """A context that notices values that leave PyTorch by a way that is not an operation.

    By replacing methods of `Tensor`: a `TorchFunctionMode` is not asked inside of a backward pass,
    where it matters.
    """

    def close() -> None:
        if tracer in _open.tracers:
            _open.tracers.remove(tracer)

    def enter(undo: Undo) -> None:
        undo += [close]
        _open.tracers += [tracer]
        _watched.enter(undo)

    return Scope(enter)


class _Open(threading.local):
    def __init__(self) -> None:
        self.tracers: list[Tracer] = []


_open = _Open()

WAYS: tuple[tuple[Any, str, bool], ...] = (
    *(
        (Tensor, name, True)
        for name in (
            "numpy",
            "__array__",
            "tolist",
            "__dlpack__",
            "data_ptr",
            "__repr__",
            "__reduce_ex__",
        )
    ),
    (Tensor, "tensor_split", False),  # reads the places where it splits below the operators
    (torch, "tensor_split", False),
)
"""Whose function, its name, and whether it reads the tensor that comes first, or those after it."""


def _watch(undo: Undo) -> None:
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in WAYS]

    def restore() -> None:
        for owner, name, function in before:
            if function is not None:
                setattr(owner, name, function)
            elif name in vars(owner):
                delattr(owner, name)

    undo += [restore]
    for owner, name, reads_first in WAYS:
        setattr(owner, name, _reporting(name, getattr(owner, name), reads_first))


def _reporting(name: str, function: Callable[..., Any], reads_first: bool) -> Callable[..., Any]:
    @wraps(function)
    def reported(*args: Any, **kwargs: Any) -> Any:
        for tracer in _open.tracers:
            for tensor in tensors_in(args[:1] if reads_first else (args[1:], kwargs)):
                tracer.leaves(tensor, f"something else ({name})")
        return function(*args, **kwargs)

    return reported


_watched = Counted(_watch)


@cache
def decompositions() -> dict[Any, Any]:
    """PyTorch's own definitions of operators in terms of others."""
    from torch.export import default_decompositions

    return default_decompositions().materialize()


def tensors_in(value: Any, inside: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors in arguments or results, in order;
    a container that holds itself is looked into once.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)) and id(value) not in inside:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, (*inside, id(value)))


def written_to(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operator writes to."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _storages(tensor: Tensor) -> list[Any]:
    if _has_memory(tensor):
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values().untyped_storage()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.values().untyped_storage()]
    return []


def _length(tensor: Tensor) -> int:
    return tensor.numel() if _has_memory(tensor) else 1


def _is_whole(tensor: Tensor, units: int) -> bool:
    return tensor.numel() == units and tensor.is_contiguous() and not tensor.storage_offset()


def _places(tensor: Tensor) -> Tensor:
    """The place in memory of each element of a tensor, counted in elements."""
    offset = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return torch.arange(offset, offset + tensor.numel(), device="cpu")
    places = torch.full(tensor.shape, offset, device="cpu")
    for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places += (torch.arange(length, device="cpu") * step).reshape(
            -1, *[1] * (tensor.ndim - dim - 1)
        )
    return places.reshape(-1)
