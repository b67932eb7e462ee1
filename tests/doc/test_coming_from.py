"""Both sides of `docs/coming-from*.md` print the same numbers, where the peer is installed (the extra `bench`)."""

import contextlib
import io
import re
import warnings
from importlib.util import find_spec

import pytest
import torch

from tests.doc.snippets import ROOT

SHARED, SECTIONS = {}, {}  # by the sections' titles: what is above the first section of their page, and they
for page in ("coming-from.md", "coming-from-others.md"):
    above, *sections = re.split(r"^## ", (ROOT / "docs" / page).read_text("utf-8"), flags=re.MULTILINE)
    for section in sections:
        title = section.partition("\n")[0]
        SHARED[title], SECTIONS[title] = above, section
NEEDS = {
    "curvlinops": "curvlinops",
    "BackPACK": "backpack",
    "higher": "higher",
    "TorchOpt and jaxopt": "torchopt",
    "NequIP": "nequip",
    "laplace-torch": "laplace",
    "DeepXDE": "deepxde",
    "JAX": "jax",
}


def fences(text, language):
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shared(section):
    """What the sections share; peers may switch what is global."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    (code,) = fences(SHARED[section], "python")
    names = {}
    exec(code, names)
    yield names
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def printed(code, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peers with the PyTorch of today
        exec(code, names)
    return out.getvalue()


@pytest.mark.parametrize("section", SECTIONS)
def test_both_sides_print_the_same(section, shared, monkeypatch):
    if section in NEEDS and find_spec(NEEDS[section]) is None:
        pytest.skip(f"{section} is not installed; most are in the extra `bench`")
    monkeypatch.setenv("DDE_BACKEND", "pytorch")
    (theirs,), (ours,) = (fences(SECTIONS[section], language) for language in ("py", "python"))
    numbers = [re.findall(r"-?\d+\.\d+", printed(code, dict(shared))) for code in (theirs, ours)]
    assert numbers[0] == numbers[1]
    assert numbers[0]


def test_each_section_says_what_differs_and_what_is_missing():
    for title, text in SECTIONS.items():
        assert "**What differs.**" in text, title
        assert "**What hodiff lacks.**" in text, title
        anchor = re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
        assert f"](#{anchor})" in SHARED[title], title
