"""Recording, while a program runs, what explains a failing backward pass afterwards.

A `TorchFunctionMode` sees each call. Per operation it keeps one number and the user's lines: the place that
the next node of this thread gets, and where it was made. Nothing is attached to tensors or walked in the
forward. Per pass that frees, the nodes that ran are tagged with the pass, and the nodes that variables hold
with the variable, in a dict that the node owns.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _calls, _explain, _predict, _saved
from hodiff.graph._calls import CUT, GRADIENT, INPLACE, OPERATION, PASS, path_of, tensors_in
from hodiff.graph._case import PASSES, Change, Lost, Pass
from hodiff.graph._log import Key, Log
from hodiff.graph._names import KNOWN, Held, Names, is_users, user_frames
from hodiff.graph._source import Line, line_of, lines_of

_serial = itertools.count()

counter, is_dynamo_compiling = _saved.counter, torch.compiler.is_dynamo_compiling

FULL_SEARCHES = 8
"""Passes after which all variables in sight are looked at; later ones look at the nearest only."""
NEAR = 150


class _Recording(threading.local):
    """The watches that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.here: list[Watch] = []


_recording = _Recording()


def recording() -> Watch | None:
    """The innermost watch around this code."""
    return _recording.here[-1] if _recording.here else None


class _Tag(NamedTuple):
    """What a pass leaves on a node: its number; on a leaf also the state of the leaf and of its `.grad`."""

    number: int
    version: int = -1
    grad: int = 0
    grad_version: int = 0


class OperationListener(Protocol):
    """Who wants to know of each operation under a watch."""

    def called(self, func: Any, arguments: Any, result: Any, frame: FrameType) -> None:
        """`func` was called with `arguments` (args and kwargs) from `frame`, and gave `result`."""
        ...

    def cut(self, lost: Lost, sources: Any) -> None:
        """The graph of `sources` ended at a line."""
        ...


class PassListener(Protocol):
    """Who wants to know of each backward pass under a watch."""

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
        self.key = f"hodiff {next(_serial)}"
        self._operations = operations
        self._of_passes = of_passes
        self._log = Log()
        self._paths: dict[Key, Key] = {}  # each once
        self._kinds: dict[Any, int] = {}
        self._lost: dict[int, tuple[Any, Lost]] = {}
        self._off: dict[Key, tuple[str, Line | None]] = {}
        self._changed: dict[int, Change] = {}
        self._changes = 0
        self._latest_cut: Lost | None = None
        self._once: dict[tuple[str, Line | None], None] = {}
        self._read: dict[int, int] = {}  # the gradients that the user read, and how many passes there had been
        self._repeats: dict[Key, int] = {}
        self._entered: FrameType | None = None

    def __init_subclass__(cls) -> None:  # its frames would pass for the user's
        raise TypeError("hodiff.graph.Watch cannot be subclassed; hold one, and read its .passes.")

    def __enter__(self) -> Self:
        _recording.here.append(self)
        self._entered = next(user_frames(sys._getframe(1)), None)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        if isinstance(exc[1], RuntimeError):
            with contextlib.suppress(Exception):  # an explanation must not hide what it explains
                _explain.left(exc[1], self)
        if self in _recording.here:
            _recording.here.remove(self)
        self._entered = None
        super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, and note what it did."""
        if is_dynamo_compiling():  # Dynamo would trace what follows into the graph, wrongly
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(1)  # the one place that knows how far away the caller is
        result = self._run(func, args, kwargs or {}, frame)
        for listener in self._operations:
            listener.called(func, (args, kwargs), result, frame)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        # An optimizer makes hundreds of these calls in a step, hence the plain look.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _calls.kind_of(func)
        if kind > CUT:
            if kind == PASS:
                return self._run_pass(func, args, kwargs, frame)
            result = func(*args, **kwargs) if kwargs else func(*args)
            if kind == GRADIENT and KNOWN.get(frame.f_code) is not False:
                self._note_gradient(result, frame)
            return result
        before = counter()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            self._refused(error, func, (args, kwargs), frame)
            raise
        after = counter()
        if after != before:
            self._log.add(before, after, self._path(frame))
        elif kind != INPLACE and (isinstance(result, Tensor) or kind == CUT) and _has_no_graph(result):
            self._note_lost(func, kind, (args, kwargs), result, frame)
        if args and (kind == INPLACE or (kwargs and kwargs.get("inplace"))):
            self._note_change(func, args[0], frame)
        return result

    def _path(self, frame: FrameType) -> Key:
        path = path_of(frame, self._entered)
        if not path:
            path = (frame.f_code, frame.f_lineno or 0)
        return self._paths.setdefault(path, path)

    def _refused(self, error: RuntimeError, func: Any, arguments: Any, frame: FrameType) -> None:
        """PyTorch refused an operation: if that is about gradients, say why."""
        try:
            path = self._path(frame)
            explained = _explain.of_operation(error, func, arguments, lines_of(path), list(user_frames(frame)), self)
        except Exception:  # an explanation must not hide what it explains
            return
        if explained is not None:
            _explain.attach(error, explained)

    def _note_gradient(self, gradient: Any, frame: FrameType) -> None:
        """`x.grad`: of interest where the user reads it; an optimizer does so all the time."""
        if isinstance(gradient, Tensor) and is_users(frame.f_code):
            self._read[id(gradient)] = len(self.passes)
            if not gradient.requires_grad:
                self._remember(gradient, Lost("gradient", line_of(frame), "grad"))

    def _note_lost(self, func: Any, kind: int, arguments: Any, result: Any, frame: FrameType) -> None:
        """The result has no graph: was one cut here, or before?"""
        name, line = getattr(func, "__name__", ""), None
        if kind == CUT:
            lost = "detached" if name in ("detach", "detach_", "__get__") else "constant"
        else:
            inherited = None
            for tensor in tensors_in(arguments):
                if tensor.requires_grad:
                    lost, line = self._reason(result, frame)
                    break
                inherited = inherited or self._lost.get(id(tensor))
            else:
                if inherited is not None:
                    self._remember(result, inherited[1])
                return
        if kind == OPERATION or arguments[0][0].requires_grad:
            found = Lost(lost, line or lines_of(self._path(frame))[0], name)
            if kind == CUT and name != "__get__":
                self._latest_cut = found
            self._cut(result, found, arguments)

    def _reason(self, result: Any, frame: FrameType) -> tuple[str, Line | None]:
        """Why an operation on tensors with a graph gave one without; and the line, if it is a checkpoint's."""
        if torch.is_grad_enabled():
            return "discrete" if isinstance(result, Tensor) and not result.is_floating_point() else "constant", None
        path = self._path(frame)
        if path not in self._off:
            kind, around = _calls.surroundings(frame)
            user = next(user_frames(around), None) if kind == "checkpoint" else None
            self._off[path] = kind or "no_grad", None if user is None else line_of(user)
        return self._off[path]

    def _cut(self, result: Any, lost: Lost, sources: Any) -> None:
        """Here the graph of `sources` ended: the result, a tensor or a number, is not in it."""
        if isinstance(result, Tensor):
            self._remember(result, lost)
        for listener in self._operations:
            listener.cut(lost, sources)

    def _remember(self, tensor: Tensor, lost: Lost) -> None:
        key, table = id(tensor), self._lost
        table[key] = (weakref.ref(tensor, lambda _: table.pop(key, None)), lost)

    def _note_change(self, func: Any, what: Any, frame: FrameType) -> None:
        self._changes += 1
        tensors = (what,) if isinstance(what, Tensor) else tensors_in(what)
        view = isinstance(what, Tensor) and _saved.is_view(what)
        change = Change(self._path(frame), len(self.passes), getattr(func, "__name__", ""), self._changes, view)
        for tensor in tensors:
            self._changed[_saved.storage(tensor)[0]] = change

    def lost(self, tensor: Tensor) -> Lost | None:
        """Where a tensor without a graph lost it."""
        found = self._lost.get(id(tensor))
        return found[1] if found and found[0]() is tensor else None

    def latest_cut(self) -> Lost | None:
        """Where a value last left PyTorch: as a number, or for NumPy."""
        return self._latest_cut

    def once(self) -> Sequence[tuple[str, Line | None]]:
        """The Functions that forbid a second derivative and were differentiated with create_graph: names, lines."""
        return list(self._once)

    def _note_once(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            for child in (node, *_saved.children(node)):
                function = _nodes.function_of(type(child), child) if _saved.is_function(child) else None
                if function is not None and _nodes.is_once_differentiable(function) and child is not node:
                    self._once[function.__name__, self.made(node)] = None

    def changed(self, tensor: Tensor) -> Change | None:
        """What last changed a tensor's memory in place."""
        return self._changed.get(_saved.storage(tensor)[0])

    def path(self, node: Node) -> Key:
        """The user's frames in which a node was made, the innermost first; empty if it was not seen."""
        return (self._log.line(_saved.sequence(node)) if _saved.sequences_work() else None) or ()

    def made(self, node: Node) -> Line | None:
        """The line that made a node; None if it was not seen."""
        lines = lines_of(self.path(node)[:2])
        return lines[0] if lines else None

    def ran_again(self, node: Node) -> bool:
        """Whether the lines that made a node made others after it."""
        return self._log.ran_again(_saved.sequence(node))

    def passes_since(self, call: Pass) -> list[Pass]:
        """The passes that were asked for after one."""
        return self.passes[call.number + 1 :]

    def untouched(self, leaf: Tensor, call: Pass) -> bool:
        """Whether a leaf's `.grad` is as a pass left it."""
        tag = self._tagged(leaf)
        if tag is None or tag.number != call.number or leaf.grad is None:
            return False
        return (id(leaf.grad), _saved.version(leaf.grad)) == (tag.grad, tag.grad_version)

    def read_since(self, call: Pass) -> bool:
        """Whether the user has read some `.grad` since a pass."""
        return any(number > call.number for number in self._read.values())

    def _tagged(self, leaf: Tensor) -> _Tag | None:
        with _saved.without_modes():
            node = torch.autograd.graph.get_gradient_edge(leaf).node
        return _saved.tags(node).get(self.key)

    def _run_pass(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        name, names = PASSES[func]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        roots, inputs = _calls.roots_of(given), _calls.as_list(given.get("inputs"))
        create = bool(given.get("create_graph"))
        retain = create if given.get("retain_graph") is None else bool(given["retain_graph"])
        path = self._path(frame)
        before = counter()
        repeat = self._repeats[path] = self._repeats.get(path, -1) + 1
        call = Pass(len(self.passes), name, path, retain, before, repeat, create)
        self.passes.append(call)
        for listener in self._of_passes:
            listener.before(call, _predict.executed(roots, inputs))
        if create:
            self._note_once(_predict.executed(roots, inputs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._failed(error, call, roots, inputs, frame)
            raise
        after = counter()
        if after != before:
            self._log.add(before, after, path)
        if not call.retained:
            self._tag(call, _predict.executed(roots, inputs))
            self._name(frame)
        for listener in self._of_passes:
            listener.after(self, call, failed=False)
        if isinstance(result, tuple) and path:
            for tensor in result:
                if isinstance(tensor, Tensor) and not tensor.requires_grad:
                    self._cut(tensor, Lost("constant gradient" if create else "gradient", call.stack[0], name), args)
        return result

    def _tag(self, call: Pass, nodes: Sequence[Node]) -> None:
        """These nodes were freed by a pass."""
        key, inner = self.key, _Tag(call.number)
        for node in nodes:
            leaf = _saved.leaf(node)
            if leaf is None:
                _saved.tags(node)[key] = inner
            else:
                grad = leaf.grad
                state = (0, 0) if grad is None else (id(grad), _saved.version(grad))
                _saved.tags(node)[key] = _Tag(call.number, _saved.version(leaf), *state)

    def _name(self, frame: FrameType) -> None:
        """Note on the nodes that variables hold now which those are: a later step may give the names to others."""
        full = len(self.passes) <= FULL_SEARCHES
        names = Names(list(user_frames(frame)), budget=2000 if full else NEAR)
        key = f"{self.key} held"
        with _saved.without_modes():
            for node, held in names.by_node().items():
                _saved.tags(node)[key] = (len(self.passes) - 1, held)

    def _failed(
        self, error: Exception, call: Pass, roots: list[Node], inputs: list[Any] | None, frame: FrameType
    ) -> None:
        """Explain, and then tag the nodes that the failing pass freed on its way."""
        with _predict.unchanging():
            try:
                explained = _explain.of_pass(error, call, roots, inputs, list(user_frames(frame)), self)
            except Exception:  # an explanation must not hide what it explains
                explained = None
            if explained is not None:
                _explain.attach(error, explained)
            self._tag(call, self._spent(_predict.executed(roots, inputs)))
        for listener in self._of_passes:
            listener.after(self, call, failed=True)

    def _spent(self, nodes: list[Node]) -> list[Node]:
        """Those that a failing pass ran: what it freed, and all above, as a node waits for those."""
        fresh = {node: list(_saved.children(node)) for node in nodes if self.tag(node) is None}
        return list(_nodes.leading_to(fresh, [node for node in fresh if _predict.trouble(node) == "freed"]))

    def tag(self, node: Node) -> Pass | None:
        """The pass that freed a node, or ran to a leaf."""
        found = _saved.tags(node).get(self.key)
        return self.passes[found.number] if found else None

    def held(self, node: Node) -> tuple[Held, ...]:
        """The variables that held a node's output when a pass freed its graph."""
        return _saved.tags(node).get(f"{self.key} held", (0, ()))[1]

    def held_at(self, node: Node) -> Pass | None:
        """The last pass after which a variable held a node's output."""
        found = _saved.tags(node).get(f"{self.key} held")
        return self.passes[found[0]] if found else None

    def version_then(self, leaf_node: Node) -> int:
        """A leaf's version when the pass that is its tag ran."""
        found = _saved.tags(leaf_node).get(self.key)
        return found.version if found else -1


def _has_no_graph(result: Any) -> bool:
    return not isinstance(result, Tensor) or not result.requires_grad


def watch() -> Watch:
    """A context in which a failing backward pass says why: the variable, the lines, the cause, the fixes.

    The explanation is a note of the exception (`exc.__notes__`), which tracebacks print. Numbers, errors
    and graphs are those of the same program without the context; it concerns the thread that enters it.

    Returns:
        A context manager; entered, it gives the recorder, whose `.passes` lists the passes seen.

    Cost:
        Some 10 µs per operation: at most about 1.3 times the time of plain training. No pass, and no memory
        of tensors: one number and one line per operation, one small dict per node that a pass freed.

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
