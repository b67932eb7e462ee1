"""What lines of the user's source change in place, put into containers, or leave in objects."""

from __future__ import annotations

import ast

from hodiff.graph import _source, _written
from hodiff.graph._line import Line


def changed_at(line: Line) -> list[str]:
    """The variables that the statement at a line changes in place: `x += 1`, `x[i] = 0`, `x.mul_(2)`."""
    node = _source.statement(line)
    if isinstance(node, ast.AugAssign):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets if isinstance(target, ast.Subscript)]
    call = node.value if isinstance(node, ast.Expr) else None
    changed = None
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):  # x.sub_(m).div_(s) changes x
        changed = call.func.value if call.func.attr.endswith("_") else changed
        call = call.func.value
    return [ast.unparse(changed)] if changed is not None else []


def also_changed(line: Line) -> list[Line]:
    """The later lines of the function around a line that change the same variable in place."""
    names = {_written.base(name) for name in changed_at(line)}
    later = [Line(line.file, each.lineno) for each in _source.statements(line) if each.lineno > line.number]
    return [each for each in later if names & {_written.base(name) for name in changed_at(each)}]


def receiver(line: Line, method: str) -> str:
    """What the statement at a line calls a method of: `hx[i]` in `[hx[i].squeeze_(0) for i in ...]`."""
    for each in _source.nodes_at(line):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method:
            return ast.unparse(each.func.value)
    return ""


def kept_at(line: Line) -> list[Line]:
    """The lines of the function around a line that leave something in an object: `self.n += 1`, `cache[k] = v`."""
    return [
        Line(line.file, each.lineno)
        for each in _source.statements(line)
        if any("." in target or "[" in target for target in _source.targets(each))
    ]


_GROW = ("append", "extend", "insert", "appendleft")


def fills(loop: ast.stmt, name: str) -> bool:
    """Whether a loop puts something into a container: `name.append(x)`, `name[i] = x`."""
    return any(_puts_into(node, name) for node in ast.walk(loop))


def filled_at(name: str, file: str) -> list[int]:
    """The lines of a file that put something into a container: `name.append(x)`, `name[i] = x`, `name += [x]`."""
    return sorted(
        getattr(node, "lineno", 0)
        for node in _source.nodes_in(file)
        if _puts_into(node, name) or (isinstance(node, ast.AugAssign) and name in _source.targets(node))
    )


def _puts_into(node: ast.AST, name: str) -> bool:
    call = node.func if isinstance(node, ast.Call) else None
    if isinstance(call, ast.Attribute) and call.attr in _GROW and ast.unparse(call.value) == name:
        return True
    return any(target.startswith(f"{name}[") for target in _source.targets(node))


def guarded(name: str, file: str) -> str:
    """How a file asks whether an attribute was filled: `is None`, `in`, `hasattr`; empty if it does not."""
    attribute = name.rpartition(".")[2]
    for node in _source.nodes_in(file):
        if isinstance(node, (ast.If, ast.IfExp)):
            for test in ast.walk(node.test):
                if isinstance(test, ast.Compare) and len(test.ops) == 1:
                    left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
                    none = isinstance(test.ops[0], (ast.Is, ast.IsNot)) and right == "None"
                    if none and left.rpartition(".")[2] == attribute:
                        return "is None"
                    inside = isinstance(test.ops[0], (ast.In, ast.NotIn))
                    if inside and right.rpartition(".")[2] == attribute:
                        return "in"
                elif isinstance(test, ast.Call) and ast.unparse(test.func) == "hasattr" and test.args[1:]:
                    return "hasattr" if ast.unparse(test.args[1]) == repr(attribute) else ""
    return ""


def refilled(name: str, file: str) -> bool:
    """Whether a file asks a dict if a key is there, before it fills it: by `in`, `.get()`, or a `KeyError`."""
    attribute = name.rpartition(".")[2]
    asked: list[ast.expr] = []
    for node in _source.nodes_in(file):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "KeyError" in ast.unparse(node.type):
            return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            asked.append(node.comparators[0])
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in ("get", "setdefault"):
            asked.append(call.value)
    return any(ast.unparse(each).rpartition(".")[2] == attribute for each in asked)
