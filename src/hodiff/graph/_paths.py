"""By which of the user's lines a call came: each path is kept once, and has a number."""

from __future__ import annotations

from types import FrameType
from typing import Any

from hodiff.graph._names import USERS, is_users

Key = tuple[Any, ...]
"""Where something ran: codes and line numbers in turn, the innermost of the user's frames first."""

REMEMBERED = 50_000
"""Paths that are found again by the identity of their codes; then those are forgotten, and looked up anew."""


def path_of(frame: FrameType | None, outermost: FrameType | None = None) -> Key:
    """The user's frames from `frame` outwards, to `outermost`: codes and line numbers in turn."""
    found: list[Any] = []
    while frame is not None:
        if is_users(frame.f_code):
            found += (frame.f_code, frame.f_lineno or 0)
        if frame is outermost:
            break
        frame = frame.f_back
    return tuple(found)


class Paths:
    """The paths that were met, by number.

    Each operation under a watch asks for its own. To ask a code object for its hash is to read all of its
    instructions, so a path is found by the identities of its codes, which are kept alive for that.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._alive: list[Key] = []
        self._equal: dict[tuple[Any, ...], int] = {}
        self._all: list[Key] = []

    def __getitem__(self, number: int) -> Key:
        return self._all[number]

    def number(self, frame: FrameType, outermost: FrameType | None) -> int:
        """The number of the path from `frame` to `outermost`; of the frame alone, if none of them is the user's."""
        found: list[int] = []
        each: FrameType | None = frame
        users = USERS
        while each is not None:
            code = each.f_code
            if users[code.co_filename]:
                found += (id(code), each.f_lineno or 0)
            if each is outermost:
                break
            each = each.f_back
        key = tuple(found) if found else (id(frame.f_code), frame.f_lineno or 0)
        number = self._numbers.get(key)
        return self._add(key, frame, outermost) if number is None else number

    def _add(self, key: tuple[int, ...], frame: FrameType, outermost: FrameType | None) -> int:
        if len(self._numbers) >= REMEMBERED:
            self._numbers.clear()
            self._alive.clear()
        path: Key = path_of(frame, outermost) or (frame.f_code, frame.f_lineno or 0)
        files = [code.co_filename for code in path[::2]]  # by which Python does not tell codes apart
        number = self._equal.setdefault((*path, *files), len(self._all))
        if number == len(self._all):
            self._all.append(path)
        self._alive.append(path)
        self._numbers[key] = number
        return number
