"""Lending modules to an evaluation: parameters replaced by leaves, buffers by clones, attributes put back.

Nothing of the user's may change, and no hook on a parameter may fire, so `f` sees aliases instead of
the real parameters and clones instead of the real buffers, until the last derivative pass has run
(an activation checkpoint runs `f`'s blocks again inside the passes). And nothing of ours may stay: a
tensor that `f` leaves in an attribute of a module (a hidden state, a lazy cache) would hold our graph
there, to be met by the next call as a constant.

Evaluations nested in one thread share a module's loan; the outermost one puts the originals back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _claims
from hodiff._core._where import Where


class _Clones:
    """The buffers of one module while clones stand in for them."""

    __slots__ = ("module", "originals", "users")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.users: dict[object, None] = {}
        self.originals = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.requires_grad  # one that requires grad is an input of f
        }

    def lend(self, dtype: torch.dtype | None) -> None:
        for name, buffer in self.originals.items():
            self.module._buffers[name] = cast(buffer, dtype).clone()

    def give_back(self) -> None:
        self.module._buffers.update(self.originals)


_KEEP_NOTHING = frozenset(
    kind for kind in vars(nn).values() if isinstance(kind, type) and kind.__module__.startswith("torch.nn.modules.")
)
"""PyTorch's own modules: what they compute they put into no attribute (hooks on them may, and `f` on its point)."""

_lent: dict[nn.Module, _Clones] = {}


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` detached, in another floating point dtype if one is given."""
    still = tensor.detach()
    return still.to(dtype) if dtype is not None and still.is_floating_point() else still


class StateLoan:
    """The modules whose buffers and attributes one evaluation has borrowed.

    Attributes:
        attributes: What the attributes of each were, when it was borrowed; None of one that keeps nothing.
        put_back: What else is done when they are given back.
    """

    __slots__ = ("_claimed", "_cloned", "_dtype", "attributes", "put_back")

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._cloned: list[nn.Module] = []
        self._claimed: list[nn.Module] = []
        self.attributes: dict[nn.Module, dict[str, Any] | None] = {}
        self.put_back: list[Callable[[], object]] = []

    def take(self, module: nn.Module, *, root: bool = False) -> None:
        """Put clones in place of a module's buffers, and note its attributes; no other thread has it meanwhile."""
        if module._parameters or module._buffers:
            self._claimed += [module]
            _claims.claim((module,), self)
        hooked = module._forward_pre_hooks or module._forward_hooks
        plain = module.__class__ in _KEEP_NOTHING and not root and not hooked
        self.attributes[module] = None if plain else module.__dict__.copy()
        if module._buffers and not isinstance(module, torch.jit.ScriptModule):
            self._cloned += [module]
            if module in _lent:
                _lent[module].users[self] = None
            else:
                clones = _Clones(module)
                clones.users[self] = None
                _lent[module] = clones
                clones.lend(self._dtype)

    def tidy(self) -> None:
        """Put back attributes in which `f` has left tensors with a graph: that is ours, and ends with the call."""
        for module, before in self.attributes.items():
            if before is None:
                continue
            now = module.__dict__
            left = [name for name in now if not (name in before and now[name] is before[name]) and holds(now[name])]
            for name in left:
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]

    def close(self) -> None:
        """Return everything; the last borrower puts the original buffers back. It may be run again."""
        self.tidy()
        self.attributes.clear()
        for step in self.put_back:
            step()
        self.put_back = []
        for module in self._cloned:
            if module in _lent:
                clones = _lent[module]
                if self in clones.users:
                    del clones.users[self]
                if not clones.users:
                    clones.give_back()
                    del _lent[module]
        self._cloned = []
        if self._claimed:
            _claims.release(self._claimed, self)
            self._claimed = []


def holds(value: Any) -> bool:
    """Whether a value is a tensor with a graph, or a container in which there is one."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(holds(item) for item in value)
    return isinstance(value, dict) and any(holds(item) for item in value.values())


class ParameterLoan:
    """The parameters of the modules of a point, to be replaced wherever they occur, once taken and until closed."""

    __slots__ = ("_places", "_rest", "_where", "modules")

    def __init__(self, where: Where) -> None:
        self._where, self.modules = where, dict[nn.Module, None]()
        self._places: list[tuple[nn.Module, str, Tensor | None, int]] = []
        self._rest: list[tuple[nn.Module, str, Tensor | None, Tensor]] = []
        for owned in where.owned:
            self.modules.update(owned.assembly.modules)

    def take(self) -> None:
        """Make the modules this thread's. What comes back is what stands there now: of a call around, its leaves."""
        _claims.claim(self.modules, self)
        tensors = self._where.tensors
        numbers = dict(zip(map(id, tensors), range(len(tensors)), strict=True))
        for owned in self._where.owned:
            for module, name, _, parameter in owned.assembly.slots:
                key, now = id(parameter), module._parameters[name]
                if key in numbers:
                    self._places += [(module, name, now, numbers[key])]
                else:
                    self._rest += [(module, name, now, parameter)]

    def put(self, leaves: Sequence[Tensor]) -> None:
        """Put the leaves in place of the parameters of the point."""
        for module, name, _, number in self._places:
            module._parameters[name] = leaves[number]  # type: ignore[assignment]

    def put_others(self, still: Callable[[Tensor], Tensor]) -> None:
        """Put an unrecorded stand-in in place of each other parameter."""
        made: dict[int, Tensor] = {}
        for module, name, _, parameter in self._rest:
            if id(parameter) not in made:
                made[id(parameter)] = still(parameter)
            module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]

    def close(self) -> None:
        """Put the real parameters back, and let other threads have the modules. It may be run again."""
        for module, name, before, _ in [*self._places, *self._rest]:
            module._parameters[name] = before  # type: ignore[assignment]
        for module in self.modules:
            if "_flat_weights" in module.__dict__:  # the list that RNNs keep is refreshed by setting
                for name, parameter in [*module._parameters.items()]:
                    if isinstance(parameter, nn.Parameter) and parameter.is_leaf:  # others are refreshed by `forward`
                        setattr(module, name, parameter)
        _claims.release(self.modules, self)
        self._places, self._rest = [], []
