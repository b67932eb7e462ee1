"""Two losses that share a part of their graphs, and one that is differentiated twice."""

from __future__ import annotations

from hodiff.graph import _passes, _source, _variables, _written
from hodiff.graph._evidence import Evidence
from hodiff.graph._line import Line, at


def summed(e: Evidence) -> str | None:
    """One pass for the sum: the same gradients, where those of the first still lie in `.grad`."""
    if e.together is None or not e.added or e.changed or e.others:
        return None
    first, second = (_passes.loss_of(line) for line in e.together)
    if not first or not second or first == second:
        return None
    return f"one pass for both, at {e.together[1]}: ({first} + {second}).backward(), and none at {e.together[0]}."


def kept_for_second(e: Evidence) -> str | None:
    """The first pass keeps the graph: the program as it is written, where nothing has changed."""
    if e.changed or e.stale or e.stepped or e.others or not (e.added or e.freed_by.name == "autograd.grad"):
        return None
    return f"pass retain_graph=True at {at(e.freed_by.stack[0])}: nothing that the graph needs has changed."


def multi(e: Evidence) -> str | None:
    if summed(e) is None or e.together is None:
        return None
    first, second = (_passes.loss_of(line) for line in e.together)
    return f"each loss's own gradients, one by one: hodiff.multi_grad([{first}, {second}], parameters)."


def first_detached(e: Evidence) -> str | None:
    """The first loss needs no gradient through the part: those that it gave were thrown away, others were used."""
    others = [leaf for leaf in e.stepped if id(leaf) not in set(map(id, e.below))]
    if not others or not e.discarded or not e.first.variable or e.stale:
        return None
    line = _use(e)
    if line is None:
        return None
    return (
        f"give the loss that {at(e.freed_by.stack[0])} differentiates {e.first.variable}.detach(), at\n"
        f"{at(line)}: that pass was for {e.names(others)};\n"
        f"what it gave {e.names(e.below)} was thrown away unused."
    )


def _use(e: Evidence) -> Line | None:
    """The line between the making of the part and the first pass that reads it, if it is one."""
    line = e.line_in(e.freed_by, e.first.code)
    if line is None or e.first.created is None:
        return None
    name = _written.base(e.first.variable)
    made = max(_variables.assignments(name, line), default=0)
    uses = [
        Line(line.file, node.lineno)
        for node in _source.statements(line)
        if made < node.lineno <= line.number and name in _variables.loaded(Line(line.file, node.lineno))
    ]
    return uses[0] if len(uses) == 1 else None


def by_hand(e: Evidence) -> str | None:
    """A gradient that was taken before the loss: hodiff's frees nothing."""
    if e.freed_by.name != "autograd.grad" or e.changed:
        return None
    target = _passes.target_of(e.freed_by.stack[0])
    if not target:
        return None
    return (
        f"take that gradient with hodiff.grad({target}, ...), which frees nothing; "
        "with create_graph=True, if it enters the loss."
    )


def whose(e: Evidence) -> str | None:
    """Two optimizers: whether the pass that is for the one's leaves is to give the other's a gradient as well."""
    if not e.others or e.changed or e.stepped or first_detached(e) is not None:
        return None
    mine, given = e.others
    return (
        f"whether the pass at {at(given.stack[0])} is to give a gradient to {e.names(e.below)}:\n"
        f"another optimizer has those than {e.names(mine)}, which it reaches besides.\n"
        f"If not, compute that loss from {e.detached}. If so, keep the graph: retain_graph=True at\n"
        f"{at(e.freed_by.stack[0])}, or one pass for the sum of both losses."
    )


def from_new_values(e: Evidence) -> str | None:
    """The second loss leads to nothing but the part, some of whose leaves have changed: detached, it has no graph."""
    if e.reached or not any(e.moved(leaf) for leaf in e.below):
        return None
    return f"compute {_both(e)} again before {at(e.call.stack[0])}, from the new values."


def _second(e: Evidence) -> str:
    return e.case.names.nodes.get(e.case.roots[0], "") or _passes.target_of(e.call.stack[0]) or "the second loss"


def _both(e: Evidence) -> str:
    """The part and the second loss, which are one variable where a sum goes on after its pass."""
    return e.all_code if _second(e) in e.variables else f"{e.all_code} and `{_second(e)}`"


def computed_again(e: Evidence) -> str | None:
    """After a step of an optimizer the loss is one of other values: it is computed from them."""
    if not e.stepped and not e.changed:
        return None
    if first_detached(e) is not None or from_new_values(e) is not None:
        return None
    what = _second(e)
    moved = any(e.moved(leaf) for leaf in e.below)
    if what in e.variables:
        why = f":\n{_changer(e)} has changed what it was computed from." if moved else "."
        return (
            f"whether what {e.all_code} was at {at(e.freed_by.stack[0])} is to count once more, at\n"
            f"{at(e.call.stack[0])}. If not, begin {e.all_code} anew between them. If so, compute all of it again{why}"
        )
    if moved:
        return (
            f"whether the pass at {at(e.call.stack[0])} is to reach {e.names(e.below)}, which\n"
            f"{_changer(e)} has changed since {e.all_code} was computed. If so, compute {_both(e)}\n"
            f"again before it. If not, compute `{what}` from {e.detached}."
        )
    return (
        f"whether the pass at {at(e.freed_by.stack[0])} is to give a gradient to {e.names(e.below)}.\n"
        f"If not, compute that loss from {e.detached}. If so, compute {_both(e)}\n"
        f"again before {at(e.call.stack[0])}."
    )


def _changer(e: Evidence) -> str:
    change = next((found for leaf in e.below if (found := e.record.changed(leaf)) is not None), None)
    return at(change.line) if change is not None else "something"


def together_unknown(e: Evidence) -> str | None:
    if e.stepped or e.changed or e.others or summed(e) or kept_for_second(e):
        return None
    return (
        f"what became of the gradients that {at(e.freed_by.stack[0])} gave: they were read or reset\n"
        f"before this pass. Compute {e.code} again for the second loss, or take each loss's own gradients with\n"
        "hodiff.multi_grad, which frees nothing."
    )


# --- the same loss ----------------------------------------------------------------------------------------------------


def loss_again(e: Evidence) -> str | None:
    name = e.first.variable or "the loss"
    shown = f"`{name}`" if e.first.variable else name
    return f"compute {shown} again, from the forward pass on, before the second call.{e.because}"


def same_unknown(e: Evidence) -> str | None:
    if e.changed or e.stale or e.call.path == e.freed_by.path:
        return None
    return (
        f"whether the same gradient is wanted twice. If so, pass retain_graph=True at {at(e.freed_by.stack[0])};\n"
        "if not, leave the second call out."
    )
