"""What the pages for contributors say of the code is so: files and names are there, and walks go as they are told."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hodiff
from tests.meta.source import PACKAGE, ROOT
from tests.support.calls import walked

PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "explain").glob("*.md"))]
HOW_IT_WORKS = (ROOT / "docs" / "explain" / "how-it-works.md").read_text("utf-8")
MAP = (ROOT / "docs" / "explain" / "map.md").read_text("utf-8")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|jsonl?))`")

X = torch.linspace(-1, 1, 6).view(2, 3)
MODEL = nn.Linear(3, 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    missing = {
        path
        for path in PATH.findall(page.read_text("utf-8"))
        if not (ROOT / path).is_file() and not (PACKAGE / path).is_file()
    }
    assert not missing


def test_each_row_of_the_map_has_files_and_tests() -> None:
    first = MAP.partition("## ")[0]
    rows = [line.split(" | ") for line in first.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 11
    for concept, files, tests, _ in rows:
        assert all((PACKAGE / path).is_file() for path in PATH.findall(files)) and PATH.findall(files), concept
        assert all((ROOT / path).is_file() for path in PATH.findall(tests)) and PATH.findall(tests), concept


def test_names_of_the_map_are_in_the_code() -> None:
    """Of functions, classes and tables: somewhere in the library or in its tests."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text("utf-8"))}
    names = re.findall(r"`@?(\w+)(?:=|\(.*\))?`", MAP)
    assert "CLASSES" in names and not set(names) - words


def hessian_operator() -> None:
    f = lambda model, batch: (model(batch).square().sum(), len(batch))
    hodiff.HessianOperator(f, MODEL, data=[X, X]) @ torch.ones(4)


WALKS: dict[str, Callable[[], object]] = {
    "`v` of `hodiff.hvp(f, x, v)`": lambda: hodiff.hvp(lambda x: x.pow(3).sum(), X, X),
    "`data` of `hodiff.HessianOperator(f, model, data=batches) @ v`": hessian_operator,
    "`f` of `hodiff.laplacian(f, x)`": lambda: hodiff.laplacian(lambda x: x.pow(3).sum(-1), X),
    "`x` of `hodiff.gradient_penalty(critic, x)`": lambda: hodiff.gradient_penalty(MODEL, X),
    "`f` of `hodiff.sparse_hessian(f, x)`": lambda: hodiff.sparse_hessian(lambda x: (x[1:] * x[:-1]).prod(0).sum(), X),
}


def stops(title: str) -> list[str]:
    """The functions of a walk, from the page."""
    (walk,) = re.findall(rf"{re.escape(title)}:\n\n```text\n(.*?)```", HOW_IT_WORKS, re.DOTALL)
    return [line.split()[0] for line in walk.splitlines()]


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_goes_as_it_is_told(title: str) -> None:
    seen = list(walked(WALKS[title], PACKAGE))
    told = stops(title)
    assert len(told) == 10
    assert not [stop for stop in told if stop not in seen]
    assert told == sorted(told, key=seen.index)
