"""A backward pass met a part of the graph that was freed: which part, by which pass, and why it was met again."""

from __future__ import annotations

import ast
import re
from collections import Counter

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _predict, _saved, _source
from hodiff.graph._advice import Shared, fixes, loss_at, reason
from hodiff.graph._case import Case, Explanation, Pass
from hodiff.graph._names import local_variables
from hodiff.graph._source import Line


def explain(case: Case) -> Explanation | None:
    """The explanation of "Trying to backward through the graph a second time"."""
    shared = _recorded(case) if case.record is not None else _inferred(case)
    if shared is None:
        return None
    what = f"`{shared.variable}`" if shared.variable else "a value without a name"
    node = ""
    if shared.node is not None:
        shape = _saved.shape(shared.node)
        node = f" = {type(shared.node).__name__}" + (f" (output shape {shape})" if shape is not None else "")
    text = [f"shared part: {what}{node}"]
    if shared.created is not None:
        text.append(f"  created at   {shared.created}   {shared.created.text}")
    if shared.freed is not None:
        text.append(f"  freed by     {shared.freed_text}")
    text.append(f"  failing call {case.call if case.call is not None else _at(case.line)}")
    if shared.node is not None:
        text.append(f"  freed nodes it needs: {_freed_below(shared.node)}")
    return case.explanation(
        shared.cause,
        variable=shared.variable,
        created=shared.created,
        freed=shared.freed,
        text=tuple(text),
        reason=reason(shared),
        fixes=tuple(fixes(shared, case)),
    )


def _at(line: Line | None) -> str:
    return f"{line}   {line.text}" if line is not None else "?"


def _freed_below(node: Node) -> str:
    counts = Counter(type(each).__name__ for each in _nodes.walk([node]) if _predict.trouble(each) == "freed")
    shown = [name if count == 1 else f"{name} x{count}" for name, count in list(counts.items())[:6]]
    return ", ".join(shown) + (f" and {len(counts) - 6} more kinds" if len(counts) > 6 else "")


# --- from a record ----------------------------------------------------------------------------------------------------


def _recorded(case: Case) -> Shared | None:
    record = case.record
    if record is None or case.call is None:
        return None
    tagged = [node for node in _predict.executed(case.roots, case.inputs) if record.tag(node) is not None]
    edge = [node for node in _nodes.topmost(case.roots, tagged) if _needs_freed(node, "freed", "unknown")]
    if not edge:
        return _inferred(case)
    node = next((each for each in edge if each in case.names.nodes), edge[0])
    freed_by = record.tag(node)
    if freed_by is None:
        return None
    call = freed_by[0]
    same = node in case.roots
    variable = _variable(case, node, record.made(node))
    created = record.made(node) or _only_assignment(case, variable)
    if same:
        cause = "same loss twice"
    elif call.stack != case.call.stack:
        cause = "two losses"
    else:
        cause = _hoisted_or_carried(case, variable) or ("carried" if record.ran_again(node) else "hoisted")
    return Shared(
        node,
        variable,
        created,
        call.stack[0] if call.stack else None,
        str(call),
        cause,
        other=loss_at(call.stack[0]) if call.stack else "",
        changed=tuple(_changed(case, node)),
        through=_all_through(case.roots, edge),
        moved=_moved(case, call),
        by=call.name,
    )


def _needs_freed(node: Node, *troubles: str) -> bool:
    return any(_predict.trouble(each) in (troubles or ("freed",)) for each in _nodes.walk([node]))


def _changed(case: Case, node: Node) -> list[str]:
    """The leaves below a node that were changed in place after the pass that freed it."""
    found = []
    for each in _nodes.walk([node]):
        leaf, tag = _saved.leaf(each), case.record.tag(each) if case.record is not None else None
        if leaf is not None and tag is not None and _saved.version(leaf) != tag[1]:
            found.append(case.names.of(leaf) or f"a leaf of shape {tuple(leaf.shape)}")
    return found


def _moved(case: Case, call: Pass) -> bool:
    """Whether any leaf in sight was changed in place since a pass ran to it."""
    for tensor in case.names.all_tensors():
        if tensor.is_leaf and tensor.requires_grad and case.record is not None:
            tag = case.record.tag(_nodes.node_of(tensor))
            if tag is not None and tag[0] == call and tag[1] != _saved.version(tensor):
                return True
    return False


def _all_through(roots: list[Node], edge: list[Node]) -> bool:
    """Whether every path to a leaf leads through `edge`: cut there, nothing would be left to differentiate."""
    stop = set(edge)
    return not any(_saved.leaf(node) is not None for node in _nodes.walk(roots, stop) if node not in stop)


def _variable(case: Case, node: Node, created: Line | None) -> str:
    """The variable that holds a node's output; or what its line assigns, if the value is gone."""
    found = case.names.nodes.get(node, "")
    if found:
        return found
    assigned = _source.assigned_by(created) if created is not None else []
    return assigned[0] if assigned else _carried_above(case, node)


def _carried_above(case: Case, node: Node) -> str:
    """A variable that the loop hands from step to step, and whose present value was computed from the node."""
    candidates = [name for loop in _loops(case) for name in _source.carried(loop)]
    for holder, variable in case.names.nodes.items():
        names = {_source.base(variable), re.sub(r"^.*\.", "self.", variable)}
        if names & set(candidates) and node in _nodes.walk([holder]):
            return variable
    return ""


def _only_assignment(case: Case, variable: str) -> Line | None:
    """Where a variable is assigned, if that is one place: the result of a Python Function, which no watch sees made."""
    for frame in case.frames:
        line = _source.line_of(frame)
        numbers = _source.assignments(variable, line)
        if numbers:
            return Line(line.file, numbers[0]) if len(numbers) == 1 else None
    return None


def _loops(case: Case) -> list[ast.stmt]:
    """The loops around the failing call, in the innermost of the user's frames that has any."""
    for frame in case.frames:
        found = _source.loops(_source.line_of(frame))
        if found:
            return found
    return []


def _hoisted_or_carried(case: Case, variable: str) -> str:
    """What the source says of a variable: assigned outside the loop, within it, or nowhere."""
    if not variable:
        return ""
    for frame in case.frames:
        line = _source.line_of(frame)
        loops = _source.loops(line)
        if not loops:
            continue
        name = _source.base(variable)
        numbers = _source.assignments(name, line)
        if any(_source.within(loop, number) for loop in loops[:1] for number in numbers):
            return "carried"
        if name != variable and any(_source.fills(loop, name) for loop in loops[:1]):
            return "carried"  # a list to which each step adds
        if numbers:
            return "hoisted"
        if "." in name:
            writers = _writers(case, name)
            return "carried" if writers - {"__init__"} else "hoisted" if writers else "cached attribute"
        return ""
    return ""


def _writers(case: Case, name: str) -> set[str]:
    """The functions, in the files of the user's frames, that assign a variable."""
    files = {frame.f_code.co_filename for frame in case.frames}
    return {writer for file in files for writer in _source.assigned_in(name, file)}


# --- from what is left ------------------------------------------------------------------------------------------------


def _inferred(case: Case) -> Shared | None:
    """Nothing was recorded: judge by the variables in sight and the source."""
    if not case.roots or case.line is None:
        return None
    below = set(_nodes.walk(case.roots))
    twice = _same_twice(case)
    if twice is not None:
        return twice
    spent = {node: name for node, name in case.names.nodes.items() if node in below and _needs_freed(node)}
    spent = {node: name for node, name in spent.items() if node not in case.roots}
    judged = [(node, name, _hoisted_or_carried(case, name)) for node, name in spent.items()]
    other = _other_loss(case, below)
    for cause in ("cached attribute", "hoisted"):
        chosen = [(node, name) for node, name, found in judged if found == cause]
        if chosen:
            first = set(_nodes.topmost(case.roots, [node for node, _ in chosen]))
            node, name = next((node, name) for node, name in chosen if node in first)
            return _shared(case, node, name, cause)
    if other is not None:
        return other
    for loop in _loops(case):
        for name in _source.carried(loop):
            if any(_source.base(held) == name or held.endswith("." + name.split(".")[-1]) for held in _in_sight(case)):
                return _shared(case, None, name, "carried")
    for node, name, found in judged:
        if found == "carried" and name != _source.base(name):
            return _shared(case, node, name, "carried")
    for held in _in_sight(case):
        name = _source.base(held)
        if "." in name and _writers(case, name):
            return _shared(case, None, name, "carried")
    for node, name in spent.items():  # no loop is in sight: an optimizer calls this function again and again
        if not _source.assignments(_source.base(name), _line(case)):
            return _shared(case, node, name, "hoisted")
    return None


def _in_sight(case: Case) -> list[str]:
    """The variables whose values belong to the failing graph."""
    below = set(_nodes.walk(case.roots))
    found = [tensor for tensor in case.names.all_tensors() if tensor.grad_fn is not None and tensor.grad_fn in below]
    return [path for tensor in found for path in case.names.paths[id(tensor)]]


def _shared(case: Case, node: Node | None, variable: str, cause: str) -> Shared:
    assigned = [
        number for frame in case.frames[:1] for number in _source.assignments(_source.base(variable), _line(case))
    ]
    created = Line(_line(case).file, assigned[-1]) if assigned else None
    freed = case.line if cause != "two losses" else None
    text = f"{_at(freed)}   (an earlier call on that line)"
    through = node is not None and _all_through(case.roots, [node])
    return Shared(node, variable, created, freed, text, cause, changed=("(unknown)",), through=through)


def _line(case: Case) -> Line:
    return case.line or Line("?", 0)


def _same_twice(case: Case) -> Shared | None:
    """Is there an earlier pass of the same variable, or none of its assignments in the loop?"""
    root = case.roots[0]
    variable = case.names.nodes.get(root, "") or loss_at(_line(case))
    if not variable:
        return None
    numbers = [number for number in _source.assignments(variable, _line(case)) if number <= _line(case).number]
    passes = [
        statement.lineno
        for statement in _source.statements(_line(case))
        if statement.lineno < _line(case).number and _frees(statement, variable)
    ]
    earlier = [number for number in passes if not numbers or number >= numbers[-1]]
    loops = _source.loops(_line(case))
    outside = bool(loops and numbers) and not any(_source.within(loops[0], number) for number in numbers)
    if not earlier and not outside:
        return None
    freed = Line(_line(case).file, earlier[-1]) if earlier else _line(case)
    created = Line(_line(case).file, numbers[-1]) if numbers else None
    text = _at(freed) if earlier else f"{_at(freed)}   (an earlier call on that line)"
    return Shared(root, variable, created, freed, text, "same loss twice", changed=("(unknown)",))


def _frees(statement: ast.stmt, variable: str) -> bool:
    """Whether a statement calls `variable.backward()`, or `autograd.grad(variable, ...)`, and does not retain."""
    text = ast.unparse(statement)
    if "retain_graph=True" in text or "create_graph=True" in text:
        return False
    return f"{variable}.backward(" in text or f"autograd.grad({variable}," in text


def _other_loss(case: Case, below: set[Node]) -> Shared | None:
    """A scalar in sight that shares nodes with this loss, and was differentiated before."""
    for frame in case.frames[:1]:
        for name, value in local_variables(frame).items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                continue
            node = _nodes.node_of(value)
            if node is None or node in case.roots:
                continue
            mine = _nodes.walk([node])
            common = [each for each in mine if each in below and _saved.leaf(each) is None and _needs_freed(each)]
            passes = [s for s in _source.statements(_line(case)) if _frees(s, name)]
            if common and passes:
                edge = _nodes.topmost(case.roots, common)
                chosen = next((each for each in edge if each in case.names.nodes), edge[0])
                shared = _shared(case, chosen, case.names.nodes.get(chosen, ""), "two losses")
                freed = Line(_line(case).file, passes[0].lineno)
                between = range(freed.number, _line(case).number)
                moved = any(s.lineno in between and ".step(" in ast.unparse(s) for s in _source.statements(_line(case)))
                by = "autograd.grad" if "grad(" in freed.text else ""
                return shared._replace(freed=freed, freed_text=_at(freed), other=name, moved=moved, by=by)
    return None
