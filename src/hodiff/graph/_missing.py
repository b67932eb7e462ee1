"""Derivatives that a pass cannot give: second ones that PyTorch lacks, and checkpoints that compute otherwise."""

from __future__ import annotations

import re

from hodiff._core import _nodes, _translate
from hodiff._core._nodes import Node
from hodiff.graph import _changes, _passes, _saved, _source, _traits, _variables
from hodiff.graph._case import Case, Explanation
from hodiff.graph._line import Line, line_of, lines_of, quoted

TEXTS = (
    "does not currently support double backward",
    "is not implemented",
    "marked with @once_differentiable",
    "donated buffers",
)


def second_derivative(case: Case) -> Explanation | None:
    """The explanation of a missing or forbidden double backward."""
    nodes = list(_nodes.walk(case.roots))
    error = str(case.error)
    found = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", error)
    compiled = "aot_autograd" in error or "donated" in error
    once = list(case.record.once()) if case.record is not None and "once_differentiable" in error else []
    names = [name for name, _ in once]
    operation = "a compiled function" if compiled else (names or _marked(nodes))[0]
    if found:
        operation = found.group(1)
    line = once[0][1] if once else _line(case, [*nodes, *_nodes.walk(case.names.nodes)], operation, compiled)
    text = [f"no second derivative: {operation}"]
    if line is not None:
        text.append(f"  recorded at  {quoted(line)}")
    if case.line is not None:
        text.append(f"  failing call {quoted(case.line)}")
    way = _translate.way_out("compiledfunction" if compiled else operation)
    fixes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    if way is not None:
        fixes = (f"at {line}: {way.instead}." if line is not None else f"{way.instead}.",)
    elif "once_differentiable" in error:
        unknown = (f"a second derivative of {operation}: its backward forbids one. Write it without the Function.",)
    else:
        unknown = (f"how to do without {operation}: hodiff.hvp(f, x, v) looks for a substitute, or names it.",)
    return case.explanation(
        "no second derivative",
        created=line,
        text=tuple(text),
        reason="PyTorch can differentiate it once, and not once more.",
        fixes=fixes,
        unknown=unknown,
    )


def _marked(nodes: list[Node]) -> list[str]:
    return sorted({type(node).__name__ for node in nodes if _saved.is_raising(node)}) or ["an operation"]


def _line(case: Case, nodes: list[Node], operation: str, compiled: bool) -> Line | None:
    """The line of the operation: its forward node is in the graph still, beside its derivative's."""
    if case.record is None:
        return None
    key = operation.replace("_", "").lower().removesuffix("backward")
    found = []
    for node in nodes:
        name = type(node).__name__.lower().removesuffix("backward0").removesuffix("backward")
        if (compiled and "compiled" in name) or (key and name == key):
            line = (_of_compiled(case, node) if compiled else case.record.made(node)) or _assigned(case, node)
            found += [(_traits.sequence(node), line)] if line is not None else []
    if found:  # the first is of the forward; those that a pass made come later
        return min(found)[1]
    made = [case.record.made(node) for node in nodes if _saved.is_raising(node)]
    return next((line for line in made if line is not None), None)


def _of_compiled(case: Case, node: Node) -> Line | None:
    """The line of a compiled call, which no watch sees: where what its pass differentiates was assigned, if once."""
    made = case.record.made(node) if case.record is not None else None
    variable = _passes.target_of(made) if made is not None else ""
    numbers = _variables.assignments(variable, made) if variable and made is not None else []
    return Line(made.file, numbers[0]) if made is not None and len(numbers) == 1 else made


def _assigned(case: Case, node: Node) -> Line | None:
    """Where the variable that holds a node's output is assigned, if that is one place."""
    variable = case.names.nodes.get(node, "")
    for frame in case.frames if variable else ():
        numbers = _variables.assignments(variable, line_of(frame))
        if len(numbers) == 1:
            return Line(frame.f_code.co_filename, numbers[0])
    return None


def recomputed(case: Case) -> Explanation | None:
    """The explanation of a checkpoint whose second forward was not like the first."""
    error = str(case.error)
    number = "number" in error and "different number" in error
    reason = (
        "the checkpoint ran its function again, in the pass, and it recorded "
        + ("more or fewer tensors" if number else "tensors of another shape, dtype or device")
        + " than in the forward."
    )
    outer, changes = _checkpointed(case)
    text = [f"  at           {quoted(outer)}"] if outer is not None else []
    text += [f"  it changes   {quoted(line)}" for line in changes[:SHOWN]]
    text.append(f"  failing call {case.call or case.line}")
    return case.explanation(
        "recomputed otherwise",
        created=outer,
        text=("a checkpointed function computes otherwise the second time", *text),
        reason=reason,
        unknown=(
            "what differs. It reads something that changed in between: a cache or a counter that its first run\n"
            "filled, autocast or no_grad that are on in one run only, the global random state. To see the\n"
            "operation, put `with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):` around the step.",
        ),
    )


def _checkpointed(case: Case) -> tuple[Line | None, list[Line]]:
    """The line of the checkpoint, and those within it that leave something in an object for the second run to meet."""
    changes: dict[Line, None] = {}
    outer: Line | None = None
    for node in _nodes.walk(case.roots):
        lines = lines_of(case.record.path(node)) if case.record is not None else ()
        index = next((number for number, line in enumerate(lines) if _source.calls(line, "checkpoint")), None)
        if index is not None:
            outer = lines[index]
            for line in lines[:index]:
                changes.update(dict.fromkeys(_changes.kept_at(line)))
    return outer, sorted(changes)


SHOWN = 4


def unpacked_twice(case: Case, line: Line | None) -> Explanation | None:
    """The explanation of a Function that reads what it saved twice, under a checkpoint."""
    text = [f"  at           {quoted(line)}"] if line is not None else []
    return case.explanation(
        "recomputed otherwise",
        variable="ctx.saved_tensors",
        created=line,
        text=("`ctx.saved_tensors` was read twice", *text, f"  failing call {case.call or case.line}"),
        reason="under a checkpoint each saved tensor is computed again for one reading, and something read one twice.",
        fixes=("read ctx.saved_tensors once in a backward, into a variable, and use that.",),
        certain=True,
    )
