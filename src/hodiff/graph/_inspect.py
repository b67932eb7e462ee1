"""What a graph consists of: its nodes, leaves and saved tensors, and who holds their bytes."""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.errors import InputError
from hodiff.graph import _saved, _slots, _traits
from hodiff.graph._names import Names, user_frames
from hodiff.graph._slots import ALIVE, FREED, NONE, PACKED, RELEASED, STALE, UNKNOWN

ROWS = 30
"""Rows of a printed table; the records have all."""


class Saved(NamedTuple):
    """A tensor that a node saved for its backward.

    Attributes:
        name: What the node calls it: `self`, `other`, `result`, `tensors[0]`.
        state: `alive`, `stale` (changed in place since), `freed`, `packed` (behind hooks), `released`
            (by hodiff) or `unknown`.
        shape: Its shape, while it can be seen.
        bytes: The bytes of its whole storage, while it can be seen.
        storage: An identity of that storage: equal numbers share one.
        holder: Who else keeps the storage: `parameter` (a leaf of the graph), `python`, `graph` (nothing
            else that was found), or empty.
        variable: The variable that holds it, if one was found.
    """

    name: str
    state: str
    shape: tuple[int, ...] | None = None
    bytes: int = 0
    storage: int = 0
    holder: str = ""
    variable: str = ""


class NodeRecord(NamedTuple):
    """A node of the graph.

    Attributes:
        place: Its place in `Graph.nodes`.
        name: Its class: `MulBackward0`.
        shape: The shape of its (first) output, if known.
        inputs: The places of the nodes that its gradients go to.
        state: The worst state of what it saved; empty if it saved nothing.
        saved: What it saved.
        variable: The variable that holds its output, if one was found.
    """

    place: int
    name: str
    shape: tuple[int, ...] | None
    inputs: tuple[int, ...]
    state: str
    saved: tuple[Saved, ...]
    variable: str = ""


class Leaf(NamedTuple):
    """A tensor in whose `.grad` the graph ends: where its node is, its name if one was found, shape and bytes."""

    place: int
    name: str
    shape: tuple[int, ...]
    bytes: int


_WORST = (FREED, RELEASED, STALE, UNKNOWN, PACKED, ALIVE, NONE)


@dataclass(frozen=True)
class Graph:
    """The records of a graph; plain data, which keeps nothing alive.

    Attributes:
        nodes: All nodes, outputs first.
        leaves: The leaves among them.
    """

    nodes: tuple[NodeRecord, ...]
    leaves: tuple[Leaf, ...]

    @property
    def saved(self) -> tuple[Saved, ...]:
        """All saved tensors, node by node."""
        return tuple(saved for node in self.nodes for saved in node.saved)

    @property
    def bytes(self) -> int:
        """Bytes of everything saved that can be seen, each storage once."""
        return sum(self.bytes_by_holder.values())

    @property
    def bytes_by_holder(self) -> dict[str, int]:
        """Those bytes by holder. `graph` is what freeing this graph would give back."""
        storages: dict[int, Saved] = {}
        for saved in self.saved:  # of several that saved the same, one may be all that Python holds
            if saved.bytes and (saved.storage not in storages or saved.holder != "graph"):
                storages[saved.storage] = saved
        result = {"graph": 0, "python": 0, "parameter": 0}
        for saved in storages.values():
            result[saved.holder] += saved.bytes
        return result

    @property
    def state(self) -> str:
        """The worst state of any node; empty if nothing was saved."""
        states = {node.state for node in self.nodes}
        return next((state for state in _WORST if state in states), "")

    def __str__(self) -> str:
        table = _rows(self)
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([_summary(self), "", *lines])

    def __repr__(self) -> str:
        return f"<Graph: {_summary(self)}>"

    def _repr_html_(self) -> str:
        head, *body = _rows(self)
        cells = lambda row, tag: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)  # noqa: E731
        rows = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
        table = f"<table><tr>{cells(head, 'th')}</tr>{rows}</table>"
        return f'<p>{html.escape(_summary(self))}</p><div style="overflow-x:auto">{table}</div>'


def _summary(graph: Graph) -> str:
    held = ", ".join(f"{size:,} B {holder}" for holder, size in graph.bytes_by_holder.items() if size)
    states: dict[str, int] = {}
    for saved in graph.saved:
        states[saved.state] = states.get(saved.state, 0) + 1
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return (
        f"{len(graph.nodes)} nodes, {len(graph.leaves)} leaves; saved tensors: {counts or 'none'}; "
        f"held by: {held or 'nothing'}"
    )


def _rows(graph: Graph) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("node", "output", "variable", "saves", "state", "bytes", "held by")]
    leaves = {leaf.place: leaf for leaf in graph.leaves}
    for node in graph.nodes:
        leaf = leaves.get(node.place)
        if leaf is not None:
            table.append(("leaf", _shape(leaf.shape), leaf.name, "", "", "", ""))
            continue
        first = (node.name, _shape(node.shape), node.variable)
        for saved in node.saved or (None,):
            if saved is None:
                table.append((*first, "nothing", "", "", ""))
            else:
                held = f"{saved.holder} {saved.variable}".strip()
                what = f"{saved.name} {_shape(saved.shape)}".strip()
                table.append((*first, what, saved.state, f"{saved.bytes:,}" if saved.bytes else "", held))
            first = ("", "", "")
    if len(table) > ROWS + 1:
        table[ROWS:] = [(f"... {len(table) - ROWS} more rows", *[""] * 6)]
    return table


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else str(tuple(shape))


def inspect(*outputs: Tensor, names: Any = None) -> Graph:
    r"""The graph behind tensors: nodes, leaves, what each node saved, and who holds the bytes.

    A node computes \(\bar x = J^\top \bar y\) for its operation \(y(x)\), and saved what \(J\) needs.

    Args:
        *outputs: Tensors of any shape. One without a graph adds nothing.
        names: A module, a mapping or an object whose tensors give names, beside the caller's variables.

    Returns:
        Records, which print as a table, and as one of HTML in a notebook. They are plain data: no tensor
        is kept alive by them.

    Raises:
        InputError: An output that is no tensor.

    Cost:
        No pass, no memory of tensors; linear, some 10 µs a node (40, where it was freed). Nothing is run or
        changed: no hook, no recomputation of a checkpoint, no freed state. What cannot be seen so is `packed`
        or `unknown`.

    Examples:
        >>> import torch, hodiff
        >>> a = torch.tensor(2.0, requires_grad=True)
        >>> c = a * torch.tensor(3.0)
        >>> graph = hodiff.graph.inspect(c)
        >>> [(node.name, node.state) for node in graph.nodes]
        [('MulBackward0', 'alive'), ('AccumulateGrad', '')]
        >>> c.backward()
        >>> hodiff.graph.inspect(c).state
        'freed'
    """
    _check(outputs)
    with _traits.without_modes():
        found = Names(list(user_frames(sys._getframe(1)))[:1], _roots(names))
        return _read(outputs, found)


def _check(outputs: Sequence[Any]) -> None:
    if not outputs:
        raise InputError("outputs: missing. Give the tensors whose graph to look at: hodiff.graph.inspect(loss).")
    for index, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            raise InputError(f"outputs[{index}]: is a {type(output).__name__}, expected a tensor.")


def _roots(names: Any) -> dict[str, Any]:
    if names is None:
        return {}
    if isinstance(names, nn.Module):
        return dict(names.named_parameters())
    return dict(names) if isinstance(names, dict) else {"": names}


def _read(outputs: Sequence[Tensor], names: Names) -> Graph:
    """One record per node. The names come first: what they find is held by Python anyhow."""
    below = _nodes.walk(_nodes.node_of(output) for output in outputs)
    place = {node: index for index, node in enumerate(below)}
    leaves: list[Leaf] = []
    parameters: dict[int, str] = {}
    for node, index in place.items():
        leaf = _traits.leaf(node) if node.__class__ is _nodes.ACCUMULATE else None
        if leaf is not None:
            shape, storage, size = _traits.measure(leaf)
            parameters[storage] = name = names.of(leaf)
            leaves.append(Leaf(index, name, shape, size))
    records: list[NodeRecord] = []
    at = place.__getitem__
    for (node, index), children in zip(place.items(), below.values(), strict=True):
        records += [_node(node, index, tuple(map(at, children)), parameters, names)]
    return Graph(tuple(records), tuple(leaves))


_new = tuple.__new__
"""Makes a named tuple at a third of the cost: there are two or three for each node."""


def _node(node: Node, place: int, inputs: tuple[int, ...], parameters: dict[int, str], names: Names) -> NodeRecord:
    """The record of one node."""
    slots = _saved.slots(node)
    state, saved = "", ()
    for slot in slots:
        if slot[1] is not NONE:
            state = slot[1] if not state or slot[1] is state else min(state, slot[1], key=_WORST.index)
            saved += (_record(slot, slots, parameters, names),)
    variable = names.nodes.get(node, "")
    return _new(NodeRecord, (place, node.__class__.__name__, _traits.shape(node), inputs, state, saved, variable))


def _record(slot: _slots.Slot, slots: list[_slots.Slot], parameters: dict[int, str], names: Names) -> Saved:
    """The record of one saved tensor: what it is, and who holds it."""
    name, state, value = slot
    if value is None:
        return Saved(name, state)
    shape, storage, size = _traits.measure(value)
    holder, variable = "parameter", parameters.get(storage)
    if variable is None:
        holder, variable = "python", names.storages.get(storage, "")
        if variable:  # of several that share the memory, the one that is that very tensor
            variable = names.tensors.get(id(value), variable)
        else:
            del value  # the slots alone may hold it while references are counted
            holder = "python" if _saved.held_by_python(slot, slots) else "graph"
    return _new(Saved, (name, state, shape, size, storage, holder, variable))
