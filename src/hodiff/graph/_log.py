"""Which of the user's lines made which nodes: by the places that nodes get in the order of creation."""

from __future__ import annotations

from bisect import bisect_right

LOG = 200_000
"""Entries of the log; then its older half goes, but for each line's first."""


class Log:
    """Intervals of places, each with the path that ran, by its number; in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._lines: list[int] = []
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, start: int, end: int, line: int) -> None:
        """The nodes `start` ... `end - 1` were made at `line`."""
        if self._lines and self._lines[-1] == line and start >= self._ends[-1]:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)
            self._lines.append(line)
            if len(self._lines) > LOG:
                self._shorten()
        self._last[line] = end

    def line(self, place: int) -> int | None:
        """The line that made the node at a place; None if it was not seen."""
        index = self._index(place)
        return self._lines[index] if index >= 0 and place < self._ends[index] else None

    def ran_again(self, place: int, since: int) -> bool:
        """Whether the line that made the node at a place made others at places from `since` on."""
        index = self._index(place)
        return index >= 0 and self._last[self._lines[index]] > since

    def _index(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def _shorten(self) -> None:
        """Forget the older half, but for the first entry of each line: what is hoisted ran once."""
        half = len(self._lines) // 2
        first = {key: index for index, key in reversed(list(enumerate(self._lines)))}
        keep = [index for index, key in enumerate(self._lines) if index >= half or first[key] == index]
        self._starts = [self._starts[index] for index in keep]
        self._ends = [self._ends[index] for index in keep]
        self._lines = [self._lines[index] for index in keep]
