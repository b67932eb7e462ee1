"""Reading an autograd graph: the walk, and what its nodes give away.

Nothing here runs a hook, unpacks a saved tensor, or changes a graph. Node classes are told apart by
their type, which PyTorch makes once per operation; that keeps the walk at about half a microsecond
per node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from hodiff._core import _settings, _versions

__all__ = [
    "ACCUMULATE",
    "HIDING",
    "Node",
    "Survey",
    "Use",
    "age",
    "below",
    "coarsest",
    "is_once_differentiable",
    "largest_output",
    "made_since",
    "mark_results",
    "node_of",
    "runs_hooks",
    "saved",
    "survey",
    "walk",
    "without_values",
]

Node = Any
"""An autograd node.

(`torch.autograd.graph.Node` is abstract and has no attributes to type-check.)
"""


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
        with _settings.recording():
            return _leaf_node(leaf)
    strided = leaf.is_nested and leaf.layout is torch.strided  # which has no shape to be viewed as
    with _settings.grad_mode(True):
        node = (torch.ops.aten.alias.default(leaf) if strided else leaf.view_as(leaf)).grad_fn
    # A transform records what leads to its own arguments alone. And no graph leads to a view that
    # was made of a result without grad mode, which says that it requires grad.
    return None if node is None else node.next_functions[0][0]


ACCUMULATE: type = _versions.ACCUMULATE
"""The class of the nodes that stand for leaves."""


MANY = 10_000
"""So many nodes may hang on each other and be freed one from within the other."""

_STRIDE = 4_999
"""Every so manyth node holds all older ones; a prime,
so that of chains beside each other none is passed over.
"""

_age, grad_fn = methodcaller("_sequence_nr"), attrgetter("grad_fn")
_name = attrgetter("__name__")
_variable = attrgetter("variable")

_HELD = "hodiff: older nodes, in the order in which they are freed"


def free_one_by_one(roots: Collection[Node], nodes: Collection[Node]) -> None:
    """See that a large graph whose nodes Python has seen can be freed; `nodes` are all those below
    the roots.

    PyTorch frees graphs without recursion, but for nodes that have a Python object: that one goes
    with its node, and frees the next from within, until after some 40,000 the stack is full and the
    process ends. So the roots, and some nodes below, in case that a tensor in the middle lives
    longest, hold the objects of all older nodes, in blocks that
    they share. A list lets go of its last entry first, here the newest: each node is freed while
    all that it leads to is still held, alone.
    """
    whole = max((root.metadata.get(_HELD, (0,))[0] for root in roots), default=0)
    ordered = [node for node in nodes if node.__class__ is not ACCUMULATE]
    if whole + 1 >= len(ordered):  # as an earlier walk has left it
        return
    ordered.sort(key=_age)
    blocks = [ordered[end : end + _STRIDE] for end in range(0, len(ordered), _STRIDE)]
    tops = set(roots)
    for place, node in enumerate(ordered):
        block, rest = divmod(place, _STRIDE)
        if (not rest or node in tops) and node.metadata.get(_HELD, (0,))[0] < place:
            node.metadata[_HELD] = place, [*blocks[:block], blocks[block][:rest]]


UNREMARKABLE: dict[int, set[type]] = defaultdict(set)
"""Classes of nodes of which nothing need be said, by the order of the derivative."""


HIDING: list[type] = []
"""The classes of nodes of blocks, which make a graph of their own in each pass (see `memory`)."""


class Survey:
    """The nodes below some roots. Strong references: drop it before a pass that frees.

    Attributes:
        nodes: All of them.
        visited: They as keys, and None.
        kinds: Their classes.
    """

    __slots__ = ("_ends", "_leaf_ids", "kinds", "nodes", "visited")

    def __init__(self, roots: Iterable[Node | None], stop: Collection[Node] = ()) -> None:
        # Every call pays for this loop once or twice: it calls nothing.
        # edges that lead nowhere are None: visited from the start
        visited: dict[Node, bool] = {None: True}
        nodes: list[Node] = []
        ends: list[Node] = []
        for root in roots:
            if root not in visited:
                visited[root] = True
                nodes += [root]
        tops = nodes[:]
        for node in nodes:
            if node.__class__ is ACCUMULATE:
                ends += [node]
            elif not stop or node not in stop:
                for below, _ in node.next_functions:
                    if below not in visited:
                        visited[below] = True
                        nodes += [below]
        if nodes[MANY:]:
            free_one_by_one(tops, nodes)
        self.nodes, self._ends = nodes, ends
        self.kinds: Set[type] = dict.fromkeys(map(type, nodes)).keys()
        self.visited = visited
        self._leaf_ids: set[int] | None = None

    def of(self, kind: type) -> list[Node]:
        """The nodes of a class."""
        return [node for node in self.nodes if node.__class__ is kind]

    def named(self, *names: str) -> Iterator[Node]:
        """The nodes whose class has one of `names` (`MulBackward0`, `NotImplemented`,
        `AccumulateGrad`).
        """
        for kind in self.kinds:
            if kind.__name__ in names:
                yield from self.of(kind)

    def names(self) -> set[str]:
        """The class names of all nodes, and of those that blocks hide."""
        names = {*map(_name, self.kinds)}
        for kind in HIDING:
            if kind in self.kinds:
                for node in self.of(kind):
                    names |= node.form.names
        return names

    def operations(self) -> list[str]:
        """The names of all nodes, those that came first in front."""
        return [type(node).__name__ for node in reversed(self.nodes)]

    def functions(self) -> Iterator[tuple[type, list[Node]]]:
        """The Python `autograd.Function`s in the graph, with their nodes."""
        for kind in self.kinds:
            if is_function(kind):
                yield _versions.function_of(kind), self.of(kind)

    def variables(self) -> list[Tensor]:
        """The leaf tensors that would accumulate a gradient."""
        return [*map(_variable, self._ends)]

    def leaf_ids(self) -> set[int]:
        """The identities of the leaves in the graph."""
        if self._leaf_ids is None:
            self._leaf_ids = set(map(id, self.variables()))
        return self._leaf_ids

    def contains(self, tensor: Tensor) -> bool:
        """Whether `tensor`, a leaf or not, is in the graph."""
        return (
            tensor.grad_fn in self.visited
            if tensor.grad_fn is not None
            else id(tensor) in self.leaf_ids()
        )

    def users(self) -> dict[Node, list[Use]]:
        """The arguments that the first result of each node is, outputs first; not of roots."""
        users = defaultdict[Node, list[Use]](list)
        for node in self.nodes:
            for place, (below, number) in enumerate(node.next_functions):
                if below is not None and number == 0:
                    users[below] += [Use(node, place)]
        return users

    def uses(self, tensor: Tensor) -> bool:
        """Whether `tensor`, no leaf, is used: of the outputs of one operation (`chunk`, `unbind`)
        it may be another.
        """
        node, number = tensor.grad_fn, tensor.output_nr
        if node not in self.visited:
            return False
        edges = [edge for each in self.nodes for edge in each.next_functions]
        used = {output for child, output in edges if child is node}
        return not used or number in used  # a root's own outputs are not an edge of any node


def survey(tensors: Iterable[Tensor], stop: Collection[Node] = ()) -> Survey:
    """Walk the graphs of `tensors`, not below the nodes in `stop`."""
    tensors = [*tensors]
    roots = [*map(grad_fn, tensors)]
    return Survey([*map(node_of, tensors)] if None in roots else roots, stop)


class Edge(GradientEdge):
    """The place of a tensor in its graph, for a pass that begins there when the tensor has gone."""

    requires_grad = True
    grad_fn = property(attrgetter("node"))


class Use(NamedTuple):
    """An argument of an operation: its node, and its place among what is differentiated."""

    node: Node
    place: int

    @property
    def kind(self) -> str:
        """The operation, as the class of its node is called: "Addmm"."""
        return self.node.__class__.__name__.removesuffix("Backward0")

    @property
    def edge(self) -> Edge:
        """The place where a pass meets the derivative by the operation's first result."""
        return Edge(self.node, 0)

    def results(self) -> list[tuple[tuple[Any, ...], torch.dtype]]:
        """The shape and the dtype of each result."""
        return _versions.received(self.node)

    def kept(self, name: str) -> Any:
        """The value that the operation has saved under a name;
        an `AttributeError` where there is none.
        """
        value = _versions.kept(self.node, name)
        return value.detach() if isinstance(value, Tensor) else value


def without_values(tensors: Iterable[Tensor]) -> list[Any]:
    """Edges in place of tensors; what has no graph stays."""
    return [x if x.grad_fn is None else Edge(x.grad_fn, x.output_nr) for x in tensors]


def below(tensor: Tensor) -> Survey:
    """The graph that a tensor was computed in, without the tensor."""
    node = tensor.grad_fn
    return Survey([child for child, _ in node.next_functions] if node is not None else ())


def age() -> int:
    """A number that nodes which this thread makes later exceed."""
    with _settings.grad_mode(True):
        return _age(torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn)


def made_since(
    begun: int, outputs: Sequence[Tensor], known: Iterable[Tensor]
) -> tuple[Survey, list[Tensor] | None]:
    """The graph that was made since (see `age`), and the tensors that it begins at.

    None where it begins at one that is neither a leaf nor known.
    """
    edges = {(x.grad_fn, x.output_nr): x for x in known if x.grad_fn is not None}
    stop = {node for node, _ in edges}
    graph = survey(outputs, stop)
    begins = {id(leaf): leaf for leaf in graph.variables()}
    for node in graph.nodes:
        if node.__class__ is ACCUMULATE or node in stop:
            continue
        if _age(node) < begun:
            return graph, None
        for edge in node.next_functions:
            if edge[0] in stop:
                if edge not in edges:
                    return graph, None
                begins[id(edges[edge])] = edges[edge]
    return graph, None if any(x.grad_fn in stop for x in outputs) else [*begins.values()]


RESULT = "a result of hodiff"


def mark_results(tensors: Iterable[Tensor]) -> None:
    """Note on the nodes of differentiable results that the caller was given them."""
    for tensor in tensors:
        node = tensor.grad_fn
        if node is not None:
            node.metadata[RESULT] = True  # pyright: ignore[reportIndexIssue]


def is_result(node: Node) -> bool:
    """Whether the caller was given what the node has made."""
    return RESULT in node.metadata


def leads_past_results(graph: Survey, leaf: Tensor) -> bool:
    """Whether a graph reaches a leaf otherwise than through results that the caller was given."""
    below = {child for node in graph.nodes for child, _ in node.next_functions}
    roots = [node for node in graph.nodes if node not in below]
    return any(
        variable is leaf
        for variable in Survey(roots, {*filter(is_result, graph.nodes)}).variables()
    )


is_once_differentiable = _versions.is_once_differentiable
saved = _versions.look


def see_kept() -> None:
    """Read what calls keep inside of checkpoints as if it were saved without:
    from the first such call on.
    """
    global saved  # noqa: PLW0603
    saved = _versions.saved


def is_function(kind: type) -> bool:
    """Whether a class of nodes is the backward of a Python `autograd.Function`."""
    return issubclass(kind, BackwardCFunction)


class Rare:
    """Nodes of classes that few graphs have, of which something holds;
    to see that there is none compares two sets.
    """

    def __init__(self, *names: str, of_which: Callable[[Node], object]) -> None:
        self._names, self._holds = names, of_which
        self._others: set[type] = set()

    def among(self, graph: Survey) -> list[Node]:
        """The nodes of this kind in a graph."""
        if graph.kinds <= self._others:
            return []
        _versions.prove()
        others = (kind for kind in graph.kinds if kind.__name__ not in self._names)
        self._others.update(kind for kind in others if not is_function(kind))  # made anew, maybe
        return [node for node in graph.named(*self._names) if self._holds(node)]


def hides(node: Node) -> bool:
    """Whether a function of one tensor was written to a view: no node of the graph is its own."""
    return len(node.next_functions) == 1


def has_backward(function: type) -> bool:
    """Whether an `autograd.Function` says how it is differentiated."""
    plain = torch.autograd.Function
    return (
        getattr(function, "backward", None) is not plain.backward
        or getattr(function, "vjp", None) is not plain.vjp
    )


def varying(nodes: Iterable[Node]) -> frozenset[object]:
    """The arguments of which operations are functions."""
    return frozenset(tuple(below is not None for below, _ in node.next_functions) for node in nodes)


def reaches(nodes: Iterable[Node], tensors: Iterable[Tensor]) -> bool:
    """Whether a path leads from one of `nodes` down to one of `tensors`."""
    nodes = list(nodes)
    if not nodes:
        return False
    return any(map(Survey(nodes).contains, tensors))


def largest_output(graph: Survey) -> int:
    """Elements of the largest tensor that a reverse pass over the graph handles (1 if unknown)."""
    shapes = [
        [n for n in shape if n.__class__ is int]  # others are nested
        for node in graph.nodes
        for shape, _ in _versions.received(node)
    ]
    return max([1, *map(math.prod, shapes)])


def coarsest(graph: Survey, like: torch.dtype) -> torch.dtype:
    """The dtype with the fewest digits that a pass over the graph computes in,
    or `like` where none has fewer.
    """
    dtypes = {like}
    for node in graph.nodes:
        dtypes |= {dtype for _, dtype in _versions.received(node)}
    return max(
        (d for d in dtypes if d.is_floating_point or d.is_complex),
        key=lambda dtype: torch.finfo(dtype).eps,
    )


def runs_hooks(graph: Survey) -> bool:
    """Whether a pass over the graph calls hooks of saved tensors: activation checkpoints,
    offloading.

    Runs none.
    """
    return not graph.kinds.isdisjoint(HIDING) or any(map(_versions.is_packed, graph.nodes))


def walk(roots: Iterable[Node | None], stop: Collection[Node] = ()) -> dict[Node, list[Node]]:
    """The nodes below `roots`, each once, outputs first, with the nodes that each leads to;
    none below `stop`.
    """
    roots = [root for root in roots if root is not None]
    met: dict[Node, list[Node]] = {root: [] for root in roots}
    reached = [*met]
    for node in reached:  # which grows; as in a survey, the loop calls nothing
        children = met[node]
        follow = not stop or node not in stop
        for child, _ in node.next_functions:
            if child is not None:
                children += [child]
                if follow and child not in met:
                    met[child] = []
                    reached += [child]
    if reached[MANY:]:
        free_one_by_one(roots, reached)
    return met
