"""Tables of thousands of cases: which of them run is drawn by a seed, and what is named runs."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.conftest import hash_of_the_tree, left_out
from tests.meta.source import ROOT


@dataclass(frozen=True)
class Case:
    nodeid: str
    number: int

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.Mark("drawn", (self.number,), {}, _ispytest=True) if self.number else None


def table(name: str, number: int, cases: int = 100) -> list[Case]:
    return [Case(f"tests/a.py::{name}[{i}]", number) for i in range(cases)]


def test_so_many_of_each_function_run() -> None:
    big, small, plain = table("test_big", 7), table("test_small", 200), table("test_plain", 0)
    left = left_out([*big, *small, *plain], "a seed")
    assert len(set(big) - left) == 7
    assert left < set(big)


def test_the_draw_depends_on_the_seed_and_on_nothing_else_that_runs() -> None:
    big, other = table("test_big", 7), table("test_other", 7)
    alone = left_out(big, "a seed")
    assert alone == left_out([*other, *big], "a seed") & set(big) != left_out(big, "another seed")


def test_over_many_seeds_all_cases_run() -> None:
    big = table("test_big", 7)
    assert set().union(*(set(big) - left_out(big, f"{seed}") for seed in range(200))) == set(big)


def test_a_copy_of_the_tree_draws_the_same_and_a_changed_one_does_not(tmp_path) -> None:
    for folder in ("src", "tests"):
        (tmp_path / "one" / folder).mkdir(parents=True)
        (tmp_path / "one" / folder / "a.py").write_text("1\n")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = hash_of_the_tree(tmp_path / "one")
    assert first == hash_of_the_tree(tmp_path / "two")
    (tmp_path / "two" / "src" / "a.py").write_text("2\n")
    assert first != hash_of_the_tree(tmp_path / "two")


TABLE = """
import pytest


@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(50))
def test_of_a_table(number):
    assert number < 0, "it fails"
"""


@pytest.mark.parametrize(
    ("arguments", "failed"),
    [
        ((), 3),
        (("test_it.py::test_of_a_table[31]",), 1),
        pytest.param(("--slow",), 50, marks=pytest.mark.slow),
        pytest.param(("-k", "table and 4"), 14, marks=pytest.mark.slow),
    ],
)
def test_what_is_named_runs_and_what_fails_says_how_to_repeat_it(tmp_path, arguments, failed) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(TABLE)
    given = arguments if "::" in "".join(arguments) else ("test_it.py", *arguments)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *given]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    found = run.stdout
    assert f"{failed} failed" in found, found
    assert found.count("python -m pytest 'test_it.py::test_of_a_table[") == failed
