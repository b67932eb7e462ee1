"""What is said of a program, and whether it is so: laws of lines, names and numbers, and of no wording."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hodiff.graph import Watch, _explain
from hodiff.graph._growth import Growth
from tests.contract.facts.programs import Cut, Program


@dataclass(frozen=True)
class Report:
    """What is said of a program that ran under a watch.

    Attributes:
        program: The program.
        error: What it raised.
        facts: Those of its explanation.
        growth: What the monitor of growth tells at its end.
        scopes: The variables of the program where it raised, the innermost first.
    """

    program: Program
    error: BaseException | None
    facts: tuple[Any, ...]
    growth: Growth
    scopes: tuple[dict[str, Any], ...]

    @property
    def message(self) -> str:
        """PyTorch's."""
        return str(self.error or "")

    @property
    def failed(self) -> int:
        """The number of the program's own line that raised."""
        trace, number = self.error.__traceback__ if self.error is not None else None, 0
        while trace is not None:
            number = trace.tb_lineno if trace.tb_frame.f_code.co_filename.endswith("program.py") else number
            trace = trace.tb_next
        return number

    def tensor(self, path: str) -> Tensor | None:
        """What a variable of the program is: `net[0].weight`, or `net.0.weight`, of a module."""
        root, steps = re.match(r"(\w*)(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
        value = next((scope[root] for scope in self.scopes if root in scope), None)
        for name, key in re.findall(r"\.(\w+)|\[([^]]+)\]", steps):
            if key or name.isdigit():
                value = value[ast.literal_eval(key or name)]
            else:
                value = getattr(value, name, None)
        return value if isinstance(value, Tensor) else None

    def same(self, said: Sequence[str] | frozenset[str]) -> frozenset[int]:
        """Variables by what they are, as one tensor may have several names; what is none is 0."""
        return frozenset(id(tensor) if (tensor := self.tensor(name)) is not None else 0 for name in said)

    def of(self, *kinds: str) -> list[Any]:
        """The facts of some kinds."""
        return [fact for fact in self.facts if fact.kind in kinds]

    def lines(self, *kinds: str) -> set[int]:
        """The lines of the facts of some kinds."""
        return {fact.line.number for fact in self.of(*kinds) if fact.line is not None}

    def number(self, *marks: str) -> set[int]:
        """The lines of some marks."""
        return {self.program.lines[mark] for mark in marks if mark}


def told(program: Program, folder: Path, *, explains: bool = True) -> Report:
    """Run a program under a watch."""
    path = folder / "program.py"
    path.write_text(program.text, "utf-8")
    linecache.checkcache(str(path))
    explained: list[Any] = []

    def note(error: BaseException, explanation: Callable[[], Any]) -> None:
        explained.append(explanation() if explains else None)

    growth = Growth()
    main = ModuleType("__main__")  # of which no variable of this function holds the variables
    raised = None
    with mock.patch.object(_explain, "note", note), torch.enable_grad():
        try:
            with Watch(growth):
                exec(compile(program.text, str(path), "exec"), vars(main))
        except (RuntimeError, AttributeError) as error:
            raised = error
    scopes = [vars(main)]
    trace = raised.__traceback__ if raised is not None else None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            scopes.insert(0, dict(trace.tb_frame.f_locals))
        trace = trace.tb_next
    said = next((each.facts for each in explained if each is not None), ())
    return Report(program, raised, tuple(said), growth, tuple(scopes))


def close(report: Report) -> None:
    """Let go of cycles in `.grad`."""
    for value in [each for scope in report.scopes for each in scope.values()]:
        for tensor in value.parameters() if isinstance(value, nn.Module) else [value]:
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                tensor.grad = None


# --- laws -----------------------------------------------------------------------------------------


def violations(report: Report) -> Iterator[str]:
    """What is said that is not so, and what is so and is not said."""
    program = report.program
    yield from _growth(report)
    if program.family == "growth":
        return
    if not report.facts:
        yield "nothing is said"
        return
    if report.lines("failed") - {report.failed}:
        yield f"failed: {report.lines('failed')}, and it was {report.failed}"
    yield from _owners(report)
    yield from _made(report)
    yield from _FAMILIES[program.family](report)


def _differ(what: str, said: Any, true: Any) -> Iterator[str]:
    if said != true:
        yield f"{what}: said {sorted(said)}, true {sorted(true)}"


def _owners(report: Report) -> Iterator[str]:
    """The optimizers that step the leaves of a fact are those that do."""
    for fact in report.facts:
        leaves = report.same(fact.leaves)
        true = {name for name, owned in report.program.truth.owners if report.same(owned) & leaves}
        yield from _differ(f"owners of {fact.leaves}", set(fact.owners), true)
        stepped = frozenset[int]().union(*(report.same(owned) for _, owned in report.program.truth.owners))
        yield from _differ(f"stepped of {fact.leaves}", report.same(fact.leaves[: fact.stepped]), leaves & stepped)


def _made(report: Report) -> Iterator[str]:
    """A line that made a variable names it, or is of a function of the program."""
    for fact in report.of("made"):
        if fact.line is not None and fact.name:
            text = fact.line.text
            root = re.split(r"[.\[]", fact.name)[0]
            if not text.startswith("return") and not re.search(rf"\b{root}\b", text):
                yield f"made: {fact.name} at {text!r}"


TOLD = 6
"""Cuts of which all are told; of more, the nearest."""


def _cuts(report: Report) -> Iterator[str]:
    """Each cut on the way is named with its line, what is behind it, and who had switched gradients off."""
    first = report.program.truth.cuts
    yield from _of_cuts(report, first)
    if all(cut.left for cut in first) and not report.of("left", "cut"):
        yield "it is not said that a value has left PyTorch"
    owned = frozenset[str]().union(*(owned for _, owned in report.program.truth.owners))
    near = _leaves({cut for cut in first if report.number(cut.mark) <= report.lines("cut", "left")}) & owned
    far, known = (_leaves(_behind(first, known=known)) & owned for known in (False, True))
    if report.of("behind") and (near or not far):
        yield f"behind: the nearest cuts lead to {sorted(near)}, those behind them to {sorted(far)}"
    if not report.of("behind") and known and not _leaves(first) & owned:
        yield "behind: it is not said that the nearest cuts alone lead to nothing that is stepped"


def _behind(first: Iterable[Cut], *, known: bool) -> frozenset[Cut]:
    """The cuts behind some."""
    return frozenset[Cut]().union(*(cut.all(known=known) - {cut} for cut in first))


def _leaves(cuts: Iterable[Cut]) -> frozenset[str]:
    return frozenset[str]().union(*(cut.leaves for cut in cuts))


def _of_cuts(report: Report, first: frozenset[Cut]) -> Iterator[str]:
    """Lines, leaves and switches of the cuts on a way; those behind a value that left PyTorch may be told."""
    cuts = frozenset[Cut]().union(*(cut.all() for cut in first))
    known = frozenset[Cut]().union(*(cut.all(known=True) for cut in first))
    said, off = report.lines("cut", "frozen"), report.lines("off since")
    if len(cuts) <= TOLD:
        yield from _lack("cuts", said, report.number(*(cut.mark for cut in known)))
        yield from _lack("off since", off, report.number(*(cut.off for cut in known)))
    yield from _lack("cuts that are", report.number(*(cut.mark for cut in cuts)), said)
    yield from _lack("switches that are", report.number(*(cut.off for cut in cuts)), off)
    for fact in report.of("left"):
        if fact.line is not None and not re.search("item|tolist|numpy", fact.line.text):
            yield f"left: nothing left PyTorch at {fact.line.text!r}"
    for number in (said | report.lines("left")) & report.number(*(cut.mark for cut in cuts)):
        here = [cut for cut in cuts if report.program.lines[cut.mark] == number]
        facts = [
            fact for fact in report.of("cut", "frozen", "left") if fact.line is not None and fact.line.number == number
        ]
        leaves = frozenset(leaf for fact in facts for leaf in fact.leaves)
        true = frozenset[str]().union(*(cut.leaves for cut in here))
        unknown = not leaves and all(cut.left for cut in here)
        if not unknown and report.same(leaves) != report.same(true):
            yield f"behind line {number}: said {sorted(leaves)}, true {sorted(true)}"


def _lack(what: str, found: set[int], wanted: set[int]) -> Iterator[str]:
    if not wanted <= found:
        yield f"{what}: {sorted(wanted)} are not among {sorted(found)}"


def _turn(fact: Any) -> int | None:
    number = re.search(r"#(\d+)", fact.text)
    return int(number[1]) if number else None


def _shared(report: Report) -> Iterator[str]:
    """Which part was freed, by which pass; what lies below it; what has changed since."""
    truth, lines = report.program.truth, report.program.lines
    named = [fact.name for fact in report.of("part") if fact.name]
    parts = [part for part in truth.parts if part.name in named]
    yield from _differ("parts", set(named), {part.name for part in truth.parts})
    freed = {(lines[part.freed], part.turn) for part in parts}
    said = {(fact.line.number, _turn(fact)) for fact in report.of("freed by", "kept by")}
    yield from _differ("freed by", said, freed)
    yield from _differ("made", report.lines("made"), {lines[part.made] for part in parts} & report.lines("made"))
    if not report.lines("made"):
        yield "no line made the part"
    below = report.same(frozenset(leaf for fact in report.of("below", "behind") for leaf in fact.leaves))
    yield from _differ("below", below, report.same(frozenset[str]().union(*(part.leaves for part in parts))))
    yield from _differ("changed", report.lines("changed"), report.number(truth.stepped))
    moved = report.same(frozenset(leaf for fact in report.of("changed") for leaf in fact.leaves))
    yield from _differ("changed leaves", moved, report.same(truth.moved))
    turns = {_turn(fact) for fact in report.of("failed")}
    yield from _differ("turn", turns, {truth.turn})


def _changed(report: Report) -> Iterator[str]:
    """Which lines changed the value after it was used, and which line used it."""
    truth = report.program.truth
    yield from _differ("changed", report.lines("changed"), report.number(*truth.changed))
    yield from _differ("saved", report.lines("saved"), report.number(truth.saved))
    names = {fact.name for fact in report.of("saved", "changed") if fact.name}
    names |= {leaf for fact in report.of("changed") for leaf in fact.leaves}
    if not names or not report.same(frozenset(names)) <= report.same(truth.variable):
        yield f"what was changed: said {sorted(names)}, true {sorted(truth.variable)}"


def _unused(report: Report) -> Iterator[str]:
    """What the loss does not depend on, and what it does; where what it does not was cut off."""
    truth = report.program.truth
    said = report.same(frozenset(fact.name for fact in report.of("unused")))
    yield from _differ("unused", said, report.same(truth.unused))
    reached = report.same(frozenset(leaf for fact in report.of("in graph") for leaf in fact.leaves))
    yield from _differ("in graph", reached, report.same(truth.reached))
    yield from _of_cuts(report, truth.cuts)
    for fact in report.of("read"):
        text = fact.line.text
        if fact.name not in text and not text.startswith("return"):
            yield f"read: {fact.name} at {text!r}"


def _none(report: Report) -> Iterator[str]:
    """Whose gradient was read and None, where, and what made it if it is no leaf."""
    truth = report.program.truth
    wanted = {"no grad": {report.failed}, "made": report.number(truth.saved)}
    parameter = any(isinstance(report.tensor(name), nn.Parameter) for name in truth.unused)
    if parameter and not report.of("made"):  # by a constructor, of which no record can tell
        del wanted["made"]
    for kind, number in wanted.items():
        yield from _differ(kind, report.lines(kind), number)
        names = frozenset(fact.name for fact in report.of(kind))
        yield from _differ(f"{kind}: whose", report.same(names), report.same(truth.unused))
    yield from _differ("last pass", report.lines("last pass"), report.number(truth.last))
    leaves = frozenset(leaf for fact in report.of("made of") for leaf in fact.leaves)
    yield from _differ("made of", report.same(leaves), report.same(truth.reached))


def _frozen(report: Report) -> Iterator[str]:
    """What is frozen, where it was used, and where it was switched; nothing was cut."""
    cuts = report.program.truth.cuts
    yield from _differ("cuts", report.lines("cut", "left"), set())
    yield from _of_cuts(report, cuts)


_FAMILIES = {
    "cuts": _cuts,
    "frozen": _frozen,
    "shared": _shared,
    "changed": _changed,
    "unused": _unused,
    "none": _none,
}


def _growth(report: Report) -> Iterator[str]:
    """What holds graphs that grow, and what is never trained; of a program that failed, and of a right one, nothing."""
    truth = report.program.truth
    grown = report.growth.growing()
    said = [(each.variable, each.line.number if each.line else 0, each.count) for each in grown]
    true = [(truth.holder, report.program.lines[truth.grows], truth.count)] if truth.holder else []
    if said != true:
        yield f"growth: said {said}, true {true}"
    names = re.findall(r"`([^`]+)`", str(report.growth.untrained).partition("gradient: ")[2])
    if not truth.error:
        yield from _differ("untrained", set(names), truth.untrained)
