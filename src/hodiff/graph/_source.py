"""What the user's source says: the text of a line, the loop around it, what it assigns, what a name is built from."""

from __future__ import annotations

import ast
import copy
import linecache
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from hodiff.graph import _cells


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The source line, without its indentation."""
        return _cells.resolve(self.file, self.number)[2]

    def __str__(self) -> str:
        cell, number, _ = _cells.resolve(self.file, self.number)
        if not self.number and not cell:
            return self.file
        return f"In[{cell}]:{number}" if cell else f"{os.path.basename(self.file)}:{number}"


def at(line: Line | None) -> str:
    """A line for a sentence: where it is, and what it says."""
    if line is None:
        return "the failing call"
    return f"{line} ({text})" if (text := line.text) else str(line)


def quoted(line: Line) -> str:
    """A line for a list: where it is, and what it says; the text alone is missing where no source is at hand."""
    return f"{line}   {line.text}".rstrip()


def line_of(frame: FrameType) -> Line:
    """The line that a frame is at."""
    return Line(frame.f_code.co_filename, frame.f_lineno or 0)


def lines_of(path: tuple[Any, ...]) -> tuple[Line, ...]:
    """The lines of a path, which has codes and line numbers in turn."""
    return tuple(Line(code.co_filename, number) for code, number in zip(path[::2], path[1::2], strict=True))


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _tree(file: str) -> ast.Module | None:
    text, before = "".join(linecache.getlines(file)), _cells.read(file)
    return _joined(text, before) if before else _parsed(text)


@lru_cache(maxsize=8)
def _joined(text: str, before: tuple[tuple[int, str], ...]) -> ast.Module | None:
    """A cell after those that ran before it, whose lines are numbered up to 0."""
    own = _parsed(text)
    if own is None:
        return None
    body: list[ast.stmt] = []
    for offset, earlier in before:
        tree = _parsed(earlier)
        body += [ast.increment_lineno(copy.deepcopy(each), -offset) for each in (tree.body if tree else ())]
    return ast.Module([*body, *own.body], [])


def _holds(node: ast.AST, number: int) -> bool:
    return getattr(node, "lineno", number + 1) <= number <= getattr(node, "end_lineno", number - 1)


def _scope(line: Line) -> ast.AST | None:
    """The innermost function around a line, or the module."""
    scope: ast.AST | None = _tree(line.file)
    for node in ast.walk(scope) if scope is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and _holds(node, line.number):
            scope = node  # ast.walk is breadth first: the last one is the innermost
    return scope


def _inside(scope: ast.AST | None) -> Iterator[ast.AST]:
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
    scope = _scope(line)
    found: list[ast.stmt] = [
        node
        for node in _inside(scope)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and any(_holds(part, line.number) for part in node.body)
    ]
    return found[::-1]


def statements(line: Line) -> Iterator[ast.stmt]:
    """The simple statements of the function around a line, in order."""
    scope = _scope(line)
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
    found = [node for node in _inside(scope) if isinstance(node, simple)]
    yield from sorted(found, key=lambda node: node.lineno)


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


def assigned_by(line: Line) -> list[str]:
    """What the statement at a line assigns."""
    tree = _tree(line.file)
    found = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and _holds(node, line.number)
    ]
    return targets(found[-1]) if found else []


def assignments(name: str, line: Line) -> list[int]:
    """The lines that assign `name` in the function around a line."""
    scope = _scope(line)
    return sorted(
        node.lineno  # type: ignore[attr-defined]
        for node in _inside(scope)
        if name in targets(node)
    )


def made_at(expression: str, line: Line) -> list[int]:
    """The lines that assign a variable in the function around a line; or any of those that an expression reads."""
    named = _BASE.fullmatch(expression)
    tree = None if named else _parsed(expression)
    names = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name)] if tree is not None else [expression]
    return sorted(number for name in names for number in assignments(name, line))


def assigned_in(name: str, file: str) -> set[str]:
    """The names of the functions in a file that assign `name`, or the same attribute of `self`; "" for the module."""
    tree = _tree(file)
    also = {name, re.sub(r"^.*\.", "self.", name)}
    lines = [node.lineno for node in (ast.walk(tree) if tree is not None else ()) if also & set(targets(node))]  # type: ignore[attr-defined]
    return {getattr(_scope(Line(file, number)), "name", "") for number in lines}


_GROW = ("append", "extend", "insert", "appendleft")


def fills(loop: ast.stmt, name: str) -> bool:
    """Whether a loop puts something into a container: `name.append(x)`, `name[i] = x`."""
    for node in ast.walk(loop):
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in _GROW and ast.unparse(call.value) == name:
            return True
        if any(target.startswith(f"{name}[") for target in targets(node)):
            return True
    return False


def filled_at(name: str, file: str) -> list[int]:
    """The lines of a file that put something into a container: `name.append(x)`, `name[i] = x`, `name += [x]`."""
    found = []
    tree = _tree(file)
    for node in ast.walk(tree) if tree is not None else ():
        call = node.func if isinstance(node, ast.Call) else None
        grows = isinstance(call, ast.Attribute) and call.attr in _GROW and ast.unparse(call.value) == name
        if grows or any(each == name or each.startswith(f"{name}[") for each in _changed(node)):
            found.append(getattr(node, "lineno", 0))
    return sorted(found)


def _changed(node: ast.AST) -> list[str]:
    return targets(node) if isinstance(node, ast.AugAssign) else [t for t in targets(node) if "[" in t]


def within(node: ast.AST, number: int) -> bool:
    """Whether a line lies in a statement."""
    return _holds(node, number)


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
            yield from _flat(getattr(statement, field, []) if not isinstance(statement, ast.FunctionDef) else [])


_BASE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def base(path: str) -> str:
    """A path without its subscripts: `state[0]` -> `state`, `self.h` as it is."""
    found = _BASE.match(path)
    return found.group() if found else path


_CUTS = {
    "detach": "detached",
    "detach_": "detached",
    "data": "detached",
    "item": "constant",
    "tolist": "constant",
    "numpy": "constant",
    "tensor": "constant",
    "as_tensor": "constant",
    "no_grad": "no_grad",
    "inference_mode": "no_grad",
    "argmax": "constant",
    "grad": "gradient",
}


def cuts(name: str, line: Line) -> list[tuple[Line, str]]:
    """Lines before `line`, among those that `name` is computed from, that look as if they cut the graph."""
    wanted, found = {base(name)}, []
    blocks = _no_grad_blocks(line)
    for statement in reversed([s for s in statements(line) if s.lineno <= line.number]):
        mine = {base(target) for target in targets(statement)}
        if not (mine & wanted or statement.lineno == line.number):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                wanted.add(node.id)
            word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            kind = _CUTS.get(word)
            if kind == "gradient" and "create_graph=True" in ast.unparse(statement):
                kind = "constant gradient"
            if kind and statement.lineno != line.number:
                found.append((Line(line.file, statement.lineno), kind))
        if any(_holds(block, statement.lineno) for block in blocks):
            found.append((Line(line.file, statement.lineno), "no_grad"))
    return list(dict.fromkeys(found))


def _no_grad_blocks(line: Line) -> list[ast.AST]:
    scope = _scope(line)
    return [
        node
        for node in (ast.walk(scope) if scope is not None else ())
        if isinstance(node, ast.With)
        and any(word in ast.unparse(item) for item in node.items for word in ("no_grad", "inference_mode"))
    ]


def _simple(line: Line) -> ast.stmt | None:
    """The simple statement at a line."""
    return next((node for node in statements(line) if _holds(node, line.number)), None)


def given_by(line: Line) -> list[str]:
    """What the assignment at a line gives its whole value to: nothing, for one that unpacks."""
    node = _simple(line)
    if isinstance(node, ast.Assign) and any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
        return []
    return targets(node) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []


def is_call(line: Line) -> bool:
    """Whether the statement at a line is a call, an assignment of one, or a `return` of one."""
    return isinstance(getattr(_simple(line), "value", None), ast.Call)


def reads(node: ast.AST, name: str) -> bool:
    """Whether a statement reads a variable."""
    return any(
        isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Load) and ast.unparse(each) == name
        for each in ast.walk(node)
    )


def receiver(line: Line, method: str) -> str:
    """What the statement at a line calls a method of: `hx[i]` in `[hx[i].squeeze_(0) for i in ...]`."""
    node = _simple(line)
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method:
            return ast.unparse(each.func.value)
    return ""


def also_changed(line: Line) -> list[Line]:
    """The later lines of the function around a line that change the same variable in place."""
    names = {base(name) for name in changed_at(line)}
    later = [Line(line.file, each.lineno) for each in statements(line) if each.lineno > line.number]
    return [each for each in later if names & {base(name) for name in changed_at(each)}]


def kept_at(line: Line) -> list[Line]:
    """The lines of the function around a line that leave something in an object: `self.n += 1`, `cache[k] = v`."""
    return [
        Line(line.file, each.lineno)
        for each in statements(line)
        if any("." in target or "[" in target for target in targets(each))
    ]


def calls(line: Line, name: str) -> bool:
    """Whether the statement at a line calls a function of that name."""
    node = _simple(line)
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] == name
        for each in (ast.walk(node) if node is not None else ())
    )


def returns(line: Line) -> bool:
    """Whether the statement at a line is a `return`."""
    return isinstance(_simple(line), ast.Return)


def loaded(line: Line) -> list[str]:
    """The names that the statement at a line reads."""
    node = _simple(line)
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)] if node is not None else []
    given = set(targets(node)) if node is not None and not isinstance(node, ast.AugAssign) else set()
    return [name for name in dict.fromkeys(names) if name not in given]


def extends(line: Line, name: str) -> bool:
    """Whether the statement at a line gives a name a value made from its own: `total += x`, `h = cell(x, h)`."""
    node = _simple(line)
    read = [ast.unparse(each) for each in ast.walk(getattr(node, "value", None) or ast.Pass())]
    return node is not None and name in targets(node) and (isinstance(node, ast.AugAssign) or name in read)


def stored_in(loop: ast.stmt) -> set[str]:
    """The names that a loop gives values to, its own variables and `with` and `del` included."""
    return {node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}


def rebound_in(loop: ast.stmt, name: str) -> bool:
    """Whether a loop gives a name another value, and not only changes the one that it has (`p -= step`)."""
    changed = [node.target for node in ast.walk(loop) if isinstance(node, ast.AugAssign)]
    stores = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    return any(node.id == name and node not in changed for node in stores)


def hands_on(name: str, line: Line) -> bool:
    """Whether a loop around a line reads a name before it assigns it: what one round leaves to the next."""
    return any(name in carried(loop) for loop in loops(line))


def guarded(name: str, file: str) -> str:
    """How a file asks whether an attribute was filled: `is None`, `in`, `hasattr`; empty if it does not."""
    tree = _tree(file)
    attribute = name.rpartition(".")[2]
    for node in ast.walk(tree) if tree is not None else ():
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


def loss_of(line: Line) -> str:
    """The one variable that the call at a line differentiates, `loss` in `loss.backward()`; empty if it does more.

    A pass with other arguments than `retain_graph` is more: its gradients are not simply added up.
    """
    node = _simple(line)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return ""
    plain = not call.args and all(keyword.arg == "retain_graph" for keyword in call.keywords)
    return ast.unparse(call.func.value) if plain and isinstance(call.func.value, (ast.Name, ast.Attribute)) else ""


def target_of(line: Line) -> str:
    """What the pass at a line differentiates, as written: of `x.backward(...)`, `grad(x, ...)`, `backward(x)`."""
    node = _simple(line)
    for call in ast.walk(node) if node is not None else ():
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name == "backward" and isinstance(call.func, ast.Attribute) and not _is_module(call.func.value):
                return ast.unparse(call.func.value)
            if name in ("grad", "backward") and call.args and isinstance(call.args[0], (ast.Name, ast.Attribute)):
                return ast.unparse(call.args[0])
    return ""


def passes(line: Line, since: int) -> list[int]:
    """The lines from one to another, in the same function, that ask for a pass which frees its graph."""
    found = [each for each in statements(line) if since <= each.lineno < line.number]
    return [each.lineno for each in found if (name := target_of(Line(line.file, each.lineno))) and frees(each, name)]


def _is_module(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch.autograd", "autograd", "torch")


def frees(statement: ast.stmt, variable: str) -> bool:
    """Whether a statement is a pass of a variable, `x.backward()` or `grad(x, ...)`, and does not retain."""
    for call in ast.walk(statement):
        if isinstance(call, ast.Call):
            kept = {keyword.arg for keyword in call.keywords if ast.unparse(keyword.value) == "True"}
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            given = [ast.unparse(call.func.value)] if isinstance(call.func, ast.Attribute) else []
            given += [ast.unparse(call.args[0])] if call.args and name in ("grad", "backward") else []
            if name in ("backward", "grad") and variable in given and not kept & {"retain_graph", "create_graph"}:
                return True
    return False


def changed_at(line: Line) -> list[str]:
    """The variables that the statement at a line changes in place: `x += 1`, `x[i] = 0`, `x.mul_(2)`."""
    node = _simple(line)
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


def parameters(line: Line) -> list[str]:
    """The parameters of the function around a line."""
    scope = _scope(line)
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return []
    return [each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)]


def function_at(line: Line) -> ast.stmt | None:
    """The function around a line."""
    scope = _scope(line)
    return scope if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def chains(line: Line) -> list[str]:
    """The names and attributes that the statement at a line reads, at their longest: `self.w`, `torch.relu`."""
    node = _simple(line)
    value = getattr(node, "value", None)
    found: list[str] = []
    stack = [value] if value is not None else []
    while stack:
        each = stack.pop()
        if isinstance(each, ast.Name) or (isinstance(each, ast.Attribute) and _BASE.fullmatch(ast.unparse(each))):
            found.append(ast.unparse(each))
        else:
            stack += list(ast.iter_child_nodes(each))
    return found


def is_alone(name: str, line: Line) -> bool:
    """Whether a function's variable holds a result of an operation, and no other of its variables is given it."""
    before = [each for each in statements(line) if each.lineno < line.number]
    made = [each for each in before if isinstance(each, ast.Assign) and name in targets(each)]
    also = [each for each in before if isinstance(each, ast.Assign) and ast.unparse(each.value) == name]
    return bool(made) and isinstance(made[-1].value, (ast.Call, ast.BinOp)) and not also
