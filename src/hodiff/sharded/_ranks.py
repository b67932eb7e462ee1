"""The protocol of processes that share a model under `fully_shard`: each says how it stands, before
anybody waits in a gather.

A gather waits for all processes, and cannot be told of an error. So a status of each precedes each
pass (see `curvature._process_group`): who has failed, what step it is at, whether it has a batch.
Past that, a process that fails or dies is an error of the others within the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff._core._faults import interrupts
from hodiff._core._tree import Leaves
from hodiff._core._vectors import sum_dtype
from hodiff._core._where import Where
from hodiff.curvature._process_group import ProcessGroupSum
from hodiff.errors import GraphError

_NOTHING = object()


class ShardRanks(ProcessGroupSum):
    """The processes that share a model, of which gathers add up everything; this adds the status.

    Attributes:
        muted: Whether this process takes part in a pass for the others' sake, with weight zero.
        waits: Whether others may wait in a gather, where they cannot be told of an error.
    """

    said_by = "sharded model"

    def __init__(self, mesh: Any, where: Where, owner: str, chunk_size: object) -> None:
        super().__init__(_group_of(mesh), where, owner, chunk_size)
        self._size, self._factor = NUMBERS * mesh.size(), mesh.size()
        self._dtype = torch.float64
        self.muted = self.waits = False
        self._greeted = True  # each status says what greetings would
        self._said = ""
        if owner != PLAIN:
            given = zip(where.names, where.layout.given, strict=True)
            self._said = repr((chunk_size, [(name, x.shape, x.dtype) for name, x in given]))

    def _numbered(self) -> int:
        """The number among operators; of calls a process that fails makes fewer."""
        return 0 if self._owner == PLAIN else super()._numbered()

    def digest(self, parts: Any, count: int | None = None) -> int:
        """Nothing that could be compared: each process has other parts."""
        return 0

    def sum(
        self, step: Any, parts: Any, *, who: Sequence[str] = (), count: int | None = None,
        digest: int = 0, fact: Any = None,
    ) -> tuple[Leaves, list[Any]]:  # fmt: skip
        """The sums over all processes, of which the parts are the means; each one's fact."""
        _, facts = super().sum(step, [], who=[*who, self._said], count=count, fact=fact)
        self.waits = False
        return [part.to(sum_dtype(part.dtype)) * self._factor for part in parts], facts

    def gathered(self, values: Tensor) -> Tensor:
        """The values of each process, in the order of their numbers: in double precision, on the
        CPU.

        All others add zeros to it, so that it is exact, whatever the order of the sums.
        """
        rows = torch.zeros((self.world, values.numel()), dtype=self._dtype, device=self._device)
        rows[self.rank] = values.reshape(-1)
        (made,), _ = super().sum("sums", [rows], who=[self._said, str(values.shape)])
        return made.clone().cpu().reshape(self.world, *values.shape)

    def numbers(self, ranks: Tensor) -> Tensor:
        """The numbers in this group of processes that have these in the world."""
        return ranks.cpu().clone().apply_(dist.get_process_group_ranks(self._group).index)

    def begin(self, step: Any, *who: str, count: int | None = None) -> None:
        """Let the others know that this process is about to gather."""
        self.sum(step, [], who=who, count=count)
        self.waits = True

    def padded(self, batches: Any) -> Any:
        """The batches, as many as the process has that has most."""
        return PaddedBatches(batches, self)

    def given_by(self, rank: int, batch: Any) -> Any:
        """A batch of the process of this number; this one's own, if it has one."""
        box = [None if batch is _NOTHING else batch]
        source = dist.get_global_rank(self._group, rank)
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0] if batch is _NOTHING else batch

    def _tell(self, error: Exception) -> None:
        if not self.waits:
            super()._tell(error)
            return
        error.add_note(
            "(The other processes wait in a gather of the sharded model, and will raise when their "
            "group's timeout ends.)"
        )


NUMBERS = 8
"""Of so many numbers of each process the sum travels with the status."""

GROUP = "_group_of_hodiff"
"""The attribute of a mesh of several dimensions that is a part of the world: all its processes."""


def _group_of(mesh: Any) -> Any:
    """The group of all processes of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if GROUP not in vars(mesh):
        ranks = sorted(mesh.mesh.flatten().tolist())
        setattr(mesh, GROUP, dist.new_group(ranks, use_local_synchronization=True))
    return getattr(mesh, GROUP)


PLAIN = "call of a sharded model"
"""Whose ranks these are, where they are no operator's."""


@contextmanager
def exchanging() -> Iterator[None]:
    """A context whose collective has failed where another process has."""
    try:
        yield
    except RuntimeError as error:
        if interrupts(error):
            raise
        raise GraphError(
            f"fully_shard: this process could not exchange shards with the others: one of them has "
            f"ended, has failed, or makes other calls. The group can no longer be used. "
            f"({str(error).splitlines()[0]})"
        ) from error


class PaddedBatches:
    """The batches of this process; after the last one, those of a process that has more, as long
    as any has: they take part with weight zero, as `muted` says.
    """

    def __init__(self, batches: Any, ranks: ShardRanks) -> None:
        self._batches, self._ranks = batches, ranks
        self.count = 1 if not batches.given else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        ranks, own = self._ranks, iter(self._batches)
        batch, number = _NOTHING, 0
        try:
            while True:
                ranks.waits = False  # the pass over the batch before is over, here and there
                with ranks.raise_on_all_ranks():
                    mine = next(own, _NOTHING)
                    batch = batch if mine is _NOTHING else mine
                    facts = (mine is not _NOTHING, batch is not _NOTHING)
                    _, said = ranks.sum("evaluates", [], fact=facts)
                has = [has for has, _ in said]
                if not any(has):
                    break
                if not all(some for _, some in said):
                    batch = ranks.given_by(has.index(True), batch)
                ranks.muted = self._batches.muted = mine is _NOTHING
                number += 1
                yield batch
        finally:
            ranks.muted = self._batches.muted = False
        self.count = number
