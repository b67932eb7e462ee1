"""What each of several processes says of itself when sums are exchanged: a line of numbers, sent as small integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

Step = Literal["evaluates", "multiplies", "draws a seed", "sums", "takes a diagonal", "begins"]
STEPS: tuple[Step, ...] = ("evaluates", "multiplies", "draws a seed", "sums", "takes a diagonal", "begins")


class Line(NamedTuple):
    """What each rank says of itself at each step.

    Attributes:
        failed: Whether it will raise.
        step: The number of the step in `STEPS`.
        who: A checksum of the operator, by the order in which they were made, and of the leaves that it is a block of.
        number: Of how many vectors.
        digest: A checksum of these vectors, or of the parameters.
        facts: Eight numbers of this rank's own.
    """

    failed: bool
    step: int
    who: int
    number: int
    digest: int
    facts: tuple[float, ...]

    def slots(self) -> list[int]:
        """As small integers, which any dtype of sums holds exactly."""
        packed = _LINE.pack(self.failed, self.step, self.who, self.number, self.digest, *self.facts)
        return list(struct.unpack(_SLOTS, packed))

    @classmethod
    def of(cls, slots: Sequence[float]) -> Line:
        """From such integers."""
        failed, step, who, number, digest, *facts = _LINE.unpack(struct.pack(_SLOTS, *map(int, slots)))
        return cls(failed, step, who, number, digest, tuple(facts))


_LINE = struct.Struct("<?BIqq8d")
_SLOTS = f"<{_LINE.size}B"
LENGTH = _LINE.size
