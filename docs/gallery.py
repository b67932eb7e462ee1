"""Pictures of the gallery: the first one of each page that a card names, as the build made it."""

import re
from pathlib import Path

_PLACE = re.compile(r'<div class="shown" data-of="([\w-]+)"></div>')
_PICTURE = re.compile(r'<div class="picture">.*?</svg>\s*</div>', re.DOTALL)


def fill(site: Path) -> None:
    """Puts them into the built gallery; a page without a picture leaves its place empty."""
    page = site / "recipes" / "index.html"
    if not page.is_file():
        return

    def picture(place: re.Match[str]) -> str:
        text = (site / "recipes" / place[1] / "index.html").read_text("utf-8")
        found = _PICTURE.search(text)
        return found[0] if found else ""

    page.write_text(_PLACE.sub(picture, page.read_text("utf-8")), encoding="utf-8")
