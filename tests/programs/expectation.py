"""What is expected of a program after a public report. The rows are in `expected.py`, beside the programs."""

from typing import NamedTuple


class Expected(NamedTuple):
    """What is said of a program.

    Attributes:
        cause: The class of the failure.
        variables: What may be named, any of them.
        lines: Text of the line that may be shown, any of them; none where no line must be.
    """

    cause: str
    variables: tuple[str, ...]
    lines: tuple[str, ...]
