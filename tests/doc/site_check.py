"""Checks a built site: nothing is fetched from elsewhere, every internal link and anchor exists, every fence ran, and
it is short.

python tests/doc/site_check.py site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

# Tags whose attribute makes a browser fetch, as opposed to a link that a reader may follow.
FETCHES = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
NOT_FETCHED = {"alternate", "canonical", "edit", "next", "prev"}  # values of <link rel=…> that only inform
EXTERNAL = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
CSS_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", re.IGNORECASE)
PAGES, WORDS, LONGEST = 115, 110_000, 1_500  # of the site, and of a page, as rendered
DATA = {  # pages that are a record, or a table
    "explain/stock-pytorch",
    "explain/wrong-derivatives",
    "explain/operations",
    "explain/failures",
    "benchmarks",
}
UNSEEN = {"script", "style", "svg", "math"}  # what of an article is no word


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []  # of the article
        self._inside = self._hidden = 0
        self.anchors: set[str] = set()
        self.links: list[str] = []  # followed by a reader
        self.fetched: list[str] = []  # followed by the browser
        self._in_style = False
        self.raw = False  # a fence that failed: the theme shows it as text, even in a strict build

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if not (tag == "link" and NOT_FETCHED & set(values.get("rel", "").split())):
            for name in FETCHES.get(tag, ()):
                if values.get(name):
                    self.fetched.extend(_addresses(name, values[name]))
        self.fetched.extend(_css_addresses(values.get("style", "")))
        self._in_style = tag == "style"
        self._inside += tag == "article"
        self._hidden += tag in UNSEEN
        self.text += [" "] * (tag not in ("span", "a", "code"))

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
        self._inside -= tag == "article"
        self._hidden -= tag in UNSEEN

    def handle_data(self, data: str) -> None:
        if self._inside and not self._hidden:
            self.text.append(data.replace("¶", ""))
        self.raw |= "```python exec=" in data
        if self._in_style:
            self.fetched.extend(_css_addresses(data))


def _addresses(attribute: str, value: str) -> list[str]:
    if attribute == "srcset":
        return [candidate.split()[0] for candidate in value.split(",") if candidate.strip()]
    return [value]


def _css_addresses(css: str) -> list[str]:
    return [first or second for first, second in CSS_URL.findall(css)]


def check_site(root: Path) -> list[str]:
    """Every fault of the site below `root`, one line each."""
    pages: dict[Path, _Page] = {}
    for path in sorted(root.rglob("*.html")):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    if not pages:
        return [f"{root}: holds no page"]

    faults, total = [], 0
    for path, page in pages.items():
        name = path.relative_to(root.resolve())
        words = len("".join(page.text).split())
        total += words
        if words > LONGEST and name.parent.as_posix() not in DATA:
            faults.append(f"{name}: {words} words, at most {LONGEST}")
        if page.raw:
            faults.append(f"{name}: shows a fence that did not run")
        for address in page.fetched:
            faults.extend(_fault(root, path, name, address, pages, fetched=True))
        for address in page.links:
            faults.extend(_fault(root, path, name, address, pages, fetched=False))
    for sheet in sorted(root.rglob("*.css")):
        for address in _css_addresses(sheet.read_text(encoding="utf-8")):
            faults.extend(_fault(root, sheet.resolve(), sheet.relative_to(root), address, pages, fetched=True))
    number = sum(path.name == "index.html" for path in pages)
    if number > PAGES or total > WORDS:
        faults.append(f"{number} pages of {total} words, at most {PAGES} of {WORDS}")
    return faults


def _fault(root: Path, source: Path, name: Path, address: str, pages: dict, *, fetched: bool) -> list[str]:
    if EXTERNAL.match(address):
        return [f"{name}: fetches from elsewhere: {address}"] if fetched else []
    parts = urlsplit(address)
    if parts.scheme:  # data:, mailto:
        return []
    here = "/" + source.relative_to(root.resolve()).as_posix()
    there = unquote(urljoin(here, parts.path)) if parts.path else here
    target = (root.resolve() / there.lstrip("/")).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        # 404.html is served at any depth, so its addresses start at the root of wherever the site is hosted.
        return [] if source.name == "404.html" else [f"{name}: broken: {address}"]
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].anchors:
        return [f"{name}: no such anchor: {address}"]
    return []


def main() -> int:
    root = Path(sys.argv[1])
    faults = check_site(root)
    print("\n".join(faults) or f"{root}: nothing external is fetched, no link is broken")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
