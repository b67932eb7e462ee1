"""The user's source, in files or cells: its lines, what they assign, read, change in place, differentiate."""

from __future__ import annotations

import ast
import copy
import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from hodiff._core._settings import Scope, Undo


@lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module | None:
    """Source as a tree; None if it is none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _file(name: str) -> ast.Module | None:
    text, before = "".join(linecache.getlines(name)), read(name)
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
    loop_statements: list[ast.stmt] = [
        node
        for node in inside(scope_of(line))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and any(within(part, line.number) for part in node.body)
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
    """What a statement assigns, as written: `y`, `self.h`."""
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


# --- what becomes of a variable in the user's source ----------------------------------------------


def assigned_by(line: Line) -> list[str]:
    """What the statements at a line assign."""
    return [target for node in statements(line) if within(node, line.number) for target in targets(node)]


def given_by(line: Line) -> list[str]:
    """What the assignment at a line gives its whole value to: nothing, for one that unpacks."""
    node = statement(line)
    if isinstance(node, ast.Assign) and any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
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
    return Line(line.file, numbers[0]) if line is not None and len(numbers) == 1 else None


def made_at(expression: str, line: Line) -> list[int]:
    """The lines that assign a variable in the function around a line; or any of those that an expression reads."""
    tree = None if is_plain(expression) else parsed(expression)
    names = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name)] if tree is not None else [expression]
    return sorted(number for name in names for number in assignments(name, line))


def assigned_in(name: str, file: str) -> set[str]:
    """The names of the functions in a file that assign `name`, or the same attribute of `self`; "" for the module."""
    also = set(forms(name))
    lines = [node.lineno for node in nodes_in(file) if also & set(targets(node))]  # type: ignore[attr-defined]
    return {getattr(scope_of(Line(file, number)), "name", "") for number in lines}


def reads(node: ast.AST, name: str) -> bool:
    """Whether a statement reads a variable."""
    return any(
        isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Load) and ast.unparse(each) == name
        for each in ast.walk(node)
    )


def loaded(line: Line) -> list[str]:
    """The names that the statement at a line reads."""
    node = statement(line)
    names = [each.id for each in nodes_at(line) if isinstance(each, ast.Name)]
    given = set(targets(node)) if node is not None and not isinstance(node, ast.AugAssign) else set()
    return [name for name in dict.fromkeys(names) if name not in given]


def chains(line: Line) -> list[str]:
    """The names and attributes that the statement at a line reads, at their longest: `self.w`, `torch.relu`."""
    texts: list[str] = []
    stack = [value for value in [getattr(statement(line), "value", None)] if value is not None]
    while stack:
        each = stack.pop()
        if isinstance(each, ast.Name) or (isinstance(each, ast.Attribute) and is_plain(ast.unparse(each))):
            texts.append(ast.unparse(each))
        else:
            stack += list(ast.iter_child_nodes(each))
    return texts


def extends(line: Line, name: str) -> bool:
    """Whether the statement at a line gives a name a value made from its own: `total += x`, `h = cell(x, h)`."""
    node = statement(line)
    read = [ast.unparse(each) for each in ast.walk(getattr(node, "value", None) or ast.Pass())]
    return node is not None and name in targets(node) and (isinstance(node, ast.AugAssign) or name in read)


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


def hands_on(name: str, line: Line) -> bool:
    """Whether a loop around a line reads a name before it assigns it: what one round leaves to the next."""
    return any(name in carried(loop) for loop in loops(line))


def is_alone(name: str, line: Line) -> bool:
    """Whether a function's variable holds a result of an operation, and no other of its variables is given it."""
    before = [each for each in statements(line) if each.lineno < line.number]
    made = [each for each in before if isinstance(each, ast.Assign) and name in targets(each)]
    also = [each for each in before if isinstance(each, ast.Assign) and ast.unparse(each.value) == name]
    return bool(made) and isinstance(made[-1].value, (ast.Call, ast.BinOp)) and not also


# --- what lines of the user's source change in place, put into containers, or leave in objects ----


def changed_at(line: Line) -> list[str]:
    """The variables that the statement at a line changes in place: `x += 1`, `x[i] = 0`, `x.mul_(2)`."""
    node = statement(line)
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
    names = {base(name) for name in changed_at(line)}
    later = [Line(line.file, each.lineno) for each in statements(line) if each.lineno > line.number]
    return [each for each in later if names & {base(name) for name in changed_at(each)}]


def receiver(line: Line, method: str) -> str:
    """What the statement at a line calls a method of: `hx[i]` in `[hx[i].squeeze_(0) for i in ...]`."""
    for each in nodes_at(line):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method:
            return ast.unparse(each.func.value)
    return ""


def kept_at(line: Line) -> list[Line]:
    """The lines of the function around a line that leave something in an object: `self.n += 1`, `cache[k] = v`."""
    return [
        Line(line.file, each.lineno)
        for each in statements(line)
        if any("." in target or "[" in target for target in targets(each))
    ]


_GROW = ("append", "extend", "insert", "appendleft")


def fills(loop: ast.stmt, name: str) -> bool:
    """Whether a loop puts something into a container: `name.append(x)`, `name[i] = x`."""
    return any(_puts_into(node, name) for node in ast.walk(loop))


def _puts_into(node: ast.AST, name: str) -> bool:
    call = node.func if isinstance(node, ast.Call) else None
    if isinstance(call, ast.Attribute) and call.attr in _GROW and ast.unparse(call.value) == name:
        return True
    return any(target.startswith(f"{name}[") for target in targets(node))


def guarded(name: str, file: str) -> str:
    """How a file asks whether an attribute was filled: `is None`, `in`, `hasattr`; empty if it does not."""
    attribute = name.rpartition(".")[2]
    asked = [node.test for node in nodes_in(file) if isinstance(node, (ast.If, ast.IfExp))]
    for test in [each for condition in asked for each in ast.walk(condition)]:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
            none = isinstance(test.ops[0], (ast.Is, ast.IsNot)) and right == "None"
            if none and left.rpartition(".")[2] == attribute:
                return "is None"
            if isinstance(test.ops[0], (ast.In, ast.NotIn)) and right.rpartition(".")[2] == attribute:
                return "in"
        elif isinstance(test, ast.Call) and ast.unparse(test.func) == "hasattr" and test.args[1:]:
            return "hasattr" if ast.unparse(test.args[1]) == repr(attribute) else ""
    return ""


def refilled(name: str, file: str) -> bool:
    """Whether a file asks a dict if a key is there, before it fills it: by `in`, `.get()`, or a `KeyError`."""
    attribute = name.rpartition(".")[2]
    asked: list[ast.expr] = []
    for node in nodes_in(file):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "KeyError" in ast.unparse(node.type):
            return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            asked.append(node.comparators[0])
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in ("get", "setdefault"):
            asked.append(call.value)
    return any(ast.unparse(each).rpartition(".")[2] == attribute for each in asked)


# --- what the user's source says of backward passes: what each differentiates, and where its graph may be cut ---------


def loss_of(line: Line) -> str:
    """What the call at a line differentiates, as `loss`, or `w * loss`; empty if it does more.

    A pass with other arguments than `retain_graph` is more: its gradients are not simply added up.
    """
    node = statement(line)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return ""
    plain = not call.args and all(keyword.arg == "retain_graph" for keyword in call.keywords)
    value = call.func.value
    if not plain or isinstance(value, ast.Constant):
        return ""
    arithmetic = all(isinstance(node, _ARITHMETIC) for node in ast.walk(value))
    return ast.unparse(value) if arithmetic else ""


_ARITHMETIC = (ast.Name, ast.Attribute, ast.BinOp, ast.Constant, ast.operator, ast.expr_context)


def target_of(line: Line) -> str:
    """What the pass at a line differentiates, as written: of `x.backward(...)`, `grad(x, ...)`, `backward(x)`."""
    for call in nodes_at(line):
        if isinstance(call, ast.Call):
            name = _called(call)
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if name == "backward" and owner not in ("", "torch.autograd", "autograd", "torch"):
                return owner
            if name in ("grad", "backward") and call.args and isinstance(call.args[0], (ast.Name, ast.Attribute)):
                return ast.unparse(call.args[0])
    return ""


def inputs_of(line: Line) -> list[str]:
    """What the gradient at a line is taken by, as written."""
    for call in nodes_at(line):
        if isinstance(call, ast.Call) and _called(call) == "grad":
            given = [each.value for each in call.keywords if each.arg == "inputs"] or call.args[1:2]
            items = [getattr(each, "elts", [each]) for each in given]
            return [ast.unparse(item) for each in items for item in each]
    return []


def between(since: int, line: Line) -> list[int]:
    """The lines of a function from one to before another that ask for a pass which frees its graph."""
    lines = [each for each in statements(line) if since <= each.lineno < line.number]
    return [each.lineno for each in lines if (name := target_of(Line(line.file, each.lineno))) and frees(each, name)]


def _called(call: ast.Call) -> str:
    """The name of what is called, without what it belongs to."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def frees(statement: ast.stmt, variable: str) -> bool:
    """Whether a statement is a pass of a variable, `x.backward()` or `grad(x, ...)`, and does not retain."""
    for call in ast.walk(statement):
        if isinstance(call, ast.Call):
            kept = {keyword.arg for keyword in call.keywords if ast.unparse(keyword.value) == "True"}
            name = _called(call)
            given = [ast.unparse(call.func.value)] if isinstance(call.func, ast.Attribute) else []
            given += [ast.unparse(call.args[0])] if call.args and name in ("grad", "backward") else []
            if name in ("backward", "grad") and variable in given and not kept & {"retain_graph", "create_graph"}:
                return True
    return False


_CALLED = {
    "detach": "detached",
    "detach_": "detached",
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
_READ = {"data": "detached", "grad": "gradient"}


def cuts(name: str, line: Line, values: Mapping[str, Any]) -> list[tuple[Line, str]]:
    """Lines before `line`, among those that `name` is computed from, that look as if they cut the graph.

    `values` are the variables in sight: `batch.data` cuts nothing where `batch` is not a tensor.
    """
    wanted, places = {base(name)}, []
    blocks = _no_grad_blocks(line)
    for statement in reversed([s for s in statements(line) if s.lineno <= line.number]):
        mine = {base(target) for target in targets(statement)}
        if not (mine & wanted or statement.lineno == line.number):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                wanted.add(node.id)
            kind = _cut_by(node, values)
            if kind == "gradient" and "create_graph=True" in ast.unparse(statement):
                kind = "constant gradient"
            if kind and statement.lineno != line.number:
                places.append((Line(line.file, statement.lineno), kind))
        if any(within(block, statement.lineno) for block in blocks):
            places.append((Line(line.file, statement.lineno), "no_grad"))
    return list(dict.fromkeys(places))


def _cut_by(node: ast.AST, values: Mapping[str, Any]) -> str:
    """How an expression cuts the graph, by itself: a call of that name, or `.data` and `.grad` of a tensor."""
    if isinstance(node, ast.Call):
        return _CALLED.get(_called(node), "")
    if not isinstance(node, ast.Attribute) or node.attr not in _READ:
        return ""
    owner = ast.unparse(node.value)
    if is_plain(owner) and not isinstance(_member(owner, values), Tensor):
        return ""
    return _READ[node.attr]


def _member(path: str, values: Mapping[str, Any]) -> Any:
    """What a variable, or an attribute of one, is; None if it cannot be told without running code of the user's."""
    head, *steps = path.split(".")
    value = values.get(head)
    for step in steps:
        own = getattr(value, "__dict__", {})
        value = next((held[step] for held in (own, *(own.get(kind) or {} for kind in _HELD)) if step in held), None)
    return value


_HELD = ("_parameters", "_buffers", "_modules")
"""Where a module has its attributes."""


_OFF = ("no_grad", "inference_mode", "set_grad_enabled")


def _no_grad_blocks(line: Line) -> list[ast.AST]:
    return [
        node
        for node in _walk(scope_of(line))
        if isinstance(node, ast.With) and any(word in ast.unparse(item) for item in node.items for word in _OFF[:2])
    ]


def switched_off(line: Line) -> Line | None:
    """What switches gradients off around a line, within its function: a `with`, or else the function's decorator."""
    scope = function_at(line)
    given = [
        (item.context_expr, node)
        for node in inside(scope_of(line))
        if isinstance(node, ast.With) and within(node, line.number)
        for item in node.items
    ]
    given += [(each, each) for each in getattr(scope, "decorator_list", [])]
    nodes = [node for expression, node in given if any(word in ast.unparse(expression) for word in _OFF)]
    return Line(line.file, nodes[0].lineno) if nodes else None


# --- lines: where they are, what they say ---------------------------------------------------------


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The source line, without its indentation."""
        return resolve(self.file, self.number)[2]

    def __str__(self) -> str:
        cell, number, _ = resolve(self.file, self.number)
        if not self.number and not cell:
            return self.file
        # in the locale C Python knows a name by its bytes
        name = os.fsencode(os.path.basename(self.file)).decode("utf-8", "replace")
        return f"In[{cell}]:{number}" if cell else f"{name}:{number}"


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


class Frame(NamedTuple):
    """A call of the user's code that was under way: its code, and the number of the line that it was at."""

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


def outside(path: Path) -> list[Line]:
    """The innermost line of a path that is not in a module's forward: where the program calls the module."""
    return [frame.line for frame in path if frame.code.co_name != "forward"][:1] or list(lines_of(path[:1]))


# --- cells of IPython and Jupyter: how they are called, and a session read as if it were one script -------------------
# Each cell is a file of its own. What a name was given in an earlier one is found by the numbers of
# lines: in the file of a cell the lines of the cells that ran before have the numbers 0, -1, -2 and
# so on, the last first.


_with_reruns: ContextVar[bool] = ContextVar("with reruns", default=False)


def _shell() -> Any:
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get() if get is not None else None


def number(file: str) -> int:
    """The number of a cell, by its file; 0 for what is none."""
    shell = _shell()
    name = shell.compile.format_code_name(file) if shell is not None else None
    match = re.fullmatch(r"In ?\[(\d+)\]", name[1]) if name else None
    return int(match.group(1)) if match else 0


def before(file: str) -> list[tuple[int, int, str]]:
    """The cells that ran before one, the nearest first: what to take from their line numbers, number and text."""
    last = number(file)
    inputs = _shell().user_ns.get("In", []) if last else []
    if last >= len(inputs) or inputs[last].split() != "".join(linecache.getlines(file)).split():
        return []  # another history than we think
    total, cells = 0, []
    for cell in range(last - 1, 0, -1):
        total += inputs[cell].rstrip("\n").count("\n") + 1
        cells.append((total, cell, inputs[cell]))
    return cells


def read(file: str) -> tuple[tuple[int, str], ...]:
    """The earlier runs that count, the first first: of the runs of this same cell none, unless in `reruns`."""
    text = "".join(linecache.getlines(file)).split()
    lines = [(offset, earlier) for offset, _, earlier in before(file)]
    return tuple((offset, earlier) for offset, earlier in lines[::-1] if _with_reruns.get() or earlier.split() != text)


def reruns() -> Scope[None]:
    """A context in which earlier runs of the same cell count; they may have failed as the last did."""
    return Scope(_count_reruns)


def _count_reruns(undo: Undo) -> None:
    undo += [partial(_with_reruns.set, _with_reruns.get())]
    _with_reruns.set(True)


def resolve(file: str, line: int) -> tuple[int, int, str]:
    """The cell of a line, its number there, and its text; cell 0 for other files."""
    if line <= 0:
        for offset, cell, text in before(file):
            if line + offset > 0:
                return cell, line + offset, text.split("\n")[line + offset - 1].strip()
    return number(file), line, linecache.getline(file, line).strip()


# --- variables as they are written: `net.cell.h[0]` -----------------------------------------------


_BASE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def base(path: str) -> str:
    """A path without its subscripts: `state[0]` -> `state`, `self.h` as it is."""
    match = _BASE.match(path)
    return match.group() if match else path


def is_plain(text: str) -> bool:
    """Whether a text is a name, or attributes of one, and nothing else."""
    return _BASE.fullmatch(text) is not None


def steps(path: str) -> int:
    """How many attributes and subscripts a path goes through."""
    return path.count(".") + path.count("[")


def forms(path: str) -> tuple[str, str]:
    """As a variable is written, and as it is within its class: `trainer.total` is `self.total` there."""
    return path, re.sub(r"^.*\.", "self.", path)
