"""The record of a program: its passes, which of them freed a node, which variable held it, where a graph ended.

What is noted of a node lies in a dict that the node owns, and dies with it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hodiff._core import _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _saved
from hodiff.graph._names import Mark, NamedVariable, Paths, TensorNames, user_frames
from hodiff.graph._source import Line, Path, line_of, lines_of, quoted

PASSES: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {
    Tensor.backward: ("Tensor.backward", ("tensors", "grads", "retain_graph", "create_graph", "inputs")),
    torch.autograd.backward: (
        "autograd.backward",
        ("tensors", "grads", "retain_graph", "create_graph", "grad_variables", "inputs"),
    ),
    torch.autograd.grad: ("autograd.grad", ("tensors", "inputs", "grads", "retain_graph", "create_graph")),
}
"""The calls that are backward passes, their names, and what their positional arguments are. None is called here."""


class Pass(NamedTuple):
    """A backward pass that was asked for.

    Attributes:
        number: Its number within the watch.
        name: What was called.
        path: The user's frames, the innermost first.
        retained: Whether it was to keep the graph.
        place: How many nodes had been made before.
        repeat: How many passes the same stack of lines had asked for before; -1 if that was not
            counted.
        built: Whether it was to build a graph of its result (`create_graph=True`).
    """

    number: int
    name: str
    path: Path
    retained: bool
    place: int
    repeat: int
    built: bool = False

    @property
    def stack(self) -> tuple[Line, ...]:
        """The user's lines, the innermost first."""
        return lines_of(self.path)

    def __str__(self) -> str:
        line = self.stack[0] if self.path else Line("?", 0)
        return f"{quoted(line)}" + (f"   (call #{self.repeat} on that line)" if self.repeat >= 0 else "")


class Change(NamedTuple):
    """A change in place: where, how many passes had been asked for before, and by which function."""

    path: Path
    passes: int
    call: str
    order: int
    view: bool

    @property
    def line(self) -> Line:
        """The user's innermost line."""
        return self.path[0].line


class Lost(NamedTuple):
    """How a tensor came to have no graph (a key of `_cut.CUTS`), and where."""

    kind: str
    line: Line
    call: str


# --- which of the user's lines made which nodes: by the places that nodes get in the order of creation ----------------


LOG = 200_000
"""Entries of the log; then its older half goes, but for each line's first."""


class Log:
    """Intervals of places, each with the path that ran, by its number; in ascending order.

    Each is one entry, which an interrupt leaves whole: in lists beside each other it would shift
    what follows.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int]] = []  # from, to, the line
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, start: int, end: int, line: int) -> None:
        """The nodes `start` ... `end - 1` were made at `line`."""
        entries = self._entries
        before = entries[-1] if entries else (0, 0, -1)
        if before[2] == line and start >= before[1]:
            entries[-1] = before[0], end, line
        else:
            entries.append((start, end, line))
            if len(entries) > LOG:
                self._shorten()
        self._last[line] = end

    def line(self, place: int) -> int | None:
        """The line that made the node at a place; None if it was not seen."""
        index = self._index(place)
        return self._entries[index][2] if index >= 0 and place < self._entries[index][1] else None

    def ran_again(self, place: int, since: int) -> bool:
        """Whether the line that made the node at a place made others at places from `since` on."""
        index = self._index(place)
        return index >= 0 and self._last.get(self._entries[index][2], 0) > since

    def _index(self, place: int) -> int:
        return bisect_right(self._entries, (place, sys.maxsize, 0)) - 1

    def _shorten(self) -> None:
        """Forget the older half, but for the first entry of each line: what is hoisted ran once."""
        half = len(self._entries) // 2
        first = {line: index for index, (_, _, line) in reversed(list(enumerate(self._entries)))}
        self._entries = [
            entry for index, entry in enumerate(self._entries) if index >= half or first[entry[2]] == index
        ]


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
class NodeTags:
    """The marks of one watch. `passes` are the passes that it has seen."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.key = f"hodiff {next(_serial)}"
        self._held = f"{self.key} held"
        self._grad = f"{self.key} grad"
        self._passes = passes

    # --- left by passes ---------------------------------------------------------------------------

    def freed(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Note that a pass freed these nodes."""
        key, inner = self.key, _Tag(call.number)
        for node in nodes:
            if node.__class__ is not _nodes.ACCUMULATE:
                _saved.tags(node)[key] = inner
                continue
            leaf = node.variable
            grad = leaf.grad
            state = (0, 0) if grad is None else (id(grad), _saved.version(grad))
            _saved.tags(node)[key] = _Tag(call.number, _saved.version(leaf), *state)

    def reached(self, call: Pass, nodes: Sequence[Node]) -> None:
        """A pass that keeps its graph gave these leaves a gradient."""
        for node in nodes:
            if node.__class__ is _nodes.ACCUMULATE and (grad := node.variable.grad) is not None:
                _saved.tags(node)[self._grad] = _Tag(call.number, 0, id(grad), _saved.version(grad))

    def name(self, frame: FrameType) -> None:
        """Note on the nodes that variables hold now which those are: a later step may give the names to others."""
        full = len(self._passes) <= FULL_SEARCHES
        names = TensorNames(user_frames(frame), budget=2000 if full else NEAR, results=True)
        with _saved.without_modes():
            for node, held in names.by_node().items():
                _saved.tags(node)[self._held] = (len(self._passes) - 1, held)

    # --- read when one fails ----------------------------------------------------------------------

    def tag(self, node: Node) -> Pass | None:
        """The pass that freed a node, or ran to a leaf."""
        tag = _saved.tags(node).get(self.key)
        return self._passes[tag.number] if tag else None

    def held(self, node: Node) -> tuple[NamedVariable, ...]:
        """The variables that held a node's output after the last pass that found any."""
        return _saved.tags(node).get(self._held, (0, ()))[1]

    def held_at(self, node: Node) -> Pass | None:
        """The last pass after which a variable held a node's output."""
        tag = _saved.tags(node).get(self._held)
        return self._passes[tag[0]] if tag else None

    def moved(self, leaf: Tensor, call: Pass) -> bool:
        """Whether a leaf was changed in place since a pass, if that was the last that reached it."""
        tag = _saved.tags(_nodes.node_of(leaf)).get(self.key)
        return tag is not None and tag.number == call.number and tag.version != _saved.version(leaf)

    def given(self, node: Node) -> Pass | None:
        """The pass whose gradient still lies in a leaf's `.grad`, to which at most the failing one has added."""
        tags, now = _saved.tags(node), node.variable.grad
        tag = max((tags[key] for key in (self.key, self._grad) if key in tags), default=None)
        if tag is None or now is None or id(now) != tag.grad or not bool(now.any()):
            return None
        return self._passes[tag.number] if _saved.version(now) - tag.grad_version in (0, 1) else None

    def untouched(self, leaf: Tensor, call: Pass) -> bool:
        """Whether a leaf's `.grad` is as a pass left it."""
        with _saved.without_modes():
            node = torch.autograd.graph.get_gradient_edge(leaf).node
        tag = _saved.tags(node).get(self.key)
        if tag is None or tag.number != call.number or leaf.grad is None:
            return False
        return (id(leaf.grad), _saved.version(leaf.grad)) == (tag.grad, tag.grad_version)


# --- where graphs ended while a program was recorded ----------------------------------------------


@final
class Cuts:
    """The tensors without a graph whose sources had one, and where they lost it."""

    def __init__(self, path: Callable[[FrameType], Path], tell: Callable[[Lost, Any], None]) -> None:
        self._path = path
        self._tell = tell
        self.known: dict[int, tuple[Any, tuple[Lost, ...]]] = {}
        """The places, by the tensors that are alive."""
        self._off: dict[Path, tuple[str, Line | None]] = {}
        self._stacks: dict[Line, tuple[Line, ...]] = {}
        self._leaves: dict[Lost, list[weakref.ref[Tensor]]] = {}
        self._entering: dict[int, tuple[Lost, ...]] = {}
        self.latest: Lost | None = None
        """Where a value last left PyTorch: as a number, or for NumPy."""

    def __len__(self) -> int:
        return len(self.known)

    def of(self, tensor: Tensor) -> Lost | None:
        """Where a tensor without a graph lost it."""
        return next(iter(self.places(tensor)), None)

    def leaves(self, lost: Lost) -> list[Tensor]:
        """The leaves that were cut off at a place, when it was first met; those that are frozen there."""
        return [leaf for ref in self._leaves.get(lost, ()) if (leaf := ref()) is not None]

    def enter(self, arguments: Any, line: int) -> None:
        """The operation of a line has a graph: of its arguments some may have lost theirs."""
        table, places = self.known, []
        for argument in arguments:
            for each in argument if argument.__class__ in (list, tuple) else (argument,):
                places += self.places(each) if id(each) in table else ()
        if places:
            self._entering[line] = tuple(dict.fromkeys(places))

    def entering(self, line: int | None) -> tuple[Lost, ...]:
        """Where the constants lost their graphs that entered the operation of a line."""
        return self._entering.get(line, ()) if line is not None else ()

    def places(self, tensor: Tensor) -> tuple[Lost, ...]:
        """Where the sources of a tensor without a graph lost theirs; what is frozen comes last."""
        entry = self.known.get(id(tensor))
        return entry[1] if entry and entry[0]() is tensor else ()

    def stack(self, lost: Lost) -> tuple[Line, ...]:
        """The user's lines, the innermost first, that led to one where gradients were switched off."""
        return self._stacks.get(lost.line, (lost.line,))

    def note(self, func: Any, kind: int, arguments: Any, result: Any, frame: FrameType) -> None:
        """The result has no graph: was one cut here, or before?"""
        name, sources = getattr(func, "__name__", ""), tensors_in(arguments)
        if not any(tensor.requires_grad for tensor in sources):
            self._inherit(name, sources, result, frame)
            return
        if kind == CUT:
            lost, line = "constant" if name in LEAVING else "detached", None
        else:
            lost, line = self._reason(result, frame)
            if lost == "constant" and name in _messages.CONSTANTS:
                lost = "smooth"
        if name in _COPIES and isinstance((*arguments[0], None)[0], Tensor):
            name = COPY
        place = Lost(lost, line or self._path(frame)[0].line, name)
        if place not in self._leaves:
            nodes = _nodes.walk([tensor.grad_fn for tensor in sources])
            below = [leaf for node in nodes if (leaf := _saved.leaf(node)) is not None]
            own = [tensor for tensor in sources if tensor.is_leaf and tensor.requires_grad]
            self._leaves[place] = [weakref.ref(leaf) for leaf in own + below]
        if name in LEAVING or name == COPY:
            self.latest = place
        self.cut(result, place, arguments)

    def _inherit(self, name: str, sources: list[Tensor], result: Any, frame: FrameType) -> None:
        """Nothing that went in has a graph: what comes out lost it where those did that had one."""
        before = list(dict.fromkeys(place for tensor in sources for place in self.places(tensor)))
        frozen = [tensor for tensor in sources if isinstance(tensor, nn.Parameter)]
        if frozen:
            before.append(Lost("frozen", self._path(frame)[0].line, ""))
            known = self._leaves.setdefault(before[-1], [])
            known += [weakref.ref(tensor) for tensor in frozen if all(ref() is not tensor for ref in known)]
        before.sort(key=lambda place: place.kind == "frozen")
        if before and name in LEAVING:
            self.latest = before[0] if before[0].kind != "frozen" else self.latest
        elif before:
            self.remember(result, *before[:SHOWN])

    def _reason(self, result: Any, frame: FrameType) -> tuple[str, Line | None]:
        """Why an operation on tensors with a graph gave one without; and the line, if it is a checkpoint's."""
        inference = torch.is_inference_mode_enabled()  # which enable_grad() leaves on
        if torch.is_grad_enabled() and not inference:
            floating = any(tensor.is_floating_point() for tensor in tensors_in(result))
            return "constant" if floating or not tensors_in(result) else "discrete", None
        path = self._path(frame)
        if path not in self._off:
            kind, around = surroundings(frame)
            user = next(user_frames(around), None) if kind == "checkpoint" else None
            off = "inference" if inference else "no_grad"
            self._off[path] = kind or off, None if user is None else line_of(user)
            self._stacks.setdefault(path[0].line, lines_of(path))
        return self._off[path]

    def cut(self, result: Any, lost: Lost, sources: Any) -> None:
        """Here the graph of `sources` ended: the result, a tensor, several or a number, is not in it."""
        self.remember(result, lost)
        self._tell(lost, sources)

    def remember(self, result: Any, *places: Lost) -> None:
        """What lost its graph, or what was computed from it: a tensor, or several."""
        table = self.known
        for tensor in tensors_in(result):
            key = id(tensor)
            table[key] = (weakref.ref(tensor, lambda _, key=key: table.pop(key, None)), places)


SHOWN = 4
_COPIES = ("tensor", "as_tensor")
COPY = "copy of a tensor"
"""The name under which `torch.tensor(x)` of one tensor is noted: of several, they can be put together otherwise."""


# --- the record of a program ----------------------------------------------------------------------


class Listener:
    """What is told of each operation and each backward pass under a watch; what it has no use for goes by."""

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """`func` was called with `arguments` (args and kwargs) from `frame`, and gave `result`."""

    def cut(self, lost: Lost, sources: Any) -> None:
        """The graph of `sources` ended at a line."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """A pass will run these nodes."""

    def after(self, record: Record, call: Pass, failed: bool) -> None:
        """The pass has run, or failed; `record` is what was noted of the program."""


class Record:
    """What was noted of a program: its backward passes, the tags that they left, where graphs ended."""

    def __init__(self, *listeners: Listener) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.tags = NodeTags(self.passes)
        self.cuts = Cuts(self._path_of, self._tell)
        self._listeners = listeners
        self._paths = Paths()
        self._log = Log()
        self.once: dict[tuple[str, Line | None], None] = {}
        """The Functions that forbid a second derivative and were differentiated with create_graph: names, lines."""
        self.functions: dict[Line, str] = {}
        """A Python `autograd.Function` in what a line differentiated with create_graph, by its name."""
        self._changed: dict[int, Change] = {}
        self._changes = 0
        self._switched: dict[int, Path] = {}
        self._read: dict[int, int] = {}  # the gradients that the user read, and how many passes there had been
        self._entered: Mark = (None, 0)

    def place(self, frame: FrameType) -> int:
        """By which of the user's lines the code of a frame runs: the number of the path."""
        return self._paths.number(frame, self._entered)

    def _path_of(self, frame: FrameType) -> Path:
        return self._paths[self.place(frame)]

    def _tell(self, lost: Lost, sources: Any) -> None:
        for listener in self._listeners:
            listener.cut(lost, sources)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        for listener in self._listeners:
            listener.stepping(optimizer)

    def _note_gradient(self, gradient: Any, frame: FrameType) -> None:
        """`x.grad`: of interest where the user reads it; an optimizer does so all the time."""
        if isinstance(gradient, Tensor):
            self._read[id(gradient)] = len(self.passes)
            if not gradient.requires_grad:
                self.cuts.remember(gradient, Lost("gradient", line_of(frame), "grad"))

    def note_change(self, name: str, what: Any, place: int) -> None:
        """A function of that name changed one or several tensors in place."""
        self._changes += 1
        view = isinstance(what, Tensor) and _saved.is_view(what)
        change = Change(self._paths[place], len(self.passes), name, self._changes, view)
        for tensor in tensors_in(what):
            self._changed[_saved.memory(tensor)] = change

    def note_switch(self, leaf: Tensor, frame: FrameType) -> None:
        """A line says of a leaf whether it requires grad."""
        self._switched[_saved.memory(leaf)] = self._path_of(frame)

    def trained_by(self, leaf: Tensor) -> Path:
        """The lines of the last pass before a leaf's last step; empty if none was seen."""
        change = self.changed(leaf)
        stepped = change is not None and change.call == "step" and change.passes
        return self.passes[change.passes - 1].path if change is not None and stepped else ()

    def switched(self, leaf: Tensor) -> Path:
        """The user's frames in which a leaf's requires_grad was last set; empty if none was seen."""
        return self._switched.get(_saved.memory(leaf), ())

    def entering(self, nodes: Iterable[Node]) -> list[Lost]:
        """Where the constants among the arguments of some nodes' operations lost their graphs."""
        lines = (self._log.line(_saved.sequence(node)) for node in nodes if _saved.answers().sequences)
        return list(dict.fromkeys(lost for line in lines for lost in self.cuts.entering(line)))

    def changed(self, tensor: Tensor) -> Change | None:
        """What last changed a tensor's memory in place."""
        return self._changed.get(_saved.memory(tensor))

    def _note_functions(self, nodes: Sequence[Node], line: Line) -> None:
        users = {child: node for node in nodes for child in _saved.children(node)}
        for node in filter(_saved.is_function, nodes):
            function = _nodes.function_of(type(node))
            self.functions[line] = function.__name__
            if _nodes.is_once_differentiable(function):  # whose own node is of no line
                self.once[function.__name__, self.made(users.get(node, node))] = None

    def path(self, node: Node | None) -> Path:
        """The user's frames in which a node was made, the innermost first; empty if it was not seen."""
        known = node is not None and _saved.answers().sequences
        number = self._log.line(_saved.sequence(node)) if known else None
        return () if number is None else self._paths[number]

    def made(self, node: Node | None) -> Line | None:
        """The line that made a node; None if it was not seen."""
        path = self.path(node)
        return path[0].line if path else None

    def ran_again(self, node: Node, since: Pass) -> bool:
        """Whether the lines that made a node made others since a pass."""
        return self._log.ran_again(_saved.sequence(node), since.place)

    def read_since(self, call: Pass) -> bool:
        """Whether the user has read some `.grad` since a pass."""
        return any(number > call.number for number in self._read.values())


NOTHING = Record()
"""The record of a program that was not recorded."""


# --- what a call of PyTorch is to the recorder, and what its arguments are ------------------------


OPERATION, INPLACE, CUT, GRADIENT, PLAIN, PASS, SWITCH = range(7)  # what is recorded comes first


def kind_of(func: Callable[..., Any]) -> int:
    """What a function is to the recorder."""
    if func in PASSES:
        return PASS
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _ATTRIBUTES.get((name, getattr(getattr(func, "__self__", None), "__name__", "")), PLAIN)
    if name == "requires_grad_":
        return SWITCH
    if name in _ASKING or (name.startswith("is_") and name != "is_nonzero"):
        return PLAIN
    if name in LEAVING or name in ("detach", "detach_"):
        return CUT
    writes = name == "__setitem__" or name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))
    return INPLACE if writes else OPERATION


_ATTRIBUTES = {
    ("__get__", "data"): CUT,
    ("__get__", "grad"): GRADIENT,
    ("__set__", "data"): INPLACE,  # others, as x.grad = None, change no value
    ("__set__", "requires_grad"): SWITCH,
    **{("__get__", name): OPERATION for name in ("T", "mT", "H", "mH", "real", "imag")},
}
_AUGMENTED = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor"))
_ASKING = frozenset({"size", "dim", "numel", "stride", "storage_offset", "element_size", "get_device", "__len__"})
"""What tells of a tensor what is none of its values."""


LEAVING = frozenset({"item", "tolist", "numpy", "__array__", "__float__"})
"""What gives the values of a tensor to Python or NumPy."""


def roots_of(given: dict[str, Any]) -> list[Node]:
    """The nodes where a pass begins."""
    return [node for item in as_list(given.get("tensors")) or () if (node := _node(item)) is not None]


def _node(item: Any) -> Node | None:
    return _nodes.node_of(item) if isinstance(item, Tensor) else getattr(item, "node", None)


def as_list(value: Any) -> list[Any] | None:
    """What a pass was given, as a list; None stays."""
    if value is None:
        return None
    return [value] if isinstance(value, Tensor) or hasattr(value, "node") else list(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments, and in the containers among them."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (tuple, list, dict)):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [each for item in items if isinstance(item, _HOLDING) for each in tensors_in(item)]


_HOLDING = (Tensor, tuple, list, dict)


def surroundings(frame: FrameType | None) -> tuple[str, FrameType | None]:
    """What of PyTorch runs code with gradients switched off, `checkpoint` or `inside a Function`, and its frame."""
    forwards = _forwards()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("checkpoint.py") and "torch" in file:
            return "checkpoint", frame
        if frame.f_code in forwards:
            return "inside a Function", frame
        frame = frame.f_back
    return "", None


def _forwards() -> set[Any]:
    """The code of each Function's forward: from PyTorch 2.14 on, `apply`, which runs it, has no frame."""
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {getattr(kind.forward, "__code__", None) for kind in kinds}
