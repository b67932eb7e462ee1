"""A backward pass met a part of the graph that was freed: which part, by which pass, why it was met again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType

from torch import Tensor

from hodiff._core._nodes import Node
from hodiff.graph import _causes, _inference, _inspect, _names, _saved, _source
from hodiff.graph._case import PARAMETRIZED, Evidence, Explanation, FailedPass, SharedValue, memoised, said
from hodiff.graph._names import NamedVariable
from hodiff.graph._record import Pass, Record
from hodiff.graph._source import Frame, Line, Path, line_of, lines_of, quoted


def explain(case: FailedPass) -> Explanation | None:
    """The explanation of "Trying to backward through the graph a second time"."""
    evidence = gather(case)
    return _recorded(case, evidence) if evidence is not None else _inferred(case)


def left_behind(case: FailedPass) -> Explanation | None:
    """The explanation of a pass that meets what an earlier step left, if that is the cause."""
    evidence = gather(case)
    if evidence is None or _causes.first_cause(evidence).name not in ("carried", "stored"):
        return None
    return _recorded(case, evidence)


def _recorded(case: FailedPass, evidence: Evidence) -> Explanation:
    cause = _causes.first_cause(evidence)
    part = evidence.first
    freed = evidence.freed_by
    return case.explanation(
        cause.name,
        f"shared part: {', '.join(_what(each) for each in evidence.parts[:SHOWN])}",
        ("created at", part.created),
        *(("called from", line) for line in _callers(evidence) if part.created is not None),
        ("kept by" if freed.retained else "freed by", freed),
        ("failing call", case.call),
        f"  {_lost(evidence)}",
        variable=part.variable,
        created=part.created,
        freed=freed.stack[0] if freed.path and not freed.retained else None,
        reason="".join(said([cause.sentence], evidence)),
        fixes=said(cause.fixes, evidence),
        unknown=said(cause.unknown, evidence),
    )


SHOWN = 4
"""Values that a sentence names, where several begin the old part."""


def _what(part: SharedValue) -> str:
    shape = _saved.shape(part.node)
    return _of(part.node, part.variable) + (f" (output shape {shape})" if shape is not None else "")


def _callers(evidence: Evidence) -> list[Line]:
    """How the user's program came to the line that made the part: the nearest caller and the outermost."""
    known = (evidence.first.created, *evidence.call.stack)
    lines = [line for line in lines_of(evidence.first.path)[1:] if line not in known]
    return list(dict.fromkeys([*lines[:1], *lines[-1:]]))


def _lost(evidence: Evidence) -> str:
    """What the pass needs and cannot have."""
    if evidence.freed_by.retained:
        return f"changed since: {evidence.names([leaf for leaf in evidence.below if evidence.moved(leaf)])}"
    return f"freed nodes it needs: {_freed_below(evidence)}"


def _freed_below(evidence: Evidence) -> str:
    counts = Counter(type(each).__name__ for each in _inspect.having(evidence.under, "freed"))
    shown = [name if count == 1 else f"{name} x{count}" for name, count in list(counts.items())[:6]]
    more = f" and {len(counts) - 6} more kinds" if len(counts) > 6 else ""
    return ", ".join(shown) + more or "what it saved cannot be seen from outside"


def _inferred(case: FailedPass) -> Explanation | None:
    """Nothing was recorded: what is likely is said; no fix, as none of its conditions can be checked."""
    explanation = _inference.infer(case)
    if explanation is None:
        return None
    freed = explanation.freed
    return case.explanation(
        explanation.cause,
        f"shared part: {_of(explanation.node, explanation.variable)}",
        ("created at", explanation.created),
        ("freed by", f"{quoted(freed)}{explanation.earlier}" if freed is not None else None),
        ("failing call", case.line),
        variable=explanation.variable,
        created=explanation.created,
        freed=freed,
        reason=_causes.SENTENCES[explanation.cause],
        unknown=("which fix is sound here: that takes a record of what changed between the passes.",),
        certain=False,
    )


def _of(node: Node | None, variable: str) -> str:
    name = f"`{variable}`" if variable else "a value without a name"
    return name if node is None else f"{name} = {type(node).__name__}"


# --- from a record to evidence ----------------------------------------------------------------------------------------


def gather(case: FailedPass) -> Evidence | None:
    """The facts of a case that was recorded; None if the record does not show which pass freed what."""
    record, call = case.record, case.call
    if record is None or call is None:
        return None
    nodes = _inspect.executed(case.roots, case.inputs)
    places = {path: tensor for tensor in case.names.all_tensors() for path in case.names.paths[id(tensor)]}
    needing = _Needing(nodes, _inspect.below(case.roots), record)
    again = [root for root in case.roots if record.tags.tag(root) is not None and root in needing]
    begin = again[:1] or _begin(case, record, needing, places)
    if not begin:
        return None
    shared: dict[Node, SharedValue] = {}
    for node in begin:
        part = _part(case, record, node, places)
        shared.setdefault(part.node, part)
    parts = sorted(shared.values(), key=lambda part: (part.variable == "", not part.replaced, part.variable[:1] == "_"))
    freed_by = _last_pass(record, parts[0].node)
    return None if freed_by is None else Evidence(case, record, call, freed_by, tuple(parts), nodes)


def _is_spent(node: Node, record: Record) -> bool:
    """Whether a pass freed what a node needs, or it was changed."""
    if _saved.leaf(node) is not None:
        return False
    trouble = _inspect.trouble(node)
    if not trouble:
        return False
    return trouble == "stale" or (trouble in ("freed", "unknown") and record.tags.tag(node) is not None)


def _last_pass(record: Record, node: Node) -> Pass | None:
    """The pass that freed what a value needs: its own, that of the nodes below, or the last before it was met.

    Only the last may have kept the graph, whose values have changed then.
    """
    inner = (each for each in _inspect.below([node]) if _saved.leaf(each) is None)
    tags = (tag for each in inner if (tag := record.tags.tag(each)) is not None)
    return next(tags, None) or record.tags.held_at(node)


class _Needing:
    """The nodes of a pass that lead to one which cannot run: told for those that are asked for, each node once."""

    def __init__(self, nodes: Sequence[Node], below: dict[Node, list[Node]], record: Record) -> None:
        self._run = set(nodes)
        self._below = below
        self._record = record
        self._known: dict[Node, bool] = {}

    def __contains__(self, node: Node) -> bool:
        way: list[tuple[Node, Iterator[Node]]] = []
        if self._look(node, way):
            return True
        while way:
            child = next(way[-1][1], None)
            if child is None:
                way.pop()  # nothing was found below: as was noted of it
            elif self._look(child, way):
                self._known.update((each, True) for each, _ in way)
                return True
        return False

    def _look(self, node: Node, way: list[tuple[Node, Iterator[Node]]]) -> bool:
        """Whether a node is known to be one; else the way goes on through it."""
        known = self._known.get(node)
        if known is None and node in self._run:
            known = self._known[node] = _is_spent(node, self._record)
            if not known:
                way.append((node, iter(self._below[node])))
        return bool(known)


def _begin(case: FailedPass, record: Record, needing: _Needing, places: dict[str, Tensor]) -> list[Node]:
    """The values at which the old part begins, met from the loss: those that an earlier pass ran or left behind.

    What a pass did not run counts as well (the state beside a recurrent module's output), if the variable that
    held it has another value by now, or if the lines that made it have run again: then it is what a step left.
    Where one thing that a step left cannot be run, all of them are named: to cut that one alone would leave the
    gradient its way through the others.
    """
    below = _inspect.below(case.roots)
    nodes: list[Node] = []
    others: list[Node] = []
    seen: set[Node] = set()
    level = [root for root in case.roots if root is not None]
    while level:
        following: list[Node] = []
        for node in level:
            if node in seen or _saved.leaf(node) is not None:
                continue
            seen.add(node)
            old = node not in case.roots and (record.tags.tag(node) is not None or _is_left(case, record, node, places))
            if not old:
                following += below[node]
            elif node in needing:
                nodes.append(node)
            else:
                others.append(node)
        level = following
    if any(_is_left(case, record, node, places) for node in nodes):
        nodes += [node for node in others if _is_left(case, record, node, places)]
    return [_named(case, record, node) for node in nodes]


def _is_left(case: FailedPass, record: Record, node: Node, places: dict[str, Tensor]) -> bool:
    call = record.tags.held_at(node)
    if call is None:
        return False
    return record.ran_again(node, call) or any(_replaced(case, one, node, places) for one in record.tags.held(node))


def _named(case: FailedPass, record: Record, node: Node) -> Node:
    """The node, or the nearest below that a variable holds, if what lies between has saved nothing."""
    here = node
    for _ in range(NEAR):
        if record.tags.held(here) or here in case.names.nodes or _parametrized(here):
            return here
        children = [child for child in _saved.children(here) if _saved.leaf(child) is None]
        if len(children) != 1 or _saved.slots(here):
            return node
        here = children[0]
    return node


NEAR = 8


def _replaced(case: FailedPass, held: NamedVariable, node: Node, places: dict[str, Tensor]) -> bool:
    """Whether the variable that held a node's output holds something else now."""
    if case.names.owners.get(_names.root(held.path)) is not held.code:
        return False
    now = places.get(held.path)
    return now is None or now.grad_fn is not node


def _part(case: FailedPass, record: Record, node: Node, places: dict[str, Tensor]) -> SharedValue:
    path, call = record.path(node), _last_pass(record, node)
    again = call is not None and record.ran_again(node, call)
    cached = _parametrized(node)
    if cached:
        return SharedValue(node, cached, None, True, False, path, again)
    if not _holding(case, node) and not again and (kept := memoised(case, path)):
        return SharedValue(node, kept, None, False, False, path, again)
    now = [NamedVariable(name, case.names.owners.get(_names.root(name))) for name in _holding(case, node)]
    then = [held for held in record.tags.held(node) if _replaced(case, held, node, places)]
    likely = [held for held in then if _unlikely(held, call)[0] < OTHER]
    if now and (not likely or _among_entries(case, now)):  # the shortest way to it
        best, replaced = min(now, key=lambda held: _steps(held.path)), False
    elif then:
        best, replaced = min(then, key=lambda held: _unlikely(held, call)), bool(likely)
    else:
        before = record.tags.held(node)
        best, replaced = (before[0] if before else NamedVariable(*_assigned(path))), False
    if not path and best.path:
        path = _only_assignment(case, best.path)
    return SharedValue(node, best.path, best.code, bool(now), replaced, path, again)


def _only_assignment(case: FailedPass, variable: str) -> Path:
    """Where a variable is assigned, if that is one place: the result of a Python Function, which no watch sees made."""
    for frame in case.frames:
        numbers = _source.assignments(variable, line_of(frame))
        if numbers:
            return (Frame(frame.f_code, numbers[0]),) if len(numbers) == 1 else ()
    return ()


def _holding(case: FailedPass, node: Node) -> list[str]:
    """The variables that hold a node's output now."""
    tensors = [tensor for tensor in case.names.all_tensors() if not tensor.is_leaf and tensor.grad_fn is node]
    return [path for tensor in tensors for path in case.names.paths[id(tensor)]]


def _among_entries(case: FailedPass, now: list[NamedVariable]) -> bool:
    """Whether what holds it is an entry of what a function assigned in this very call, outside of loops: of a batch."""
    frames = [frame for frame in (case.call.path if case.call is not None else ()) if frame.code.co_name != "<module>"]
    lines = {frame.code: frame.line for frame in frames if not _source.loops(frame.line)}
    return all(
        held.code in lines and "[" in held.path and _source.assignments(_names.root(held.path), lines[held.code])
        for held in now
    )


def _steps(path: str) -> tuple[int, int]:
    return _source.steps(path), len(path)


HANDED_ON, MEMBER, OTHER = range(3)


def _unlikely(held: NamedVariable, call: Pass | None) -> tuple[int, int, int]:
    """How unlikely it is that a variable hands its value to the next step: one that is read first, or is a member."""
    member = held.path != _names.root(held.path)
    if member:
        return MEMBER, *_steps(held.path)
    for frame in call.path if call is not None else ():
        if frame.code is held.code and _source.hands_on(held.path, frame.line):
            return HANDED_ON, *_steps(held.path)
    return OTHER, *_steps(held.path)


def _parametrized(node: Node) -> str:
    """The context that keeps computed parameters, if it holds a node's output."""
    module = sys.modules.get("torch.nn.utils.parametrize")
    kept = [value for value in getattr(module, "_cache", {}).values() if isinstance(value, Tensor)]
    return PARAMETRIZED if any(value.grad_fn is node for value in kept) else ""


def _assigned(path: Path) -> tuple[str, CodeType | None]:
    """The name that the line that made a value gives it; or that the line gives which called a `return` of it."""
    for number, frame in enumerate(path):
        if number and not _source.is_call(frame.line):
            break  # the line goes on computing with what it was returned
        if frame.code.co_name.startswith("<") and frame.code.co_name != "<module>":
            break  # a lambda's line assigns the lambda
        names = _source.given_by(frame.line)
        if len(names) == 1:
            return names[0], frame.code
        if not _source.returns(frame.line):
            break
    return "", None
