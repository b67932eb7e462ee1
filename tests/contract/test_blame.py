"""Each planted fault is found, with its line and nothing beside it; what is clean passes, without a warning.

The suite runs a share of the programs of ``tests/support/cuts.py``; all of them, and the counts of the documentation:
``HODIFF_WRITE_TABLES=1 pytest tests/contract/test_blame.py --all``.
"""

import os
import warnings
from collections import Counter
from pathlib import Path

import pytest

import hodiff
from tests.meta.source import ROOT
from tests.support.cuts import CLEAN, CUTS, Program

SHARE = 7  # one in so many
PAGE = ROOT / "docs" / "generated" / "blame.md"


def blamed(program: Program, folder: Path) -> list[tuple[str, str, int]]:
    """What the report of a program names; nothing where it passes."""
    module = program.load(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hooks, and Functions of one's own, are warned of
            hodiff.check_derivatives(module.f, module.X)
    except hodiff.DerivativeError as error:
        found = [(cause.kind, Path(cause.file).name, cause.line) for cause in error.report.causes]
        assert all(f"{name}:{line}" in str(error) for _, name, line in found)
        return found
    return []


def passes(program: Program, folder: Path) -> bool:
    module = program.load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", hodiff.CustomFunctionWarning)
        return hodiff.check_derivatives(module.f, module.X).ok


@pytest.mark.parametrize("program", CUTS[::SHARE], ids=lambda p: p.name)
def test_a_planted_fault_is_found_with_its_line(program: Program, tmp_path: Path) -> None:
    assert blamed(program, tmp_path) == [(program.kind, f"{program.name}.py", program.line)]


@pytest.mark.parametrize("program", CLEAN[:: SHARE + 1], ids=lambda p: p.name)
def test_what_is_clean_passes(program: Program, tmp_path: Path) -> None:
    assert passes(program, tmp_path)


@pytest.mark.nightly
def test_all_of_them_as_published(tmp_path: Path) -> None:
    found, passed = Counter(), Counter()
    for program in CUTS:
        right = blamed(program, tmp_path) == [(program.kind, f"{program.name}.py", program.line)]
        found[program.of, right] += 1
    for program in CLEAN:
        passed[program.of, passes(program, tmp_path)] += 1
    text = page(found, passed)
    if os.environ.get("HODIFF_WRITE_TABLES") == "1":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text
    assert not any(count for (_, right), count in [*found.items(), *passed.items()] if not right)


def page(found: Counter, passed: Counter) -> str:
    lines = ["# Planted faults\n", "| planted | programs | found, with the right line and no other |", "|---|---|---|"]
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    lines += [f"| {kind} | {found[kind, True] + found[kind, False]} | {found[kind, True]} |" for kind in kinds]
    lines.append(f"| **all** | **{len(CUTS)}** | **{sum(found[kind, True] for kind in kinds)}** |\n")
    twins = [kind for kind in dict.fromkeys(kind for kind, _ in passed) if kind in kinds]
    others = [kind for kind in dict.fromkeys(kind for kind, _ in passed) if kind not in kinds]
    lines += ["| clean | programs | pass, without a warning |", "|---|---|---|"]
    for name, group in (("the same programs without the fault", twins), *((kind, [kind]) for kind in others)):
        count, right = (
            sum(passed[kind, each] for kind in group for each in which) for which in ((True, False), (True,))
        )
        lines.append(f"| {name} | {count} | {right} |")
    lines.append(f"| **all** | **{len(CLEAN)}** | **{sum(n for (_, right), n in passed.items() if right)}** |")
    return "\n".join(lines) + "\n"


def test_there_are_enough_of_them() -> None:
    assert len(CUTS) >= 200
    assert len(CLEAN) >= 200
    assert all(program.line for program in CUTS)
    assert not any(program.line for program in CLEAN)
