"""A line of the user's code: where it is, and what it says."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any, NamedTuple

from hodiff.graph import _cells


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The source line, without its indentation."""
        return _cells.resolve(self.file, self.number)[2]

    def __str__(self) -> str:
        cell, number, _ = _cells.resolve(self.file, self.number)
        if not self.number and not cell:
            return self.file
        return f"In[{cell}]:{number}" if cell else f"{os.path.basename(self.file)}:{number}"


def at(line: Line | None) -> str:
    """A line for a sentence: where it is, and what it says."""
    if line is None:
        return "the failing call"
    return f"{line} ({text})" if (text := line.text) else str(line)


def quoted(line: Line) -> str:
    """A line for a list: where it is, and what it says; the text alone is missing where no source is at hand."""
    return f"{line}   {line.text}".rstrip()


def line_of(frame: FrameType) -> Line:
    """The line that a frame is at."""
    return Line(frame.f_code.co_filename, frame.f_lineno or 0)


def lines_of(path: tuple[Any, ...]) -> tuple[Line, ...]:
    """The lines of a path, which has codes and line numbers in turn."""
    return tuple(Line(code.co_filename, number) for code, number in zip(path[::2], path[1::2], strict=True))


def outside(path: tuple[Any, ...]) -> list[Line]:
    """The innermost line of a stack that is not in a module's forward: where the program calls the module."""
    lines = lines_of(path)
    names = [code.co_name for code in path[::2]]
    return [line for name, line in zip(names, lines, strict=True) if name != "forward"][:1] or list(lines[:1])
