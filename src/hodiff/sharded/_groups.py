"""The groups of a model under `fully_shard`: blocks that gather their shards, in each pass again.

What `fully_shard` gathers together is a block as those of `checkpoint=` are: between passes it
keeps its shards and what enters it, and nothing whole.

Shards are made whole by one collective, and whole tensors are reduced to shards: each is the
other's derivative. The processes share the data, and a function's value is the mean of theirs. So
the inner product of what each has whole is a mean over them too; the adjoint of gathering is then
to add up, to divide, and to cut, and the adjoint of that is to gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from hodiff._core import _call, _tree, _versions
from hodiff._core._arguments import as_called
from hodiff._core._settings import Scope, Undo
from hodiff._core._tree import mark_as_parameter
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.memory import _blocks
from hodiff.memory._chunked import Chunked
from hodiff.sharded._ranks import ShardRanks, exchanging

# --- shards made whole, and whole tensors reduced to shards ---------------------------------------


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

    def adjoint(self) -> Move:
        """The move of whole tensors back to shards, or of shards to whole ones."""
        return self._replace(gathers=not self.gathers)


class Mean(NamedTuple):
    """The mean over the processes of tensors that each has whole, or what is averaged in each pass.

    Attributes:
        mesh: The mesh of the processes that share the data.
        taken: Whether it is the mean, and not the tensors themselves.
    """

    mesh: Any
    taken: bool

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, or their means."""
        if not self.taken:
            return [x.view_as(x) for x in tensors]
        means = [x.clone() for x in tensors]
        with exchanging():
            for dim in range(self.mesh.ndim):
                for x in means:
                    dist.all_reduce(x, group=self.mesh.get_group(dim))
        return [x.div_(self.mesh.size()) for x in means]

    def adjoint(self) -> Mean:
        """The mean, of the identity, and the identity, of the mean."""
        return self._replace(taken=not self.taken)


@final
class Moved(Chunked):
    """Tensors, moved or averaged: linear in them, so that nothing is kept."""

    @staticmethod
    def forward(*given: Any) -> Any:
        """The tensors in the other form."""
        *tensors, form = given
        return tuple(form(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the form; a cotangent that is absent on this process may be there on others."""
        ctx.form = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The adjoint, of which the same may be asked."""
        return (*Moved.apply(*cotangents, ctx.form.adjoint()), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangents of the results: the same form."""
        return Moved.apply(*tangents[:-1], ctx.form)


# --- groups ---------------------------------------------------------------------------------------


SHARD = "_shard_of_hodiff"
"""The attribute of a parameter that a model has while `f` runs: this process's part, a leaf."""


Held = tuple[nn.Module, str, Any, Tensor]
"""A place of a parameter: the module, the name there, the parameter, this process's part."""


class Group:
    """A module under `fully_shard`, and the modules whose parameters its call makes whole.

    Attributes:
        name: The path of the module.
        module: The module.
        modules: It and those below it, but other groups.
        repeats: Whether it is a block, which each pass runs again; not what has blocks in it.
        meshes: The processes that share the data, for each part that is gathered by itself.
        mesh: The first, which is that of all; None without parameters.
    """

    def __init__(
        self, name: str, module: Any, modules: Sequence[nn.Module], *, repeats: bool
    ) -> None:
        self.name, self.module = name, module
        self.modules, self.repeats = modules, repeats
        self._hooked = [part for part in modules if isinstance(part, FSDPModule)]
        theirs = [each for part in self._hooked for each in _versions.fsdp_groups(part)]
        for each in theirs:
            _check_group(each, name)
        self.meshes = [each.mesh_info.mesh for each in theirs]
        self.mesh: Any = self.meshes[0] if theirs else None

    def slots(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """The places of its parameters, and what is there now."""
        for module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield module, name, parameter

    def held(self) -> list[Held]:
        """The places of its parameters, what is there now, and of that this process's part."""
        made: dict[int, Tensor] = {}
        for _, _, parameter in self.slots():
            if id(parameter) not in made:
                shard = parameter.__dict__.get(SHARD)
                made[id(parameter)] = parameter.to_local() if shard is None else shard
        return [(*slot, made[id(slot[2])]) for slot in self.slots()]

    def __call__(self, held: Sequence[Held], *args: Any, **kwargs: Any) -> Any:
        """The result of the module, whose parameters are whole meanwhile."""
        with Scope(partial(self._enter, held)):
            return self.module._call_impl(*args, **kwargs)

    def _enter(self, held: Sequence[Held], undo: Undo) -> None:
        whole: dict[int, Tensor] = {}
        pairs = {id(shard): (parameter, shard) for _, _, parameter, shard in held}
        for kind in {(shard.requires_grad, shard.dtype): None for *_, shard in held}:
            some = [(p, x) for p, x in pairs.values() if (x.requires_grad, x.dtype) == kind]
            move = Move(self.mesh, [self._cut(p) for p, _ in some], gathers=True)
            made = Moved.apply(*(x for _, x in some), move)
            whole |= {id(x): self._finished(p, y) for (p, x), y in zip(some, made, strict=True)}
        for module, name, _, shard in held:
            undo += [partial(module._parameters.__setitem__, name, module._parameters[name])]
            module._parameters[name] = whole[id(shard)]  # type: ignore[assignment]
        for module in self._hooked:
            for table in ("_forward_pre_hooks", "_forward_hooks"):
                theirs = module.__dict__[table]
                undo += [partial(module.__dict__.__setitem__, table, theirs)]
                module.__dict__[table] = type(theirs)(
                    (key, hook) for key, hook in theirs.items() if not _is_of_fsdp(hook)
                )

    def _cut(self, parameter: Any) -> ShardCut:
        """The way in which a parameter is cut over the processes that share the data."""
        n = self.mesh.ndim
        shape = [*parameter.shape]
        for at, each in enumerate(parameter.placements[n:], n):  # tensor parallel besides
            if not each.is_replicate():
                chunk = -(-shape[each.dim] // parameter.device_mesh.size(at))
                begun = chunk * parameter.device_mesh.get_local_rank(at)
                shape[each.dim] = max(0, min(chunk, shape[each.dim] - begun))
        dim = parameter.placements[n - 1].dim
        return ShardCut(torch.Size(shape), dim, -(-shape[dim] // self.mesh.size(n - 1)))

    def _finished(self, parameter: Any, whole: Tensor) -> Tensor:
        """A whole tensor as the module's own code knows its parameter."""
        n = self.mesh.ndim
        if parameter.device_mesh.ndim > n:
            names = parameter.device_mesh.mesh_dim_names[n:]
            whole = DTensor.from_local(
                whole,
                parameter.device_mesh[names],
                parameter.placements[n:],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        mark_as_parameter(whole, parameter)
        return whole


def _is_of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")


def _check_group(group: Any, name: str) -> None:
    """Raise for what is not served."""
    info, policies = group.mesh_info, [each.mp_policy for each in group.fsdp_params]
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        why = "its shards are offloaded to the CPU"
    elif any(each.param_dtype or each.reduce_dtype or each.output_dtype for each in policies):
        why = "it has a MixedPrecisionPolicy: convert the model, or use torch.autocast in f"
    elif info.shard_mesh_dim is None or info.is_spmd_mesh or info.mesh.ndim > 2:
        why = "it is replicated, or sharded over a mesh with names of its own (dp_mesh_dims)"
    elif len(group.modules) != 1:
        why = "fully_shard was given a list of modules: give it one at a time"
    elif any(hasattr(p.sharded_param.to_local(), "fsdp_pre_all_gather") for p in group.fsdp_params):
        why = "its tensors bring their own gathering (fsdp_pre_all_gather)"
    else:
        return
    raise InputError(
        f"{name}: this use of fully_shard is not served: {why}. "
        f"Else gather a plain copy of the model, by p.full_tensor() for each parameter p."
    )


@final
class Gathering(_blocks.Blocks):
    """A function of a sharded model; while it runs, groups gather their shards when they are
    called.
    """

    needed = False

    def __init__(self, f: Callable[..., Any], groups: Sequence[Group], ranks: ShardRanks) -> None:
        super().__init__(partial(_counted, f, ranks), True, {g.module: g.name for g in groups})
        self._groups = {group.module: group for group in groups}
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function, whose groups are blocks."""
        self._begun = False
        with self._ranks.raise_on_all_ranks():
            return super().__call__(*args, **kwargs)

    def inside(self) -> Callable[..., Any]:
        """The function whose groups gather, but are no blocks."""
        return super().__call__

    def _call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._begun:
            self._begun = True
            self._ranks.begin(
                "evaluates", str(_call.state.running[-1].call.order), *self.named.values()
            )
        group = self._groups[module]
        call = partial(group, group.held())
        if group.repeats and _blocks.meets(self):
            return self.run(call, args, kwargs, group.name)
        return call(*args, **kwargs)


def _counted(f: Callable[..., Any], ranks: ShardRanks, *args: Any, **kwargs: Any) -> Any:
    """The result of `f`; constants of its values, where it runs for other processes' sake."""
    result = f(*args, **kwargs)
    return _tree.tree_map(_muted, result) if ranks.muted else result


def _muted(x: Any) -> Any:
    varies = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach() + 0 * (x - x.detach()) if varies else x


class Groups(NamedTuple):
    """The groups of all modules of a point, and the processes that share the data."""

    groups: Sequence[Group]
    mesh: Any


def _check_owners(groups: Sequence[Group], where: Where) -> None:
    """Raise where a tensor of the point belongs to no group, or to several."""
    owner: dict[int, Group] = {}
    for group in groups:
        for _, name, parameter in group.slots():
            if (
                not isinstance(parameter, DTensor)
                or owner.setdefault(id(parameter), group) is not group
            ):
                raise InputError(
                    f"{where.name}: the parameter {name!r} of {group.name} is not sharded with "
                    f"its group (it was ignored, or is tied to one of another group)."
                )
    for each in where.module_slices:
        end = each.start + len(each.names)
        for number in range(each.start, end):
            if id(where.tensors[number]) not in owner:
                raise InputError(
                    f"{where.name}: {where.names[number]} is in no module under fully_shard, but "
                    f"others are; nobody would add up its gradients. Call fully_shard on the whole "
                    f"model as well."
                )
    free = [x for x in where.tensors if id(x) not in owner]
    if any(isinstance(x, DTensor) for x in free):
        raise InputError(
            f"{where.name}: a DTensor beside a module under fully_shard is not served."
        )


def any_in(where: Where) -> bool:
    """Whether a module of the point is under `fully_shard`, or has one in it that is."""
    return any(True for _ in _outermost(as_called(each.module) for each in where.module_slices))


def of(where: Where) -> Groups:
    """The groups of a point's modules; raise for what is not served."""
    groups: list[Group] = []
    for each in where.module_slices:
        root = as_called(each.module)
        paths = {module: path or type(module).__name__ for path, module in root.named_modules()}
        for outer in _outermost([root]):
            inner = [*_outermost(outer.children())]
            below = {part for block in inner for part in block.modules()}
            rest = [part for part in outer.modules() if part not in below]
            groups += [Group(paths[outer], outer, rest, repeats=not inner)]
            groups += [Group(paths[m], m, [*m.modules()], repeats=True) for m in inner]
    meshes = [mesh for group in groups for mesh in group.meshes]
    if any(mesh != meshes[0] for mesh in meshes):
        raise InputError(f"{where.name}: its modules are sharded over several meshes; use one.")
    _check_owners(groups, where)
    return Groups(groups, meshes[0])


def _outermost(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules under `fully_shard` that are in no other one."""
    for module in modules:
        if isinstance(module, FSDPModule):
            yield module
        else:
            yield from _outermost(module.children())
