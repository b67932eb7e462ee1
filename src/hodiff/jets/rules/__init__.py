"""Rules of Taylor mode by kind: a file is read when an operation is met that has no rule yet."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from hodiff._core import _locks
from hodiff.jets._jet import RULES


def files() -> Iterator[ModuleType]:
    """Import one file after the other, those first that most functions need."""
    from hodiff.jets.rules import elementwise

    yield elementwise
    from hodiff.jets.rules import linear

    yield linear
    from hodiff.jets.rules import bilinear

    yield bilinear
    from hodiff.jets.rules import composite

    yield composite
    from hodiff.jets.rules import special

    yield special
    from hodiff.jets.rules import fallback

    yield fallback


def read(name: str) -> None:
    """Read files until an operation of that name has a rule."""
    with _locks.lock:
        for _ in files():
            RULES.publish()
            if name in RULES.known:
                return
        RULES.read = None


RULES.read = read
