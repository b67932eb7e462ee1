"""Reading an autograd graph: the walk, and what its nodes give away.

Nothing here runs a hook, unpacks a saved tensor, or changes a graph. Node classes are told apart by
their type, which PyTorch makes once per operation; that keeps the walk at about half a microsecond
per node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

Node = Any
"""An autograd node. (`torch.autograd.graph.Node` is abstract and has no attributes to type-check.)"""

# Every `@once_differentiable` wrapper runs this code object: the one sign of the decorator that is
# visible before the backward pass it guards.
_ONCE_CODE = once_differentiable(lambda ctx: None).__code__


def node_of(tensor: Tensor) -> Node | None:
    """The node that receives `tensor`'s gradient; None when it carries no graph."""
    if not tensor.requires_grad:
        return None
    return tensor.grad_fn or _leaf_node(tensor)


def _leaf_node(leaf: Tensor) -> Node | None:
    """The node of a leaf, by way of a view of it."""
    if leaf.is_inference():  # no graph leads to it, whatever it says
        return None
    if torch.is_inference_mode_enabled():  # where views are not recorded
        with torch.inference_mode(False):
            return _leaf_node(leaf)
    if leaf.is_nested and leaf.layout is torch.strided:  # which has no shape to be viewed as
        with torch.enable_grad():
            return torch.ops.aten.alias.default(leaf).grad_fn.next_functions[0][0]
    return torch.autograd.graph.get_gradient_edge(leaf).node


class Survey:
    """The nodes below some roots, grouped by class. Strong references: drop it before a pass that frees."""

    __slots__ = ("_leaf_ids", "_names", "by_class", "visited")

    def __init__(self, roots: Iterable[Node | None], stop: Collection[Node] = ()) -> None:
        # Every call pays for this loop once or twice: hence its plain look.
        by_class: dict[type, list[Node]] = {}
        visited: set[Node] = {None}  # edges that lead nowhere are None: visited from the start
        stack = [root for root in roots if root is not None]
        while stack:
            node = stack.pop()
            if node in visited:
                continue
            visited.add(node)
            kind = type(node)
            if kind in by_class:
                by_class[kind].append(node)
            else:
                by_class[kind] = [node]
            if stop and node in stop:
                continue
            for below, _ in node.next_functions:
                if below not in visited:
                    stack.append(below)
        self.by_class = by_class
        self.visited = visited
        self._leaf_ids: set[int] | None = None
        self._names: set[str] | None = None

    def named(self, *names: str) -> Iterator[Node]:
        """The nodes whose class has one of `names` (`MulBackward0`, `NotImplemented`, `AccumulateGrad`)."""
        if self.names().isdisjoint(names):
            return
        for kind, nodes in self.by_class.items():
            if kind.__name__ in names:
                yield from nodes

    def names(self) -> set[str]:
        """The class names of all nodes."""
        if self._names is None:
            self._names = {kind.__name__ for kind in self.by_class}
        return self._names

    def functions(self) -> Iterator[tuple[type, list[Node]]]:
        """The Python `autograd.Function`s in the graph, with their nodes."""
        for kind, nodes in self.by_class.items():
            if issubclass(kind, BackwardCFunction):
                yield getattr(nodes[0], "_forward_cls", kind), nodes

    def leaf_ids(self) -> set[int]:
        """The identities of the leaf tensors that would accumulate a gradient."""
        if self._leaf_ids is None:
            self._leaf_ids = {id(node.variable) for node in self.named("AccumulateGrad")}
        return self._leaf_ids

    def contains(self, tensor: Tensor) -> bool:
        """Whether `tensor`, a leaf or not, is in the graph."""
        return tensor.grad_fn in self.visited if tensor.grad_fn is not None else id(tensor) in self.leaf_ids()


def survey(tensors: Iterable[Tensor], stop: Collection[Node] = ()) -> Survey:
    """Walk the graphs of `tensors`, not below the nodes in `stop`."""
    return Survey((node_of(tensor) for tensor in tensors), stop)


def is_once_differentiable(function: type) -> bool:
    """Whether an `autograd.Function`'s backward wears `@once_differentiable`."""
    return getattr(getattr(function, "backward", None), "__code__", None) is _ONCE_CODE


def reaches(nodes: Iterable[Node], tensors: Iterable[Tensor]) -> bool:
    """Whether a path leads from one of `nodes` down to one of `tensors`."""
    nodes = list(nodes)
    if not nodes:
        return False
    graph = Survey(nodes)
    return any(graph.contains(tensor) for tensor in tensors)


def largest_output(graph: Survey) -> int:
    """Elements of the largest tensor that a reverse pass over the graph handles (1 if unknown)."""
    largest = 1
    for nodes in graph.by_class.values():
        for node in nodes:
            for metadata in getattr(node, "_input_metadata", ()):
                size = 1
                for length in getattr(metadata, "shape", ()):
                    size *= int(length) if isinstance(length, int) else 1
                largest = max(largest, size)
    return largest


def runs_hooks(graph: Survey) -> bool:
    """Whether a pass over the graph calls hooks of saved tensors: activation checkpoints, offloading. Runs none."""
    for kind, nodes in graph.by_class.items():
        names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for node in nodes:
            for name in names:
                raw = getattr(node, name)
                for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                    if getattr(saved, "unpack_hook", None) is not None:
                        return True
    return False


def walk(roots: Iterable[Node | None], stop: Collection[Node] = ()) -> dict[Node, list[Node]]:
    """The nodes below `roots`, each once, outputs first, with the nodes that each leads to; none below `stop`."""
    order: dict[Node, list[Node]] = {}
    level = [root for root in roots if root is not None]
    while level:
        following: list[Node] = []
        for node in level:
            if node not in order:
                order[node] = children = [child for child, _ in node.next_functions if child is not None]
                if node not in stop:
                    following += children
        level = following
    return order


def topmost(roots: Iterable[Node | None], chosen: Iterable[Node]) -> list[Node]:
    """Those of `chosen` that a walk from `roots` meets first."""
    chosen = set(chosen)
    return [node for node in walk(roots, chosen) if node in chosen]
