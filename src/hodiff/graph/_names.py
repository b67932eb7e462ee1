"""Which variables of the user hold which tensors: by identity, by graph node, and by memory."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core._nodes import Node
from hodiff.graph import _saved

DEPTH = 3
FRAMES = 8
BUDGET = 5_000
"""Objects looked at in one search; a search is for an error message, and must end."""

_OURS = (
    os.path.dirname(torch.__file__) + os.sep,
    str(Path(__file__).resolve().parents[1]) + os.sep,
    "<frozen ",
    "<__array_function__",
    "<eval_with_key>",  # what torch.fx and torch.compile write; the line that called it is the user's
)
_CODE_OPTIMIZED = 0x1
KNOWN: dict[CodeType, bool] = {}
"""Code that was asked about, and whether it is the user's."""


def is_users(code: CodeType) -> bool:
    """Whether code is neither PyTorch's nor ours."""
    known = KNOWN.get(code)
    if known is None:
        name = os.path.basename(code.co_filename)
        known = not code.co_filename.startswith(_OURS) and name not in ("runpy.py", "contextlib.py", "threading.py")
        KNOWN[code] = known
    return known


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's code from `frame` outwards."""
    while frame is not None:
        if is_users(frame.f_code):
            yield frame
        frame = frame.f_back


def local_variables(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables that leaves nothing alive behind.

    Until Python 3.12 `f_locals` of a function fills a dict that stays with the frame, and would keep
    the tensors in it beyond the user's `del`. It is emptied, unless the user holds it as `locals()`.
    """
    names = frame.f_locals
    copy = dict(names)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & _CODE_OPTIMIZED and sys.getrefcount(names) <= 3:
        names.clear()  # type: ignore[attr-defined]
    return copy


class Names:
    """The tensors that variables lead to within three steps, by what they are and hold."""

    def __init__(self, frames: Iterable[FrameType] = (), roots: Mapping[str, Any] | None = None) -> None:
        self.tensors: dict[int, str] = {}
        self.paths: dict[int, list[str]] = {}
        self.nodes: dict[Node, str] = {}
        self.storages: dict[int, str] = {}
        self._kept: list[Tensor] = []  # identities stay true while this lives
        self._seen: set[int] = set()
        self._budget = BUDGET
        start: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in (roots or {}).items()]
        modules: dict[int, dict[str, Any]] = {}
        for frame in list(frames)[:FRAMES]:
            start += [(name, value, 0) for name, value in local_variables(frame).items() if not name.startswith("__")]
            modules[id(frame.f_globals)] = frame.f_globals
        for names in modules.values():
            start += [(name, value, 0) for name, value in names.items() if not name.startswith("_")]
        with _saved.without_modes():
            self._search(deque(start))

    def _search(self, queue: deque[tuple[str, Any, int]]) -> None:
        while queue and self._budget > 0:
            self._budget -= 1
            path, value, depth = queue.popleft()
            if isinstance(value, Tensor):
                self._add(path, value)
            elif depth <= DEPTH and id(value) not in self._seen:
                self._seen.add(id(value))
                queue.extend((f"{path}{step}", item, depth + 1) for step, item in _inside(value))

    def _add(self, path: str, tensor: Tensor) -> None:
        self.paths.setdefault(id(tensor), []).append(path)
        if id(tensor) in self.tensors:
            return
        self._kept.append(tensor)
        self.tensors[id(tensor)] = path
        try:
            node = tensor.grad_fn
            self.storages.setdefault(_saved.storage(tensor)[0], path)
        except (RuntimeError, ValueError):  # a functorch wrapper, or one without memory
            return
        if node is not None:
            self.nodes.setdefault(node, path)
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None:
            self._add(f"{path}.grad", grad)

    def of(self, tensor: Tensor) -> str:
        """The variable that holds this tensor; empty if none was found."""
        return self.tensors.get(id(tensor), "")

    def all_tensors(self) -> list[Tensor]:
        """Every tensor that was found."""
        return list(self._kept)

    def memory(self, tensor: Tensor) -> str:
        """A variable that holds this tensor's memory; empty if none was found."""
        return self.tensors.get(id(tensor)) or self.storages.get(_saved.storage(tensor)[0], "")


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container, a module or an object holds, each with its step of the path."""
    if (
        isinstance(value, (str, bytes, int, float, ModuleType, type, FunctionType, CodeType, FrameType))
        or value is None
    ):
        return
    if isinstance(value, Mapping):
        if len(value) <= BUDGET and isinstance(value, dict):
            yield from ((f"[{key!r}]", item) for key, item in list(value.items()) if isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(list(value)[:1000]))
    elif isinstance(value, nn.Module):
        yield from ((f".{name}", item) for name, item in value.named_parameters())
        yield from ((f".{name}", item) for name, item in value.named_buffers())
        for prefix, module in value.named_modules():
            dot = f".{prefix}" if prefix else ""
            yield from ((f"{dot}.{name}", item) for name, item in vars(module).items() if not _is_hidden(name))
    else:
        try:
            members = vars(value)
        except TypeError:
            return
        yield from ((f".{name}", item) for name, item in list(members.items()) if not name.startswith("__"))


def _is_hidden(name: str) -> bool:
    return name.startswith("_") or name == "training"
