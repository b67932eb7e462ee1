"""Modules of the user's: taken apart, selected from, lent while `f` runs.

Nothing of the user's may change, and no hook on a parameter may fire, so `f` sees aliases instead
of the real parameters and clones instead of the real buffers, until the last derivative pass has
run (an activation checkpoint runs `f`'s blocks again inside the passes). And nothing of ours may
stay: a tensor that `f` leaves in an attribute of a module (a hidden state, a lazy cache) would hold
our graph there, to be met by the next call as a constant.

Evaluations nested in one thread share a module's loan; the outermost one puts the originals back.
Whose point is a tensor, and whose `f` calls no module, loads nothing of this.
"""

from __future__ import annotations

import difflib
import sys
import weakref
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _locks, _tree, _vectors, _versions
from hodiff.errors import InputError

__all__ = ["Selection", "select"]


class ModuleSlice(NamedTuple):
    """Some leaves that are parameters of one module: where they start, under which names,
    and how it is made.
    """

    module: nn.Module
    start: int
    names: tuple[str, ...]
    assembly: Assembly


def add(where: Any, item: nn.Module | Selection, path: str, *, single: bool) -> _tree.Tree:
    """Append the parameters of a module, or the selected ones, to a point; their structure."""
    module = item if isinstance(item, nn.Module) else item.module
    assembly = Assembly.of(module, path)
    # of a compiled module the one behind the wrapper, which runs eagerly and is silent
    where.argument_items.append(next(iter(assembly.modules)) if item is module else item)
    if may_be_shared():
        check_modules(assembly.modules, path, shards=where.shards)
        if where.shards and not WHOLE.issuperset(map(type, assembly.modules)):
            for part in assembly.modules:
                if hasattr(part, "reshard"):  # under `fully_shard`, after a forward pass
                    part.reshard()  # pyright: ignore[reportCallIssue]
            assembly = Assembly.of(module)
    pairs = _chosen(item, assembly) if isinstance(item, Selection) else assembly.trainable()
    if not pairs:
        raise InputError(
            f"{path}: {type(module).__name__} has no trainable parameter (floating-point, with "
            f"requires_grad=True). To differentiate with respect to frozen ones, call "
            f"requires_grad_(True) on them first."
        )
    check_real(pairs)
    names, parameters = zip(*pairs, strict=True)
    for parameter in parameters:
        if parameter.__class__ is nn.parameter.UninitializedParameter:
            raise InputError(
                f"{path} has uninitialized (lazy) parameters; run one forward pass first."
            )
        if parameter.is_meta or parameter.__class__ not in _arguments.TENSORS:
            _arguments.check_real_tensor(parameter, path, shards=where.shards)
    where.module_slices.append(ModuleSlice(module, len(where.tensors), names, assembly))
    where.tensors += parameters
    where.names += names if single else [f"{path}.{name}" for name in names]
    return _tree.Branch(dict, names, (_tree.LEAF,) * len(names))


def _chosen(selection: Selection, assembly: Assembly) -> list[tuple[str, Tensor]]:
    """The parameters of a selection, as the module has them now."""
    wanted = set(selection)
    selected = {path: parameter for _, _, path, parameter in assembly.slots if path in wanted}
    return [(name, selected[name] if name in selected else selection[name]) for name in selection]


# --- some parameters of a module, by name: `hodiff.select` ----------------------------------------


class Selection(Mapping[str, Tensor]):
    """Some parameters of a module by name, as returned by `hodiff.select`.

    A mapping from name to parameter. It reads the module each time, so that inside `f` it shows the
    tensors being differentiated.

    Examples:
        >>> import torch, hodiff
        >>> chosen = hodiff.select(torch.nn.Linear(2, 1), "bias")
        >>> list(chosen), chosen["bias"].shape
        (['bias'], torch.Size([1]))
    """

    if not TYPE_CHECKING:  # a checker of types says it before anything runs

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            """As `f` might take what it is given for the module."""
            raise InputError(
                "a Selection holds parameters and is not the module: call its .module, which "
                "inside f has these parameters: lambda part, x: part.module(x)."
            )

    __slots__ = ("_names", "module")

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.module = module
        if not isinstance(names, Iterable) or isinstance(names, Tensor):
            raise InputError(
                f"names: got {_arguments.kind(names)}, expected names; "
                "hodiff.select makes a Selection."
            )
        self._names = tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        owner, _, last = name.rpartition(".")
        parameter = _arguments.as_called(self.module).get_submodule(owner)._parameters[last]
        if parameter is None:
            raise KeyError(name)
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Selection({type(self.module).__name__}, {list(self._names)})"


def select(module: nn.Module, *patterns: str, exclude: str | Sequence[str] = ()) -> Selection:
    """Select some trainable parameters of a module by name, to differentiate with respect to them.

    `fnmatch` matches patterns, case-sensitively, against full dotted parameter names. The name of a
    submodule selects every parameter below it. Without a pattern, every parameter is selected.

    Args:
        module: The module whose parameters are chosen.
        *patterns: Parameter or submodule names, with `*`, `?` and `[...]`.
        exclude: One or several patterns whose matches are omitted.

    Returns:
        A mapping from name to parameter, in the module's order; a tied parameter appears once,
        under its first name. Give it as *x* to any function; `f` receives the mapping, and its
        `.module` is the module. Results are dicts of the same names; each has its parameter's
        shape. While
        `f` runs, the parameters that are not selected are constants: their `requires_grad` is
        False, except to calls of hodiff inside.

    Raises:
        InputError: A pattern that matches nothing (near matches are listed), or only frozen
            parameters.

    Cost:
        No derivative pass; one walk over the module.

    Examples:
        >>> import torch, hodiff
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        ... )
        >>> list(hodiff.select(model, "2.*"))
        ['2.weight', '2.bias']
        >>> list(hodiff.select(model, "*.weight", exclude="0"))
        ['2.weight']
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: got {_arguments.kind(module)}, expected an nn.Module.")
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    for name, given in ("pattern", patterns), ("exclude", exclude):
        for each in given if isinstance(given, (tuple, list, set)) else (given,):
            if not isinstance(each, str):
                raise InputError(
                    f"{name}: got {_arguments.kind(each)}, expected strings, one by one: "
                    '"head.*", "*.weight".'
                )
    assembly = Assembly.of(module)
    first_names = _first_names(assembly)
    pairs = assembly.trainable()
    trainable = {name for name, _ in pairs}
    chosen: set[str] = set()
    for pattern in patterns or ("*",):
        matched = {first_names[name] for name in first_names if _vectors.matches(name, pattern)}
        if not matched:
            raise InputError(_no_match(module, pattern, list(first_names)))
        if matched.isdisjoint(trainable):
            raise InputError(
                f"pattern {pattern!r} matches only frozen parameters "
                f"({', '.join(sorted(matched))}); call requires_grad_(True) on those you "
                "differentiate with respect to."
            )
        chosen |= matched
    dropped: set[str] = set()
    for pattern in exclude:
        matched = {first_names[name] for name in first_names if _vectors.matches(name, pattern)}
        if not matched:
            raise InputError(f"exclude: {_no_match(module, pattern, list(first_names))}")
        dropped |= matched
    names = [name for name, _ in pairs if name in chosen - dropped]
    if not names:
        raise InputError(f"exclude={exclude!r} excludes every parameter that {patterns!r} selects.")
    check_real([pair for pair in pairs if pair[0] in names])
    return Selection(module, names)


def _first_names(assembly: Assembly) -> dict[str, str]:
    """Every name of every parameter, mapped to the first name of that parameter
    (they differ when tied).
    """
    first: dict[int, str] = {}
    return {path: first.setdefault(id(parameter), path) for _, _, path, parameter in assembly.slots}


def _no_match(module: nn.Module, pattern: str, names: list[str]) -> str:
    known = names + [name for name, _ in _arguments.as_called(module).named_modules() if name]
    near = difflib.get_close_matches(pattern.rstrip(".*"), known, n=3, cutoff=0.4)
    advice = (
        f"Near matches: {', '.join(near)}." if near else f"Its parameters: {', '.join(names[:8])}."
    )
    return f"pattern {pattern!r} matches no parameter of {type(module).__name__}. {advice}"


def check_real(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for a complex parameter, which would be missing from every result."""
    for path, parameter in pairs:
        if not parameter.dtype.is_floating_point:
            raise InputError(
                f"parameter {path!r} is complex ({parameter.dtype}); hodiff differentiates with "
                f"respect to real variables, so its part would be missing. Store it as a pair of "
                f"reals (nn.Parameter(torch.view_as_real(c)), with torch.view_as_complex(...) in "
                f"forward), or select the others: hodiff.select(model, exclude={path!r})."
            )


KINDS = nn.Module, Selection
"""What is added to a point by the parameters that it has."""


# --- a module taken apart: the modules at or below it, and the places of its parameters -----------


ParameterSlot = tuple[nn.Module, str, str, Tensor]
"""A place of a parameter: module, name there, path, itself. A tied parameter has several."""


class Assembly(NamedTuple):
    """A module taken apart, in one walk: the modules at or below it,
    and the slots of their parameters.
    """

    modules: dict[nn.Module, None]
    slots: list[ParameterSlot]

    @staticmethod
    def of(root: nn.Module, name: str = "x") -> Assembly:
        """The parts of a module, read while no other thread has replaced its parameters."""
        with _locks.lock:
            _locks.wait_for(root)
            assembly = Assembly({}, [])
            assembly._add(_arguments.as_called(root), "", name)
            return assembly

    def _add(self, module: nn.Module, prefix: str, root: str) -> None:
        # Every call with a module pays for this walk: hence its plain look.
        modules, slots = self
        modules[module] = None
        own, below = module._parameters, module._modules
        if own.__class__ is not dict and isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{prefix.removesuffix('.') or root} is a TorchScript module, whose parameters "
                f"cannot be replaced; use the eager module instead."
            )
        for name in own:
            parameter = own[name]
            if parameter is not None:
                slots += [(module, name, prefix + name, parameter)]
        for name in below:
            child = below[name]
            if child is not None and child not in modules:
                self._add(child, f"{prefix}{name}.", root)

    def trainable(self) -> list[tuple[str, Tensor]]:
        """The parameters that require grad, by name; a tied one once, under its first name."""
        trainable: dict[int, tuple[str, Tensor]] = {}
        for _, _, path, parameter in self.slots:
            if parameter.requires_grad or hasattr(parameter, TRAINABLE):  # as `is_trainable`
                trainable.setdefault(id(parameter), (path, parameter))
        return [*trainable.values()]


TRAINABLE = "_hodiff_trainable"
"""An attribute of what stands, unrecorded, in place of a parameter that requires grad."""


def is_trainable(parameter: Tensor) -> bool:
    """Whether a parameter requires grad, or stands in place of one that does."""
    return parameter.requires_grad or hasattr(parameter, TRAINABLE)


def unrecorded(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter that is not differentiated in: its value, unrecorded."""
    value = _tree.cast(parameter.clone() if parameter.is_inference() else parameter, dtype)
    _tree.mark_as_parameter(value, parameter)
    if is_trainable(parameter):  # to calls inside `f` it still is
        setattr(value, TRAINABLE, True)
    return value


# --- models that processes share ------------------------------------------------------------------


WHOLE: set[type] = {*_arguments.TENSORS, type(None)}
"""Classes of tensors and modules that are known to be nobody's shards."""


def may_be_shared() -> bool:
    """Whether there may be modules that belong to several processes:
    what makes them has been loaded.
    """
    return _arguments.LOADED_BY in sys.modules or _versions.REPLICATED_BY in sys.modules


def check_modules(modules: Iterable[nn.Module], name: str, *, shards: bool = False) -> None:
    """Raise for a module under `fully_shard`, or one that has DTensors for parameters.

    With `shards` only for what no call takes.
    """
    for module in modules:
        if module.__class__ not in WHOLE:
            _check_class(module, name, shards)
        for path, parameter in module._parameters.items():
            unknown = not shards and parameter.__class__ not in WHOLE
            if unknown and _arguments.is_dtensor(parameter):
                raise InputError(
                    f"{name}: the parameter {path!r} is a DTensor, sharded over processes. "
                    f"{_arguments.WAY_OUT}"
                )


def _check_class(module: nn.Module, name: str, shards: bool) -> None:
    kind = module.__class__
    replicated = any(
        base.__module__ == _versions.REPLICATED_BY for base in kind.__mro__
    )  # each such module has its own class
    if (
        replicated
        and not sys.modules[_versions.REPLICATED_BY].replicate.state(module).has_initialized
    ):
        raise InputError(
            f"{name}: a module under torch.distributed's replicate() has not run yet. Its first "
            f"forward pass registers its parameters and buffers, and writes into them, so it may "
            f"not see ours: run it once before, model(x)."
        )
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        if shards and issubclass(kind, FSDPModule):
            return
        if issubclass(kind, (FSDPModule, FullyShardedDataParallel)):
            plain = next(
                (k.__name__ for k in kind.__mro__ if not k.__name__.startswith(("FSDP", "Fully"))),
                "",
            )
            raise InputError(
                f"{name}: {plain} is sharded (fully_shard), and its parameters are freed between "
                f"passes, which this call does not serve. {_arguments.WAY_OUT}"
            )
    WHOLE.add(kind)


# --- modules on loan: their parameters, their buffers, their attributes ---------------------------


class _Clones:
    """The buffers of one module while clones stand in for them."""

    __slots__ = ("lent", "originals", "users")

    def __init__(self, module: nn.Module) -> None:
        self.lent: dict[str, Tensor] = {}
        self.users: dict[object, None] = {}
        self.originals = {
            name: buffer
            for name, buffer in module._buffers.items()
            # one that requires grad is an input of f
            if buffer is not None and not buffer.requires_grad
        }

    def begun_with(self, module: nn.Module) -> dict[str, Any]:
        """The buffers that an evaluation began with; those that `f` has put there, where it has."""
        now, begun = module._buffers.copy(), {}
        for name, clone in self.lent.items():
            if now.get(name) is clone:  # changed in place since, or not
                begun[name] = (
                    self.originals[name].to(clone.dtype, copy=True) if clone._version else clone
                )
        return now | begun


_KEEP_NOTHING = frozenset(
    kind
    for kind in vars(nn).values()
    if isinstance(kind, type) and kind.__module__.startswith("torch.nn.modules.")
)
"""PyTorch's own modules: what they compute they put into no attribute (hooks on them may,
and `f` on its point).
"""

_lent: dict[nn.Module, _Clones] = {}

Kept = dict[nn.Module, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
"""What modules had at another time: parameters, buffers, and attributes of which tensors with a
graph are a part.
"""


RENORMALIZES = (
    "f calls an Embedding(max_norm=...), which changes its table in place each time it runs: its "
    "derivatives would be those at another point. Set its max_norm to None, and renormalize the "
    "table yourself, between steps: with torch.no_grad(): table.weight.renorm_(2, 0, max_norm)."
)


class StateLoan:
    """The modules whose buffers and attributes one evaluation has borrowed.

    Attributes:
        attributes: What the attributes of each were, when it was borrowed; None of one that keeps
            nothing.
    """

    __slots__ = ("_call", "_claimed", "_cloned", "attributes")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cloned: list[nn.Module] = []
        self._claimed: list[nn.Module] = []
        self.attributes: dict[nn.Module, dict[str, Any] | None] = {}

    def take_called(self, module: nn.Module) -> None:
        """Borrow a module that `f` calls; of a `Sequential` all that it will call, at once."""
        below = module._modules.values() if module.__class__ is nn.Sequential else ()
        self.take([module, *below])

    def take(self, modules: Iterable[Any], root: nn.Module | None = None) -> None:
        """Borrow modules that `f` calls, below a point's `root` or others, from all other threads,
        unless they are borrowed.

        Clones stand in for their buffers, attributes are noted.
        """
        modules = [*filterfalse({None, *self.attributes}.__contains__, modules)]
        # Of a module that is sharded a first derivative by inputs is right.
        if root is None and self._call.order >= 2 and may_be_shared():
            check_modules(modules, "f")
        held = [module for module in modules if module._parameters or module._buffers]
        # also those below a root, claimed with its parameters: a forked child closes what is
        # claimed
        if held:
            self._claimed += held
            _locks.claim(held, self, first=root is None)
        for module in modules:
            if "max_norm" in module.__dict__ and module.max_norm is not None:
                raise InputError(RENORMALIZES)
            known = module.__class__ in _KEEP_NOTHING and module is not root
            plain = known and not (module._forward_pre_hooks or module._forward_hooks)
            self.attributes[module] = None if plain else module.__dict__.copy()
            if module._buffers and not isinstance(module, torch.jit.ScriptModule):
                self._clone_buffers(module)

    def _clone_buffers(self, module: nn.Module) -> None:
        self._cloned += [module]
        if module in _lent:
            _lent[module].users[self] = None
            return
        clones = _Clones(module)
        clones.users[self] = None
        _lent[module] = clones
        clones.lent = {
            name: _tree.cast(buffer, self._call.cast).clone()
            for name, buffer in clones.originals.items()
        }
        module._buffers.update(clones.lent)

    def tidy(self) -> dict[nn.Module, dict[str, Any]]:
        """Put back attributes in which `f` has left tensors with a graph: that is ours,
        and ends with the call.
        """
        result: dict[nn.Module, dict[str, Any]] = {}
        for module, before in self.attributes.items():
            if before is None:
                continue
            now = module.__dict__
            if [*now] == [*before] and [*map(id, now.values())] == [*map(id, before.values())]:
                continue  # as nearly always
            left = [n for n in now if not (n in before and now[n] is before[n]) and _holds(now[n])]
            for name in left:
                result.setdefault(module, {})[name] = now[name]
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]
        return result

    def at_hand(self) -> Kept:
        """The values of its modules at this moment that a block may read, and change.

        Statistics of norms only follow, and masks are large, and constant.
        """
        result = Kept()
        for module, before in self.attributes.items():
            if (before is None and not module._buffers) or "track_running_stats" in module.__dict__:
                continue
            buffers = {
                name: buffer.clone()
                for name, buffer in module._buffers.items()
                if buffer is not None and not buffer.requires_grad and buffer.numel() <= 2**16
            }
            result[module] = {}, buffers, _plain_attributes(module.__dict__ if before else {})
        return result

    def as_met(self, others: Container[nn.Module]) -> Kept:
        """The values that its modules, but some others, had as they were borrowed,
        where they are others now.
        """
        result = Kept()
        for module, before in self.attributes.items():
            if module not in others and (before is not None or module in _lent):
                begun = _lent[module].begun_with(module) if module in _lent else {}
                changed = {n: each for n, each in begun.items() if each is not module._buffers[n]}
                result[module] = {}, changed, _plain_attributes(before or {})
        return result

    def kept(self) -> Kept:
        """The values of its modules, for `put`; those left in attributes come without their graph,
        which may lead here.
        """
        left, result = self.tidy(), Kept()
        for module in self._claimed:
            buffers = (
                _lent[module].begun_with(module) if module in _lent else module._buffers.copy()
            )
            attributes = _tree.tree_map(_still, left[module]) if module in left else {}
            result[module] = module._parameters.copy(), buffers, attributes
        return result

    def close(self) -> None:
        """Return everything; the last borrower puts the original buffers back.

        It may be run again.
        """
        if self.attributes:
            self.tidy()
            self.attributes.clear()
        for module in self._cloned:
            if module in _lent:
                clones = _lent[module]
                if self in clones.users:
                    del clones.users[self]
                if not clones.users:
                    module._buffers.update(clones.originals)
                    _lent.pop(module, None)  # a handler's call may have been here
        self._cloned = []
        if self._claimed:
            _locks.release(self._claimed, self)
            self._claimed = []


def _plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a module has set itself; none with a graph, which may be its holder's."""
    return {
        name: value for name, value in attributes.items() if name[0] != "_" and not _holds(value)
    }


def put(kept: Kept, undo: list[Callable[[], object]]) -> None:
    """Let modules on loan have what they had;
    `undo` is given what puts parameters and buffers back.
    """
    for module, (parameters, buffers, attributes) in kept.items():
        for now, before in ((module._parameters, parameters), (module._buffers, buffers)):
            if before:
                undo += [partial(now.update, now.copy())]
                now.update(before)
        for name, value in buffers.items():
            if value is not None:  # a block may change it in place, each time
                module._buffers[name] = value.clone()
        now = module.__dict__
        other = {
            name: value for name, value in attributes.items() if now.get(name, now) is not value
        }
        if other:
            undo += [partial(now.update, {name: now[name] for name in other if name in now})]
            now.update(other)  # a new one the loan takes away


def _still(value: Any) -> Any:
    """A tensor cut from its graph that requires grad as before,
    so that as much is recorded with it.
    """
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )


def _holds(value: Any) -> bool:
    """Whether a value is a tensor with a graph, or a container in which there is one."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(_holds(item) for item in value)
    return isinstance(value, dict) and any(_holds(item) for item in value.values())


class ParameterLoan:
    """The parameters of the modules of a point, to be replaced wherever they occur,
    once taken and until closed.
    """

    __slots__ = ("_places", "_rest", "_where", "modules")

    def __init__(self, where: Any) -> None:
        self._where, self.modules = where, dict[nn.Module, None]()
        self._places: list[tuple[nn.Module, str, Tensor | None, int]] = []
        self._rest: list[tuple[nn.Module, str, Tensor | None, Tensor]] = []
        for module_slice in where.module_slices:
            self.modules.update(module_slice.assembly.modules)

    def take(self, still: Callable[[Tensor], Tensor] | None = None) -> None:
        """Make the modules this thread's; `still` makes what stands for each other parameter.

        What comes back is what stands there now: of a call around, its leaves.
        """
        _locks.claim(self.modules, self, first=True)
        tensors = self._where.layout.given if self._where.layout else self._where.tensors
        numbers = dict(zip(map(id, tensors), range(len(tensors)), strict=True))
        for module_slice in self._where.module_slices:
            for module, name, _, parameter in module_slice.assembly.slots:
                key, now = id(parameter), module._parameters[name]
                if key in numbers:
                    self._places += [(module, name, now, numbers[key])]
                else:
                    self._rest += [(module, name, now, parameter)]
        if still is not None:
            made: dict[int, Tensor] = {}
            for module, name, _, parameter in self._rest:
                if id(parameter) not in made:
                    made[id(parameter)] = still(parameter)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]

    def put(self, leaves: Sequence[Tensor]) -> None:
        """Put the leaves in place of the parameters of the point."""
        for module, name, _, number in self._places:
            module._parameters[name] = leaves[number]  # type: ignore[assignment]

    def close(self) -> None:
        """Put the real parameters back, and let other threads have the modules.

        It may be run again.
        """
        for module, name, before, _ in [*self._places, *self._rest]:
            module._parameters[name] = before  # type: ignore[assignment]
        for module in self.modules:
            # the list that RNNs keep is refreshed by setting
            if "_flat_weights" in module.__dict__:
                for name, parameter in [*module._parameters.items()]:
                    # others are refreshed by `forward`
                    if isinstance(parameter, nn.Parameter) and parameter.is_leaf:
                        setattr(module, name, parameter)
                # By these it tells whether the list is of its parameters: a block that runs again
                # has those of the loan once more, and would take the list for theirs.
                held: Any = module
                held._flat_weight_refs = [
                    x if x is None else weakref.ref(x) for x in held._flat_weights
                ]
        _locks.release(self.modules, self)
        self._places, self._rest = [], []


class Evaluation:
    """One run of `f`, of which passes that come later may run parts again: activation checkpoints
    do.

    Attributes:
        over: Whether the modules have something else by now; before, nothing is to be done.
    """

    __slots__ = ("_call", "_kept", "_kind", "_state", "over")

    def __init__(self, context: Any) -> None:
        self._kind, self._call = type(context), context.call
        self._state, self.over = context.loan, False

    def end(self, state: StateLoan) -> None:
        """The modules get something else after this."""
        if not hasattr(self, "_kept"):
            self._kept = state.kept()
            del self._state
        self.over = True

    def back(self, begun: Kept, undo: list[Callable[[], object]]) -> None:
        """Let the modules have what they had as a block began, or as they were met, if later."""
        if hasattr(self, "_state"):  # it has not ended; later it is resumed for whole passes
            put(self._state.as_met(begun), undo)
        put(begun, undo)

    def resumed(self, *, whole: bool = False) -> Any:
        """The evaluation's state once more: the modules, in no other thread meanwhile, have what
        they had.

        With `whole`, for the whole of a pass, not for one part of `f`.
        """
        context = self._kind(self._call)
        context._evaluation, context._whole = self, whole
        return context

    def put(self, context: Any, undo: list[Callable[[], object]], *, whole: bool) -> None:
        """Let the modules have it, once they are borrowed."""
        context.loan.take(self._kept)
        put(self._kept, undo)
        if whole:
            undo += [partial(setattr, self, "over", True)]
            self.over = False


def swapped_in() -> Kept:
    """The tensors that `torch.func.functional_call` has put into the modules for
    which it runs at this moment.
    """
    frame, result = sys._getframe(), list[nn.Module]()
    while frame is not None:
        if frame.f_code is _versions.FUNCTIONAL_CALL:
            result += frame.f_locals["module"].modules()
        frame = frame.f_back
    return {module: (module._parameters.copy(), module._buffers.copy(), {}) for module in result}
