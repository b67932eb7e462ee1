"""What backward passes leave on the nodes of graphs: which pass freed them, and which variables held their outputs.

It lies in a dict that each node owns, and dies with the node.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import NamedTuple, final

import torch
from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _predict, _traits
from hodiff.graph._case import Pass
from hodiff.graph._names import Held, Names, user_frames

_serial = itertools.count()

FULL_SEARCHES = 8
"""Passes after which all variables in sight are looked at; later ones look at the nearest only."""
NEAR = 150


class _Tag(NamedTuple):
    """What a pass leaves on a node: its number; on a leaf also the state of the leaf and of its `.grad`."""

    number: int
    version: int = -1
    grad: int = 0
    grad_version: int = 0


@final
class Marks:
    """The marks of one watch. `passes` are the passes that it has seen."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.key = f"hodiff {next(_serial)}"
        self._held = f"{self.key} held"
        self._grad = f"{self.key} grad"
        self._passes = passes

    # --- left by passes -----------------------------------------------------------------------------------------------

    def freed(self, call: Pass, nodes: Sequence[Node]) -> None:
        """These nodes were freed by a pass."""
        key, inner = self.key, _Tag(call.number)
        for node in nodes:
            if node.__class__ is not _nodes.ACCUMULATE:
                _traits.tags(node)[key] = inner
                continue
            leaf = node.variable
            grad = leaf.grad
            state = (0, 0) if grad is None else (id(grad), _traits.version(grad))
            _traits.tags(node)[key] = _Tag(call.number, _traits.version(leaf), *state)

    def reached(self, call: Pass, nodes: Sequence[Node]) -> None:
        """A pass that keeps its graph gave these leaves a gradient."""
        for node in nodes:
            if node.__class__ is _nodes.ACCUMULATE and (grad := node.variable.grad) is not None:
                _traits.tags(node)[self._grad] = _Tag(call.number, 0, id(grad), _traits.version(grad))

    def name(self, frame: FrameType) -> None:
        """Note on the nodes that variables hold now which those are: a later step may give the names to others."""
        full = len(self._passes) <= FULL_SEARCHES
        names = Names(user_frames(frame), budget=2000 if full else NEAR, results=True)
        with _traits.without_modes():
            for node, held in names.by_node().items():
                _traits.tags(node)[self._held] = (len(self._passes) - 1, held)

    def spent(self, nodes: Mapping[Node, Collection[Node]]) -> list[Node]:
        """Those that a failing pass ran: what it freed, and all above, as a node waits for those."""
        fresh = {node: children for node, children in nodes.items() if self.tag(node) is None}
        return list(_nodes.leading_to(fresh, _predict.having(fresh, "freed")))

    # --- read when one fails ------------------------------------------------------------------------------------------

    def tag(self, node: Node) -> Pass | None:
        """The pass that freed a node, or ran to a leaf."""
        found = _traits.tags(node).get(self.key)
        return self._passes[found.number] if found else None

    def held(self, node: Node) -> tuple[Held, ...]:
        """The variables that held a node's output after the last pass that found any."""
        return _traits.tags(node).get(self._held, (0, ()))[1]

    def held_at(self, node: Node) -> Pass | None:
        """The last pass after which a variable held a node's output."""
        found = _traits.tags(node).get(self._held)
        return self._passes[found[0]] if found else None

    def version_then(self, leaf_node: Node) -> int:
        """A leaf's version when the pass that is its tag ran."""
        found = _traits.tags(leaf_node).get(self.key)
        return found.version if found else -1

    def given(self, node: Node) -> Pass | None:
        """The pass whose gradient still lies in a leaf's `.grad`, to which at most the failing one has added."""
        tags, now = _traits.tags(node), node.variable.grad
        tag = max((tags[key] for key in (self.key, self._grad) if key in tags), default=None)
        if tag is None or now is None or id(now) != tag.grad or not bool(now.any()):
            return None
        return self._passes[tag.number] if _traits.version(now) - tag.grad_version in (0, 1) else None

    def untouched(self, leaf: Tensor, call: Pass) -> bool:
        """Whether a leaf's `.grad` is as a pass left it."""
        with _traits.without_modes():
            node = torch.autograd.graph.get_gradient_edge(leaf).node
        tag = _traits.tags(node).get(self.key)
        if tag is None or tag.number != call.number or leaf.grad is None:
            return False
        return (id(leaf.grad), _traits.version(leaf.grad)) == (tag.grad, tag.grad_version)
