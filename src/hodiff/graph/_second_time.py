"""A backward pass met a part of the graph that was freed: which part, by which pass, why it was met again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

from torch import Tensor
from torch.nn.utils import parametrize

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _causes, _inspect, _names, _saved, _source
from hodiff.graph._case import PARAMETRIZED, Evidence, Explanation, FailedPass, SharedValue, memoised, said
from hodiff.graph._names import NamedVariable, local_variables
from hodiff.graph._record import Pass
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
        f"  {ONE_NODE}" if type(part.node).__name__ == "CompiledFunctionBackward" else "",
        variable=part.variable,
        created=part.created,
        freed=freed.stack[0] if freed.path and not freed.retained else None,
        reason="".join(said([cause.sentence], evidence)),
        fixes=said(cause.fixes, evidence),
        unknown=said(cause.unknown, evidence),
    )


ONE_NODE = "torch.compile makes one node of all outputs of a call: a pass through one frees what the others need."
SHOWN = 4
"""Values that a sentence names, where several begin the old part."""


def _what(part: SharedValue) -> str:
    name = f"`{part.variable}`" if part.variable else "a value without a name"
    shape = _saved.shape(part.node)
    return f"{name} = {type(part.node).__name__}" + (f" (output shape {shape})" if shape is not None else "")


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
    counts = Counter(type(each).__name__ for each in evidence.case.having(evidence.under, "freed"))
    shown = [name if count == 1 else f"{name} x{count}" for name, count in list(counts.items())[:6]]
    more = f" and {len(counts) - 6} more kinds" if len(counts) > 6 else ""
    return ", ".join(shown) + more or "what it saved cannot be seen from outside"


# --- from a record to evidence --------------------------------------------------------------------


def gather(case: FailedPass) -> Evidence | None:
    """The facts of a case that was recorded; None if the record does not show which pass freed what."""
    if case.call is None:
        return None
    record, tag = case.record, case.record.tags.tag
    needs = _needing(case)
    again = [root for root in case.roots if tag(root) is not None and needs(root)]
    begin = again[:1] or [_named(case, node) for node in _begin(case, needs)]
    calls = {node: _last_pass(case, node) for node in begin}
    parts = [_part(case, node, call) for node, call in calls.items()]
    parts.sort(key=lambda part: (part.variable == "", not part.replaced, part.variable[:1] == "_"))
    freed_by = calls[parts[0].node] if parts else None
    return None if freed_by is None else Evidence(case, record, case.call, freed_by, tuple(parts))


def _needing(case: FailedPass) -> Callable[[Node], bool]:
    """Tells whether a node of the pass leads to one that cannot run: it was changed, or a pass freed what it needs."""
    run, clear = set(case.nodes), set[Node]()

    def needs(node: Node) -> bool:
        reached = {node}
        for each in (way := [node]):  # which grows
            trouble = case.troubles.get(each) if each in run else None
            if trouble == "stale" or (trouble in ("freed", "unknown") and case.record.tags.tag(each) is not None):
                return True
            fresh = [child for child in case.graph[each] if child not in clear and child not in reached]
            reached.update(fresh)
            way += fresh
        clear.update(reached)
        return False

    return needs


def _last_pass(case: FailedPass, node: Node) -> Pass | None:
    """The pass that freed what a value needs, or its nodes below; or the last that kept its graph.

    Its values have changed then. One that frees what it runs, and left all of this, was another's.
    """
    inner = (each for each in case.below([node]) if _saved.leaf(each) is None)
    tags = (tag for each in inner if (tag := case.record.tags.tag(each)) is not None)
    held = case.record.tags.held_at(node)
    return next(tags, held if held is not None and held.retained else None)


def _begin(case: FailedPass, needs: Callable[[Node], bool]) -> list[Node]:
    """The values at which the old part begins, met from the loss: those that an earlier pass ran or left behind.

    What a pass did not run counts as well (the state beside a recurrent module's output), if the
    variable that held it has another value by now, or if the lines that made it have run again:
    then it is what a step left. Where one thing that a step left cannot be run, all of them are
    named: to cut that one alone would leave the gradient its way through the others.
    """
    old: list[Node] = []
    reached = dict.fromkeys(case.roots)
    for node in (way := list(reached)):  # which grows
        if node not in case.roots and (case.record.tags.tag(node) is not None or _is_left(case, node)):
            old.append(node)
            continue
        fresh = [child for child in case.graph[node] if child not in reached and _saved.leaf(child) is None]
        reached.update(dict.fromkeys(fresh))
        way += fresh
    left = {node for node in old if _is_left(case, node)}
    nodes = [node for node in old if needs(node)]
    others = [node for node in old if node in left and not needs(node)]
    return nodes if left.isdisjoint(nodes) else nodes + others


def _is_left(case: FailedPass, node: Node) -> bool:
    tags = case.record.tags
    call = tags.held_at(node)
    if call is None:
        return False
    return case.record.ran_again(node, call) or any(_replaced(case, held, node) for held in tags.held(node))


def _named(case: FailedPass, node: Node) -> Node:
    """The node, or the nearest below that a variable holds, if what lies between has saved nothing."""
    here = node
    for _ in range(NEAR):
        if case.record.tags.held(here) or here in case.names.nodes or _parametrized(here):
            return here
        children = [child for child in _saved.children(here) if _saved.leaf(child) is None]
        if len(children) != 1 or _saved.slots(here):
            return node
        here = children[0]
    return node


NEAR = 8


def _replaced(case: FailedPass, held: NamedVariable, node: Node) -> bool:
    """Whether the variable that held a node's output holds something else now."""
    if case.names.held(held.path).code is not held.code:
        return False
    now = case.names.at.get(held.path)
    return now is None or now.grad_fn is not node


def _part(case: FailedPass, node: Node, call: Pass | None) -> SharedValue:
    """The value of a node at which the old part begins, and what the pass that freed it tells of it."""
    record = case.record
    path = record.path(node)
    again = call is not None and record.ran_again(node, call)
    holding = [path for path, tensor in case.names.at.items() if not tensor.is_leaf and tensor.grad_fn is node]
    now = list(map(case.names.held, holding))
    kept = _parametrized(node) or ("" if now or again else memoised(case, path))
    if kept:
        return SharedValue(node, kept, None, kept == PARAMETRIZED, False, path, again)
    then = [held for held in record.tags.held(node) if _replaced(case, held, node)]
    likely = any(_unlikely(held, call)[0] < OTHER for held in then)
    replaced = False
    if now and (not likely or _among_entries(case, now)):  # the shortest way to it
        best = min(now, key=lambda held: _steps(held.path))
    elif then:
        best, replaced = min(then, key=lambda held: _unlikely(held, call)), likely
    else:
        before = record.tags.held(node)
        best = before[0] if before else NamedVariable(*_assigned(path))
    if not path and best.path:  # the result of a Python Function, which no watch sees made
        frame = next((frame for frame in case.frames if _source.assignments(best.path, line_of(frame))), None)
        made = _source.only_assignment(best.path, line_of(frame)) if frame is not None else None
        path = (Frame(frame.f_code, made.number),) if frame is not None and made is not None else ()
    return SharedValue(node, best.path, best.code, bool(now), replaced, path, again)


def _among_entries(case: FailedPass, now: list[NamedVariable]) -> bool:
    """Whether what holds it is an entry of what a function assigned in this very call, outside of loops: of a batch."""
    frames = [frame for frame in case.path if frame.code.co_name != "<module>"]
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
    kept = [value for value in parametrize._cache.values() if isinstance(value, Tensor)]
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


# --- after the fact, with nothing recorded: an inference from variables and source ----------------


def _inferred(case: FailedPass) -> Explanation | None:
    """Nothing was recorded: what is likely is said; no fix, as none of its conditions can be checked."""
    if not case.roots or case.line is None:
        return None
    likely = _infer(case, case.line)
    if likely is None and _source.number(case.line.file):
        with _source.reruns():
            likely = _infer(case, case.line)
    if likely is None:
        return None
    freed = likely.freed
    name = f"`{likely.variable}`" if likely.variable else "a value without a name"
    return case.explanation(
        likely.cause,
        f"shared part: {name}" + (f" = {type(likely.node).__name__}" if likely.node is not None else ""),
        ("created at", likely.created),
        ("freed by", f"{quoted(freed)}{likely.earlier}" if freed is not None else None),
        ("failing call", case.line),
        variable=likely.variable,
        created=likely.created,
        freed=freed,
        reason=_causes.SENTENCES[likely.cause],
        unknown=("which fix is sound here: only a record of what changed between the passes can tell.",),
        certain=False,
    )


class Likely(NamedTuple):
    """What seems to be the part that was freed before, and why it is met again."""

    node: Node | None
    variable: str
    created: Line | None
    freed: Line | None
    cause: str
    earlier: str = ""  # what to add to the line that freed it


EARLIER = "   (an earlier call on that line)"


def _hoisted_or_carried(case: FailedPass, variable: str) -> str:
    """What the source says of a variable: assigned outside the innermost loop, within it, or nowhere."""
    line = next((line for frame in case.frames if _source.loops(line := line_of(frame))), None)
    if line is None:
        return ""
    loop, name = _source.loops(line)[0], _source.base(variable)
    numbers = _source.assignments(name, line)
    if any(_source.within(loop, number) for number in numbers):
        return "carried"
    if name != variable and _source.fills(loop, name):
        return "carried"  # a list to which each step adds
    writers = _writers(case, name)
    if numbers or ("." in name and writers == {"__init__"}):
        return "hoisted"
    if "." not in name:
        return ""
    return "carried" if writers else "cached"


def _writers(case: FailedPass, name: str) -> set[str]:
    """The functions, in the files of the user's frames, that assign a variable."""
    files = {frame.f_code.co_filename for frame in case.frames}
    return {writer for file in files for writer in _source.assigned_in(name, file)}


def _infer(case: FailedPass, line: Line) -> Likely | None:
    """Judge by the variables in sight and the source."""
    needing = _inspect.leading_to(case.graph, case.having(case.graph, "freed"))
    twice = _same_twice(case, line)
    if twice is not None:
        return twice
    spent = {node: name for node, name in case.names.nodes.items() if node in needing and node not in case.roots}
    judged = [(node, name, _hoisted_or_carried(case, name)) for node, name in spent.items()]
    for cause in ("cached", "hoisted"):
        chosen = {node: name for node, name, named in judged if named == cause}
        if chosen:
            first = set(_inspect.topmost(case.roots, chosen))
            node = next(node for node in chosen if node in first)
            return _shared(line, node, chosen[node], cause)
    other = _other_loss(case, line, needing)
    if other is not None:
        return other
    loops = next(filter(None, (_source.loops(line_of(frame)) for frame in case.frames)), [])
    sight = [path for path, tensor in case.names.at.items() if tensor.grad_fn in case.graph]
    for name in [name for loop in loops for name in _source.carried(loop)]:
        if any(_source.base(held) == name or held.endswith("." + name.split(".")[-1]) for held in sight):
            return _shared(line, None, name, "carried")
    for node, name, named in judged:
        if named == "carried" and name != _source.base(name):
            return _shared(line, node, name, "carried")
    for name in map(_source.base, sight):
        if "." in name and _writers(case, name):
            return _shared(line, None, name, "carried")
    in_order = _in_order(line, spent) if not loops else None
    if in_order is not None or _source.function_at(line) is None:
        return in_order
    for node, name in spent.items():  # no loop is in sight: an optimizer calls this function again and again
        if not _source.assignments(_source.base(name), line):
            return _shared(line, node, name, "hoisted")
    return None


def _in_order(line: Line, spent: dict[Node, str]) -> Likely | None:
    """No loop: statements ran as they stand, those of cells in the order of their runs."""
    root = _source.target_of(line)
    given = [number for number in _source.assignments(root, line) if number <= line.number] if root else []
    if given and _source.extends(Line(line.file, given[-1]), root):
        earlier = _source.between(given[0], line)
        of_it = [number for number in earlier if _source.target_of(Line(line.file, number)) == root]
        if of_it:  # total = total + loss, and a pass of it before
            return Likely(None, root, Line(line.file, given[-1]), Line(line.file, of_it[-1]), "carried")
    for node, name in spent.items():
        made = [number for number in _source.assignments(_source.base(name), line) if number < line.number]
        earlier = _source.between(made[-1], line) if made else []
        if earlier:
            freed = Line(line.file, earlier[0]) if len(earlier) == 1 else None
            return Likely(node, name, Line(line.file, made[-1]), freed, "two losses")
    return None


def _shared(line: Line, node: Node | None, variable: str, cause: str) -> Likely:
    numbers = _source.assignments(_source.base(variable), line)
    return Likely(node, variable, Line(line.file, numbers[-1]) if numbers else None, line, cause, EARLIER)


def _same_twice(case: FailedPass, line: Line) -> Likely | None:
    """Is there an earlier pass of the same variable, or none of its assignments in the loop?"""
    variable = case.loss()
    if not variable:
        return None
    numbers = [number for number in _source.made_at(variable, line) if number <= line.number]
    passes = [each.lineno for each in _source.statements(line) if _source.frees(each, variable)]
    earlier = [number for number in passes if number < line.number and not (numbers and number < numbers[-1])]
    loops = _source.loops(line)
    a_name = _source.base(variable) == variable
    outside = bool(a_name and loops and numbers) and not any(_source.within(loops[0], number) for number in numbers)
    if not earlier and not outside:
        return None
    freed = Line(line.file, earlier[0]) if earlier else line
    created = Line(line.file, numbers[-1]) if numbers else None
    return Likely(case.roots[0], variable, created, freed, "same loss twice", "" if earlier else EARLIER)


def _other_loss(case: FailedPass, line: Line, needing: set[Node]) -> Likely | None:
    """A scalar in sight that shares nodes with this loss, and was differentiated before."""
    for name, value in local_variables(case.frames[0]).items():
        node = _nodes.node_of(value) if isinstance(value, Tensor) and value.numel() == 1 else None
        if node is None or node in case.roots:
            continue
        common = [each for each in _nodes.walk([node]) if each in needing and _saved.leaf(each) is None]
        passes = [each.lineno for each in _source.statements(line) if _source.frees(each, name)]
        if common and passes:
            edge = _inspect.topmost(case.roots, common)
            chosen = next((each for each in edge if each in case.names.nodes), edge[0])
            shared = _shared(line, chosen, case.names.nodes.get(chosen, ""), "two losses")
            return shared._replace(freed=Line(line.file, passes[0]), earlier="")
    return None
