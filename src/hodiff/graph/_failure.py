"""The errors of hodiff's calculus beyond their first sentence: the line, the variable, and what to
do.

In the function form `f` is called once more, under a watch, with the same argument and the same
random numbers; what it did on the way is then recorded, and certain. In the tensor form the forward
pass is past: what is left of it (the states of the graph, the variables and the source) is read,
unless a watch of the user's recorded it.

It is asked through `hodiff._core._messages`, where the package registers it, so that the calculus
need not know of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import CellType, FrameType
from typing import Any

from torch import Tensor

from hodiff._core import _nodes, _settings
from hodiff._core._messages import CONSTANTS, Failure
from hodiff._core._nodes import Node
from hodiff.graph import _cut, _inspect, _saved, _unusable
from hodiff.graph._case import Explanation, Fact, FailedPass, asked_for, body
from hodiff.graph._classes import CLASSES
from hodiff.graph._names import TensorNames, path_of, user_frames
from hodiff.graph._record import (
    GRADIENT,
    NOTHING,
    Cut,
    Listener,
    Pass,
    Record,
    kind_of,
    tensors_in,
)
from hodiff.graph._source import Line, line_of
from hodiff.graph._watch import Watch, recording

SHOWN = 3
"""Lines of one kind that a message shows."""

WALKS = 200
"""How often one run asks whether a cut concerns the argument, which is a walk over a graph;
then it makes no claim.
"""


def words(failure: Failure) -> str:
    """The lines to add to a message; empty if there is nothing to say."""
    frames = list(user_frames(sys._getframe(1)))
    if failure.again is not None:
        return _of_function(failure, failure.again, frames)
    return _of_tensors(failure, frames) if failure.function is None else ""


# --- the function form: f once more, under a watch ------------------------------------------------


class _Clues(Listener):
    """Listens to a run of `f`: where the caller's tensors and ours were used,
    and each place that cut ours off.
    """

    def __init__(self, failure: Failure) -> None:
        self.used: dict[int, Line] = {}
        self.cuts: dict[tuple[str, Line, str], Cut] = {}
        self.walks = 0
        self._sought = {id(tensor) for tensor in [*failure.leaves, *failure.theirs]}
        self._leaves = failure.leaves

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """One call of `f`'s."""
        user = next(user_frames(frame), None)
        line = Line("?", 0) if user is None else line_of(user)
        for tensor in tensors_in(arguments) if getattr(func, "__name__", "") != "__get__" else ():
            if id(tensor) in self._sought:
                self.used.setdefault(id(tensor), line)
        if kind_of(func) == GRADIENT and isinstance(result, Tensor) and not result.requires_grad:
            self.cut(Cut("first gradient", 0, path_of(user), "grad"), arguments)

    def cut(self, cut: Cut, sources: Any) -> None:
        """A place that cut something off: of interest if it was ours."""
        key = cut.kind, cut.line, cut.call
        if key not in self.cuts and self.walks < WALKS:
            self.walks += 1
            if self._reach(tensors_in(sources)):
                self.cuts[key] = cut

    def _reach(self, tensors: Iterable[Tensor]) -> bool:
        with _settings.recording():  # f may have switched them: a leaf has no node then
            nodes = [node for tensor in tensors if (node := _nodes.node_of(tensor)) is not None]
        return bool(nodes) and any(map(_nodes.Survey(nodes).contains, self._leaves))


def _of_function(
    failure: Failure, again: Callable[[], Sequence[Tensor]], frames: list[FrameType]
) -> str:
    clues = _Clues(failure)
    with Watch(clues) as watch:
        outputs = again()
    with _saved.without_modes():
        # Where the result is differentiable, our leaves are views of the caller's tensors: those
        # are below, rightly.
        graph = _nodes.survey(
            outputs, [leaf.grad_fn for leaf in failure.leaves if leaf.grad_fn is not None]
        )
        cause = failure.error.__cause__
        if cause is not None:
            return _from_engine(failure, cause, outputs, frames, watch.record)
        if any(tensor.requires_grad and graph.contains(tensor) for tensor in failure.theirs):
            lines = {
                clues.used[id(tensor)] for tensor in failure.theirs if id(tensor) in clues.used
            }
            return body(Fact("used at", "", line) for line in sorted(lines)[:SHOWN])
        missing = [leaf for leaf in failure.leaves if not graph.contains(leaf)]
        if len(missing) == len(failure.leaves) or (missing and failure.strict):
            return _lost(failure, outputs, missing, frames, watch.record, clues)
        return _blamed(failure, outputs, TensorNames(), watch.record)


def _helps(cut: Cut) -> list[tuple[str, str]]:
    """Advice about a cut; a detach() that only serves NumPy is not the cause."""
    leaves_torch = cut.kind == "detached" and any(
        word in cut.line.text for word in (".numpy(", ".item(", ".tolist(")
    )
    known = CLASSES["made a constant" if leaves_torch else cut.kind]
    way = CONSTANTS.get(cut.call) if cut.kind == "undeclared derivative" else None
    if way:
        return [("helps", f"{way}.")]
    return [("helps", each) for each in ([known.inside] if known.inside else known.helps)]


def _lost(
    failure: Failure,
    outputs: Sequence[Tensor],
    missing: Sequence[Tensor],
    frames: list[FrameType],
    record: Record,
    clues: _Clues,
) -> str:
    """The place where `f` cut its argument off; or that it never used it,
    and what the result was computed from.
    """
    last = {(cut.kind, cut.line) for output in outputs for cut in record.cuts.places(output)[:1]}
    cuts = sorted(clues.cuts.values(), key=lambda cut: (cut.kind, cut.line) not in last)
    floating = [cut for cut in cuts if cut.kind != "discrete"][:SHOWN]
    if clues.walks == WALKS and not floating:
        return ""
    if cuts:
        shown = floating or cuts[:1]
        places = [Fact("cut at", "", cut.line) for cut in shown]
        return body(places, CLASSES[shown[0].kind].what, _helps(shown[0]))

    ids = {id(leaf) for leaf in missing}
    given = [
        name for leaf, name in zip(failure.leaves, failure.names, strict=True) if id(leaf) in ids
    ]
    never = f"no operation in f was given {', '.join(given[:6])}: compute with f's argument"
    names = TensorNames(frames, _closure(failure.function))
    leaves = [
        leaf
        for node in _nodes.walk(map(_nodes.node_of, outputs))
        if (leaf := _saved.leaf(node)) is not None
    ]
    others = sorted({f"`{name}`" for leaf in leaves if (name := names.of(leaf))})[:6]
    there = f"its graph leads to: {', '.join(others)}"
    return body([*([] if ids & clues.used.keys() else [never]), *([there] if others else [])])


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a function closes over."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    pairs = zip(code.co_freevars if code is not None else (), cells or (), strict=False)
    # one that is not filled yet
    return {name: cell.cell_contents for name, cell in pairs if cell != CellType()}


# --- the tensor form: what is left ----------------------------------------------------------------


def _of_tensors(failure: Failure, frames: list[FrameType]) -> str:
    with _saved.without_modes():
        record, cause = recording(), failure.error.__cause__
        if cause is not None:
            return _from_engine(failure, cause, failure.outputs, frames, record)
        untracked = [
            tensor for tensor in [*failure.theirs, *failure.outputs] if not tensor.requires_grad
        ]
        if untracked:
            return _untracked(_case(failure, untracked[:1], frames, record))
        graph = _nodes.survey(failure.outputs)
        if not all(graph.contains(leaf) for leaf in failure.leaves):
            return _body(_cut.not_used(_case(failure, failure.outputs, frames, record)))
        return _blamed(failure, failure.outputs, TensorNames(frames), record)


def _untracked(case: FailedPass) -> str:
    """The place where a tensor lost its graph; nothing if that cannot be told."""
    explanation = _cut.no_graph(case)
    told = explanation is not None and explanation.line("cut", "frozen") is not None
    return _body(explanation) if told else ""


def _body(explanation: Explanation | None) -> str:
    return explanation.body if explanation is not None else ""


# --- both -----------------------------------------------------------------------------------------


def _case(
    failure: Failure,
    tensors: Sequence[Tensor],
    frames: list[FrameType],
    record: Record,
    error: Any = None,
) -> FailedPass:
    """The failing call of hodiff, as if it were a pass."""
    path = path_of(frames[0]) if frames else ()
    call = None
    if record is not NOTHING:
        call = Pass(len(record.passes), "hodiff", path, True, _saved.counter(), -1)
    given = {"tensors": list(tensors), "inputs": list(failure.leaves)}
    return asked_for(error or failure.error, "hodiff", given, frames, record, call)


def _from_engine(
    failure: Failure,
    cause: BaseException,
    outputs: Sequence[Tensor],
    frames: list[FrameType],
    record: Record,
) -> str:
    """The engine refused: what was freed, or changed, and by which line."""
    kind = failure.error._facts.kind
    case = _case(failure, outputs, frames, record, cause)
    if kind == "freed" and failure.function is not None:
        return _freed_by_f(case)
    if kind in ("freed", "changed"):
        return _body((_unusable.freed if kind == "freed" else _unusable.changed)(case))
    return _blamed(failure, outputs, case.names, record)


def _freed_by_f(case: FailedPass) -> str:
    """The pass that `f` ran itself."""
    # Where the freed part begins is exact: a pass of hodiff's over tensors retains what it runs.
    begin = _inspect.topmost(case.roots, case.freed(case.nodes))
    call = next(filter(None, map(case.record.tags.tag, begin)), None)
    if call is None:
        return ""
    reason = "f differentiates by itself, and frees what its result needs."
    help = (
        "leave that pass out of f, take it with hodiff.grad, or let it retain (retain_graph=True)."
    )
    return body([Fact("freed by", "", call.stack[0])], reason, [("helps", help)])


def _blamed(failure: Failure, outputs: Sequence[Tensor], names: TensorNames, record: Record) -> str:
    """The lines, or the variables, of the nodes that the message is about."""
    facts: dict[Fact, None] = {}
    for node in _nodes.walk(map(_nodes.node_of, outputs)):
        line = record.made(node)
        if _is_blamed(failure, node):
            if line is not None:
                facts[Fact("recorded at", "", line)] = None
            elif node in names.nodes:
                facts[Fact("recorded as", text=_inspect.label(node, names))] = None
        # `Function.apply` is not a torch function, which a watch could see: but what is done with
        # its result is.
        elif line is not None and any(
            _saved.is_function(c) and _is_blamed(failure, c) for c in _saved.children(node)
        ):
            facts[Fact("its result is used at ", "", line)] = None
    return body(list(facts)[:SHOWN])


def _is_blamed(failure: Failure, node: Node) -> bool:
    """Whether the error is about this node: by its operation,
    or by the name of its Python Function.
    """
    return failure.error._facts.blame(type(node).__name__, _saved.is_function(node))
