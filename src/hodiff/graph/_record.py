"""The record of a program: its passes, which of them freed a node, which variable held it, where a
graph ended.

What is noted of a node lies in a dict that the node owns, and dies with it.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hodiff._core import _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _saved
from hodiff.graph._names import Mark, NamedVariable, Paths, TensorNames, is_users, user_frames
from hodiff.graph._source import Line, Path, line_of, lines_of, quoted

PASSES: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {
    Tensor.backward: (
        "Tensor.backward",
        ("tensors", "grads", "retain_graph", "create_graph", "inputs"),
    ),
    torch.autograd.backward: (
        "autograd.backward",
        ("tensors", "grads", "retain_graph", "create_graph", "grad_variables", "inputs"),
    ),
    torch.autograd.grad: (
        "autograd.grad",
        ("tensors", "inputs", "grads", "retain_graph", "create_graph"),
    ),
}
"""The calls that are backward passes, their names, and what their positional arguments are.

None is called here.
"""


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
        return f"{quoted(line)}" + (
            f"   (call #{self.repeat} on that line)" if self.repeat >= 0 else ""
        )


class Change(NamedTuple):
    """A change in place: where, how many passes had been asked for and nodes made before,
    and by which function.
    """

    path: Path
    passes: int
    call: str
    place: int

    @property
    def line(self) -> Line:
        """The user's innermost line."""
        return self.path[0].line


class Switch(NamedTuple):
    """The switch that had gradients off: its line, in words how,
    and the line that called a decorated function.
    """

    line: Line | None
    how: str = ""
    caller: Line | None = None


@dataclass(eq=False, slots=True)
class Cut:
    """The way in which one tensor came to have no graph; each call that cuts is one of its own.

    Attributes:
        kind: A class of `_classes.CLASSES`.
        place: The number of `path`.
        path: The user's frames in which it was cut, the innermost first.
        call: The function.
        off: What had switched gradients off.
        refs: The leaves that were behind it then.
        behind: The cuts that were behind it.
        exact: Whether that was looked up at this very call, not at an earlier one of the same
            lines.
    """

    kind: str
    place: int
    path: Path
    call: str
    off: Switch | None = None
    refs: tuple[weakref.ref[Tensor], ...] = ()
    behind: tuple[Cut, ...] = ()
    exact: bool = True

    @property
    def line(self) -> Line:
        """The user's innermost line."""
        return self.path[0].line

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves behind it that are alive."""
        return [leaf for ref in self.refs if (leaf := ref()) is not None]


def joined(cuts: Iterable[Cut]) -> tuple[Cut, ...]:
    """Cuts of the same lines as one, with the leaves of each; those that one line switched off,
    by the first.
    """
    ones: dict[tuple[Any, ...], Cut] = {}
    for cut in cuts:
        key = (cut.kind, cut.place, cut.call) if cut.off is None else (cut.kind, *cut.off)
        one = ones.setdefault(key, cut)
        if one is not cut:
            refs = tuple(dict.fromkeys(one.refs + cut.refs))
            behind = tuple(dict.fromkeys(one.behind + cut.behind))[:SHOWN]
            exact = one.exact and cut.exact
            ones[key] = replace(one, refs=refs, behind=behind, exact=exact)
    return tuple(ones.values())[:SHOWN]


SHOWN = 8
"""Cuts that are kept of one tensor."""


# --- which of the user's lines made which nodes: by the places that nodes get in the order of
# creation


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
            entry
            for index, entry in enumerate(self._entries)
            if index >= half or first[entry[2]] == index
        ]


_serial = itertools.count()

FULL_SEARCHES = 8
"""Passes after which all variables in sight are looked at; later ones look at the nearest only."""
NEAR = 150


@final
class NodeTags:
    """The marks of one watch: on a node the pass that freed it, on a leaf also its version."""

    def __init__(self) -> None:
        self.key = f"hodiff {next(_serial)}"
        self._held = f"{self.key} held"

    # --- left by passes ---------------------------------------------------------------------------

    def freed(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Note that a pass freed these nodes."""
        mark = call, -1
        for node in nodes:
            is_leaf = node.__class__ is _nodes.ACCUMULATE
            _saved.tags(node)[self.key] = (call, _saved.version(node.variable)) if is_leaf else mark

    def name(self, call: Pass, frame: FrameType) -> None:
        """Note on the nodes that variables hold after a pass which those are:
        a later step may give the names to others.
        """
        full = call.number < FULL_SEARCHES
        names = TensorNames(user_frames(frame), budget=2000 if full else NEAR, results=True)
        with _saved.without_modes():
            for node, held in names.by_node().items():
                _saved.tags(node)[self._held] = call, held

    # --- read when one fails ----------------------------------------------------------------------

    def tag(self, node: Node) -> Pass | None:
        """The pass that freed a node, or ran to a leaf."""
        return _saved.tags(node).get(self.key, (None, -1))[0]

    def held(self, node: Node) -> tuple[Pass | None, tuple[NamedVariable, ...]]:
        """The last pass after which a variable held a node's output, and all variables that did."""
        return _saved.tags(node).get(self._held, (None, ()))

    def moved(self, node: Node, call: Pass) -> bool:
        """Whether the leaf of a node was changed in place since a pass,
        if that was the last that reached it.
        """
        last, version = _saved.tags(node).get(self.key, (None, -1))
        return last is call and version != _saved.version(node.variable)


# --- where graphs ended while a program was recorded ----------------------------------------------


class Origin(NamedTuple):
    """A tensor without a graph: what made it, the cuts behind it,
    and what had switched gradients off then.
    """

    ref: weakref.ref[Tensor]
    cuts: tuple[Cut, ...]
    place: int
    call: str
    off: Switch | None


WALKED = 100_000
"""Nodes that the cuts of one line may look at;
then what an earlier call of the line found is taken.
"""


@final
class Cuts:
    """The tensors without a graph: where those whose sources had one lost it;
    and which lines read which leaf.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._key = f"hodiff {next(_serial)} cuts"
        self.known: dict[int, Origin] = {}
        """The origins of the tensors that are alive, by their identities."""
        self._around: dict[int, tuple[str, int]] = {}
        self._walked: dict[int, int] = {}
        self._found: dict[int, Cut] = {}
        self._uses: dict[int, tuple[weakref.ref[Tensor], deque[int]]] = {}
        self._has_entered = False
        self.latest: Cut | None = None
        """Where a value last left PyTorch: as a number, or for NumPy."""
        self.off: Switch | None = None
        self.inference: Switch | None = None
        self._before: dict[int, Switch | None] = {}

    # --- asked when a pass fails ------------------------------------------------------------------

    def origin(self, tensor: Tensor) -> Origin | None:
        """The call that made a tensor without a graph, if it was seen."""
        entry = self.known.get(id(tensor))
        return entry if entry and entry.ref() is tensor else None

    def places(self, tensor: Tensor) -> tuple[Cut, ...]:
        """The places where the sources of a tensor without a graph lost theirs;
        frozen tensors come last.
        """
        entry = self.origin(tensor)
        return entry.cuts if entry is not None else ()

    def entering(self, node: Node) -> tuple[Cut, ...]:
        """The cuts behind the constants that entered the operation of a node."""
        return _saved.tags(node).get(self._key, ()) if self._has_entered else ()

    def uses(self, leaf: Tensor) -> list[Line]:
        """The last lines whose operations read a leaf."""
        ref, places = self._uses.get(id(leaf), (lambda: None, ()))
        return [self._record.paths[place][0].line for place in places] if ref() is leaf else []

    # --- switches: they are told by line, and by what decorates a function ------------------------

    def switched(self, on: bool, frame: FrameType | None) -> None:
        """Gradients were switched on or off, by a context, a decorator or a statement."""
        step, context = "", None
        while (
            frame is not None
            and frame.f_code.co_filename == _SWITCHING
            and frame.f_code.co_name != "clone"
        ):
            step, context = frame.f_code.co_name, frame.f_locals.get("self")
            frame = frame.f_back
        # what decorates is made anew for each call
        if frame is not None and frame.f_code.co_name == "clone":
            frame = frame.f_back
        self.off = self._after(on, step, context, frame, self.off)

    def inferring(self, on: bool, step: str, context: Any, frame: FrameType | None) -> None:
        """Inference mode was entered (`on` is False) or left."""
        self.inference = self._after(on, step, context, frame, self.inference)

    def _after(
        self, on: bool, step: str, context: Any, frame: FrameType | None, now: Switch | None
    ) -> Switch | None:
        """The switch that has gradients off after a step of a context;
        the one before is kept for its end.
        """
        # a set_grad_enabled that decorates undoes what it did when it was made
        if step in ("__exit__", "__call__"):
            return self._before.pop(id(context), None)
        if (
            step != "__enter__"
            or type(context).__name__ != "set_grad_enabled"
            or id(context) not in self._before
        ):
            self._before[id(context)] = now
        return None if on else now or _switch(frame, context)

    # --- noted while a program runs ---------------------------------------------------------------

    def enter(self, arguments: Any, place: int, result: Any) -> None:
        """An operation has a graph: of its arguments some may have lost theirs,
        and some are leaves.
        """
        known, cuts = self.known, ()
        for argument in arguments:
            for each in argument if argument.__class__ in (list, tuple) else (argument,):
                if id(each) in known:
                    cuts += self.places(each)
                if isinstance(each, Tensor) and each.is_leaf and each.requires_grad:
                    self.use(each, place)
        if cuts:
            self._has_entered = True
            for tensor in tensors_in(result) or tensors_in(arguments[:1]):
                if tensor.grad_fn is not None:
                    _saved.tags(tensor.grad_fn)[self._key] = joined(cuts)

    def use(self, leaf: Tensor, place: int) -> None:
        """A line reads a leaf."""
        key = id(leaf)
        entry = self._uses.get(key)
        if entry is None or entry[0]() is not leaf:
            ref = weakref.ref(leaf, partial(self._uses.pop, key))
            entry = self._uses[key] = ref, deque(maxlen=USES)
        if place not in entry[1]:
            entry[1].append(place)

    def note(self, func: Any, kind: int, arguments: Any, result: Any, frame: FrameType) -> None:
        """The result has no graph: was one cut here, or before?"""
        name, sources = getattr(func, "__name__", ""), tensors_in(arguments)
        place = self._record.place(frame)
        graphs = [tensor for tensor in sources if tensor.requires_grad]
        if not graphs:
            self._inherit(name, sources, result, place)
            return
        for each in graphs:
            if each.is_leaf:
                self.use(each, place)
        off = None
        if kind == CUT:
            reason = "made a constant" if name in LEAVING else "detached"
        else:
            reason, off, place = self._reason(result, frame, place)
            if reason == "made a constant" and name in _messages.CONSTANTS:
                reason = "undeclared derivative"
        if name in _COPIES and isinstance((*arguments[0], None)[0], Tensor):
            name = COPY
        cut = self.cut(reason, place, name, graphs if tensors_in(result) else (), off)
        if name in LEAVING or name == COPY:
            self.latest = cut
        before = [
            each for tensor in sources if not tensor.requires_grad for each in self.places(tensor)
        ]
        self.remember(result, joined([cut, *before]) if before else (cut,), place, name, off)
        self._record.listener.cut(cut, arguments)

    def _inherit(self, name: str, sources: list[Tensor], result: Any, place: int) -> None:
        """Note a result of inputs without a graph: it lost its own where those did that had one."""
        cuts = [cut for tensor in sources for cut in self.places(tensor)]
        frozen = [tensor for tensor in sources if isinstance(tensor, nn.Parameter)]
        if frozen:
            refs = tuple(map(weakref.ref, frozen))
            cuts.append(Cut("frozen", place, self._record.paths[place], name, None, refs))
        if name in _OF_VALUES and not sources and self.latest is not None:
            cuts.append(replace(self.latest, kind="left", behind=()))
        cuts.sort(key=lambda cut: cut.kind in ("left", "frozen"))
        if name in LEAVING:
            self.latest = (
                cuts[0] if cuts and cuts[0].kind not in ("left", "frozen") else self.latest
            )
        else:
            self.remember(result, joined(cuts), place, name, self.inference or self.off)

    def _reason(self, result: Any, frame: FrameType, place: int) -> tuple[str, Switch | None, int]:
        """Why an operation on tensors with a graph gave one without; what switched them off;
        where.
        """
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            floating = any(tensor.is_floating_point() for tensor in tensors_in(result))
            return (
                "made a constant" if floating or not tensors_in(result) else "discrete",
                None,
                place,
            )
        if place not in self._around:
            kind, around = surroundings(frame)
            user = next(user_frames(around), None) if kind == "checkpoint" else None
            self._around[place] = kind, place if user is None else self._record.place(user)
        kind, outer = self._around[place]
        if kind:
            return kind, None, outer
        return "gradients off", self.inference or self.off, place

    def cut(
        self, kind: str, place: int, call: str, graphs: Iterable[Tensor], off: Switch | None = None
    ) -> Cut:
        """A cut, with what is behind it: the leaves of some tensors,
        and the cuts that entered their graphs.
        """
        earlier = self._found.get(place)
        if (
            earlier is not None
            and self._walked[place] > WALKED
            and None not in [ref() for ref in earlier.refs]
        ):
            return replace(earlier, kind=kind, call=call, off=off, exact=False)
        graphs = list(graphs)
        nodes = _nodes.walk([tensor.grad_fn for tensor in graphs if tensor.grad_fn is not None])
        leaves = [node.variable for node in nodes if node.__class__ is _nodes.ACCUMULATE]
        leaves += [tensor for tensor in graphs if tensor.grad_fn is None]
        behind = [cut for node in nodes for cut in self.entering(node)]
        behind += [cut for leaf in leaves for cut in self.places(leaf)]
        refs = tuple(dict.fromkeys(map(weakref.ref, leaves)))
        cut = Cut(kind, place, self._record.paths[place], call, off, refs, joined(behind))
        self._found[place] = cut
        self._walked[place] = self._walked.get(place, 0) + len(nodes)
        return cut

    def remember(
        self, result: Any, cuts: tuple[Cut, ...], place: int, call: str, off: Switch | None = None
    ) -> None:
        """Note the call that made a tensor without a graph, or several,
        and where it was cut off.
        """
        known = self.known
        for tensor in tensors_in(result):
            key = id(tensor)
            ref = weakref.ref(tensor, partial(known.pop, key))
            known[key] = Origin(ref, cuts, place, call, off)


USES = 3
"""Lines that are kept of those that read a leaf: the last."""
_COPIES = ("tensor", "as_tensor")
_OF_VALUES = (*_COPIES, "asarray", "from_numpy", "scalar_tensor", "full")
COPY = "copy of a tensor"
"""The name under which `torch.tensor(x)` of one tensor is noted: of several,
they can be put together otherwise.
"""
_SWITCHING = os.path.join(os.path.dirname(torch.__file__), "autograd", "grad_mode.py")


def _switch(frame: FrameType | None, context: Any) -> Switch:
    """The cause of gradients being off: a context, a statement, or the decorator of a function,
    whose first line it is.
    """
    user = next(user_frames(frame), None)
    line = None if user is None else line_of(user)
    name = type(context).__name__ if context is not None else ""
    how = f"{name} was given False" if name == "set_grad_enabled" else name
    names = frame.f_locals if frame is not None and not is_users(frame.f_code) else {}
    code = getattr(names.get("func"), "__code__", None)
    if code is None:
        return Switch(line, how)
    if not is_users(code):
        return Switch(line, f"{how} decorates {code.co_name}, which this line calls")
    return Switch(
        Line(code.co_filename, code.co_firstlineno), f"{how} decorates {code.co_name}", line
    )


# --- the record of a program ----------------------------------------------------------------------


class Listener:
    """The receiver of each operation and each backward pass under a watch; it ignores those that it
    has no use for.
    """

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """`func` was called with `arguments` (args and kwargs) from `frame`, and gave `result`."""

    def cut(self, cut: Cut, sources: Any) -> None:
        """The graph of `sources` ended."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """A pass will run these nodes."""

    def after(self, record: Record, call: Pass, failed: bool) -> None:
        """The pass has run, or failed; `record` is what was noted of the program."""


NOBODY = Listener()

CHANGES = 8
"""Changes of one memory that are kept: the last."""


class Record:
    """The notes on a program: its backward passes, the tags that they left, where graphs ended."""

    def __init__(self, listener: Listener = NOBODY) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.tags = NodeTags()
        self.listener = listener
        self.paths = Paths()
        self.cuts = Cuts(self)
        self._log = Log()
        self.once: dict[tuple[str, Line | None], None] = {}
        """The Functions that forbid a second derivative and were differentiated with create_graph:
        names, lines.
        """
        self.functions: dict[Line, str] = {}
        """A Python `autograd.Function` in what a line differentiated with create_graph,
        by its name.
        """
        self._changed: dict[int, deque[Change]] = {}
        self._switched: dict[int, Path] = {}
        self.without: deque[tuple[weakref.ref[Tensor], Line]] = deque(maxlen=16)
        """The tensors whose `.grad` was read and was None, and the lines."""
        self._entered: Mark = (None, 0)

    def place(self, frame: FrameType) -> int:
        """The number of the path of the user's lines by which the code of a frame runs."""
        return self.paths.number(frame, self._entered)

    def _note_gradient(self, gradient: Any, tensor: Tensor, frame: FrameType) -> None:
        """`x.grad`: of interest where the user reads it; an optimizer does so all the time."""
        if gradient is None:
            self.without.append((weakref.ref(tensor), line_of(frame)))
        elif isinstance(gradient, Tensor) and not gradient.requires_grad:
            place = self.place(frame)
            self.cuts.remember(
                gradient, (self.cuts.cut("first gradient", place, "grad", [tensor]),), place, "grad"
            )

    def note_change(self, name: str, what: Any, place: int, before: int) -> None:
        """A function of that name changed one or several tensors in place;
        so many nodes were there before.
        """
        change = Change(self.paths[place], len(self.passes), name, before)
        for tensor in tensors_in(what):
            changes = self._changed.setdefault(_saved.memory(tensor), deque(maxlen=CHANGES))
            changes.append(change)

    def note_switch(self, leaf: Tensor, frame: FrameType) -> None:
        """A line says of a leaf whether it requires grad."""
        self._switched[_saved.memory(leaf)] = self.paths[self.place(frame)]

    def switched(self, leaf: Tensor) -> Path:
        """The user's frames in which a leaf's requires_grad was last set;
        empty if none was seen.
        """
        return self._switched.get(_saved.memory(leaf), ())

    def changes(self, tensor: Tensor, since: int = -1) -> list[Change]:
        """The changes in place of a tensor's memory, after the node of a place was made."""
        return [
            change
            for change in self._changed.get(_saved.memory(tensor), ())
            if change.place > since
        ]

    def changed(self, tensor: Tensor) -> Change | None:
        """The last change in place of a tensor's memory."""
        return next(reversed(self.changes(tensor)), None)

    def _note_functions(self, nodes: Sequence[Node], line: Line) -> None:
        users = {child: node for node in nodes for child in _saved.children(node)}
        for node in filter(_saved.is_function, nodes):
            function = _saved.function_of(type(node))
            self.functions[line] = function.__name__
            if _nodes.is_once_differentiable(function):  # whose own node is of no line
                self.once[function.__name__, self.made(users.get(node, node))] = None

    def path(self, node: Node | None) -> Path:
        """The user's frames in which a node was made, the innermost first;
        empty if it was not seen.
        """
        known = node is not None and _saved.answers().sequences
        number = self._log.line(_saved.sequence(node)) if known else None
        return () if number is None else self.paths[number]

    def made(self, node: Node | None) -> Line | None:
        """The line that made a node; None if it was not seen."""
        path = self.path(node)
        return path[0].line if path else None

    def making(self, tensor: Tensor) -> Path:
        """The user's frames in which a tensor was made, or was said to require grad;
        empty if it was not seen.
        """
        if tensor.grad_fn is not None:
            return self.path(tensor.grad_fn)
        origin, switched = self.cuts.origin(tensor), self.switched(tensor)
        if switched and tensor.requires_grad:
            return switched
        return () if origin is None else self.paths[origin.place]

    def maker(self, tensor: Tensor) -> Line | None:
        """The innermost line of these frames."""
        path = self.making(tensor)
        return path[0].line if path else None

    def ran_again(self, node: Node, since: Pass) -> bool:
        """Whether the lines that made a node made others since a pass."""
        return self._log.ran_again(_saved.sequence(node), since.place)


NOTHING = Record()
"""The record of a program that was not recorded."""


# --- what a call of PyTorch is to the recorder, and what its arguments are ------------------------


# what is recorded comes first
OPERATION, INPLACE, CUT, SWITCH, GRADIENT, PLAIN, PASS, MODE = range(8)


def kind_of(func: Callable[..., Any]) -> int:
    """The kind of a function, as the recorder distinguishes them."""
    if func in PASSES:
        return PASS
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _ATTRIBUTES.get(
            (name, getattr(getattr(func, "__self__", None), "__name__", "")), PLAIN
        )
    if name == "requires_grad_":
        return SWITCH
    if name == "_set_grad_enabled":
        return MODE
    if name in _ASKING or (name.startswith("is_") and name != "is_nonzero"):
        return PLAIN
    if name in LEAVING or name in ("detach", "detach_"):
        return CUT
    writes = (
        name == "__setitem__"
        or name in _AUGMENTED
        or (name.endswith("_") and not name.endswith("__"))
    )
    return INPLACE if writes else OPERATION


_ATTRIBUTES = {
    ("__get__", "data"): CUT,
    ("__get__", "grad"): GRADIENT,
    ("__set__", "data"): INPLACE,  # others, as x.grad = None, change no value
    ("__set__", "requires_grad"): SWITCH,
    **{("__get__", name): OPERATION for name in ("T", "mT", "H", "mH", "real", "imag")},
}
_AUGMENTED = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor")
)
_ASKING = frozenset(
    {"size", "dim", "numel", "stride", "storage_offset", "element_size", "get_device", "__len__"}
)
"""What tells of a tensor what is none of its values."""


LEAVING = frozenset({"item", "tolist", "numpy", "__array__", "__float__"})
"""What gives the values of a tensor to Python or NumPy."""


def roots_of(given: dict[str, Any]) -> list[Node]:
    """The nodes where a pass begins."""
    return [
        node for item in as_list(given.get("tensors")) or () if (node := _node(item)) is not None
    ]


def starts_of(given: dict[str, Any]) -> list[Any] | None:
    """The gradients that a pass begins with, by whichever name they were given."""
    names = ("grads", "gradient", "grad_tensors", "grad_outputs")
    return as_list(next((given[name] for name in names if given.get(name) is not None), None))


def _node(item: Any) -> Node | None:
    return _nodes.node_of(item) if isinstance(item, Tensor) else getattr(item, "node", None)


def as_list(value: Any) -> list[Any] | None:
    """The tensors that a pass was given, as a list; None stays."""
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


def surroundings(frame: FrameType) -> tuple[str, FrameType | None]:
    """The part of PyTorch that runs code with gradients switched off, `checkpoint` or
    `inside a Function`, and its frame.
    """
    forwards = _forwards()
    for around, _ in traceback.walk_stack(frame):
        file = around.f_code.co_filename
        if file.endswith("checkpoint.py") and "torch" in file:
            return "checkpoint", around
        if around.f_code in forwards:
            return "inside a Function", around
    return "", None


def _forwards() -> set[Any]:
    """The code of each Function's forward: from PyTorch 2.14 on, `apply`, which runs it,
    has no frame.
    """
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {getattr(kind.forward, "__code__", None) for kind in kinds}
