"""Graphs that grow from step to step, noticed while a program runs: what holds them, its line.

Each pass leaves a token on the nodes that are new since the last pass of its line, and one that
builds a graph on the gradients that it left in `.grad`. A token lives as long as one of its nodes:
so many tokens alive are so many iterations whose graphs something still holds. Where their number
keeps rising, the variables in sight are asked which of them leads to most of them.

Where no variable holds what grows, nothing is said.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.errors import HodiffWarning, InputError
from hodiff.graph import _inspect, _saved, _source
from hodiff.graph._case import Fact, body, listed
from hodiff.graph._names import USERS, TensorNames, root, user_frames
from hodiff.graph._record import Listener, Pass, Record
from hodiff.graph._source import Line, Path, line_of, lines_of

RISES = 10
"""Iterations whose graphs must be alive before anything is looked for."""
ITEMS = 20
"""Items from which a container is asked as a whole, and not one by one."""

_serial = itertools.count()


# --- what is noted while a program runs -----------------------------------------------------------


class _Token:
    """A mark that a pass leaves on nodes: it lives as long as one of them."""


_RAN = _Token()


class _Line:
    """The passes that one line (with its callers) has asked for, and the tokens that they left.

    `peak`: the most that were alive; `level`: since their number last fell; `idle`: passes since it
    last rose or fell.
    """

    def __init__(self, first: Pass) -> None:
        self.first = self.last = first
        self.alive: weakref.WeakSet[_Token] = weakref.WeakSet()
        self.again = False
        self.peak = self.level = self.idle = 0
        self._look_at = RISES

    def count(self, alive: int) -> bool:
        """Note how many are alive; whether they are twice as many as when this was last true."""
        moved = alive > self.level or alive < self.level // 2
        self.idle = 0 if moved else self.idle + 1
        self.level = alive if moved else self.level
        self.peak = max(alive, self.peak)
        if alive < self._look_at:
            return False
        self._look_at = 2 * alive
        return True


class Growth(Listener):
    """Listens to the passes and steps under a watch; `growing()` is what grows."""

    def __init__(self) -> None:
        self._key = f"hodiff growth {next(_serial)}"
        self._lines: dict[Any, _Line] = {}
        self._grown: dict[Any, list[Grown]] = {}
        self._token: _Token | None = None
        self._leaves: list[Tensor] = []
        self.untrained = Untrained()

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Leave a token on what is new, and see whether graphs of earlier iterations run again."""
        line = self._lines.setdefault(call.path, _Line(call))
        self._token, line.again = _Token(), False
        for node in [each for each in nodes if each.__class__ is not _nodes.ACCUMULATE]:
            tags, place = _saved.tags(node), _saved.sequence(node)
            is_new = place >= line.last.place or line.first is call
            if not is_new and self._key in tags and place >= line.first.place:
                line.again = True
            tags.setdefault(self._key, self._token if is_new else _RAN)
        leaves = [node.variable for node in nodes if node.__class__ is _nodes.ACCUMULATE]
        self._leaves = leaves if call.built and call.name != "autograd.grad" else []

    def after(self, record: Record, call: Pass, failed: bool) -> None:
        """The pass has run: are the graphs of more iterations alive than before?"""
        line = self._lines.get(call.path)
        token, self._token = self._token, None
        leaves, self._leaves = self._leaves, []
        with _saved.without_modes():
            self.untrained.look()
            if failed or token is None or line is None:
                return
            look = line.count(len(line.alive))
            line.alive.add(token)
            line.last = call
            for leaf in leaves:
                if leaf.grad is not None and leaf.grad.grad_fn is not None:
                    _saved.tags(leaf.grad.grad_fn).setdefault(self._key, token)
            if look and (leaves or not call.built):  # a gradient with a graph is there to be used
                self._look(record, line, call, TensorNames(user_frames(sys._getframe(1))))

    def _look(self, record: Record, line: _Line, call: Pass, names: TensorNames) -> None:
        """Find the variable that holds what grows."""
        alive = set(line.alive)
        most = holder(names, lambda node: _saved.tags(node).get(self._key), alive, call.path)
        if most is not None and 2 * most[1] > len(alive):  # else several hold parts of it
            variable, count, tensors = most
            kind = "kept" if call.retained else "spent"
            kind = "again" if line.again else kind
            kind = "gradient" if variable.endswith(".grad") else kind
            size = _inspect.saved_bytes(_nodes.walk([tensor.grad_fn for tensor in tensors]))
            said = Grown(kind, variable, count, size, _line(names, record, variable, tensors), call)
            self._grown.setdefault(call.path, []).append(said)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        with _saved.without_modes():
            self.untrained.step(optimizer)

    def growing(self) -> list[Grown]:
        """The holders that grew, each once."""
        rising = [path for path in self._grown if self._lines[path].idle <= RISES]
        grew = [_lasting(self._grown[path], self._lines[path].peak) for path in rising]
        return list({(each.variable, each.line): each for each in reversed(grew)}.values())[::-1]


# --- parameters that an optimizer steps, and that never have a gradient ---------------------------


class _Stepped:
    """An optimizer, its steps, and those of its parameters that had no gradient so far, by name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        given = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        leaves = [leaf for leaf in given if leaf.requires_grad and leaf.grad is None]
        names = TensorNames(user_frames(sys._getframe(1))) if leaves else TensorNames()
        self.optimizer, self.steps = weakref.ref(optimizer), 0
        self.name = names.optimizers.get(id(optimizer), type(optimizer).__name__)
        self.never = [
            (names.of(leaf) or "one without a name", weakref.ref(leaf)) for leaf in leaves
        ]


class Untrained:
    """The parameters that optimizers step, and that had no gradient at any of their steps."""

    def __init__(self) -> None:
        self._known: list[_Stepped] = []

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        known = next((each for each in self._known if each.optimizer() is optimizer), None)
        if known is None:
            known = _Stepped(optimizer)
            self._known.append(known)
        known.steps += 1
        self.look()

    def look(self) -> None:
        """Forget what has a gradient now."""
        for each in self._known:
            each.never = [held for held in each.never if getattr(held[1](), "grad", None) is None]

    def __str__(self) -> str:
        lines = [
            f"  stepped {each.steps} times by `{each.name}`, never had a gradient: "
            f"{listed([name for name, _ in each.never])}"
            for each in self._known
            if each.never and each.steps >= STEPS
        ]
        return "\n".join([UNTRAINED, *lines]) if lines else ""


STEPS = 2
"""Steps without a gradient before it is told."""
UNTRAINED = "hodiff: parameters that were never trained"


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
        """Measure `roots`, and those given to `monitor`;
        warn once per root after three rises in a row.
        """
        for name, given in {**self._roots, **roots}.items():
            with _saved.without_modes():
                nodes = list(
                    _nodes.walk([_nodes.node_of(tensor) for tensor in _tensors(given, name)])
                )
                past = self.history.setdefault(name, [])
                past.append(Step(len(nodes), _inspect.saved_bytes(nodes)))
            if name not in self._warned and _grows(past):
                self._warned.add(name)
                self._warn(name, past, nodes)

    def _warn(self, name: str, past: list[Step], nodes: list[Any]) -> None:
        line = line_of(next(user_frames(sys._getframe(1)), sys._getframe(1)))
        loop = next(iter(_source.loops(line)), None)
        numbers = [
            n
            for n in _source.assignments(name, line)
            if loop is not None and _source.within(loop, n)
        ]
        where = (
            f" Line {numbers[-1]} ({Line(line.file, numbers[-1]).text}) extends it."
            if numbers
            else ""
        )
        nodes_then = " -> ".join(str(step.nodes) for step in past[-RISES_IN_A_ROW - 1 :])
        warnings.warn(
            f"the graph behind {name} grows with every step: {nodes_then} nodes, "
            f"{past[-1].bytes:,} B saved in them now.{where} Detach what is carried from "
            "step to step.",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )

    def __str__(self) -> str:
        lines = []
        for name, past in self.history.items():
            shown = " -> ".join(
                str(step.nodes) for step in past[:3] + past[-3:][max(0, 6 - len(past)) :]
            )
            verdict = "grows" if _grows(past) else "no growth"
            lines.append(
                f"{name}: {verdict}; nodes {shown}; {past[-1].bytes:,} B saved at the last step"
            )
        return "\n".join(lines) or "no step yet"


def _grows(past: list[Step]) -> bool:
    last = [step.nodes for step in past[-RISES_IN_A_ROW - 1 :]]
    return len(last) == RISES_IN_A_ROW + 1 and all(a < b for a, b in pairwise(last))


DEEPEST = 100
"""Containers in containers; more is a list in itself."""


def _tensors(root: Any, name: str, depth: int = 0) -> list[Tensor]:
    """The tensors of a root: it may be a tensor, a container, a module (its gradients),
    or a function of these.
    """
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
        f"{name}: got {_arguments.kind(root)}, expected tensors, a module, "
        "or a function that returns them."
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


# --- which variable holds most of some graphs, as it is written, and the line that puts them there


def _groups(names: TensorNames) -> dict[str, list[Tensor]]:
    """The tensors with a graph behind each variable: a tensor, and each container on the way to it.

    Of a container that holds the same as another, the innermost; of the items of a long one none,
    as each of many states may lead to all before it.
    """
    groups: dict[str, list[Tensor]] = {}
    for path, tensor in names.at.items():
        if tensor.grad_fn is not None:
            for place in [each.start() for each in re.finditer(r"\[", path)] + [len(path)]:
                groups.setdefault(path[:place], []).append(tensor)
    direct = Counter(path[: path.rindex("[")] for path in groups if path.endswith("]"))
    exact: dict[tuple[int, int], str] = {}
    for path, tensors in groups.items():
        key = id(tensors[0]), len(tensors)
        few = not path.endswith("]") or direct[path[: path.rindex("[")]] < ITEMS
        if few and path.startswith(exact.get(key, "")):
            exact[key] = path
    return {path: groups[path] for path in exact.values()}


def holder(
    names: TensorNames, tag: Callable[[Node], Any], wanted: Collection[Any], path: Path = ()
) -> tuple[str, int, list[Tensor]] | None:
    """The variable that leads to most of the tags in `wanted`, their number, and its tensors.

    Of several what a loop around `path` hands to its next round, and then the least.
    """
    held: dict[str, tuple[int, int, int]] = {}
    groups = _groups(names)
    for variable, tensors in groups.items():
        nodes = list(_nodes.walk([tensor.grad_fn for tensor in tensors]))
        tags = {id(tagged) for node in nodes if (tagged := tag(node)) in wanted}
        held[variable] = len(tags), -len(nodes), -_source.steps(variable)
    most = max((number for number, _, _ in held.values()), default=0)
    equal = [each for each in held if held[each][0] == most]
    if not most:
        return None
    lines = [frame.line for frame in path]  # in loops around these, what is read before assigned
    handed_on = [each for each in equal if any(_source.hands_on(each, line) for line in lines)]
    variable = max(handed_on or equal, key=held.__getitem__)
    around = variable[: max(variable.rfind("["), 0)]
    if around in groups and sum(each.startswith(f"{around}[") for each in equal) > 1:
        variable = around  # `sums`, not `sums[0]` alone
    return None if _is_bounded(names, variable) else (variable, most, groups[variable])


def _is_bounded(names: TensorNames, path: str) -> bool:
    """Whether a variable is a `deque` that forgets by itself."""
    value = names.values.get(root(path))
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return getattr(value, "maxlen", None) is not None


def _line(names: TensorNames, record: Record, variable: str, tensors: list[Tensor]) -> Line | None:
    """The line that makes a variable hold more: it gave it its value, or puts something into it."""
    if variable.endswith(".grad"):  # which a pass writes
        return None
    if len(tensors) == 1:
        forms = set(_source.forms(variable))
        made = lines_of(record.path(tensors[0].grad_fn))
        return next((line for line in made if forms & set(_source.assigned_by(line))), None)
    paths = names.paths[id(tensors[0])]
    first = next((path for path in paths if path.startswith(variable)), variable)
    places = (variable, first.rpartition("[")[0], _SUBSCRIPTS.sub("", variable))
    file = getattr(names.owners.get(root(variable)), "co_filename", "")
    return next((line for path in places for line in _filling(path, file)), None)


_SUBSCRIPTS = re.compile(r"(\[[^][]*\])*$")


def _filling(variable: str, own: str) -> Iterator[Line]:
    """The user's lines that put something into a container, or make it anew from itself.

    Those of its own file come first. In others the same name without an attribute is another's.
    """
    forms = set(_source.forms(variable))
    elsewhere = forms if "." in variable else set[str]()
    for file in sorted(
        [file for file, users in USERS.items() if users], key=lambda file: file != own
    ):
        for node in _source.nodes_in(file):
            if any(_fills(node, name) for name in (forms if file == own else elsewhere)):
                yield Line(file, getattr(node, "lineno", 0))


GROW = ("append", "extend", "insert", "appendleft")


def _fills(node: ast.AST, name: str) -> bool:
    """Whether it is `name.append(x)`, `name[k].append(x)`, `name[k] = x`, `name += x`,
    `name = [*name, x]`.
    """
    call = node.func if isinstance(node, ast.Call) else None
    if isinstance(call, ast.Attribute) and call.attr in GROW:
        held = ast.unparse(call.value)
        return held == name or held.startswith((f"{name}[", f"{name}.setdefault("))
    given = _source.targets(node)
    whole = name in given and (isinstance(node, ast.AugAssign) or _source.reads(node, name))
    return whole or any(target.startswith(f"{name}[") for target in given)


# --- what is said of a graph that grows -----------------------------------------------------------


TITLE = "hodiff: graphs that grow from iteration to iteration"


@dataclass(frozen=True)
class Grown:
    """A graph that grows; it prints as a few lines.

    Attributes:
        kind: A key of `KINDS`.
        variable: What holds it.
        count: The graphs of how many iterations it holds.
        bytes: What they have saved.
        line: The line that puts them there.
        call: The pass concerned.
    """

    kind: str
    variable: str
    count: int
    bytes: int
    line: Line | None
    call: Pass

    def __str__(self) -> str:
        facts = {"variable": self.variable, "count": self.count, "bytes": f"{self.bytes:,}"}
        what, reason, helps = [text.format(**facts) for text in KINDS[self.kind]]
        last = self.call.stack[0] if self.call.path else None
        places = [Fact("  grows at", "", self.line), Fact("  pass", "", last)]
        return body([what, *places], reason, [("helps", helps)])


def _lasting(looks: list[Grown], peak: int) -> Grown:
    """The holders that most looks have found,
    with what each held until a look found something else.
    """
    names = [each.variable for each in looks]
    last = max(range(len(looks)), key=lambda index: (names.count(names[index]), index))
    said = looks[last]
    count = looks[last + 1].count if last + 1 < len(looks) else peak
    return replace(said, count=count, bytes=said.bytes * count // said.count)


HELD = "`{variable}` holds the graphs of {count} iterations, and some {bytes} B that they saved"
VALUE = "store only the value in `{variable}`: `.detach()`, or `.item()` for a number."
# What it is, why, and what helps.
KINDS = {
    "spent": (
        "`{variable}` holds the graphs of {count} iterations, whose passes have run",
        "the passes freed what another pass would need; the rest is useless, and grows.",
        VALUE,
    ),
    "kept": (
        HELD,
        "the passes were told to keep them.",
        "if no other pass goes through them, remove `retain_graph` and `create_graph`, "
        f"and {VALUE}",
    ),
    "gradient": (
        HELD,
        "backward(create_graph=True) adds a gradient with its graph to `.grad`, "
        "which was never reset.",
        "if the gradients of all iterations are not to add up, set `.grad = None` before each "
        "pass; hodiff.grad and torch.autograd.grad return a gradient and do not write `.grad`.",
    ),
    "again": (
        "`{variable}` holds the graphs of {count} iterations, and each pass runs all of them again",
        "each iteration extends the graph of the one before, and `retain_graph=True` keeps them "
        "all.",
        "if gradients are not to reach back through all iterations, write `{variable} = "
        "{variable}.detach()` at the start of each; `retain_graph=True` is then no longer needed.",
    ),
}


def report(growth: Growth, *, ended: bool = True) -> str:
    """The holders that grew, and the parameters that were never trained;
    empty if there is neither.
    """
    grown = growth.growing()
    parts = ["\n\n".join([TITLE, *map(str, grown)])] if grown else []
    parts += filter(None, [str(growth.untrained) if ended else ""])
    return "\n\n".join(parts) + "\n" if parts else ""
