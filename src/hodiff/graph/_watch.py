"""Recording, while a program runs, what explains a failing backward pass afterwards.

A `TorchFunctionMode` sees each call. Per operation it keeps one number and the user's lines: the place that
the next node of this thread gets, and where it was made. Nothing is attached to tensors or walked in the
forward. Per pass the nodes that variables hold are tagged with the variable, and those that it freed with the
pass, in a dict that the node owns.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self, final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from hodiff._core import _nodes, _settings
from hodiff._core._faults import interrupts
from hodiff._core._nodes import Node
from hodiff._core._settings import Undo, undo_all
from hodiff.errors import GraphError
from hodiff.graph import _explain, _inspect, _marks, _saved
from hodiff.graph._case import PASSES, Change, Lost, Pass
from hodiff.graph._marks import CUT, GRADIENT, INPLACE, PASS, Cuts, NodeTags, tensors_in
from hodiff.graph._names import USERS, Paths, user_frames
from hodiff.graph._source import Line, Path, line_of, lines_of

# --- which of the user's lines made which nodes: by the places that nodes get in the order of creation ----------------


LOG = 200_000
"""Entries of the log; then its older half goes, but for each line's first."""


class Log:
    """Intervals of places, each with the path that ran, by its number; in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._lines: list[int] = []
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, start: int, end: int, line: int) -> None:
        """The nodes `start` ... `end - 1` were made at `line`."""
        if self._lines and self._lines[-1] == line and start >= self._ends[-1]:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)
            self._lines.append(line)
            if len(self._lines) > LOG:
                self._shorten()
        self._last[line] = end

    def line(self, place: int) -> int | None:
        """The line that made the node at a place; None if it was not seen."""
        index = self._index(place)
        return self._lines[index] if index >= 0 and place < self._ends[index] else None

    def ran_again(self, place: int, since: int) -> bool:
        """Whether the line that made the node at a place made others at places from `since` on."""
        index = self._index(place)
        return index >= 0 and self._last[self._lines[index]] > since

    def _index(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def _shorten(self) -> None:
        """Forget the older half, but for the first entry of each line: what is hoisted ran once."""
        half = len(self._lines) // 2
        first = {key: index for index, key in reversed(list(enumerate(self._lines)))}
        keep = [index for index, key in enumerate(self._lines) if index >= half or first[key] == index]
        self._starts = [self._starts[index] for index in keep]
        self._ends = [self._ends[index] for index in keep]
        self._lines = [self._lines[index] for index in keep]


# --- the steps of PyTorch's own optimizers, of which a recorder sees no call, only what they changed ------------------
# A step makes five to fifteen calls per parameter, and an explanation needs none of them: the mode is off the stack for
# as long. It is taken off by the hook that an optimizer calls before a step, and put back when the step has ended in
# whatever way: what the hook returns is held by the frame that called it, and goes with that frame.


class _Away(NamedTuple):
    """While the mode is off the stack: how many others are on it, the leaves with their versions, and the place."""

    depth: int
    leaves: list[tuple[Tensor, int]]
    place: int


class _Step(tuple[Any, Any]):
    """The arguments of a step. When they go, it has ended."""

    back: Callable[[], None]

    def __del__(self) -> None:
        self.back()


@final
class OptimizerSteps:
    """Takes a mode off the stack for each step.

    `place` numbers the line of a frame; `changed` is told which leaves a step changed, and the number of its line.
    """

    def __init__(
        self, mode: TorchFunctionMode, place: Callable[[FrameType], int], changed: Callable[[list[Tensor], int], None]
    ) -> None:
        self._mode = mode
        self._place = place
        self._changed = changed
        self._away: _Away | None = None
        self._thread = 0

    def enter(self) -> None:
        """The mode was pushed by this thread."""
        self._thread = threading.get_ident()
        register_optimizer_step_pre_hook(self._before)

    def leave(self) -> None:
        """The mode is to be popped."""
        self.settle()
        hooks = _saved.hooks_before_steps()
        for key, hook in list(hooks.items()):  # in one step of the interpreter: other threads register theirs
            if getattr(hook, "__self__", None) is self:
                del hooks[key]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        self._back()  # from a step that raised, if someone still holds its error
        given = (*args[1:], *kwargs.values())  # a closure asks for passes
        if any(value is not None for value in given) or not _is_plain(optimizer):
            return None
        if any(
            not isinstance(getattr(hook, "__self__", None), OptimizerSteps) for hook in _saved.step_hooks(optimizer)
        ):
            return None
        if not _saved.innermost(self._mode):
            return None
        TorchFunctionMode.__exit__(self._mode, None, None, None)
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        versions = [(leaf, _saved.version(leaf)) for leaf in leaves]
        self._away = _Away(_saved.modes(), versions, self._place(sys._getframe(1)))
        step = _Step((args, kwargs))
        step.back = self._back
        return step

    def _back(self) -> None:
        """The step has ended: note what it changed, and see the calls again."""
        away = self._away
        if away is None or threading.get_ident() != self._thread or _saved.modes() != away.depth:
            return
        self.settle()
        TorchFunctionMode.__enter__(self._mode)

    def settle(self) -> None:
        """Note what a step changed that had not ended."""
        away, self._away = self._away, None
        if away is not None:
            self._changed([leaf for leaf, before in away.leaves if _saved.version(leaf) != before], away.place)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is PyTorch's own, and makes no graph."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not any(group.get("differentiable") for group in optimizer.param_groups)


# --- the recorder -----------------------------------------------------------------------------------------------------


counter, is_dynamo_compiling = _saved.counter, torch.compiler.is_dynamo_compiling


class _Recording(threading.local):
    """The watches that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.here: list[Watch] = []


_recording = _Recording()


def recording() -> Watch | None:
    """The innermost watch around this code."""
    return _recording.here[-1] if _recording.here else None


class OperationListener(Protocol):
    """A listener that wants to know of each operation under a watch."""

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """`func` was called with `arguments` (args and kwargs) from `frame`, and gave `result`."""
        ...

    def cut(self, lost: Lost, sources: Any) -> None:
        """The graph of `sources` ended at a line."""
        ...


class PassListener(Protocol):
    """A listener that wants to know of each backward pass under a watch."""

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """A pass will run these nodes."""
        ...

    def after(self, record: Watch, call: Pass, failed: bool) -> None:
        """The pass has run, or failed; `record` is the watch that saw it."""
        ...


@final
class Watch(TorchFunctionMode):
    """The recorder that `watch()` gives; `.passes` lists the backward passes seen.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hodiff.graph.watch() as record:
        ...     x.square().sum().backward()
        >>> [call.name for call in record.passes]
        ['Tensor.backward']
    """

    def __init__(self, *, operations: Sequence[OperationListener] = (), of_passes: Sequence[PassListener] = ()) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.tags = NodeTags(self.passes)
        self.cuts = Cuts(self._path, self._tell)
        self._paths = Paths()
        self._operations = operations
        self._of_passes = of_passes
        self._log = Log()
        self._kinds: dict[Any, int] = {}
        self._changed: dict[int, tuple[int, int, str, int, bool]] = {}
        self._changes = 0
        self._once: dict[tuple[str, Line | None], None] = {}
        self._read: dict[int, int] = {}  # the gradients that the user read, and how many passes there had been
        self._repeats: dict[int, int] = {}
        self._entered: FrameType | None = None
        self._undo: Undo = []
        self._steps = OptimizerSteps(self, self._place, self._stepped)

    def __init_subclass__(cls) -> None:  # its frames would pass for the user's
        raise TypeError("hodiff.graph.Watch cannot be subclassed; hold one, and read its .passes.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied, or pickled."""
        raise GraphError(
            "a Watch cannot be copied or pickled: it follows graphs of this process; keep what is needed of .passes."
        )

    def __enter__(self) -> Self:
        self._entered = next(user_frames(sys._getframe(1)), None)
        try:
            self._undo += [self._forget, partial(_settings.take_off, self), self._steps.leave]
            _recording.here.append(self)
            super().__enter__()
            self._steps.enter()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            self._steps.settle()
            if isinstance(exc[1], RuntimeError):
                with contextlib.suppress(Exception):  # an explanation must not hide what it explains
                    _explain.left(exc[1], self)
        finally:
            self.close()

    def close(self) -> None:
        """Record nothing more; it may be run again."""
        undo_all(self._undo)

    def _forget(self) -> None:
        if self in _recording.here:
            _recording.here.remove(self)
        self._entered = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, and note what it did."""
        # Dynamo would trace what follows into the graph, wrongly; what has ended, an interrupted PyTorch may put back.
        if is_dynamo_compiling() or not self._undo:
            return func(*args, **(kwargs or {}))
        # An optimizer makes hundreds of these calls in a step, most of them plain ones.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _marks.kind_of(func)
        frame = sys._getframe(1)  # the one place that knows how far away the caller is
        if kind <= CUT:
            result = self._operate(kind, func, args, kwargs, frame)
        elif kind == PASS:
            result = self._run_pass(func, args, kwargs or {}, frame)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if kind == GRADIENT and USERS[frame.f_code.co_filename]:
                self._note_gradient(result, frame)
        for listener in self._operations:
            listener.called(func, (args, kwargs or {}), result, frame)
        return result

    def _operate(self, kind: int, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """Run what may make nodes, change a tensor, or end a graph."""
        before = counter()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            self._refused(error, func, (args, kwargs or {}), frame)
            raise
        after = counter()
        if after != before:
            self._log.add(before, after, self._paths.number(frame, self._entered))
        elif kind != INPLACE and (isinstance(result, (Tensor, tuple)) or kind == CUT) and _has_no_graph(result):
            self.cuts.note(func, kind, (args, kwargs or {}), result, frame)
        if args and (kind == INPLACE or (kwargs and kwargs.get("inplace"))):
            self._note_change(func, args[0], frame)
        return result

    def _place(self, frame: FrameType) -> int:
        """By which of the user's lines the code of a frame runs: the number of the path."""
        return self._paths.number(frame, self._entered)

    def _path(self, frame: FrameType) -> Path:
        return self._paths[self._place(frame)]

    def _tell(self, lost: Lost, sources: Any) -> None:
        for listener in self._operations:
            listener.cut(lost, sources)

    def _refused(self, error: RuntimeError, func: Any, arguments: Any, frame: FrameType) -> None:
        """PyTorch refused an operation: if that is about gradients, say why."""
        try:
            path = self._path(frame)
            explained = _explain.of_operation(error, func, arguments, lines_of(path), list(user_frames(frame)), self)
        except Exception as other:  # an explanation must not hide what it explains
            if interrupts(other):
                raise
            return
        if explained is not None:
            _explain.attach(error, explained)

    def _note_gradient(self, gradient: Any, frame: FrameType) -> None:
        """`x.grad`: of interest where the user reads it; an optimizer does so all the time."""
        if isinstance(gradient, Tensor):
            self._read[id(gradient)] = len(self.passes)
            if not gradient.requires_grad:
                self.cuts.remember(gradient, Lost("gradient", line_of(frame), "grad"))

    def _note_change(self, func: Any, what: Any, frame: FrameType) -> None:
        one = isinstance(what, Tensor)
        view = one and _saved.is_view(what)
        self._note_changes([what] if one else tensors_in(what), getattr(func, "__name__", ""), self._place(frame), view)

    def _note_changes(self, tensors: list[Tensor], name: str, place: int, view: bool) -> None:
        self._changes += 1
        change = place, len(self.passes), name, self._changes, view
        for tensor in tensors:
            self._changed[_saved.memory(tensor)] = change

    def _stepped(self, leaves: list[Tensor], place: int) -> None:
        self._note_changes(leaves, "step", place, view=False)

    def changed(self, tensor: Tensor) -> Change | None:
        """What last changed a tensor's memory in place."""
        change = self._changed.get(_saved.memory(tensor))
        return Change(self._paths[change[0]], *change[1:]) if change is not None else None

    def once(self) -> Sequence[tuple[str, Line | None]]:
        """The Functions that forbid a second derivative and were differentiated with create_graph: names, lines."""
        return list(self._once)

    def _note_once(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            for child in (node, *_saved.children(node)):
                function = _nodes.function_of(type(child)) if _saved.is_function(child) else None
                if function is not None and _nodes.is_once_differentiable(function) and child is not node:
                    self._once[function.__name__, self.made(node)] = None

    def path(self, node: Node) -> Path:
        """The user's frames in which a node was made, the innermost first; empty if it was not seen."""
        number = self._log.line(_saved.sequence(node)) if _saved.sequences_work() else None
        return () if number is None else self._paths[number]

    def made(self, node: Node) -> Line | None:
        """The line that made a node; None if it was not seen."""
        path = self.path(node)
        return path[0].line if path else None

    def ran_again(self, node: Node, since: Pass) -> bool:
        """Whether the lines that made a node made others since a pass."""
        return self._log.ran_again(_saved.sequence(node), since.place)

    def passes_since(self, call: Pass) -> list[Pass]:
        """The passes that were asked for after one."""
        return self.passes[call.number + 1 :]

    def read_since(self, call: Pass) -> bool:
        """Whether the user has read some `.grad` since a pass."""
        return any(number > call.number for number in self._read.values())

    def _run_pass(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        name, names = PASSES[func]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        roots, inputs = _marks.roots_of(given), _marks.as_list(given.get("inputs"))
        create = bool(given.get("create_graph"))
        retain = create if given.get("retain_graph") is None else bool(given["retain_graph"])
        place = self._place(frame)
        path = self._paths[place]
        before = counter()
        repeat = self._repeats[place] = self._repeats.get(place, -1) + 1
        call = Pass(len(self.passes), name, path, retain, before, repeat, create)
        self.passes.append(call)
        for listener in self._of_passes:
            listener.before(call, _inspect.executed(roots, inputs))
        if create:
            self._note_once(_inspect.executed(roots, inputs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._failed(error, call, roots, inputs, frame)
            raise
        after = counter()
        if after != before:
            self._log.add(before, after, place)
        if not call.retained:
            self.tags.freed(call, _inspect.executed(roots, inputs))
        elif name != "autograd.grad":  # which writes no `.grad`
            self.tags.reached(call, _inspect.executed(roots, inputs))
        if not (call.retained and create):  # a kept graph may be met again when what it needs has changed
            self.tags.name(frame)
        for listener in self._of_passes:
            listener.after(self, call, failed=False)
        if isinstance(result, tuple) and path:
            for tensor in result:
                if isinstance(tensor, Tensor) and not tensor.requires_grad:
                    self.cuts.cut(
                        tensor, Lost("constant gradient" if create else "gradient", call.stack[0], name), args
                    )
        return result

    def _failed(
        self, error: Exception, call: Pass, roots: list[Node], inputs: list[Any] | None, frame: FrameType
    ) -> None:
        """Explain, and then tag the nodes that the failing pass freed on its way."""
        with _inspect.unchanging():
            try:
                explained = _explain.of_pass(error, call, roots, inputs, list(user_frames(frame)), self)
            except Exception as other:  # an explanation must not hide what it explains
                if interrupts(other):
                    raise
                explained = None
            if explained is not None:
                _explain.attach(error, explained)
            graph = _inspect.below(roots)
            self.tags.freed(call, self.tags.spent({node: graph[node] for node in _inspect.executed(roots, inputs)}))
        for listener in self._of_passes:
            listener.after(self, call, failed=True)


def _has_no_graph(result: Any) -> bool:
    return not isinstance(result, Tensor) or not result.requires_grad


def watch() -> Watch:
    """A context in which a failing backward pass says why: the variable, the lines, the cause, the fixes.

    The explanation is a note of the exception (`exc.__notes__`), which tracebacks print. Numbers, errors
    and graphs are those of the same program without the context; it concerns the thread that enters it.
    What PyTorch warns of meanwhile is shown as of a line in hodiff, which calls PyTorch then, and once for all
    of your lines; `hodiff explain` shows yours.

    Returns:
        A context manager; entered, it gives the recorder, whose `.passes` lists the passes seen.

    Cost:
        Some 10 µs per operation: 1.1 times the time of plain training for a transformer, 1.25 times for an MLP of
        small layers, where a mode that does nothing costs 1.12. No pass, and no memory of tensors: one number and
        one line per operation, one small dict per node that a pass freed.

    Examples:
        >>> import torch, hodiff
        >>> a = torch.rand(4, requires_grad=True)
        >>> with hodiff.graph.watch():
        ...     b = a**2
        ...     b.mean().backward()
        ...     try:
        ...         b.sum().backward()
        ...     except RuntimeError as error:
        ...         print(error.__notes__[0].splitlines()[0])
        hodiff: why this Tensor.backward failed
    """
    return Watch()
