"""Variables as they are written: `net.cell.h[0]`."""

from __future__ import annotations

import re

_BASE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def base(path: str) -> str:
    """A path without its subscripts: `state[0]` -> `state`, `self.h` as it is."""
    found = _BASE.match(path)
    return found.group() if found else path


def is_plain(text: str) -> bool:
    """Whether a text is a name, or attributes of one, and nothing else."""
    return _BASE.fullmatch(text) is not None


def steps(path: str) -> int:
    """How many attributes and subscripts a path goes through."""
    return path.count(".") + path.count("[")


def forms(path: str) -> tuple[str, str]:
    """As a variable is written, and as it is within its class: `trainer.total` is `self.total` there."""
    return path, re.sub(r"^.*\.", "self.", path)
