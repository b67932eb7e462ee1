"""Rules of Taylor mode by kind; those that few functions need are read when an operation asks."""

from __future__ import annotations

from hodiff._core import _locks
from hodiff.jets._jet import RULES


def read(name: str) -> None:
    """Read rules until an operation of that name has one, or all are known."""
    with _locks.lock:
        if not RULES.known:
            from hodiff.jets.rules import elementwise, linear  # noqa: F401 - which registers them

            RULES.first, RULES.known = {**RULES.registered[True]}, {**RULES.registered[False]}
        if name not in RULES.known:
            from hodiff.jets.rules import bilinear, composite, fallback, special  # noqa: F401

            RULES.first, RULES.known = RULES.registered[True], RULES.registered[False]
            RULES.read = None


RULES.read = read
