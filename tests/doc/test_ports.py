"""The ports that a page shows: what is stored is right, the patches name what exists, and they run where they can."""

import re
from importlib.util import find_spec

import pytest
from benchmarks.ports import __main__ as ports
from docs import ports as shown

import hodiff
from tests.doc.snippets import ROOT

PATCHES = sorted((ROOT / "benchmarks" / "ports" / "patches").glob("*.diff"))
PAGE = (ROOT / "docs" / "ports.md").read_text("utf-8")
QUICK = {"torchjd": "torchjd", "botorch": "botorch", "laplace": "laplace", "nequip": "nequip"}


def test_each_port_is_stored_and_shown_and_equal():
    assert set(shown.stored()) == set(ports.PORTS)
    for name in ports.PORTS:
        assert f'("{name}")' in PAGE or (name == "deepxde" and "ports.errors()" in PAGE)
    for port in QUICK:
        for row in shown.stored()[port]["rows"]:
            assert row["error"] < 1e-5 and min(row["before"], row["after"]) > 0, row


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_is_short_and_names_what_exists(patch):
    text = patch.read_text("utf-8")
    added = re.findall(r"^\+(?!\+\+)(.*)$", text, re.MULTILINE)
    assert 0 < len(added) <= 12 and f"benchmarks/ports/patches/{patch.name}" in PAGE
    names = re.findall(r"hodiff\.([\w.]+)\(", "\n".join(added))
    assert names
    for name in names:
        found = hodiff
        for part in name.split("."):
            found = getattr(found, part)


@pytest.mark.wide
@pytest.mark.parametrize("port", QUICK)
def test_it_runs_where_the_release_is_installed(port):
    if find_spec(QUICK[port]) is None:
        pytest.skip(f"{QUICK[port]} is not installed")
    assert all(row["error"] < 1e-5 for row in ports.PORTS[port]())
