"""Why a pass meets a part of the graph that was freed: one `FailureCause` for each case, with its fixes.

A fix is a function of evidence: it gives words only where the record shows that, done as they say,
the program differentiates what it was written to differentiate. What the record cannot show (which
gradients are wanted) is said as not known, with what follows from either answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hodiff.graph import _names, _saved, _source
from hodiff.graph._case import PARAMETRIZED, Evidence, FailureCause, SharedValue
from hodiff.graph._source import Line, at, outside

# --- two losses that share a part of their graphs, one that is differentiated twice ---------------


def summed(e: Evidence) -> str | None:
    """One pass for the sum: the same gradients, where those of the first still lie in `.grad`."""
    if e.pass_lines is None or not e.added or e.changed or e.others:
        return None
    first, second = map(_source.loss_of, e.pass_lines)
    if not first or not second or first == second:
        return None
    return (
        f"run one pass for both at {e.pass_lines[1]}: ({first} + {second}).backward(), and none at {e.pass_lines[0]}."
    )


def kept_for_second(e: Evidence) -> str | None:
    """The first pass keeps the graph: the program as it is written, where nothing has changed."""
    if e.changed or e.stale or e.stepped or e.others or not (e.added or e.freed_by.name == "autograd.grad"):
        return None
    return f"pass retain_graph=True at {at(e.freed_by.stack[0])}: nothing that the graph needs has changed."


def multi(e: Evidence) -> str | None:
    if summed(e) is None or e.pass_lines is None:
        return None
    first, second = map(_source.loss_of, e.pass_lines)
    return f"for each loss's own gradients: hodiff.multi_grad([{first}, {second}], parameters)."


def first_detached(e: Evidence) -> str | None:
    """The first loss needs no gradient through the part: those that it gave were thrown away, others were used."""
    others = [leaf for leaf in e.stepped if id(leaf) not in set(map(id, e.below))]
    if not others or not e.discarded or not e.first.variable or e.stale:
        return None
    line = _use(e)
    if line is None:
        return None
    return (
        f"compute the loss that {at(e.freed_by.stack[0])} differentiates from {e.first.variable}.detach(), at\n"
        f"{at(line)}: that pass trains {e.names(others)};\n"
        f"the gradients that it gave {e.names(e.below)} were discarded unused."
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


def by_hand(e: Evidence) -> str | None:
    """A gradient that was taken before the loss: hodiff's frees nothing."""
    if e.freed_by.name != "autograd.grad" or e.changed:
        return None
    target = _source.target_of(e.freed_by.stack[0])
    if not target:
        return None
    return (
        f"take that gradient with hodiff.grad({target}, ...), which frees nothing; "
        "pass create_graph=True if it enters the loss."
    )


def whose(e: Evidence) -> str | None:
    """Two optimizers: whether the pass that is for the one's leaves is to give the other's a gradient as well."""
    if not e.others or e.changed or e.stepped or first_detached(e) is not None:
        return None
    mine, given = e.others
    return (
        f"should the pass at {at(given.stack[0])} also give a gradient to {e.names(e.below)}?\n"
        f"Those belong to another optimizer than {e.names(mine)}.\n"
        f"If not, compute that loss from {e.detached}. If so, keep the graph with retain_graph=True at\n"
        f"{at(e.freed_by.stack[0])}, or run one pass for the sum of both losses."
    )


def from_new_values(e: Evidence) -> str | None:
    """An optimizer has changed leaves below the part: the second loss is computed once more.

    Where others of its leaves are another optimizer's, from there on. Where the loss leads to nothing
    but the part, which detached would leave it no graph, from the new values.
    """
    if not any(map(e.moved, e.below)):
        return None
    border = _behind_moved(e) if e.case.names.trained and e.border else None
    if border is not None or e.reached:
        return border
    return f"compute {_both(e)} again before {at(e.call.stack[0])}, from the new values."


def _behind_moved(e: Evidence) -> str | None:
    moved = [leaf for leaf in e.below if e.moved(leaf)]
    stay = [leaf for leaf in e.below if not e.moved(leaf)]
    lines = {line for node in e.border if (line := e.record.made(node)) is not None}
    kept = any(leaf.grad is not None and leaf.grad.any() for leaf in stay)
    if len(lines) != 1 or kept or not e.owned_apart(moved, stay):
        return None
    name = e.case.names.nodes.get(e.border[0], "") if len(e.border) == 1 else ""
    source = f"{name}.detach()" if name else f"what {e.names(moved)} gave at {at(*lines)}, detached"
    again = _both(e) if e.first.variable else f"`{e.case.loss('the second loss')}`"
    return (
        f"compute {again} again, from {source}: this pass trains {e.names(stay)}, and {_changer(e)} "
        f"has changed {e.names(moved)} since."
    )


def _both(e: Evidence) -> str:
    """The part and the second loss, which are one variable where a sum goes on after its pass."""
    loss = e.case.loss("the second loss")
    return e.all_code if loss in e.variables else f"{e.all_code} and `{loss}`"


def computed_again(e: Evidence) -> str | None:
    """After a step of an optimizer the loss is one of other values: it is computed from them."""
    if not e.stepped and not e.changed:
        return None
    if first_detached(e) is not None or from_new_values(e) is not None:
        return None
    what = e.case.loss("the second loss")
    moved = any(e.moved(leaf) for leaf in e.below)
    if what in e.variables:
        why = f":\n{_changer(e)} has changed what it was computed from." if moved else "."
        return (
            f"should what {e.all_code} was at {at(e.freed_by.stack[0])} count again, at\n"
            f"{at(e.call.stack[0])}? If not, reset {e.all_code} between the two. If so, compute all of it again{why}"
        )
    if moved:
        changed = [leaf for leaf in e.below if e.moved(leaf)]
        return (
            f"should the pass at {at(e.call.stack[0])} reach {e.names(changed)}, which\n"
            f"{_changer(e)} has changed since {e.all_code} was computed? If so, compute {_both(e)}\n"
            f"again before it. If not, compute `{what}` from {e.detached}."
        )
    return (
        f"should the pass at {at(e.freed_by.stack[0])} give a gradient to {e.names(e.below)}?\n"
        f"If not, compute that loss from {e.detached}. If so, compute {_both(e)}\n"
        f"again before {at(e.call.stack[0])}."
    )


def _changer(e: Evidence) -> str:
    change = next((change_below for leaf in e.below if (change_below := e.record.changed(leaf)) is not None), None)
    return at(change.line) if change is not None else "something"


def together_unknown(e: Evidence) -> str | None:
    if e.stepped or e.changed or e.others or summed(e) or kept_for_second(e):
        return None
    return (
        f"how the program used the gradients of {at(e.freed_by.stack[0])}: it read or reset them\n"
        f"before this pass. Compute {e.code} again for the second loss, or take each loss's own gradients with\n"
        "hodiff.multi_grad, which frees nothing."
    )


# --- the same loss --------------------------------------------------------------------------------


def loss_again(e: Evidence) -> str | None:
    name = e.first.variable or "the loss"
    shown = f"`{name}`" if e.first.variable else name
    return f"compute {shown} again, from the forward pass on, before the second call.{e.because}"


def same_unknown(e: Evidence) -> str | None:
    if e.changed or e.stale or e.call.path == e.freed_by.path:
        return None
    target = _source.target_of(e.call.stack[0]) if e.call.name == "autograd.grad" else ""
    given = [name for name in _source.given_by(e.call.stack[0]) if name != target]
    leave = (
        f"remove the first call, provided that the program uses `{given[0]}` and no `.grad`"
        if given and e.freed_by.name.endswith("backward")
        else "remove the call whose gradient is not used"
    )
    return (
        f"do you want the same gradient twice? If so, pass retain_graph=True at {at(e.freed_by.stack[0])};\n"
        f"if not, {leave}."
    )


# --- what was made once and is used by many passes: computed before the loop, or kept by an object --------------------


def _wanted(e: Evidence) -> bool:
    """Whether a gradient through the part is wanted for certain: some leaf that this loop trains has no other."""
    if not e.reached:
        return True
    return bool(e.silenced) and (not e.changed or all(e.moved(leaf) and e.was_reached(leaf) for leaf in e.silenced))


def move_inside(e: Evidence) -> str | None:
    line = e.first.created
    if not _wanted(e) or line is None or not e.first.path:
        return None
    loop = _loop_around(e)
    if loop is None or not _reads_the_same(e, line, loop):
        return None
    if not _source.reads(loop, _source.base(e.first.variable)):
        return None  # what was moved would be another name than the one that is read there
    where = f"into {loop.name}()" if hasattr(loop, "name") else "into the loop"
    return f"move {at(line)} {where}: {e.code} is then computed again for each pass.{e.because}"


def _loop_around(e: Evidence) -> Any:
    """The loop around the failing call in the function that made the part; or the function that is called in rounds."""
    made = e.first.path[0]
    index = next((index for index, frame in enumerate(e.call.path) if frame.code == made.code), None)
    if index is None:
        return None
    for loop in _source.loops(e.call.path[index].line):
        if not _source.within(loop, made.number):
            return loop
    return _source.function_at(e.call.path[index - 1].line) if index and e.rounds else None


def _reads_the_same(e: Evidence, line: Line, loop: Any) -> bool:
    """Whether the line, moved, would read what it read: nothing that the loop assigns, nothing with a state."""
    leaves = set(map(id, e.below))
    for name in _source.loaded(line):
        value = e.case.names.values.get(name)
        if _source.rebound_in(loop, name) or not _is_steady(value):
            return False
        if isinstance(value, Tensor) and id(value) not in leaves and (value.requires_grad or e.changed_since(value)):
            return False  # a value with a graph of its own would be the next to be met again
    return True


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


def each_time(e: Evidence) -> str | None:
    """Attributes made from leaves alone: whoever reads them can make them."""
    if not _wanted(e):
        return None
    lines: list[str] = []
    for part in e.parts:
        line = part.created
        if line is None or "." not in part.variable or not _from_leaves(e, part.variable, line):
            return None
        when = " again in each step, where it is read" if not lines else ""
        lines.append(f"`{part.variable}`{when}, as at {at(line)}")
    return "compute " + ";\nand ".join(lines) + f".{e.because}"


def _from_leaves(e: Evidence, name: str, line: Line) -> bool:
    """Whether the line that made an attribute reads nothing but leaves below it, numbers, and PyTorch's functions."""
    leaves = set(map(id, e.below))
    owner = e.value(name.rpartition(".")[0])
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


def retained(e: Evidence) -> str | None:
    """Sound where nothing that the graph was computed from has changed."""
    if not _wanted(e) or e.changed or e.stale or e.inside:
        return None
    return f"pass retain_graph=True at {at(e.freed_by.stack[0])}: nothing that {e.code} was computed from has changed."


def made_again(e: Evidence) -> str | None:
    """What is left open where a value was computed once."""
    if _wanted(e):
        if move_inside(e) is not None or each_time(e) is not None:
            return None
        line = e.first.created
        loop = _loop_around(e) if line is not None and e.first.path else None
        if line is not None and loop is not None and _reads_the_same(e, line, loop):
            return (
                f"how {getattr(loop, 'name', 'the loop')}() should get a new {e.all_code} for each pass: it reads it\n"
                f"under another name. Pass it what makes the value (a function, or what {at(line)} reads), "
                f"and compute the value there.{e.because}"
            )
        return (
            f"what {e.code} is computed from: some of it may change from step to step.\n"
            f"Compute {e.code} again for each pass{_made(e)}, "
            f"from the same inputs.{e.because}"
        )
    return (
        f"should the loss send a gradient through {e.all_code}? If not (a target, a baseline, an old policy),\n"
        f"detach {'it' if len(e.variables) < 2 else 'each'} where it is made, with .detach():\n"
        f"{e.names(e.below)} then get no gradient through it.\n"
        f"If so, compute it again for each pass, from the same inputs.{e.because}"
    )


def _made(e: Evidence) -> str:
    """Where the part was made, if that was seen: it was not, if it is from before the watch."""
    return "" if e.first.created is None else f" (made at {at(e.first.created)})"


# --- kept by an object ----------------------------------------------------------------------------


def cleared(e: Evidence) -> str | None:
    """Empty the cache behind the pass: the guard fills it again."""
    if not e.first.kept or any(part.variable == "" for part in e.parts):
        return None
    behind = _behind_pass(e, lambda part: _clearing(e, part))
    return f"after {at(behind[0])}, empty the cache, so that the next step fills it:{behind[1]}" if behind else None


def _behind_pass(e: Evidence, write: Callable[[SharedValue], str | None]) -> tuple[Line, str] | None:
    """The line of the last pass, and statements to write behind it, one for each part; None if one cannot be."""
    lines = {write(part): e.line_in(e.last_pass, part.code) for part in e.parts}
    first = next(iter(lines.values()))
    if first is None or None in lines or None in lines.values():
        return None
    return first, "".join(f"\n    {text}" for text in lines)


def _clearing(e: Evidence, part: SharedValue) -> str | None:
    file = part.path[0].line.file if part.path else ""
    if part.variable.endswith("]"):
        holder, _, key = part.variable[:-1].rpartition("[")
        entries = e.value(holder)
        if not isinstance(entries, dict):
            return None
        if not _source.refilled(holder, file):
            return None
        if key[:1] in "'\"":
            return f"{holder}.pop({key})"
        made = all(isinstance(entry, Tensor) and entry.grad_fn is not None for entry in entries.values())
        return f"{holder}.clear()" if made else None  # a number may be another in the next run: an id(), say
    guard = _source.guarded(part.variable, file) if file and _fills(part) else ""
    return {"is None": f"{part.variable} = None", "hasattr": f"del {part.variable}"}.get(guard)


def _fills(part: SharedValue) -> bool:
    """Whether an attribute was filled by a function that was running when its value was made: that makes it again."""
    return any(code.co_name in _source.assigned_in(part.variable, code.co_filename) for code, _ in part.path)


def is_remembered(e: Evidence) -> bool:
    """Whether an attribute was given what was made elsewhere, and is since made again there, but not given anew."""
    part = e.first
    if not part.kept or not part.again or "." not in part.variable or part.variable.endswith("]") or _fills(part):
        return False
    files = {frame.line.file for frame in (*part.path, *e.call.path)}
    return any(_source.assigned_in(part.variable, file) for file in files)  # else a library keeps it


def is_lazy(e: Evidence) -> bool:
    """Whether the source asks if the part was computed before: a cache, and no value that was put there once."""
    name = e.first.variable
    holder = name[:-1].rpartition("[")[0] if name.endswith("]") else name
    if not e.first.path or e.first.path[0].code.co_name in ("__init__", "<module>"):
        return False
    file = e.first.path[0].line.file
    return bool(_source.guarded(holder, file) or _source.refilled(holder, file))


def object_again(e: Evidence) -> str | None:
    """An object of a library that computes a value once, and keeps it."""
    name = e.first.variable.split(".")[0]
    if "." not in e.first.variable or cleared(e) is not None or not name.isidentifier():
        return None
    kind = type(e.case.names.values.get(name))
    if not kind.__module__.startswith("torch.distributions"):
        return None
    return f"create the object `{name}` again for each pass, before it is used: it keeps what it computes."


def memo_cleared(e: Evidence) -> str | None:
    """The function's own way to forget."""
    line = e.last_pass.stack[0] if e.last_pass.path else None
    return f"after {at(line)}, clear the cache, so that the next step computes it:\n    {e.memo}.cache_clear()"


def cache(e: Evidence) -> str | None:
    if cleared(e) is not None or object_again(e) is not None:
        return None
    return (
        f"how to empty {e.code}. Compute it again in each step{_made(e)};\n"
        f"if it were detached, {e.names(e.below)} would get no gradient through it."
    )


# --- what earlier steps left: state that enters the next one, and values that a container stored ----------------------


def detached_after(e: Evidence) -> str | None:
    """Cut the state right behind the pass that freed its graph: what comes later cannot need that graph."""
    if e.silenced:
        return None
    behind = _behind_pass(e, lambda part: _detaching(e, part.variable))
    return f"after {at(behind[0])}, write{behind[1]}" if behind else None


def _detaching(e: Evidence, path: str) -> str | None:
    """The statement that cuts what a variable holds; None if it cannot be written."""
    if not path or "(" in path:
        return None
    if not path.endswith("]") and "." not in path:
        return f"{path} = {path}.detach()"
    holder, _, last = path.rpartition("[") if path.endswith("]") else path.rpartition(".")
    value = e.value(holder)
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


def unrolled(e: Evidence) -> str | None:
    if e.changed or e.stale or not e.call.name.endswith("backward"):
        return None
    return (
        "should a gradient flow through several steps? If so, add up their losses and call backward() once,\n"
        "after the last."
    )


def silences(e: Evidence) -> str | None:
    if not e.silenced:
        return None
    return (
        f"where the gradient of {e.names(e.silenced)} should end: this step reaches it only through {e.code},\n"
        f"and with {e.code} detached it would get none. If each step should start afresh, reset {e.code}\n"
        "before it, to its first value; if the steps belong together, add up their losses and call backward() once."
    )


def unwritten(e: Evidence) -> str | None:
    if e.silenced or detached_after(e) is not None:
        return None
    return (
        f"what {e.code} is called where the step ends. Detach it after "
        f"{at(e.freed_by.stack[0])},\nbefore the next step reads it; "
        "inside a step, .detach() would cut this step's gradients as well."
    )


# --- what earlier steps stored --------------------------------------------------------------------


def cut_states(e: Evidence) -> str | None:
    """A container whose entries enter the next call, as an RNN's do: they reach the loss through parameters again."""
    if e.silenced or not _enters_call(e):
        return None
    return detached_after(e)


def _enters_call(e: Evidence) -> bool:
    """Whether the old value is an input of operations with parameters: state, not a term of the loss."""
    reached = set(map(id, e.reached))
    stop = {part.node for part in e.parts}
    for node in e.case.nodes:
        if any(child in stop for child in _saved.children(node)):
            others = [child for child in _saved.children(node) if child not in stop]
            if any(id(leaf) in reached for child in others if (leaf := _saved.leaf(child)) is not None):
                return True
    return False


def container(e: Evidence) -> str:
    """What the value was put into: an object's own container, where the variable holds entries of that, as a batch."""
    base = _source.base(e.first.variable)
    entries = e.value(base)
    entry = next(iter(entries), None) if isinstance(entries, (list, tuple)) else None
    if entry is None or isinstance(entry, Tensor):
        return base
    for name, value in e.case.names.values.items():
        for attribute, each in getattr(value, "__dict__", {}).items():
            if isinstance(each, (list, deque)) and any(item is entry for item in each):
                return f"{name}.{attribute}"
    return base


def stored(e: Evidence) -> str | None:
    if cut_states(e) is not None:
        return None
    base = container(e)
    where = f" ({e.first.created})" if e.first.created is not None else ""
    return (
        f"should what earlier steps put into `{base}` count again? If not, empty `{base}`\n"
        f"after each step's last pass ({e.last_pass.stack[0]}). If so, store what it was computed from,\n"
        f"and compute it again in each step. If the entries are only read,\n"
        f"put {_one(e)}.detach() into `{base}`{where}: no gradient then flows through them."
    )


def within(e: Evidence) -> str | None:
    """Where the freed part of what was stored begins, if no pass ran what was stored itself: it can be cut there."""
    if cut_states(e) is not None or e.record.tags.tag(e.first.node) is not None:
        return None
    under = e.under
    ran = [node for node in under if e.record.tags.tag(node) is not None and _saved.leaf(node) is None]
    inner = {child for node in ran for child in under[node]}
    lines = dict.fromkeys(line for node in ran if node not in inner for line in outside(e.record.path(node)))
    if not lines:
        return None
    return (
        f"should a gradient flow on to what was computed at {', '.join(map(str, sorted(lines)[:SHOWN]))}, which\n"
        f"{at(e.freed_by.stack[0])} has differentiated already? If not (an advantage, a baseline),\n"
        "detach it where it enters, and leave the rest as it is."
    )


SHOWN = 4


def _one(e: Evidence) -> str:
    names = _source.given_by(e.first.created) if e.first.created is not None else []
    return names[0] if len(names) == 1 and names[0].isidentifier() else "value"


# --- the table ------------------------------------------------------------------------------------


def _at_once(e: Evidence) -> bool:
    """Whether both losses had been computed when the first was differentiated: no state entered a step in between."""
    return e.made_before and not e.rounds and e.call.path != e.freed_by.path


def _after_the_loop(e: Evidence) -> bool:
    """Whether the failing pass stands behind the loop whose steps freed the part: it is no step."""
    number, loops = e.call.stack[0].number, _source.loops(e.freed_by.stack[0])
    same = e.call.path[0].code is e.freed_by.path[0].code
    return same and any(not _source.within(loop, number) for loop in loops)


def _is_member(e: Evidence) -> bool:
    """Whether an object or a container holds the value: maybe for good, and not for the next step alone."""
    return e.first.kept and not e.first.variable.isidentifier()


CAUSES = (
    FailureCause(
        "same loss twice",
        "the same loss is differentiated twice, and the first pass freed its graph.",
        (loss_again,),
        (same_unknown,),
        lambda e: e.first.node in e.case.roots,
    ),
    FailureCause(
        "cached",
        "the context keeps the computed parameters, and every pass needs their graph again.",
        ("open `with parametrize.cached():` inside the loop, around one step: what it keeps is good for one pass.",),
        (),
        lambda e: e.first.variable == PARAMETRIZED,
    ),
    FailureCause(
        "cached",
        "functools keeps the function's first result, and every pass through it needs the same graph again.",
        (memo_cleared,),
        (),
        lambda e: bool(e.memo),
    ),
    FailureCause(
        "carried",
        lambda e: f"it is state from a previous step, whose pass {e.fate}; this step's pass runs through it again.",
        (detached_after,),
        (silences, unwritten, unrolled),
        lambda e: (
            (e.first.replaced or (e.first.again and not _is_member(e)) or is_remembered(e))
            and not (_at_once(e) or _after_the_loop(e))
        ),
    ),
    FailureCause(
        "stored",
        lambda e: (
            f"an earlier step put it into `{container(e)}`, and its pass {e.fate}; "
            "this step's pass runs through it again."
        ),
        (cut_states,),
        (within, stored),
        lambda e: e.first.kept and e.first.again and e.first.variable.endswith("]"),
    ),
    FailureCause(
        "two losses",
        "both losses depend on it, and the first one's pass freed it.",
        (first_detached, by_hand, summed, multi, kept_for_second, from_new_values),
        (whose, computed_again, together_unknown),
        lambda e: not e.rounds and e.call.path != e.freed_by.path,
    ),
    FailureCause(
        "cached",
        "an object computed it once and keeps it; every pass through the object needs it again.",
        (cleared, object_again),
        (cache,),
        lambda e: e.first.kept and (e.inside or ("." in e.first.variable and is_lazy(e))),
    ),
    FailureCause(
        "hoisted",
        "it was built once, outside the loop, and every iteration differentiates through it again.",
        (move_inside, each_time, retained),
        (made_again,),
    ),
)
SENTENCES = {
    **{rule.name: rule.sentence for rule in CAUSES if isinstance(rule.sentence, str)},
    "carried": "it is state from a previous step, whose pass freed its graph; this step's pass runs through it again.",
}
"""What is said of a cause that is inferred: a pass that freed its graph, and an object."""


def first_cause(evidence: Evidence) -> FailureCause:
    """The first cause that holds."""
    return next(cause for cause in CAUSES if cause.holds(evidence))
