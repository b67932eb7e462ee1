"""What the search of the site finds first: names come with what they are, and pages with the words people type."""

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_FORMULA = re.compile(
    r"(?:[\s,:]|\b(?:and|by|for|from|in|is|of|or|over|to|with)\b)*\\\(.*"
)  # and what follows it
_KEYWORD = 1000.0  # what a keyword counts for: as a word of a title does in the theme
# a page of the reference as a whole, and the records that its functions return: rather the function
_ASIDE = 0.3
# pages that hold a little of everything, or figures, are found after those that explain; first
# words first
_SHARES = {
    "api/calculus/hessian/": 2.7,
    "api/calculus/": 2.0,
    "api/cli/": 0.1,
    "api/sparse/sparse_hessian/": 2.0,  # beside hessian, whose title the word fills
    "benchmarks/": 0.1,
    "changelog/": 0.1,
    "coming-from": 0.3,
    "explain/benchmarks/": 0.1,
    "explain/correctness/": 0.5,
    "explain/operations/": 0.1,
    "explain/wrong-derivatives/": 0.3,
    "recipes/hessian-training/": 0.5,
    "recipes/messages/": 1.6,
    "recipes/notebooks/": 0.5,  # beside messages with the word "not"
    "recipes/is-my-penalty-right/": 0.5,
}


def improve(path: Path, listed: str) -> None:
    """Rewrites the index at `path`: it keeps its form, so that another theme would find in it what it knows."""
    index = json.loads(path.read_text("utf-8"))
    words = keywords(listed, {part["location"] for part in index["docs"]})
    for part in index["docs"]:
        location = part["location"]
        page, _, anchor = location.partition("#")
        part["title"] = _title(part["title"], anchor or part["title"])
        if location in words:
            part["tags"] = words[location]
        aside = (
            location not in words
            and page.startswith("api/")
            and ("hodiff." not in (anchor or part["title"]) or "._" in anchor)
        )
        part["boost"] = _ASIDE if aside else _share(page)
    index["config"]["fields"]["tags"]["boost"] = _KEYWORD
    path.write_text(
        json.dumps(index, ensure_ascii=False, separators=(",", ":")), "utf-8"
    )


def _share(page: str) -> float:
    """That of the page, or of the group of the reference that it belongs to."""
    return next(
        (share for start, share in _SHARES.items() if page.startswith(start)), 1.0
    )


def keywords(text: str, locations: set[str]) -> dict[str, list[str]]:
    """The words of `keywords.txt`, by where each line leads: a page, a heading of it, or a name."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        target, _, words = line.partition(": ")
        page, _, anchor = target.partition("#")
        if page.endswith(".md"):
            address = re.sub(r"(index)?\.md$", "/", page).replace("//", "/")
            places = [f"{address}#{anchor}" if anchor else address]
        else:
            places = [place for place in locations if place.endswith(f"#{target}")]
        if len(places) != 1 or places[0] not in locations:
            raise PluginError(f"docs/keywords.txt: {target!r} is not in the index")
        found.setdefault(places[0], []).extend(
            word.strip() for word in words.split(",")
        )
    return found


def _title(title: str, anchor: str) -> str:
    """`hodiff.hvp` is found by "Hessian-vector product", the beginning of what its docstring says."""
    module, _, name = anchor.rpartition(".")
    if not module.startswith("hodiff"):
        return title
    try:
        document = inspect.getdoc(_object(module, name))
    except (ImportError, AttributeError):  # a member of a class
        return title
    first = " ".join((document or "").partition("\n\n")[0].split())
    shown = name if "._" in anchor else anchor
    return (
        f"{shown}: {_FORMULA.sub('', first).rstrip('.').replace('`', '')}"
        if first
        else title
    )


def _object(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
