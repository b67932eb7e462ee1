"""What was made once and is used by many passes: computed before the loop, or kept by an object."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hodiff.graph import _changes, _names, _source, _traits, _variables, _written
from hodiff.graph._evidence import Evidence, Part
from hodiff.graph._line import Line, at, lines_of


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
    if not _variables.reads(loop, _written.base(e.first.variable)):
        return None  # what was moved would be another name than the one that is read there
    where = f"into {loop.name}()" if hasattr(loop, "name") else "into the loop"
    return f"move {at(line)} {where}: {e.code} is then computed again for each pass.{e.because}"


def _loop_around(e: Evidence) -> Any:
    """The loop around the failing call in the function that made the part; or the function that is called in rounds."""
    if e.first.path[0] not in e.call.path[::2]:
        return None
    pairs = list(zip(e.call.path[::2], lines_of(e.call.path), strict=True))
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
    for name in _variables.loaded(line):
        value = e.case.names.values.get(name)
        if _variables.rebound_in(loop, name) or not _is_steady(value):
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
        plain = not _traits.has_hooks(value) and not list(value.buffers())
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
    found: list[str] = []
    for part in e.parts:
        line = part.created
        if line is None or "." not in part.variable or not _from_leaves(e, part.variable, line):
            return None
        when = " again in each step, where it is read" if not found else ""
        found.append(f"`{part.variable}`{when}, as at {at(line)}")
    return "compute " + ";\nand ".join(found) + f".{e.because}"


def _from_leaves(e: Evidence, name: str, line: Line) -> bool:
    """Whether the line that made an attribute reads nothing but leaves below it, numbers, and PyTorch's functions."""
    leaves = set(map(id, e.below))
    owner = e.value(name.rpartition(".")[0])
    for chain in _variables.chains(line):
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
                f"how {getattr(loop, 'name', 'the loop')}() is to get {e.all_code} anew for each pass: it reads it\n"
                f"by another name. Give it what makes the value (a function, or what {at(line)} reads), "
                f"and compute it there.{e.because}"
            )
        return (
            f"what {e.code} reads when it is computed: something there may change from step to step.\n"
            f"It is to be computed again for each pass{_made(e)}, "
            f"from what it was computed from then.{e.because}"
        )
    return (
        f"whether the loss is to send a gradient through {e.all_code}. If not (a target, a baseline, an old policy),\n"
        f"make {'it a constant' if len(e.variables) < 2 else 'each a constant'} where it is made, with .detach():\n"
        f"{e.names(e.below)} then get none through it.\n"
        f"If so, compute it again for each pass, from what it was computed from.{e.because}"
    )


def _made(e: Evidence) -> str:
    """Where the part was made, if that was seen: it was not, if it is from before the watch."""
    return "" if e.first.created is None else f" (made at {at(e.first.created)})"


# --- kept by an object ------------------------------------------------------------------------------------------------


def cleared(e: Evidence) -> str | None:
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
            f"after {at(next(iter(found.values())))}, empty the cache, so that the next step fills it:",
            *(f"    {text}" for text in found),
        ]
    )


def _clearing(e: Evidence, part: Part) -> str | None:
    file = part.path[0].co_filename if part.path else ""
    if part.variable.endswith("]"):
        holder, _, key = part.variable[:-1].rpartition("[")
        entries = e.value(holder)
        if not isinstance(entries, dict):
            return None
        if not _changes.refilled(holder, file):
            return None
        if key[:1] in "'\"":
            return f"{holder}.pop({key})"
        made = all(isinstance(entry, Tensor) and entry.grad_fn is not None for entry in entries.values())
        return f"{holder}.clear()" if made else None  # a number may be another in the next run: an id(), say
    guard = _changes.guarded(part.variable, file) if file and _fills(part) else ""
    return {"is None": f"{part.variable} = None", "hasattr": f"del {part.variable}"}.get(guard)


def _fills(part: Part) -> bool:
    """Whether an attribute was filled by a function that was running when its value was made: that makes it again."""
    codes = part.path[::2]
    return any(code.co_name in _variables.assigned_in(part.variable, code.co_filename) for code in codes)


def is_remembered(e: Evidence) -> bool:
    """Whether an attribute was given what was made elsewhere, and is since made again there, but not given anew."""
    part = e.first
    if not part.kept or not part.again or "." not in part.variable or part.variable.endswith("]") or _fills(part):
        return False
    files = {code.co_filename for code in (*part.path[::2], *e.call.path[::2])}
    return any(_variables.assigned_in(part.variable, file) for file in files)  # else a library keeps it


def is_lazy(e: Evidence) -> bool:
    """Whether the source asks if the part was computed before: a cache, and no value that was put there once."""
    file, name = e.first.path[0].co_filename if e.first.path else "", e.first.variable
    holder = name[:-1].rpartition("[")[0] if name.endswith("]") else name
    return bool(file) and bool(_changes.guarded(holder, file) or _changes.refilled(holder, file))


def object_again(e: Evidence) -> str | None:
    """An object of a library that computes a value once, and keeps it."""
    name = e.first.variable.split(".")[0]
    if "." not in e.first.variable or cleared(e) is not None or not name.isidentifier():
        return None
    kind = type(e.case.names.values.get(name))
    if not kind.__module__.startswith("torch.distributions"):
        return None
    return f"make the object `{name}` again for each pass, before it is used: it keeps what it computes."


def memo_cleared(e: Evidence) -> str | None:
    """The function's own way to forget."""
    line = e.last_pass.stack[0] if e.last_pass.path else None
    return f"after {at(line)}, forget it, so that the next step computes it:\n    {e.memo}.cache_clear()"


def parametrized(e: Evidence) -> str:
    return "open `with parametrize.cached():` inside the loop, around one step: what it keeps is good for one pass."


def cache(e: Evidence) -> str | None:
    if cleared(e) is not None or object_again(e) is not None:
        return None
    return (
        f"how {e.code} is emptied. It is to be computed anew in each step{_made(e)};\n"
        f"detached, it would give {e.names(e.below)} no gradient through it."
    )
