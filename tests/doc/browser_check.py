"""Looks at a built site in a real browser, at a desk and on a phone, light and dark: `browser_check.py site`.

What is held is what a reader would see: nothing runs off the screen, no picture is clipped, no output
box is empty, no private name shows, text stands out from its ground (WCAG AA), formulas render, no
script fails, nothing is asked of another machine, nothing moves while a page loads, and the home page is light.
No page is endless, and at a desk no code has to be scrolled. `browser_check.py site 2/4` looks at the second
of four parts, for machines that end what takes long.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, Request, TimeoutError, sync_playwright

WIDTHS = (1440, 390)
SCHEMES = ("default", "slate")  # light and dark, as the theme calls them
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
INTERNALS = {f"explain/{page}/" for page in ("how-it-works", "map", "versions", "operations")}  # of what is inside
HEAVIEST = 1_000_000  # bytes of the home page, as a server without compression sends them, fonts included
PATIENCE = 300_000  # milliseconds for a page: machines that check sites may be busy
FARTHEST = 0.02  # what may move while a page loads: the score that browsers report, of which 0.1 is called good
SEARCH_INDEX = "search_index.json"  # loaded in the background, and counted apart

LOOK = (Path(__file__).parent / "browser_check.js").read_text("utf-8")
WATCH = """window.moved = [];
new PerformanceObserver(list => window.moved.push(...list.getEntries().filter(entry => !entry.hadRecentInput)))
  .observe({type: "layout-shift", buffered: true});"""
SETTLED = """async () => {
  await document.fonts.ready;
  for (let frame = 0; frame < 4; frame++) await new Promise(requestAnimationFrame);
  await new Promise(done => setTimeout(done, 50));
}"""
MOVED = """() => [
  window.moved.reduce((sum, entry) => sum + entry.value, 0),
  [...new Set(window.moved.flatMap(entry => entry.sources).map(source => source.node).filter(Boolean)
    .map(node => (node.tagName || "text").toLowerCase()))].slice(0, 5).join(", "),
]"""
_PRIVATE = re.compile(r"\bhodiff(?:\.\w+)*\._(?!_)\w+|\b_\w+\.MISSING\b")


def browser() -> str | None:
    """A browser on this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def check_site(root: Path, report: Callable[[str], object] = print, part: str = "1/1") -> list[str]:
    """Every fault of the site below `root`, one line each; `report` is told what the home page weighs."""
    number, parts = map(int, part.split("/"))
    addresses = sorted(page.parent.relative_to(root).as_posix() for page in root.rglob("index.html"))
    addresses = addresses[number - 1 :: parts]
    served = functools.partial(_Silent, directory=str(root))
    faults: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), served) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        chromium = driver.chromium.launch(executable_path=browser(), args=list(QUIET))
        size, apart = _weight(chromium, home)
        report(f"home: {size / 1e3:.0f} kB, and apart from them {apart / 1e3:.0f} kB of search index")
        if size > HEAVIEST:
            faults.append(f"home weighs {size / 1e3:.0f} kB, more than {HEAVIEST / 1e3:.0f}")
        for width in WIDTHS:
            for address in addresses:
                name = "" if address == "." else f"{address}/"
                page = chromium.new_page(viewport={"width": width, "height": 900})  # a first visit: nothing is cached
                page.set_default_timeout(PATIENCE)
                page.add_init_script(WATCH)
                try:
                    found = _look(page, home, name)
                except TimeoutError as error:
                    found = [f"not looked at: {error.message.partition(chr(10))[0]}"]
                page.close()
                faults += [f"{name or 'home'} at {width} px: {fault}" for fault in found]
        chromium.close()
        server.shutdown()
    return list(dict.fromkeys(faults))


def _weight(chromium: Browser, home: str) -> tuple[int, int]:
    """Bytes that a first visit of the home page transfers, and those of the search index."""
    page = chromium.new_page()
    finished: list[Request] = []
    page.on("requestfinished", lambda request: finished.append(request))
    page.goto(home, wait_until="networkidle")
    weights = [0, 0]
    for request in finished:
        sizes = request.sizes()
        weights[request.url.endswith(SEARCH_INDEX)] += sizes["responseHeadersSize"] + sizes["responseBodySize"]
    page.close()
    return weights[0], weights[1]


def _look(page: Page, home: str, name: str) -> list[str]:
    faults: list[str] = []

    def said(message: object) -> None:
        if message.type == "error":  # type: ignore[attr-defined]
            faults.append(f"the console says: {message.text[:200]}")  # type: ignore[attr-defined]

    def asked(request: object) -> None:
        if not request.url.startswith((home, "data:", "blob:")):  # type: ignore[attr-defined]
            faults.append(f"asks another machine for {request.url[:200]}")  # type: ignore[attr-defined]

    def failed(error: object) -> None:
        faults.append(f"a script fails: {error}")

    for event, listener in {"console": said, "request": asked, "pageerror": failed}.items():
        page.on(event, listener)  # type: ignore[call-overload]
    page.goto(home + name, wait_until="load")
    page.add_style_tag(content="* { transition: none !important }")  # colors are looked at, not their changes
    page.evaluate(SETTLED)
    far, what = page.evaluate(MOVED)
    if far > FARTHEST:
        faults.append(f"moves while it loads, by {far:.3f}: {what}")
    for scheme in SCHEMES:
        page.evaluate("scheme => document.body.setAttribute('data-md-color-scheme', scheme)", scheme)
        where = "" if scheme == SCHEMES[0] else ", dark"
        faults += [f"{fault}{where}" for fault in page.evaluate(LOOK)]
    if name not in INTERNALS:
        shown = page.evaluate("document.querySelector('article, body').innerText")
        faults += [f"shows a private name: {private}" for private in sorted(set(_PRIVATE.findall(shown)))]
    return faults


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """A line for each request helps nobody."""


def main() -> int:
    if browser() is None:
        print(f"not looked at: there is no browser here ({', '.join(BROWSERS)})")
        return 0
    root = Path(sys.argv[1])
    faults = check_site(root, part=[*sys.argv[2:], "1/1"][0])
    print("\n".join(faults) or f"{root}: looked at {len(WIDTHS)} widths, light and dark, and nothing is amiss")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
