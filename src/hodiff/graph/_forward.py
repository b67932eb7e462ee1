"""Operations that autograd refuses in the forward: what was changed or copied there, and what is sound instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hodiff.graph import _calls, _changes
from hodiff.graph._case import Case, Explanation
from hodiff.graph._line import Line, at, quoted
from hodiff.graph._stale import ACTIVATIONS


class Refused(NamedTuple):
    """An operation that was refused: the error, the function, its arguments, and the user's lines."""

    case: Case
    call: str
    arguments: Any
    lines: tuple[Line, ...]

    @property
    def line(self) -> Line:
        """The innermost of the user's lines."""
        return self.lines[0]


class Rule(NamedTuple):
    """What a refusal means: the words it is known by, its cause, its sentence, its fix or what is left open."""

    words: str
    cause: str
    sentence: str
    unknown: str
    fix: Callable[[Refused], str | None] | None = None


def _of_leaf(refused: Refused) -> str | None:
    """Without a record: unless another value that requires grad goes in, which that would cut off."""
    args, kwargs = refused.arguments
    if any(tensor.requires_grad for tensor in _calls.tensors_in([*args[1:], *kwargs.values()])):
        return None
    also = "".join(f"\nThe same goes for {at(line)}." for line in _changes.also_changed(refused.line)[:SHOWN])
    return f"change its value without a record: put {at(refused.line)} into `with torch.no_grad():`.{also}"


def _of_view(refused: Refused) -> str | None:
    """Shapes alone: the same without a change. Else, what the view is of may be read later, and must change with it."""
    if refused.call not in SHAPES:
        return None
    new = refused.call[:-1]
    return f"use {new} instead of {refused.call} at {at(refused.line)}: it leaves the tensor as it is."


SHAPES = ("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_")
"""What changes how a tensor looks at its memory, and has a form that gives another tensor."""
SHOWN = 3


RULES = (
    Rule(
        "leaf Variable that requires grad is being used in an in-place operation",
        "refused in place",
        "a leaf that requires grad was to be changed in place while operations are recorded.",
        "whether the new value is to be part of the graph. If so, make a new tensor of another name:\n"
        "w = p + ...; an update of a parameter is made under torch.no_grad().",
        _of_leaf,
    ),
    Rule(
        "nference tensors cannot be saved for backward",
        "inference tensor",
        "it was made under inference_mode, which forbids it in any graph.",
        "where it was made. Make it under torch.no_grad() instead of inference_mode(); a .clone() of it, made\n"
        "outside, is an ordinary constant.",
    ),
    Rule(
        "nplace update to inference tensor",
        "inference tensor",
        "it was made under inference_mode, and cannot be changed outside.",
        "where it was made. Make it under torch.no_grad() instead of inference_mode(), or change a .clone() of it.",
    ),
    Rule(
        "BackwardHookFunction",
        "refused in place",
        "a full backward hook makes what its module takes or returns a view that may not be changed in place.",
        "who reads the changed values: make the change to a new tensor, or leave the hook out.",
        _of_view,
    ),
    Rule(
        "is a view and is being modified inplace",
        "refused in place",
        "it is one of several views that an operation gave, and those may not be changed in place.",
        "who reads the changed values. Where it is what the views are of, compute all of that anew (x = (x - m) / s);\n"
        "a copy of the view would leave it unchanged.",
        _of_view,
    ),
    Rule(
        "support the deepcopy protocol",
        "copied",
        "a tensor with a graph was to be copied: an attribute of the object holds a result of its forward.",
        "whether that attribute is to keep its graph. Copy before the first forward; or keep a detached value in it,\n"
        "and the one that is trained through in a local variable.",
    ),
)


def explain(refused: Refused) -> Explanation | None:
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
    names = _changes.changed_at(refused.line)
    return names[0] if names else _changes.receiver(refused.line, refused.call)


def _which(refused: Refused) -> str:
    """The argument that the refusal is about."""
    args, kwargs = refused.arguments
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    inference = [tensor for tensor in given if tensor.is_inference()]
    paths = [path for tensor in inference or given for path in refused.case.names.paths.get(id(tensor), ())]
    return max(paths, key=lambda path: path.count("."), default="")
