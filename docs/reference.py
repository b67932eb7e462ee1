"""The tables at the top of the reference's pages, made from the docstrings below them: they cannot disagree."""

import importlib
import inspect
import re
from pathlib import Path

_ENTRY = re.compile(r"^::: (\S+)$|^## (.+)$", re.MULTILINE)


def summary(page: str) -> str:
    """A table of a page's entries: the name, its first line, what it costs; a row for each of the page's headings."""
    rows = ["| | | cost |", "|---|---|---|"]
    heading = ""
    for entry, title in _ENTRY.findall(Path(page).read_text("utf-8")):
        if title:
            heading = title
            continue
        if heading:
            rows.append(f"| **{heading}** | | |")
            heading = ""
        module, _, name = entry.rpartition(".")
        document = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        first = document.partition("\n\n")[0]
        rows.append(f"| [`{name}`](#{entry}) | {_cell(first)} | {_cell(_cost(document))} |")
    table = "\n".join(rows)
    return f'<div class="summary" markdown>\n\n{table}\n\n</div>'


def _cost(document: str) -> str:
    """The first sentence of the section Cost."""
    section = re.search(r"^Cost:\n((?:    .*\n?|\n)+)", document, re.MULTILINE)
    if section is None:
        return ""
    sentence = re.split(r"(?<=[.;:])\s", " ".join(section[1].split()))[0]
    return "as below" if sentence.endswith(":") else sentence.rstrip(".;")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\vert ").replace(r"\\vert ", r"\Vert ")
