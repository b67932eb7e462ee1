"""What the user's source says of backward passes: what each differentiates, and where its graph may be cut."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hodiff.graph import _source, _written
from hodiff.graph._line import Line


def loss_of(line: Line) -> str:
    """The one variable that the call at a line differentiates, `loss` in `loss.backward()`; empty if it does more.

    A pass with other arguments than `retain_graph` is more: its gradients are not simply added up.
    """
    node = _source.statement(line)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return ""
    plain = not call.args and all(keyword.arg == "retain_graph" for keyword in call.keywords)
    return ast.unparse(call.func.value) if plain and isinstance(call.func.value, (ast.Name, ast.Attribute)) else ""


def target_of(line: Line) -> str:
    """What the pass at a line differentiates, as written: of `x.backward(...)`, `grad(x, ...)`, `backward(x)`."""
    for call in _source.nodes_at(line):
        if isinstance(call, ast.Call):
            name = _called(call)
            if name == "backward" and isinstance(call.func, ast.Attribute) and not _is_module(call.func.value):
                return ast.unparse(call.func.value)
            if name in ("grad", "backward") and call.args and isinstance(call.args[0], (ast.Name, ast.Attribute)):
                return ast.unparse(call.args[0])
    return ""


def between(since: int, line: Line) -> list[int]:
    """The lines of a function from one to before another that ask for a pass which frees its graph."""
    found = [each for each in _source.statements(line) if since <= each.lineno < line.number]
    return [each.lineno for each in found if (name := target_of(Line(line.file, each.lineno))) and frees(each, name)]


def _called(call: ast.Call) -> str:
    """The name of what is called, without what it belongs to."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_module(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch.autograd", "autograd", "torch")


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

    `values` are the variables in sight: `batch.data` cuts nothing where `batch` is no tensor.
    """
    wanted, found = {_written.base(name)}, []
    blocks = _no_grad_blocks(line)
    for statement in reversed([s for s in _source.statements(line) if s.lineno <= line.number]):
        mine = {_written.base(target) for target in _source.targets(statement)}
        if not (mine & wanted or statement.lineno == line.number):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                wanted.add(node.id)
            kind = _cut_by(node, values)
            if kind == "gradient" and "create_graph=True" in ast.unparse(statement):
                kind = "constant gradient"
            if kind and statement.lineno != line.number:
                found.append((Line(line.file, statement.lineno), kind))
        if any(_source.within(block, statement.lineno) for block in blocks):
            found.append((Line(line.file, statement.lineno), "no_grad"))
    return list(dict.fromkeys(found))


def _cut_by(node: ast.AST, values: Mapping[str, Any]) -> str:
    """How an expression cuts the graph, by itself: a call of that name, or `.data` and `.grad` of a tensor."""
    if isinstance(node, ast.Call):
        return _CALLED.get(_called(node), "")
    if not isinstance(node, ast.Attribute) or node.attr not in _READ:
        return ""
    owner = ast.unparse(node.value)
    if _written.is_plain(owner) and not isinstance(_member(owner, values), Tensor):
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
    scope = _source.scope_of(line)
    return [
        node
        for node in (ast.walk(scope) if scope is not None else ())
        if isinstance(node, ast.With) and any(word in ast.unparse(item) for item in node.items for word in _OFF[:2])
    ]


def switched_off(line: Line) -> Line | None:
    """What switches gradients off around a line, within its function: a `with`, or else the function's decorator."""
    scope = _source.function_at(line)
    given = [
        (item.context_expr, node)
        for node in _source.inside(_source.scope_of(line))
        if isinstance(node, ast.With) and _source.within(node, line.number)
        for item in node.items
    ]
    given += [(each, each) for each in getattr(scope, "decorator_list", [])]
    found = [node for expression, node in given if any(word in ast.unparse(expression) for word in _OFF)]
    return Line(line.file, found[0].lineno) if found else None
