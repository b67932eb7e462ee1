"""What becomes of a variable in the user's source: where it is assigned, what reads it, what a loop hands on in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hodiff.graph import _source, _written
from hodiff.graph._line import Line


def assigned_by(line: Line) -> list[str]:
    """What the statement at a line assigns."""
    found = [
        node
        for node in _source.nodes_in(line.file)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and _source.within(node, line.number)
    ]
    return _source.targets(found[-1]) if found else []


def given_by(line: Line) -> list[str]:
    """What the assignment at a line gives its whole value to: nothing, for one that unpacks."""
    node = _source.statement(line)
    if isinstance(node, ast.Assign) and any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
        return []
    return _source.targets(node) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []


def assignments(name: str, line: Line) -> list[int]:
    """The lines that assign `name` in the function around a line."""
    return sorted(
        node.lineno  # type: ignore[attr-defined]
        for node in _source.inside(_source.scope_of(line))
        if name in _source.targets(node)
    )


def made_at(expression: str, line: Line) -> list[int]:
    """The lines that assign a variable in the function around a line; or any of those that an expression reads."""
    tree = None if _written.is_plain(expression) else _source.parsed(expression)
    names = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name)] if tree is not None else [expression]
    return sorted(number for name in names for number in assignments(name, line))


def assigned_in(name: str, file: str) -> set[str]:
    """The names of the functions in a file that assign `name`, or the same attribute of `self`; "" for the module."""
    also = set(_written.forms(name))
    lines = [node.lineno for node in _source.nodes_in(file) if also & set(_source.targets(node))]  # type: ignore[attr-defined]
    return {getattr(_source.scope_of(Line(file, number)), "name", "") for number in lines}


def reads(node: ast.AST, name: str) -> bool:
    """Whether a statement reads a variable."""
    return any(
        isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Load) and ast.unparse(each) == name
        for each in ast.walk(node)
    )


def loaded(line: Line) -> list[str]:
    """The names that the statement at a line reads."""
    node = _source.statement(line)
    names = [each.id for each in _source.nodes_at(line) if isinstance(each, ast.Name)]
    given = set(_source.targets(node)) if node is not None and not isinstance(node, ast.AugAssign) else set()
    return [name for name in dict.fromkeys(names) if name not in given]


def chains(line: Line) -> list[str]:
    """The names and attributes that the statement at a line reads, at their longest: `self.w`, `torch.relu`."""
    node = _source.statement(line)
    value = getattr(node, "value", None)
    found: list[str] = []
    stack = [value] if value is not None else []
    while stack:
        each = stack.pop()
        if isinstance(each, ast.Name) or (isinstance(each, ast.Attribute) and _written.is_plain(ast.unparse(each))):
            found.append(ast.unparse(each))
        else:
            stack += list(ast.iter_child_nodes(each))
    return found


def extends(line: Line, name: str) -> bool:
    """Whether the statement at a line gives a name a value made from its own: `total += x`, `h = cell(x, h)`."""
    node = _source.statement(line)
    read = [ast.unparse(each) for each in ast.walk(getattr(node, "value", None) or ast.Pass())]
    return node is not None and name in _source.targets(node) and (isinstance(node, ast.AugAssign) or name in read)


def rebound_in(loop: ast.stmt, name: str) -> bool:
    """Whether a loop gives a name another value, and not only changes the one that it has (`p -= step`)."""
    changed = [node.target for node in ast.walk(loop) if isinstance(node, ast.AugAssign)]
    stores = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    return any(node.id == name and node not in changed for node in stores)


def carried(loop: ast.stmt) -> list[str]:
    """The names that a loop reads before it assigns them: what one step hands to the next."""
    stores: dict[str, int] = {}
    loads: dict[str, int] = {}
    for number, statement in enumerate(_flat(getattr(loop, "body", []))):
        names = set(_source.targets(statement))
        if not isinstance(statement, (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.Try)):
            for node in ast.walk(statement):
                if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                    loads.setdefault(ast.unparse(node), number)
        if isinstance(statement, ast.AugAssign):
            loads.setdefault(ast.unparse(statement.target), number)
        for name in names:
            stores.setdefault(name, number)
    return [name for name, first in stores.items() if loads.get(name, first + 1) <= first]


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from _flat(getattr(statement, field, []) if not isinstance(statement, ast.FunctionDef) else [])


def hands_on(name: str, line: Line) -> bool:
    """Whether a loop around a line reads a name before it assigns it: what one round leaves to the next."""
    return any(name in carried(loop) for loop in _source.loops(line))


def is_alone(name: str, line: Line) -> bool:
    """Whether a function's variable holds a result of an operation, and no other of its variables is given it."""
    before = [each for each in _source.statements(line) if each.lineno < line.number]
    made = [each for each in before if isinstance(each, ast.Assign) and name in _source.targets(each)]
    also = [each for each in before if isinstance(each, ast.Assign) and ast.unparse(each.value) == name]
    return bool(made) and isinstance(made[-1].value, (ast.Call, ast.BinOp)) and not also
