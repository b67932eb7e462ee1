"""A graph before any pass: what it consists of, whether one would succeed, what losses share, what
to give back.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from hodiff._core import _arguments, _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.errors import InputError, printable
from hodiff.graph import _saved
from hodiff.graph._names import TensorNames, user_frames
from hodiff.graph._saved import ALIVE, FREED, NONE, PACKED, RELEASED, STALE, UNKNOWN

UNREACHED = 6
"""Names that a summary lists."""
ROWS = 30
"""Rows of a printed table; the records have all."""


class Saved(NamedTuple):
    """A tensor that a node saved for its backward.

    Attributes:
        name: What the node calls it: `self`, `other`, `result`, `tensors[0]`.
        state: `alive`, `stale` (changed in place since), `freed`, `packed` (behind hooks),
            `released` (by hodiff) or `unknown`.
        shape: Its shape, while it can be seen.
        bytes: The bytes of its whole storage, while it can be seen.
        storage: An identity of that storage: equal numbers share one.
        holder: Who else keeps the storage: `parameter` (a leaf of the graph), `python`, `graph`
            (nothing else that was found), or empty.
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
    """A tensor in whose `.grad` the graph ends: where its node is, its name if one was found,
    shape and bytes.
    """

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
        unreached: Of the parameters and tensors given as `names`, those that the graph does not
            reach: a pass gives them no gradient. Those that require none are marked `(frozen)`.
    """

    nodes: tuple[NodeRecord, ...]
    leaves: tuple[Leaf, ...]
    unreached: tuple[str, ...] = ()

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
        """The saved bytes by holder. `graph` is what freeing this graph would give back."""
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
        table = [[*map(printable, row)] for row in _rows(self)]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([_summary(self), "", *lines])

    def __repr__(self) -> str:
        return f"<Graph: {_summary(self)}>"

    def _repr_html_(self) -> str:
        return _messages.table(_rows(self), _summary(self), heads=1)


def _summary(graph: Graph) -> str:
    held = ", ".join(
        f"{size:,} B {holder}" for holder, size in graph.bytes_by_holder.items() if size
    )
    counts = ", ".join(
        f"{count} {state}" for state, count in Counter(saved.state for saved in graph.saved).items()
    )
    more = f", ... ({len(graph.unreached)})" if len(graph.unreached) > UNREACHED else ""
    missing = (
        f"; not reached: {', '.join(graph.unreached[:UNREACHED])}{more}" if graph.unreached else ""
    )
    return (
        f"{len(graph.nodes)} nodes, {len(graph.leaves)} leaves; saved tensors: {counts or 'none'}; "
        f"held by: {held or 'nothing'}{missing}"
    )


def _rows(graph: Graph) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("node", "output", "variable", "saves", "state", "bytes", "held by")
    ]
    leaves = {leaf.place: leaf for leaf in graph.leaves}
    for node in graph.nodes:
        leaf = leaves.get(node.place)
        if leaf is not None:
            table.append(("leaf", _shape(leaf.shape), leaf.name, "", "", "", ""))
            continue
        first = (node.name, _shape(node.shape), node.variable)
        for saved in node.saved or (Saved("nothing", ""),):
            held = f"{saved.holder} {saved.variable}".strip()
            what = f"{saved.name} {_shape(saved.shape)}".strip()
            size = f"{saved.bytes:,}" if saved.bytes else ""
            table.append((*first, what, saved.state, size, held))
            first = ("", "", "")
    if len(table) > ROWS + 1:
        table[ROWS:] = [(f"... {len(table) - ROWS} more rows", *[""] * 6)]
    return table


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else str(tuple(shape))


def inspect(*outputs: Tensor, names: Any = None) -> Graph:
    r"""The graph behind tensors: nodes, leaves, what each node saved, and who holds the bytes.

    A node computes \(\bar x = J^\top \bar y\) for its operation \(y(x)\), and saved what \(J\)
    needs.

    Args:
        *outputs: Tensors of any shape. One without a graph adds nothing.
        names: A module, a mapping or an object whose tensors give names, beside the caller's
            variables. Of a module's parameters, or a mapping's tensors, `.unreached` lists those
            that the graph does not reach.

    Returns:
        Records, which print as a table, and as one of HTML in a notebook. They are plain data: no
        tensor is kept alive by them.

    Raises:
        InputError: An output that is not a tensor.

    Cost:
        No pass, no memory of tensors; linear, some 10 µs a node (40, where it was freed). Nothing
        is run or changed: no hook, no recomputation of a checkpoint, no freed state. What cannot be
        seen so is `packed` or `unknown`.

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

        Which parameters a loss does not reach:

        >>> net = torch.nn.ModuleDict(
        ...     {"used": torch.nn.Linear(2, 1), "forgotten": torch.nn.Linear(2, 1)}
        ... )
        >>> hodiff.graph.inspect(net["used"](torch.ones(2)), names=net).unreached
        ('forgotten.weight', 'forgotten.bias')
    """
    tensors(outputs, "outputs")
    with _saved.without_modes():
        roots = _roots(names)
        by_name = TensorNames(list(user_frames(sys._getframe(1)))[:1], roots)
        graph, reached = _read(outputs, by_name)
        given = {name: value for name, value in roots.items() if isinstance(value, Tensor)}
        missing = [
            name if tensor.requires_grad else f"{name} (frozen)"
            for name, tensor in given.items()
            if tensor.is_floating_point()
            and (not tensor.requires_grad or _nodes.node_of(tensor) not in reached)
        ]
        return replace(graph, unreached=tuple(missing))


def _roots(names: Any) -> dict[str, Any]:
    if names is None:
        return {}
    if isinstance(names, nn.Module):
        return dict(names.named_parameters())
    return dict(names) if isinstance(names, dict) else {"": names}


def _read(outputs: Sequence[Tensor], names: TensorNames) -> tuple[Graph, Collection[Node]]:
    """One record per node, and the nodes.

    The names come first: what they find is held by Python anyhow.
    """
    below = _nodes.walk(_nodes.node_of(output) for output in outputs)
    place = {node: index for index, node in enumerate(below)}
    leaves: list[Leaf] = []
    parameters: dict[int, str] = {}
    for node, index in place.items():
        leaf = _saved.leaf(node) if node.__class__ is _nodes.ACCUMULATE else None
        if leaf is not None:
            shape, storage, size = _saved.measure(leaf)
            parameters[storage] = name = names.of(leaf)
            leaves.append(Leaf(index, name, shape, size))
    at = place.__getitem__
    records = [
        _node(node, place[node], tuple(map(at, children)), parameters, names)
        for node, children in below.items()
    ]
    return Graph(tuple(records), tuple(leaves)), place


_new = tuple.__new__
"""Makes a named tuple at a third of the cost: there are two or three for each node."""


def _node(
    node: Node, place: int, inputs: tuple[int, ...], parameters: dict[int, str], names: TensorNames
) -> NodeRecord:
    """The record of one node."""
    slots = _saved.slots(node)
    state, saved = "", ()
    for slot in slots:
        if slot[1] is not NONE:
            state = (
                slot[1] if not state or slot[1] is state else min(state, slot[1], key=_WORST.index)
            )
            saved += (_record(slot, slots, parameters, names),)
    variable = names.nodes.get(node, "")
    return _new(
        NodeRecord,
        (place, node.__class__.__name__, _saved.shape(node), inputs, state, saved, variable),
    )


def _record(
    slot: _saved.SavedTensor,
    slots: list[_saved.SavedTensor],
    parameters: dict[int, str],
    names: TensorNames,
) -> Saved:
    """The record of one saved tensor: what it is, and who holds it."""
    name, state, value = slot
    if value is None:
        return Saved(name, state)
    shape, storage, size = _saved.measure(value)
    holder, variable = "parameter", parameters.get(storage)
    if variable is None:
        holder, variable = "python", names.storages.get(storage, "")
        if variable:  # of several that share the memory, the one that is that very tensor
            variable = names.of(value) or variable
        else:
            del value  # the slots alone may hold it while references are counted
            holder = "python" if _saved.held_by_python(slot, slots) else "graph"
    return _new(Saved, (name, state, shape, size, storage, holder, variable))


# --- would this backward pass succeed? And what do several losses share? --------------------------


class Finding(NamedTuple):
    """A node, or a tensor, that stands in the way.

    Attributes:
        node: The class of the node; empty if it is about a tensor.
        reason: `freed`, `stale`, `released`, `unknown`, `missing`, `no graph`, `not a scalar`,
            `complex` or `unused`.
        variable: The variable that holds the node's output, or the tensor; empty if none was found.
        text: The sentence.
    """

    node: str
    reason: str
    variable: str
    text: str


@dataclass(frozen=True, repr=False)
class Prediction(_messages.Reported):
    """The outcome of a backward pass, foretold.

    Attributes:
        verdict: `"ok"`, `"fail"` or `"maybe"`.
        findings: What stands in the way, or might.
        boundary: The variables (or nodes) where the usable part of the graph ends.
    """

    verdict: str
    findings: tuple[Finding, ...] = ()
    boundary: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            {"ok": "ok: it would run", "fail": "fail: it would raise", "maybe": "maybe"}[
                self.verdict
            ]
        ]
        lines += [f"  {finding.text}" for finding in self.findings[:10]]
        if self.findings[10:]:
            lines.append(f"  ... and {len(self.findings) - 10} more")
        if self.boundary:
            lines.append(f"  the part that cannot be used begins at {', '.join(self.boundary)}")
        return "\n".join(lines)


def predict(
    loss: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor] | None = None
) -> Prediction:
    r"""Would `loss.backward()`, or `torch.autograd.grad(loss, inputs)`, succeed now?

    The engine runs the nodes on a path from the loss to the inputs (without inputs: all of them).
    It fails at the first whose saved tensors are freed, or were changed in place since.

    Args:
        loss: A tensor of one element, or several of them.
        inputs: The tensors to differentiate with respect to, of any shape; None means all leaves.

    Returns:
        A record with `.verdict`: `"ok"`, `"fail"`, or `"maybe"` where the graph does not tell (a
        Python `autograd.Function` that was run, which need not use what it saved; an in-place
        operation on a view; a derivative that is missing in PyTorch). Hooks and checkpoints of
        yours are not run, so an exception of their own is not foreseen.

    Raises:
        InputError: `loss` or `inputs` that are not tensors.

    Cost:
        No pass; some 4 µs per node that would run; of a graph that was freed, some 10. No memory of
        tensors; nothing is changed.

    Examples:
        >>> import torch, hodiff
        >>> a = torch.rand(4, requires_grad=True)
        >>> b = a**2
        >>> d, e = b.mean(), b.sum()
        >>> hodiff.graph.predict(e).verdict
        'ok'
        >>> d.backward()
        >>> hodiff.graph.predict(e).verdict
        'fail'
    """
    losses = tensors(loss, "loss")
    wanted = None if inputs is None else tensors(inputs, "inputs")
    with _saved.without_modes():
        return _judged(losses, wanted, TensorNames(list(user_frames(sys._getframe(1)))[:1]))


def tensors(value: Any, name: str) -> list[Tensor]:
    """A tensor, or a sequence of them, as a list."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if not items or not all(isinstance(item, Tensor) for item in items):
        raise InputError(
            f"{name}: got {' and '.join(sorted(set(map(_arguments.kind, items)))) or 'nothing'}, "
            f"expected a tensor, or a list or tuple of tensors."
        )
    return items


def _judged(
    losses: Sequence[Tensor], inputs: Sequence[Tensor] | None, names: TensorNames
) -> Prediction:
    """The verdict, in the names of the user's variables."""
    roots = [_nodes.node_of(loss) for loss in losses]
    findings = _about_tensors(losses, roots, inputs, names)
    if findings:
        return Prediction("fail", tuple(findings))
    troubles: dict[Node, str] = {}
    certain = False
    for node in executed(roots, inputs):
        # where the verdict stands, it only words it
        reason = _saved.trouble(node) if certain else _saved.asked_trouble(node)
        if reason:
            troubles[node] = reason
            certain = certain or not (_saved.is_function(node) or reason in ("unknown", "missing"))
    verdict = "maybe" if troubles else "ok"
    findings = [_finding(node, reason, names) for node, reason in troubles.items()]
    edge = topmost(roots, troubles) if troubles else []
    return Prediction(
        "fail" if certain else verdict, tuple(findings), tuple(label(node, names) for node in edge)
    )


def executed(roots: Iterable[Node | None], inputs: Sequence[Any] | None) -> list[Node]:
    """The nodes that the engine would run: all below `roots`, or those above one of `inputs`."""
    graph = _nodes.walk(roots)
    if inputs is None:
        return list(graph)
    # or GradientEdges
    targets = {_nodes.node_of(item) if isinstance(item, Tensor) else item.node for item in inputs}
    leading = _saved.leading_to(graph, targets)
    return [node for node, children in graph.items() if not leading.isdisjoint(children)]


def label(node: Node, names: TensorNames) -> str:
    """A node for a sentence: its variable, its class, its shape."""
    leaf, shape = _saved.leaf(node), _saved.shape(node)
    variable = names.nodes.get(node, "") if leaf is None else names.of(leaf)
    name = printable(type(node).__name__)
    return (
        f"{f'`{variable}` = ' if variable else ''}{name}{f' {shape}' if shape is not None else ''}"
    )


_REASONS = {
    "freed": "its saved tensors were freed by an earlier pass",
    "stale": "a tensor that it saved was changed in place since",
    "released": "its saved tensors were released by hodiff",
    "unknown": "what it saved cannot be seen from outside",
    "missing": "it stands for a derivative that PyTorch does not have",
}


def _finding(node: Node, reason: str, names: TensorNames) -> Finding:
    text = f"{label(node, names)}: {_REASONS[reason]}"
    if reason == "freed" and _saved.is_function(node):
        text += " (a Python Function, which need not use them)"
    return Finding(type(node).__name__, reason, names.nodes.get(node, ""), text)


def _about_tensors(
    losses: Sequence[Tensor],
    roots: Sequence[Node | None],
    inputs: Sequence[Tensor] | None,
    names: TensorNames,
) -> list[Finding]:
    """Faults of the tensors themselves, before any node is looked at."""
    findings: list[Finding] = []

    def note(tensor: Tensor, reason: str, text: str) -> None:
        name = names.of(tensor) or "a tensor"
        findings.append(Finding("", reason, name, f"{name} {text}"))

    for loss, root in zip(losses, roots, strict=True):
        if root is None:
            note(loss, "no graph", "does not require grad: it has no graph")
        elif loss.numel() != 1:
            note(
                loss,
                "not a scalar",
                f"has {loss.numel()} elements: backward() needs a gradient for them",
            )
        elif loss.is_complex():
            note(
                loss,
                "complex",
                f"is complex ({loss.dtype}): backward() needs a gradient for it, or a real loss",
            )
    reached = set(_nodes.walk(roots)) if inputs is not None and not findings else None
    for tensor in inputs or ():
        node = _nodes.node_of(tensor)
        if node is None:
            note(tensor, "no graph", "does not require grad")
        elif reached is not None and node not in reached:
            note(
                tensor,
                "unused",
                "is not in the graph: autograd.grad raises, unless allow_unused=True",
            )
    return findings


@dataclass(frozen=True, repr=False)
class Shared(_messages.Reported):
    """The parts that several losses have in common.

    Attributes:
        nodes: How many nodes at least two of the losses reach.
        bytes: Bytes saved in those, each storage once.
        private_nodes: For each loss, how many nodes only it reaches.
        private_bytes: For each loss, the bytes saved in those.
        boundary: Where the losses' own parts end: variables, or node names.
    """

    nodes: int
    bytes: int
    private_nodes: tuple[int, ...]
    private_bytes: tuple[int, ...]
    boundary: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"shared by two losses or more: {self.nodes} nodes, {self.bytes:,} B saved"]
        if self.boundary:
            lines.append(f"  it begins at {', '.join(self.boundary)}")
        for index, (nodes, size) in enumerate(
            zip(self.private_nodes, self.private_bytes, strict=True)
        ):
            lines.append(f"loss {index} alone: {nodes} nodes, {size:,} B saved")
        return "\n".join(lines)


def shared(*losses: Tensor) -> Shared:
    """The nodes and bytes that several losses share, and where the shared part begins.

    A node is shared if at least two losses reach it; the boundary is met first on the way down.

    Args:
        *losses: Two tensors or more, of any shape.

    Returns:
        A record; it prints as a few lines.

    Raises:
        InputError: Fewer than two, or something that is not a tensor.

    Cost:
        No pass; linear in the nodes, some 10 µs each. No memory of tensors; nothing is changed.

    Examples:
        >>> import torch, hodiff
        >>> a = torch.rand(4, requires_grad=True)
        >>> b = a**2
        >>> print(hodiff.graph.shared(b.mean(), b.sum()))
        shared by two losses or more: 2 nodes, 16 B saved
          it begins at `b` = PowBackward0 (4,)
        loss 0 alone: 1 nodes, 0 B saved
        loss 1 alone: 1 nodes, 0 B saved
    """
    if len(losses) < 2:
        raise InputError(
            f"losses: {len(losses)} given; give two or more, one by one: shared(d, e)."
        )
    with _saved.without_modes():
        roots = tensors(losses, "losses")
        reached = [_nodes.walk([_nodes.node_of(loss)]) for loss in roots]
        counts = Counter(node for nodes in reached for node in nodes)
        common = {node for node, count in counts.items() if count > 1}
        private = [[node for node in nodes if node not in common] for nodes in reached]
        names = TensorNames(list(user_frames(sys._getframe(1)))[:1])
        edge = topmost([_nodes.node_of(loss) for loss in roots], common)
        sizes = [saved_bytes(nodes) for nodes in private]
        labels = tuple(label(node, names) for node in edge)
        return Shared(
            len(common), saved_bytes(common), tuple(map(len, private)), tuple(sizes), labels
        )


def saved_bytes(nodes: Iterable[Node]) -> int:
    """Bytes of what the nodes saved, as far as it can be seen, each storage once."""
    slots = (slot for node in nodes for slot in _saved.slots(node))
    return sum(
        dict(_saved.storage(slot.value) for slot in slots if slot.value is not None).values()
    )


def topmost(roots: Iterable[Node | None], chosen: Iterable[Node]) -> list[Node]:
    """The nodes of `chosen` that a walk from `roots` meets first."""
    chosen = set(chosen)
    return [node for node in _nodes.walk(roots, chosen) if node in chosen]


# --- giving back what chosen nodes saved, without running them ------------------------------------


class Released(NamedTuple):
    """The number of nodes released, and the bytes of their saved values that could be seen.

    A storage that something else holds as well is not returned by it.
    """

    nodes: int
    bytes: int


def release(loss: Tensor | Sequence[Tensor], keep: Tensor | Sequence[Tensor] = ()) -> Released:
    """Drop what the nodes of a graph saved, after the forward and without a backward pass.

    Released are the nodes that `loss` reaches and nothing in `keep` does. A pass that needs one of
    them raises `GraphError`, in our words. Tensors, `.grad` and the nodes themselves stay.

    Args:
        loss: A tensor of any shape, or several.
        keep: Tensors whose graphs must stay usable.

    Returns:
        How many nodes had something released, and its bytes.

    Raises:
        InputError: Something that is not a tensor.

    Cost:
        No pass; some 10 µs per node. What is packed (checkpoints, `save_on_cpu`) or cannot be seen
        stays as it is: it has hooks of its own.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.rand(1000, requires_grad=True)
        >>> trunk = x.exp()
        >>> first, second = trunk.sin().sum(), trunk.cos().sum()
        >>> hodiff.graph.release(first, keep=second)
        Released(nodes=1, bytes=4000)
        >>> hodiff.graph.predict(first).verdict, hodiff.graph.predict(second).verdict
        ('fail', 'ok')
    """
    given = tensors(loss, "loss")
    kept = [] if isinstance(keep, (tuple, list)) and not keep else tensors(keep, "keep")
    with _saved.without_modes():
        stay = set(_nodes.walk(map(_nodes.node_of, kept)))
        count, sizes = 0, {}
        for node in _nodes.walk(map(_nodes.node_of, given)).keys() - stay:
            values = [slot.value for slot in _saved.slots(node)]
            mine = dict(_saved.storage(value) for value in values if value is not None)
            if _saved.release(node):
                count += 1
                sizes.update(mine)
        return Released(count, sum(sizes.values()))
