"""Interrupt a call as Ctrl-C would, at its n-th opportunity: the same place on every run.

CPython looks for signals where a function begins, and behind each call of a function written in C (and where a loop
turns, which is no other place for the code around it). `sys.setprofile` sees just these. Only those in hodiff's own
code count: an interrupted `torch.vmap` leaves its level behind, whoever called it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hodiff

HERE = str(Path(hodiff.__file__).parent)


class Interrupter:
    """Runs a call, counts the moments at which it could be interrupted, and interrupts it at one of them.

    Attributes:
        moments: How many there were.
        place: Where it was interrupted.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.moments = 0
        self.place = ""

    def __call__(self, call: Callable[[], Any]) -> Any:
        before = sys.getprofile()
        sys.setprofile(self._look)
        try:
            return call()
        finally:
            sys.setprofile(before)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(HERE):
            return
        self.moments += 1
        if self.moments == self.at:
            code = frame.f_code
            self.place = f"{code.co_filename[len(HERE) + 1 :]}:{frame.f_lineno}, {event} in {code.co_qualname}"
            raise KeyboardInterrupt
