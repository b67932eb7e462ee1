"""What is expected of a program after a public report. The rows are in `expected.py`, beside the programs.

A patch is a tuple of pairs, old text and new. `AS_PRINTED` is a fix that gives the statements to write behind a
line, or before it: the test writes them there.
"""

from typing import NamedTuple

AS_PRINTED = "as printed"
KEPT = "does not change the program"
RIGHT = "as the right program"
Patch = tuple[tuple[str, str], ...] | str


class Expected(NamedTuple):
    """What is said of a program, how it is written rightly, and each printed fix done as it says.

    Attributes:
        cause: One of `SENTENCES`.
        variables: What may be named, any of them.
        lines: Text of the line that may be shown, any of them; none where no line must be.
        rights: Patches that make the program right: a fix must train what one of them trains.
        fixes: A patch for each printed fix.
        answers: What "not known" offers, for the answer that the report gives.
    """

    cause: str
    variables: tuple[str, ...]
    lines: tuple[str, ...]
    rights: tuple[Patch, ...]
    fixes: tuple[Patch, ...] = ()
    answers: tuple[Patch, ...] = ()


def swap(old: str, new: str, *more: str) -> Patch:
    """A patch of one place, or of several."""
    texts = (old, new, *more)
    return tuple(zip(texts[::2], texts[1::2], strict=True))
