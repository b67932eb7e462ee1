"""Which variable holds most of some graphs, as it is written, and the line that puts them there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _changes, _predict, _traits, _variables, _written
from hodiff.graph._line import Line, line_of, lines_of
from hodiff.graph._names import USERS, Names, root

if TYPE_CHECKING:
    from hodiff.graph._watch import Watch

ITEMS = 20
"""Values that a container must hold, or steps that a value must reach back, before graphs pile up."""


class Holder(NamedTuple):
    """A variable, the line that makes it hold more, how much of what was sought, and the bytes saved in that."""

    variable: str
    line: Line | None
    iterations: int
    bytes: int


def _groups(names: Names) -> dict[str, list[Tensor]]:
    """The tensors with a graph behind each variable: a tensor, and each container on the way to it."""
    found: dict[str, list[Tensor]] = {}
    for tensor in names.all_tensors():
        if tensor.grad_fn is not None:
            for path in names.paths[id(tensor)]:
                for place in [each.start() for each in re.finditer(r"\[", path)] + [len(path)]:
                    found.setdefault(path[:place], []).append(tensor)
    direct = Counter(path[: path.rindex("[")] for path in found if path.endswith("]"))
    few = [path for path in found if not path.endswith("]") or direct[path[: path.rindex("[")]] < ITEMS]
    return {path: found[path] for path in few}  # each of many states in a list may lead to all before it


def of(names: Names, record: Watch, tag: Callable[[Node], Any], wanted: Collection[Any]) -> Holder | None:
    """The variable behind which most of the tags in `wanted` lie; of several, the most exact."""
    counts: dict[str, int] = {}
    groups = _groups(names)
    for path, tensors in groups.items():
        nodes = _nodes.walk([tensor.grad_fn for tensor in tensors])
        counts[path] = len({id(found) for node in nodes if (found := tag(node)) in wanted})
    variable = max(counts, key=lambda path: (counts[path], -_written.steps(path)), default="")
    if not variable or not counts[variable]:
        return None
    for path, count in counts.items():  # `history["loss"]`, not `history`
        if path.startswith(variable) and count == counts[variable]:
            variable = path
    if _is_bounded(names, variable):
        return None
    nodes = _nodes.walk([tensor.grad_fn for tensor in groups[variable]])
    line = _line(names, record, variable, groups[variable])
    return Holder(variable, line, counts[variable], _predict.saved_bytes(nodes))


def _is_bounded(names: Names, path: str) -> bool:
    """Whether a variable is a `deque` that forgets by itself."""
    value = names.values.get(root(path))
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return getattr(value, "maxlen", None) is not None


def _line(names: Names, record: Watch, variable: str, tensors: list[Tensor]) -> Line | None:
    """The line that makes a variable hold more: its last assignment, or what is appended to it."""
    if variable.endswith(".grad"):  # which a pass writes
        return None
    made = _made(record, variable, tensors[0]) if len(tensors) == 1 else None
    return made or next(_filling(variable), None) or _assigned(names, variable)


def _made(record: Watch, variable: str, tensor: Tensor) -> Line | None:
    """The line that made a value, if it gives it to that variable."""
    for line in lines_of(record.path(tensor.grad_fn)):
        if _same(variable, _variables.assigned_by(line)):
            return line
    return None


def _same(variable: str, written: Collection[str]) -> bool:
    """Whether a variable is among some as they are written: `trainer.total` is `self.total` within its class."""
    return not set(_written.forms(variable)).isdisjoint(written)


def _filling(variable: str) -> Iterator[Line]:
    """The lines of the user's files that put something into a container."""
    for file in [file for file, users in USERS.items() if users]:
        yield from (
            Line(file, number)
            for name in dict.fromkeys(_written.forms(variable))
            for number in _changes.filled_at(name, file)
        )


def _assigned(names: Names, variable: str) -> Line | None:
    owner = names.owners.get(root(variable))
    if owner is None:
        return None
    numbers = _variables.assignments(variable, Line(owner.co_filename, owner.co_firstlineno))
    return Line(owner.co_filename, numbers[-1]) if numbers else None


def handed_on(names: Names, frames: list[FrameType], record: Watch, places: range) -> Holder | None:
    """The variable that hands nodes made at some places to the next iteration: read before it is assigned."""
    found = []
    for path, tensors in _groups(names).items():
        if len(tensors) == 1 and (_hands_on(path, frames) or "." in path):
            made = _made(record, path, tensors[0])
            if made is not None:
                nodes = _nodes.walk([tensors[0].grad_fn])
                count = sum(_traits.sequence(node) in places for node in nodes if _traits.leaf(node) is None)
                found.append(Holder(path, made, count, _predict.saved_bytes(nodes)))
    found = [holder for holder in found if holder.iterations]
    return max(found, key=lambda holder: (holder.iterations, -_written.steps(holder.variable)), default=None)


def _hands_on(path: str, frames: list[FrameType]) -> bool:
    return any(_variables.hands_on(path, line_of(frame)) for frame in frames)


def piling_up(names: Names, frames: list[FrameType], record: Watch, key: str) -> Iterator[tuple[Holder, list[Node]]]:
    """The variables behind which graphs pile up that no pass has run: each with those nodes.

    A container of so many values, each with nodes of its own; or a value that its line makes from itself, again and
    again.
    """
    for path, tensors in _groups(names).items():
        fresh: list[Node] = []
        count = 0
        if len(tensors) >= ITEMS and path not in names.tensors.values():
            seen: set[Node] = set()
            own = [_own(tensor, seen, key) for tensor in tensors]
            fresh = [node for nodes in own for node in nodes]
            count = sum(bool(nodes) for nodes in own)
        elif len(tensors) == 1 and (_hands_on(path, frames) or "." in path):
            fresh = _own(tensors[0], set(), key)
            count = _rounds(record, path, tensors[0], fresh)
        if fresh and count >= ITEMS and not _is_bounded(names, path):
            size = _predict.saved_bytes(fresh)
            if size:
                yield Holder(path, _line(names, record, path, tensors), count, size), fresh


def _own(tensor: Tensor, seen: set[Node], key: str) -> list[Node]:
    """The nodes behind a tensor, not among `seen`, that no pass has run."""
    nodes = [node for node in _nodes.walk([tensor.grad_fn], seen) if node not in seen and _traits.leaf(node) is None]
    seen.update(nodes)
    fresh = [node for node in nodes if key not in _traits.tags(node)]
    freed = set(_predict.having(fresh, "freed"))
    return [node for node in fresh if node not in freed]


def _rounds(record: Watch, path: str, tensor: Tensor, nodes: list[Node]) -> int:
    """How often the graph of a variable's value has the operation that last made it, at the line that assigns it."""
    top = tensor.grad_fn
    if _made(record, path, tensor) is None:
        return 0
    made = record.path(top)
    return sum(type(node) is type(top) and record.path(node) == made for node in nodes)
