"""Cells of IPython and Jupyter: how they are called, and a session read as if it were one script.

Each cell is a file of its own. What a name was given in an earlier one is found by the numbers of lines: in the file
of a cell the lines of the cells that ran before have the numbers 0, -1, -2 and so on, the last first.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_with_reruns: ContextVar[bool] = ContextVar("with reruns", default=False)


def _shell() -> Any:
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get() if get is not None else None


def number(file: str) -> int:
    """The number of a cell, by its file; 0 for what is none."""
    shell = _shell()
    name = shell.compile.format_code_name(file) if shell is not None else None
    found = re.fullmatch(r"In ?\[(\d+)\]", name[1]) if name else None
    return int(found.group(1)) if found else 0


def before(file: str) -> list[tuple[int, int, str]]:
    """The cells that ran before one, the nearest first: what to take from their line numbers, number and text."""
    last = number(file)
    inputs = _shell().user_ns.get("In", []) if last else []
    if last >= len(inputs) or inputs[last].split() != "".join(linecache.getlines(file)).split():
        return []  # another history than we think
    total, found = 0, []
    for cell in range(last - 1, 0, -1):
        total += inputs[cell].rstrip("\n").count("\n") + 1
        found.append((total, cell, inputs[cell]))
    return found


def read(file: str) -> tuple[tuple[int, str], ...]:
    """Those that count, the first first: of the runs of this same cell none, unless in `reruns`."""
    text = "".join(linecache.getlines(file)).split()
    found = [(offset, earlier) for offset, _, earlier in before(file)]
    return tuple((offset, earlier) for offset, earlier in found[::-1] if _with_reruns.get() or earlier.split() != text)


@contextmanager
def reruns() -> Iterator[None]:
    """A context in which earlier runs of the same cell count; they may have failed as the last did."""
    token = _with_reruns.set(True)
    try:
        yield
    finally:
        _with_reruns.reset(token)


def resolve(file: str, line: int) -> tuple[int, int, str]:
    """The cell of a line, its number there, and its text; cell 0 for other files."""
    if line <= 0:
        for offset, cell, text in before(file):
            if line + offset > 0:
                return cell, line + offset, text.split("\n")[line + offset - 1].strip()
    return number(file), line, linecache.getline(file, line).strip()


_KEPT = re.compile(r"_+|_i*|_i?\d+|_[iod]h|In|Out|exit|quit|get_ipython")
_TOOLS = ("IPython", "ipykernel", "traitlets", "_pytest", "pluggy")


def is_shell(names: Any) -> bool:
    """Whether names are those of a shell's session."""
    return "get_ipython" in names


def is_kept(name: str) -> bool:
    """Whether a name of a session is the shell's: `_`, `Out`, `_12` and their like, among the user's own."""
    return _KEPT.fullmatch(name) is not None


def is_tool(value: Any) -> bool:
    """Whether an object belongs to the shell, or to a runner of tests, which hold all that the user has; or is ours."""
    module = type(value).__module__
    return module.partition(".")[0] in _TOOLS or module.startswith("hodiff.graph")
