"""What is said of programs that fail, and of growth, is so: programs whose truth is known, laws without words.

`programs.py` writes the programs and knows their truth, `laws.py` runs them and compares. A fact
that is not so fails here; a sentence that helps nobody does not.
"""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.facts.laws import Report, close, told, violations
from tests.contract.facts.programs import FAMILIES, Program, program
from tests.support.releases import CHANGES

FIXED, MANY, BLOCK = 300, 3000, 50


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def judged(seed: int, folder: Path) -> list[str]:
    """What is said of a program that is not so, or not said and so; with its text."""
    written = program(seed)
    report = told(written, folder)
    found = list(violations(report))
    close(report)
    return [*found, *written.text.splitlines()] if found else []


@CHANGES
@pytest.mark.table(plain=10)
@pytest.mark.parametrize("seed", range(FIXED))
def test_what_is_said_is_so(seed: int, tmp_path: Path) -> None:
    assert judged(seed, tmp_path) == []


@CHANGES
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(FIXED, MANY, BLOCK))
def test_what_is_said_is_so_of_many(first: int, tmp_path: Path) -> None:
    wrong = {seed: found for seed in range(first, first + BLOCK) if (found := judged(seed, tmp_path))}
    assert wrong == {}


# --- the programs ---------------------------------------------------------------------------------


@pytest.mark.table(plain=2)
@pytest.mark.parametrize("first", range(0, FIXED, BLOCK))
def test_the_programs_raise_what_their_truth_says(first: int, tmp_path: Path) -> None:
    """Where they say, for PyTorch alone: the truth is calculated by the writer and by nothing of hodiff."""
    for seed in range(first, first + BLOCK):
        written = program(seed)
        report = told(written, tmp_path, explains=False)
        assert bool(report.message) == bool(written.truth.error), written.text
        assert written.truth.error in report.message, written.text
        assert report.failed == written.lines.get(written.truth.failed, 0), written.text
        close(report)


def test_a_seed_is_one_program() -> None:
    assert [program(seed) for seed in range(20)] == [program(seed) for seed in range(20)]
    families = Counter(program(seed).family for seed in range(FIXED))
    assert set(families) == set(FAMILIES)
    assert min(families.values()) >= 5


# --- the laws can fail ----------------------------------------------------------------------------


PLANTED = 40
"""Programs whose facts are made wrong, one after another."""


def wrong_facts(report: Report) -> list[tuple[str, Report]]:
    """The report with one fact left out, at another line, of other leaves, stepped by another optimizer."""
    forms = []
    for index, fact in enumerate(report.facts):
        changes = {"left out": None}
        if fact.line is not None:
            changes["line"] = fact._replace(line=fact.line._replace(number=1))
        if fact.leaves:
            changes["leaves"] = fact._replace(leaves=fact.leaves[1:] or ("x",))
            changes["owners"] = fact._replace(owners=(*fact.owners, "opt"))
        for name, other in changes.items():
            facts = (*report.facts[:index], *([other] if other is not None else []), *report.facts[index + 1 :])
            forms.append((f"{fact.kind}: {name}", replace(report, facts=facts)))
    return forms


HARMLESS = re.compile(
    "(no graph|called|freed nodes|left|failed): left out|(called|unused): line|"
    "(unused|frozen|cuts), (made|read): left out|unused, made: line"
)
"""A fact that a reader can do without, and lines that the laws know in part."""


@CHANGES
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "growth"])
def test_a_wrong_fact_is_noticed(family: str, tmp_path: Path) -> None:
    noticed, missed = Counter[str](), Counter[str]()
    for seed in [seed for seed in range(FIXED) if program(seed).family == family][:PLANTED]:
        report = told(program(seed), tmp_path)
        if list(violations(report)):
            continue
        for name, wrong in wrong_facts(report):
            (noticed if list(violations(wrong)) else missed)[name] += 1
        close(report)
    assert noticed
    # Of two facts that say the same, or of more cuts than are told, one may go.
    rare = [name for name in missed if missed[name] > noticed[name] / 3]
    assert [name for name in rare if not HARMLESS.match(name) and not HARMLESS.match(f"{family}, {name}")] == []


def test_a_wrong_holder_is_noticed(tmp_path: Path) -> None:
    written = next(each for each in map(program, range(FIXED)) if each.truth.holder and each.truth.untrained)
    report = told(written, tmp_path)
    assert list(violations(report)) == []
    for name, value in {"holder": "other", "count": 3, "grows": next(iter(written.lines)), "untrained": {"x"}}.items():
        other: Program = replace(written, truth=replace(written.truth, **{name: value}))
        assert len(list(violations(replace(report, program=other)))) == 1
