"""The law of the choice: which cases run depends on their names alone."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from tests.meta.source import ROOT
from tests.support.choice import PINNED, PLAIN, left_out, pinned


@dataclass(frozen=True)
class Case:
    nodeid: str
    marks: dict[str, dict[str, int | None]] = field(default_factory=dict, hash=False)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.Mark(name, (), self.marks[name], _ispytest=True) if name in self.marks else None


def table(name: str, cases: int = 100, **marks: dict[str, int | None]) -> list[Case]:
    return [Case(f"tests/a.py::{name}[{i}]", marks) for i in range(cases)]


def kept(cases: list[Case], level: str, *pins: str) -> set[str]:
    left = left_out(cases, level, frozenset(pins))
    return {case.nodeid for case in cases} - {case.nodeid for case in left}


def test_so_many_cases_of_each_function_run_at_each_level() -> None:
    big, small = table("test_big"), table("test_small", 2)
    ours = table("test_ours", table={"plain": 1, "wide": 20})
    every = [*big, *small, *ours]
    assert [len(kept(every, level)) for level in ("plain", "wide", "all")] == [PLAIN + 3, 122, 202]
    assert kept(every, "plain") < kept(every, "wide") < kept(every, "all")


def test_a_mark_keeps_a_case_for_its_level() -> None:
    long, sweep = table("test_long", 2, wide={}), table("test_sweep", 2, nightly={})
    assert [len(kept([*long, *sweep], level)) for level in ("plain", "wide", "all")] == [0, 2, 4]


def test_a_choice_depends_on_names_alone() -> None:
    big, other = table("test_big"), table("test_other")
    alone = kept(big, "plain")
    assert kept(other[:7] + big[::-1] + other[7:], "plain") & {case.nodeid for case in big} == alone
    assert {name.replace("big", "other") for name in alone} != kept(other, "plain")


def test_a_pinned_case_runs() -> None:
    big = table("test_big", 50, wide={})
    assert kept(big, "plain", big[31].nodeid) == {big[31].nodeid}


def test_pins_have_a_reason_and_name_tests_that_exist() -> None:
    text = PINNED.read_text("utf-8")
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(pinned(text)) == len(rows)
    for row in rows:
        case, _, reason = row.partition("  # ")
        path, _, name = case.partition("::")
        assert reason, row
        function = re.escape(name.partition("[")[0])
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), row


TABLE = """
import pytest


@pytest.mark.table(wide=30)
@pytest.mark.parametrize("number", range(50))
def test_of_a_table(number):
    assert number < 0, "it fails"
"""


@pytest.mark.table(plain=1)
@pytest.mark.parametrize(
    ("arguments", "failed"),
    [
        (("test_it.py",), PLAIN),
        (("test_it.py::test_of_a_table[31]",), 1),
        pytest.param(("test_it.py", "--wide"), 30, marks=pytest.mark.wide),
        pytest.param(("test_it.py", "--all"), 50, marks=pytest.mark.wide),
        pytest.param(("test_it.py", "-k", "table and 4"), 14, marks=pytest.mark.wide),
    ],
)
def test_what_is_named_runs(tmp_path, arguments, failed) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(TABLE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"{failed} failed" in run.stdout, run.stdout
