"""`docs/generated/mutants.md`, written from the results that are kept beside this file."""

import json
from pathlib import Path
from typing import Any

from tests.meta.source import ROOT

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = ROOT / "docs" / "generated" / "mutants.md"


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def write() -> None:
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    raise NotImplementedError
