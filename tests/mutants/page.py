"""`docs/generated/mutants.md`, written from the results that are kept beside this file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.meta.source import ROOT
from tests.mutants.living import WHY

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = ROOT / "docs" / "generated" / "mutants.md"
KILLED = ("killed", "killed by time")


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []


def write() -> None:
    PAGE.write_text(text(read(RESULTS)), encoding="utf-8")


def text(results: list[dict[str, Any]]) -> str:
    """The counts by rule, and each bug that lives, with the reason where one is known."""
    tried, killed = Counter(map(_rule, results)), Counter(_rule(r) for r in results if r["outcome"] in KILLED)
    lines = ["# Bugs planted by rule\n", "| what was changed | planted | seen by a test |", "|---|---|---|"]
    lines += [f"| {rule} | {count} | {killed[rule]} |" for rule, count in sorted(tried.items())]
    lines.append(f"| **all** | **{tried.total()}** | **{killed.total()}** |\n")
    living = sorted((r for r in results if r["outcome"] not in KILLED), key=lambda result: result["name"])
    if living:
        lines += ["| not seen | was | became | why |", "|---|---|---|---|"]
        lines += [
            f"| {r['name']} | {_code(r['before'])} | {_code(r['after'])} | {WHY.get(r['name'], '')} |" for r in living
        ]
    return "\n".join(lines) + "\n"


def _rule(result: dict[str, Any]) -> str:
    return result["name"].partition(" ")[2]


def _code(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|")
    return f"`{short[:60]}...`" if len(short) > 60 else f"`{short}`"
