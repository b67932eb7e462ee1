"""Interrupt a call as Ctrl-C would, at its n-th opportunity or at the first in a place that was seen.

CPython looks for signals where a function begins, and behind each call of a function written in C (and where a loop
turns, which is no other place for the code around it). `sys.setprofile` sees just these. Those count that are in
hodiff's own code, or in the code of contexts, switches and hooks that it calls, Python's and PyTorch's. Not those of
other code: an interrupted `torch.vmap` leaves its level behind, whoever called it. Other errors (MemoryError) come
between any two steps: `sys.settrace` sees each line, of which those count where a context begins and ends.
"""

import inspect
import itertools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import hodiff

HERE = str(Path(hodiff.__file__).parent)
CONTEXTS = tuple(
    f"/{file}.py"
    for file in (
        "contextlib", "warnings", "torch/_dynamo/decorators", "torch/_dynamo/eval_frame", "torch/amp/autocast_mode",
        "torch/autograd/forward_ad", "torch/autograd/grad_mode", "torch/autograd/graph", "torch/backends/__init__",
        "torch/backends/cuda/__init__", "torch/compiler/__init__", "torch/nn/modules/module", "torch/optim/optimizer",
        "torch/overrides", "torch/random", "torch/utils/_contextlib", "torch/utils/_python_dispatch",
        "torch/utils/hooks",
    )
)  # fmt: skip
"""Where Python and PyTorch keep the contexts, switches and hooks that a library may use."""

Stack = tuple[Any, ...]
DEPTH = 3
"""How many functions of hodiff, each with its line, tell two moments apart where all are tried."""

Kind = Literal["calls", "contexts", "lines"]
"""Moments in hodiff's own code; in contexts that it calls; lines of it where a context begins or ends."""


class Interrupter:
    """Runs a call, counts the moments at which it could be interrupted, and interrupts it at one of them.

    Attributes:
        moments: How many there were.
        stacks: Of each moment, where it was, and from where that was called.
        place: Where it was interrupted.
        lost: Whether that may be in a finaliser: Python prints the interrupt then, and goes on.
    """

    def __init__(self, at: int | Stack = 0, kind: Kind = "calls") -> None:
        self.at = at
        self.moments = 0
        self.stacks: list[Stack] = []
        self.place = ""
        self.lost = False
        self._counts = _is_ours if kind == "calls" else _is_in_a_context
        self._lines = kind == "lines"

    def __call__(self, call: Callable[[], Any]) -> Any:
        get, set_ = (sys.gettrace, sys.settrace) if self._lines else (sys.getprofile, sys.setprofile)
        before = get()
        set_(self._trace if self._lines else self._look)  # type: ignore[arg-type]
        try:
            return call()
        finally:
            set_(before)  # type: ignore[arg-type]

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and self._counts(frame):
            self._moment(frame, event)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            return self._trace if _is_ours(frame) and any(map(_begins_or_ends, _callers(frame))) else None
        if event == "line" and _does(frame):
            self._moment(frame, event)
        return self._trace

    def _moment(self, frame: FrameType, event: str) -> None:
        self.moments += 1
        if isinstance(self.at, tuple):
            here = self.at[:2] == (event, (frame.f_code, frame.f_lineno)) and self.at == _stack(frame, event)
        else:
            here = self.moments == self.at
        if not self.at:
            self.stacks.append(_stack(frame, event))
        if here and not self.place:
            ours = [each for each in _callers(frame) if _is_ours(each)][:3]
            lines = [f"{each.f_code.co_filename[len(HERE) + 1 :]}:{each.f_lineno}" for each in ours]
            self.place = f"{event} in {frame.f_code.co_qualname}, {' for '.join(lines)}"
            # a generator may be being thrown away
            generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
            self.lost = generator or any(each.f_code.co_name == "__del__" for each in _callers(frame))
            raise KeyboardInterrupt


class Seen:
    """What of hodiff's code a call runs: files and qualified names."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.codes: set[CodeType] = set()
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: self.codes.add(frame.f_code) if event == "call" else None)
        try:
            call()
        finally:
            sys.setprofile(before)

    def names(self, file: str) -> set[str]:
        """The functions of a file that ran, by their qualified names."""
        return {code.co_qualname for code in self.codes if code.co_filename == f"{HERE}/{file}"}


def _stack(frame: FrameType, event: str) -> Stack:
    """Where a moment is, and from where that was called."""
    ours = itertools.islice(filter(_is_ours, _callers(frame)), DEPTH)
    return event, *((each.f_code, each.f_lineno) for each in (frame, *ours))


def _callers(frame: FrameType) -> list[FrameType]:
    """The frame, and those around it."""
    found, each = [frame], frame.f_back
    while each is not None:
        found.append(each)
        each = each.f_back
    return found


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(HERE)


def _does(frame: FrameType) -> bool:
    """Whether a line does something that can fail. No error comes where a block begins, or between it and its end."""
    here, before = (linecache.getline(frame.f_code.co_filename, frame.f_lineno - each).strip() for each in (0, 1))
    return not here.startswith(("with ", "try:", "finally:", "yield", "return")) and before != "finally:"


def _begins_or_ends(frame: FrameType) -> bool:
    """Whether a frame is one in which a context of ours begins or ends; or its generator, which is resumed."""
    name = frame.f_code.co_name
    return _is_ours(frame) and (name in ("__enter__", "__exit__", "__del__", "undo_all") or _is_resumed(frame))


def _is_resumed(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.endswith("/contextlib.py")


def _is_in_a_context(frame: FrameType) -> bool:
    """Whether code is of a context or a switch that hodiff called."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(CONTEXTS):
        caller = caller.f_back
    return caller is not None and caller is not frame and _is_ours(caller)
