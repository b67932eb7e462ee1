"""Values that a pass cannot use as they are: freed by an earlier one, or changed in place since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _inspect, _names, _saved, _source
from hodiff.graph._case import Explanation, Fact, FailedPass, callers, fact_of_pass
from hodiff.graph._names import NamedVariable
from hodiff.graph._record import Change, Pass, tensors_in
from hodiff.graph._source import Frame, Line, Path, lines_of


@dataclass(frozen=True)
class SharedValue:
    """One value at which the old part of the graph begins.

    Attributes:
        node: Its node.
        variable: What holds it, or held it after the pass that freed its graph; empty if nothing
            was found.
        kept: Whether a variable holds the very value now.
        replaced: Whether the variable that held it then holds another value now.
        path: The user's frames in which it was made, the innermost first.
        again: Whether the same lines made others since that pass.
        freed_by: The pass that freed what it needs, or kept it; None for what no pass ran.
    """

    node: Node
    variable: str
    kept: bool
    replaced: bool
    path: Path
    again: bool
    freed_by: Pass | None

    @property
    def created(self) -> Line | None:
        """The innermost of the user's lines that made it."""
        return self.path[0].line if self.path else None


@dataclass
class SharedPart:
    """The part of a graph that one pass freed and another met.

    Attributes:
        case: The failing pass.
        call: The failing pass, in the record.
        freed_by: The pass that freed the part, or kept it, while values that it needs have changed
            since.
        values: Where the part begins, the named first.
    """

    case: FailedPass
    call: Pass
    freed_by: Pass
    values: tuple[SharedValue, ...]

    @cached_property
    def under(self) -> dict[Node, list[Node]]:
        """The nodes of the part, and below it, with the nodes that each leads to."""
        return _nodes.walk(value.node for value in self.values)

    @cached_property
    def ends(self) -> list[Node]:
        """The nodes of the leaves below the part."""
        return [node for node in self.under if node.__class__ is _nodes.ACCUMULATE]

    def change(self, leaf: Tensor) -> Change | None:
        """The last change of a leaf in place, if that was seen since the part was freed."""
        change = self.case.record.changed(leaf)
        return change if change is not None and change.passes > self.freed_by.number else None

    @cached_property
    def moved(self) -> list[Tensor]:
        """The leaves below the part that were changed in place since it was freed."""
        tags = self.case.record.tags
        return [
            node.variable
            for node in self.ends
            if self.change(node.variable) is not None or tags.moved(node, self.freed_by)
        ]

    @property
    def rounds(self) -> bool:
        """Whether the same call had run before, after the part was made."""
        place = _saved.sequence(self.values[0].node)
        earlier = self.case.record.passes[self.freed_by.number : self.call.number]
        return any(call.path == self.call.path and call.place > place for call in earlier)

    @property
    def at_once(self) -> bool:
        """Whether both losses had been computed when the first was differentiated:
        no state entered a step between.
        """
        place = self.freed_by.place
        before = all(
            _saved.sequence(node) < place for node in self.case.nodes if _saved.leaf(node) is None
        )
        return before and not self.rounds and self.call.path != self.freed_by.path

    @property
    def cause(self) -> str:
        """The class of the failure."""
        first = self.values[0]
        if first.node in self.case.roots:
            return "same loss twice"
        member = (
            first.kept and not first.variable.isidentifier() and not first.variable.endswith("]")
        )
        left = first.replaced or (first.again and not member)  # an attribute may be kept for good
        if left and not (self.at_once or self._after_the_loop()):
            return "carried over"
        if not self.rounds and self.call.path != self.freed_by.path:
            return "shared part"
        return "made once"

    def _after_the_loop(self) -> bool:
        """Whether the failing pass stands behind the loop whose steps freed the part:
        it is no step.
        """
        mine, theirs = self.call.path, self.freed_by.path
        same = mine and theirs and mine[0].code is theirs[0].code
        return bool(same) and any(
            not _source.within(loop, mine[0].number) for loop in _source.loops(theirs[0].line)
        )


def freed(case: FailedPass) -> Explanation | None:
    """The explanation of "Trying to backward through the graph a second time"."""
    part = gather(case)
    return _recorded(case, part) if part is not None else _states(case)


def left_behind(case: FailedPass) -> Explanation | None:
    """The explanation of a pass that meets what an earlier step left, if that is the cause."""
    part = gather(case)
    return _recorded(case, part) if part is not None and part.cause == "carried over" else None


def _recorded(case: FailedPass, part: SharedPart) -> Explanation:
    first, freed = part.values[0], part.freed_by
    values = [
        Fact("part", value.variable or "a value without a name", text=_what(value.node))
        for value in part.values
    ]
    passes = dict.fromkeys(value.freed_by for value in part.values if value.freed_by is not None)
    compiled = type(first.node).__name__ == "CompiledFunctionBackward"
    changes = dict.fromkeys(change.line for change in map(part.change, part.moved) if change)
    return case.explanation(
        part.cause,
        *values[:SHOWN],
        Fact("made", first.variable, first.created) if first.created is not None else None,
        *callers(first.path, (first.created, *part.call.stack)),
        case.of_leaves(Fact("behind"), (node.variable for node in part.ends)),
        *(fact_of_pass("kept by" if each.retained else "freed by", each) for each in passes),
        None if freed.retained else Fact("freed nodes", text=_freed_below(part)),
        *(Fact("changed", "", line, OLD) for line in list(changes)[:SHOWN]),
        case.of_leaves(Fact("changed"), part.moved),
        Fact("part", text=ONE_NODE) if compiled else None,
        fact_of_pass("failed", part.call),
        variable=first.variable,
    )


ONE_NODE = (
    "torch.compile makes one node of all outputs of a call: a pass through one frees what the "
    "others need"
)
OLD = "since: a kept graph would be of the old values"
SHOWN = 4
"""Values that are told, where several begin the old part."""


def _what(node: Node) -> str:
    shape = _saved.shape(node)
    return type(node).__name__ + (f", output shape {shape}" if shape is not None else "")


def _freed_below(part: SharedPart) -> str:
    counts = Counter(type(each).__name__ for each in part.case.freed(part.under))
    shown = [name if count == 1 else f"{name} x{count}" for name, count in list(counts.items())[:6]]
    more = f" and {len(counts) - 6} more kinds" if len(counts) > 6 else ""
    return ", ".join(shown) + more or "what they saved cannot be seen from outside"


def _states(case: FailedPass) -> Explanation | None:
    """The beginning of the freed part, by its nodes and variables,
    where the pass that freed it was not recorded.
    """
    freed = case.freed(case.graph)
    if not freed or case.line is None:
        return None
    leading = _saved.leading_to(case.graph, freed)
    spent = [
        node
        for node in case.graph
        if node in leading and node in case.names.nodes and node not in case.roots
    ]
    begin = [node for node in freed if node in _inspect.topmost(case.roots, freed)]
    named = _inspect.topmost(case.roots, spent) or [root for root in case.roots if root in leading]
    facts = [_state(case, node) for node in dict.fromkeys([*named, *begin])]
    return case.explanation("freed before", *facts[:SHOWN], variable=facts[0].name, certain=False)


def _state(case: FailedPass, node: Node) -> Fact:
    """A node of a freed part: its variable, the one line that assigns it, its state."""
    state = "freed" if case.troubles.get(node) == "freed" else "it leads to freed nodes"
    name = case.names.nodes.get(node, "")
    return Fact("part", name, case.assigned(name), f"{_what(node)}; {state}")


# --- from a record to the part --------------------------------------------------------------------


def gather(case: FailedPass) -> SharedPart | None:
    """The part that a case met; None if the record does not show which pass freed what."""
    if case.call is None:
        return None
    tag = case.record.tags.tag
    again = [root for root in case.roots if tag(root) is not None and _needs(case, root)]
    begin = again[:1] or [_named(case, node) for node in _begin(case)]
    values = [_part(case, node, _last_pass(case, node)) for node in begin]
    values.sort(
        key=lambda value: (value.variable == "", not value.replaced, value.variable[:1] == "_")
    )
    freed_by = values[0].freed_by if values else None
    return None if freed_by is None else SharedPart(case, case.call, freed_by, tuple(values))


def _needs(case: FailedPass, node: Node) -> bool:
    """Whether a node leads to one of the pass that cannot run: it was changed, or a pass freed
    what it needs.
    """
    for each in _nodes.walk([node]):
        trouble = case.troubles.get(each)
        if trouble == "stale" or (
            trouble in ("freed", "unknown") and case.record.tags.tag(each) is not None
        ):
            return True
    return False


def _last_pass(case: FailedPass, node: Node) -> Pass | None:
    """The pass that freed what a value needs, or its nodes below; or the last that kept its graph.

    Its values have changed then. One that frees what it runs, and left all of this, was another's.
    """
    inner = (each for each in _nodes.walk([node]) if _saved.leaf(each) is None)
    tags = (tag for each in inner if (tag := case.record.tags.tag(each)) is not None)
    last, _ = case.record.tags.held(node)
    return next(tags, last if last is not None and last.retained else None)


def _begin(case: FailedPass) -> list[Node]:
    """The values at which the old part begins, met from the loss: those that an earlier pass ran or
    left behind.

    What a pass did not run counts as well (the state beside a recurrent module's output), if the
    variable that held it has another value by now, or if the lines that made it have run again:
    then it is what a step left. Where one thing that a step left cannot be run, all of them are
    named: to cut that one alone would leave the gradient its way through the others.
    """
    old: list[Node] = []
    reached = dict.fromkeys(case.roots)
    for node in (way := list(reached)):  # which grows
        if node not in case.roots and (
            case.record.tags.tag(node) is not None or _is_left(case, node)
        ):
            old.append(node)
            continue
        fresh = [
            child
            for child in case.graph[node]
            if child not in reached and _saved.leaf(child) is None
        ]
        reached.update(dict.fromkeys(fresh))
        way += fresh
    left = {node for node in old if _is_left(case, node)}
    nodes = [node for node in old if _needs(case, node)]
    others = [node for node in old if node in left and node not in nodes]
    return nodes if left.isdisjoint(nodes) else nodes + others


def _is_left(case: FailedPass, node: Node) -> bool:
    call, variables = case.record.tags.held(node)
    if call is None:
        return False
    return case.record.ran_again(node, call) or any(
        _replaced(case, held, node) for held in variables
    )


def _named(case: FailedPass, node: Node) -> Node:
    """The node, or the nearest below that a variable holds,
    if what lies between has saved nothing.
    """
    here = node
    for _ in range(NEAR):
        if case.record.tags.held(here)[1] or here in case.names.nodes:
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
    """The value of a node at which the old part begins,
    and what the pass that freed it tells of it.
    """
    record, names = case.record, case.names
    path = record.path(node)
    again = call is not None and record.ran_again(node, call)
    now = [names.held(at) for at, tensor in names.at.items() if tensor.grad_fn is node]
    _, before = record.tags.held(node)
    then = [held for held in before if _replaced(case, held, node)]
    likely = any(_unlikely(held, call)[0] < OTHER for held in then)
    replaced = False
    if now and (not likely or _among_entries(case, now)):  # the shortest way to it
        best = min(now, key=lambda held: _steps(held.path))
    elif then:
        best, replaced = min(then, key=lambda held: _unlikely(held, call)), likely
    else:
        best = before[0] if before else NamedVariable(*_assigned(path))
    if not path and best.path:  # the result of a Python Function, which no watch sees made
        made = case.assigned(best.path)
        path = (
            tuple(Frame(frame.f_code, made.number) for frame in case.frames[:1])
            if made is not None
            else ()
        )
    return SharedValue(node, best.path, bool(now), replaced, path, again, call)


def _among_entries(case: FailedPass, now: list[NamedVariable]) -> bool:
    """Whether what holds it is an entry of what a function assigned in this very call, outside of
    loops: of a batch.
    """
    frames = [frame for frame in case.path if frame.code.co_name != "<module>"]
    lines = {frame.code: frame.line for frame in frames if not _source.loops(frame.line)}
    return all(
        held.code in lines
        and "[" in held.path
        and _source.assignments(_names.root(held.path), lines[held.code])
        for held in now
    )


def _steps(path: str) -> tuple[int, int]:
    return _source.steps(path), len(path)


HANDED_ON, MEMBER, OTHER = range(3)


def _unlikely(held: NamedVariable, call: Pass | None) -> tuple[int, int, int]:
    """A rank of a variable as the one that hands its value to the next step: high for one that is
    read first, or a member.
    """
    if held.path != _names.root(held.path):
        return MEMBER, *_steps(held.path)
    for frame in call.path if call is not None else ():
        if frame.code is held.code and _source.hands_on(held.path, frame.line):
            return HANDED_ON, *_steps(held.path)
    return OTHER, *_steps(held.path)


def _assigned(path: Path) -> tuple[str, CodeType | None]:
    """The name that the line that made a value gives it;
    or that the line gives which called a `return` of it.
    """
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


# --- changed in place: a pass needs what a value was before, or the operation itself is refused ---


class _Stale(NamedTuple):
    """A saved value that was changed: the node, what it calls it, the variable,
    and the leaf whose memory it is.
    """

    node: Node
    slot: str
    variable: str
    value: Tensor
    leaf: Tensor | None


def changed(case: FailedPass) -> Explanation | None:
    """The explanation of "modified by an inplace operation"; a variable's value is preferred."""
    values = _changed_values(case)
    if not values:
        return _unnamed(case)
    stale = next((each for each in values if each.variable), values[0])
    if stale.leaf is not None:
        left = left_behind(case)
        if left is not None:
            return left
    changes = case.record.changes(stale.value, _saved.sequence(stale.node))
    if not stale.variable and changes:
        line = changes[-1].line
        call = "" if _saved.is_view(stale.value) else changes[-1].call
        names = _source.changed_at(line, call) or _source.given_by(line)
        stale = stale._replace(variable=names[0] if names else "")
    saved = f"{type(stale.node).__name__} saved it as {stale.slot!r}"
    shape = f"of shape {tuple(stale.value.shape)}"
    return case.explanation(
        "changed value" if stale.leaf is None else "changed parameter",
        Fact("saved", stale.variable, case.record.made(stale.node), f"{shape}; {saved}"),
        *(Fact("changed", stale.variable, line, by) for line, by in _told(changes).items()),
        *(callers(changes[-1].path, lines_of(case.path))[:1] if changes else ()),
        case.of_leaves(Fact("changed"), [each.leaf for each in values if each.leaf is not None]),
        variable=stale.variable,
    )


def _told(changes: list[Change]) -> dict[Line, str]:
    """The lines of some changes, the last ones, each once and by which functions."""
    lines: dict[Line, list[str]] = {}
    for change in changes:
        lines.setdefault(change.line, []).append(change.call)
    return {line: ", ".join(dict.fromkeys(calls)) for line, calls in list(lines.items())[-SHOWN:]}


def _unnamed(case: FailedPass) -> Explanation | None:
    """The facts where PyTorch does not tell the tensor: the node that had saved it, its line."""
    for node in case.nodes:
        for slot in _saved.slots(node):
            if slot.state == _saved.STALE:
                text = (
                    f"{type(node).__name__} saved it as {slot.name!r}; which tensor it was is not "
                    "told before 2.12"
                )
                return case.explanation(
                    "changed value", Fact("saved", "", case.record.made(node), text)
                )
    return None


def _changed_values(case: FailedPass) -> list[_Stale]:
    """The changed values that the pass needs, as far as they are told."""
    values: list[_Stale] = []
    for node in case.nodes:
        for name, state, value in _saved.slots(node):
            if state == _saved.STALE and value is not None:
                leaf = _saved.leaf_of(value)
                variable = case.names.of(leaf) if leaf is not None else ""
                variable = variable or case.names.memory(value)
                values.append(_Stale(node, name, variable, value, leaf))
    return values


# --- operations that are refused in the forward, for the sake of gradients ------------------------


REFUSALS = {
    "leaf changed": "refused in place",
    "leaf's view changed": "refused in place",
    "hooked view changed": "refused in place",
    "view changed": "refused in place",
    "written out": "refused in place",
    "view without gradients": "view made without gradients",
    "inference saved": "inference tensor",
    "inference changed": "inference tensor",
    "copied": "copied",
    "flag of a result": "not a leaf",
    "inside transform": "inside a transform",
}
"""The classes of operations that are refused, by the kind of PyTorch's error."""


def explain_refused(case: FailedPass, cause: str, arguments: Any, path: Path) -> Explanation:
    """The explanation of such an operation."""
    line = path[0].line
    out = arguments[1].get("out")
    tensor = out if isinstance(out, Tensor) else _which(arguments, cause)
    named = cause != "refused in place" or tensor is out
    variable = _name(case, tensor) if named else _changed(case, line)
    return case.explanation(
        cause,
        Fact("refused", variable, line, case.name),
        *_maker(case, tensor),
        *callers(path, (line,)),
        variable=variable,
    )


def _maker(case: FailedPass, tensor: Tensor | None) -> list[Fact]:
    """The operation that made the tensor of a refusal,
    and the switch that had gradients off then.
    """
    if tensor is None:
        return []
    line, origin = case.record.maker(tensor), case.record.cuts.origin(tensor)
    kind = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
    facts = (
        [Fact("made", _name(case, tensor), line, kind and f"the result of {kind}")]
        if line is not None
        else []
    )
    if origin is not None and origin.off is not None:
        facts.append(Fact("off since", "", origin.off.line, origin.off.how))
    return facts


def _changed(case: FailedPass, line: Line) -> str:
    """The tensor that a line was to change."""
    names = _source.changed_at(line, case.name)
    return names[0] if names else _source.receiver(line, case.name)


def _which(arguments: Any, cause: str) -> Tensor | None:
    """The argument that a refusal is about."""
    given = tensors_in(list(arguments))
    inference = (
        [tensor for tensor in given if tensor.is_inference()] if cause == "inference tensor" else []
    )
    results = (
        [tensor for tensor in given if tensor.grad_fn is not None] if cause == "copied" else []
    )
    return next(iter(inference or results or given), None)


def _name(case: FailedPass, tensor: Tensor | None) -> str:
    """The variable of a tensor, by the name that its owner gives it."""
    return max(case.names.paths.get(id(tensor), ()), key=lambda path: path.count("."), default="")
