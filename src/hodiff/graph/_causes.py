"""Why a pass meets a part of the graph that was freed: one `Cause` for each case, with the fixes that evidence allows.

A fix is a function of evidence: it gives words only where the record shows that, done as they say, the program
differentiates what it was written to differentiate. What the record cannot show (which gradients are wanted) is
said as not known, with what follows from either answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hodiff.graph import _names, _saved, _source
from hodiff.graph._evidence import PARAMETRIZED, Evidence, Part
from hodiff.graph._source import Line

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


def _at(line: Line | None) -> str:
    return f"{line} ({line.text})" if line is not None else "the failing call"


# --- state of an earlier step -----------------------------------------------------------------------------------------


def _detached_after(e: Evidence) -> str | None:
    """Cut the state right behind the pass that freed its graph: what comes later cannot need that graph."""
    if e.silenced:
        return None
    found: dict[str, Line] = {}
    for part in e.parts:
        line, text = e.line_in(e.last_pass, part.code), _detaching(e, part.variable)
        if line is None or text is None:
            return None
        found[text] = line
    return "\n".join([f"after {_at(next(iter(found.values())))}, write", *(f"    {text}" for text in found)])


def _detaching(e: Evidence, path: str) -> str | None:
    """The statement that cuts what a variable holds; None if it cannot be written."""
    if not path or "(" in path:
        return None
    if not path.endswith("]") and "." not in path:
        return f"{path} = {path}.detach()"
    holder, _, last = path.rpartition("[") if path.endswith("]") else path.rpartition(".")
    value = _value(e, holder)
    if isinstance(value, (list, dict)):  # the next step may use another entry
        entries = list(value.values()) if isinstance(value, dict) else value
        if not all(isinstance(item, Tensor) and not (item.is_leaf and item.requires_grad) for item in entries):
            return None
        if isinstance(value, dict):
            return f"{holder}.update({{key: value.detach() for key, value in {holder}.items()}})"
        return f"{holder}[:] = [value.detach() for value in {holder}]"
    if isinstance(value, tuple):
        if not all(isinstance(item, Tensor) for item in value) or "[" in holder:
            return None
        make = f"type({holder})(*({{}}))" if hasattr(value, "_fields") else "tuple({})"
        return f"{holder} = {make.format(f't.detach() for t in {holder}')}"
    if value is None or (isinstance(value, nn.Module) and last in dict(value.named_parameters(recurse=False))):
        return None
    return f"{path} = {path}.detach()"


def _value(e: Evidence, path: str) -> Any:
    """What a path leads to; None if nothing."""
    try:
        return eval(path, {"__builtins__": {}}, dict(e.case.names.values))  # a path of ours, through variables alone
    except Exception:
        return None


def _unrolled(e: Evidence) -> str | None:
    if e.changed or e.stale or not e.call.name.endswith("backward"):
        return None
    return "to differentiate through several steps, add their losses up and call backward() once, after them."


def _silences(e: Evidence) -> str | None:
    if not e.silenced:
        return None
    return (
        f"where the gradient of {e.names(e.silenced)} is to end: this step reaches it through {e.code}\n"
        f"alone, and with {e.code} detached it would get none. If each step is to begin anew, set {e.code} again\n"
        "before it, from what it began with; if steps belong together, add their losses up and call backward() once."
    )


def _unwritten(e: Evidence) -> str | None:
    if e.silenced or _detached_after(e) is not None:
        return None
    return (
        f"how {e.code} is written where the step ends. It is to be cut (.detach()) after "
        f"{_at(e.freed_by.stack[0])},\nbefore the next step reads it; "
        "not within a step, where it would cut this step's gradients as well."
    )


# --- what earlier steps stored ----------------------------------------------------------------------------------------


def _cut_states(e: Evidence) -> str | None:
    """A container whose entries enter the next call, as an RNN's do: they reach the loss through parameters again."""
    if e.silenced or not _enters_call(e):
        return None
    return _detached_after(e)


def _enters_call(e: Evidence) -> bool:
    """Whether the old value is an input of operations with parameters: state, not a term of the loss."""
    reached = set(map(id, e.reached))
    stop = {part.node for part in e.parts}
    for node in e.nodes:
        if any(child in stop for child in _saved.children(node)):
            others = [child for child in _saved.children(node) if child not in stop]
            if any(id(leaf) in reached for child in others if (leaf := _saved.leaf(child)) is not None):
                return True
    return False


def _stored(e: Evidence) -> str | None:
    if _cut_states(e) is not None:
        return None
    base = _source.base(e.first.variable)
    return (
        f"whether what earlier steps put into `{base}` is to count again. If it is, keep what it was computed from,\n"
        f"and compute it again in each step. If it is a record only, put {_one(e)}.detach() into `{base}`\n"
        f"({e.first.created}): it then gives no gradient in later steps."
    )


def _one(e: Evidence) -> str:
    names = _source.given_by(e.first.created) if e.first.created is not None else []
    return names[0] if len(names) == 1 and names[0].isidentifier() else "value"


# --- made once, used by many ------------------------------------------------------------------------------------------


def _wanted(e: Evidence) -> bool:
    """Whether a gradient through the part is wanted for certain: some leaf that this loop trains has no other."""
    if not e.reached:
        return True
    return bool(e.silenced) and (not e.changed or all(e.moved(leaf) and e.was_reached(leaf) for leaf in e.silenced))


def _move_inside(e: Evidence) -> str | None:
    line = e.first.created
    if not _wanted(e) or line is None or not e.first.path:
        return None
    loop = _loop_around(e)
    if loop is None or not _reads_the_same(e, line, loop):
        return None
    where = f"into {loop.name}()" if hasattr(loop, "name") else "into the loop"
    return f"move {_at(line)} {where}: {e.code} is then computed again for each pass.{_because(e)}"


def _loop_around(e: Evidence) -> Any:
    """The loop around the failing call in the function that made the part; or the function that is called in rounds."""
    if e.first.path[0] not in e.call.path[::2]:
        return None
    pairs = list(zip(e.call.path[::2], _source.lines_of(e.call.path), strict=True))
    index = e.call.path[::2].index(e.first.path[0])
    for loop in _source.loops(pairs[index][1]):
        if not _holds(loop, e.first.created):
            return loop
    return _source.function_at(pairs[index - 1][1]) if index and e.rounds else None


def _holds(loop: Any, line: Line | None) -> bool:
    return line is not None and _source.within(loop, line.number)


def _reads_the_same(e: Evidence, line: Line, loop: Any) -> bool:
    """Whether the line, moved, would read what it read: nothing that the loop assigns, nothing with a state."""
    leaves = set(map(id, e.below))
    for name in _source.loaded(line):
        value = e.case.names.values.get(name)
        if _source.rebound_in(loop, name) or not _is_steady(value):
            return False
        if isinstance(value, Tensor) and id(value) not in leaves and (value.requires_grad or _has_changed(e, value)):
            return False  # a value with a graph of its own would be the next to be met again
    return True


def _has_changed(e: Evidence, value: Tensor) -> bool:
    change = e.record.changed(value)
    return change is not None and change.passes > e.freed_by.number


def _is_steady(value: Any) -> bool:
    """Whether a value gives the same whenever it is used, but for parameters."""
    if isinstance(value, nn.Module):
        plain = not _saved.has_hooks(value) and not list(value.buffers())
        inner = all(_is_steady(child) for child in value.children())
        own = [item for name, item in vars(value).items() if name not in _names.HIDDEN]
        return plain and inner and not any(isinstance(item, (Tensor, dict, list)) for item in own)
    if isinstance(value, (list, dict, set)):
        return False
    if isinstance(value, tuple):
        return all(_is_steady(item) for item in value)
    code = getattr(value, "__code__", None)
    if code is not None and _names.is_users(code):  # what a function of the user's reads cannot be seen here
        return not code.co_freevars and not any(
            isinstance(value.__globals__.get(name), (list, dict, set)) for name in code.co_names
        )
    return True


def _because(e: Evidence) -> str:
    if not e.changed:
        return ""
    return f"\n({e.names(e.changed)} changed since: a retained graph would be of the old values)"


def _each_time(e: Evidence) -> str | None:
    """An attribute made from leaves alone: whoever reads it can make it."""
    line = e.first.created
    if not _wanted(e) or line is None or "." not in e.first.variable or not _from_leaves(e, line):
        return None
    return f"compute {e.code} again in each step, where it is read, as at {_at(line)}.{_because(e)}"


def _from_leaves(e: Evidence, line: Line) -> bool:
    """Whether the line that made an attribute reads nothing but leaves below it, numbers, and PyTorch's functions."""
    leaves = set(map(id, e.below))
    owner = _value(e, e.first.variable.rpartition(".")[0])
    for chain in _source.chains(line):
        head, *steps = chain.split(".")
        value: Any = owner if head == "self" else e.case.names.values.get(head)
        for step in steps:
            if isinstance(value, ModuleType) or id(value) in leaves:
                break
            value = getattr(value, step, None)
        known = isinstance(value, (ModuleType, int, float, str)) or id(value) in leaves
        if not known and not (isinstance(value, nn.Module) and _is_steady(value)):
            return False
    return True


def _retained(e: Evidence) -> str | None:
    """Sound where nothing that the graph was computed from has changed."""
    if not _wanted(e) or e.changed or e.stale or e.inside:
        return None
    return f"pass retain_graph=True at {_at(e.freed_by.stack[0])}: nothing that {e.code} was computed from has changed."


def _made_again(e: Evidence) -> str | None:
    """What is left open where a value was computed once."""
    if _wanted(e):
        if _move_inside(e) is not None or _each_time(e) is not None:
            return None
        return (
            f"what {e.code} reads when it is computed: something there may change from step to step.\n"
            f"It is to be computed again for each pass (made at {_at(e.first.created)}), "
            f"from what it was computed from then.{_because(e)}"
        )
    return (
        f"whether the loss is to send a gradient through {e.code}. If not (a target, a baseline, an old policy),\n"
        f"make it a constant where it is made, with .detach(): {e.names(e.below)} then get none through it.\n"
        f"If so, compute it again for each pass, from what it was computed from.{_because(e)}"
    )


# --- kept by an object ------------------------------------------------------------------------------------------------


def _cleared(e: Evidence) -> str | None:
    """Empty the cache behind the pass: the guard fills it again."""
    if not e.first.kept or any(part.variable == "" for part in e.parts):
        return None
    found: dict[str, Line] = {}
    for part in e.parts:
        line, text = e.line_in(e.last_pass, part.code), _clearing(e, part)
        if line is None or text is None:
            return None
        found[text] = line
    return "\n".join(
        [
            f"after {_at(next(iter(found.values())))}, empty the cache, so that the next step fills it:",
            *(f"    {text}" for text in found),
        ]
    )


def _clearing(e: Evidence, part: Part) -> str | None:
    file = part.path[0].co_filename if part.path else ""
    if part.variable.endswith("]"):
        holder, _, key = part.variable[:-1].rpartition("[")
        if isinstance(_value(e, holder), dict):
            return f"{holder}.pop({key})"
        return None
    guard = _source.guarded(part.variable, file) if file else ""
    return {"is None": f"{part.variable} = None", "hasattr": f"del {part.variable}"}.get(guard)


def _object_again(e: Evidence) -> str | None:
    """An object of a library that computes a value once, and keeps it."""
    name = e.first.variable.split(".")[0]
    if "." not in e.first.variable or _cleared(e) is not None or not name.isidentifier():
        return None
    kind = type(e.case.names.values.get(name))
    if not kind.__module__.startswith("torch.distributions"):
        return None
    return f"make the object `{name}` again for each pass, before it is used: it keeps what it computes."


def _parametrized(e: Evidence) -> str | None:
    if e.first.variable != PARAMETRIZED:
        return None
    return "open `with parametrize.cached():` inside the loop, around one step: what it keeps is good for one pass."


def _cache(e: Evidence) -> str | None:
    if any(fix(e) is not None for fix in (_cleared, _object_again, _parametrized)):
        return None
    return (
        f"how {e.code} is emptied. It is to be computed anew in each step (made at {_at(e.first.created)});\n"
        f"detached, it would give {e.names(e.below)} no gradient through it."
    )


# --- two losses -------------------------------------------------------------------------------------------------------


def _summed(e: Evidence) -> str | None:
    """One pass for the sum: the same gradients, where those of the first still lie in `.grad`."""
    if e.together is None or not e.added or e.changed:
        return None
    first, second = (_source.loss_of(line) for line in e.together)
    if not first or not second or first == second:
        return None
    return f"one pass for both, at {e.together[1]}: ({first} + {second}).backward(), and none at {e.together[0]}."


def _kept_for_second(e: Evidence) -> str | None:
    """The first pass keeps the graph: the program as it is written, where nothing has changed."""
    if e.changed or e.stale or e.stepped or not (e.added or e.freed_by.name == "autograd.grad"):
        return None
    return f"pass retain_graph=True at {_at(e.freed_by.stack[0])}: nothing that the graph needs has changed."


def _multi(e: Evidence) -> str | None:
    if _summed(e) is None or e.together is None:
        return None
    first, second = (_source.loss_of(line) for line in e.together)
    return f"each loss's own gradients, one by one: hodiff.multi_grad([{first}, {second}], parameters)."


def _first_detached(e: Evidence) -> str | None:
    """The first loss needs no gradient through the part: those that it gave were thrown away, others were used."""
    others = [leaf for leaf in e.stepped if id(leaf) not in set(map(id, e.below))]
    if not others or not e.discarded or not e.first.variable or e.stale:
        return None
    line = _use(e)
    if line is None:
        return None
    return (
        f"give the loss that {_at(e.freed_by.stack[0])} differentiates {e.first.variable}.detach(), at {line}\n"
        f"({line.text}): that pass was for {e.names(others)};\n"
        f"what it gave {e.names(e.below)} was thrown away unused."
    )


def _use(e: Evidence) -> Line | None:
    """The line between the making of the part and the first pass that reads it, if it is one."""
    line = e.line_in(e.freed_by, e.first.code)
    if line is None or e.first.created is None:
        return None
    name = _source.base(e.first.variable)
    made = max(_source.assignments(name, line), default=0)
    uses = [
        Line(line.file, node.lineno)
        for node in _source.statements(line)
        if made < node.lineno <= line.number and name in _source.loaded(Line(line.file, node.lineno))
    ]
    return uses[0] if len(uses) == 1 else None


def _by_hand(e: Evidence) -> str | None:
    """A gradient that was taken before the loss: hodiff's frees nothing."""
    if e.freed_by.name != "autograd.grad" or e.changed:
        return None
    target = _source.target_of(e.freed_by.stack[0])
    if not target:
        return None
    return (
        f"take that gradient with hodiff.grad({target}, ...), which frees nothing; "
        "with create_graph=True, if it enters the loss."
    )


def _computed_again(e: Evidence) -> str | None:
    """After a step of an optimizer the loss is one of other values: it is computed from them."""
    if not e.stepped and not e.changed:
        return None
    if _first_detached(e) is not None:
        return None
    what = e.case.names.nodes.get(e.case.roots[0], "") or _source.target_of(e.call.stack[0]) or "the second loss"
    if any(e.moved(leaf) for leaf in e.below):
        return (
            f"whether the pass at {_at(e.call.stack[0])} is to reach {e.names(e.below)}, which\n"
            f"{_changer(e)} has changed since {e.code} was computed. If so, compute {e.code} and `{what}`\n"
            f"again before it. If not, compute `{what}` from {e.first.variable or 'it'}.detach()."
        )
    return (
        f"whether the pass at {_at(e.freed_by.stack[0])} is to give a gradient to {e.names(e.below)}.\n"
        f"If not, compute that loss from {e.first.variable or 'it'}.detach(). If so, compute {e.code} and `{what}`\n"
        f"again before {_at(e.call.stack[0])}."
    )


def _changer(e: Evidence) -> str:
    change = next((found for leaf in e.below if (found := e.record.changed(leaf)) is not None), None)
    return _at(change.line) if change is not None else "something"


def _together_unknown(e: Evidence) -> str | None:
    if e.stepped or e.changed or _summed(e) or _kept_for_second(e):
        return None
    return (
        f"what became of the gradients that {_at(e.freed_by.stack[0])} gave: they were read or reset\n"
        f"before this pass. Compute {e.code} again for the second loss, or take each loss's own gradients with\n"
        "hodiff.multi_grad, which frees nothing."
    )


# --- the same loss ----------------------------------------------------------------------------------------------------


def _loss_again(e: Evidence) -> str | None:
    name = e.first.variable or "the loss"
    shown = f"`{name}`" if e.first.variable else name
    return f"compute {shown} again, from the forward pass on, before the second call.{_because(e)}"


def _same_unknown(e: Evidence) -> str | None:
    if e.changed or e.stale or e.call.path == e.freed_by.path:
        return None
    return (
        f"whether the same gradient is wanted twice. If so, pass retain_graph=True at {_at(e.freed_by.stack[0])};\n"
        "if not, leave the second call out."
    )


CAUSES = (
    Cause(
        "same loss twice",
        lambda e: e.first.node in e.case.roots,
        lambda e: "the same loss is differentiated twice, and the first pass freed what it needs.",
        (_loss_again,),
        (_same_unknown,),
    ),
    Cause(
        "cached",
        lambda e: e.first.variable == PARAMETRIZED,
        lambda e: "the context keeps the computed parameters, and every pass needs their graph again.",
        (_parametrized,),
    ),
    Cause(
        "carried",
        lambda e: e.first.replaced or (not e.first.kept and e.first.again),
        lambda e: "it is state from a previous step, whose pass freed its graph; this step differentiates into it.",
        (_detached_after, _unrolled),
        (_silences, _unwritten),
    ),
    Cause(
        "stored",
        lambda e: e.first.kept and e.first.again and e.first.variable.endswith("]"),
        lambda e: (
            f"an earlier step put it into `{_source.base(e.first.variable)}`, and its pass freed its graph; "
            "this step differentiates into it."
        ),
        (_cut_states,),
        (_stored,),
    ),
    Cause(
        "two losses",
        lambda e: not e.rounds and e.call.path != e.freed_by.path,
        lambda e: "it belongs to both losses, and the pass of the first freed it.",
        (_first_detached, _by_hand, _summed, _multi, _kept_for_second),
        (_computed_again, _together_unknown),
    ),
    Cause(
        "cached",
        lambda e: e.first.kept and (e.inside or ("." in e.first.variable and not _in_init(e))),
        lambda e: "an object computed it once and keeps it; every pass through the object needs it again.",
        (_cleared, _object_again),
        (_cache,),
    ),
    Cause(
        "hoisted",
        lambda e: True,
        lambda e: "it was built once, outside the loop, and every iteration differentiates through it again.",
        (_move_inside, _each_time, _retained),
        (_made_again,),
    ),
)


def _in_init(e: Evidence) -> bool:
    return bool(e.first.path) and e.first.path[0].co_name in ("__init__", "<module>")
