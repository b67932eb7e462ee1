"""The user's source, in files or cells: its lines, what they assign, change in place,
differentiate.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple


@lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module | None:
    """Source as a tree; None if it is none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _file(name: str) -> ast.Module | None:
    return parsed("".join(linecache.getlines(name)))


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
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and within(
            node, line.number
        ):
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
            if not isinstance(
                child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
            )
        ]


def loops(line: Line) -> list[ast.stmt]:
    """The loops around a line within its function, the innermost first."""
    loop_statements: list[ast.stmt] = [
        node
        for node in inside(scope_of(line))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        and any(within(part, line.number) for part in node.body)
    ]
    return loop_statements[::-1]


def statements(line: Line) -> Iterator[ast.stmt]:
    """The simple statements of the function around a line, in order."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
    nodes = [node for node in inside(scope_of(line)) if isinstance(node, simple)]
    yield from sorted(nodes, key=lambda node: node.lineno)


def statement(line: Line) -> ast.stmt | None:
    """The simple statement at a line."""
    return next((node for node in statements(line) if within(node, line.number)), None)


def targets(node: ast.AST) -> list[str]:
    """The names that a statement assigns, as written: `y`, `self.h`."""
    if isinstance(node, ast.Assign):
        expressions: list[ast.expr] = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor)):
        expressions = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        expressions = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return []
    flat: list[ast.expr] = []
    while expressions:
        target = expressions.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            expressions = [*target.elts, *expressions]
        else:
            flat.append(target.value if isinstance(target, ast.Starred) else target)
    return [ast.unparse(target) for target in flat]


def is_call(line: Line) -> bool:
    """Whether the statement at a line is a call, an assignment of one, or a `return` of one."""
    return isinstance(getattr(statement(line), "value", None), ast.Call)


def returns(line: Line) -> bool:
    """Whether the statement at a line is a `return`."""
    return isinstance(statement(line), ast.Return)


def calls(line: Line, name: str) -> bool:
    """Whether the statement at a line calls a function of that name."""
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] == name
        for each in nodes_at(line)
    )


# --- what becomes of a variable in the user's source ----------------------------------------------


def assigned_by(line: Line) -> list[str]:
    """The names that the statements at a line assign."""
    return [
        target for node in statements(line) if within(node, line.number) for target in targets(node)
    ]


def given_by(line: Line) -> list[str]:
    """The names to which the assignment at a line gives its whole value: none,
    for one that unpacks.
    """
    node = statement(line)
    if isinstance(node, ast.Assign) and any(
        isinstance(target, (ast.Tuple, ast.List)) for target in node.targets
    ):
        return []
    return targets(node) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []


def assignments(name: str, line: Line) -> list[int]:
    """The lines that assign `name` in the function around a line."""
    return sorted(
        node.lineno  # type: ignore[attr-defined]
        for node in inside(scope_of(line))
        if name in targets(node)
    )


def only_assignment(name: str, line: Line | None) -> Line | None:
    """The line that assigns `name` in the function around a line, if it is the only one."""
    numbers = assignments(name, line) if name and line is not None else []
    only = Line(line.file, numbers[0]) if line is not None and len(numbers) == 1 else None
    if only and cell_of(only.file) and reads(statement(only), name):
        return None  # what it had before is from an earlier cell
    return only


def reads(node: ast.AST | None, name: str) -> bool:
    """Whether a statement reads a variable."""
    return any(
        isinstance(each, (ast.Name, ast.Attribute))
        and isinstance(each.ctx, ast.Load)
        and ast.unparse(each) == name
        for each in _walk(node)
    )


def carried(loop: ast.stmt) -> list[str]:
    """The names that a loop reads before it assigns them: what one step hands to the next."""
    stores: dict[str, int] = {}
    loads: dict[str, int] = {}
    for number, statement in enumerate(_flat(getattr(loop, "body", []))):
        names = set(targets(statement))
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
            yield from _flat(
                getattr(statement, field, []) if not isinstance(statement, ast.FunctionDef) else []
            )


def hands_on(name: str, line: Line) -> bool:
    """Whether a loop around a line reads a name before it assigns it:
    what one round leaves to the next.
    """
    return any(name in carried(loop) for loop in loops(line))


# --- what lines of the user's source change in place, or put into containers ----------------------


def changed_at(line: Line, call: str = "") -> list[str]:
    """The variables that the statement at a line changes in place: `x += 1`, `x[i] = 0`,
    `x.mul_(2)`.

    If `call`, which changed them, assigned an item of `x`, it is `x` that was changed, and not
    `x[i]`.
    """
    node = statement(line)
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        given = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        items = [target for target in given if isinstance(target, ast.Subscript)]
        if call == "__setitem__":
            return [ast.unparse(target.value) for target in items]
        return list(map(ast.unparse, items if isinstance(node, ast.Assign) else given))
    calling = node.value if isinstance(node, ast.Expr) else None
    changed = None
    # x.sub_(m).div_(s) changes x
    while isinstance(calling, ast.Call) and isinstance(calling.func, ast.Attribute):
        changed = calling.func.value if calling.func.attr.endswith("_") else changed
        calling = calling.func.value
    return [ast.unparse(changed)] if changed is not None else []


def receiver(line: Line, method: str) -> str:
    """The object whose method the statement at a line calls: `hx[i]` in
    `[hx[i].squeeze_(0) for i in ...]`.
    """
    called = (each.func for each in nodes_at(line) if isinstance(each, ast.Call))
    owners = [
        ast.unparse(function.value)
        for function in called
        if isinstance(function, ast.Attribute) and function.attr == method
    ]
    return next(iter(owners), "")


# --- what the user's source says of backward passes: what each differentiates ---------------------


def target_of(line: Line) -> str:
    """The expression that the pass at a line differentiates, as written: of `x.backward(...)`,
    `grad(x, ...)`, `backward(x)`.
    """
    for call in nodes_at(line):
        if isinstance(call, ast.Call):
            called = ast.unparse(call.func).rpartition(".")
            of_torch = called[0] in ("", "torch.autograd", "autograd", "torch")
            if called[2] == "backward" and not of_torch:
                return called[0]
            if (
                called[2] in ("grad", "backward")
                and call.args
                and isinstance(call.args[0], (ast.Name, ast.Attribute))
            ):
                return ast.unparse(call.args[0])
    return ""


# --- lines: where they are, what they say ---------------------------------------------------------


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The source line, without its indentation."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        if not self.number:
            return self.file
        # in the locale C Python knows a name by its bytes
        name = os.fsencode(os.path.basename(self.file)).decode("utf-8", "replace")
        cell = cell_of(self.file)
        return f"In[{cell}]:{self.number}" if cell else f"{name}:{self.number}"


def quoted(line: Line) -> str:
    """A line for a list: where it is, and what it says;
    the text alone is missing where no source is at hand.
    """
    return f"{line}   {line.text}".rstrip()


def line_of(frame: FrameType) -> Line:
    """The line that a frame is at."""
    return Line(frame.f_code.co_filename, frame.f_lineno or 0)


class Frame(NamedTuple):
    """A call of the user's code that was under way: its code,
    and the number of the line that it was at.
    """

    code: CodeType
    number: int

    @property
    def line(self) -> Line:
        """The line that it was at."""
        return Line(self.code.co_filename, self.number)


Path = tuple[Frame, ...]
"""Where something ran: the user's frames, the innermost first."""


def lines_of(path: Path) -> tuple[Line, ...]:
    """The lines of a path."""
    return tuple(Line(code.co_filename, number) for code, number in path)


def cell_of(file: str) -> int:
    """The number of a cell of IPython or Jupyter, by its file; 0 for what is none."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get() if get is not None else None
    name = shell.compile.format_code_name(file) if shell is not None else None
    match = re.fullmatch(r"In ?\[(\d+)\]", name[1]) if name else None
    return int(match.group(1)) if match else 0


# --- variables as they are written: `net.cell.h[0]` -----------------------------------------------


def steps(path: str) -> int:
    """The number of attributes and subscripts in a path."""
    return path.count(".") + path.count("[")


def forms(path: str) -> tuple[str, str]:
    """The two spellings of a variable, as written and as within its class:
    `trainer.total` is `self.total` there.
    """
    return path, re.sub(r"^.*\.", "self.", path)
