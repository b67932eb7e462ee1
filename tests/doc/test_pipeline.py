"""`mkdocs build --strict` fails on each fault that it is there to find.

Needs the docs extra, which the tests' own does not hold; CI runs this file once that is installed.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.doc.snippets import ROOT

pytest.importorskip("mkdocs", reason="needs the docs extra")
pytest.importorskip("mkdocstrings_handlers.python", reason="needs the docs extra")
pytestmark = pytest.mark.nightly

PACKAGE = '''
"""A package."""

Real = float | int

def twice(x: Real) -> float:
    """Doubles.

    Args:
        x: A number.

    Returns:
        Its double.
    """
    return 2 * x
'''
PAGE = """
# Top

[self](#top) [`twice`][pkg.twice] \\(x^2\\)

::: pkg.twice

```python exec="true" result="text"
print(6 * 7)
```
"""
FAULTS = {
    "none": {},
    "a formula that KaTeX cannot read": {"page": PAGE + "\n\\(x^{2\\)\n"},
    "raising snippet": {"page": PAGE.replace("6 * 7", "1 / 0")},
    "broken link": {"page": PAGE + "\n[gone](gone.md)\n"},
    "broken anchor": {"page": PAGE + "\n[gone](#gone)\n"},
    "broken cross-reference": {"page": PAGE + "\n[gone][pkg.gone]\n"},
    "docstring names an argument that is not there": {
        "package": PACKAGE.replace("        x: A number", "        y: A number")
    },
    "page missing from nav": {"extra": "# Extra\n"},
    "included file missing": {"page": PAGE + '\n--8<-- "gone.md"\n'},
}

SAID = {
    "a formula that KaTeX cannot read": "a formula cannot be set.*Expected '}'",
    "raising snippet": "ZeroDivisionError",
    "broken link": r"a link 'gone\.md'",
    "broken anchor": "no such anchor",
    "broken cross-reference": r"target 'pkg\.gone'",
    "docstring names an argument that is not there": "Parameter 'y' does not appear",
    "page missing from nav": r"extra\.md",
    "included file missing": r"gone\.md",
}
"""Of what the build complains: a build that fails for another reason finds nothing."""


@pytest.mark.parametrize("fault", FAULTS)
def test_strict_build(tmp_path, fault):
    seeded = FAULTS[fault]
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(seeded.get("page", PAGE), encoding="utf-8")
    if "extra" in seeded:
        (docs / "extra.md").write_text(seeded["extra"], encoding="utf-8")
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "__init__.py").write_text(seeded.get("package", PACKAGE).lstrip(), encoding="utf-8")
    for folder in ("assets", "templates"):
        shutil.copytree(ROOT / "docs" / folder, docs / folder)
    for module in (ROOT / "docs").glob("*.py"):  # hooks, and what they import
        shutil.copy(module, docs)

    config = (ROOT / "mkdocs.yml").read_text("utf-8")  # the real one, but for its pages
    before, rest = config.split("\nnav:\n")
    after = rest[rest.index("\n\n") :]
    (tmp_path / "mkdocs.yml").write_text(f"{before}\nnav:\n  - Home: index.md\n{after}", encoding="utf-8")

    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    said = built.stdout + built.stderr
    assert (built.returncode == 0) == (fault == "none"), said
    assert fault == "none" or re.search(SAID[fault], said), said
    if fault == "none":
        page = (tmp_path / "site" / "index.html").read_text("utf-8")
        assert "42" in page
        shown = re.sub("<[^>]+>", "", page)
        assert "float | int" in shown and "Real" not in shown
        assert 'class="katex"' in page and "<script" in page and "katex.min.js" not in page
