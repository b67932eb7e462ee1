"""The code in the README and on every page of the documentation runs."""

import ast
import builtins
import linecache
import re

import pytest
import torch

import hodiff
from tests.doc.snippets import ROOT, run_page

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *(page for page in PAGES if not page.startswith("docs/generated/"))]
FENCES = {page: len(re.findall(r"^```python\b", (ROOT / page).read_text("utf-8"), re.MULTILINE)) for page in PAGES}


@pytest.mark.table(plain=None)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[pytest.mark.wide] * page.endswith(("several-processes.md", "sharded-models.md"))
        )  # they start some
        for page, count in FENCES.items()
        if count and "/recipes/" in page
    ],
)
def test_first_block_of_a_recipe_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_page(ROOT / page, fences=1) == 1


def test_readme_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_page(ROOT / "README.md") == FENCES["README.md"]


@pytest.mark.wide
@pytest.mark.parametrize("page", [page for page, count in FENCES.items() if count])
def test_page_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_page(ROOT / page) == FENCES[page]  # none is skipped silently


def test_the_documentation_has_code():
    assert sum(FENCES.values()) >= 30
    for page in ("README.md", "docs/index.md", "docs/recipes/second-order.md", "docs/explain/graphs.md"):
        assert FENCES[page] >= 2, page


def test_each_fence_of_the_site_shows_its_output():
    for page in PAGES[1:]:
        for options in re.findall(r"^```python\b(.*)$", (ROOT / page).read_text("utf-8"), re.MULTILINE):
            assert 'exec="true"' in options, f"{page}: a fence that does not run at build"


def test_code_is_as_wide_as_a_page_shows_it():
    """A desktop shows 88 columns of a block; what is wider has to be scrolled."""
    wide = []
    for page in PAGES:
        for fence in re.findall(r"^ *```\w.*\n((?:(?! *```).*\n)*)", (ROOT / page).read_text("utf-8"), re.MULTILINE):
            wide += [f"{page}: {line}" for line in fence.splitlines() if len(line) > 88]
    for program in sorted((ROOT / "docs" / "recipes").glob("*.py")):
        wide += [f"{program.name}: {line}" for line in program.read_text("utf-8").splitlines() if len(line) > 88]
    assert not wide


def test_a_recipe_shows_at_most_forty_lines_at_once():
    """What a program starts from is folded."""
    long = []
    for page in PAGES:
        fences = re.findall(r"^```python\b(.*)\n((?:.*\n)*?)```$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
        for options, code in fences:
            if "/recipes/" in page and "source=" in options and "folded=" not in options and code.count("\n") > 40:
                long.append(f"{page}: {code.count(chr(10))} lines: {code.partition(chr(10))[0]}")
    assert not long


HIDDEN = {"docs/recipes/several-losses.md": {"peak"}}  # told on the page


@pytest.mark.parametrize("page", [page for page, count in FENCES.items() if count])
def test_what_is_shown_needs_nothing_that_is_hidden(page):
    fences = re.findall(r"^```python\b(.*)\n((?:.*\n)*?)```$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    shown = "\n".join(code for options, code in fences if "exec=" not in options or "source=" in options)
    made, read = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(shown)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
    assert read - made == HIDDEN.get(page, set())


def test_what_readers_copy_imports_nothing_of_the_repository():
    """Pictures of the pages are made in fences that are run and not shown."""
    for page in PAGES:
        for options, code in re.findall(
            r"^```python\b(.*)\n((?:.*\n)*?)```$", (ROOT / page).read_text("utf-8"), re.MULTILINE
        ):
            if "exec=" not in options or "source=" in options:
                assert not re.search(r"^\s*(?:from|import) (?:docs|tests|benchmarks)\b", code, re.MULTILINE), page


@pytest.mark.parametrize(("page", "all_of_them"), [("getting-started", True), ("recipes/backward-twice", False)])
def test_lines_that_a_page_explains_are_in_its_output(page, all_of_them, monkeypatch, capsys):
    """Of the fence that `watch` explains, whose lines the site calls `page:1` and so on."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\b.*\n((?:(?!```).*\n)*?.*graph\.watch\(\)(?:.*\n)*?)```$", text, re.MULTILINE)
    monkeypatch.setitem(linecache.cache, "page", (len(code), None, code.splitlines(keepends=True), "page"))
    exec(compile(code, "page", "exec"), {"torch": torch, "hodiff": hodiff, "inputs": torch.ones(64, 2)})
    printed = set(re.findall(r"page:\d+", capsys.readouterr().out))
    told = set(re.findall(r"`(page:\d+)`", text))
    assert told and told <= printed
    assert not all_of_them or told == printed
