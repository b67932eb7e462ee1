"""Stand-ins for the user's own while `f` runs: leaves for tensors, clones for buffers; attributes
are put back.

Nothing of the user's may change, and no hook on a parameter may fire, so `f` sees aliases instead
of the real parameters and clones instead of the real buffers, until the last derivative pass has
run (an activation checkpoint runs `f`'s blocks again inside the passes). And nothing of ours may
stay: a tensor that `f` leaves in an attribute of a module (a hidden state, a lazy cache) would hold
our graph there, to be met by the next call as a constant.

Evaluations nested in one thread share a module's loan; the outermost one puts the originals back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _locks, _tree
from hodiff._core._call import Call
from hodiff._core._where import Where
from hodiff.errors import InputError

__all__ = ["mark_as_parameter", "memory_of", "tag_of"]

# --- leaves in place of tensors -------------------------------------------------------------------

LEAF_TAG = "_leaf_of_hodiff"
"""The attribute of a leaf of ours that says whose it is."""


class LeafTag:
    """The owner of a leaf: it is met again, in the graph of a later call, where `f` kept something.

    Attributes:
        open: Whether the evaluation still runs.
        detached: Whether its results are, so that nothing but a leftover leads to its leaves.
    """

    open = True
    detached: bool


def tag_of(leaf: Tensor) -> tuple[LeafTag, int] | None:
    """The owner of a leaf, and its number there; None for a tensor of the user's."""
    return leaf.__dict__.get(LEAF_TAG)


def mark_as_parameter(stand_in: Tensor, theirs: Tensor) -> None:
    """Let `isinstance(p, nn.Parameter)` say of a stand-in what it says of the user's tensor:
    `f` may ask.
    """
    if theirs.__class__ is nn.Parameter or "_is_param" in theirs.__dict__:
        stand_in.__dict__["_is_param"] = True  # pyright: ignore[reportIndexIssue]


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` detached, in another floating-point dtype if one is given."""
    still = tensor.detach()
    return still.to(dtype) if dtype is not None and still.is_floating_point() else still


def memory_of(tensor: Tensor) -> int:
    """An identity of the memory under a tensor: equal where two share it."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass that has none
        return id(tensor)


# --- modules: their parameters, their buffers, their attributes -----------------------------------


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

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cloned: list[nn.Module] = []
        self._claimed: list[nn.Module] = []
        self.attributes: dict[nn.Module, dict[str, Any] | None] = {}

    def take_called(self, module: nn.Module) -> None:
        """Borrow a module that `f` calls; of a `Sequential` all that it will call, at once."""
        below = module._modules.values() if module.__class__ is nn.Sequential else ()
        self.take(
            [each for each in (module, *below) if each is not None and each not in self.attributes]
        )

    def take(self, modules: Collection[nn.Module], root: nn.Module | None = None) -> None:
        """Borrow modules that `f` calls, below a point's `root` or others, from all other threads.

        Clones stand in for their buffers, attributes are noted.
        """
        # Of a module that is sharded a first derivative by inputs is right.
        if root is None and self._call.order >= 2 and _arguments.may_be_shared():
            _arguments.check_modules(modules, "f")
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
            name: cast(buffer, self._call.cast).clone() for name, buffer in clones.originals.items()
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
            same = [*now] == [*before] and [*map(id, now.values())] == [*map(id, before.values())]
            names = () if same else now
            left = [
                n for n in names if not (n in before and now[n] is before[n]) and _holds(now[n])
            ]
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

    def __init__(self, where: Where) -> None:
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
