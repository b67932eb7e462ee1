"""The other errors of a pass: no graph, an input that is not in it, a value changed in place, no second derivative."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from hodiff._core import _nodes
from hodiff.graph import _predict, _saved, _source
from hodiff.graph._case import Case, Explanation
from hodiff.graph._source import Line

NO_SECOND = (
    "does not currently support double backward",
    "is not implemented",
    "marked with @once_differentiable",
    "donated buffers",
)

KINDS = {
    "detached": "it was detached there, so nothing below is part of the graph.",
    "no_grad": "it was computed while gradients were switched off (no_grad or inference_mode).",
    "gradient": "it is a gradient that was taken without create_graph=True, so it has no graph of its own.",
    "constant gradient": "it is the gradient of a function that is linear: a constant, with no graph to differentiate.",
    "constant": "it passed through a number, NumPy or a step without derivative there, and is a constant since.",
    "no graph": "it was computed from nothing that requires grad, or was cut off on the way.",
}
_FIXES = {
    "detached": "drop the detach() (or .data) where a gradient is wanted; leave this backward out where none is.",
    "no_grad": "compute it outside the no_grad block, or under torch.enable_grad().",
    "gradient": "take it with hodiff.grad(f, x, create_graph=True), or autograd.grad(..., create_graph=True).",
    "constant gradient": "its derivative is zero; hodiff.nth_derivative and hodiff.hvp return that instead of raising.",
    "constant": "stay with tensor operations from the inputs to the loss.",
    "no graph": "call requires_grad_() on what it is computed from; look for detach(), .data, .item(), no_grad.",
}
CAUSES = {"gradient": "gradient without create_graph"}


def no_graph(case: Case) -> Explanation | None:
    """The explanation of "element 0 of tensors does not require grad"."""
    tensor = next((each for each in case.tensors if not each.requires_grad), None)
    if tensor is None and case.inputs:
        return _input_without_grad(case)
    if tensor is None or case.line is None:
        return None
    variable = case.names.of(tensor)
    kind, line, certain = _where_lost(case, tensor, variable)
    text = [f"`{variable}` has no graph" if variable else "the value that is differentiated has no graph"]
    if line is not None:
        text.append(f"  cut at       {line}   {line.text}")
    text.append(f"  failing call {case.line}   {case.line.text}")
    silenced = _silenced(line)
    if silenced:
        text.append(f"  no gradient reaches: {', '.join(silenced)}")
    return case.explanation(
        CAUSES.get(kind, kind),
        variable=variable,
        created=line,
        text=tuple(text),
        reason=KINDS[kind],
        fixes=(_FIXES[kind],),
        certain=certain,
    )


def _where_lost(case: Case, tensor: Tensor, variable: str) -> tuple[str, Line | None, bool]:
    if case.record is not None:
        lost = case.record.lost(tensor)
        if lost is not None:
            return lost.kind, lost.line, True
    name = variable or _source.base(case.line.text.partition(".backward")[0]) if case.line is not None else variable
    found = _source.cuts(name, case.line) if name and case.line is not None else []
    if found:
        return found[0][1], found[0][0], False
    return "no graph", None, False


def _silenced(line: Line | None) -> list[str]:
    """The names in the cut line: what the gradient no longer reaches."""
    if line is None:
        return []
    found = re.findall(r"([A-Za-z_][\w.]*?)\.(?:detach_?\(|data\b)", line.text)
    return list(dict.fromkeys(found))


def _input_without_grad(case: Case) -> Explanation | None:
    for tensor in case.inputs or ():
        if isinstance(tensor, Tensor) and not tensor.requires_grad:
            variable = case.names.of(tensor)
            name = variable or "input"
            text = (f"the input `{name}` does not require grad, so no graph leads to it",)
            fix = (
                f"call {name}.requires_grad_() before the computation, or give hodiff the function: hodiff.grad(f, x)."
            )
            reason = "it was not tracked when the loss was computed."
            return case.explanation("no graph", variable=variable, text=text, reason=reason, fixes=(fix,))
    return None


def not_used(case: Case) -> Explanation | None:
    """The explanation of "One of the differentiated Tensors appears to not have been used in the graph"."""
    reached = set(_nodes.walk(case.roots))
    missing = [
        tensor for tensor in case.inputs or () if isinstance(tensor, Tensor) and _nodes.node_of(tensor) not in reached
    ]
    if not missing:
        return None
    names = [case.names.of(tensor) or f"a tensor of shape {tuple(tensor.shape)}" for tensor in missing]
    there = [case.names.of(leaf) for node in reached if (leaf := _saved.leaf(node)) is not None]
    text = [f"not in the graph: {', '.join(f'`{name}`' for name in names)}"]
    if any(there):
        text.append(f"  in the graph: {', '.join(f'`{name}`' for name in sorted(filter(None, there)))}")
    fixes = ["allow_unused=True gives None for it; hodiff.grad gives zeros where another input matters."]
    copies = [name for name, tensor in zip(names, missing, strict=True) if tensor.grad_fn is not None]
    if copies:
        fixes.insert(0, f"`{copies[0]}` was computed after the loss, or beside it: compute the loss from it.")
    return case.explanation(
        "not used",
        variable=names[0],
        text=tuple(text),
        reason="the loss was computed without it: from another tensor of that name, a copy, or a detached one.",
        fixes=tuple(fixes),
        certain=True,
    )


def changed_in_place(case: Case) -> Explanation | None:
    """The explanation of "modified by an inplace operation"."""
    found: tuple[Any, str, str, Tensor] | None = None
    for node in _predict.executed(case.roots, case.inputs):
        for slot in _saved.slots(node):
            if slot.state == _saved.STALE and slot.value is not None:
                variable = case.names.memory(slot.value)
                if found is None or (variable and not found[2]):
                    found = (node, slot.name, variable, slot.value)
    if found is None:
        return None
    node, slot_name, variable, value = found
    made = case.record.made(node) if case.record is not None else None
    changed = case.record.changed(value) if case.record is not None else None
    what = f"`{variable}`" if variable else f"a tensor of shape {tuple(value.shape)}"
    text = [f"{what} was changed in place, after {type(node).__name__} had saved it (as {slot_name!r})"]
    if made is not None:
        text.append(f"  saved at     {made}   {made.text}")
    if changed is not None:
        text.append(f"  changed at   {changed}   {changed.text}")
    text.append(f"  failing call {case.call or (f'{case.line}   {case.line.text}' if case.line is not None else '?')}")
    step = ".step(" in changed.text if changed is not None else value.is_leaf and value.requires_grad
    fixes = (
        ["call backward() before the optimizer's step, or compute the loss again after it."]
        if step
        else [
            "make a new tensor instead: x = x + 1 for x += 1, torch.where for a masked assignment.",
            "or move the change behind the backward() that needs the old value.",
        ]
    )
    return case.explanation(
        "changed in place",
        variable=variable,
        created=changed,
        text=tuple(text),
        reason="its derivative needs the value from before the change. A retained graph would not help.",
        fixes=tuple(fixes),
    )


def no_second_derivative(case: Case) -> Explanation | None:
    """The explanation of a missing or forbidden double backward."""
    nodes = _nodes.walk(case.roots)
    marked = sorted({type(node).__name__ for node in nodes if _saved.is_raising(node)})
    compiled = [node for node in nodes if "Compiled" in type(node).__name__]
    found = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", str(case.error))
    operation = found.group(1) if found else "a compiled function" if compiled else ", ".join(marked) or "an operation"
    line = None
    if case.record is not None:
        line = next((case.record.made(node) for node in nodes if _saved.is_raising(node) or node in compiled), None)
    text = [f"no second derivative: {operation}"]
    if line is not None:
        text.append(f"  recorded at  {line}   {line.text}")
    if case.line is not None:
        text.append(f"  failing call {case.line}   {case.line.text}")
    return case.explanation(
        "no second derivative",
        created=line,
        text=tuple(text),
        reason="PyTorch can differentiate it once, and not once more.",
        fixes=("hodiff.hvp(f, x, v) and hodiff.hessian(f, x) name the operation and its substitute, or avoid it.",),
    )
