"""Graphs that grow from iteration to iteration, noticed while a program runs: what holds them, and its line.

Four things are counted, and none of them in the forward:

* *spent*: each pass leaves a token on the nodes that are new since the last pass of its line. The token lives as
  long as one of them: so many tokens alive are so many iterations whose graphs something still holds.
* *.grad*: the same, for passes that left a gradient with a graph in a leaf.
* *reached again*: how many nodes of earlier iterations a pass runs once more.
* *unused*: graphs that pile up, and that no pass ever runs; looked for each time that twice as many nodes were made.

A count must rise in every iteration, or nearly so; it says nothing where it stays (a buffer of the last hundred), or
where the graphs are used in the end. Then the variables in sight are asked which of them holds most of it. Where none
does, nothing is said.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _holders, _traits
from hodiff.graph._case import Pass
from hodiff.graph._growth_words import Grown
from hodiff.graph._holders import Holder
from hodiff.graph._names import Names, user_frames

if TYPE_CHECKING:
    from hodiff.graph._watch import Watch

RISES = 10
"""Iterations in which a count must have risen before anything is looked for."""
NODES = 500
"""Nodes made since a pass before graphs that no pass uses are looked for; then twice as many."""

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


class Growth:
    """Listens to the operations and passes under a watch; `found()` is what grows."""

    def __init__(self) -> None:
        self._key = f"hodiff growth {next(_serial)}"
        self._unused_key = f"{self._key} unused"
        self._lines: dict[Any, _Line] = {}
        self._grown: dict[tuple[Any, str], Grown] = {}
        self._unused: dict[str, tuple[_Token, Grown]] = {}
        self._token: _Token | None = None
        self._leaves: list[Tensor] = []
        self._written: dict[int, tuple[weakref.ref[Tensor], Pass]] = {}
        self._reached = 0
        self._nodes = NODES
        self._look_at = _traits.counter() + NODES

    # --- passes -------------------------------------------------------------------------------------------------------

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Leave a token on what is new, and count what is not."""
        line = self._lines.get(call.path)
        if line is None:
            line = self._lines[call.path] = _Line(call)
        key = self._key
        tags = _traits.tags
        sequence = _traits.sequence
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

    def after(self, record: Watch, call: Pass, failed: bool) -> None:
        """The pass has run: has anything risen?"""
        token, leaves = self._token, self._leaves
        self._token, self._leaves = None, []
        self._look_at = _traits.counter() + self._nodes
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
            with _traits.without_modes():
                self._look(record, line, call, frames, again=again and not look)

    def _mark_gradients(self, token: _Token, leaves: list[Tensor], call: Pass) -> None:
        """Leave the pass's token on the graphs that it left in `.grad`, which lead to those of earlier passes."""
        key, tags = self._key, _traits.tags
        with _traits.without_modes():
            written = [leaf for leaf in leaves if _has_graph(leaf)]
            for leaf in written:
                self._written[id(leaf)] = (weakref.ref(leaf), call)
            stack: list[Node] = [leaf.grad.grad_fn for leaf in written if leaf.grad is not None]
        while stack:
            node = stack.pop()
            if node.__class__ is not _nodes.ACCUMULATE and key not in tags(node):
                tags(node)[key] = token
                stack += _traits.children(node)

    def _look(self, record: Watch, line: _Line, call: Pass, frames: list[FrameType], *, again: bool) -> None:
        """Who holds it?"""
        names = Names(frames)
        if again:
            holder = _holders.handed_on(names, frames, record, range(line.first.place, line.last.place))
            if holder is not None:
                self._grown[call.path, "again"] = Grown("again", holder, call)
            return
        wanted = {token for ref in line.alive.values() if (token := ref()) is not None}
        holder = _holders.of(names, record, lambda node: _traits.tags(node).get(self._key), wanted)
        if holder is not None and holder.iterations * 2 > len(wanted):  # else several hold parts of it
            kind = "kept" if call.retained else "spent"
            if holder.variable.endswith(".grad"):
                kind = "gradient"
            self._grown[call.path, "held"] = Grown(kind, holder, call)
            return
        cycles = {call for ref, call in self._written.values() if (leaf := ref()) is not None and _has_graph(leaf)}
        if len(cycles) > RISES:  # leaves of so many passes: not those of one model
            latest = max(cycles, key=lambda call: call.number)
            self._grown[call.path, "held"] = Grown("cycle", Holder("", None, len(cycles), 0), latest)

    # --- operations ---------------------------------------------------------------------------------------------------

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """Many nodes were made, and no pass has come: do they pile up?"""
        if _traits.counter() < self._look_at:
            return
        self._nodes *= 2
        self._look_at = _traits.counter() + self._nodes
        from hodiff.graph import _watch

        record = _watch.recording()
        if record is None:
            return
        with _traits.without_modes():
            frames = list(user_frames(frame))
            for holder, nodes in _holders.piling_up(Names(frames), frames, record, self._key):
                token = _Token()
                for node in nodes:
                    _traits.tags(node)[self._unused_key] = token
                self._unused[holder.variable] = (token, Grown("unused", holder))

    def cut(self, lost: Any, sources: Any) -> None:
        """Nothing that grows."""

    # --- the end ------------------------------------------------------------------------------------------------------

    def found(self, *, ended: bool = True) -> list[Grown]:
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
