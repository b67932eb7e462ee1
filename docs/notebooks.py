"""Pages as Jupyter notebooks: prose becomes cells of Markdown, each fence one of code, pictures show themselves.

Those of `PAGES` are stored with their outputs in `docs/notebooks`, and the site offers them beside
the pages. `python -m docs.notebooks [PAGE ...]` runs them anew.
"""

import argparse
import json
import re
from pathlib import Path

PAGES = tuple(
    f"recipes/{name}"
    for name in (
        *(
            "wgan-gp",
            "burgers",
            "heat",
            "frequencies",
            "hydrogen",
            "spectrum-dataloader",
        ),
        *("influence", "fisher-diagonal", "per-sample", "gaussian-process", "maml"),
        *("hyperparameters", "mean-flows", "second-order", "which-buffers"),
    )
)
_DOCS = Path(__file__).parent
_FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FIGURES = re.compile(r"^from docs\.figures import (.*)$", re.MULTILINE)
_STANDS_IN = (
    "from matplotlib.pyplot import subplots\n\n\ndef svg(figure, says): "
    " # the figure shows itself\n    return says\n"
)


def notebook(page: str) -> str:
    """The notebook of a page such as `recipes/burgers`."""
    parts = _FENCE.split((_DOCS / f"{page}.md").read_text("utf-8"))
    cells = [
        _code(part) if place % 2 else _prose(part)
        for place, part in enumerate(parts)
        if part.strip()
    ]
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {
            "cells": cells,
            "metadata": {"kernelspec": kernel},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )


def _code(text: str) -> dict:
    def stands_in(imported: re.Match) -> str:
        return _STANDS_IN + ('\n\nINK = "black"\n' if "INK" in imported[1] else "")

    source = _FIGURES.sub(stands_in, text)
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source.strip(),
    }


def _prose(text: str) -> dict:
    text = re.sub(r"\[(`[^`]+`)\]\[[^\]]+\]", r"\1", text)
    text = re.sub(
        r"\[([^\]]+)\]\([\w./-]+\.md(?:#[\w-]+)?\)", r"\1", text
    )  # no page is beside it
    text = (
        text.replace(r"\(", "$")
        .replace(r"\)", "$")
        .replace(r"\[", "$$")
        .replace(r"\]", "$$")
    )
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def stored(page: str) -> Path:
    """Where it lies with its outputs."""
    return _DOCS / "notebooks" / f"{Path(page).name}.ipynb"


def run(page: str) -> str:
    """The notebook with its outputs: text, and pictures as the smaller of their two forms."""
    import nbclient
    import nbformat

    whole = nbformat.reads(notebook(page), as_version=4)
    small = "%config InlineBackend.print_figure_kwargs = {'dpi': 60}"
    whole.cells.insert(0, nbformat.v4.new_code_cell(small))
    nbclient.NotebookClient(whole, timeout=600, kernel_name="python3").execute()
    del whole.cells[0]
    for number, cell in enumerate(whole.cells, 1):
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.execution_count = number
            cell.outputs = [
                each for each in cell.outputs if each.get("name") != "stderr"
            ]
            for each in cell.outputs:
                if "execution_count" in each:
                    each.execution_count = number
    return json.dumps(whole, indent=1) + "\n"


def main() -> None:
    """Runs all of them, or those that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.notebooks", description=__doc__
    )
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="such as recipes/burgers"
    )
    for page in parser.parse_args().pages or PAGES:
        stored(page).parent.mkdir(exist_ok=True)
        stored(page).write_text(run(page), encoding="utf-8")
        print(page, flush=True)


if __name__ == "__main__":
    main()
