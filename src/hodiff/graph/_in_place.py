"""Values changed in place: a pass needs what one was before, or the operation itself is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from hodiff._core._nodes import Node
from hodiff.graph import _saved, _second_time, _source
from hodiff.graph._case import Explanation, FailedPass, FailureCause, said
from hodiff.graph._record import Change, Pass, tensors_in
from hodiff.graph._source import Line, at, lines_of, outside

ACTIVATIONS = frozenset(
    {"relu_", "relu6", "relu", "leaky_relu_", "elu_", "celu_", "selu_", "hardtanh_", "rrelu_", "threshold_", "hardtanh"}
    | {"hardswish", "hardsigmoid", "silu", "mish", "dropout_", "dropout", "alpha_dropout_", "feature_dropout_"}
)
"""Operations that modules do in place when they are told so (`inplace=True`), and can do otherwise."""


REASON = "its derivative needs the value from before the change. A retained graph would not help."


class _Stale(NamedTuple):
    """A saved value that was changed: the node, what it calls it, the variable, and the leaf whose memory it is."""

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
    change = case.record.changed(stale.value)
    if not stale.variable and change is not None:
        names = _source.changed_at(change.line) or _source.given_by(change.line)
        stale = stale._replace(variable=names[0] if names else "")
    what = f"`{stale.variable}`" if stale.variable else f"a tensor of shape {tuple(stale.value.shape)}"
    changed = change.line if change is not None else None
    fix, unknown = _advice(case, stale, change)
    return case.explanation(
        "changed in place",
        f"{what} was changed in place, after {type(stale.node).__name__} had saved it (as {stale.slot!r})",
        ("saved at", case.record.made(stale.node)),
        ("changed at", changed),
        ("called from", _caller(case, change)),
        ("failing call", case.call or case.line or "?"),
        variable=stale.variable,
        created=changed,
        reason=REASON,
        fixes=(fix,),
        unknown=(unknown,),
    )


def _unnamed(case: FailedPass) -> Explanation | None:
    """What is known where PyTorch does not tell the tensor: the node that had saved it, its line."""
    for node in case.nodes:
        for slot in _saved.slots(node):
            if slot.state == _saved.STALE:
                return case.explanation(
                    "changed in place",
                    f"a tensor that {type(node).__name__} had saved (as {slot.name!r}) was changed in place",
                    ("saved at", case.record.made(node)),
                    ("failing call", case.call or case.line or "?"),
                    reason=REASON,
                    unknown=("which tensor it was, and which line changed it: PyTorch tells neither before 2.12.",),
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


def _advice(case: FailedPass, stale: _Stale, change: Change | None) -> tuple[str, str]:
    """The fix, and what is left open."""
    if stale.leaf is not None:
        return _of_leaf(case, stale, change)
    if change is None:
        return "", "which line changed it: run the program under `hodiff explain`, which records that."
    fix = _of_activation(change.call, change.line) or _copied(case, stale, change)
    unknown = (
        f"which value the later lines should see. If {change.line} makes a new tensor instead\n"
        "(x = x + 1 for x += 1, torch.where for a masked assignment, torch.stack of a list for\n"
        "rows that a loop writes), the saved one stays as it was; other references to the\n"
        "tensor then see the old values."
    )
    return fix, "" if fix else unknown


def _of_activation(call: str, line: Line) -> str:
    return f"pass inplace=False to the module or function at {at(line)}." if call in ACTIVATIONS else ""


def _copied(case: FailedPass, stale: _Stale, change: Change) -> str:
    """Change a copy: sound where one variable alone holds the tensor, and that is what the line changes."""
    line = change.line
    targets = [_source.base(name) for name in _source.changed_at(line)]
    name = targets[0] if len(targets) == 1 else ""
    if change.view or _saved.is_view(stale.value) or not name.isidentifier():
        return ""  # what it is a view of would stay as it was
    memory = _saved.memory(stale.value)
    holders = {path for path, tensor in case.names.at.items() if _saved.memory(tensor) == memory}
    if holders - {name} or name in _source.parameters(line) or not _source.is_alone(name, line):
        return ""
    return f"change a copy: before {at(line)}, write\n    {name} = {name}.clone()"


def _of_leaf(case: FailedPass, stale: _Stale, change: Change | None) -> tuple[str, str]:
    """A parameter has moved on: the loss is computed again, from there on, with all else that is spent."""
    if case.recorded is None:
        return "", (
            f"should the loss be computed again, after the line that changed `{stale.variable}`? Or does\n"
            "the pass reach the graph of an earlier step, through a value that it handed on (a recurrent\n"
            "state)? Then detach that value where the step ends."
        )
    changes = [change, *(case.record.changed(value) for _, _, value in _stale_slots(case))]
    change = max(filter(None, changes), key=lambda each: each.order, default=None)
    term = _of_loop(case, change) if change is not None else None
    if change is not None and term is not None:
        return "", (
            f"which values of `{stale.variable or 'the parameter'}` you want: "
            f"what {at(term)} computed used those\n"
            f"before {at(change.line)}, in the same loop; computed again after the loop, it\n"
            "would use the last ones. To keep what it used, differentiate each term in the loop, "
            "before that line,\n"
            "with torch.autograd.grad(term, parameters), and add up the results."
        )
    after = f" after {at(change.line)}" if change is not None else " after the change"
    left = _chain(case) + _left(case, stale)
    return f"compute `{case.loss('the loss')}` again{after}, from the forward pass on.{left}", (
        "should the pass have come before the change? A pass moved there adds its gradients to all\n"
        f"the parameters that it reaches, including `{stale.variable or 'the changed one'}`, whose step would use them."
    )


def _of_loop(case: FailedPass, change: Change) -> Line | None:
    """The line of a value of a loop that then changed what it is of, if the pass comes later."""
    mine, changed = dict(case.path), dict(change.path)
    for node, _, _ in _stale_slots(case):
        for frame in case.record.path(node):
            code = frame.code
            around = _source.loops(frame.line) if code in changed and code in mine else []
            if any(_source.within(e, changed[code]) and not _source.within(e, mine[code]) for e in around):
                return frame.line
    return None


def _left(case: FailedPass, stale: _Stale) -> str:
    """What an earlier pass left in `.grad` of leaves that no step has moved since, for this one to add to."""
    names: dict[str, Pass] = {}
    for node in case.nodes:
        leaf = _saved.leaf(node)
        if leaf is None or leaf is stale.leaf:
            continue
        given, change = case.record.tags.given(node), case.record.changed(leaf)
        name = case.names.of(leaf)
        if name and given is not None and (change is None or change.passes <= given.number):
            names[name] = given
    if not names:
        return ""
    shown = ", ".join(list(names)[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    last = next(iter(names.values()))
    return (
        f"\nThe .grad of {shown} still holds what {at(last.stack[0])} gave,\n"
        "and this pass adds to it: zero it first, unless you want the sum."
    )


NAMED = 2


def _caller(case: FailedPass, change: Change | None) -> Line | None:
    """How the program came to the change, where that is not how it came to the pass."""
    here = lines_of(case.path)
    lines = lines_of(change.path)[1:] if change is not None else ()
    return next((line for line in lines if line not in here), None)


def _stale_slots(case: FailedPass) -> Iterator[tuple[Node, str, Tensor]]:
    """What the pass needs and was changed: the node that saved it, what that calls it, and the value as it is."""
    for node in case.nodes:
        for name, state, value in _saved.slots(node):
            if state == _saved.STALE and value is not None:
                yield node, name, value


def _chain(case: FailedPass) -> str:
    """What the pass would meet next: all that was freed or changed, by the lines that made it."""
    nodes = [n for n in case.nodes if case.troubles.get(n) in ("freed", "stale")]
    lines = {line for node in nodes for line in outside(case.record.path(node))}
    shown = sorted(lines)[:SHOWN]
    if not shown:
        return ""
    more = f" and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    return "\nThe values that can no longer be used were computed at " + ", ".join(map(str, shown)) + more + "."


SHOWN = 6


# --- operations that autograd refuses in the forward: what was changed or copied there, and what is sound instead -----


class Refused(NamedTuple):
    """An operation that was refused: the error, the function, its arguments, and the user's lines."""

    case: FailedPass
    call: str
    arguments: Any
    lines: tuple[Line, ...]

    @property
    def line(self) -> Line:
        """The innermost of the user's lines."""
        return self.lines[0]


def _of_refused_leaf(refused: Refused) -> str:
    """Without a record: unless another value that requires grad goes in, which that would cut off."""
    args, kwargs = refused.arguments
    if any(tensor.requires_grad for tensor in tensors_in([*args[1:], *kwargs.values()])):
        return ""
    also = "".join(f"\nThe same goes for {at(line)}." for line in _source.also_changed(refused.line)[:PLACES_SHOWN])
    return f"change its value without recording: put {at(refused.line)} into `with torch.no_grad():`.{also}"


def _of_view(refused: Refused) -> str:
    """Shapes alone: the same without a change. Else, what the view is of may be read later, and must change with it."""
    if refused.call not in SHAPES:
        return ""
    new = refused.call[:-1]
    return f"use {new} instead of {refused.call} at {at(refused.line)}: it leaves the tensor as it is."


SHAPES = ("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_")
"""What changes how a tensor looks at its memory, and has a form that gives another tensor."""
PLACES_SHOWN = 3


def _in_place_of(refused: Refused) -> str:
    return _of_activation(refused.call, refused.line)


_VIEW = (_in_place_of, _of_view)
REFUSALS = {
    "leaf changed": FailureCause(
        "refused in place",
        "a leaf that requires grad cannot be changed in place while operations are recorded.",
        (_in_place_of, _of_refused_leaf),
        (
            "should the new value be part of the graph? If so, make a new tensor under another name:\n"
            "w = p + ... If not, update the parameter under torch.no_grad().",
        ),
    ),
    "inference saved": FailureCause(
        "inference tensor",
        "it was made under inference_mode, so no graph can save it.",
        unknown=(
            "where it was made. Make it under torch.no_grad() instead of inference_mode(), or use a .clone() of it,\n"
            "made outside, which is an ordinary constant.",
        ),
    ),
    "inference changed": FailureCause(
        "inference tensor",
        "it was made under inference_mode, and cannot be changed outside.",
        unknown=(
            "where it was made. Make it under torch.no_grad() instead of inference_mode(), or change a .clone() of it.",
        ),
    ),
    "hooked view changed": FailureCause(
        "refused in place",
        "a full backward hook makes the inputs and outputs of its module views, which may not be changed in place.",
        _VIEW,
        ("who reads the changed values. Make the change in a new tensor, or remove the hook.",),
    ),
    "view changed": FailureCause(
        "refused in place",
        "it is one of several views that an operation returned, and those may not be changed in place.",
        _VIEW,
        (
            "who reads the changed values. If they are read from the whole tensor, compute all of it anew "
            "(x = (x - m) / s);\na copy of the view would leave it unchanged.",
        ),
    ),
    "copied": FailureCause(
        "copied",
        "a tensor with a graph cannot be copied: an attribute of the object holds a result of its forward.",
        unknown=(
            "should that attribute keep its graph? If so, copy before the first forward. If not, store a detached "
            "value\nin it, and keep the one that you train through in a local variable.",
        ),
    ),
}
"""Operations that are refused for the sake of gradients, by the kind of PyTorch's error."""


def explain_refused(refused: Refused, rule: FailureCause) -> Explanation:
    """The explanation of such an operation."""
    line = refused.line
    variable = _changed(refused) if rule.name == "refused in place" else _which(refused)
    callers = dict.fromkeys(refused.lines[1:2] + refused.lines[-1:])
    fixes = said(rule.fixes, refused)[:1]
    return refused.case.explanation(
        rule.name,
        f"refused: {refused.call}" + (f", of `{variable}`" if variable else ""),
        ("at", line),
        ("made at", _made(refused) if rule.name == "copied" else None),
        *(("called from", outer) for outer in callers if outer != line),
        variable=variable,
        created=line,
        reason=rule.sentence,
        fixes=fixes,
        unknown=() if fixes else said(rule.unknown, refused),
    )


def _made(refused: Refused) -> Line | None:
    """The line that made the tensor that the refusal is about."""
    nodes = [tensor.grad_fn for tensor in tensors_in(refused.arguments)]
    record = refused.case.record
    return next(map(record.made, filter(None, nodes)), None) if record is not None else None


def _changed(refused: Refused) -> str:
    """What the line was to change."""
    names = _source.changed_at(refused.line)
    return names[0] if names else _source.receiver(refused.line, refused.call)


def _which(refused: Refused) -> str:
    """The argument that the refusal is about."""
    args, kwargs = refused.arguments
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    inference = [tensor for tensor in given if tensor.is_inference()]
    paths = [path for tensor in inference or given for path in refused.case.names.paths.get(id(tensor), ())]
    return max(paths, key=lambda path: path.count("."), default="")
