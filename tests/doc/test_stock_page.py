"""The page of what stock PyTorch gets wrong: its programs still show what it says, in each of them."""

import re

import pytest

from tests.doc.snippets import ROOT, run_page

PAGE = ROOT / "docs" / "explain" / "stock-pytorch.md"
LINE = re.compile(r"^PyTorch (?P<stock>\S+), differences (?P<truth>\S+), hodiff (?P<ours>\S+)$", re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
def test_pytorch_is_wrong_and_hodiff_is_right_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE)
    lines = list(LINE.finditer(capsys.readouterr().out))
    sections = PAGE.read_text("utf-8").count("\n## ")
    assert len(lines) >= sections >= 13
    for line in lines:
        stock, truth, ours = line["stock"], float(line["truth"]), line["ours"]
        if stock != "raises":  # as later releases do in some
            assert not abs(float(stock) - truth) < 1e-2 * abs(truth), line[0]
        if ours not in ("refuses:", "nan"):  # it warns of that one, and the page shows it
            assert abs(float(ours) - truth) < 1e-4 * abs(truth), line[0]
    assert sum(line["ours"] == "nan" for line in lines) == 1
