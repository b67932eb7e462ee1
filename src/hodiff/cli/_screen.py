"""What a demonstration prints: headings, plain lines, and numbers that are checked as they are printed."""

from __future__ import annotations

import math


class Screen:
    """Prints aligned lines, and remembers whether a number was wrong.

    Attributes:
        passed: How many checks have passed.
        failed: How many have not.
    """

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def title(self, text: str, *columns: str) -> None:
        """The first line, with the names of the columns."""
        self._line(text, *columns)

    def heading(self, text: str) -> None:
        """A line of text after an empty one."""
        print()
        print(text)

    def say(self, text: str) -> None:
        """A line of text below a heading."""
        print(f"   {text}")

    def check(self, label: str, got: float, expected: float, tolerance: float, remark: str = "") -> None:
        """A number and what it must be; `FAILED` where they differ by more than `tolerance`."""
        right = agree(got, expected, tolerance)
        self.passed += right
        self.failed += not right
        self._line(f"   {label}", number(got), number(expected), "ok" if right else "FAILED", remark)

    def compare(self, label: str, got: float, expected: float, tolerance: float) -> None:
        """A number that is not ours, and what it should be: said, but no failure of this program."""
        right = agree(got, expected, tolerance)
        self._line(
            f"   {label}", number(got), number(expected), "right" if right else "wrong", "" if right else "silently"
        )

    def end(self) -> int:
        """The verdict, and the exit status."""
        print()
        print(f"{self.passed} numbers checked." if not self.failed else f"{self.failed} numbers FAILED.")
        return 1 if self.failed else 0

    @staticmethod
    def _line(label: str, got: str, expected: str, state: str = "", remark: str = "") -> None:
        print(f"{label:<54}{got:>11}{expected:>11}  {state:<7}{remark}".rstrip())


def agree(got: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers are finite and differ by no more than `tolerance`."""
    return math.isfinite(got) and abs(got - expected) <= tolerance


def number(value: float) -> str:
    """A number in at most 11 characters: small ones are errors, where two digits tell enough."""
    if math.isfinite(value) and value == int(value) and abs(value) < 10**8:
        return f"{int(value):,}"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.6g}"
