"""Shards made whole by one collective, and whole tensors reduced to shards: each the other's
derivative.

The processes share the data, and a function's value is the mean of theirs. So the inner product of
what each has whole is a mean over them too; the adjoint of gathering is then to add up, to divide,
and to cut, and the adjoint of that is to gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hodiff.memory._chunked import Chunked
from hodiff.sharded._ranks import exchanging


class ShardCut(NamedTuple):
    """The way in which one tensor is cut into shards.

    Attributes:
        shape: The shape of the whole.
        dim: The dimension along which it is cut.
        rows: How much of that the first shards have; the last ones may have less, or nothing.
    """

    shape: torch.Size
    dim: int
    rows: int

    def padded(self, x: Tensor, length: int) -> Tensor:
        """A tensor with zeros up to some length along the dimension."""
        missing = length - x.shape[self.dim]
        return F.pad(x, [0, 0] * (x.ndim - 1 - self.dim) + [0, missing]) if missing else x


class Move(NamedTuple):
    """The move of several tensors, in one collective: of shards to the whole, or back.

    Attributes:
        mesh: The mesh of the processes that share the data, cut along its last dimension.
        cuts: How each tensor is cut.
        gathers: Whether shards are made whole.
    """

    mesh: Any
    cuts: Sequence[ShardCut]
    gathers: bool

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in their other form, in one collective."""
        world = self.mesh.size(self.mesh.ndim - 1)
        with exchanging():
            return self._gathered(tensors, world) if self.gathers else self._reduced(tensors, world)

    def _gathered(self, shards: Sequence[Tensor], world: int) -> list[Tensor]:
        pairs = [*zip(shards, self.cuts, strict=True)]
        padded = [cut.padded(shard, cut.rows) for shard, cut in pairs]
        line = torch.cat([shard.reshape(-1) for shard in padded])
        lines = line.new_empty(world, len(line))
        dist.all_gather_single(lines.view(-1), line, group=self._group(-1))
        del line
        pieces = lines.split([shard.numel() for shard in padded], 1)
        return [
            piece.view(world, *shard.shape)
            .movedim(0, cut.dim)
            .flatten(cut.dim, cut.dim + 1)
            .narrow(cut.dim, 0, cut.shape[cut.dim])
            .contiguous()
            for piece, shard, cut in zip(pieces, padded, self.cuts, strict=True)
        ]

    def _reduced(self, whole: Sequence[Tensor], world: int) -> list[Tensor]:
        """The mean over all processes, of each this one's shard."""
        parts = []
        for x, cut in zip(whole, self.cuts, strict=True):
            pieces = cut.padded(x, world * cut.rows).unflatten(cut.dim, (world, cut.rows))
            parts += [pieces.movedim(cut.dim, 0)]
        lines = torch.cat([part.reshape(world, -1) for part in parts], 1)
        line = lines.new_empty(lines.shape[1])
        dist.reduce_scatter_single(line, lines.view(-1), group=self._group(-1))
        for dim in range(self.mesh.ndim - 1):
            dist.all_reduce(line, group=self._group(dim))
        line.div_(self.mesh.size())
        rank, results = self.mesh.get_local_rank(self.mesh.ndim - 1), []
        pieces = line.split([part[0].numel() for part in parts])
        for piece, part, cut in zip(pieces, parts, self.cuts, strict=True):
            left = max(0, min(cut.rows, cut.shape[cut.dim] - rank * cut.rows))
            results += [piece.view(part.shape[1:]).narrow(cut.dim, 0, left).clone()]
        return results

    def _group(self, dim: int) -> Any:
        return self.mesh.get_group(dim % self.mesh.ndim)


@final
class Moved(Chunked):
    """Tensors, moved: linear in them, so that nothing is kept."""

    @staticmethod
    def forward(*given: Any) -> Any:
        """The tensors in the other form."""
        *tensors, move = given
        return tuple(move(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the move; a cotangent that is absent on this process may be there on others."""
        ctx.form = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The adjoint, of which the same may be asked."""
        back = ctx.form._replace(gathers=not ctx.form.gathers)
        return (*Moved.apply(*cotangents, back), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangents of the results: the same move."""
        return Moved.apply(*tangents[:-1], ctx.form)


@final
class Averaged(Chunked):
    """A tensor that each process has whole: itself, and a mean over the processes in each pass."""

    @staticmethod
    def forward(*given: Any) -> Any:
        """The tensor, or its mean over the processes."""
        x, mesh, again = given[0], *given[-1]
        if not again:
            return x.view_as(x)
        x = x.clone()
        with exchanging():
            for dim in range(mesh.ndim):
                dist.all_reduce(x, group=mesh.get_group(dim))
        return x.div_(mesh.size())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the mesh, and which of the two it is."""
        ctx.form = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The adjoint: of the identity the mean, of the mean the identity."""
        mesh, again = ctx.form
        return Averaged.apply(cotangents[0], (mesh, not again)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent of the result, made in the same way."""
        return Averaged.apply(tangents[0], ctx.form)
