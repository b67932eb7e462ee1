"""Looks at a built site in a real browser, at a desk and on a phone, light and dark: `browser_check.py site`.

What is held is what a reader would see: nothing runs off the screen, no picture is clipped, no output
box is empty, no private name shows, text stands out from its ground (WCAG AA), formulas render, no
script fails, and nothing is asked of another machine.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = (1280, 390)
SCHEMES = ("default", "slate")  # light and dark, as the theme calls them
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
INTERNALS = {"explain/how-it-works/", "explain/versions/", "explain/operations/"}  # pages about what is inside

LOOK = (Path(__file__).parent / "browser_check.js").read_text("utf-8")
_PRIVATE = re.compile(r"\bhodiff(?:\.\w+)*\._(?!_)\w+|\b_\w+\.MISSING\b")


def browser() -> str | None:
    """A browser on this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def check_site(root: Path) -> list[str]:
    """Every fault of the site below `root`, one line each."""
    addresses = sorted(page.parent.relative_to(root).as_posix() for page in root.rglob("index.html"))
    served = functools.partial(_Silent, directory=str(root))
    faults: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), served) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        chromium = driver.chromium.launch(executable_path=browser(), args=list(QUIET))
        for width in WIDTHS:
            page = chromium.new_page(viewport={"width": width, "height": 900})
            for address in addresses:
                name = "" if address == "." else f"{address}/"
                faults += [f"{name or 'home'} at {width} px: {fault}" for fault in _look(page, home, name)]
        chromium.close()
        server.shutdown()
    return list(dict.fromkeys(faults))


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

    listeners = {"console": said, "request": asked, "pageerror": failed}
    for event, listener in listeners.items():
        page.on(event, listener)  # type: ignore[call-overload]
    page.goto(home + name, wait_until="load")
    page.add_style_tag(content="* { transition: none !important }")  # colours are looked at, not their changes
    page.wait_for_function("document.querySelectorAll('.arithmatex:not(:has(.katex))').length == 0", timeout=10_000)
    for scheme in SCHEMES:
        page.evaluate("scheme => document.body.setAttribute('data-md-color-scheme', scheme)", scheme)
        where = "" if scheme == SCHEMES[0] else ", dark"
        faults += [f"{fault}{where}" for fault in page.evaluate(LOOK)]
    if name not in INTERNALS:
        shown = page.evaluate("document.querySelector('article, body').innerText")
        faults += [f"shows a private name: {private}" for private in sorted(set(_PRIVATE.findall(shown)))]
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return faults


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """A line for each request helps nobody."""


def main() -> int:
    if browser() is None:
        print(f"not looked at: there is no browser here ({', '.join(BROWSERS)})")
        return 0
    root = Path(sys.argv[1])
    faults = check_site(root)
    print("\n".join(faults) or f"{root}: looked at {len(WIDTHS)} widths, light and dark, and nothing is amiss")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
