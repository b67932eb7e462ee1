"""What MkDocs runs around a build."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LONGEST_TABLE = (
    40  # rows that a page shows at once; `longest_table:` of a page for another number
)
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w\"./-])\(?\d[\d.]*e-\d+[),;]*")
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def on_startup(*, command: str, dirty: bool) -> None:
    """The code of the pages imports `docs.figures`, as it does under pytest.

    Not at import: MkDocs puts the path back after loading this file.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def on_config(config: Any) -> None:
    """Explanations quote the lines of the pages' own code; the navigation knows the pages of functions."""
    from docs import fences
    from markdown_exec._internal.formatters import python

    python.exec_python = fences.traceable(python.exec_python)
    (fence,) = config.mdx_configs["pymdownx.superfences"]["custom_fences"]
    fence["format"] = fences.readable(fence["format"])
    for section in config.nav or []:
        for title, pages in section.items():
            if isinstance(pages, list):
                section[title] = [_with_functions(page, config) for page in pages]


def on_files(files: Any, *, config: Any) -> None:
    """A page for each function of the reference."""
    from docs import reference

    for group in [
        each for each in files.documentation_pages() if each.src_uri.startswith("api/")
    ]:
        for name, text in reference.split(group.src_uri, group.content_string)[
            1
        ].items():
            files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Of a group of the reference what its functions' own pages do not say; long tables are folded."""
    from docs import reference

    longest = page.meta.get("longest_table", LONGEST_TABLE)
    text = reference.split(page.file.src_uri, markdown)[0]
    return _TABLE.sub(lambda table: _folded(table[0], longest), text)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Numbers in tables are not broken at the sign of their exponent."""
    whole = r'<span class="number">\g<0></span>'
    return _CELL.sub(lambda cell: _NUMBER.sub(whole, cell[0]), html)


def on_nav(nav: Any, *, config: Any, files: Any) -> None:
    """The titles of the navigation go into `llms.txt`, for readers that are programs."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for page in nav.pages:
        section = " / ".join(above.title for above in reversed(page.ancestors))
        title = page.title or Path(page.file.src_uri).stem
        lines.append(f"- [{f'{section}: ' if section else ''}{title}]({page.url})")
    config.extra["llms"] = "\n".join(lines) + "\n"


def on_post_build(*, config: Any) -> None:
    """Writes it, tells the search what counts, and sets the formulas of all pages."""
    from docs import formulas, gallery, search

    site = Path(config.site_dir)
    (site / "llms.txt").write_text(config.extra["llms"], encoding="utf-8")
    listed = Path(config.docs_dir) / "keywords.txt"
    words = listed.read_text("utf-8") if listed.exists() else ""
    search.improve(site / "search" / "search_index.json", words)
    formulas.set_all(site)
    gallery.fill(site)


def _folded(table: str, longest: int) -> str:
    rows = table.count("\n") - 2  # a head, and the line below it
    if rows < longest:
        return table
    show = f"<details markdown>\n<summary>Show the table of {rows} rows</summary>"
    return f"{show}\n\n{table}\n</details>\n"


def _title(text: str) -> str:
    """Of a page of the reference, in the navigation."""
    return re.split(r"\.|: ", text.partition("\n")[0].removeprefix("# "))[-1]


def _with_functions(entry: Any, config: Any) -> Any:
    """An entry of the navigation; that of a group of the reference is a section, with the pages of its functions."""
    from docs import reference

    if not isinstance(entry, dict):
        return entry
    ((title, page),) = entry.items()
    if not isinstance(page, str):
        return entry
    below = reference.split(page, (Path(config.docs_dir) / page).read_text("utf-8"))[1]
    return (
        {
            title: [
                {f"{title}: overview": page},
                *({_title(text): each} for each, text in below.items()),
            ]
        }
        if below
        else entry
    )
