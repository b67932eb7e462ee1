"""The program of `docs/recipes/notebooks.md` prints what the page says, where Lightning is installed."""

import re
import subprocess
import sys

import pytest

from tests.doc.snippets import ROOT

RECIPES = ROOT / "docs" / "recipes"


@pytest.mark.nightly
def test_the_program_prints_what_the_page_says():
    pytest.importorskip("lightning", reason="pip install lightning")
    command = [sys.executable, RECIPES / "lightning_pinn.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("epoch", "largest"))]
    said = (RECIPES / "lightning_pinn.txt").read_text("utf-8").splitlines()
    assert len(lines) == len(said)
    for line, expected in zip(lines, said, strict=True):
        assert re.sub(r"[\d.]+", "#", line) == re.sub(r"[\d.]+", "#", expected)
        found, wanted = ([float(number) for number in re.findall(r"\d+\.?\d*", text)] for text in (line, expected))
        assert found == pytest.approx(wanted, rel=0.1)
