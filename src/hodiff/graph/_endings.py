"""Where graphs ended while a program was recorded: what was detached, made constant, or made with gradients off."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor

from hodiff._core import _translate
from hodiff.graph import _calls
from hodiff.graph._calls import CUT, LEAVING, tensors_in
from hodiff.graph._case import Lost
from hodiff.graph._line import Line, line_of, lines_of
from hodiff.graph._names import user_frames
from hodiff.graph._paths import Key


@final
class Endings:
    """The tensors without a graph whose sources had one, and where they lost it."""

    def __init__(self, path: Callable[[FrameType], Key], tell: Callable[[Lost, Any], None]) -> None:
        self._path = path
        self._tell = tell
        self._lost: dict[int, tuple[Any, Lost, tuple[Lost, ...]]] = {}
        self._off: dict[Key, tuple[str, Line | None]] = {}
        self._stacks: dict[Line, tuple[Line, ...]] = {}
        self._latest: Lost | None = None

    def __len__(self) -> int:
        return len(self._lost)

    def of(self, tensor: Tensor) -> Lost | None:
        """Where a tensor without a graph lost it."""
        found = self._lost.get(id(tensor))
        return found[1] if found and found[0]() is tensor else None

    def beside(self, tensor: Tensor) -> tuple[Lost, ...]:
        """The other places, where what a tensor was computed from lost several graphs."""
        found = self._lost.get(id(tensor))
        return found[2] if found and found[0]() is tensor else ()

    def stack(self, lost: Lost) -> tuple[Line, ...]:
        """The user's lines, the innermost first, that led to one where gradients were switched off."""
        return self._stacks.get(lost.line, (lost.line,))

    def latest(self) -> Lost | None:
        """Where a value last left PyTorch: as a number, or for NumPy."""
        return self._latest

    def note(self, func: Any, kind: int, arguments: Any, result: Any, frame: FrameType) -> None:
        """The result has no graph: was one cut here, or before?"""
        name, sources = getattr(func, "__name__", ""), tensors_in(arguments)
        if not any(tensor.requires_grad for tensor in sources):
            self._inherit(name, sources, result)
            return
        if kind == CUT:
            lost, line = "constant" if name in LEAVING else "detached", None
        else:
            lost, line = self._reason(result, frame)
            if lost == "constant" and name in _translate.CONSTANTS:
                lost = "smooth"
        if name in _COPIES and isinstance((*arguments[0], None)[0], Tensor):
            name = COPY
        found = Lost(lost, line or lines_of(self._path(frame))[0], name)
        if name in LEAVING or name == COPY:
            self._latest = found
        self.cut(result, found, arguments)

    def _inherit(self, name: str, sources: list[Tensor], result: Any) -> None:
        """Nothing that went in has a graph: what comes out lost it where those did that had one."""
        before = [found for tensor in sources if (found := self.of(tensor)) is not None]
        if before and name in LEAVING:
            self._latest = before[0]
        elif before:
            every = [each for tensor in sources for each in self._all(tensor)]
            self.remember(result, *list(dict.fromkeys(every))[:SHOWN])

    def _all(self, tensor: Tensor) -> tuple[Lost, ...]:
        found = self.of(tensor)
        return () if found is None else (found, *self.beside(tensor))

    def _reason(self, result: Any, frame: FrameType) -> tuple[str, Line | None]:
        """Why an operation on tensors with a graph gave one without; and the line, if it is a checkpoint's."""
        if torch.is_grad_enabled():
            floating = any(tensor.is_floating_point() for tensor in tensors_in(result))
            return "constant" if floating or not tensors_in(result) else "discrete", None
        path = self._path(frame)
        if path not in self._off:
            kind, around = _calls.surroundings(frame)
            user = next(user_frames(around), None) if kind == "checkpoint" else None
            off = "inference" if torch.is_inference_mode_enabled() else "no_grad"
            self._off[path] = kind or off, None if user is None else line_of(user)
            self._stacks.setdefault(lines_of(path[:2])[0], lines_of(path))
        return self._off[path]

    def cut(self, result: Any, lost: Lost, sources: Any) -> None:
        """Here the graph of `sources` ended: the result, a tensor, several or a number, is not in it."""
        self.remember(result, lost)
        self._tell(lost, sources)

    def remember(self, result: Any, lost: Lost, *beside: Lost) -> None:
        """What lost its graph, or what was computed from it: a tensor, or several."""
        table = self._lost
        for tensor in tensors_in(result):
            key = id(tensor)
            table[key] = (weakref.ref(tensor, lambda _, key=key: table.pop(key, None)), lost, beside)


SHOWN = 4
_COPIES = ("tensor", "as_tensor")
COPY = "copy of a tensor"
"""The name under which `torch.tensor(x)` of one tensor is noted: of several, they can be put together otherwise."""
