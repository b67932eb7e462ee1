"""Graphs that grow from step to step, noticed while a program runs: what holds them, its line.

Four things are counted, and none of them in the forward:

* *spent*: each pass leaves a token on the nodes that are new since the last pass of its line. The
  token lives as long as one of them: so many tokens alive are so many iterations whose graphs
  something still holds.
* *.grad*: the same, for passes that left a gradient with a graph in a leaf.
* *reached again*: how many nodes of earlier iterations a pass runs once more.
* *unused*: graphs that pile up, and that no pass ever runs; looked for each time that twice as many
  nodes were made.

A count must rise in every iteration, or nearly so; it says nothing where it stays (a buffer of the
last hundred), or where the graphs are used in the end. Then the variables in sight are asked which
of them holds most of it. Where none does, nothing is said.
"""

from __future__ import annotations

import itertools
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from hodiff._core import _arguments, _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.errors import HodiffWarning, InputError
from hodiff.graph import _inspect, _saved, _source
from hodiff.graph._case import body, labeled
from hodiff.graph._names import USERS, TensorNames, is_users, root, user_frames
from hodiff.graph._record import Listener, Pass, Record
from hodiff.graph._source import Line, line_of, lines_of

RISES = 10
"""Iterations in which a count must have risen before anything is looked for."""
NODES = 500
"""Nodes made since a pass before graphs that no pass uses are looked for; then twice as many.

Beside passes they are looked for when twice as many nodes were made as at the last look.
"""
GROWS = 1.5
"""How much more a variable must hold than at the last look, where passes ran in between."""

_serial = itertools.count()


class _Token:
    """What a pass leaves on nodes, or a look: it lives as long as one of them."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = False


_RAN = _Token()


class _Trend:
    """A count, iteration by iteration: does it rise? `level` is the highest since it last fell."""

    def __init__(self) -> None:
        self.level = self.peak = self.rises = self.idle = self.drops = 0
        self.settled = True
        self._look_at = RISES

    def step(self, level: int) -> bool:
        """Note the next count; whether it has risen twice as often as when this last was true."""
        if level > self.level:
            self.level = level
            self.rises += 1
            self.idle = 0
        elif level < self.level // 2:
            self.drops += 1
            self.level = level
            self._restart()
        else:
            self.idle += 1
            if self.idle > max(RISES, self.rises):
                self.settled = True
                self._restart()
        self.peak = max(level, self.peak)
        if self.rises < self._look_at:
            return False
        self._look_at *= 2
        self.settled = False
        return True

    def _restart(self) -> None:
        self.rises = 0
        self.idle = 0
        self._look_at = RISES


class _Line:
    """The passes that one line (with its callers) has asked for."""

    def __init__(self, first: Pass) -> None:
        self.first = self.last = first
        self.alive: dict[int, weakref.ref[_Token]] = {}
        self.held, self.again = _Trend(), _Trend()
        self.ran_again = False

    def keep(self, token: _Token) -> None:
        alive, key = self.alive, id(token)
        alive[key] = weakref.ref(token, lambda _: alive.pop(key, None))


def _has_graph(leaf: Tensor) -> bool:
    """Whether a leaf's `.grad` has one, which leads back to the leaf: a cycle that no collector sees."""
    return leaf.grad is not None and leaf.grad.grad_fn is not None


class Growth(Listener):
    """Listens to the operations and passes under a watch; `growing()` is what grows."""

    def __init__(self) -> None:
        self._key = f"hodiff growth {next(_serial)}"
        self._unused_key = f"{self._key} unused"
        self._lines: dict[Any, _Line] = {}
        self._grown: dict[tuple[Any, str], Grown] = {}
        self._unused: dict[str, tuple[_Token, Grown]] = {}
        self._beside: dict[str, int] = {}
        self._token: _Token | None = None
        self._leaves: list[Tensor] = []
        self._written: dict[int, tuple[weakref.ref[Tensor], Pass]] = {}
        self._reached = 0
        self._nodes = NODES
        self._look_at = _saved.counter() + NODES
        self._start = _saved.counter()
        self._next = self._start + NODES
        self._passed = False

    # --- passes -----------------------------------------------------------------------------------

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Leave a token on what is new, and count what is not."""
        line = self._lines.get(call.path)
        if line is None:
            line = self._lines[call.path] = _Line(call)
        key = self._key
        tags = _saved.tags
        sequence = _saved.sequence
        first, last = line.first.place, line.last.place
        token = _Token()
        leaves = []
        again = 0
        for node in nodes:
            if node.__class__ is _nodes.ACCUMULATE:
                leaves.append(node)
                continue
            mine = tags(node)
            if self._unused_key in mine:
                mine[self._unused_key].used = True
            place = sequence(node)
            if place >= last or line.first is call:
                mine[key] = token
                continue
            if place >= first:
                again += 1
                line.ran_again = line.ran_again or key in mine
            mine.setdefault(key, _RAN)
        self._token, self._reached = token, again
        self._leaves = [node.variable for node in leaves] if call.built else []

    def after(self, record: Record, call: Pass, failed: bool) -> None:
        """The pass has run: has anything risen?"""
        token, leaves = self._token, self._leaves
        self._token, self._leaves = None, []
        self._look_at = min(_saved.counter() + self._nodes, self._next)
        self._passed = True
        line = self._lines.get(call.path)
        if failed or token is None or line is None:
            return
        look = line.held.step(len(line.alive))
        again = line.again.step(self._reached)
        line.keep(token)
        line.last = call
        writes = call.built and call.name != "autograd.grad"
        if writes:
            self._mark_gradients(token, leaves, call)
        if (look and (writes or not call.built)) or (again and not call.built):
            frames = list(user_frames(sys._getframe(1)))
            with _saved.without_modes():
                self._look(record, line, call, frames, again=again and not look)

    def _mark_gradients(self, token: _Token, leaves: list[Tensor], call: Pass) -> None:
        """Leave the pass's token on the graphs that it left in `.grad`, which lead to those of earlier passes."""
        key, tags = self._key, _saved.tags
        with _saved.without_modes():
            written = [leaf for leaf in leaves if _has_graph(leaf)]
            for leaf in written:
                self._written[id(leaf)] = (weakref.ref(leaf), call)
            stack: list[Node] = [leaf.grad.grad_fn for leaf in written if leaf.grad is not None]
        while stack:
            node = stack.pop()
            if node.__class__ is not _nodes.ACCUMULATE and key not in tags(node):
                tags(node)[key] = token
                stack += _saved.children(node)

    def _look(self, record: Record, line: _Line, call: Pass, frames: list[FrameType], *, again: bool) -> None:
        """Find the variable that holds what grows."""
        names = TensorNames(frames)
        if again:
            holder = handed_on(names, frames, record, range(line.first.place, line.last.place))
            if holder is not None:
                self._grown[call.path, "again"] = Grown("again", holder, call)
            return
        wanted = {token for ref in line.alive.values() if (token := ref()) is not None}
        holder = of(names, record, lambda node: _saved.tags(node).get(self._key), wanted)
        if holder is not None and holder.iterations * 2 > len(wanted):  # else several hold parts of it
            kind = "kept" if call.retained else "spent"
            if holder.variable.endswith(".grad"):
                kind = "gradient"
            self._grown[call.path, "held"] = Grown(kind, holder, call)
            return
        cycles = {call for ref, call in self._written.values() if (leaf := ref()) is not None and _has_graph(leaf)}
        if len(cycles) > RISES:  # leaves of so many passes: not those of one model
            latest = max(cycles, key=lambda call: call.number)
            self._grown[call.path, "held"] = Grown("cycle", GrowingVariable("", None, len(cycles), 0), latest)

    # --- operations -------------------------------------------------------------------------------

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """Many nodes were made, and no pass has come: do they pile up?"""
        made = _saved.counter()
        if made < self._look_at:
            return
        beside, self._passed = self._passed, False
        self._nodes *= 1 if beside else 2
        self._look_at = made + self._nodes
        self._next = made + made - self._start
        from hodiff.graph import _watch

        record = _watch.recording()
        if record is None:
            return
        with _saved.without_modes():
            frames = list(user_frames(frame))
            for holder, nodes, freed in piling_up(TensorNames(frames), frames, record, self._key):
                token = _Token()
                for node in nodes:
                    _saved.tags(node)[self._unused_key] = token
                grows = holder.iterations > GROWS * self._beside.get(holder.variable, holder.iterations)
                self._beside[holder.variable] = holder.iterations
                if grows or not beside:  # between passes there may be what the next is to use
                    kind = "freed" if freed else "unused"
                    self._unused[holder.variable] = (token, Grown(kind, holder))

    # --- the end ----------------------------------------------------------------------------------

    def growing(self, *, ended: bool = True) -> list[Grown]:
        """What grew, each holder once; `ended`: whether the program came to its end, and would have used it."""
        grown = []
        for (path, which), each in self._grown.items():
            line = self._lines[path]
            trend = line.again if which == "again" else line.held
            refuted = trend.drops if which == "again" else line.ran_again
            if not trend.settled and not refuted:
                holder = each.holder._replace(iterations=trend.peak)
                grown.append(Grown(each.kind, holder, each.call))
        if ended:
            grown += [each for token, each in self._unused.values() if not token.used]
        return list({(each.holder.variable, each.holder.line): each for each in grown}.values())


# --- does the graph behind some tensors grow, step by step? ---------------------------------------


RISES_IN_A_ROW = 3


class Step(NamedTuple):
    """Nodes behind a root, and bytes saved in them, at one step."""

    nodes: int
    bytes: int


class Monitor(_messages.Reported):
    """Follows graphs over the steps of a loop; made by `monitor`.

    Attributes:
        history: For each root, one `Step` per call of `step`.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> growth = hodiff.graph.monitor()
        >>> for _ in range(3):
        ...     growth.step(loss=x.exp().sum())
        >>> growth.history["loss"][-1]
        Step(nodes=3, bytes=8)
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.history: dict[str, list[Step]] = {}
        self._roots = roots
        self._warned: set[str] = set()

    def step(self, **roots: Any) -> None:
        """Measure `roots`, and those given to `monitor`; warn once per root after three rises in a row."""
        for name, given in {**self._roots, **roots}.items():
            with _saved.without_modes():
                nodes = list(_nodes.walk([_nodes.node_of(tensor) for tensor in _tensors(given, name)]))
                past = self.history.setdefault(name, [])
                past.append(Step(len(nodes), _inspect.saved_bytes(nodes)))
            if name not in self._warned and _grows(past):
                self._warned.add(name)
                self._warn(name, past, nodes)

    def _warn(self, name: str, past: list[Step], nodes: list[Any]) -> None:
        frame, level = sys._getframe(1), 1
        while frame.f_back is not None and not is_users(frame.f_code):
            frame, level = frame.f_back, level + 1
        line = line_of(frame)
        loop = next(iter(_source.loops(line)), None)
        numbers = [n for n in _source.assignments(name, line) if loop is not None and _source.within(loop, n)]
        where = f" Line {numbers[-1]} ({Line(line.file, numbers[-1]).text}) extends it." if numbers else ""
        children = [child for node in nodes for child in _saved.children(node)]
        most = max(Counter(each for each in children if _saved.leaf(each) is not None).values(), default=1)
        used = f" One parameter is used {most} times in it." if most > 1 else ""
        nodes_then = " -> ".join(str(step.nodes) for step in past[-RISES_IN_A_ROW - 1 :])
        warnings.warn(
            f"the graph behind {name} grows with every step: {nodes_then} nodes, "
            f"{past[-1].bytes:,} B saved in them now.{where}{used} Detach what is carried from step to step.",
            HodiffWarning,
            stacklevel=level + 1,
        )

    def __str__(self) -> str:
        lines = []
        for name, past in self.history.items():
            shown = " -> ".join(str(step.nodes) for step in past[:3] + past[-3:][max(0, 6 - len(past)) :])
            verdict = "grows" if _grows(past) else "no growth"
            lines.append(f"{name}: {verdict}; nodes {shown}; {past[-1].bytes:,} B saved at the last step")
        return "\n".join(lines) or "no step yet"


def _grows(past: list[Step]) -> bool:
    last = [step.nodes for step in past[-RISES_IN_A_ROW - 1 :]]
    return len(last) == RISES_IN_A_ROW + 1 and all(a < b for a, b in pairwise(last))


DEEPEST = 100
"""Containers in containers; more is a list in itself."""


def _tensors(root: Any, name: str, depth: int = 0) -> list[Tensor]:
    """The tensors of a root: it may be a tensor, a container, a module (its gradients), or a function of these."""
    if depth > DEEPEST:
        raise InputError(f"{name}: containers are nested deeper than {DEEPEST}.")
    if isinstance(root, nn.Module):
        return [parameter.grad for parameter in root.parameters() if parameter.grad is not None]
    if isinstance(root, Tensor):
        return [root]
    if isinstance(root, dict):
        root = list(root.values())
    if isinstance(root, (list, tuple)):
        return [tensor for item in root for tensor in _tensors(item, name, depth + 1)]
    if callable(root):
        return _tensors(root(), name, depth + 1)
    if root is None or isinstance(root, (int, float)):
        return []
    raise InputError(
        f"{name}: got {_arguments.kind(root)}, expected tensors, a module, or a function that returns them."
    )


def monitor(**roots: Tensor | nn.Module | Callable[[], Any] | Any) -> Monitor:
    """Follow the graphs behind some tensors over a training loop, and warn when one grows.

    A graph that grows in each step is one that a step hands to the next: a running sum of losses, a
    hidden state, a list of losses. After three rises in a row a `HodiffWarning` names the line.

    Args:
        **roots: What to follow: a function that gives tensors (`total=lambda: total`), a module
            (the graphs of its parameters' `.grad`, which `backward(create_graph=True)` leaves
            behind), or tensors that stay the same. Those that change may be given to
            `.step(total=total)` instead.

    Returns:
        A `Monitor`: call its `.step()` once per step; print it at the end. `.history` has the
        figures.

    Raises:
        InputError: On `.step()`: a root of another kind. Tensors may have any shape.

    Cost:
        No pass; `.step()` walks the graphs, some 10 µs per node. No memory of tensors is kept.

    Examples:
        >>> import torch, warnings, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> total, growth = torch.zeros(()), hodiff.graph.monitor()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     for _ in range(4):
        ...         total = total + x.exp().sum()
        ...         growth.step(total=total)
        >>> print(growth)
        total: grows; nodes 4 -> 7 -> 10 -> 13; 32 B saved at the last step
    """
    for name, given in roots.items():
        if not callable(given):
            _tensors(given, name)
    return Monitor(roots)


# --- which variable holds most of some graphs, as it is written, and the line that puts them there --------------------


STATES = 4
"""Tensors of a recurrent state, in one variable."""
ITEMS = 20
"""Values that a container must hold, or steps that a value must reach back, before graphs pile up."""


class GrowingVariable(NamedTuple):
    """A variable, the line that makes it hold more, how much of what was sought, and the bytes saved in that."""

    variable: str
    line: Line | None
    iterations: int
    bytes: int


def _groups(names: TensorNames) -> dict[str, list[Tensor]]:
    """The tensors with a graph behind each variable: a tensor, and each container on the way to it."""
    groups: dict[str, list[Tensor]] = {}
    for path, tensor in names.at.items():
        if tensor.grad_fn is not None:
            for place in [each.start() for each in re.finditer(r"\[", path)] + [len(path)]:
                groups.setdefault(path[:place], []).append(tensor)
    direct = Counter(path[: path.rindex("[")] for path in groups if path.endswith("]"))
    few = [path for path in groups if not path.endswith("]") or direct[path[: path.rindex("[")]] < ITEMS]
    return {path: groups[path] for path in few}  # each of many states in a list may lead to all before it


def of(
    names: TensorNames, record: Record, tag: Callable[[Node], Any], wanted: Collection[Any]
) -> GrowingVariable | None:
    """The variable behind which most of the tags in `wanted` lie; of several, the most exact."""
    counts: dict[str, int] = {}
    groups = _groups(names)
    for path, tensors in groups.items():
        nodes = _nodes.walk([tensor.grad_fn for tensor in tensors])
        counts[path] = len({id(tagged) for node in nodes if (tagged := tag(node)) in wanted})
    variable = max(counts, key=lambda path: (counts[path], -_source.steps(path)), default="")
    if not variable or not counts[variable]:
        return None
    whole = variable
    for path, count in counts.items():  # `history["loss"]`, not `history`
        if path.startswith(variable) and count == counts[variable]:
            variable = path
    equal = [path for path, count in counts.items() if count == counts[variable]]
    if sum(path.startswith(f"{whole}[") for path in equal) > 1:
        variable = whole  # `sums`, not `sums[0]` alone
    if _is_bounded(names, variable):
        return None
    nodes = _nodes.walk([tensor.grad_fn for tensor in groups[variable]])
    line = _line(names, record, variable, groups[variable])
    return GrowingVariable(variable, line, counts[variable], _inspect.saved_bytes(nodes))


def _is_bounded(names: TensorNames, path: str) -> bool:
    """Whether a variable is a `deque` that forgets by itself."""
    value = names.values.get(root(path))
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return getattr(value, "maxlen", None) is not None


def _line(names: TensorNames, record: Record, variable: str, tensors: list[Tensor]) -> Line | None:
    """The line that makes a variable hold more: its last assignment, or what is appended to it."""
    if variable.endswith(".grad"):  # which a pass writes
        return None
    made = _made(record, variable, tensors[0]) if len(tensors) == 1 else None
    return made or next(_filling(variable), None) or _assigned(names, variable)


def _made(record: Record, variable: str, tensor: Tensor) -> Line | None:
    """The line that made a value, if it gives it to that variable."""
    forms = set(_source.forms(variable))
    lines = lines_of(record.path(tensor.grad_fn))
    return next((line for line in lines if not forms.isdisjoint(_source.assigned_by(line))), None)


def _filling(variable: str) -> Iterator[Line]:
    """The lines of the user's files that put something into a container."""
    for file in [file for file, users in USERS.items() if users]:
        yield from (
            Line(file, number)
            for name in dict.fromkeys(_source.forms(variable))
            for number in _source.filled_at(name, file)
        )


def _assigned(names: TensorNames, variable: str) -> Line | None:
    owner = names.owners.get(root(variable))
    if owner is None:
        return None
    numbers = _source.assignments(variable, Line(owner.co_filename, owner.co_firstlineno))
    return Line(owner.co_filename, numbers[-1]) if numbers else None


def handed_on(names: TensorNames, frames: list[FrameType], record: Record, places: range) -> GrowingVariable | None:
    """The variable that hands nodes made at some places to the next iteration: read before it is assigned."""
    holders = []
    for path, tensors in _groups(names).items():
        if len(tensors) == 1 and (_hands_on(path, frames) or "." in path):
            made = _made(record, path, tensors[0])
            if made is not None:
                nodes = _nodes.walk([tensors[0].grad_fn])
                count = sum(_saved.sequence(node) in places for node in nodes if _saved.leaf(node) is None)
                holders.append(GrowingVariable(path, made, count, _inspect.saved_bytes(nodes)))
    holders = [holder for holder in holders if holder.iterations]
    return max(holders, key=lambda holder: (holder.iterations, -_source.steps(holder.variable)), default=None)


def _hands_on(path: str, frames: list[FrameType]) -> bool:
    return any(_source.hands_on(path, line_of(frame)) for frame in frames)


def piling_up(
    names: TensorNames, frames: list[FrameType], record: Record, key: str
) -> Iterator[tuple[GrowingVariable, list[Node], bool]]:
    """The variables behind which graphs pile up that no pass has run: each with those nodes.

    And whether passes of other losses have freed what a pass through each of them would need.

    A container of so many values, each with nodes of its own; or a value that its line makes from
    itself, again and again.
    """
    for path, tensors in _groups(names).items():
        fresh: list[Node] = []
        count, freed = 0, False
        if len(tensors) >= ITEMS and path not in names.at:
            seen: set[Node] = set()
            own = [_own(tensor, seen, key) for tensor in tensors]
            fresh = [node for nodes, _ in own for node in nodes]
            count = sum(bool(nodes) for nodes, _ in own)
            freed = all(spent for nodes, spent in own if nodes)
        elif len(tensors) <= STATES and (_hands_on(path, frames) or "." in path):
            own = [_own(tensor, set(), key) for tensor in tensors]
            fresh = list(dict.fromkeys(node for nodes, _ in own for node in nodes))
            count, freed = _rounds(record, path, tensors[0], fresh), all(spent for _, spent in own)
        if fresh and count >= ITEMS and not _is_bounded(names, path):
            size = _inspect.saved_bytes(fresh)
            if size:
                line = _line(names, record, path, tensors)
                yield GrowingVariable(path, line, count, size), fresh, freed


def _own(tensor: Tensor, seen: set[Node], key: str) -> tuple[list[Node], bool]:
    """The nodes behind a tensor, not among `seen`, that no pass has run; was another freed?"""
    nodes = [node for node in _nodes.walk([tensor.grad_fn], seen) if node not in seen and _saved.leaf(node) is None]
    seen.update(nodes)
    freed = set(_inspect.having(nodes, "freed"))
    fresh = [node for node in nodes if node not in freed and key not in _saved.tags(node)]
    return fresh, bool(freed)


def _rounds(record: Record, path: str, tensor: Tensor, nodes: list[Node]) -> int:
    """How often the line that assigns a variable has made its value: its operations, by their period."""
    if _made(record, path, tensor) is None:
        return 0
    made = record.path(tensor.grad_fn)
    line = [node for node in nodes if record.path(node) == made]
    kinds = [type(node) for node in sorted(line, key=_saved.sequence)]
    late = range(len(kinds) // 2, len(kinds))
    for period in range(1, len(kinds) // ITEMS + 1):
        if all(kinds[place] is kinds[place - period] for place in late):
            return len(kinds) // period
    return min(Counter(kinds).values(), default=0)


# --- what is said of a graph that grows -----------------------------------------------------------


TITLE = "hodiff: graphs that grow from iteration to iteration"


@dataclass(frozen=True)
class Grown:
    """A graph that grows; it prints as a few lines.

    Attributes:
        kind: `spent`, `kept`, `gradient`, `cycle`, `again`, `unused` or `freed`: a key of `KINDS`.
        holder: What holds it, and how much of it.
        call: The pass concerned; None if there was none.
    """

    kind: str
    holder: GrowingVariable
    call: Pass | None = None

    def __str__(self) -> str:
        kind, holder = KINDS[self.kind], self.holder
        facts = {"variable": holder.variable, "count": holder.iterations, "bytes": f"{holder.bytes:,}"}
        what, reason, fix, unknown = [text.format(**facts) for text in kind]
        last = self.call.stack[0] if self.call is not None and self.call.path else None
        places = [labeled("grows at", holder.line), labeled("pass", last)]
        text = [what, *(f"  {place}" for place in places if place)]
        return body(text, reason, [("fix", fix) if fix else ("not known", unknown)])


class Kind(NamedTuple):
    """The sentences of one kind of growth; a fix only where nothing that is computed can change by it."""

    what: str
    reason: str
    fix: str = ""
    unknown: str = ""


KINDS = {
    "spent": Kind(
        "`{variable}` holds the graphs of {count} iterations, whose passes have run",
        "the passes freed what another pass would need; the rest is useless, and grows in each iteration.",
        "store only the value in `{variable}`: `.detach()`, or `.item()` for a number.",
    ),
    "kept": Kind(
        "`{variable}` holds the graphs of {count} iterations, and {bytes} B that they saved",
        "the passes were told to keep them.",
        unknown="will another pass go through them? If not, remove `retain_graph` and `create_graph`,\n"
        "and store only the value in `{variable}`: `.detach()`, or `.item()` for a number.",
    ),
    "gradient": Kind(
        "`{variable}` holds the graphs of {count} iterations, and {bytes} B that they saved",
        "backward(create_graph=True) adds a gradient with its graph to `.grad`, which was never reset.",
        unknown="should the gradients of all iterations add up? If not, set `.grad = None` before each\n"
        "pass; hodiff.grad and torch.autograd.grad return a gradient and do not write `.grad`.",
    ),
    "cycle": Kind(
        "{count} tensors and more hold their own graphs in `.grad`, and will until the program ends",
        "backward(create_graph=True) leaves in `.grad` a gradient whose graph leads back to the tensor: a cycle\n"
        "       that no garbage collector sees.",
        "take the gradient with hodiff.grad or torch.autograd.grad(..., create_graph=True), which write no `.grad`.",
    ),
    "again": Kind(
        "each pass runs the graphs of all iterations before it again: {count} nodes in the largest",
        "`{variable}` hands the graph of one iteration to the next, and `retain_graph=True` keeps them all.",
        unknown="should gradients reach back through all iterations? If not, write `{variable} = "
        "{variable}.detach()` at the\nstart of each; `retain_graph=True` is then no longer needed.",
    ),
    "unused": Kind(
        "`{variable}` holds the graphs of {count} iterations and more, and {bytes} B that they saved",
        "no backward pass has gone through them.",
        unknown="should one? If not, compute them under torch.no_grad(), or store only the value in\n"
        "`{variable}`: `.detach()`, or `.item()` for a number.",
    ),
    "freed": Kind(
        "`{variable}` holds the graphs of {count} iterations and more, of losses whose passes have run",
        "the passes freed what one through `{variable}` would need; the rest is useless.",
        "store only the value in `{variable}`: `.detach()`, or `.item()` for a number.",
    ),
}


def report(grown: list[Grown]) -> str:
    """All of them, under one title; empty if there are none."""
    return "\n\n".join([TITLE, *map(str, grown)]) + "\n" if grown else ""
