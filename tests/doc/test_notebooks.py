"""The notebooks of the site are whole, and run."""

import json
import re
import textwrap

import pytest
from docs.notebooks import PAGES, notebook

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


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_it_runs(page, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    written = nbformat.reads(notebook(page), as_version=4)
    nbclient.NotebookClient(
        written, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [output for cell in written.cells for output in cell.get("outputs", [])]
    assert shown
    if "subplots" in notebook(page):
        assert any("image/png" in output.get("data", {}) for output in shown)


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
