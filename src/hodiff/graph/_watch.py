"""Recording, while a program runs, what explains a failing backward pass afterwards.

A `TorchFunctionMode` sees each call. Per operation it keeps one number and one line: the place that the
next node of this thread gets, and the user's line. Nothing is attached to tensors or walked in the
forward. Per pass that frees, the nodes that ran are tagged with the pass, in a dict that the node owns.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol, Self, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _explain, _predict, _saved
from hodiff.graph._case import PASSES, Lost, Pass
from hodiff.graph._log import Key, Log
from hodiff.graph._names import KNOWN, is_users, user_frames
from hodiff.graph._source import Line, line_of

_serial = itertools.count()

counter, is_dynamo_compiling = _saved.counter, torch.compiler.is_dynamo_compiling


_OPERATION, _INPLACE, _CUT, _GRADIENT, _PLAIN, _PASS = range(6)  # what is recorded comes first: see __torch_function__


def _kind(func: Any) -> int:
    """What a function is to the recorder."""
    if func in PASSES:
        return _PASS
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in ("data", "grad"):
            return _CUT if attribute == "data" else _GRADIENT
        return _OPERATION if attribute in ("T", "mT", "H", "mH", "real", "imag") else _PLAIN
    if name in ("detach", "detach_", "item", "tolist", "numpy", "__float__"):
        return _CUT
    if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") != "data":
        return _PLAIN  # x.grad = None and the like: no value changes
    if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
        return _INPLACE
    if name.startswith("__i") and name[3:-2] in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor"):
        return _INPLACE
    return _OPERATION


def is_gradient(func: Any) -> bool:
    """Whether a function is the getter of `x.grad`."""
    return _kind(func) == _GRADIENT


class _Recording(threading.local):
    """The watches that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.here: list[Watch] = []


_recording = _Recording()


def recording() -> Watch | None:
    """The innermost watch around this code."""
    return _recording.here[-1] if _recording.here else None


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

    def before(self, nodes: Sequence[Node]) -> None:
        """These nodes will be run."""
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

    def __init__(self, *, operations: OperationListener | None = None, of_passes: PassListener | None = None) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.key = f"hodiff {next(_serial)}"
        self._operations = operations
        self._of_passes = of_passes
        self._log = Log()
        self._kinds: dict[Any, int] = {}
        self._lost: dict[int, tuple[Any, Lost]] = {}
        self._changed: dict[int, Key] = {}
        self._repeats: dict[tuple[Line, ...], int] = {}

    def __init_subclass__(cls) -> None:  # its frames would pass for the user's
        raise TypeError("hodiff.graph.Watch cannot be subclassed; hold one, and read its .passes.")

    def __enter__(self) -> Self:
        _recording.here.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self in _recording.here:
            _recording.here.remove(self)
        super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, and note what it did."""
        if is_dynamo_compiling():  # Dynamo would trace what follows into the graph, wrongly
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(1)  # the one place that knows how far away the caller is
        result = self._run(func, args, kwargs or {}, frame)
        if self._operations is not None:
            self._operations.called(func, (args, kwargs), result, frame)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        # An optimizer makes hundreds of these calls in a step, hence the plain look.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind > _CUT:
            if kind == _PASS:
                return self._run_pass(func, args, kwargs, frame)
            result = func(*args, **kwargs) if kwargs else func(*args)
            if kind == _GRADIENT and KNOWN.get(frame.f_code) is not False:
                self._note_gradient(result, frame)
            return result
        before = counter()
        result = func(*args, **kwargs) if kwargs else func(*args)
        after = counter()
        if after != before:
            self._log.add(before, after, _user_line(frame))
        elif kind != _INPLACE and (isinstance(result, Tensor) or kind == _CUT) and _has_no_graph(result):
            self._note_lost(func, kind, (args, kwargs), result, frame)
        if kind == _INPLACE and args:
            self._note_change(args[0], frame)
        return result

    def _note_gradient(self, gradient: Any, frame: FrameType) -> None:
        """`x.grad`: of interest where the user reads it; an optimizer does so all the time."""
        if isinstance(gradient, Tensor) and not gradient.requires_grad and is_users(frame.f_code):
            self._remember(gradient, Lost("gradient", line_of(frame), "grad"))

    def _note_lost(self, func: Any, kind: int, arguments: Any, result: Any, frame: FrameType) -> None:
        """The result has no graph: was one cut here, or before?"""
        name = getattr(func, "__name__", "")
        if kind == _CUT:
            lost = "detached" if name in ("detach", "detach_", "__get__") else "constant"
        else:
            inherited = None
            for tensor in tensors_in(arguments):
                if tensor.requires_grad:
                    lost = "no_grad" if not torch.is_grad_enabled() else "constant"
                    break
                inherited = inherited or self._lost.get(id(tensor))
            else:
                if inherited is not None:
                    self._remember(result, inherited[1])
                return
        if kind == _OPERATION or arguments[0][0].requires_grad:
            self._cut(result, Lost(lost, _as_line(_user_line(frame)), name), arguments)

    def _cut(self, result: Any, lost: Lost, sources: Any) -> None:
        """Here the graph of `sources` ended: the result, a tensor or a number, is not in it."""
        if isinstance(result, Tensor):
            self._remember(result, lost)
        if self._operations is not None:
            self._operations.cut(lost, sources)

    def _remember(self, tensor: Tensor, lost: Lost) -> None:
        key, table = id(tensor), self._lost
        table[key] = (weakref.ref(tensor, lambda _: table.pop(key, None)), lost)

    def _note_change(self, what: Any, frame: FrameType) -> None:
        line = _user_line(frame)
        for tensor in (what,) if isinstance(what, Tensor) else tensors_in(what):
            self._changed[_saved.storage(tensor)[0]] = line

    def lost(self, tensor: Tensor) -> Lost | None:
        """Where a tensor without a graph lost it."""
        found = self._lost.get(id(tensor))
        return found[1] if found and found[0]() is tensor else None

    def changed(self, tensor: Tensor) -> Line | None:
        """The line that last changed a tensor's memory in place."""
        found = self._changed.get(_saved.storage(tensor)[0])
        return _as_line(found) if found else None

    def made(self, node: Node) -> Line | None:
        """The line that made a node; None if it was not seen."""
        found = self._log.line(_saved.sequence(node)) if _saved.sequences_work() else None
        return _as_line(found) if found else None

    def ran_again(self, node: Node) -> bool:
        """Whether the line that made a node made others after it."""
        return self._log.ran_again(_saved.sequence(node))

    def _run_pass(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        name, names = PASSES[func]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        roots, inputs = roots_of(given), as_list(given.get("inputs"))
        create = bool(given.get("create_graph"))
        retain = create if given.get("retain_graph") is None else bool(given["retain_graph"])
        stack = tuple(line_of(user) for user in user_frames(frame))
        before = counter()
        repeat = self._repeats[stack] = self._repeats.get(stack, -1) + 1
        call = Pass(len(self.passes), name, stack, retain, before, repeat)
        self.passes.append(call)
        if self._of_passes is not None:
            self._of_passes.before(_predict.executed(roots, inputs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._failed(error, call, roots, inputs, frame)
            raise
        after = counter()
        if after != before:
            self._log.add(before, after, _user_line(frame))
        if not call.retained:
            self._tag(call, _predict.executed(roots, inputs))
        if self._of_passes is not None:
            self._of_passes.after(self, call, failed=False)
        if isinstance(result, tuple) and stack:
            for tensor in result:
                if isinstance(tensor, Tensor) and not tensor.requires_grad:
                    self._cut(tensor, Lost("constant gradient" if create else "gradient", stack[0], name), args)
        return result

    def _tag(self, call: Pass, nodes: Sequence[Node]) -> None:
        """These nodes were freed by a pass."""
        key, index = self.key, call.number
        inner = (index, -1)
        for node in nodes:
            leaf = _saved.leaf(node)
            _saved.tags(node)[key] = inner if leaf is None else (index, _saved.version(leaf))

    def _failed(
        self, error: Exception, call: Pass, roots: list[Node], inputs: list[Any] | None, frame: FrameType
    ) -> None:
        """Explain, and then tag the nodes that the failing pass freed on its way."""
        try:
            explained = _explain.of_pass(error, call, roots, inputs, list(user_frames(frame)), self)
        except Exception:  # an explanation must not hide what it explains
            explained = None
        if explained is not None:
            _explain.attach(error, explained)
        self._tag(call, self._spent(_predict.executed(roots, inputs)))
        if self._of_passes is not None:
            self._of_passes.after(self, call, failed=True)

    def _spent(self, nodes: list[Node]) -> list[Node]:
        """Those that a failing pass ran: what it freed, and all above, as a node waits for those."""
        fresh = [node for node in nodes if self.tag(node) is None]
        ran = {node for node in fresh if _predict.trouble(node) == "freed"}
        parents: dict[Node, list[Node]] = {}
        for node in fresh:
            for child in _saved.children(node):
                parents.setdefault(child, []).append(node)
        stack = list(ran)
        while stack:
            above = [parent for parent in parents.get(stack.pop(), ()) if parent not in ran]
            ran.update(above)
            stack += above
        return list(ran)

    def tag(self, node: Node) -> tuple[Pass, int] | None:
        """The pass that freed a node, and for a leaf the version that it had then."""
        found = _saved.tags(node).get(self.key)
        return (self.passes[found[0]], found[1]) if found else None


def roots_of(given: dict[str, Any]) -> list[Node]:
    """The nodes where a pass begins."""
    return [node for item in as_list(given.get("tensors")) or () if (node := _node(item)) is not None]


def _node(item: Any) -> Node | None:
    return _nodes.node_of(item) if isinstance(item, Tensor) else getattr(item, "node", None)


def as_list(value: Any) -> list[Any] | None:
    if value is None:
        return None
    return [value] if isinstance(value, Tensor) or hasattr(value, "node") else list(value)


def _has_no_graph(result: Any) -> bool:
    return not isinstance(result, Tensor) or (not result.requires_grad and result.is_floating_point())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments, two levels deep."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return []
    found = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            found += tensors_in(item)
    return found


def _user_line(frame: FrameType | None) -> Key:
    """The code and the number of the user's line that `frame` was called from."""
    start, known = frame, KNOWN
    while frame is not None:
        code = frame.f_code
        mine = known.get(code)
        if mine is None:
            mine = is_users(code)
        if mine:
            return code, frame.f_lineno or 0
        frame = frame.f_back
    return (start.f_code, start.f_lineno or 0) if start is not None else (_as_line.__code__, 0)


def _as_line(key: Key) -> Line:
    return Line(key[0].co_filename, key[1])


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
