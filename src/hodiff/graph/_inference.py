"""After the fact, with nothing recorded: what variables or source say of a graph that was freed. An inference."""

from __future__ import annotations

import ast
from typing import NamedTuple

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _inspect, _saved, _source
from hodiff.graph._case import FailedPass
from hodiff.graph._names import local_variables
from hodiff.graph._source import Line, line_of


class Likely(NamedTuple):
    """What seems to be the part that was freed before, and why it is met again."""

    node: Node | None
    variable: str
    created: Line | None
    freed: Line | None
    cause: str
    earlier: str = ""  # what to add to the line that freed it


EARLIER = "   (an earlier call on that line)"


def _loops(case: FailedPass) -> list[ast.stmt]:
    """The loops around the failing call, in the innermost of the user's frames that has any."""
    for frame in case.frames:
        loops = _source.loops(line_of(frame))
        if loops:
            return loops
    return []


def _hoisted_or_carried(case: FailedPass, variable: str) -> str:
    """What the source says of a variable: assigned outside the loop, within it, or nowhere."""
    if not variable:
        return ""
    for frame in case.frames:
        line = line_of(frame)
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
            if not writers:
                return "cached"
            return "carried" if writers - {"__init__"} else "hoisted"
        return ""
    return ""


def _writers(case: FailedPass, name: str) -> set[str]:
    """The functions, in the files of the user's frames, that assign a variable."""
    files = {frame.f_code.co_filename for frame in case.frames}
    return {writer for file in files for writer in _source.assigned_in(name, file)}


def infer(case: FailedPass) -> Likely | None:
    """Nothing was recorded: judge by the variables in sight and the source."""
    if not case.roots or case.line is None:
        return None
    cause = _infer(case)
    if cause is None and _source.number(case.line.file):
        with _source.reruns():
            cause = _infer(case)
    return cause


def _infer(case: FailedPass) -> Likely | None:
    needing = _needing(case.roots)
    twice = _same_twice(case)
    if twice is not None:
        return twice
    spent = {node: name for node, name in case.names.nodes.items() if node in needing}
    spent = {node: name for node, name in spent.items() if node not in case.roots}
    judged = [(node, name, _hoisted_or_carried(case, name)) for node, name in spent.items()]
    other = _other_loss(case, needing)
    for cause in ("cached", "hoisted"):
        chosen = [(node, name) for node, name, named in judged if named == cause]
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
    for node, name, named in judged:
        if named == "carried" and name != _source.base(name):
            return _shared(case, node, name, "carried")
    for held in _in_sight(case):
        name = _source.base(held)
        if "." in name and _writers(case, name):
            return _shared(case, None, name, "carried")
    in_order = _in_order(case, spent) if not _loops(case) else None
    if in_order is not None or _source.function_at(_line_of(case)) is None:
        return in_order
    for node, name in spent.items():  # no loop is in sight: an optimizer calls this function again and again
        if not _source.assignments(_source.base(name), _line_of(case)):
            return _shared(case, node, name, "hoisted")
    return None


def _in_order(case: FailedPass, spent: dict[Node, str]) -> Likely | None:
    """No loop: statements ran as they stand, those of cells in the order of their runs."""
    line = _line_of(case)
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


def _in_sight(case: FailedPass) -> list[str]:
    """The variables whose values belong to the failing graph."""
    below = _inspect.below(case.roots)
    tensors = [tensor for tensor in case.names.all_tensors() if tensor.grad_fn is not None and tensor.grad_fn in below]
    return [path for tensor in tensors for path in case.names.paths[id(tensor)]]


def _shared(case: FailedPass, node: Node | None, variable: str, cause: str) -> Likely:
    assigned = _source.assignments(_source.base(variable), _line_of(case))
    created = Line(_line_of(case).file, assigned[-1]) if assigned else None
    return Likely(node, variable, created, case.line if cause != "two losses" else None, cause, EARLIER)


def _line_of(case: FailedPass) -> Line:
    return case.line or Line("?", 0)


def _same_twice(case: FailedPass) -> Likely | None:
    """Is there an earlier pass of the same variable, or none of its assignments in the loop?"""
    root = case.roots[0]
    variable = case.names.nodes.get(root, "") or _source.target_of(_line_of(case))
    if not variable:
        return None
    numbers = [number for number in _source.made_at(variable, _line_of(case)) if number <= _line_of(case).number]
    passes = [
        statement.lineno
        for statement in _source.statements(_line_of(case))
        if statement.lineno < _line_of(case).number and _source.frees(statement, variable)
    ]
    earlier = [number for number in passes if not numbers or number >= numbers[-1]]
    loops = _source.loops(_line_of(case))
    a_name = _source.base(variable) == variable
    outside = bool(a_name and loops and numbers) and not any(_source.within(loops[0], number) for number in numbers)
    if not earlier and not outside:
        return None
    freed = Line(_line_of(case).file, earlier[0]) if earlier else _line_of(case)
    created = Line(_line_of(case).file, numbers[-1]) if numbers else None
    return Likely(root, variable, created, freed, "same loss twice", "" if earlier else EARLIER)


def _other_loss(case: FailedPass, needing: set[Node]) -> Likely | None:
    """A scalar in sight that shares nodes with this loss, and was differentiated before."""
    for frame in case.frames[:1]:
        for name, value in local_variables(frame).items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                continue
            node = _nodes.node_of(value)
            if node is None or node in case.roots:
                continue
            mine = _nodes.walk([node])
            common = [each for each in mine if each in needing and _saved.leaf(each) is None]
            passes = [s for s in _source.statements(_line_of(case)) if _source.frees(s, name)]
            if common and passes:
                edge = _nodes.topmost(case.roots, common)
                chosen = next((each for each in edge if each in case.names.nodes), edge[0])
                shared = _shared(case, chosen, case.names.nodes.get(chosen, ""), "two losses")
                return shared._replace(freed=Line(_line_of(case).file, passes[0].lineno), earlier="")
    return None


def _needing(roots: list[Node]) -> set[Node]:
    """The nodes below some roots that cannot run: those that were freed, and all that lead to one."""
    graph = _inspect.below(roots)
    return _nodes.leading_to(graph, _inspect.having(graph, "freed"))
