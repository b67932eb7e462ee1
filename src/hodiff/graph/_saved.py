"""What a node saved, as far as this PyTorch answers as expected: if a future one does not, nothing is known of it.

Every state is then *unknown*, and none becomes wrong.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from hodiff._core._nodes import Node
from hodiff.graph import _self_test, _slots


def is_function(node: Node) -> bool:
    """Whether the node is a Python `autograd.Function`, of which only its backward knows what it needs."""
    return _slots.plan(type(node)).function


def is_raising(node: Node) -> bool:
    """Whether the node stands for a derivative that does not exist."""
    return _slots.plan(type(node)).raising


def slots(node: Node) -> list[_slots.Slot]:
    """The saved tensors of a node with their states. Runs no hook."""
    names, function, opaque, _ = _slots.plan(node.__class__)
    if not names and not function and not opaque:
        return []
    if opaque or not works():
        return [_slots.Slot("?", _slots.UNKNOWN, None)]
    return _slots.read_function(node) if function else _slots.read(node, names)


def is_whole(node: Node) -> bool:
    """Whether all that a node saved is there as it was saved, as is so of most: told without a record of each."""
    names, function, opaque, raising = _slots.plan(node.__class__)
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
    names = _slots.plan(type(node)).names
    if not names or not works():
        return [slot.state for slot in slots(node)]
    found: list[str] = []
    for each in names:
        found += [slot[1] for slot in _slots.read(node, (each,))]
        if found and found[-1] is _slots.FREED:
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
    names = _slots.plan(node.__class__).names
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
    if _slots.FREED in states(node):
        _FREED.add(kind)
        return True
    return False


def release(node: Node) -> int:
    """Drop the saved tensors of a node; a later use raises `_slots.RELEASED_TEXT`. Returns how many were dropped."""
    return _slots.drop(node) if works() else 0


def held_by_python(slot: _slots.Slot, slots: list[_slots.Slot]) -> bool:
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
def _answers() -> _self_test.Answers:
    return _self_test.answers()
