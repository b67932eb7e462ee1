"""Where the entries of a sharded point are: each process's parts stand for its tensors inside.

Everything below works on plain tensors, the parts that this process holds. What `f` is given, and
what the caller gets, are DTensors again, placed as the point's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hodiff._core import _arguments, _needed, _tree
from hodiff._core._tree import mark_as_parameter
from hodiff._core._vectors import generic
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.memory._blocks import Blocks
from hodiff.sharded import _groups
from hodiff.sharded._groups import SHARD, Gathering, Groups, Mean, Moved
from hodiff.sharded._ranks import PLAIN, ShardRanks


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

    def cut(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor: a view."""
        # `fully_shard` cuts what tensor parallelism has left of a dimension
        strided = [hasattr(each, "split_factor") for each in self.placements]
        for at in sorted(range(len(strided)), key=lambda at: -at if strided[at] else -len(strided)):
            each = self.placements[at]
            if not each.is_replicate():
                size = whole.shape[each.dim]
                rows = -(-size // self.mesh.size(at))
                begun = min(size, rows * self.mesh.get_local_rank(at))
                whole = whole.narrow(each.dim, begun, min(rows, size - begun))
        return whole

    def _behind(self, more: int) -> list[Any]:
        """The placements of a tensor with more dimensions in front."""
        return [_behind(each, more) for each in self.placements]


def _behind(placement: Any, more: int) -> Any:
    if not more or placement.is_replicate():
        return placement
    strided = {} if isinstance(placement, Shard) else {"split_factor": placement.split_factor}
    return type(placement)(placement.dim + more, **strided)


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
        mesh: That of all processes that share the entries of vectors.
        sums: These processes.
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
        self.ranks = None if groups is None else ShardRanks(groups.mesh, where, PLAIN, None)
        meshes = [place.mesh for place in self.places if place is not None]
        self.mesh = max(meshes, key=lambda mesh: mesh.size())
        names = self.mesh.mesh_dim_names or ()
        if any(
            each != self.mesh and not {*(each.mesh_dim_names or "?")} <= {*names} for each in meshes
        ):
            raise InputError(f"{where.name}: its tensors are sharded over several meshes; use one.")
        self.sums = ShardRanks(self.mesh, where, PLAIN, None)

    # --- the entries of all processes

    @property
    def counts(self) -> list[bool]:
        """Whether this process counts the entries of each tensor; it is the only one that does."""
        own = self.mesh.get_coordinate()
        return [
            not any(c for at, c in enumerate(own) if at not in self._cut(p)) for p in self.places
        ]

    def _cut(self, place: Placement | None) -> set[int]:
        """The dimensions of the mesh over which a tensor is cut."""
        if place is None:
            return set()
        ats = range(self.mesh.ndim)
        if place.mesh != self.mesh:
            ats = [self.mesh.mesh_dim_names.index(name) for name in place.mesh.mesh_dim_names]
        pairs = zip(ats, place.placements, strict=True)
        return {at for at, each in pairs if not each.is_replicate()}

    def counted(self) -> list[slice]:
        """The entries of a line of this process's parts that it counts."""
        ends = [*accumulate(map(torch.numel, self.parts()), initial=0)]
        if all(self.counts):
            return [slice(None)]
        pieces = zip(self.counts, ends, ends[1:], strict=False)
        return [slice(begin, end) for counts, begin, end in pieces if counts] or [slice(0, 0)]

    def agreed(self, facts: Any) -> Any:
        """The facts of a first pass (see `RankFacts`), by which all take the same passes."""
        own = [facts.complete, facts.free_bytes, facts.largest]
        said = self.sums.gathered(torch.tensor(own, dtype=torch.float64, device="cpu"))
        complete, free, largest = said.T
        return facts._replace(
            complete=bool(complete.all()),
            free_bytes=int(free.min()),
            largest=int(largest.max()),
        )

    def fill(self, line: Tensor, make: Callable[[torch.Size], Tensor]) -> None:
        """Fill a line of this process's parts with those of whole tensors, one after the other."""
        pieces = line.split([*map(torch.numel, self.parts())])
        for piece, x, place in zip(pieces, self.given, self.places, strict=True):
            whole = make(x.shape)
            piece.copy_((whole if place is None else place.cut(whole)).reshape(-1))

    def units(self, start: int, stop: int) -> Tensor:
        """Some of the unit vectors, as rows: of each this process's part."""
        parts, begun = self.parts(), accumulate((x.numel() for x in self.given), initial=0)
        device = parts[0].device
        line = torch.empty(sum(map(torch.numel, parts)), dtype=torch.int64, device=device)
        first = partial(torch.arange, device=device)
        self.fill(line, lambda shape: first(shape.numel()).view(shape) + next(begun))
        return (line == first(start, stop).unsqueeze(1)).to(parts[0].dtype)

    def generator(self, given: torch.Generator | None) -> torch.Generator:
        """One that draws the same everywhere: from a seed that all have drawn, or the first has."""
        device = self.given[0].device if given is None else given.device
        seeds = self.sums.gathered(torch.randint(2**48, (), generator=given, device=device))
        if given is not None and bool((seeds != seeds[0]).any()):
            raise InputError(
                "generator: the processes have given generators in different states; seed them "
                "alike on all of them, or give none."
            )
        return torch.Generator(device).manual_seed(int(seeds[0]))

    # --- its tensors

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
        for number, (leaf, theirs) in enumerate(zip(leaves, self.given, strict=True)):
            if self.groups is not None and made[number] is leaf:
                [made[number]] = Moved.apply(leaf, Mean(self.groups.mesh, False))
            elif self.groups is not None:
                made[number].__dict__[SHARD] = leaf
            mark_as_parameter(made[number], theirs)
        return made

    def parsed(self, value: Any, tree: _tree.Tree, name: str) -> tuple[list[Tensor], int | None]:
        """The parts of a vector like the point, or of several stacked; how many they are."""
        with nullcontext() if self.ranks is None else self.ranks.raise_on_all_ranks():
            if isinstance(value, Tensor) and tree is not _tree.LEAF:
                self.refuse_flat(name)
            different = _tree.difference(tree, _tree.flatten(value, name)[2], name)
            if different:
                raise InputError(
                    f"{different}; it must be like the point, of DTensors placed as its."
                )
            counts, parts = set[int | None](), list[Tensor]()
            leaves, labels = _tree.leaves_like(tree, value), _tree.paths(tree, name)
            each = zip(leaves, labels, self.places, self.given, strict=True)
            for leaf, label, place, theirs in each:
                _check_like(leaf, theirs, label)
                parts += [leaf.detach() if place is None else place.part(leaf, label)]
                counts |= {len(leaf) if leaf.ndim > theirs.ndim else None}
            if len(counts) > 1:
                raise InputError(f"{name}: the leaves hold different numbers of vectors.")
            self._check_copies(parts, name)
            return parts, counts.pop()

    def _check_copies(self, parts: list[Tensor], name: str) -> None:
        """Raise, in all processes, where some have been given other copies of an entry: by more
        than what rounding may do to them.
        """
        cuts, dims = [*map(self._cut, self.places)], range(self.mesh.ndim)
        if all(at in cut for cut in cuts for at in dims):
            return
        sums = torch.stack([_weighed(part) for part in parts])
        own = torch.stack([sums[[at not in cut for cut in cuts]].sum(0) for at in dims])
        said = self.sums.gathered(own)[self.sums.numbers(self.mesh.mesh)]
        eps = max(torch.finfo(part.dtype).eps for part in parts)
        for at in dims:
            total, size = said[..., at, :].unbind(-1)
            if bool((total.amax(at) - total.amin(at) > 16 * eps * size.amax(at)).any()):
                raise InputError(
                    f"{name}: processes that have the same entries were given different ones, in "
                    f"tensors that are not sharded, or have replicas. Draw them from the same seed "
                    f"on every process, or broadcast them."
                )

    def refuse_flat(self, name: str = "v") -> NoReturn:
        """Raise for a flat vector, of which no process has all entries."""
        raise InputError(
            f"{name}: the point is sharded over processes, and flat vectors and matrices are not "
            f"served there. Give a vector like the point: for a module a dict of DTensors, placed "
            f"as its parameters."
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
        if isinstance(what, Blocks):
            raise InputError(
                "checkpoint: the groups of fully_shard are the blocks of a sharded model, always. "
                "Leave it out."
            )
        return Gathering(what, self.groups.groups, self.ranks)

    def shared(self, process_group: Any, where: Where, owner: str, chunk_size: object) -> Any:
        """The processes that share an operator at this point, which are those of the model."""
        if process_group is not None:
            raise InputError(
                "process_group: the point is sharded over processes, and those of fully_shard "
                "share the data too. Leave it out."
            )
        if self.groups is not None:
            self.ranks = ShardRanks(self.groups.mesh, where, owner, chunk_size)
        return self.ranks

    def total(self, sums: Sequence[Tensor]) -> Tensor:
        """The sum over all entries, from that over each part; what several have counts once."""
        own = torch.stack([*sums]).mul(sums[0].new_tensor(self.counts)).sum(0)
        return self.sums.gathered(own).sum(0)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the value over the processes that share the data."""
        return value if self.groups is None else Moved.apply(value, Mean(self.groups.mesh, True))[0]


def _weighed(part: Tensor) -> Tensor:
    """The sum of the entries, each times a number of its place, and that of their sizes."""
    terms = part.reshape(-1).double().cpu() * generic(part.numel())
    return torch.stack([terms.sum(), terms.abs().sum()])


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
    grouped = _groups.any_in(where)
    if not grouped and not any(isinstance(x, DTensor) for x in where.tensors):
        return None
    if _needed.RELEASE < (2, 13):  # DTensors lose second derivatives, and blocks their graphs
        raise InputError(
            f"{where.name} is sharded over processes, which needs PyTorch 2.13 or newer; this is "
            f"{torch.__version__}. Or gather a plain copy: p.full_tensor() for each parameter p."
        )
    return Layout(where, _groups.of(where) if grouped else None)
