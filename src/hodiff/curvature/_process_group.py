"""Several processes, each with its share of the data: sums over all, by one collective for each
product.

What a rank adds travels in one flat buffer, behind a *line* of each rank: did it fail, and a
checksum of what it says of itself, which step it is at and what it multiplies. A rank fills its own
line and leaves zeros in those of the others, so that the sum of all buffers holds every line,
exactly. Where lines differ, all ranks see it, and send each other what they say in full. What is
decided then, each rank decides by the same, and so all of them raise, or none.

A collective whose ranks disagree about its size ends a process of gloo without an exception. So
each step opens with a buffer of one size, that of one vector like the point; what several vectors
take beyond it follows in a second one, once the lines have shown that all ranks mean the same. A
rank that fails before takes part in that opening, too.
"""

from __future__ import annotations

import functools
import math
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _locks
from hodiff._core._faults import interrupts
from hodiff._core._tree import Leaves
from hodiff._core._vectors import sum_dtype
from hodiff._core._where import Where
from hodiff.errors import GraphError, InputError

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import ProcessGroup
else:
    ProcessGroup = Any  # a build of PyTorch without it


class ProcessGroupSum:
    """The processes among which the data of an operator are shared.

    Attributes:
        rank: The number of this one.
        world: How many there are.
        said_by: How messages about them begin.
    """

    said_by = "process_group"

    def __init__(self, group: ProcessGroup, where: Where, owner: str, chunk_size: object) -> None:
        self._group = group
        self.rank, self.world = (
            torch.distributed.get_rank(group),
            torch.distributed.get_world_size(group),
        )
        self._owner, self._chunk_size = owner, chunk_size
        self._number = self._numbered()
        pairs = zip(where.names, where.tensors, strict=True)
        self._structure = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in pairs]
        self._size = sum(tensor.numel() for tensor in where.tensors)
        self._device = where.tensors[0].device
        dtypes = [sum_dtype(tensor.dtype) for tensor in where.tensors]
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._head = self.world * LENGTH
        self._buffer: Tensor | None = None
        self._greeted = self._inside = False
        self.digest = Digest(self._device)

    def _numbered(self) -> int:
        """The number of this operator, among those of the group."""
        with _locks.lock:
            _made[self._group] = _made.get(self._group, 0) + 1
            return _made[self._group]

    # --- steps

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """A context whose errors on one rank are raised by all: that one its own,
        by the others one that names it.
        """
        self._in_one_thread()
        if self._inside:
            yield
            return
        self._inside = True
        try:
            yield
        except Exception as error:
            if not getattr(error, _TOLD, False):
                self._tell(error)
            raise
        finally:
            self._inside = False

    def sum(
        self,
        step: Step,
        parts: Sequence[Tensor],
        *,
        who: Sequence[str] = (),
        count: int | None = None,
        digest: int = 0,
        fact: Any = None,
    ) -> tuple[Leaves, list[Any]]:
        """The sums over all ranks, in the precision of sums, to be copied at once;
        and each rank's fact.
        """
        self._greet()
        size = sum(part.numel() for part in parts)
        buffer = self._room(self._head + max(size, self._size))
        places, at = [], self._head
        for part in parts:
            places += [buffer[at : at + part.numel()].view(part.shape).copy_(part)]
            at += part.numel()
        buffer[at:].zero_()
        opening = self._head + self._size
        status = RankStatus(step, (self._owner, self._number, *who), count or 1, digest, fact)
        said = self._exchange(buffer[:opening], status)
        self._judge(said)
        if at > opening:
            self._reduce(buffer[opening:at])
        return places, [other.fact for other in said]

    def begin(self, step: Step, *who: str, count: int | None = None) -> None:
        """Say, before a pass that waits for others, that this process is at it."""

    def padded(self, batches: Any) -> Any:
        """The batches of this process, and what it takes part in for the others' sake."""
        return batches

    def generator(self, device: torch.device) -> torch.Generator:
        """One that draws the same on every rank,
        from a seed that rank 0 draws from its default generator.
        """
        with self.raise_on_all_ranks():
            seed = int(torch.randint(2**48, (), device=device))
            return torch.Generator(device).manual_seed(
                self.sum("draws a seed", [], fact=seed)[1][0]
            )

    def own(self, generator: torch.Generator | None) -> torch.Generator:
        """One that draws other numbers on each rank; what seeds it is drawn, alike on every rank,
        from a generator.
        """
        device = self._device if generator is None else generator.device
        seeds = torch.randint(2**48, (self.world,), generator=generator, device=device)
        return torch.Generator(device).manual_seed(int(seeds[self.rank]))

    # --- what travels

    def _greet(self) -> None:
        """Raise, once, where the ranks' points differ, for then the sizes of the buffers would."""
        if self._greeted:
            return
        mine = (self._owner, self._number, self._structure, self._chunk_size)
        owners, numbers, structures, chunks = map(list, zip(*self._all_of(mine), strict=True))
        if _differ(owners):
            raise _told(
                InputError(
                    f"{self.said_by}: the ranks use operators of different kinds at the same time; "
                    f"rank {self.rank} uses a {self._owner}."
                )
            )
        if _differ(numbers):
            raise _told(
                InputError(
                    f"{self.said_by}: the ranks use different operators at the same time: numbers "
                    f"{numbers}, counted in the order in which each rank made those of this group. "
                    f"Make the same operators on every rank and use them in the same order (make "
                    f"one for a single rank without process_group=)."
                )
            )
        if _differ(structures):
            sizes = [sum(math.prod(shape) for _, shape, _ in structure) for structure in structures]
            names = ", ".join(
                f"{name} {shape} {dtype.removeprefix('torch.')}"
                for name, shape, dtype in self._structure[:4]
            ) + (", ..." if len(self._structure) > 4 else "")
            raise _told(
                InputError(
                    f"{self.said_by}: the points of the ranks differ in names, shapes or dtypes "
                    f"(sizes {sizes}); rank {self.rank} has {names}. "
                    "Build the same model on every rank."
                )
            )
        if _differ(chunks):
            raise _told(
                InputError(
                    f"chunk_size differs between the ranks: {chunks}; give the same on all of them."
                )
            )
        self._greeted = True

    def _exchange(self, buffer: Tensor, status: RankStatus) -> list[RankStatus]:
        """The first collective of a step; what each rank says in full,
        where they differ or have a fact.
        """
        lines = buffer[: self._head].zero_().view(self.world, LENGTH)
        lines[self.rank] = torch.tensor(status.line(), dtype=buffer.dtype, device="cpu")
        self._reduce(buffer)
        said = lines.tolist()
        return (
            self._all_of(status) if said[0][0] or _differ(said) or status.fact is not None else []
        )

    def _all_of(self, mine: Any) -> list[Any]:
        """The values given by each rank."""
        given: list[Any] = [None] * self.world
        with self._exchanging(), torch.accelerator.device_index(self._device.index):
            torch.distributed.all_gather_object(given, mine, group=self._group)
        return given

    def _in_one_thread(self) -> None:
        """Raise in another thread than the group's first, while that one lives:
        ranks would take turns otherwise.
        """
        me = threading.get_ident()
        with _locks.lock:
            first = _threads.setdefault(self._group, me)
            if first != me and first in {thread.ident for thread in threading.enumerate()}:
                raise _told(
                    GraphError(
                        f"{self.said_by}: this {self._owner} is used in several threads, whose "
                        f"order may differ between ranks, so sums would mix different products. "
                        f"Use all operators of a group of {self.world} processes in one thread, or "
                        f"give each thread a group of its own: torch.distributed.new_group(), "
                        f"called in the same order on every rank."
                    )
                )
            _threads[self._group] = me

    def _reduce(self, buffer: Tensor) -> None:
        with self._exchanging():
            torch.distributed.all_reduce(buffer, group=self._group)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        self._in_one_thread()
        try:
            yield
        except RuntimeError as error:
            if interrupts(error):
                raise
            raise _told(
                GraphError(
                    f"{self.said_by}: rank {self.rank} could not exchange sums with the others: "
                    f"one of them has ended, or computed no such product within the group's "
                    f"timeout. Every rank must make the same calls of this operator in the same "
                    f"order (products, H.value and H.gradient at first use, estimators). The group "
                    f"can no longer be used. ({str(error).splitlines()[0]})"
                )
            ) from error

    def _room(self, size: int) -> Tensor:
        """The buffer: one for all products with a vector, kept;
        a larger one only while it is used.
        """
        least = self._head + self._size
        if self._buffer is None:
            self._buffer = torch.zeros(least, dtype=self._dtype, device=self._device)
        return (
            self._buffer
            if size == least
            else torch.zeros(size, dtype=self._dtype, device=self._device)
        )

    # --- failures

    def _tell(self, error: Exception) -> None:
        """Take part in the step that the others are at, or come to next,
        and say that this one has failed.
        """
        _told(error)
        try:
            self._greet()
            buffer = self._room(self._head + self._size).zero_()
            self._exchange(
                buffer, RankStatus("fails", (), 1, 0, f"{type(error).__name__}: {error}")
            )
        except (GraphError, InputError) as other:
            error.add_note(f"(The other ranks could not be told: {other})")

    def _judge(self, said: list[RankStatus]) -> None:
        """Raise, on every rank, where one has failed or the ranks do not mean the same."""
        failed = [rank for rank, status in enumerate(said) if status.step == "fails"]
        if failed:
            raise _told(
                GraphError(
                    f"{self.said_by}: {_ranks(failed)} failed, so there is no sum over all ranks. "
                    f"{said[failed[0]].fact}"
                )
            )
        if _differ([(status.step, status.who) for status in said]):
            steps = ", ".join(f"rank {rank} {status.step}" for rank, status in enumerate(said[:8]))
            raise _told(
                InputError(
                    f"{self.said_by}: the ranks are at different steps, operators or blocks "
                    f"({steps}). Call the same methods of the same operators in the same order on "
                    f"every rank, including H.refresh(), with the same generator=."
                )
            )
        counts = [status.number for status in said]
        if _differ(counts):
            raise _told(
                InputError(f"v: the ranks multiply different numbers of vectors: {counts}.")
            )
        odd = [rank for rank, status in enumerate(said) if status.digest != said[0].digest]
        if odd:
            raise _told(InputError(_different(said[0].step, odd)))


def is_wrapped(where: Where) -> bool:
    """Whether a module of the point is, or has in it, a DistributedDataParallel."""
    modules = (module for each in where.module_slices for module in each.module.modules())
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)


def shared(
    process_group: Any, where: Where, data: Any, owner: str, chunk_size: object
) -> ProcessGroupSum | None:
    """The processes of `process_group=`, checked; None where there is no group,
    or no other process in it.
    """
    if where.layout is not None:
        return where.layout.shared(process_group, where, owner, chunk_size)
    if process_group is None:
        return None
    distributed = torch.distributed
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise InputError(
            f"process_group: got {_arguments.kind(process_group)}, expected a group that this "
            f"process belongs to, after torch.distributed.init_process_group(): "
            f"torch.distributed.group.WORLD, or torch.distributed.new_group()."
        )
    if data is None:
        raise InputError(
            "process_group: there are no data to share among processes; give each rank its own "
            "batches: data=[...], which may be empty."
        )
    if is_wrapped(where):
        raise InputError(
            f"{where.name} is wrapped in DistributedDataParallel, whose forward communicates by "
            f"itself, so ranks with different numbers of batches would wait for each other; pass "
            f"model.module."
        )
    if distributed.get_world_size(process_group) == 1:
        return None
    return ProcessGroupSum(process_group, where, owner, chunk_size)


_threads: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The thread in which the operators of each group are used."""

_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many operators each group has had: two of one shape, in another order on some rank,
would be added up.
"""

_TOLD = "_hodiff_told"
"""An attribute of errors that the other ranks know of, or have too."""


def _told(error: Any) -> Any:
    setattr(error, _TOLD, True)
    return error


def _differ(values: Sequence[object]) -> bool:
    return any(value != values[0] for value in values)


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers}"


def _different(step: Step, odd: list[int]) -> str:
    ranks = _ranks(odd)
    if step == "evaluates":
        return (
            f"process_group: the parameters of {ranks} differ from those of rank 0, so there is no "
            f"common point. Broadcast them: torch.distributed.broadcast(p, 0) for each parameter "
            f"and buffer."
        )
    return (
        f"process_group: {ranks} {'multiplies' if len(odd) == 1 else 'multiply'} a different "
        f"vector from rank 0, so the sum would be meaningless. Draw it from generators with the "
        f"same seed, or broadcast it; estimators draw the same vectors on all ranks, unless "
        f"generator= differs. (Other numbers of threads round differently: torch.set_num_threads.)"
    )


# --- what each process says of itself -------------------------------------------------------------


Step = Literal["evaluates", "multiplies", "draws a seed", "sums", "takes a diagonal", "fails"]
LENGTH = 5


class RankStatus(NamedTuple):
    """The report of each rank on itself at each step.

    Attributes:
        step: The step.
        who: The operator, by the order in which they were made, and the leaves that it is a block
            of.
        number: Of how many vectors.
        digest: A checksum of these vectors, or of the parameters.
        fact: What is this rank's own, or why it fails.
    """

    step: Step
    who: tuple[object, ...]
    number: int
    digest: int
    fact: Any = None

    def line(self) -> list[int]:
        """Whether it fails, and a checksum of the rest,
        as integers that any dtype of sums holds exactly.
        """
        said = zlib.crc32(repr(self[:-1]).encode())
        return [self.step == "fails", *said.to_bytes(LENGTH - 1, "little")]


# --- do all processes have the same? A checksum, exact and quick, that also sees entries exchanged


class Digest:
    """A sum of the vectors' bits, each word times a random integer of its place, modulo 2^32.

    Integers wrap around, so that it is the same in any order of summation: with any number of
    threads, on any device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factors = torch.empty(0, dtype=torch.int32, device=device)

    def __call__(self, parts: Sequence[Tensor], count: int | None = None) -> int:
        """A digest of the parts of one vector, or of so many stacked ones."""
        rows = 1 if count is None else count
        total, at = torch.zeros(rows, dtype=torch.int32, device=self._device), 0
        words = [_words(part.detach(), rows) for part in parts]
        size = sum(word.shape[1] for word in words)
        factors = self._up_to(max(rows, size))
        if rows * size <= _SMALL:  # of small leaves the calls take longer than the arithmetic
            words = [torch.cat(words, 1)]
        for word in words:
            # The low bits of round numbers are all zero: fold the high ones onto them.
            mixed = (word >> 15).bitwise_xor_(word).mul_(factors[at : at + word.shape[1]])
            total += mixed.sum(1, dtype=torch.int32)
            at += word.shape[1]
        return int((total * factors[:rows]).sum(dtype=torch.int32))

    def _up_to(self, size: int) -> Tensor:
        """Odd random factors; the first ones stay the same."""
        if size > len(self._factors):
            drawn = torch.randint(
                -(2**30), 2**30, (size,), generator=torch.Generator().manual_seed(0), device="cpu"
            )
            self._factors = (2 * drawn + 1).to(self._device, torch.int32)
        return self._factors


_SMALL = 2**20


def _words(part: Tensor, rows: int) -> Tensor:
    """The bits as rows of integers of 32 bits."""
    line, size = part.reshape(-1), part.element_size()
    # `.contiguous()` keeps the stride of a single entry, which bars a view of another dtype
    if line.stride(0) != 1:
        line = line.clone(memory_format=torch.contiguous_format)
    if size >= 4:
        return line.view(torch.int32).view(rows, -1)
    return line.view(torch.int16 if size == 2 else torch.int8).to(torch.int32).view(rows, -1)
