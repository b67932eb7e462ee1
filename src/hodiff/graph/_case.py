"""What a failing pass is, what is known of it, what an explanation consists of."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._faults import interrupts
from hodiff._core._nodes import Node
from hodiff.graph import _inspect, _saved, _source
from hodiff.graph._names import TensorNames
from hodiff.graph._record import NOTHING, Pass, Record
from hodiff.graph._source import Line, Path, line_of, quoted

TITLE = "hodiff: why this"
LIKELY = "likely; run `hodiff explain SCRIPT` to be sure"
LIKELY_IN_CELLS = "likely; run the cells under hodiff.graph.watch() to be sure"


@dataclass(frozen=True)
class Explanation:
    """Why a pass failed; it prints as a few lines.

    Attributes:
        call: What failed: `Tensor.backward`, `autograd.backward`, `autograd.grad`.
        cause: For a graph that was freed `hoisted`, `cached`, `carried`, `stored`, `two losses`,
            `same loss twice` or `released`; `changed in place`; for no graph `detached`, `no_grad`,
            `discrete`, `constant`, `smooth` (a function that PyTorch declares no derivative of),
            `frozen`, `checkpoint`, `inside a Function`, `constant gradient`,
            `gradient without create_graph` or `no graph`; `not used`, `not scalar`,
            `no second derivative`, `recomputed otherwise`, `refused in place`, `inference tensor`,
            `copied`, `read after freeing`; empty if it could not be told.
        variable: The variable concerned; empty if none was found.
        created: The line that created the shared part, or where the graph was cut or a value
            changed.
        freed: The line of the call that freed it.
        failed: The line of the call that failed.
        text: The sentences about them.
        reason: The cause, as a sentence.
        fixes: What can be done: each was checked against what was recorded of this program.
        unknown: What could not be told, and how to find out; what is for the author to decide.
        certain: Whether all of it was recorded. Otherwise it is an inference, and printed as
            likely.
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
        cell = self.failed is not None and _source.number(self.failed.file)
        return LIKELY_IN_CELLS if cell else LIKELY

    @property
    def body(self) -> str:
        """The lines below the title."""
        fixes = [(f"fix {number}", fix) for number, fix in enumerate(self.fixes, 1)]
        open_ends = zip(repeat("not known"), self.unknown, strict=False)
        return body(self.text, self.reason, [*fixes, *open_ends])


def body(text: Iterable[str], reason: str = "", advice: Iterable[tuple[str, str]] = ()) -> str:
    """What is said of a failure, as lines: facts, the reason, advice with its labels."""
    lines = [f"  {line}" for line in text] + ([f"    => {reason}"] if reason else [])
    for label, sentence in advice:
        before = f"    {label}: "
        lines.append(before + sentence.replace("\n", "\n" + " " * len(before)))
        if max(map(len, lines[-1].split("\n"))) > COLUMNS:
            wrapped = _wrapped(sentence, COLUMNS - len(before))
            lines[-1] = before + ("\n" + " " * len(before)).join(wrapped)
    return "\n".join(lines)


COLUMNS = 120


def _wrapped(text: str, columns: int) -> list[str]:
    """A text in lines of so many columns at most; a line that is indented is code, and stays."""
    lines = []
    for line in re.sub(r"(?<![.:;])\n(?=\S)", " ", text).split("\n"):
        code = line.startswith(" ")
        lines += [line] if code else textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False)
    return lines


def labeled(label: str, what: object) -> str:
    """A fact: what happened, and the line, the pass or the name; empty if that is not known."""
    if not what:
        return ""
    return f"{label:<12} {quoted(what) if isinstance(what, Line) else what}"


@dataclass
class FailedPass:
    """What is known about a failing pass; the modules that tell causes apart read it."""

    error: BaseException
    name: str
    roots: list[Node]
    tensors: list[Tensor]
    inputs: list[Any] | None
    frames: list[FrameType]
    recorded: Record | None = None
    call: Pass | None = None

    @cached_property
    def names(self) -> TensorNames:
        """The user's variables, by the tensors that they lead to."""
        return TensorNames(self.frames)

    @cached_property
    def graph(self) -> dict[Node, list[Node]]:
        """The nodes below what is differentiated, outputs first, with the nodes that each leads to."""
        return _nodes.walk(self.roots)

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes that the pass needs."""
        return list(self.graph) if self.inputs is None else _inspect.executed(self.roots, self.inputs)

    @cached_property
    def troubles(self) -> dict[Node, str]:
        """Of each node of the graph that could fail, why: see `_inspect.trouble`."""
        return {node: trouble for node in self.graph if (trouble := _inspect.trouble(node))}

    def having(self, nodes: Iterable[Node], reason: str) -> list[Node]:
        """The nodes among some of the graph that have this trouble."""
        return [node for node in nodes if self.troubles.get(node) == reason]

    def below(self, roots: Iterable[Node]) -> dict[Node, list[Node]]:
        """The part of the graph below some of its nodes."""
        part = {root: self.graph[root] for root in roots}
        reached = list(part)
        for node in reached:  # which grows
            for child in self.graph[node]:
                if child not in part:
                    part[child] = self.graph[child]
                    reached += [child]
        return part

    @property
    def record(self) -> Record:
        """What was recorded; an empty record where nothing was."""
        return self.recorded or NOTHING

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

    def loss(self, unknown: str = "") -> str:
        """What is differentiated, by its variable or as the failing line has it, if either is known."""
        name = self.names.nodes.get(self.roots[0], "") if self.roots else ""
        return name or (_source.target_of(self.line) if self.line is not None else "") or unknown

    def explanation(
        self,
        cause: str,
        *lines: str | tuple[str, object],
        fixes: Sequence[str | None] = (),
        unknown: Sequence[str | None] = (),
        **parts: Any,
    ) -> Explanation:
        """An explanation of this case.

        A line is a text, or a label with a line of the user's, a pass or a text; those that are not
        known are left out, as are fixes and what is not known of them.
        """
        watched = self.recorded is not None
        return Explanation(
            self.name,
            cause,
            failed=self.line,
            text=tuple(line if isinstance(line, str) else f"  {labeled(*line)}" for line in lines if line and line[1]),
            fixes=tuple(filter(None, fixes)),
            unknown=tuple(filter(None, unknown)),
            **{"certain": watched, "watched": watched, **parts},
        )


Words = str | Callable[[Any], str | None]
"""What is said of evidence; None, or nothing, where the evidence does not bear it out."""


@dataclass(frozen=True)
class FailureCause:
    """A cause: its name, its sentence, its fixes and what it leaves open; and of which evidence it is the cause."""

    name: str
    sentence: Words
    fixes: tuple[Words, ...] = ()
    unknown: tuple[Words, ...] = ()
    holds: Callable[[Any], bool] = lambda evidence: True


def said(words: Iterable[Words], evidence: Any) -> tuple[str, ...]:
    """What some words have to say of evidence."""
    texts = []
    for each in words:
        text = each if isinstance(each, str) else each(evidence)
        texts += [text] if text else []
    return tuple(texts)


# --- what a record shows of the part of a graph that one pass freed and another met ---------------


@dataclass(frozen=True)
class SharedValue:
    """One value at which the old part of the graph begins.

    Attributes:
        node: Its node.
        variable: What holds it, or held it after the pass that freed its graph; empty if nothing
            was found.
        code: The code in whose frame that variable can be written.
        kept: Whether a variable holds the very value now.
        replaced: Whether the variable that held it then holds another value now.
        path: The user's frames in which it was made, the innermost first.
        again: Whether the same lines made others since that pass.
    """

    node: Node
    variable: str
    code: CodeType | None
    kept: bool
    replaced: bool
    path: Path
    again: bool

    @property
    def created(self) -> Line | None:
        """The innermost of the user's lines that made it."""
        return self.path[0].line if self.path else None


@dataclass
class Evidence:
    """The facts about a failing pass and the pass that freed what it needs.

    Attributes:
        case: The failing pass.
        record: What was recorded.
        call: The failing pass, in the record.
        freed_by: The pass that freed the part, or kept it, while values that it needs have changed
            since.
        parts: Where the part begins, the named first.
    """

    case: FailedPass
    record: Record
    call: Pass
    freed_by: Pass
    parts: tuple[SharedValue, ...]

    @property
    def first(self) -> SharedValue:
        """The part to speak of."""
        return self.parts[0]

    @cached_property
    def under(self) -> dict[Node, list[Node]]:
        """The nodes of the part, and below it, with the nodes that each leads to."""
        return self.case.below([part.node for part in self.parts])

    @cached_property
    def below(self) -> list[Tensor]:
        """The leaves below the part."""
        return _leaves(self.under)

    @cached_property
    def reached(self) -> list[Tensor]:
        """The leaves that the failing pass would reach if the part were constants."""
        stop = {part.node for part in self.parts}
        return _leaves([node for node in _nodes.walk(self.case.roots, stop) if node not in stop])

    @cached_property
    def silenced(self) -> list[Tensor]:
        """The leaves that would then get no gradient from this pass."""
        reached = set(map(id, self.reached))
        return [leaf for leaf in self.below if id(leaf) not in reached]

    @cached_property
    def changed(self) -> list[Tensor]:
        """The leaves of the failing pass that were changed in place since the part was freed."""
        return [leaf for leaf in _leaves(self.case.nodes) if self.moved(leaf)]

    @cached_property
    def stale(self) -> bool:
        """Whether the failing pass needs a value that was changed in place."""
        return bool(self.case.having(self.case.nodes, "stale"))

    def changed_since(self, tensor: Tensor) -> bool:
        """Whether a line was seen to change a tensor in place since the part was freed."""
        change = self.record.changed(tensor)
        return change is not None and change.passes > self.freed_by.number

    def moved(self, leaf: Tensor) -> bool:
        """Whether a leaf was changed in place since the part was freed."""
        return self.changed_since(leaf) or self.record.tags.moved(leaf, self.freed_by)

    @cached_property
    def border(self) -> list[Node]:
        """The topmost values of the part whose leaves have all changed, where others have not."""
        moved = {id(leaf) for leaf in self.below if self.moved(leaf)}
        under = self.under
        parameters = [node for node in under if (leaf := _saved.leaf(node)) is not None and id(leaf) not in moved]
        if not moved or not parameters:
            return []
        others = _inspect.leading_to(under, parameters)
        tops = _inspect.topmost(self.case.roots, [node for node in under if node not in others])
        computed = all(any(map(_saved.slots, self.case.below([node]))) for node in tops)  # no parameters, as they are
        return tops if computed else []

    @cached_property
    def in_sight(self) -> list[Tensor]:
        """The trainable leaves that variables lead to."""
        return [leaf for leaf in self.case.names.all if leaf.is_leaf and leaf.requires_grad]

    @cached_property
    def stepped(self) -> list[Tensor]:
        """The leaves that the freeing pass reached and that were changed since: what it was taken for."""
        return [leaf for leaf in self.in_sight if self.moved(leaf) and self.was_reached(leaf)]

    def was_reached(self, leaf: Tensor) -> bool:
        """Whether the freeing pass is the last that reached a leaf."""
        return self.record.tags.tag(_nodes.node_of(leaf)) == self.freed_by

    def owned_apart(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether optimizers have all these leaves, and none has of both kinds."""
        owner = self.case.names.trained
        one, two = ({owner.get(id(leaf), -1) for leaf in leaves} for leaves in (some, others))
        return bool(one and two) and -1 not in one | two and not one & two

    @cached_property
    def others(self) -> tuple[list[Tensor], Pass] | None:
        """The leaves of another optimizer that one of the two passes reaches besides those of the part; and which."""
        owner = self.case.names.trained
        below = set(map(id, self.below))
        part = set(map(owner.get, below)) - {None}
        first = [leaf for leaf in self.in_sight if self.was_reached(leaf)]
        for leaves, call in ((self.reached, self.call), (first, self.freed_by)):
            mine = [leaf for leaf in leaves if id(leaf) in owner and id(leaf) not in below]
            if part and mine and not part & {owner[id(leaf)] for leaf in mine}:
                return mine, call
        return None

    @cached_property
    def memo(self) -> str:
        """The function, kept by functools, that made the part; empty if there is none."""
        return "" if self.first.kept else memoised(self.case, self.first.path)

    @cached_property
    def discarded(self) -> bool:
        """Whether the gradients of the leaves below were thrown away unused: neither stepped with nor kept nor read."""
        if self.record.read_since(self.freed_by):
            return False
        return all(not self.moved(leaf) and (leaf.grad is None or not bool(leaf.grad.any())) for leaf in self.below)

    @cached_property
    def added(self) -> bool:
        """Whether the gradients of the freeing pass still lie in `.grad`, unread, for the failing one to add to."""
        if self.record.read_since(self.freed_by):
            return False
        return not self.stepped and all(self.record.tags.untouched(leaf, self.freed_by) for leaf in self.below)

    def name(self, leaf: Tensor) -> str:
        """A leaf for a sentence."""
        return self.case.names.of(leaf) or f"a leaf of shape {tuple(leaf.shape)}"

    def names(self, leaves: Sequence[Tensor]) -> str:
        """Some leaves for a sentence."""
        names = [self.name(leaf) for leaf in leaves]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @property
    def fate(self) -> str:
        """What became of the part's graph."""
        return "kept its graph, of values that have changed since" if self.freed_by.retained else "freed its graph"

    @property
    def code(self) -> str:
        """The part as the user writes it, or in words."""
        return f"`{self.first.variable}`" if self.first.variable else "that value"

    @property
    def variables(self) -> list[str]:
        """The variables of all parts that the same pass freed: what is done with one is to be done with each."""
        return list(dict.fromkeys(part.variable for part in self.parts if part.variable))

    @property
    def all_code(self) -> str:
        """All parts as the user writes them."""
        return ", ".join(f"`{name}`" for name in self.variables) or "that value"

    @property
    def detached(self) -> str:
        """All shared values, detached, as code; of a compiled call in words: which, is not known."""
        if type(self.first.node).__name__ == "CompiledFunctionBackward":
            return "those outputs of the compiled call that it reads, detached"
        return " and ".join(f"{name}.detach()" for name in self.variables) or "it, detached"

    @property
    def because(self) -> str:
        """Why a retained graph would not do; empty if nothing has changed."""
        if not self.changed:
            return ""
        return f"\n({self.names(self.changed)} changed since: a retained graph would be of the old values)"

    def value(self, path: str) -> Any:
        """What a path leads to; None if nothing."""
        try:  # a path of ours, through variables alone
            return eval(path, {"__builtins__": {}}, dict(self.case.names.values))
        except Exception as error:  # a path may lead through the user's `__getitem__`, which may raise anything
            if interrupts(error):
                raise
            return None

    def line_in(self, call: Pass, code: CodeType | None) -> Line | None:
        """The line of a pass in the frame of some code."""
        return next((frame.line for frame in call.path if frame.code is code), None)

    @cached_property
    def pass_lines(self) -> tuple[Line, Line] | None:
        """The lines of the two passes, if they are calls in one frame."""
        mine, theirs = self.call.path, self.freed_by.path
        if not mine or not theirs or mine[0].code is not theirs[0].code or mine[1:] != theirs[1:]:
            return None
        return theirs[0].line, mine[0].line

    @cached_property
    def inside(self) -> bool:
        """Whether the part was made within the loop around the failing pass."""
        made = dict(reversed(self.first.path))
        frame = next((frame for frame in self.call.path if frame.code in made), None)
        return frame is not None and any(_source.within(loop, made[frame.code]) for loop in _source.loops(frame.line))

    @cached_property
    def rounds(self) -> bool:
        """Whether the same call had run before, after the part was made."""
        place = _saved.sequence(self.first.node)
        return any(
            call.path == self.call.path and call.place > place and call.number < self.call.number
            for call in self.record.passes[self.freed_by.number :]
        )

    @cached_property
    def made_before(self) -> bool:
        """Whether all that the failing pass needs had been computed before the pass that freed the part."""
        return all(_saved.sequence(node) < self.freed_by.place for node in self.case.nodes if _saved.leaf(node) is None)

    @cached_property
    def last_pass(self) -> Pass:
        """The last pass before this step used the part: what is written behind it comes before the use."""
        fresh = [_saved.sequence(node) for node in self.case.nodes if _saved.leaf(node) is None]
        use = min([place for place in fresh if place >= self.freed_by.place], default=self.call.place)
        between = self.record.passes[self.freed_by.number : self.call.number]
        return next((call for call in reversed(between) if call.place <= use), self.freed_by)


def _leaves(nodes: Any) -> list[Tensor]:
    return [leaf for node in nodes if (leaf := _saved.leaf(node)) is not None]


PARAMETRIZED = "parametrize.cached()"


def memoised(case: FailedPass, path: Path) -> str:
    """The function behind functools' cache that was running when something was made, and has returned."""
    codes = {frame.code for frame in path} - {frame.code for frame in case.path}
    for value in [*case.names.values.values(), *map(type, case.names.values.values())]:
        for each in (value, *(vars(value).values() if isinstance(value, type) else ())):
            code = getattr(getattr(each, "__wrapped__", None), "__code__", None) if callable(each) else None
            if code in codes and hasattr(each, "cache_clear"):
                return each.__qualname__
    return ""
