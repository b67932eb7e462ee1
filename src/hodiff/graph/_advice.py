"""What is said of a part of the graph that was freed: the cause in a sentence, and the fixes that are valid here."""

from __future__ import annotations

import re
from typing import NamedTuple

from hodiff._core._nodes import Node
from hodiff.graph import _source
from hodiff.graph._case import Case
from hodiff.graph._source import Line


class Shared(NamedTuple):
    """The part that was freed before, and what is known of it."""

    node: Node | None
    variable: str
    created: Line | None
    freed: Line | None
    freed_text: str
    cause: str
    other: str = ""  # the variable of the loss whose pass freed it
    changed: tuple[str, ...] = ()  # leaves below that changed since
    through: bool = False  # every leaf is reached only through it
    moved: bool = False  # a leaf of the first loss changed since its pass
    by: str = ""  # the call that freed it


def reason(shared: Shared) -> str:
    """The cause, as a sentence."""
    return {
        "hoisted": "it was built once, outside the loop, and every iteration differentiates through it again.",
        "carried": "it is state from a previous step, whose pass freed its graph; this step differentiates into it.",
        "two losses": "it belongs to both losses, and the pass of the first freed it.",
        "same loss twice": "the same loss is differentiated twice, and the first pass freed what it needs.",
        "cached attribute": "an object computed it once and keeps it; every pass through the object needs it again.",
    }[shared.cause]


def fixes(shared: Shared, case: Case) -> list[str]:
    """What is valid here. A retained graph is not, once a leaf below has changed."""
    name = shared.variable or "that value"
    code = f"`{name}`" if shared.variable else name
    stale = [leaf for leaf in shared.changed if leaf != "(unknown)"]
    because = f"\n(required: {', '.join(stale[:3])} changed in place since; a retained graph would be stale or raise)"
    required = because if stale else ""
    retain = not stale and shared.changed != ("(unknown)",)
    detach = [] if shared.through else [f"{name} = {name}.detach() if no gradient through it is wanted."]
    failing = case.names.nodes.get(case.roots[0], "") or (loss_at(case.line) if case.line else "")
    if shared.cause == "hoisted":
        if "." in name:
            return [f"compute {code} again in each step, instead of once, when the object is made.{required}", *detach]
        keep = ["pass retain_graph=True in every pass but the last, if nothing in it changes."] if retain else []
        return [f"move the line that computes {code} inside the loop.{required}", *keep, *detach]
    if shared.cause == "cached attribute":
        return [f"make the object `{name.split('.')[0]}` anew inside the loop, before it is used.{required}"]
    if shared.cause == "carried":
        if failing and failing == shared.variable:
            return [
                f"differentiate each step's own part, and add it up detached: {name} = {name} + part.detach().",
                f"or call {name}.backward() once, after the loop.",
            ]
        if name != _source.base(name):
            held = f"what earlier steps put into `{_source.base(name)}`"
            return [f"detach {held}, where a later step uses it: {name}.detach().", *_unroll()]
        return [f"{name} = {name}.detach() at the start of each step, so that gradients stop there.", *_unroll()]
    if shared.cause == "same loss twice":
        keep = ["pass retain_graph=True in the first call, if the same gradient is wanted again."] if retain else []
        return [f"compute {code} again before the second call.{required}", *keep]
    pair = f"{shared.other} + {failing}" if shared.other and failing and shared.other != failing else "the sum of both"
    if shared.by == "autograd.grad" and shared.other:
        return [
            f"take that gradient with hodiff.grad({shared.other}, ...), which frees nothing; "
            f"with create_graph=True, if it enters {failing or 'the loss'}.",
            *(["pass retain_graph=True in that call (create_graph=True does so too)."] if retain else []),
        ]
    if stale:
        use = (
            [] if shared.through else [f"give one of the losses {name}.detach(), if no gradient through it is wanted."]
        )
        return [f"compute {code} again for the second loss.{required}", *use]
    losses = pair.replace(" + ", ", ") if " + " in pair else "first, second"
    if shared.moved:  # the first loss is past: what it needs changed after its pass
        return [
            f"give the first loss {name}.detach(), if its pass needs no gradient through it.",
            *(["pass retain_graph=True in the first call, if it does."] if retain else []),
        ]
    return [
        f"one pass for both: ({pair}).backward()." if " + " in pair else f"one pass for {pair}.",
        f"each loss's own gradients: hodiff.multi_grad([{losses}], parameters).",
        *(["pass retain_graph=True in the first call."] if retain else []),
        *(
            [f"give one of the losses {name}.detach() if it needs no gradient through it."]
            if not shared.through
            else []
        ),
    ]


def _unroll() -> list[str]:
    return ["to differentiate through several steps, add their losses up and call backward() once, after them."]


_LOSS = re.compile(r"([\w.\[\]]+)\.backward\(|grad\(\s*([\w.]+)\s*,")


def loss_at(line: Line) -> str:
    """The loss that a line differentiates, as written."""
    found = _LOSS.search(line.text)
    return (found.group(1) or found.group(2)) if found else ""
