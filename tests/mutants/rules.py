"""Where a bug can be planted, and what it looks like: one small change of one expression or statement."""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.meta.source import ROOT

SOURCE = ROOT / "src"
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
WORDS = ("_words", "_screen", "_tour", "_shown")
"""Modules that write sentences."""


class Mutant(NamedTuple):
    """One planted bug: the text between two places of a file, and what stands there instead."""

    file: str
    line: int
    last: int
    column: int
    end: int
    rule: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column}-{self.end} {self.rule}"

    def planted(self, source: str) -> str:
        """The file with the bug; nothing before it moves."""
        lines = source.encode().splitlines(keepends=True)
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        tail = lines[self.last - 1][self.end :] + b"".join(lines[self.last :])
        return (head + self.after.encode() + tail).decode()


def drawn(count: int, seed: int) -> list[Mutant]:
    """So many of all, by chance; the first ones are the same for any count."""
    found = [mutant for file in sorted(SOURCE.rglob("*.py")) for mutant in of_file(file)]
    random.Random(seed).shuffle(found)
    return found[:count]


def of_file(path: Path) -> Iterator[Mutant]:
    """Every bug that can be planted in a file's functions."""
    if path.stem.endswith(WORDS):
        return
    source, file = path.read_text("utf-8"), path.relative_to(SOURCE).as_posix()
    lines = source.encode().splitlines(keepends=True)
    for node, arguments in _inside(ast.parse(source), ()):
        for place, rule, after in _changes(node, arguments):
            last, end = place.end_lineno or 0, place.end_col_offset or 0
            before = _between(lines, place)
            yield Mutant(file, place.lineno, last, place.col_offset, end, rule, before, after)


def _between(lines: list[bytes], place: "Node") -> str:
    """What stands in a place; `ast.get_source_segment` would split the file each time."""
    first, last = place.lineno - 1, place.end_lineno or place.lineno
    part = b"".join(lines[first:last])
    return part[place.col_offset : len(part) - len(lines[last - 1]) + (place.end_col_offset or 0)].decode()


Node = ast.expr | ast.stmt
Arguments = tuple[str, ...]


def _inside(node: ast.AST, arguments: Arguments, code: bool = False) -> Iterator[tuple[Node, Arguments]]:
    """The nodes of functions' bodies, each with the function's arguments; no words, no types, no overloads."""
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)) and code:
        if isinstance(node, ast.Raise):
            yield node, arguments
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.name in ("__repr__", "__str__") or any("overload" in ast.unparse(d) for d in node.decorator_list):
            return
        given = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls"))
        for statement in node.body:
            yield from _inside(statement, given, code=True)
        return
    if isinstance(node, ast.AnnAssign):
        if code and node.value is not None:
            yield from _inside(node.value, arguments, code)
        return
    if code and isinstance(node, (ast.expr, ast.stmt)):
        yield node, arguments
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, arguments, code)


def _changes(node: Node, arguments: Arguments) -> Iterator[tuple[Node, str, str]]:
    """The bugs that can be planted at one node: in which place, by which rule, and what stands there then."""
    if isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        yield node.test, "condition", f"(not {_text(node.test)})"
    for rule, after in _instead(node, arguments):
        yield node, rule, after


def _instead(node: Node, arguments: Arguments) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield "comparison", _text(ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators))
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_text(node):
            yield "operator", _text(ast.BinOp(node.left, OPERATORS[type(operator)](), node.right))
        case ast.BoolOp(op=operator, values=values):
            yield "and, or", _text(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", _text(operand)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branches", _text(ast.IfExp(test, orelse, body))
        case ast.Constant(value=bool() | int() | float() as value):
            yield "constant", repr(_other(value))
        case ast.Call(func=ast.Attribute(value=receiver), args=[], keywords=[]):
            yield "call", _text(receiver)
        case ast.Return(value=ast.expr() as value) if arguments and ast.unparse(value) != arguments[0]:
            yield "return", f"return {arguments[0]}"
        case ast.Raise():
            yield "raise", "pass"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"
        case _:
            return


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def _is_text(node: ast.BinOp) -> bool:
    """Whether words are put together."""
    sides = node.left, node.right
    return any(isinstance(s, ast.JoinedStr) or isinstance(getattr(s, "value", None), str) for s in sides)


def _other(value: float) -> float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2 * value or 1.0
