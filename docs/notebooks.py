"""Pages as Jupyter notebooks: prose becomes cells of Markdown, each fence one of code, pictures show themselves.

The site offers those of `PAGES` beside the pages; `python -m docs.notebooks FOLDER` writes them.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

PAGES = (
    "recipes/wgan-gp",
    "recipes/burgers",
    "recipes/spectrum-dataloader",
    "recipes/which-buffers",
)  # one per pillar
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


def main() -> None:
    """Writes all of them."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        (folder / f"{posixpath.basename(page)}.ipynb").write_text(
            notebook(page), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
