"""A backward pass met a part of the graph that was freed: which part, by which pass, and why it was met again."""

from __future__ import annotations

from collections import Counter

from hodiff._core._nodes import Node
from hodiff.graph import _causes, _likely, _predict, _traits
from hodiff.graph._case import Case, Explanation
from hodiff.graph._evidence import Evidence, Part
from hodiff.graph._gather import gather
from hodiff.graph._line import Line, lines_of, quoted


def explain(case: Case) -> Explanation | None:
    """The explanation of "Trying to backward through the graph a second time"."""
    evidence = gather(case)
    return _recorded(case, evidence) if evidence is not None else _inferred(case)


def left_behind(case: Case) -> Explanation | None:
    """The explanation of a pass that meets what an earlier step left, if that is the cause."""
    evidence = gather(case)
    if evidence is None or _causes.told(evidence).name not in ("carried", "stored"):
        return None
    return _recorded(case, evidence)


def _recorded(case: Case, evidence: Evidence) -> Explanation:
    cause = _causes.told(evidence)
    part = evidence.first
    freed = evidence.freed_by
    text = [f"shared part: {', '.join(_what(each) for each in evidence.parts[:SHOWN])}"]
    if part.created is not None:
        text.append(f"  created at   {quoted(part.created)}")
        text += [f"  called from  {quoted(line)}" for line in _callers(evidence)]
    text += [
        f"  {'kept by ' if freed.retained else 'freed by'}     {freed}",
        f"  failing call {case.call}",
        f"  {_lost(evidence)}",
    ]
    return case.explanation(
        cause.name,
        variable=part.variable,
        created=part.created,
        freed=freed.stack[0] if freed.path and not freed.retained else None,
        text=tuple(text),
        reason=cause.sentence(evidence) or "",
        fixes=_causes.words(cause.fixes, evidence),
        unknown=_causes.words(cause.unknown, evidence),
    )


SHOWN = 4
"""Values that a sentence names, where several begin the old part."""


def _what(part: Part) -> str:
    name = f"`{part.variable}`" if part.variable else "a value without a name"
    shape = _traits.shape(part.node)
    return f"{name} = {type(part.node).__name__}" + (f" (output shape {shape})" if shape is not None else "")


def _callers(evidence: Evidence) -> list[Line]:
    """How the user's program came to the line that made the part: the nearest caller and the outermost."""
    known = (evidence.first.created, *evidence.call.stack)
    lines = [line for line in lines_of(evidence.first.path)[1:] if line not in known]
    return list(dict.fromkeys([*lines[:1], *lines[-1:]]))


def _lost(evidence: Evidence) -> str:
    """What the pass needs and cannot have."""
    if evidence.freed_by.retained:
        return f"changed since: {evidence.names([leaf for leaf in evidence.below if evidence.moved(leaf)])}"
    return f"freed nodes it needs: {_freed_below(evidence)}"


def _freed_below(evidence: Evidence) -> str:
    counts = Counter(type(each).__name__ for each in _predict.having(evidence.under, "freed"))
    shown = [name if count == 1 else f"{name} x{count}" for name, count in list(counts.items())[:6]]
    more = f" and {len(counts) - 6} more kinds" if len(counts) > 6 else ""
    return ", ".join(shown) + more or "what it saved cannot be seen from outside"


def _inferred(case: Case) -> Explanation | None:
    """Nothing was recorded: what is likely is said; no fix, as none of its conditions can be checked."""
    found = _likely.infer(case)
    if found is None:
        return None
    text = [f"shared part: {_of(found.node, found.variable)}"]
    if found.created is not None:
        text.append(f"  created at   {quoted(found.created)}")
    if found.freed is not None:
        text.append(f"  freed by     {quoted(found.freed)}{found.earlier}")
    if case.line is not None:
        text.append(f"  failing call {quoted(case.line)}")
    return case.explanation(
        found.cause,
        variable=found.variable,
        created=found.created,
        freed=found.freed,
        text=tuple(text),
        reason=_likely.SENTENCES[found.cause],
        unknown=("which fix is sound here: that takes a record of what changed between the passes.",),
        certain=False,
    )


def _of(node: Node | None, variable: str) -> str:
    name = f"`{variable}`" if variable else "a value without a name"
    return name if node is None else f"{name} = {type(node).__name__}"
