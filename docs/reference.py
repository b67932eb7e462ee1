"""The pages of the reference: of each group a table, made from the docstrings, and a page for each of its functions.

A group is one file below `docs/api`, with an entry `::: name` for each function.
What a build shows of it is its prose and its table; `split` gives the entries to pages of their own.
"""

import importlib
import inspect
import posixpath
import re
from pathlib import Path

_ENTRY = re.compile(r"^::: (\S+)$|^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^::: (?P<name>\S+)\n(?:    .*\n)*\n?", re.MULTILINE)
_EMPTY = re.compile(r"^##+ .+\n+(?=## |\Z)", re.MULTILINE)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_FAMILIES = {
    "What they return": "records",
    "The records": "records",
    "What Taylor mode did": "report",
}
_WHOLE = (
    "errors",
    "memory",
    "steps",
    "verify",
    "where",
)  # groups that are one page: few functions, or one


def summary(page: str) -> str:
    """A table of a page's entries: the name, its first line, what it costs if any costs; a row for each heading."""
    rows = [["name", "what it is", "cost"], ["---"] * 3]
    heading, costs = "", []
    text = Path(page).read_text("utf-8")
    own = split(page.removeprefix("docs/"), text)[1]
    for entry, title in _ENTRY.findall(text):
        if title:
            heading = title
            continue
        if heading:
            rows.append([f"**{heading}**", "", ""])
            heading = ""
        module, _, name = entry.rpartition(".")
        document = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        first = document.partition("\n\n")[0]
        (folder,) = [
            f"{Path(each).stem}/"
            for each, shown in own.items()
            if f"::: {entry}\n" in shown
        ] or [""]
        costs.append(_cell(_cost(document)))
        rows.append([f"[`{name}`]({folder}#{entry})", _cell(first), costs[-1]])
    columns = 3 if any(costs) else 2
    table = "\n".join(f"| {' | '.join(row[:columns])} |" for row in rows)
    return f'<div class="summary" markdown>\n\n{table}\n\n</div>'


def split(page: str, text: str) -> tuple[str, dict[str, str]]:
    """What is left of a group's page such as `api/fields.md`, and the pages of its functions."""
    group = Path(page).stem
    if Path(page).parent.name != "api" or group in _WHOLE:
        return text, {}
    title = text.partition("\n")[0].removeprefix("# ")
    pages: dict[str, list[str]] = {}
    for found in _BLOCK.finditer(text):
        heading = [each[1] for each in _HEADING.finditer(text, 0, found.start())][-1:]
        name = _FAMILIES.get(heading[0]) if heading else None
        if found["name"].startswith("hodiff.rules."):
            name = "rules"
        pages.setdefault(name or found["name"].rpartition(".")[2], []).append(found[0])
    below = (
        f"\n[{title}](../{group}.md) lists the functions of this group and the keywords that they "
        "share.\n"
    )
    written = {
        posixpath.join("api", group, f"{name}.md"): _page(name, title, parts) + below
        for name, parts in pages.items()
    }
    return _EMPTY.sub("", _BLOCK.sub("", text)), written


def _page(name: str, group: str, parts: list[str]) -> str:
    if len(parts) == 1:
        head, _, options = parts[0].strip().partition("\n    options: {")
        return f"{head}\n    options: {{heading_level: 1{', ' + options if options else '}'}\n"
    return f"# {group}: {name}\n\n" + "\n".join(map(_second_level, parts))


def _second_level(part: str) -> str:
    """An entry below the title of its page."""
    head, _, options = part.strip().partition("\n    options: {")
    return (
        f"{head}\n    options: {{heading_level: 2{', ' + options if options else '}'}\n"
    )


def _cost(document: str) -> str:
    """The first sentence of the section Cost."""
    section = re.search(r"^Cost:\n((?:    .*\n?|\n)+)", document, re.MULTILINE)
    if section is None:
        return ""
    return re.split(r"[.;]\s", " ".join(section[1].split()) + " ")[0]


def _cell(text: str) -> str:
    """The text in a table, where a bar ends a cell: in a formula it is a command, elsewhere it is escaped."""
    parts = re.split(r"(\\\(.*?\\\))", " ".join(text.split()))
    formulas = [
        part.replace("|", r"\vert ").replace(r"\\vert ", r"\Vert ")
        for part in parts[1::2]
    ]
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    parts[1::2] = formulas
    return "".join(parts)
