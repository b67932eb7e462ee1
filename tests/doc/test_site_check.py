"""The check of the built site finds what it is for."""

from pathlib import Path

import pytest

from tests.doc.site_check import check_site

GOOD = '<h1 id="top"></h1><a href="#top">up</a><a href="https://example.org">out</a><link rel="canonical" href="https://example.org">'


def site(tmp_path: Path, body: str, css: str = "") -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(GOOD + body, encoding="utf-8")
    (tmp_path / "sub" / "index.html").write_text('<a href="../#top">home</a><img src="/style.css">', encoding="utf-8")
    (tmp_path / "style.css").write_text(css, encoding="utf-8")
    return tmp_path


def test_a_good_site_has_no_faults(tmp_path):
    css = "a { src: url(style.css) } b { background: url('data:image/png;base64,x') }"
    assert check_site(site(tmp_path, '<a href="sub/">sub</a>', css)) == []


@pytest.mark.parametrize(
    ("body", "css", "fault"),
    [
        ('<script src="https://example.org/a.js"></script>', "", "fetches from elsewhere: https://example.org/a.js"),
        ('<img src="//example.org/a.png">', "", "fetches from elsewhere"),
        ('<img srcset="sub/, https://example.org/a.png 2x">', "", "fetches from elsewhere"),
        ('<p style="background: url(https://example.org/a)">', "", "fetches from elsewhere"),
        ("<style>@import 'https://example.org/a.css'</style>", "", "fetches from elsewhere"),
        ("", "a { src: url(https://example.org/a.woff2) }", "style.css: fetches from elsewhere"),
        ("", "a { src: url(fonts/missing.woff2) }", "style.css: broken"),
        ('<a href="missing/">', "", "index.html: broken: missing/"),
        ('<a href="sub/#missing">', "", "index.html: no such anchor: sub/#missing"),
        ('<p>```python exec="true"\nx = 1</p>', "", "index.html: shows a fence that did not run"),
    ],
)
def test_each_kind_of_fault_is_found(tmp_path, body, css, fault):
    (found,) = check_site(site(tmp_path, body, css))
    assert fault in found


def test_a_long_page_is_a_fault(tmp_path):
    (found,) = check_site(site(tmp_path, f"<article>{'<p>word</p>' * 1_501}</article>"))
    assert "1501 words" in found
    (tmp_path / "other").mkdir()
    assert not check_site(site(tmp_path / "other", f"<article>{'<p>word</p>' * 1_500}</article>"))


def test_an_empty_folder_is_a_fault(tmp_path):
    (found,) = check_site(tmp_path)
    assert "holds no page" in found
