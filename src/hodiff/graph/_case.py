"""What a failing pass is, what is known of it, and what an explanation consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hodiff._core._nodes import Node
from hodiff.graph import _cells
from hodiff.graph._line import Line, line_of, lines_of, quoted
from hodiff.graph._names import Held, Names

PASSES: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {
    Tensor.backward: ("Tensor.backward", ("tensors", "grads", "retain_graph", "create_graph", "inputs")),
    torch.autograd.backward: (
        "autograd.backward",
        ("tensors", "grads", "retain_graph", "create_graph", "grad_variables", "inputs"),
    ),
    torch.autograd.grad: ("autograd.grad", ("tensors", "inputs", "grads", "retain_graph", "create_graph")),
}
"""The calls that are backward passes, their names, and what their positional arguments are. None is called here."""


class Pass(NamedTuple):
    """A backward pass that was asked for.

    Attributes:
        number: Its number within the watch.
        name: What was called.
        path: The user's frames, the innermost first: codes and line numbers in turn.
        retained: Whether it was to keep the graph.
        place: How many nodes had been made before.
        repeat: How many passes the same stack of lines had asked for before; -1 if that was not counted.
        built: Whether it was to build a graph of its result (`create_graph=True`).
    """

    number: int
    name: str
    path: tuple[Any, ...]
    retained: bool
    place: int
    repeat: int
    built: bool = False

    @property
    def stack(self) -> tuple[Line, ...]:
        """The user's lines, the innermost first."""
        return lines_of(self.path)

    def __str__(self) -> str:
        line = self.stack[0] if self.path else Line("?", 0)
        return f"{quoted(line)}" + (f"   (call #{self.repeat} on that line)" if self.repeat >= 0 else "")


class Change(NamedTuple):
    """A change in place: where, how many passes had been asked for before, and by which function."""

    path: tuple[Any, ...]
    passes: int
    call: str
    order: int
    view: bool

    @property
    def line(self) -> Line:
        """The user's innermost line."""
        return lines_of(self.path)[0]


class Lost(NamedTuple):
    """How a tensor came to have no graph (the words of `KINDS`), and where."""

    kind: str
    line: Line
    call: str


class Marks(Protocol):
    """What passes left on nodes."""

    def tag(self, node: Node) -> Pass | None:
        """The pass that freed a node, or ran to a leaf."""
        ...

    def held(self, node: Node) -> tuple[Held, ...]:
        """The variables that held a node's output after the last pass that found any."""
        ...

    def held_at(self, node: Node) -> Pass | None:
        """The last pass after which a variable held a node's output."""
        ...

    def version_then(self, leaf_node: Node) -> int:
        """A leaf's version when the pass that is its tag ran."""
        ...

    def given(self, node: Node) -> Pass | None:
        """The pass whose gradient still lies in a leaf's `.grad`, to which at most the failing one has added."""
        ...

    def untouched(self, leaf: Tensor, call: Pass) -> bool:
        """Whether a leaf's `.grad` is as a pass left it."""
        ...


class Endings(Protocol):
    """Where graphs ended."""

    def of(self, tensor: Tensor) -> Lost | None:
        """Where a tensor without a graph lost it."""
        ...

    def beside(self, tensor: Tensor) -> tuple[Lost, ...]:
        """The other places, where what a tensor was computed from lost several graphs."""
        ...

    def stack(self, lost: Lost) -> tuple[Line, ...]:
        """The user's lines, the innermost first, that led to one where gradients were switched off."""
        ...

    def latest(self) -> Lost | None:
        """Where a value last left PyTorch: as a number, or for NumPy."""
        ...


class Record(Protocol):
    """What a watch can tell of a program."""

    @property
    def marks(self) -> Marks:
        """What passes left on nodes."""
        ...

    @property
    def endings(self) -> Endings:
        """Where graphs ended."""
        ...

    def path(self, node: Node) -> tuple[Any, ...]:
        """The user's frames in which a node was made, the innermost first; empty if it was not seen."""
        ...

    def made(self, node: Node) -> Line | None:
        """The line that made a node; None if it was not seen."""
        ...

    def ran_again(self, node: Node, since: Pass) -> bool:
        """Whether the lines that made a node made others since a pass."""
        ...

    def once(self) -> Sequence[tuple[str, Line | None]]:
        """The Functions that forbid a second derivative and were differentiated with create_graph: names, lines."""
        ...

    def changed(self, tensor: Tensor) -> Change | None:
        """What last changed a tensor's memory in place."""
        ...

    def read_since(self, call: Pass) -> bool:
        """Whether the user has read some `.grad` since a pass."""
        ...

    def passes_since(self, call: Pass) -> list[Pass]:
        """The passes that were asked for after one."""
        ...


TITLE = "hodiff: why this"
LIKELY = "likely; run `hodiff explain SCRIPT` to be sure"
LIKELY_IN_CELLS = "likely; run the cells under hodiff.graph.watch() to be sure"


@dataclass(frozen=True)
class Explanation:
    """Why a pass failed; it prints as a few lines.

    Attributes:
        call: What failed: `Tensor.backward`, `autograd.backward`, `autograd.grad`.
        cause: For a graph that was freed `hoisted`, `cached`, `carried`, `stored`, `two losses`, `same loss
            twice` or `released`; `changed in place`; for no graph `detached`, `no_grad`, `discrete`, `constant`,
            `smooth` (a function that PyTorch declares no derivative of),
            `checkpoint`, `inside a Function`, `constant gradient`, `gradient without create_graph` or `no graph`;
            `not used`, `no second derivative`, `recomputed otherwise`, `refused in place`, `inference tensor`,
            `copied`, `read after freeing`; empty if it could not be told.
        variable: The variable concerned; empty if none was found.
        created: The line that created the shared part, or where the graph was cut or a value changed.
        freed: The line of the call that freed it.
        failed: The line of the call that failed.
        text: The sentences about them.
        reason: The cause, as a sentence.
        fixes: What can be done: each was checked against what was recorded of this program.
        unknown: What could not be told, and how to find out; what is for the author to decide.
        certain: Whether all of it was recorded. Otherwise it is an inference, and printed as likely.
        watched: Whether there was a record at all.
    """

    call: str
    cause: str
    variable: str = ""
    created: Line | None = None
    freed: Line | None = None
    failed: Line | None = None
    text: tuple[str, ...] = ()
    reason: str = ""
    fixes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    certain: bool = True
    watched: bool = False

    def __str__(self) -> str:
        likely = ""
        if not self.certain:
            likely = " (likely)" if self.watched else f" ({self._likely})"
        return f"{TITLE} {self.call} failed{likely}\n\n{self.body}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In IPython and Jupyter: what print() shows."""
        printer.text(str(self))

    @property
    def _likely(self) -> str:
        cell = self.failed is not None and _cells.number(self.failed.file)
        return LIKELY_IN_CELLS if cell else LIKELY

    @property
    def body(self) -> str:
        """The lines below the title."""
        lines = [f"  {line}" for line in self.text]
        if self.reason:
            lines.append(f"    => {self.reason}")
        for number, fix in enumerate(self.fixes, 1):
            lines += indented(f"    fix {number}: ", fix)
        for sentence in self.unknown:
            lines += indented("    not known: ", sentence)
        return "\n".join(lines)


def indented(label: str, text: str) -> list[str]:
    """The lines of a text, the first after a label."""
    first, *rest = text.split("\n")
    return [label + first, *(" " * len(label) + line for line in rest)]


@dataclass
class Case:
    """What is known about a failing pass; the modules that tell causes apart read it."""

    error: BaseException
    name: str
    roots: list[Node]
    tensors: list[Tensor]
    inputs: list[Any] | None
    frames: list[FrameType]
    record: Record | None = None
    call: Pass | None = None
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.names = Names(self.frames)

    @property
    def line(self) -> Line | None:
        """The user's line that failed."""
        return line_of(self.frames[0]) if self.frames else None

    def explanation(self, cause: str, **parts: Any) -> Explanation:
        """An explanation of this case."""
        watched = self.record is not None
        return Explanation(self.name, cause, failed=self.line, **{"certain": watched, "watched": watched, **parts})
