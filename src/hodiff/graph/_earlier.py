"""What earlier steps left: state that enters the next one, and values that a container stored."""

from __future__ import annotations

from collections import deque

from torch import Tensor, nn

from hodiff.graph import _traits, _variables, _written
from hodiff.graph._evidence import Evidence
from hodiff.graph._line import Line, at, outside


def detached_after(e: Evidence) -> str | None:
    """Cut the state right behind the pass that freed its graph: what comes later cannot need that graph."""
    if e.silenced:
        return None
    found: dict[str, Line] = {}
    for part in e.parts:
        line, text = e.line_in(e.last_pass, part.code), _detaching(e, part.variable)
        if line is None or text is None:
            return None
        found[text] = line
    return "\n".join([f"after {at(next(iter(found.values())))}, write", *(f"    {text}" for text in found)])


def _detaching(e: Evidence, path: str) -> str | None:
    """The statement that cuts what a variable holds; None if it cannot be written."""
    if not path or "(" in path:
        return None
    if not path.endswith("]") and "." not in path:
        return f"{path} = {path}.detach()"
    holder, _, last = path.rpartition("[") if path.endswith("]") else path.rpartition(".")
    value = e.value(holder)
    if isinstance(value, (list, dict)):  # the next step may use another entry
        entries = list(value.values()) if isinstance(value, dict) else value
        if not all(isinstance(item, Tensor) and not (item.is_leaf and item.requires_grad) for item in entries):
            return None
        if isinstance(value, dict):
            return f"{holder}.update({{key: value.detach() for key, value in {holder}.items()}})"
        return f"{holder}[:] = [value.detach() for value in {holder}]"
    if isinstance(value, tuple):
        if not all(isinstance(item, Tensor) for item in value) or "[" in holder:
            return None
        make = f"type({holder})(*({{}}))" if hasattr(value, "_fields") else "tuple({})"
        return f"{holder} = {make.format(f't.detach() for t in {holder}')}"
    if value is None or (isinstance(value, nn.Module) and last in dict(value.named_parameters(recurse=False))):
        return None
    return f"{path} = {path}.detach()"


def unrolled(e: Evidence) -> str | None:
    if e.changed or e.stale or not e.call.name.endswith("backward"):
        return None
    return (
        "whether a gradient is to flow through several steps. If so, add their losses up and call backward() once,\n"
        "after them, instead."
    )


def silences(e: Evidence) -> str | None:
    if not e.silenced:
        return None
    return (
        f"where the gradient of {e.names(e.silenced)} is to end: this step reaches it through {e.code}\n"
        f"alone, and with {e.code} detached it would get none. If each step is to begin anew, set {e.code} again\n"
        "before it, from what it began with; if steps belong together, add their losses up and call backward() once."
    )


def unwritten(e: Evidence) -> str | None:
    if e.silenced or detached_after(e) is not None:
        return None
    return (
        f"how {e.code} is written where the step ends. It is to be cut (.detach()) after "
        f"{at(e.freed_by.stack[0])},\nbefore the next step reads it; "
        "not within a step, where it would cut this step's gradients as well."
    )


# --- what earlier steps stored ----------------------------------------------------------------------------------------


def cut_states(e: Evidence) -> str | None:
    """A container whose entries enter the next call, as an RNN's do: they reach the loss through parameters again."""
    if e.silenced or not _enters_call(e):
        return None
    return detached_after(e)


def _enters_call(e: Evidence) -> bool:
    """Whether the old value is an input of operations with parameters: state, not a term of the loss."""
    reached = set(map(id, e.reached))
    stop = {part.node for part in e.parts}
    for node in e.nodes:
        if any(child in stop for child in _traits.children(node)):
            others = [child for child in _traits.children(node) if child not in stop]
            if any(id(leaf) in reached for child in others if (leaf := _traits.leaf(child)) is not None):
                return True
    return False


def container(e: Evidence) -> str:
    """What the value was put into: an object's own container, where the variable holds entries of that, as a batch."""
    base = _written.base(e.first.variable)
    entries = e.value(base)
    entry = next(iter(entries), None) if isinstance(entries, (list, tuple)) else None
    if entry is None or isinstance(entry, Tensor):
        return base
    for name, value in e.case.names.values.items():
        for attribute, each in getattr(value, "__dict__", {}).items():
            if isinstance(each, (list, deque)) and any(item is entry for item in each):
                return f"{name}.{attribute}"
    return base


def stored(e: Evidence) -> str | None:
    if cut_states(e) is not None:
        return None
    base = container(e)
    where = f" ({e.first.created})" if e.first.created is not None else ""
    return (
        f"whether what earlier steps put into `{base}` is to count again. If not, empty `{base}`\n"
        f"after each step's last pass ({e.last_pass.stack[0]}). If it is, keep what it was computed from,\n"
        f"and compute it again in each step. If it is a record that is only read,\n"
        f"put {_one(e)}.detach() into it{where}: no gradient then goes that way."
    )


def within(e: Evidence) -> str | None:
    """Where the freed part of what was stored begins, if no pass ran what was stored itself: it can be cut there."""
    if cut_states(e) is not None or e.record.marks.tag(e.first.node) is not None:
        return None
    under = e.under
    ran = [node for node in under if e.record.marks.tag(node) is not None and _traits.leaf(node) is None]
    inner = {child for node in ran for child in under[node]}
    lines = dict.fromkeys(line for node in ran if node not in inner for line in outside(e.record.path(node)))
    if not lines:
        return None
    return (
        f"whether a gradient is to go on to what was computed at {', '.join(map(str, sorted(lines)[:SHOWN]))}, which\n"
        f"{at(e.freed_by.stack[0])} differentiated already. If not (an advantage, a baseline),\n"
        "detach that where it enters; the rest is as it was."
    )


SHOWN = 4


def _one(e: Evidence) -> str:
    names = _variables.given_by(e.first.created) if e.first.created is not None else []
    return names[0] if len(names) == 1 and names[0].isidentifier() else "value"
