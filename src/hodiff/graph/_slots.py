"""Reading what a node saved: every underscored attribute of PyTorch that this takes, and nothing else.

The states of a saved tensor, and how each is told without running a hook or changing anything
(`raw` is a node's `_raw_saved_x`, a reference into the node that must not outlive it):

* `raw.unpack_hook` is set: *packed* (a checkpoint, `save_on_cpu`, the user's hooks); never unpacked here.
* `raw.data` is a tensor: *alive*; or *stale*, if reading `_saved_x` finds that its version moved.
* no data, no hook: `raw.unpack()` can run nothing. It gives None (*none*: nothing was to be saved), or
  raises what the engine would raise (*freed*).

Whether this PyTorch answers so is not asked here, but in `_saved`, which all others read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hodiff._core._nodes import Node
from hodiff.errors import GraphError

ALIVE = "alive"
STALE = "stale"
FREED = "freed"
PACKED = "packed"
RELEASED = "released"
NONE = "none"
UNKNOWN = "unknown"

FREED_TEXT = "a second time"
STALE_TEXT = "modified by an inplace operation"
_BUILTIN = re.compile(r".*Backward\d*$")
_EMPTY = frozenset({"AccumulateGrad", "CopyBackwards", "UndefinedGradBackward", "GraphRoot", "Identity"})
_RAISING = frozenset({"Error", "DelayedError", "NotImplemented"})


class Slot(NamedTuple):
    """One saved tensor of a node. Do not keep `value`: it is the saved tensor itself."""

    name: str
    state: str
    value: Tensor | None


class Plan(NamedTuple):
    """How to read the nodes of one class."""

    names: tuple[tuple[str, str, str], ...] = ()  # (x, _raw_saved_x, _saved_x)
    function: bool = False
    opaque: bool = False
    raising: bool = False


@cache
def plan(kind: type) -> Plan:
    """How to read the nodes of a class."""
    if issubclass(kind, BackwardCFunction):
        return Plan(function=True)
    if kind.__name__ in _RAISING:
        return Plan(raising=True)
    names = tuple(
        (name.removeprefix("_raw_saved_"), name, name.removeprefix("_raw"))
        for name in dir(kind)
        if name.startswith("_raw_saved_")
    )
    return Plan(names, opaque=not names and not _BUILTIN.fullmatch(kind.__name__) and kind.__name__ not in _EMPTY)


def read(node: Node, names: Iterable[tuple[str, str, str]]) -> list[Slot]:
    """The saved tensors of these names, of a node that is no Python Function."""
    found: list[Slot] = []
    for name, raw_name, value_name in names:
        # Most slots are alive, and are read without a further call. A list has no `unpack_hook`.
        try:
            raw = getattr(node, raw_name)
            if raw.unpack_hook is None:
                value = raw.data
                if value is not None:
                    getattr(node, value_name)  # raises if stale
                    found += [_slot(Slot, (name, ALIVE, value))]
                    continue
        except (RuntimeError, AttributeError):
            pass
        found += _one_slot(node, name, raw_name, value_name)
    return found


_slot = tuple.__new__
"""Makes a named tuple at a third of the cost; `inspect` and `predict` make one for each saved tensor."""


def _one_slot(node: Node, name: str, raw_name: str, value_name: str) -> list[Slot]:
    """The slot of this name, whatever its state; several, if it is a list."""
    try:
        raw = getattr(node, raw_name)
    except RuntimeError as error:  # the getter of a list raises by itself
        return [Slot(name, FREED if FREED_TEXT in str(error) else UNKNOWN, None)]
    if isinstance(raw, tuple):
        several = [state_of(part) for part in raw]
        if any(state == ALIVE for state, _ in several) and not any(state == PACKED for state, _ in several):
            several = [(_check(node, value_name, state), value) for state, value in several]
        return [Slot(f"{name}[{index}]", *pair) for index, pair in enumerate(several)]
    state, value = state_of(raw)
    if state == ALIVE:
        state = _check(node, value_name, state)
    return [Slot(name, state, value)]


def state_of(raw: Any) -> tuple[str, Tensor | None]:
    """The state of one saved tensor, but for staleness; and the tensor, while it is there."""
    hook = raw.unpack_hook
    if hook is not None:
        return (RELEASED if hook is _raise_released else _packed(hook)), None
    try:
        value = raw.data
    except RuntimeError:  # a strided nested tensor
        return UNKNOWN, None
    if value is not None:
        return ALIVE, value
    try:
        raw.unpack()
    except RuntimeError as error:
        return (FREED if FREED_TEXT in str(error) else UNKNOWN), None
    return NONE, None


def _packed(hook: Any) -> str:
    """Packed; but stale, where it is a checkpoint whose own saved input was changed in place."""
    if getattr(hook, "__module__", "") != "torch.utils.checkpoint":
        return PACKED
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    cells: dict[str, Any] = dict(zip(names, getattr(hook, "__closure__", None) or (), strict=False))
    try:
        frame = cells["frame"].cell_contents
    except (KeyError, ValueError):
        return UNKNOWN
    arguments = getattr(frame, "saved_args", None)
    if arguments is not None:
        states = {_unpacked(raw) for raw in arguments if hasattr(raw, "unpack_hook")}
    else:  # until torch 2.12 or so: a node that saves them
        saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
        states = {slot.state for slot in read_function(saver)} if saver is not None else {UNKNOWN}
    return next((state for state in (STALE, UNKNOWN) if state in states), PACKED)


def _unpacked(raw: Any) -> str:
    """The state of a saved value that belongs to no node."""
    state, _ = state_of(raw)
    if state == ALIVE:
        try:
            raw.unpack()
        except RuntimeError as error:
            return STALE if STALE_TEXT in str(error) else UNKNOWN
    return state


def _check(node: Node, name: str, state: str) -> str:
    """`state`, if it is not alive or the value can be read; reading compares version counters."""
    if state != ALIVE:
        return state
    try:
        getattr(node, name)
    except RuntimeError as error:
        return STALE if STALE_TEXT in str(error) else UNKNOWN
    return ALIVE


def read_function(node: Node) -> list[Slot]:
    """The saved tensors of a Python Function."""
    try:
        raws = node._raw_saved_tensors or ()
    except RuntimeError as error:
        return [Slot("tensors", FREED if FREED_TEXT in str(error) else UNKNOWN, None)]
    except AttributeError:
        return [Slot("tensors", UNKNOWN, None)]
    found = [Slot(f"tensors[{index}]", *state_of(raw)) for index, raw in enumerate(raws)]
    if not any(slot.state == ALIVE for slot in found) or any(slot.state in (PACKED, RELEASED) for slot in found):
        return found
    if _check(node, "saved_tensors", ALIVE) == ALIVE:
        return found
    return [slot._replace(state=STALE) if slot.state == ALIVE else slot for slot in found]


def drop(node: Node) -> int:
    """Drop the saved tensors of a node; a later use raises `RELEASED_TEXT`. Returns how many were dropped."""
    names, function, *_ = plan(type(node))
    dropped = 0
    for name in ("_raw_saved_tensors",) if function else (raw_name for _, raw_name, _ in names):
        try:
            raws = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed already
            continue
        for raw in raws if isinstance(raws, tuple) else (raws,):
            if raw is not None and state_of(raw)[0] == ALIVE:  # a packed one has its hooks, and takes no second pair
                raw.register_hooks(_forget, _raise_released)
                dropped += 1
    return dropped


RELEASED_TEXT = (
    "this part of the graph was released: by hodiff.graph.release, or by hodiff.multi_grad(..., release=True). "
    "Compute the tensor again, or release later."
)


def _forget(tensor: Tensor) -> None:
    """Pack: nothing."""


def _raise_released(nothing: None) -> Tensor:
    raise GraphError.about(RELEASED_TEXT, kind="released")
