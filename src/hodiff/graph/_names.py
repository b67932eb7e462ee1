"""The user's variables that hold a tensor, by identity, graph node or memory;
the lines that called.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hodiff._core._nodes import Node
from hodiff.graph import _saved
from hodiff.graph._source import Frame, Path, lines_of

DEPTH = 3
FRAMES = 8
BUDGET = 5_000
"""Objects looked at in one search; a search is for an error message, and must end."""


def _folders() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages: their code is a tool's,
    not the user's.
    """
    folders = {
        sysconfig.get_path(kind)
        for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    }
    folders |= (
        {os.path.dirname(os.path.dirname(torch.__file__))}
        if "-packages" in torch.__file__
        else set()
    )
    return tuple(
        sorted(
            {form + os.sep for path in folders if path for form in (path, os.path.realpath(path))}
        )
    )


_TOOLS = (
    os.path.dirname(torch.__file__) + os.sep,
    str(pathlib.Path(__file__).resolve().parents[1]) + os.sep,
    *_folders(),
    "<frozen ",
    "<__array_function__",
    # what torch.fx and torch.compile write; the line that called it is the user's
    "<eval_with_key>",
)
_CODE_OPTIMIZED = 0x1


class _Users(dict[str, bool]):
    """Files that were asked about, and whether what is in them is the user's."""

    def __missing__(self, file: str) -> bool:
        self[file] = users = not file.startswith(_TOOLS)
        return users


USERS = _Users()


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: of a script, a cell, `exec`,
    or a file outside the folders of installed packages.
    """
    return USERS[code.co_filename]


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's code from `frame` outwards."""
    while frame is not None:
        if is_users(frame.f_code):
            yield frame
        frame = frame.f_back


def steps_of(traceback: TracebackType | None) -> list[TracebackType]:
    """The frames that an exception came through, the outermost first."""
    steps = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    return steps


def users_of(steps: list[TracebackType]) -> list[Any]:
    """The user's frames in a part of a traceback, the innermost first,
    each at the line where the exception passed.
    """
    read = ("f_code", "f_globals", "f_back", "f_locals")
    return [
        SimpleNamespace(
            f_lineno=step.tb_lineno, **{name: getattr(step.tb_frame, name) for name in read}
        )
        for step in reversed(steps)
        if is_users(step.tb_frame.f_code)
    ]


def local_variables(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables that leaves nothing alive behind.

    Until Python 3.12 `f_locals` of a function fills a dict that stays with the frame, and would
    keep the tensors in it beyond the user's `del`. It is emptied, unless the user holds it as
    `locals()`.
    """
    names = frame.f_locals
    copy = dict(names)
    if (
        sys.version_info < (3, 13)
        and frame.f_code.co_flags & _CODE_OPTIMIZED
        and sys.getrefcount(names) <= 3
    ):
        names.clear()  # type: ignore[attr-defined]
    return copy


class NamedVariable(NamedTuple):
    """A variable: how it is written, and the code in whose frame it can be written so."""

    path: str
    code: CodeType | None


class TensorNames:
    """The tensors that variables lead to within four steps, by what they are and hold; `results`:
    no leaves.
    """

    def __init__(
        self,
        frames: Iterable[FrameType] = (),
        roots: Mapping[str, Any] | None = None,
        budget: int = BUDGET,
        *,
        results: bool = False,
    ) -> None:
        self.paths: dict[int, list[str]] = {}  # of a tensor's identity
        self.nodes: dict[Node, str] = {}
        self.storages: dict[int, str] = {}
        self.values: dict[str, Any] = {}  # the variables themselves, by name, the innermost first
        self.owners: dict[str, CodeType] = {}
        self.optimizers: dict[int, str] = {}  # of an optimizer's identity
        self.all: list[Tensor] = []  # identities stay true while this lives
        self._seen: set[int] = set()
        self._budget = budget
        self._results = results
        start: list[tuple[str, Any, int]] = [
            (name, value, 0) for name, value in (roots or {}).items()
        ]
        modules: dict[int, FrameType] = {}
        for frame in islice(frames, FRAMES):
            start += self._of_frame(frame, local_variables(frame))
            modules.setdefault(id(frame.f_globals), frame)
        for frame in modules.values():
            start += self._of_frame(frame, frame.f_globals)
        with _saved.without_modes():
            self._search(deque(start))

    def _of_frame(self, frame: FrameType, names: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
        variables = []
        values = self.values
        owners = self.owners
        code = frame.f_code
        in_shell = "get_ipython" in names
        for name, value in list(names.items()):
            if (
                name in values
                or name.startswith("__")
                or (in_shell and _OF_THE_SHELL.fullmatch(name))
                or not name.isidentifier()
            ):
                continue
            values[name] = value
            owners[name] = code
            if value.__class__ not in _PLAIN:
                variables.append((name, value, 0))
        return variables

    def _search(self, queue: deque[tuple[str, Any, int]]) -> None:
        while queue and self._budget > 0:
            self._budget -= 1
            path, value, depth = queue.popleft()
            if isinstance(value, Tensor):
                if not self._results or value.grad_fn is not None:
                    self._add(path, value)
            elif depth <= DEPTH and id(value) not in self._seen:
                self._seen.add(id(value))
                if isinstance(value, torch.optim.Optimizer):
                    if self._results:
                        continue
                    self.optimizers.setdefault(id(value), path)
                inside = islice(_inside(value, leaves=not self._results), self._budget)
                queue.extend((path + step, item, depth + 1) for step, item in inside)

    def _add(self, path: str, tensor: Tensor) -> None:
        path = path if path.isprintable() else repr(path)[1:-1]
        if is_lazy(tensor):  # of a module that has not run: it answers next to nothing
            return
        known = self.paths.setdefault(id(tensor), [])
        known.append(path)
        if known[1:]:
            return
        self.all.append(tensor)
        try:
            node = tensor.grad_fn
            self.storages.setdefault(_saved.memory(tensor), path)
        except (RuntimeError, ValueError):  # a functorch wrapper, or one without memory
            return
        if node is not None:
            self.nodes.setdefault(node, path)
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None:
            self._add(f"{path}.grad", grad)

    def of(self, tensor: Tensor) -> str:
        """The variable that holds this tensor; empty if none was found."""
        return self.paths.get(id(tensor), [""])[0]

    def held(self, path: str) -> NamedVariable:
        """A variable with the frame that it belongs to."""
        return NamedVariable(path, self.owners.get(root(path)))

    @cached_property
    def at(self) -> dict[str, Tensor]:
        """The tensor that each path leads to."""
        return {path: tensor for tensor in self.all for path in self.paths[id(tensor)]}

    def by_node(self) -> dict[Node, tuple[NamedVariable, ...]]:
        """All variables that hold the output of each node."""
        variables: dict[Node, list[NamedVariable]] = {}
        for path, tensor in self.at.items():
            if tensor.grad_fn is not None:
                variables.setdefault(tensor.grad_fn, []).append(self.held(path))
        return {node: tuple(held) for node, held in variables.items()}

    def memory(self, tensor: Tensor) -> str:
        """A variable that holds this tensor's memory; empty if none was found."""
        return self.of(tensor) or self.storages.get(_saved.memory(tensor), "")


def root(path: str) -> str:
    """The variable that a path begins with: `net.cell.h` -> `net`."""
    return re.split(r"\W", path, maxsplit=1)[0]


_PLAIN = frozenset(
    {str, bytes, int, float, bool, type(None), ModuleType, type, FunctionType, CodeType, FrameType}
)
"""What holds no tensors, or not the user's: most of what there is,
so that it is told by its class.
"""
_PLAIN_TOO = tuple(_PLAIN)
_HOLDERS = ("IPython", "ipykernel", "traitlets", "_pytest", "pluggy")
"""Shells and runners of tests, whose objects hold all that the user has."""
_OF_THE_SHELL = re.compile(r"_+|_i*|_i?\d+|_[iod]h|In|Out|exit|quit|get_ipython")
"""Names of a session that are the shell's, among the user's own: `_`, `Out`,
`_12` and their like.
"""


def _inside(value: Any, *, leaves: bool = True) -> Iterator[tuple[str, Any]]:
    """The values inside a container, a module or an object, each with its step of the path;
    with `leaves`, parameters too.
    """
    module = type(value).__module__
    is_tool = module.partition(".")[0] in _HOLDERS or module.startswith("hodiff.graph")
    if is_tool or isinstance(value, _PLAIN_TOO):
        return
    if isinstance(value, dict):
        if len(value) <= BUDGET:
            for number, (key, item) in enumerate(list(value.items())):
                if item.__class__ not in _PLAIN:
                    yield f"[{_written(key, number)}]", item
    elif isinstance(value, (list, tuple, deque)):  # copied, as another thread may change it
        names = getattr(value, "_fields", None)
        for index, item in enumerate(list(islice(value, 1000))):
            if item.__class__ not in _PLAIN:
                yield (f".{names[index]}" if names else f"[{index}]"), item
    elif isinstance(value, nn.Module) and "_modules" in vars(value):  # else it is being made
        if leaves:
            yield from ((f".{name}", item) for name, item in value.named_parameters())
        # as they are written: `net[0].state`
        yield from ((re.sub(r"\.(\d+)\b", r"[\1]", step), it) for step, it in _of_modules(value))
    elif not isinstance(value, Mapping):  # one of another kind computes its values, maybe
        try:
            members = vars(value)
        except TypeError:
            return
        items = [
            (name, item) for name, item in list(members.items()) if item.__class__ not in _PLAIN
        ]
        yield from ((f".{name}", item) for name, item in items if not name.startswith("__"))
        yield from ((f".{name}", item) for name, item in _of_class(value))


def _of_modules(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """The values that modules hold beside parameters and modules: buffers, the attributes of their
    classes and their own.

    Each pass under a watch looks at all modules in sight, and at most of them in vain.
    """
    for path, module in root.named_modules():
        own = dict(vars(module))
        kept = list((own.get("_buffers") or {}).items())
        kept += [(name, own[name]) for name in own if name not in HIDDEN]
        place = f".{path}" if path else ""
        for name, item in kept:
            if item.__class__ not in _PLAIN:
                yield f"{place}.{name}", item
        for name, item in _of_class(module):
            yield f"{place}.{name}", item


@cache
def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith(("torch", "builtins", "collections"))


def _of_class(value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and containers that the user's class holds for all its objects: a cache, say."""
    kind = type(value)
    if not _is_torchs(kind):
        for name, item in list(vars(kind).items()):
            if isinstance(item, (Tensor, dict, list)) and not name.startswith("__"):
                yield name, item


def _written(key: Any, number: int) -> str:
    """A key of a dict as code; one that cannot be written, a module say,
    by its class and its place.
    """
    return repr(key) if _is_plain(key) else f"<{type(key).__name__} {number}>"


def _is_plain(key: Any) -> bool:
    """Whether a key of a dict can be written down: what a derived class shows, such as an Enum,
    is no code.
    """
    return type(key) in (str, int, bool) or (
        type(key) is tuple and all(_is_plain(part) for part in key)
    )


HIDDEN = frozenset(vars(nn.Module()))
"""What a module has for itself."""


# --- by which of the user's lines a call came: each path is kept once, and has a number -----------


REMEMBERED = 50_000
"""Paths that are found again by the identity of their codes; then those are forgotten,
and looked up anew.
"""


Mark = tuple[CodeType | None, int]


def marked(frame: FrameType | None) -> Mark:
    """A frame by its code and identity: to hold it would keep alive what is in it."""
    return (None, 0) if frame is None else (frame.f_code, id(frame))


def path_of(frame: FrameType | None, outermost: Mark = (None, 0)) -> Path:
    """The user's frames from `frame` outwards, to `outermost`."""
    path: list[Frame] = []
    while frame is not None:
        if is_users(frame.f_code):
            path.append(Frame(frame.f_code, frame.f_lineno or 0))
        if frame.f_code is outermost[0] and id(frame) == outermost[1]:
            break
        frame = frame.f_back
    return tuple(path)


class Paths:
    """The paths that were met, by number.

    Each operation under a watch asks for its own. To ask a code object for its hash is to read all
    of its instructions, so a path is found by the identities of its codes, which are kept alive for
    that.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], tuple[int, Path]] = {}
        self._equal: dict[tuple[Any, ...], int] = {}
        self._all: list[Path] = []

    def __getitem__(self, number: int) -> Path:
        return self._all[number]

    def number(self, frame: FrameType, outermost: Mark) -> int:
        """The number of the path from `frame` to `outermost`; of the frame alone,
        if none of them is the user's.
        """
        identities: list[int] = []
        each: FrameType | None = frame
        users = USERS
        while each is not None:
            code = each.f_code
            if users[code.co_filename]:
                identities += (id(code), each.f_lineno or 0)
            if code is outermost[0] and id(each) == outermost[1]:
                break
            each = each.f_back
        key = tuple(identities) if identities else (id(frame.f_code), frame.f_lineno or 0)
        known = self._numbers.get(key)
        return self._add(key, frame, outermost) if known is None else known[0]

    def _add(self, key: tuple[int, ...], frame: FrameType, outermost: Mark) -> int:
        if len(self._numbers) >= REMEMBERED:
            self._numbers.clear()
        path = path_of(frame, outermost) or (Frame(frame.f_code, frame.f_lineno or 0),)
        # Python does not tell codes apart by their files, lines do.
        number = self._equal.setdefault((path, lines_of(path)), len(self._all))
        if number == len(self._all):
            self._all.append(path)
        self._numbers[key] = number, path
        return number
