"""`browser_check.py` finds each fault that it is there to find. Needs playwright and a browser, as CI has."""

import re

import pytest

pytest.importorskip("playwright", reason="needs the docs extra")

from tests.doc import browser_check

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(browser_check.browser() is None, reason="there is no browser on this machine"),
]

PAGE = '<!doctype html><html><head><link rel="icon" href="data:,"></head><body><article>{}</article></body></html>'
FAULTS = {
    "": None,
    '<svg width="300" height="40"><text y="20">x</text></svg>': "without viewBox",
    '<svg viewBox="0 0 10 10" width="100"><rect width="30" height="5"/></svg>': "a clipped picture",
    '<table style="width: 3000px"><tr><td>wide</td></tr></table>': "leaves the screen",
    '<div style="overflow-x: auto"><table style="width: 3000px"><tr><td>wide</td></tr></table></div>': None,
    '<table><td width="20"><code style="word-break: break-all">gradient_penalty(f)</code></table>': "cut in two",
    '<table><td width="20"><code>gradient_penalty(f, x)</code></table>': None,
    '<div class="highlight"><pre><code> \n</code></pre></div>': "an empty output box",
    f'<pre><code style="display: block; overflow: auto">{"x" * 300}</code></pre>': "has to be scrolled",
    '<p style="height: 15100px">x</p>': "px high",
    "<p>hodiff._core._arguments</p>": "a private name",
    "<p>hodiff.hvp, hodiff.__version__, a_b, _x</p>": None,
    '<p style="color: #999">pale</p>': "contrast",
    '<p style="color: #666">fair</p>': None,
    '<div style="background: #333"><p style="color: #444">dark</p></div>': "contrast",
    "<script>console.error('lost')</script>": "the console says",
    "<script>throw new Error('lost')</script>": "a script fails",
    '<img alt="" src="http://other.invalid/x.png">': "asks another machine",
    '<span class="katex-error">x</span><span class="arithmatex"><span class="katex"></span></span>': "is not set",
    '<span class="arithmatex">x</span>': "is not set",
    "<p>pushed down</p><script>requestAnimationFrame(() => requestAnimationFrame(() => "
    "{ document.querySelector('article').style.paddingTop = '300px' }))</script>": "moves while it loads",
}


@pytest.mark.parametrize("body", FAULTS)
def test_each_fault_is_found(body, tmp_path):
    (tmp_path / "index.html").write_text(PAGE.format(body), encoding="utf-8")
    faults = browser_check.check_site(tmp_path)
    if FAULTS[body] is None:
        assert not faults
    else:
        assert any(FAULTS[body] in fault for fault in faults), faults


@pytest.mark.parametrize(("heavy", "fault"), [("index.html", True), ("font.svg", True), ("search_index.json", False)])
def test_the_home_page_is_weighed_with_what_it_loads_but_for_the_search_index(heavy, fault, tmp_path):
    body = "<img alt='' width=1 height=1 src='font.svg'><script>fetch('search_index.json')</script>"
    (tmp_path / "index.html").write_text(PAGE.format(body), encoding="utf-8")
    (tmp_path / "font.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>', encoding="utf-8")
    (tmp_path / "search_index.json").write_text("{}", encoding="utf-8")
    with (tmp_path / heavy).open("a", encoding="utf-8") as file:
        file.write(" " * 1_100_000)
    said = []
    faults = browser_check.check_site(tmp_path, said.append)
    assert [each for each in faults if "home weighs" in each] == (
        ["home weighs 1101 kB, more than 1000"] if fault else []
    )
    assert re.search(r"^home: \d+ kB, and apart from them \d+ kB of search index$", *said)
    assert ("1100 kB of search index" in said[0]) is not fault


def test_parts_are_the_whole(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(PAGE.format("<p>hodiff._core</p>"), encoding="utf-8")
    (tmp_path / "index.html").write_text(PAGE.format("<p>hodiff._core</p>"), encoding="utf-8")
    whole = browser_check.check_site(tmp_path)
    parts = [browser_check.check_site(tmp_path, part=f"{number}/3") for number in (1, 2, 3)]
    assert sorted(whole) == sorted(fault for part in parts for fault in part)
    assert all(parts)
