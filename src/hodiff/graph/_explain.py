"""Why a backward pass failed, in the user's own names and lines: from a record,
or after the fact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _messages, _nodes
from hodiff._core._faults import interrupts
from hodiff.errors import GraphError, InputError
from hodiff.graph import _cut, _saved, _unusable
from hodiff.graph._case import Explanation, Fact, FailedPass, asked_for, fact_of_pass
from hodiff.graph._names import steps_of, user_frames, users_of
from hodiff.graph._record import NOTHING, PASSES, Record
from hodiff.graph._source import Path, line_of


def of_pass(case: FailedPass) -> Explanation | None:
    """The explanation of a pass that failed under a watch."""
    return _nested(case.error, steps_of(case.error.__traceback__)) or _dispatch(case)


def _nested(error: BaseException, steps: list[TracebackType]) -> Explanation | None:
    """The explanation of a pass that a hook or a Function asked for while another ran:
    no watch sees inside that.
    """
    run = next(
        (index for index, step in enumerate(steps) if step.tb_frame.f_code is _saved.ENGINE),
        len(steps),
    )
    inner = next((index for index in _entries(steps) if index > run), None)
    frames = users_of(steps[:inner]) if inner is not None else []
    if inner is None or not frames or _messages.kind_of(error) not in ("no graph", "not used"):
        return None
    return _cut.within_pass(_asked_at(steps[inner], error, frames))


def of_operation(
    error: BaseException,
    func: Any,
    arguments: Any,
    path: Path,
    frames: list[FrameType],
    record: Record,
) -> Explanation | None:
    """The explanation of an operation that was refused under a watch, for the sake of gradients."""
    cause = _unusable.REFUSALS.get(_messages.kind_of(error))
    if cause is None:
        return None
    name = getattr(func, "__name__", "") or "an operation"
    call = {"__set__": "x.requires_grad ="}.get(name, name)
    with _saved.without_modes():
        return _unusable.explain_refused(
            FailedPass(error, call, [], [], None, frames, record), cause, arguments, path
        )


FAILURES: dict[str, Callable[[FailedPass], Explanation | None]] = {
    "freed": _unusable.freed,
    "changed": _unusable.changed,
    "no graph": _cut.no_graph,
    "not used": _cut.not_used,
    "not scalar": _cut.not_scalar,
    "start shape": _cut.wrong_start,
    "no tensor": _cut.no_tensor,
    **dict.fromkeys(("compiled", "missing", "once"), _cut.second_derivative),
    **dict.fromkeys(("recomputed", "recomputed in number"), _cut.recomputed),
    "reentrant": _cut.reentrant,
    "unpacked twice": _cut.unpacked_twice,
}
"""Who explains a pass that failed, by the kind of PyTorch's error."""


def _dispatch(case: FailedPass) -> Explanation | None:
    if isinstance(case.error, GraphError):
        return case.explanation("released") if case.error._facts.kind == "released" else None
    return FAILURES.get(_messages.kind_of(case.error), _cut.own_function)(case)


class Note(str):
    """The note that an exception is given: the words of an explanation, which it holds as well."""

    explanation: Explanation


def note(error: BaseException, explanation: Callable[[], Explanation | None]) -> None:
    """Add what explains an error to it, once; an explanation must not hide what it explains."""
    try:
        explained = explanation()
    except Exception as other:
        if interrupts(other):
            raise
        return
    if explained is not None and recorded(error) is None:
        said = Note(explained)
        said.explanation = explained
        error.add_note(said)


def recorded(error: BaseException) -> Explanation | None:
    """The explanation of an error by the record of a watch."""
    notes = getattr(error, "__notes__", ())
    return next((each.explanation for each in notes if isinstance(each, Note)), None)


def explain(exc: BaseException | None = None) -> Explanation | None:
    r"""Why a backward pass failed, after the fact: nothing need have been recorded.

    The loss is still in the traceback, and the user's variables are there: they tell the class of
    the failure, the states of nodes, and names. Which pass freed a graph and which line cut it is
    told by a record alone: run the program under `hodiff explain`, or the part of it under `watch`;
    then this returns what was recorded at the time.

    Args:
        exc: The exception; None means the one being handled, or the last one that ended at the
            prompt.

    Returns:
        A record that prints as the explanation; None for an exception of another kind. The classes
        that it knows are the sections of docs/explain/failures.md.

    Raises:
        InputError: No exception was given, and none is there.

    Cost:
        No pass; one look over the variables in the traceback and the graphs they lead to. Shapes
        play no role.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> try:
        ...     loss = x.detach().sum()
        ...     loss.backward()
        ... except RuntimeError:
        ...     print(hodiff.graph.explain().cause)
        no graph
    """
    if exc is None:
        exc = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if not isinstance(exc, BaseException):
        raise InputError(
            f"exc: got {_arguments.kind(exc)}{'' if exc else ', and no exception is being handled'}"
            f". Give the exception that backward() raised."
        )
    error: BaseException | None = exc
    while error is not None:
        with _saved.without_modes():
            explanation = recorded(error) or _after_the_fact(error)
        if explanation is not None:
            return explanation
        error = error.__cause__
    return None


def _after_the_fact(error: BaseException) -> Explanation | None:
    steps = steps_of(error.__traceback__)
    entries = _entries(steps)
    if not entries:
        return _read_after(error)
    frames = [*users_of(steps[: entries[0]]), *user_frames(steps[0].tb_frame.f_back)]
    if not frames:
        return None
    return _nested(error, steps) or _dispatch(_asked_at(steps[entries[0]], error, frames))


def left(error: BaseException, record: Record) -> Explanation | None:
    """An error leaves a watch: of those outside a pass and an operation,
    some are about gradients as well.
    """
    outside = not getattr(error, "__notes__", ()) and not _entries(steps_of(error.__traceback__))
    return _read_after(error, record) if outside else None


def _read_after(error: BaseException, record: Record = NOTHING) -> Explanation | None:
    """No pass failed, but the user read what a node had saved, or a gradient that is none, or has
    no leaf to step.
    """
    steps = steps_of(error.__traceback__)
    frames = users_of(steps)
    if not frames:
        return None
    case = FailedPass(error, "line", [], [], None, frames, record)
    if "NoneType" in str(error) and isinstance(error, (AttributeError, TypeError)):
        return _none_read(case)
    kind = _messages.kind_of(error)
    if kind == "result to optimize":
        return _not_a_leaf(case, steps[-1].tb_frame.f_locals.get("param"))
    if kind in ("flag of a result", "inside transform") and record is NOTHING:
        return case.explanation(_unusable.REFUSALS[kind], certain=True)
    if kind != "freed" or not isinstance(error, RuntimeError):
        return None
    case.name = "reading a saved tensor"
    held = dict(frames[0].f_locals).items()
    nodes = {name: value for name, value in held if isinstance(value, torch.autograd.graph.Node)}
    calls = {name: call for name, node in nodes.items() if (call := record.tags.tag(node))}
    variable = next(iter(calls), "")
    line, outer = line_of(frames[0]), line_of(frames[-1])
    return case.explanation(
        "read after freeing",
        Fact("read", variable, line, "what it saved was freed"),
        Fact("called", "", outer) if outer != line else None,
        fact_of_pass("freed by", calls[variable]) if calls else None,
        variable=variable,
        certain=True,
    )


def _none_read(case: FailedPass) -> Explanation | None:
    """The explanation of a `.grad` that is None: of what is no leaf,
    or of a leaf that no pass has reached.
    """
    if case.record is NOTHING:
        reads = case.line is not None and ".grad" in case.line.text
        return case.explanation("no gradient yet", certain=False) if reads else None
    facts = _cut.without_gradient(case, case.line)
    tensors = [
        each
        for ref, line in case.record.without
        if (each := ref()) is not None and line == case.line
    ]
    if not facts:
        return None
    name = facts[-1].name
    results = [each for each in tensors if not each.is_leaf]
    if results:
        return _not_a_leaf(case, results[-1], *facts[-1:])
    made = [
        Fact("made", case.leaf(each), line)
        for each in tensors
        if (line := case.record.maker(each)) is not None
    ]
    cuts = _cut.facts_of(case, _cut.between(case, _nodes.walk(case.names.nodes), tensors))
    facts += [*made[:1], *cuts, *_last_pass(case)]
    return case.explanation("no gradient yet", *facts, variable=name)


def _not_a_leaf(case: FailedPass, tensor: Any, *facts: Fact) -> Explanation | None:
    """The explanation of a result of an operation that was taken for a leaf."""
    if not isinstance(tensor, Tensor):
        return None
    name = max(case.names.paths.get(id(tensor), [""]), key=len)
    kind = type(tensor.grad_fn).__name__
    made = Fact("made", name, case.record.maker(tensor), f"no leaf: the result of {kind}")
    below = [
        leaf for node in _nodes.walk([tensor.grad_fn]) if (leaf := _saved.leaf(node)) is not None
    ]
    leaves = case.of_leaves(Fact("made of"), below)
    return case.explanation(
        "not a leaf", *facts, made, leaves, *_last_pass(case), variable=name, certain=True
    )


def _last_pass(case: FailedPass) -> list[Fact]:
    """The last pass that was recorded."""
    return [fact_of_pass("last pass", call) for call in case.record.passes[-1:]]


_ENTRIES = {call.__code__: name for call, (name, _) in PASSES.items()}


def _entries(steps: list[TracebackType]) -> list[int]:
    """The places in a traceback where passes were asked for, the outermost first."""
    return [index for index, step in enumerate(steps) if step.tb_frame.f_code in _ENTRIES]


def _asked_at(entry: TracebackType, error: BaseException, frames: list[Any]) -> FailedPass:
    """The pass that was asked for at a step of a traceback: what it was to differentiate,
    and by which inputs.
    """
    given = dict(entry.tb_frame.f_locals)
    names = ("self", "tensors", "outputs")
    given["tensors"] = next((given[name] for name in names if name in given), ())
    return asked_for(error, _ENTRIES[entry.tb_frame.f_code], given, frames)
