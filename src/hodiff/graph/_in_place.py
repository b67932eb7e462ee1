"""Values changed in place: a pass needs what one was before, or the operation itself is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hodiff._core._nodes import Node
from hodiff.graph import _inspect, _record, _saved, _second_time, _source
from hodiff.graph._case import Explanation, FailedPass
from hodiff.graph._record import Change, Pass
from hodiff.graph._source import Line, at, lines_of, outside, quoted

ACTIVATIONS = frozenset(
    {"relu_", "relu6", "relu", "leaky_relu_", "elu_", "celu_", "selu_", "hardtanh_", "rrelu_", "threshold_", "hardtanh"}
    | {"hardswish", "hardsigmoid", "silu", "mish", "dropout_", "dropout", "alpha_dropout_", "feature_dropout_"}
)
"""Operations that modules do in place when they are told so (`inplace=True`), and can do otherwise."""


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
        return None
    if stale.leaf is not None:
        left = _second_time.left_behind(case)
        if left is not None:
            return left
    record = case.record
    made = record.made(stale.node) if record is not None else None
    change = record.changed(stale.value) if record is not None else None
    if not stale.variable and change is not None:
        names = _source.changed_at(change.line) or _source.given_by(change.line)
        stale = stale._replace(variable=names[0] if names else "")
    what = f"`{stale.variable}`" if stale.variable else f"a tensor of shape {tuple(stale.value.shape)}"
    text = [f"{what} was changed in place, after {type(stale.node).__name__} had saved it (as {stale.slot!r})"]
    if made is not None:
        text.append(f"  saved at     {quoted(made)}")
    if change is not None:
        text.append(f"  changed at   {quoted(change.line)}")
        text += [f"  called from  {quoted(line)}" for line in _callers(case, change)]
    text.append(f"  failing call {case.call or (f'{quoted(case.line)}' if case.line is not None else '?')}")
    fixes, unknown = _advice(case, stale, change, made)
    return case.explanation(
        "changed in place",
        variable=stale.variable,
        created=change.line if change is not None else None,
        text=tuple(text),
        reason="its derivative needs the value from before the change. A retained graph would not help.",
        fixes=tuple(fixes),
        unknown=tuple(unknown),
    )


def _find(case: FailedPass) -> _Stale | None:
    """The first such value; one that a variable holds is preferred."""
    stale: _Stale | None = None
    for node in _inspect.executed(case.roots, case.inputs):
        for slot in _saved.slots(node):
            if slot.state == _saved.STALE and slot.value is not None:
                leaf = _saved.leaf_of(slot.value)
                variable = (case.names.of(leaf) if leaf is not None else "") or case.names.memory(slot.value)
                if stale is None or (variable and not stale.variable):
                    stale = _Stale(node, slot.name, variable, slot.value, leaf)
    return stale


def _advice(case: FailedPass, stale: _Stale, change: Change | None, made: Line | None) -> tuple[list[str], list[str]]:
    if stale.leaf is not None:
        return _of_leaf(case, stale, change)
    if change is None:
        return [], ["which line changed it: run the program under `hodiff explain`, which records that."]
    if change.call in ACTIVATIONS:
        return [f"let the module or function at {at(change.line)} not work in place: inplace=False."], []
    fix = _copied(case, stale, change)
    if fix is not None:
        return [fix], []
    return [], [
        f"which value the later lines are to have. Where the change at {change.line} is made to a new tensor\n"
        "(x = x + 1 for x += 1, torch.where for a masked assignment), the old one stays as it was saved;\n"
        "whoever else holds the tensor then sees the old values."
    ]


def _copied(case: FailedPass, stale: _Stale, change: Change) -> str | None:
    """Change a copy: sound where one variable alone holds the tensor, and that is what the line changes."""
    line = change.line
    targets = [_source.base(name) for name in _source.changed_at(line)]
    if change.view or _saved.is_view(stale.value):  # what it is a view of would stay as it was
        return None
    if len(targets) != 1 or not targets[0].isidentifier():
        return None
    name = targets[0]
    holders = {path for path, tensor in _holders(case) if _shares(tensor, stale.value)}
    if holders - {name} or name in _source.parameters(line) or not _source.is_alone(name, line):
        return None
    return f"change a copy: before {at(line)}, write\n    {name} = {name}.clone()"


def _holders(case: FailedPass) -> list[tuple[str, Tensor]]:
    return [(path, tensor) for tensor in case.names.all_tensors() for path in case.names.paths[id(tensor)]]


def _shares(tensor: Tensor, value: Tensor) -> bool:
    return _saved.storage(tensor)[0] == _saved.storage(value)[0]


def _of_leaf(case: FailedPass, stale: _Stale, change: Change | None) -> tuple[list[str], list[str]]:
    """A parameter has moved on: the loss is computed again, from there on, with all else that is spent."""
    loss = _loss(case)
    change = _last_change(case, change)
    after = f" after {at(change.line)}" if change is not None else " after the change"
    if case.record is None:
        return [], [
            f"whether the loss is to be computed again, after the line that changed `{stale.variable}`; or whether\n"
            "this is the graph of an earlier step, through a value that step handed on (a recurrent state):\n"
            "then that is to be cut (.detach()) where the step ends."
        ]
    return [f"compute {loss} again{after}, from the forward pass on.{_chain(case)}{_left(case, stale)}"], [
        "whether it was meant to be differentiated before the change. A pass moved there adds its gradients to all\n"
        f"the parameters that it reaches, `{stale.variable or 'the changed one'}` included, whose step would use them."
    ]


def _left(case: FailedPass, stale: _Stale) -> str:
    """What an earlier pass left in `.grad` of leaves that no step has moved since, for this one to add to."""
    if case.record is None:
        return ""
    names: dict[str, Pass] = {}
    for node in _inspect.executed(case.roots, case.inputs):
        leaf = _saved.leaf(node)
        given = case.record.tags.given(node) if leaf is not None and leaf is not stale.leaf else None
        change = case.record.changed(leaf) if leaf is not None else None
        if given is not None and leaf is not None and (change is None or change.passes <= given.number):
            names.update({name: given} if (name := case.names.of(leaf)) else {})
    if not names:
        return ""
    shown = ", ".join(list(names)[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    last = next(iter(names.values()))
    return (
        f"\n{shown} hold what {at(last.stack[0])} gave,\n"
        "and this pass adds to it: zero that first, unless both are meant."
    )


NAMED = 2


def _callers(case: FailedPass, change: Change) -> list[Line]:
    """How the program came to the change, where that is not how it came to the pass."""
    here = case.call.stack if case.call is not None else ()
    lines = [line for line in lines_of(change.path)[1:] if line not in here]
    return lines[:1]


def _last_change(case: FailedPass, change: Change | None) -> Change | None:
    """The last change of any value that the pass needs from before it."""
    changes = [change] if change is not None else []
    for node in _inspect.executed(case.roots, case.inputs):
        for slot in _saved.slots(node):
            if slot.state == _saved.STALE and slot.value is not None and case.record is not None:
                changes += [other] if (other := case.record.changed(slot.value)) is not None else []
    return max(changes, key=lambda each: each.order, default=None)


def _loss(case: FailedPass) -> str:
    name = case.names.nodes.get(case.roots[0], "") if case.roots else ""
    return f"`{name or (_source.target_of(case.line) if case.line is not None else '') or 'the loss'}`"


def _chain(case: FailedPass) -> str:
    """What the pass would meet next: all that was freed or changed, by the lines that made it."""
    record = case.record
    lines: dict[Line, None] = {}
    for node in _inspect.executed(case.roots, case.inputs):
        if _inspect.trouble(node) in ("freed", "stale") and record is not None:
            lines.update(dict.fromkeys(outside(record.path(node))))
    shown = sorted(lines)[:SHOWN]
    if not shown:
        return ""
    more = f" and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    return "\nWhat cannot be used any more was computed at " + ", ".join(map(str, shown)) + more + "."


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


class RefusalMeaning(NamedTuple):
    """What a refusal means: the words it is known by, its cause, its sentence, its fix or what is left open."""

    words: str
    cause: str
    sentence: str
    unknown: str
    fix: Callable[[Refused], str | None] | None = None


def _of_refused_leaf(refused: Refused) -> str | None:
    """Without a record: unless another value that requires grad goes in, which that would cut off."""
    args, kwargs = refused.arguments
    if any(tensor.requires_grad for tensor in _record.tensors_in([*args[1:], *kwargs.values()])):
        return None
    also = "".join(f"\nThe same goes for {at(line)}." for line in _source.also_changed(refused.line)[:PLACES_SHOWN])
    return f"change its value without a record: put {at(refused.line)} into `with torch.no_grad():`.{also}"


def _of_view(refused: Refused) -> str | None:
    """Shapes alone: the same without a change. Else, what the view is of may be read later, and must change with it."""
    if refused.call not in SHAPES:
        return None
    new = refused.call[:-1]
    return f"use {new} instead of {refused.call} at {at(refused.line)}: it leaves the tensor as it is."


SHAPES = ("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_")
"""What changes how a tensor looks at its memory, and has a form that gives another tensor."""
PLACES_SHOWN = 3


RULES = (
    RefusalMeaning(
        "leaf Variable that requires grad is being used in an in-place operation",
        "refused in place",
        "a leaf that requires grad was to be changed in place while operations are recorded.",
        "whether the new value is to be part of the graph. If so, make a new tensor of another name:\n"
        "w = p + ...; an update of a parameter is made under torch.no_grad().",
        _of_refused_leaf,
    ),
    RefusalMeaning(
        "nference tensors cannot be saved for backward",
        "inference tensor",
        "it was made under inference_mode, which forbids it in any graph.",
        "where it was made. Make it under torch.no_grad() instead of inference_mode(); a .clone() of it, made\n"
        "outside, is an ordinary constant.",
    ),
    RefusalMeaning(
        "nplace update to inference tensor",
        "inference tensor",
        "it was made under inference_mode, and cannot be changed outside.",
        "where it was made. Make it under torch.no_grad() instead of inference_mode(), or change a .clone() of it.",
    ),
    RefusalMeaning(
        "BackwardHookFunction",
        "refused in place",
        "a full backward hook makes what its module takes or returns a view that may not be changed in place.",
        "who reads the changed values: make the change to a new tensor, or leave the hook out.",
        _of_view,
    ),
    RefusalMeaning(
        "is a view and is being modified inplace",
        "refused in place",
        "it is one of several views that an operation gave, and those may not be changed in place.",
        "who reads the changed values. Where it is what the views are of, compute all of that anew (x = (x - m) / s);\n"
        "a copy of the view would leave it unchanged.",
        _of_view,
    ),
    RefusalMeaning(
        "support the deepcopy protocol",
        "copied",
        "a tensor with a graph was to be copied: an attribute of the object holds a result of its forward.",
        "whether that attribute is to keep its graph. Copy before the first forward; or keep a detached value in it,\n"
        "and the one that is trained through in a local variable.",
    ),
)


def explain_refused(refused: Refused) -> Explanation | None:
    """The explanation of an operation that was refused for the sake of gradients; None for other errors."""
    error = str(refused.case.error)
    rule = next((rule for rule in RULES if rule.words in error), None)
    if rule is None:
        return None
    line = refused.line
    in_place = rule.cause == "refused in place"
    variable = _changed(refused) if in_place else _which(refused)
    text = [
        f"refused: {refused.call}" + (f", of `{variable}`" if variable else ""),
        f"  at           {quoted(line)}",
    ]
    text += [
        f"  called from  {quoted(outer)}"
        for outer in dict.fromkeys(refused.lines[1:2] + refused.lines[-1:])
        if outer != line
    ]
    if in_place and refused.call in ACTIVATIONS:
        fix = f"let the module or function at {at(line)} not work in place: inplace=False."
    else:
        fix = rule.fix(refused) if rule.fix is not None else None
    return refused.case.explanation(
        rule.cause,
        variable=variable,
        created=line,
        text=tuple(text),
        reason=rule.sentence,
        fixes=(fix,) if fix is not None else (),
        unknown=() if fix is not None else (rule.unknown,),
    )


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
