"""The user's source as a tree: the function, the loops and the statement around a line, and what that assigns."""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Iterator
from functools import lru_cache

from hodiff.graph import _cells
from hodiff.graph._line import Line


@lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module | None:
    """Source as a tree; None if it is none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _file(name: str) -> ast.Module | None:
    text, before = "".join(linecache.getlines(name)), _cells.read(name)
    return _joined(text, before) if before else parsed(text)


@lru_cache(maxsize=8)
def _joined(text: str, before: tuple[tuple[int, str], ...]) -> ast.Module | None:
    """A cell after those that ran before it, whose lines are numbered up to 0."""
    own = parsed(text)
    if own is None:
        return None
    body: list[ast.stmt] = []
    for offset, earlier in before:
        ran = parsed(earlier)
        body += [ast.increment_lineno(copy.deepcopy(each), -offset) for each in (ran.body if ran else ())]
    return ast.Module([*body, *own.body], [])


def nodes_in(file: str) -> Iterator[ast.AST]:
    """All nodes of a file; none, if its source is not at hand."""
    return _walk(_file(file))


def nodes_at(line: Line) -> Iterator[ast.AST]:
    """All nodes of the simple statement at a line."""
    return _walk(statement(line))


def _walk(node: ast.AST | None) -> Iterator[ast.AST]:
    return iter(()) if node is None else ast.walk(node)


def within(node: ast.AST, number: int) -> bool:
    """Whether a line lies in a statement."""
    return getattr(node, "lineno", number + 1) <= number <= getattr(node, "end_lineno", number - 1)


def scope_of(line: Line) -> ast.AST | None:
    """The innermost function around a line, or the module."""
    scope: ast.AST | None = _file(line.file)
    for node in _walk(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and within(node, line.number):
            scope = node  # ast.walk is breadth first: the last one is the innermost
    return scope


def inside(scope: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes of a function or a module, without those of functions and classes within it."""
    stack = [scope] if scope is not None else []
    while stack:
        node = stack.pop(0)
        yield node
        stack += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        ]


def loops(line: Line) -> list[ast.stmt]:
    """The loops around a line within its function, the innermost first."""
    found: list[ast.stmt] = [
        node
        for node in inside(scope_of(line))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and any(within(part, line.number) for part in node.body)
    ]
    return found[::-1]


def statements(line: Line) -> Iterator[ast.stmt]:
    """The simple statements of the function around a line, in order."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
    found = [node for node in inside(scope_of(line)) if isinstance(node, simple)]
    yield from sorted(found, key=lambda node: node.lineno)


def statement(line: Line) -> ast.stmt | None:
    """The simple statement at a line."""
    return next((node for node in statements(line) if within(node, line.number)), None)


def targets(node: ast.AST) -> list[str]:
    """What a statement assigns, as written: `y`, `self.h`."""
    if isinstance(node, ast.Assign):
        found: list[ast.expr] = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor)):
        found = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return []
    flat: list[ast.expr] = []
    while found:
        target = found.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            found = [*target.elts, *found]
        else:
            flat.append(target.value if isinstance(target, ast.Starred) else target)
    return [ast.unparse(target) for target in flat]


def function_at(line: Line) -> ast.stmt | None:
    """The function around a line."""
    scope = scope_of(line)
    return scope if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def parameters(line: Line) -> list[str]:
    """The parameters of the function around a line."""
    scope = scope_of(line)
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return []
    return [each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)]


def is_call(line: Line) -> bool:
    """Whether the statement at a line is a call, an assignment of one, or a `return` of one."""
    return isinstance(getattr(statement(line), "value", None), ast.Call)


def returns(line: Line) -> bool:
    """Whether the statement at a line is a `return`."""
    return isinstance(statement(line), ast.Return)


def calls(line: Line, name: str) -> bool:
    """Whether the statement at a line calls a function of that name."""
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] == name for each in nodes_at(line)
    )
