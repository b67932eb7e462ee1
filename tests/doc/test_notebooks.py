"""The notebooks of the site are whole, and run."""

import json
import re
import textwrap

import pytest
from docs.notebooks import PAGES, notebook, run, stored

from tests.doc.snippets import ROOT


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_a_cell_and_no_link_leads_to_a_page_that_is_not_beside_it(page):
    cells = json.loads(notebook(page))["cells"]
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert sum(cell["cell_type"] == "code" for cell in cells) == len(re.findall(r"^```python", text, re.MULTILINE))
    for cell in cells:
        if cell["cell_type"] == "code":
            compile(cell["source"], page, "exec")
            assert "docs.figures" not in cell["source"]
        else:
            assert ".md" not in cell["source"] and "exec=" not in cell["source"]


def outputs(page):
    """For each cell of code of the stored notebook, its outputs."""
    return [cell["outputs"] for cell in json.loads(stored(page).read_text("utf-8"))["cells"] if "outputs" in cell]


def test_ten_and_more_are_stored():
    assert len(PAGES) >= 10
    folder = stored(PAGES[0]).parent
    assert {path.stem for path in folder.iterdir()} == {stored(page).stem for page in PAGES}
    linked = (ROOT / "docs" / "recipes" / "notebooks.md").read_text("utf-8")
    for page in PAGES:
        assert f"(../notebooks/{stored(page).name})" in linked


@pytest.mark.parametrize("page", PAGES)
def test_what_is_stored_is_what_the_page_says_with_its_outputs(page):
    """After a change of the page: `python -m docs.notebooks PAGE`."""
    source = lambda text: [(cell["cell_type"], cell["source"]) for cell in json.loads(text)["cells"]]
    assert source(stored(page).read_text("utf-8")) == source(notebook(page))
    cells = [code for kind, code in source(notebook(page)) if kind == "code"]
    for code, found in zip(cells, outputs(page), strict=True):
        assert all(each["output_type"] != "error" for each in found)
        assert bool(found) >= ("\nprint(" in f"\n{code}"), code
        if "subplots(" in code and "svg(" in code:
            assert any("image/png" in each.get("data", {}) for each in found)
    assert stored(page).stat().st_size < 200_000


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_it_runs_and_prints_as_many_lines_as_are_stored(page):
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    # what a cell prints comes in one piece or in several, by chance
    lines = lambda found: sum(each["text"].count("\n") for each in found if each["output_type"] == "stream")
    cells = [cell["outputs"] for cell in json.loads(run(page))["cells"] if "outputs" in cell]
    assert [lines(found) for found in cells] == [lines(found) for found in outputs(page)]


def test_the_cells_of_the_recipe_print_what_it_says(capsys):
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    text = (ROOT / "docs" / "recipes" / "notebook_cells.txt").read_text("utf-8")
    cells = [
        textwrap.dedent(" " * 8 + cell)  # as indented as the lines that follow it
        for cell in re.findall(r"^In \[\d\]: (.*\n(?:(?: {8}.*)?\n(?! {2}\w))*)", text, re.MULTILINE)
    ]
    assert len(cells) == 4
    shell = interactive.InteractiveShell.instance(display_page=False, colors="nocolor")
    try:
        shell.reset(new_session=True)
        for cell in cells:
            shell.run_cell(cell, store_history=True)
    finally:
        shell.history_manager.end_session()
        interactive.InteractiveShell.clear_instance()
    printed = capsys.readouterr().out
    assert text.partition("RuntimeError: ")[2].partition(" …")[0] in printed
    explanation = text.partition("Out[4]:\n")[2]
    assert printed.partition("Out[4]:")[2].strip() == explanation.strip()
