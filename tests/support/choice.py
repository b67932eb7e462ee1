"""Which cases run: a fixed choice by `pytest`, more by `--wide`, all by `--all`; the same in every clone.

* `pytest` runs PLAIN cases of each test function, `pytest FOLDER` the folder's share of them.
* `--wide` runs all cases of each function, but of a table of thousands some; and what is marked `wide`.
* `--all` runs everything, what is marked `nightly` too.

Of a function's cases those run first whose names have the smallest hashes. So a choice depends on nothing but names:
not on the code, not on what else is collected. The mark `table(plain=, wide=)` gives a function numbers of its own.
What is named runs whole, whatever its marks: `FILE::CASE`, `-k`, `--lf`. And what is in `tests/pinned.txt` always runs.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

PLAIN = 2
"""How many cases of a function run by `pytest`."""
LEVELS = ("plain", "wide", "all")
EXAMPLES = {"plain": 5, "wide": 60, "all": 300}
"""How many examples of each property Hypothesis draws."""
PINNED = Path(__file__).parents[1] / "pinned.txt"


class Case(Protocol):
    """A collected test."""

    @property
    def nodeid(self) -> str: ...

    def get_closest_marker(self, name: str) -> pytest.Mark | None: ...


@dataclass(frozen=True)
class Share:
    """How many cases of a test function run at a level; None for all of them."""

    plain: int | None = PLAIN
    wide: int | None = None

    @classmethod
    def of(cls, case: Case) -> "Share":
        mark = case.get_closest_marker("table")
        return cls(**mark.kwargs) if mark else cls()

    def at(self, level: str) -> int | None:
        return {"plain": self.plain, "wide": self.wide, "all": None}[level]


def left_out(cases: Iterable[Case], level: str, pinned: frozenset[str] = frozenset()) -> list[Case]:
    """Return the cases that do not run at a level, in their order."""
    functions: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        functions[case.nodeid.partition("[")[0]].append(case)
    return [case for function in functions.values() for case in _left(function, level) if case.nodeid not in pinned]


def _left(function: list[Case], level: str) -> list[Case]:
    eligible = [case for case in function if _needs(case) <= LEVELS.index(level)]
    number = Share.of(function[0]).at(level)
    chosen = set(sorted(eligible, key=_hash)[:number])
    return [case for case in function if case not in chosen]


def _needs(case: Case) -> int:
    """The first level at which a case may run."""
    if case.get_closest_marker("nightly"):
        return 2
    return 1 if case.get_closest_marker("wide") else 0


def _hash(case: Case) -> str:
    return hashlib.sha256(case.nodeid.encode()).hexdigest()


def pinned(text: str) -> frozenset[str]:
    """Return the cases that a text pins: one a line, its reason behind two spaces and a `#`."""
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    return frozenset(line for line in lines if line and not line.startswith("#"))
