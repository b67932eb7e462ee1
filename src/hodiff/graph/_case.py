"""What a failing pass is, what is known of it, and what an explanation consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hodiff._core._nodes import Node
from hodiff.graph._names import Names
from hodiff.graph._source import Line, line_of

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
        stack: The user's lines, the innermost first.
        retained: Whether it was to keep the graph.
        place: How many nodes had been made before.
        repeat: How many passes the same stack of lines had asked for before; -1 if that was not counted.
    """

    number: int
    name: str
    stack: tuple[Line, ...]
    retained: bool
    place: int
    repeat: int

    def __str__(self) -> str:
        line = self.stack[0] if self.stack else Line("?", 0)
        return f"{line}   {line.text}" + (f"   (call #{self.repeat} on that line)" if self.repeat >= 0 else "")


class Lost(NamedTuple):
    """How a tensor came to have no graph: `detached`, `no_grad`, `gradient`, `constant`, and where."""

    kind: str
    line: Line
    call: str


class Record(Protocol):
    """What a watch can tell of a program."""

    def tag(self, node: Node) -> tuple[Pass, int] | None:
        """The pass that freed a node, and for a leaf the version that it had then."""
        ...

    def made(self, node: Node) -> Line | None:
        """The line that made a node; None if it was not seen."""
        ...

    def ran_again(self, node: Node) -> bool:
        """Whether the line that made a node made others after it."""
        ...

    def lost(self, tensor: Tensor) -> Lost | None:
        """Where a tensor without a graph lost it."""
        ...

    def changed(self, tensor: Tensor) -> Line | None:
        """The line that last changed a tensor's memory in place."""
        ...


TITLE = "hodiff: why this"
LIKELY = "likely; run `hodiff explain SCRIPT` to be sure"


@dataclass(frozen=True)
class Explanation:
    """Why a pass failed; it prints as a few lines.

    Attributes:
        call: What failed: `Tensor.backward`, `autograd.backward`, `autograd.grad`.
        cause: One of `hoisted`, `carried`, `two losses`, `same loss twice`, `cached attribute`,
            `changed in place`, `detached`, `no_grad`, `constant gradient`, `gradient without create_graph`,
            `constant`, `no graph`, `not used`, `no second derivative`, `released`; empty if it could not be told.
        variable: The variable concerned; empty if none was found.
        created: The line that created the shared part, or where the graph was cut or a value changed.
        freed: The line of the call that freed it.
        failed: The line of the call that failed.
        text: The sentences about them.
        reason: The cause, as a sentence.
        fixes: What can be done here.
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
    certain: bool = True
    watched: bool = False

    def __str__(self) -> str:
        likely = "" if self.certain else " (likely)" if self.watched else f" ({LIKELY})"
        return f"{TITLE} {self.call} failed{likely}\n\n{self.body}"

    @property
    def body(self) -> str:
        """The lines below the title."""
        lines = [f"  {line}" for line in self.text]
        if self.reason:
            lines.append(f"    => {self.reason}")
        for number, fix in enumerate(self.fixes, 1):
            first, *rest = fix.split("\n")
            lines += [f"    fix {number}: {first}", *(f"           {line}" for line in rest)]
        return "\n".join(lines)


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
