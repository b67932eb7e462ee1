"""Recording, while a program runs, what explains a failing backward pass afterwards.

A `TorchFunctionMode` sees each call. Per operation it keeps one number and the user's lines: the
place that the next node of this thread gets, and where it was made. Nothing is attached to tensors
in the forward; of those without a graph it is kept what made them. A graph is walked where it ends.
Per pass the nodes that variables hold are tagged with the variable, and those that it freed with
the pass, in a dict that the node owns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from hodiff._core import _settings
from hodiff._core._nodes import Node
from hodiff._core._settings import Undo
from hodiff.errors import GraphError
from hodiff.graph import _explain, _inspect, _record, _saved
from hodiff.graph._case import Explanation, FailedPass, asked_for
from hodiff.graph._names import USERS, marked, user_frames
from hodiff.graph._record import (
    GRADIENT,
    INPLACE,
    MODE,
    NOBODY,
    NOTHING,
    OPERATION,
    PASS,
    PASSES,
    SWITCH,
    Listener,
    Pass,
    Record,
    Switch,
)
from hodiff.graph._source import Line, quoted

# --- the steps of PyTorch's own optimizers, of which a recorder sees no call, only what they
# changed A step makes five to fifteen calls per parameter, and an explanation needs none of them:
# the mode is off the stack for as long. It is taken off by the hook that an optimizer calls before
# a step, and put back when the step has ended in whatever way: what the hook returns is held by the
# frame that called it, and goes with that frame.


class _Away(NamedTuple):
    """A time in which the mode is off the stack: the number of others on it,
    the leaves with their versions, the place.
    """

    depth: int
    leaves: list[tuple[Tensor, int]]
    place: int
    before: int


class _Step(tuple[Any, Any]):
    """The arguments of a step. When they go, it has ended."""

    back: Callable[[], None]

    def __del__(self) -> None:
        self.back()


@final
class OptimizerSteps:
    """Takes a watch off the stack for each step, and tells it which leaves that changed."""

    def __init__(self, watch: WatchMode) -> None:
        self._watch = watch
        self._away: _Away | None = None
        self._thread = 0

    def enter(self) -> None:
        """The mode was pushed by this thread."""
        self._thread = threading.get_ident()
        register_optimizer_step_pre_hook(self._before)

    def leave(self) -> None:
        """The mode is to be popped."""
        self.settle()
        hooks = _saved.hooks_before_steps
        # in one step of the interpreter: other threads register theirs
        for key, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is self:
                del hooks[key]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        self._watch.listener.stepping(optimizer)
        self._back()  # from a step that raised, if someone still holds its error
        # which ask for passes
        closures = [value for value in (*args[1:], *kwargs.values()) if value is not None]
        hooks = [
            hook
            for hook in _saved.step_hooks(optimizer)
            if not isinstance(getattr(hook, "__self__", None), OptimizerSteps)
        ]
        modes = _settings.those_on(TorchFunctionMode)
        if closures or hooks or not _is_plain(optimizer) or modes[-1:] != [self._watch]:
            return None
        TorchFunctionMode.__exit__(self._watch, None, None, None)
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        versions = [(leaf, _saved.version(leaf)) for leaf in leaves]
        place = self._watch.place(sys._getframe(1))
        self._away = _Away(len(modes) - 1, versions, place, counter())
        step = _Step((args, kwargs))
        step.back = self._back
        return step

    def _back(self) -> None:
        """The step has ended: note what it changed, and see the calls again."""
        away = self._away
        depth = len(_settings.those_on(TorchFunctionMode))
        if away is None or threading.get_ident() != self._thread or depth != away.depth:
            return
        self.settle()
        TorchFunctionMode.__enter__(self._watch)

    def settle(self) -> None:
        """Note what a step changed that had not ended."""
        away, self._away = self._away, None
        if away is not None:
            changed = [leaf for leaf, before in away.leaves if _saved.version(leaf) != before]
            self._watch.note_change("step", changed, away.place, away.before)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is PyTorch's own, and makes no graph."""
    return type(optimizer).__module__.startswith("torch.optim.") and not any(
        group.get("differentiable") for group in optimizer.param_groups
    )


# --- the recorder ---------------------------------------------------------------------------------


counter, is_dynamo_compiling = _saved.counter, torch.compiler.is_dynamo_compiling


class _Recording(threading.local):
    """The watches that this thread is in, innermost last."""

    here: tuple[WatchMode, ...] = ()


_recording = _Recording()


def recording() -> Record:
    """The record of the innermost watch around this code; an empty one where there is none."""
    return _recording.here[-1] if _recording.here else NOTHING


@final
class WatchMode(Record, TorchFunctionMode):
    """The part of a watch that PyTorch holds.

    It does not hold the watch, which ends with its last holder.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self._kinds: dict[Any, int] = {}
        self._repeats: dict[int, int] = {}
        self._undo: Undo = []
        self._steps = OptimizerSteps(self)

    def begin(self, undo: Undo) -> None:
        """Record until it is undone."""
        self._undo = undo
        self._entered = marked(next(user_frames(sys._getframe(1)), None))
        undo += [self._forget, partial(_settings.take_off, self), self._steps.leave]
        _told.enter(undo)
        if not torch.is_grad_enabled():
            self.cuts.off = Switch(None, "since before the watch")
        _recording.here += (self,)
        super().__enter__()
        self._steps.enter()

    def explain(self, error: BaseException | None) -> None:
        """Add the explanation to an error that leaves the block."""
        self._steps.settle()
        if isinstance(error, Exception):
            _explain.note(error, partial(_explain.left, error, self))

    def _forget(self) -> None:
        _recording.here = tuple(each for each in _recording.here if each is not self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, and note what it did."""
        # Dynamo would trace what follows into the graph, wrongly; what has ended, an interrupted
        # PyTorch may put back.
        if is_dynamo_compiling() or not self._undo:
            return func(*args, **(kwargs or {}))
        # An optimizer makes hundreds of these calls in a step, most of them plain ones.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _record.kind_of(func)
        frame = sys._getframe(1)  # the one place that knows how far away the caller is
        if kind <= SWITCH:
            result = self._operate(kind, func, args, kwargs, frame)
        elif kind == PASS:
            result = self._run_pass(func, args, kwargs or {}, frame)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if kind == GRADIENT and USERS[frame.f_code.co_filename]:
                self._note_gradient(result, args[0], frame)
            elif kind == MODE:
                self.cuts.switched(args[0], frame)
        if self.listener is not NOBODY:
            self.listener.called(func, (args, kwargs or {}), result, frame)
        return result

    def _operate(self, kind: int, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """Run what may make nodes, change a tensor or whether it requires grad, or end a graph."""
        before = counter()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            self._refused(error, func, (args, kwargs or {}), frame)
            raise
        if kind == SWITCH:
            self.note_switch(args[0], frame)
            return result
        after = counter()
        # argsort drops the node that it was given
        if after != before and (result.__class__ is not Tensor or result.requires_grad):
            place = self.paths.number(frame, self._entered)
            self._log.add(before, after, place)
            self.cuts.enter((*args, *kwargs.values()) if kwargs else args, place, result)
        elif isinstance(result, (Tensor, tuple)) or kind != OPERATION:
            made = args[0] if kind == INPLACE and args else result
            if not getattr(made, "requires_grad", False):
                self.cuts.note(func, kind, (args, kwargs or {}), made, frame)
            elif kwargs and isinstance(made, Tensor) and made.is_leaf:
                # as torch.zeros(3, requires_grad=True) makes one
                self.cuts.remember(made, (), self.place(frame), getattr(func, "__name__", ""))
        if args and (kind == INPLACE or (kwargs and kwargs.get("inplace"))):
            self.note_change(getattr(func, "__name__", ""), args[0], self.place(frame), before)
        return result

    def _refused(self, error: RuntimeError, func: Any, arguments: Any, frame: FrameType) -> None:
        """PyTorch refused an operation: if that is about gradients, say why."""

        def explanation() -> Explanation | None:
            path = self.paths[self.place(frame)]
            return _explain.of_operation(
                error, func, arguments, path, list(user_frames(frame)), self
            )

        _explain.note(error, explanation)

    def _run_pass(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        name, names = PASSES[func]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        roots, inputs = _record.roots_of(given), _record.as_list(given.get("inputs"))
        create = bool(given.get("create_graph"))
        retain = create if given.get("retain_graph") is None else bool(given["retain_graph"])
        place = self.place(frame)
        path = self.paths[place]
        before = counter()
        repeat = self._repeats[place] = self._repeats.get(place, -1) + 1
        call = Pass(len(self.passes), name, path, retain, before, repeat, create)
        self.passes.append(call)
        if self.listener is not NOBODY:
            self.listener.before(call, _inspect.executed(roots, inputs))
        if create and path:
            self._note_functions(_inspect.executed(roots, inputs), call.stack[0])
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._failed(asked_for(error, name, given, list(user_frames(frame)), self, call), call)
            raise
        after = counter()
        if after != before:
            self._log.add(before, after, place)
        if not call.retained:
            self.tags.freed(call, _inspect.executed(roots, inputs))
        # a kept graph may be met again when what it needs has changed
        if not (call.retained and create):
            self.tags.name(call, frame)
        self.listener.after(self, call, failed=False)
        if isinstance(result, tuple) and path:
            self._without_graph(call, given, result, place, args)
        return result

    def _without_graph(
        self, call: Pass, given: Any, result: tuple[Any, ...], place: int, args: Any
    ) -> None:
        """Gradients that have no graph of their own."""
        lost = [each for each in result if isinstance(each, Tensor) and not each.requires_grad]
        if not lost:
            return
        function = self.functions.get(call.stack[0], "") if call.built else ""
        kind = "zero derivative" if call.built else "first gradient"
        if function:
            kind = "Function differentiable once"
        graphs = [
            each for each in _record.as_list(given.get("tensors")) or () if isinstance(each, Tensor)
        ]
        cut = self.cuts.cut(
            kind, place, function or call.name, [each for each in graphs if each.requires_grad]
        )
        self.cuts.remember(lost, (cut,), place, call.name)
        self.listener.cut(cut, args)

    def _failed(self, case: FailedPass, call: Pass) -> None:
        """Explain, and then tag the nodes that the failing pass ran: what it freed, and all above,
        which come first.
        """
        _explain.note(case.error, partial(_explain.of_pass, case))
        fresh = {node: case.graph[node] for node in case.nodes if self.tags.tag(node) is None}
        self.tags.freed(call, list(_saved.leading_to(fresh, case.freed(fresh))))
        self.listener.after(self, call, failed=True)


# --- inference mode, which hands no call on: its two methods tell the watches of their thread while
# any watch runs


def _tell_of_inference(restore: Undo) -> None:
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def __enter__(self: Any) -> Any:
        for watch in _recording.here:
            watch.cuts.inferring(not self.mode, "__enter__", self, sys._getframe(1))
        return enter(self)

    def __exit__(self: Any, *exc: Any) -> Any:
        for watch in _recording.here:
            watch.cuts.inferring(True, "__exit__", self, None)
        return leave(self, *exc)

    restore += [
        partial(setattr, kind, "__enter__", enter),
        partial(setattr, kind, "__exit__", leave),
    ]
    kind.__enter__, kind.__exit__ = __enter__, __exit__


_told = _settings.Counted(_tell_of_inference)


class Watch(_settings.Offered[Any]):
    """The context that `watch()` gives; `.passes` lists the backward passes seen.

    It ends with its block, by `close()`, or when nobody holds it any more.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hodiff.graph.watch() as record:
        ...     x.square().sum().backward()
        >>> [call.name for call in record.passes]
        ['Tensor.backward']
    """

    def __init__(self, listener: Listener = NOBODY) -> None:
        self.record = WatchMode(listener)
        super().__init__(self.record.begin, "hodiff.graph.watch")
        self.passes = self.record.passes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied, or pickled."""
        raise GraphError(
            "a Watch cannot be copied or pickled: it follows graphs of this process; "
            "keep what is needed of .passes."
        )

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            self.record.explain(exc[1])
        finally:
            super().__exit__(*exc)


def watch() -> Watch:
    """A context in which a failing backward pass says why: the variable, the lines, the class, what
    helps.

    The explanation is a note of the exception (`exc.__notes__`), which tracebacks print. Numbers,
    errors and graphs are those of the same program without the context; it concerns the thread that
    enters it. What PyTorch warns of meanwhile is shown as of a line in hodiff, which calls PyTorch
    then, and once for all of your lines.

    Returns:
        A context manager; entered, it gives the recorder, whose `.passes` lists the passes seen.

    Cost:
        Some 10 µs per operation: 1.1 times the time of plain training for a transformer, 1.25 times
        for an MLP of small layers, where a mode that does nothing costs 1.12. No pass, and no
        memory of tensors: one number and one line per operation, one small dict per node that a
        pass freed.

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


# --- the lifetime of saved tensors: which line saved them, which pass freed them ------------------


ROWS = 40
_UNKNOWN = Line("(not recorded)", 0)


class Span(NamedTuple):
    """The values that one line saved, from when they were made until a pass freed them.

    Attributes:
        line: The user's line.
        start: The place in the order of creation at which the first of the nodes was made.
        stop: The number of the pass.
        state: `freed`, `held` (the pass retained it) or `missing` (needed, and freed before).
        nodes: How many nodes.
        bytes: The bytes that they had saved, as far as it could be seen.
    """

    line: Line
    start: int
    stop: int
    state: str
    nodes: int
    bytes: int


class _Spans(Listener):
    """Listens to the passes under a watch: what each line saved, until which of them."""

    def __init__(self) -> None:
        self.all_spans: list[Span] = []
        self._sizes: dict[Node, int] = {}

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Note the nodes' values now, before the pass frees them."""
        states = {node: {slot.state for slot in _saved.slots(node)} for node in nodes}
        gone = {_saved.FREED, _saved.RELEASED}
        self._sizes = {
            node: -1 if had & gone else _inspect.saved_bytes([node])
            for node, had in states.items()
            if had
        }

    def after(self, record: Record, call: Pass, failed: bool) -> None:
        """Note the values that the pass freed or kept; where it failed,
        those freed on its way and those missing.
        """
        sizes, self._sizes = self._sizes, {}  # nodes are not kept beyond the pass
        if not failed:
            self._collect(record, call, "held" if call.retained else "freed", sizes)
            return
        ran = {
            node: size
            for node, size in sizes.items()
            if size >= 0 and _saved.trouble(node) == "freed"
        }
        self._collect(record, call, "freed", ran)
        self._collect(
            record, call, "missing", {node: 0 for node, size in sizes.items() if size < 0}
        )

    def _collect(self, record: Record, call: Pass, state: str, sizes: dict[Node, int]) -> None:
        rows: dict[Line, list[Node]] = {}
        for node in sizes:
            rows.setdefault(record.made(node) or _UNKNOWN, []).append(node)
        for line, nodes in rows.items():
            start = min(call.place, *map(_saved.sequence, nodes))
            size = sum(max(sizes[node], 0) for node in nodes)
            self.all_spans.append(Span(line, start, call.number, state, len(nodes), size))


class Lifetime(Watch):
    """A watch that also notes what each line saved, and until when; `str()` is a table.

    Attributes:
        spans: What each line saved, until which pass.
        passes: The backward passes seen.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hodiff.graph.lifetime() as record:
        ...     x.square().sum().backward()
        >>> [(span.state, span.nodes) for span in record.spans]
        [('freed', 1)]
    """

    def __init__(self) -> None:
        recorder = _Spans()
        super().__init__(recorder)
        self.spans = recorder.all_spans

    def __str__(self) -> str:
        lines = [f"{len(self.passes)} backward passes"]
        lines += [
            f"  pass {call.number}: {call}{'   retained' if call.retained else ''}"
            for call in self.passes[:ROWS]
        ]
        spans = sorted(self.spans, key=lambda span: span.start)
        for line in list(dict.fromkeys(span.line for span in spans))[:ROWS]:
            lines.append(f"{quoted(line)}")
            for span in [span for span in self.spans if span.line == line][:ROWS]:
                verb = {"freed": "freed by", "held": "kept by", "missing": "MISSING in"}[span.state]
                size = f", {span.bytes:,} B" if span.state != "missing" else ""
                lines.append(f"    {span.nodes} nodes{size}: {verb} pass {span.stop}")
        return "\n".join(lines)


def lifetime() -> Lifetime:
    """A `watch` that also records what each pass frees, keeps or misses, by the line that saved it.

    Returns:
        A context manager; entered, it gives the recorder. `str(it)` is a table of the lines that
        saved tensors, and `it.spans` holds its records: the line, the pass, what that did with the
        tensors (`freed`, `held`, or `missing`: needed, and freed before), nodes and bytes.

    Cost:
        That of `watch`, and some 10 µs per node in each pass. No memory of tensors, whatever their
        shape.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hodiff.graph.lifetime() as record:
        ...     y = x.exp()
        ...     y.sum().backward(retain_graph=True)
        ...     y.sum().backward()
        >>> [span.state for span in record.spans]
        ['held', 'freed']
    """
    return Lifetime()
