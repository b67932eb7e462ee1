"""Where the entries of a sharded point are: each process's parts stand for its tensors inside.

Everything below works on plain tensors, the parts that this process holds. What `f` is given, and
what the caller gets, are DTensors again, placed as the point's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hodiff._core import _arguments, _needed, _tree
from hodiff._core._tree import mark_as_parameter
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.sharded import _groups
from hodiff.sharded._groups import Groups


class Placement(NamedTuple):
    """The place of a tensor's entries: on which mesh, how cut, and of what they are parts."""

    mesh: Any
    placements: Sequence[Any]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: Tensor) -> DTensor:
        """The DTensor of which this is a part; of several stacked, with one dimension more."""
        more = part.ndim - len(self.shape)
        lead, size = part.shape[:more], self.shape.numel()
        return DTensor.from_local(
            part,
            self.mesh,
            self._behind(more),
            run_check=False,
            shape=torch.Size((*lead, *self.shape)),
            stride=(*[size] * more, *self.stride),
        )

    def part(self, value: Any, name: str) -> Tensor:
        """This process's part of a DTensor that is placed so, or of several, stacked in front."""
        if not isinstance(value, DTensor):
            raise InputError(
                f"{name}: got {_arguments.kind(value)}, expected a DTensor placed as the tensor "
                f"that it belongs to: torch.distributed.tensor.distribute_tensor(v, "
                f"p.device_mesh, p.placements), which is given the same v on every process."
            )
        more = value.ndim - len(self.shape)
        if (
            more not in (0, 1)
            or value.shape[more:] != self.shape
            or value.device_mesh != self.mesh
            or [*value.placements] != self._behind(more)
        ):
            raise InputError(
                f"{name} is a DTensor {tuple(value.shape)} placed {[*value.placements]}, expected "
                f"{tuple(self.shape)} (K of them: one more dimension in front) placed "
                f"{[*self.placements]} on the same mesh, as the tensor that it belongs to: "
                f"v.redistribute(p.device_mesh, p.placements)."
            )
        return part_of(value)

    def _behind(self, more: int) -> list[Any]:
        """The placements of a tensor with more dimensions in front."""
        return [
            Shard(each.dim + more) if more and isinstance(each, Shard) else each
            for each in self.placements
        ]


def part_of(value: Any) -> Tensor:
    """This process's part of a DTensor, without a graph."""
    return value.detach().to_local()


class Layout:
    """The places of a point's tensors.

    Attributes:
        given: The tensors as they were given.
        places: Where the entries of each are; None of one that every process has whole.
        groups: What `fully_shard` gathers, if it does: a model's parameters are whole only there.
        ranks: The processes that share such a model; an operator has its own.
    """

    def __init__(self, where: Where, groups: Groups | None) -> None:
        self.given, self.names = [*where.tensors], [*where.names]
        self.groups = groups
        self.places = [
            Placement(x.device_mesh, x.placements, x.shape, x.stride())
            if isinstance(x, DTensor)
            else None
            for x in self.given
        ]
        where.layout = self
        self.ranks = None if groups is None else groups.ranks(where)

    def parts(self) -> list[Tensor]:
        """This process's parts of the tensors, in whose memory they are."""
        return [part_of(x) if isinstance(x, DTensor) else x for x in self.given]

    def only(self, chosen: Sequence[int]) -> Layout:
        """The layout of some of the tensors."""
        some = copy.copy(self)
        for name in ("given", "places", "names"):
            setattr(some, name, [getattr(self, name)[number] for number in chosen])
        return some

    def placed(self, parts: Iterable[Any]) -> list[Any]:
        """Results, or vectors, of which these are this process's parts."""
        pairs = zip(parts, self.places, strict=True)
        return [part if place is None else place.whole(part) for part, place in pairs]

    def dressed(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that `f` is given in place of the point's, made of leaves."""
        made: list[Any] = self.placed(leaves)
        if self.groups is not None:
            return self.groups.dressed(made, leaves, self.given)
        for tensor, theirs in zip(made, self.given, strict=True):
            mark_as_parameter(tensor, theirs)
        return made

    def parsed(self, value: Any, tree: _tree.Tree, name: str) -> tuple[list[Tensor], int | None]:
        """The parts of a vector like the point, or of several stacked; how many they are."""
        with nullcontext() if self.ranks is None else self.ranks.raise_on_all_ranks():
            return self._parsed(value, tree, name)

    def _parsed(self, value: Any, tree: _tree.Tree, name: str) -> tuple[list[Tensor], int | None]:
        if isinstance(value, Tensor) and tree is not _tree.LEAF:
            self.refuse_flat(name)
        different = _tree.difference(tree, _tree.flatten(value, name)[2], name)
        if different:
            raise InputError(f"{different}; it must be like the point, of DTensors placed as its.")
        counts, parts = set[int | None](), list[Tensor]()
        leaves = _tree.leaves_like(tree, value)
        labels = _tree.paths(tree, name)
        for leaf, label, place, theirs in zip(leaves, labels, self.places, self.given, strict=True):
            _check_like(leaf, theirs, label)
            parts += [leaf.detach() if place is None else place.part(leaf, label)]
            counts |= {len(leaf) if leaf.ndim > theirs.ndim else None}
        if len(counts) > 1:
            raise InputError(f"{name}: the leaves hold different numbers of vectors.")
        return parts, counts.pop()

    def refuse_flat(self, name: str = "v") -> NoReturn:
        """Raise for a flat vector, of which no process has all entries."""
        raise InputError(
            f"{name}: the point is sharded over processes, and flat vectors, matrices and "
            f"estimators are not served there. Give a vector like the point: for a module a dict "
            f"of DTensors, placed as its parameters."
        )

    def served(self, what: Any, builds_graph: bool, create_graph: bool, batch_ndim: int) -> Any:
        """The function to evaluate in place of the user's; raise for what is not served."""
        wrong = (
            ("f is a tensor already computed; give the function" if not builds_graph else "")
            or ("create_graph: derivatives of the result are not served" if create_graph else "")
            or ("batch_ndim: parameters are no samples; leave it out" if batch_ndim else "")
        )
        if wrong:
            raise InputError(
                f"{wrong}: the point ({self.names[0]}, ...) is sharded over processes."
            )
        if self.groups is None or self.ranks is None:
            return what
        return self.groups.served(what, self.ranks)

    def shared(self, process_group: Any, where: Where, owner: str, chunk_size: object) -> Any:
        """The processes that share an operator at this point, which are those of the model."""
        if process_group is not None:
            raise InputError(
                "process_group: the point is sharded over processes, and those of fully_shard "
                "share the data too. Leave it out."
            )
        if self.groups is not None:
            self.ranks = self.groups.ranks(where, owner, chunk_size)
        return self.ranks

    def total(self, sums: Sequence[Tensor]) -> Tensor:
        """The sum over all entries, from that over each part; what several have counts once."""
        mesh = next(place.mesh for place in self.places if place is not None)
        terms = []
        for value, place in zip(sums, self.places, strict=True):
            cut = [] if place is None else [each.is_replicate() for each in place.placements]
            sides = zip(mesh.shape, cut or [True] * mesh.ndim, strict=True)
            terms += [value / math.prod(size for size, whole in sides if whole)]
        result = torch.stack(terms).sum(0)
        for dim in range(mesh.ndim):
            dist.all_reduce(result, group=mesh.get_group(dim))
        return result

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the value over the processes that share the data."""
        return value if self.groups is None else self.groups.mean(value)


def _check_like(leaf: Any, theirs: Tensor, label: str) -> None:
    alike = isinstance(leaf, Tensor) and (leaf.dtype, leaf.device) == (theirs.dtype, theirs.device)
    if not alike or leaf.shape not in (theirs.shape, (*leaf.shape[:1], *theirs.shape)):
        has = f" of shape {tuple(leaf.shape)}, {leaf.dtype}" if isinstance(leaf, Tensor) else ""
        raise InputError(
            f"{label}: got {_arguments.kind(leaf)}{has}, expected {tuple(theirs.shape)} (or K of "
            f"them, with one more dimension in front), {theirs.dtype} on {theirs.device}."
        )


def of(where: Where) -> Layout | None:
    """The layout of a point; None where every process has all of it."""
    groups = _groups.of(where)
    if groups is None and not any(isinstance(x, DTensor) for x in where.tensors):
        return None
    if _needed.RELEASE < (2, 13):  # DTensors lose second derivatives, and blocks their graphs
        raise InputError(
            f"{where.name} is sharded over processes, which needs PyTorch 2.13 or newer; this is "
            f"{torch.__version__}. Or gather a plain copy: p.full_tensor() for each parameter p."
        )
    if groups is not None:
        groups.check(where)
    return Layout(where, groups)
