"""`browser_check.py` finds each fault that it is there to find. Needs playwright and a browser, as CI has."""

import pytest

pytest.importorskip("playwright", reason="needs the docs extra")

from tests.doc import browser_check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_check.browser() is None, reason="there is no browser on this machine"),
]

PAGE = '<!doctype html><html><head><link rel="icon" href="data:,"></head><body><article>{}</article></body></html>'
FAULTS = {
    "": None,
    '<svg width="300" height="40"><text y="20">x</text></svg>': "without viewBox",
    '<svg viewBox="0 0 10 10" width="100"><rect width="30" height="5"/></svg>': "a clipped picture",
    '<table style="width: 3000px"><tr><td>wide</td></tr></table>': "leaves the screen",
    '<div style="overflow-x: auto"><table style="width: 3000px"><tr><td>wide</td></tr></table></div>': None,
    '<div class="highlight"><pre><code> \n</code></pre></div>': "an empty output box",
    "<p>hodiff._core._checks</p>": "a private name",
    "<p>hodiff.hvp, hodiff.__version__, a_b, _x</p>": None,
    '<p style="color: #999">pale</p>': "contrast",
    '<p style="color: #666">fair</p>': None,
    '<div style="background: #333"><p style="color: #444">dark</p></div>': "contrast",
    "<script>console.error('lost')</script>": "the console says",
    "<script>throw new Error('lost')</script>": "a script fails",
    '<img alt="" src="http://other.invalid/x.png">': "asks another machine",
    '<span class="katex-error">x</span><span class="arithmatex"><span class="katex"></span></span>': "does not render",
}


@pytest.mark.parametrize("body", FAULTS)
def test_each_fault_is_found(body, tmp_path):
    (tmp_path / "index.html").write_text(PAGE.format(body), encoding="utf-8")
    faults = browser_check.check_site(tmp_path)
    if FAULTS[body] is None:
        assert not faults
    else:
        assert any(FAULTS[body] in fault for fault in faults), faults
