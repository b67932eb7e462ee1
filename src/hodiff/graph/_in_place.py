"""Values changed in place: a pass needs what one was before, or the operation itself is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from hodiff._core._nodes import Node
from hodiff.graph import _saved, _second_time, _source
from hodiff.graph._case import Explanation, Fact, FailedPass, callers
from hodiff.graph._record import Change, tensors_in
from hodiff.graph._source import Line, Path, lines_of


class _Stale(NamedTuple):
    """A saved value that was changed: the node, what it calls it, the variable,
    and the leaf whose memory it is.
    """

    node: Node
    slot: str
    variable: str
    value: Tensor
    leaf: Tensor | None


def explain(case: FailedPass) -> Explanation | None:
    """The explanation of "modified by an inplace operation"."""
    stale = _find(case)
    if stale is None:
        return _unnamed(case)
    if stale.leaf is not None:
        left = _second_time.left_behind(case)
        if left is not None:
            return left
    changes = case.record.changes(stale.value, _saved.sequence(stale.node))
    if not stale.variable and changes:
        line = changes[-1].line
        call = "" if _saved.is_view(stale.value) else changes[-1].call
        names = _source.changed_at(line, call) or _source.given_by(line)
        stale = stale._replace(variable=names[0] if names else "")
    saved = f"{type(stale.node).__name__} saved it as {stale.slot!r}"
    shape = f"of shape {tuple(stale.value.shape)}"
    return case.explanation(
        "changed value" if stale.leaf is None else "changed parameter",
        Fact("saved", stale.variable, case.record.made(stale.node), f"{shape}; {saved}"),
        *(Fact("changed", stale.variable, line, by) for line, by in _told(changes).items()),
        *(callers(changes[-1].path, lines_of(case.path))[:1] if changes else ()),
        case.of_leaves(Fact("changed"), _moved(case)),
        variable=stale.variable,
    )


def _told(changes: list[Change]) -> dict[Line, str]:
    """The lines of some changes, the last ones, each once and by which functions."""
    lines: dict[Line, list[str]] = {}
    for change in changes:
        lines.setdefault(change.line, []).append(change.call)
    return {line: ", ".join(dict.fromkeys(calls)) for line, calls in list(lines.items())[-SHOWN:]}


SHOWN = 4


def _moved(case: FailedPass) -> list[Tensor]:
    """The leaves that were changed after the pass's nodes had saved them."""
    leaves = (_saved.leaf_of(value) for _, _, value in _stale_slots(case))
    return list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())


def _unnamed(case: FailedPass) -> Explanation | None:
    """The facts where PyTorch does not tell the tensor: the node that had saved it, its line."""
    for node in case.nodes:
        for slot in _saved.slots(node):
            if slot.state == _saved.STALE:
                text = (
                    f"{type(node).__name__} saved it as {slot.name!r}; which tensor it was is not "
                    "told before 2.12"
                )
                return case.explanation(
                    "changed value", Fact("saved", "", case.record.made(node), text)
                )
    return None


def _find(case: FailedPass) -> _Stale | None:
    """The first such value; one that a variable holds is preferred."""
    values: list[_Stale] = []
    for node, slot, value in _stale_slots(case):
        leaf = _saved.leaf_of(value)
        variable = (case.names.of(leaf) if leaf is not None else "") or case.names.memory(value)
        values.append(_Stale(node, slot, variable, value, leaf))
    return next((each for each in values if each.variable), values[0] if values else None)


def _stale_slots(case: FailedPass) -> Iterator[tuple[Node, str, Tensor]]:
    """The changed values that the pass needs: the node that saved each, its name for it, and the
    value as it is.
    """
    for node in case.nodes:
        for name, state, value in _saved.slots(node):
            if state == _saved.STALE and value is not None:
                yield node, name, value


# --- operations that are refused in the forward, for the sake of gradients ------------------------


REFUSALS = {
    "leaf changed": "refused in place",
    "leaf's view changed": "refused in place",
    "hooked view changed": "refused in place",
    "view changed": "refused in place",
    "written out": "refused in place",
    "view without gradients": "view made without gradients",
    "inference saved": "inference tensor",
    "inference changed": "inference tensor",
    "copied": "copied",
    "flag of a result": "not a leaf",
    "inside transform": "inside a transform",
}
"""The classes of operations that are refused, by the kind of PyTorch's error."""


def explain_refused(case: FailedPass, cause: str, arguments: Any, path: Path) -> Explanation:
    """The explanation of such an operation."""
    line = path[0].line
    out = arguments[1].get("out")
    tensor = out if isinstance(out, Tensor) else _which(arguments, cause)
    named = cause != "refused in place" or tensor is out
    variable = _name(case, tensor) if named else _changed(case, line)
    return case.explanation(
        cause,
        Fact("refused", variable, line, case.name),
        *_maker(case, tensor),
        *callers(path, (line,)),
        variable=variable,
    )


def _maker(case: FailedPass, tensor: Tensor | None) -> list[Fact]:
    """The operation that made the tensor of a refusal,
    and the switch that had gradients off then.
    """
    if tensor is None:
        return []
    line, origin = case.record.maker(tensor), case.record.cuts.origin(tensor)
    kind = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
    facts = (
        [Fact("made", _name(case, tensor), line, kind and f"the result of {kind}")]
        if line is not None
        else []
    )
    if origin is not None and origin.off is not None:
        facts.append(Fact("off since", "", origin.off.line, origin.off.how))
    return facts


def _changed(case: FailedPass, line: Line) -> str:
    """The tensor that a line was to change."""
    names = _source.changed_at(line, case.name)
    return names[0] if names else _source.receiver(line, case.name)


def _which(arguments: Any, cause: str) -> Tensor | None:
    """The argument that a refusal is about."""
    given = tensors_in(list(arguments))
    inference = (
        [tensor for tensor in given if tensor.is_inference()] if cause == "inference tensor" else []
    )
    results = (
        [tensor for tensor in given if tensor.grad_fn is not None] if cause == "copied" else []
    )
    return next(iter(inference or results or given), None)


def _name(case: FailedPass, tensor: Tensor | None) -> str:
    """The variable of a tensor, by the name that its owner gives it."""
    paths = case.names.paths.get(id(tensor), ())
    return max(paths, key=lambda path: ("_hooks[" not in path, path.count(".")), default="")
