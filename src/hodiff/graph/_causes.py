"""Why a pass meets a part of the graph that was freed: one `Cause` for each case, with the fixes that evidence allows.

A fix is a function of evidence: it gives words only where the record shows that, done as they say, the program
differentiates what it was written to differentiate. What the record cannot show (which gradients are wanted) is
said as not known, with what follows from either answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hodiff.graph import _earlier, _losses, _once
from hodiff.graph._evidence import PARAMETRIZED, Evidence
from hodiff.graph._likely import SENTENCES

Words = Callable[[Evidence], str | None]


@dataclass(frozen=True)
class Cause:
    """A cause: its name, when it is one, its sentence, its fixes and what it leaves open."""

    name: str
    holds: Callable[[Evidence], bool]
    sentence: Words
    fixes: tuple[Words, ...] = ()
    unknown: tuple[Words, ...] = ()


def told(evidence: Evidence) -> Cause:
    """The first cause that holds."""
    return next(cause for cause in CAUSES if cause.holds(evidence))


def words(of: tuple[Words, ...], evidence: Evidence) -> tuple[str, ...]:
    """What some functions of evidence have to say."""
    return tuple(text for each in of if (text := each(evidence)) is not None)


def _in_init(e: Evidence) -> bool:
    return bool(e.first.path) and e.first.path[0].co_name in ("__init__", "<module>")


def _at_once(e: Evidence) -> bool:
    """Whether both losses had been computed when the first was differentiated: no state entered a step in between."""
    return e.made_before and not e.rounds and e.call.path != e.freed_by.path


def _is_member(e: Evidence) -> bool:
    """Whether an object or a container holds the value: maybe for good, and not for the next step alone."""
    return e.first.kept and not e.first.variable.isidentifier()


CAUSES = (
    Cause(
        "same loss twice",
        lambda e: e.first.node in e.case.roots,
        lambda e: SENTENCES["same loss twice"],
        (_losses.loss_again,),
        (_losses.same_unknown,),
    ),
    Cause(
        "cached",
        lambda e: e.first.variable == PARAMETRIZED,
        lambda e: "the context keeps the computed parameters, and every pass needs their graph again.",
        (_once.parametrized,),
    ),
    Cause(
        "cached",
        lambda e: bool(e.memo),
        lambda e: "functools keeps what the function returned once; every pass through it needs that graph again.",
        (_once.memo_cleared,),
    ),
    Cause(
        "carried",
        lambda e: (
            (e.first.replaced or (e.first.again and not _is_member(e)) or _once.is_remembered(e)) and not _at_once(e)
        ),
        lambda e: f"it is state from a previous step, whose pass {e.fate}; this step differentiates into it.",
        (_earlier.detached_after,),
        (_earlier.silences, _earlier.unwritten, _earlier.unrolled),
    ),
    Cause(
        "stored",
        lambda e: e.first.kept and e.first.again and e.first.variable.endswith("]"),
        lambda e: (
            f"an earlier step put it into `{_earlier.container(e)}`, and its pass {e.fate}; "
            "this step differentiates into it."
        ),
        (_earlier.cut_states,),
        (_earlier.within, _earlier.stored),
    ),
    Cause(
        "two losses",
        lambda e: not e.rounds and e.call.path != e.freed_by.path,
        lambda e: SENTENCES["two losses"],
        (
            _losses.first_detached,
            _losses.by_hand,
            _losses.summed,
            _losses.multi,
            _losses.kept_for_second,
            _losses.from_new_values,
        ),
        (_losses.whose, _losses.computed_again, _losses.together_unknown),
    ),
    Cause(
        "cached",
        lambda e: e.first.kept and (e.inside or ("." in e.first.variable and not _in_init(e) and _once.is_lazy(e))),
        lambda e: SENTENCES["cached"],
        (_once.cleared, _once.object_again),
        (_once.cache,),
    ),
    Cause(
        "hoisted",
        lambda e: True,
        lambda e: SENTENCES["hoisted"],
        (_once.move_inside, _once.each_time, _once.retained),
        (_once.made_again,),
    ),
)
