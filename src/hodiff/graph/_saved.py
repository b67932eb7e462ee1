"""What nodes saved: every underscored attribute of PyTorch that this is read from, and nothing else.

The states of a saved tensor, and how each is told without running a hook or changing anything
(`raw` is a node's `_raw_saved_x`, a reference into the node that must not outlive it):

* `raw.unpack_hook` is set: *packed* (a checkpoint, `save_on_cpu`, the user's hooks); never unpacked here.
* `raw.data` is a tensor: *alive*; or *stale*, if reading `_saved_x` finds that its version moved.
* no data, no hook: `raw.unpack()` can run nothing. It gives None (*none*: nothing was to be saved), or
  raises what the engine would raise (*freed*).

`works()` has all of this tried once (`_self_test`). If a future PyTorch answers differently, every state
becomes *unknown*; none becomes wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hodiff._core._nodes import Node
from hodiff.errors import GraphError

if TYPE_CHECKING:
    from hodiff.graph._self_test import Answers

ALIVE, STALE, FREED, PACKED, RELEASED, NONE, UNKNOWN = (
    "alive",
    "stale",
    "freed",
    "packed",
    "released",
    "none",
    "unknown",
)

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


def is_function(node: Node) -> bool:
    """Whether the node is a Python `autograd.Function`, of which only its backward knows what it needs."""
    return plan(type(node)).function


def is_raising(node: Node) -> bool:
    """Whether the node stands for a derivative that does not exist."""
    return plan(type(node)).raising


def slots(node: Node) -> list[Slot]:
    """The saved tensors of a node with their states. Runs no hook."""
    names, function, opaque, _ = plan(node.__class__)
    if not names and not function and not opaque:
        return []
    if opaque or not works():
        return [Slot("?", UNKNOWN, None)]
    return _function_slots(node) if function else read(node, names)


def is_whole(node: Node) -> bool:
    """Whether all that a node saved is there as it was saved, as is so of most: told without a record of each."""
    names, function, opaque, raising = plan(node.__class__)
    if not names:
        return not (function or opaque or raising)
    if not works():
        return False
    try:
        for _, raw_name, value_name in names:
            raw = getattr(node, raw_name)
            if raw.unpack_hook is not None:
                return False
            if raw.data is None:
                raw.unpack()  # raises if freed
            else:
                getattr(node, value_name)  # raises if stale
    except (RuntimeError, AttributeError):  # or it is a list, or a nested tensor
        return False
    return True


def states(node: Node) -> list[str]:
    """The states of a node's saved tensors; once one was freed, all were, and the others are not looked at."""
    names = plan(type(node)).names
    if not names or not works():
        return [slot.state for slot in slots(node)]
    found: list[str] = []
    for each in names:
        found += [slot[1] for slot in read(node, (each,))]
        if found and found[-1] is FREED:
            break
    return found


_FREED: set[tuple[Any, ...]] = set()
"""Nodes that were found freed: their class, and which of their inputs wanted a gradient, which says what they save."""


def is_freed_like_others(node: Node) -> bool:
    """Whether nothing that a node saved is there any more, as of a node of its kind that was found freed.

    To be told by PyTorch that a tensor was freed is to catch its exception, at some 30 µs; to be told so of each
    node of a large graph takes seconds. What a node saves depends on its class and on which of its inputs want a
    gradient: if one such was freed, another with nothing left is. For sentences; a verdict asks (`states`).
    """
    names = plan(node.__class__).names
    if not names or not works():
        return False
    try:
        for _, raw_name, _ in names:
            raw = getattr(node, raw_name)
            if raw.unpack_hook is not None or raw.data is not None:
                return False
    except (RuntimeError, AttributeError):  # a list, or a nested tensor
        return False
    kind = (node.__class__, *[child is None for child, _ in node.next_functions])
    if kind in _FREED:
        return True
    if FREED in states(node):
        _FREED.add(kind)
        return True
    return False


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
        states = {slot.state for slot in _function_slots(saver)} if saver is not None else {UNKNOWN}
    return STALE if STALE in states else UNKNOWN if UNKNOWN in states else PACKED


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


def _function_slots(node: Node) -> list[Slot]:
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


def release(node: Node) -> int:
    """Drop the saved tensors of a node; a later use raises `RELEASED_TEXT`. Returns how many were dropped."""
    return drop(node) if works() else 0


def drop(node: Node) -> int:
    """As `release`, of a PyTorch that is not asked whether it is as expected."""
    names, function, *_ = plan(type(node))
    dropped = 0
    for name in ("_raw_saved_tensors",) if function else (raw_name for _, raw_name, _ in names):
        try:
            raws = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed already
            continue
        for raw in raws if isinstance(raws, tuple) else (raws,) if raws is not None else ():
            if state_of(raw)[0] in (ALIVE, STALE):  # a packed one has its hooks, and takes no second pair
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


def held_by_python(slot: Slot, slots: list[Slot]) -> bool:
    """Whether Python holds that very tensor, besides those slots of a node that hold it now."""
    others = sys.getrefcount(slot.value) - _answers().references - 1
    return others > 0 and others >= [other.value is slot.value for other in slots].count(True)


@cache
def works() -> bool:
    """Whether this PyTorch answers as this module expects."""
    return _answers().states


@cache
def sequences_work() -> bool:
    """Whether nodes and the thread's counter agree on the order of creation."""
    return _answers().sequences


@cache
def _answers() -> Answers:
    from hodiff.graph import _self_test  # which tries what stands here

    return _self_test.answers()
