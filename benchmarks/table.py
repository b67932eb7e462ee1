"""One row per claim."""

from typing import NamedTuple


class Row(NamedTuple):
    subject: str
    case: str
    measured: str
    bar: str = ""
    met: bool | None = None  # None: shown for comparison, no bar


def header() -> str:
    return "| subject | case | measured | bar | met |\n|---|---|---|---|---|"


def line(row: Row) -> str:
    verdict = {True: "yes", False: "**no**", None: ""}[row.met]
    return f"| {row.subject} | {row.case} | {row.measured} | {row.bar} | {verdict} |"
