"""What MkDocs runs around a build."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_startup(*, command: str, dirty: bool) -> None:
    """The code of the pages imports `docs.figures`, as it does under pytest.

    Not at import: MkDocs puts the path back after loading this file.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def on_config(config: Any) -> None:
    """Explanations quote the lines of the pages' own code."""
    from docs import fences

    (fence,) = config.mdx_configs["pymdownx.superfences"]["custom_fences"]
    fence["format"] = fences.readable(fence["format"])


def on_files(files: Any, *, config: Any) -> None:
    """Notebooks beside the pages that they are made of."""
    from docs import notebooks

    for page in (each for each in notebooks.PAGES if files.get_file_from_path(f"{each}.md")):
        name = f"notebooks/{Path(page).name}.ipynb"
        files.append(File.generated(config, name, content=notebooks.notebook(page)))


def on_nav(nav: Any, *, config: Any, files: Any) -> None:
    """The titles of the navigation go into `llms.txt`, for readers that are programs."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for page in nav.pages:
        section = " / ".join(above.title for above in reversed(page.ancestors))
        title = page.title or Path(page.file.src_uri).stem
        lines.append(f"- [{f'{section}: ' if section else ''}{title}]({config.site_url}{page.url})")
    config.extra["llms"] = "\n".join(lines) + "\n"


def on_post_build(*, config: Any) -> None:
    """Writes it, tells the search what counts, and sets the formulas of all pages."""
    from docs import formulas, search

    site = Path(config.site_dir)
    (site / "llms.txt").write_text(config.extra["llms"], encoding="utf-8")
    glossary = Path(config.docs_dir) / "glossary.md"
    words = glossary.read_text("utf-8") if glossary.exists() else ""
    search.improve(site / "search" / "search_index.json", words)
    formulas.set_all(site)
