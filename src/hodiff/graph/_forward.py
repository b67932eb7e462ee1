"""Operations that autograd refuses in the forward: what was changed or copied there, and what is sound instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hodiff.graph import _calls, _source
from hodiff.graph._case import Case, Explanation
from hodiff.graph._source import Line
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
    fix: Callable[[Refused], str | None]
    unknown: str


def _in_place_leaf(refused: Refused) -> str | None:
    at = f"{refused.line} ({refused.line.text})"
    if refused.call in ACTIVATIONS:
        return f"let the module or function at {at} not work in place: inplace=False."
    args, kwargs = refused.arguments
    others = _calls.tensors_in([*args[1:], *kwargs.values()])
    if any(tensor.requires_grad for tensor in others):  # no_grad would cut these off
        return None
    return f"change its value without a record: put {at} into `with torch.no_grad():`."


def _inference(refused: Refused) -> str | None:
    return None


def _view(refused: Refused) -> str | None:
    at = f"{refused.line} ({refused.line.text})"
    if refused.call in ACTIVATIONS:
        return f"let the module or function at {at} not work in place: inplace=False."
    return None  # what the view is of may be read later: a copy would leave that as it was


def _copied(refused: Refused) -> str | None:
    return None


RULES = (
    Rule(
        "leaf Variable that requires grad is being used in an in-place operation",
        "refused in place",
        "a leaf that requires grad was to be changed in place while operations are recorded.",
        _in_place_leaf,
        "whether the new value is to be part of the graph. If so, make a new tensor of another name:\n"
        "w = p + ...; an update of a parameter is made under torch.no_grad().",
    ),
    Rule(
        "nference tensors cannot be saved for backward",
        "inference tensor",
        "it was made under inference_mode, which forbids it in any graph.",
        _inference,
        "where it was made. Make it under torch.no_grad() instead of inference_mode(); a .clone() of it, made\n"
        "outside, is an ordinary constant.",
    ),
    Rule(
        "nplace update to inference tensor",
        "inference tensor",
        "it was made under inference_mode, and cannot be changed outside.",
        _inference,
        "where it was made. Make it under torch.no_grad() instead of inference_mode(), or change a .clone() of it.",
    ),
    Rule(
        "is a view and is being modified inplace",
        "refused in place",
        "it is one of several views that an operation or a hook gave, and those may not be changed in place.",
        _view,
        "who reads the changed values. Where it is what the views are of, compute all of that anew (x = (x - m) / s);\n"
        "a copy of the view would leave it unchanged.",
    ),
    Rule(
        "support the deepcopy protocol",
        "copied",
        "a tensor with a graph was to be copied: an attribute of the object holds a result of its forward.",
        _copied,
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
    variable = (
        next((name for name in _source.changed_at(line)), "") if rule.cause == "refused in place" else _which(refused)
    )
    text = [
        f"refused: {refused.call}" + (f", of `{variable}`" if variable else ""),
        f"  at           {line}   {line.text}",
    ]
    text += [f"  called from  {outer}   {outer.text}" for outer in refused.lines[-1:] if outer != line]
    fix = rule.fix(refused)
    return refused.case.explanation(
        rule.cause,
        variable=variable,
        created=line,
        text=tuple(text),
        reason=rule.sentence,
        fixes=(fix,) if fix is not None else (),
        unknown=() if fix is not None else (rule.unknown,),
    )


def _which(refused: Refused) -> str:
    """The argument that the refusal is about."""
    args, kwargs = refused.arguments
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    inference = [tensor for tensor in given if tensor.is_inference()]
    paths = [path for tensor in inference or given for path in refused.case.names.paths.get(id(tensor), ())]
    return max(paths, key=lambda path: path.count("."), default="")
