"""A failing pass, the facts known of it, and the parts of an explanation."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _inspect, _saved, _source
from hodiff.graph._classes import CLASSES, PAGE
from hodiff.graph._names import TensorNames
from hodiff.graph._record import NOTHING, Pass, Record, as_list, roots_of, starts_of
from hodiff.graph._source import Line, Path, line_of, lines_of, quoted

TITLE = "hodiff: why this"
LIKELY = "nothing recorded: `hodiff explain SCRIPT`, or hodiff.graph.watch(), names the lines"
LINES = 21
"""Printed lines of an explanation, at most."""


class Fact(NamedTuple):
    """One fact about a failure.

    Attributes:
        kind: `no graph`, `cut`, `behind`, `frozen`, `off since`, `left`, `part`, `made`, `called`,
            `freed by`, `kept by`, `changed`, `saved`, `in graph`, `unused`, `no grad`, `read`,
            `refused`, `lacks`, `shape`, `failed`.
        name: The variable that it is about, or the function; empty if none is known.
        line: The line; None if it is of none, or was not seen.
        text: More words.
        leaves: The names of the leaves concerned: those behind a cut, those below a part.
        owners: The optimizers that step any of these leaves.
        stepped: How many of them they step: the first.
    """

    kind: str
    name: str = ""
    line: Line | None = None
    text: str = ""
    leaves: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    stepped: int = 0

    def __str__(self) -> str:
        label = f"{self.kind:<12} "
        name = f"`{self.name}`" if self.name else ""
        said = ": ".join(filter(None, (name, self.text)))
        if self.leaves:
            own = self.leaves[: self.stepped]
            others = self.leaves[self.stepped :]
            parts = [f"{listed(own)} (stepped by {listed(self.owners)})"] if own else []
            parts += [f"{listed(others)} (in no live optimizer)"] if others else []
            behind = "behind it " * (self.line is not None) + ", ".join(parts)
            said = "; ".join(filter(None, (said, behind)))
        indent = " " * len(label)
        if self.line is None:
            return textwrap.fill(said, COLUMNS - 2, initial_indent=label, subsequent_indent=indent)
        place = label + quoted(self.line)
        if not said or len(place) + len(said) + 7 <= COLUMNS:
            return f"{place}   ({said})" if said else place
        width = COLUMNS - 2
        said = textwrap.fill(f"({said})", width, initial_indent=indent, subsequent_indent=indent)
        return f"{place}\n{said}"


def listed(names: Sequence[str]) -> str:
    """Some names for a sentence."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:SHOWN]) + more


SHOWN = 6


@dataclass(frozen=True)
class Explanation:
    """Why a pass failed: facts, and what helps with failures of their class; it prints as a few
    lines.

    Attributes:
        call: What failed: `Tensor.backward`, `autograd.backward`, `autograd.grad`, an operation.
        cause: The name of the class of the failure, a section of docs/explain/failures.md.
        facts: What was recorded, or seen.
        variable: The variable concerned; empty if none was found.
        certain: Whether the class is told by a record, or by the error alone. Without a record what
            is said of a freed graph, or a cut one, is of its nodes and variables alone.
        watched: Whether there was a record at all.
        more: What helps with this very operation.
    """

    call: str
    cause: str
    facts: tuple[Fact, ...] = ()
    variable: str = ""
    certain: bool = True
    watched: bool = False
    more: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why passes of this class fail."""
        return CLASSES[self.cause].what

    @property
    def helps(self) -> tuple[str, ...]:
        """Advice for failures of this class."""
        return (*self.more, *CLASSES[self.cause].helps)

    def line(self, *kinds: str) -> Line | None:
        """The line of the first fact of some kinds."""
        return next(
            (fact.line for fact in self.facts if fact.kind in kinds and fact.line is not None), None
        )

    def __str__(self) -> str:
        likely = "" if self.certain or self.watched else f" ({LIKELY})"
        return f"{TITLE} {self.call} failed{likely}\n\n{self.body}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text of print(), for IPython and Jupyter."""
        printer.text(str(self))

    @property
    def body(self) -> str:
        """The lines below the title."""
        advice = [("helps", help) for help in self.helps]
        section = self.cause.lower().replace(" ", "-")
        return body(
            self.facts,
            f"{self.cause}: {self.reason}",
            [*advice, ("more", f"{PAGE}#{section}")],
        )


def body(facts: Iterable[object], reason: str = "", advice: Iterable[tuple[str, str]] = ()) -> str:
    """The lines of an explanation: facts, the reason, advice with its labels."""
    last: list[str] = []
    for label, text in [("=>", reason), *advice] if reason else advice:
        before = f"    {label} " if label == "=>" else f"    {label}: "
        last += textwrap.wrap(
            text, COLUMNS, initial_indent=before, subsequent_indent=" " * len(before)
        )
    lines = [f"  {line}" for fact in facts if (said := str(fact)) for line in said.split("\n")]
    room = max(LINES - 2 - len(last), MOST)  # below the title and an empty line
    if len(lines) > room:  # the failing call comes last
        lines[room - 2 : -1] = [f"  ... {len(lines) - room + 1} more"]
    return "\n".join(
        line if len(line) <= COLUMNS else line[: COLUMNS - 4] + " ..." for line in lines + last
    )


MOST = 6
COLUMNS = 120


def callers(path: Path, known: Sequence[Line | None]) -> list[Fact]:
    """The calls that led to a line: the nearest caller and the outermost,
    but for those that are known.
    """
    lines = [line for line in lines_of(path)[1:] if line not in known]
    return [Fact("called", "", line) for line in dict.fromkeys([*lines[:1], *lines[-1:]])]


def fact_of_pass(kind: str, call: Pass) -> Fact:
    """A pass, by its line and its number there."""
    number = f"call #{call.repeat} on that line" if call.repeat >= 0 else ""
    return Fact(kind, "", call.stack[0] if call.path else None, number)


@dataclass
class FailedPass:
    """The facts about a failing pass; the modules that tell them read it."""

    error: BaseException
    name: str
    roots: list[Node]
    tensors: list[Tensor]
    inputs: list[Any] | None
    frames: list[FrameType]
    record: Record = NOTHING
    call: Pass | None = None
    outputs: Sequence[Any] = ()
    starts: Sequence[Any] | None = None

    @cached_property
    def names(self) -> TensorNames:
        """The user's variables, by the tensors that they lead to."""
        return TensorNames(self.frames)

    @cached_property
    def graph(self) -> dict[Node, list[Node]]:
        """The nodes below what is differentiated, outputs first,
        with the nodes that each leads to.
        """
        return _nodes.walk(self.roots)

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes that the pass needs."""
        return (
            list(self.graph) if self.inputs is None else _inspect.executed(self.roots, self.inputs)
        )

    @cached_property
    def troubles(self) -> dict[Node, str]:
        """The reason why a node of the pass could fail, for each that could:
        see `_saved.trouble`.
        """
        return {node: trouble for node in self.nodes if (trouble := _saved.trouble(node))}

    def freed(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes among some of the graph that were freed."""
        return [node for node in nodes if self.troubles.get(node) == "freed"]

    @property
    def given(self) -> list[Tensor]:
        """The tensors among its inputs."""
        return [each for each in self.inputs or () if isinstance(each, Tensor)]

    @property
    def path(self) -> Path:
        """The user's frames in which a recorded pass was asked for, the innermost first."""
        return self.call.path if self.call is not None else ()

    @property
    def line(self) -> Line | None:
        """The user's line that failed."""
        return line_of(self.frames[0]) if self.frames else None

    def assigned(self, variable: str) -> Line | None:
        """The line that assigns a variable, in the first frame that has only one."""
        lines = (_source.only_assignment(variable, line_of(frame)) for frame in self.frames)
        return next(filter(None, lines), None)

    @cached_property
    def steppers(self) -> dict[int, list[str]]:
        """The live optimizers that step each leaf, by its identity: their variables, or classes."""
        names: dict[int, list[str]] = {}
        for each in gc.get_objects():
            if issubclass(type(each), torch.optim.Optimizer):
                name = self.names.optimizers.get(id(each), type(each).__name__)
                for leaf in (leaf for group in each.param_groups for leaf in group["params"]):
                    names.setdefault(id(leaf), []).append(name)
        return names

    def owners(self, leaves: Iterable[Tensor]) -> tuple[str, ...]:
        """The optimizers that step any of some leaves, by name."""
        return tuple(
            dict.fromkeys(name for leaf in leaves for name in self.steppers.get(id(leaf), ()))
        )

    def leaf(self, tensor: Tensor) -> str:
        """A leaf for a list: a parameter by the name that its module gives it,
        not a loop or an optimizer.
        """
        steppers = tuple(f"{name}." for name in self.names.optimizers.values())
        paths = self.names.paths.get(id(tensor), [""])
        own = [path for path in paths if not path.startswith(steppers)] or paths
        return max(own, key=lambda path: "." in path) or f"a tensor of shape {tuple(tensor.shape)}"

    def of_leaves(self, fact: Fact, leaves: Iterable[Tensor]) -> Fact:
        """A fact with its leaves, those of an optimizer before the others, and who steps them."""
        given = {id(leaf): leaf for leaf in leaves}
        own = [leaf for key, leaf in given.items() if key in self.steppers]
        others = [leaf for key, leaf in given.items() if key not in self.steppers]
        names = tuple(map(self.leaf, own + others))
        return fact._replace(leaves=names, owners=self.owners(own), stepped=len(own))

    def explanation(self, cause: str, *facts: Fact | None, **parts: Any) -> Explanation:
        """An explanation of this case; what is None, and a line that is not known where it is all,
        is left out.
        """
        watched = self.record is not NOTHING
        known = [fact for fact in facts if fact is not None and any(fact[1:])]
        failed = (
            [] if any(fact.kind == "failed" for fact in known) else [Fact("failed", "", self.line)]
        )
        return Explanation(
            self.name,
            cause,
            (*known, *(fact for fact in failed if fact.line is not None)),
            **{"certain": watched, "watched": watched, **parts},
        )


def asked_for(
    error: BaseException,
    name: str,
    given: dict[str, Any],
    frames: list[FrameType],
    record: Record = NOTHING,
    call: Pass | None = None,
) -> FailedPass:
    """The pass that was asked for with these arguments: what it was to differentiate,
    and by which inputs.
    """
    outputs, inputs = as_list(given.get("tensors")) or [], as_list(given.get("inputs"))
    tensors = [item for item in outputs if isinstance(item, Tensor)]
    starts = starts_of(given)
    return FailedPass(
        error, name, roots_of(given), tensors, inputs, frames, record, call, outputs, starts
    )
