"""The pages of wrong derivatives elsewhere: their programs still show what they say, in each of them."""

import inspect
import re
import sys

import pytest
import torch

from hodiff._core._versions import RELEASE
from tests.doc.snippets import ROOT, run_page

STOCK = ROOT / "docs" / "explain" / "stock-pytorch.md"
REPORTS = ROOT / "docs" / "reports.md"
WILD = ROOT / "docs" / "explain" / "wrong-derivatives.md"
LINE = re.compile(
    r"^(?P<case>.*: )?(?:PyTorch|published) (?P<theirs>\S+), "
    r"(?:differences|reference) (?P<truth>\S+), hodiff (?P<ours>\S+)$",
    re.MULTILINE,
)
SAVE_RESULTS, DETACH = {"tanh saves its result: ", "sqrt saves its result: "}, {"holds a charge fixed: "}
RIGHT = DETACH if RELEASE < (2, 14) else SAVE_RESULTS  # of what make_fx traces
REPORT = re.compile(r"```text\n(Title: .*?)```", re.DOTALL)


@pytest.fixture(autouse=True)
def from_local_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor.from_local as PyTorch has it, where a call of hodiff before has mended it."""
    module = sys.modules.get("torch.distributed.tensor._api")
    mended = module and module._FromTorchTensor.backward
    if mended and mended.__module__.startswith("hodiff."):
        theirs = inspect.getclosurevars(mended).nonlocals["theirs"]
        monkeypatch.setattr(module._FromTorchTensor, "backward", staticmethod(theirs))


@pytest.mark.filterwarnings("ignore")
def test_pytorch_is_wrong_and_hodiff_is_right_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    run_page(STOCK)
    lines = list(LINE.finditer(capsys.readouterr().out))
    sections = STOCK.read_text("utf-8").count("\n## ")
    assert len(lines) >= sections >= 13
    for line in lines:
        stock, truth, ours = line["theirs"], float(line["truth"]), line["ours"]
        if stock != "raises":  # as later releases do in some
            assert not abs(float(stock) - truth) < 1e-2 * abs(truth), line[0]
        if ours not in ("refuses:", "nan"):  # it warns of that one, and the page shows it
            assert abs(float(ours) - truth) < 1e-4 * abs(truth), line[0]
    assert sum(line["ours"] == "nan" for line in lines) == 1


@pytest.mark.filterwarnings("ignore")
def test_what_is_published_is_wrong_and_hodiff_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    run_page(WILD)
    lines = list(LINE.finditer(capsys.readouterr().out))
    assert len(lines) >= 14
    right = []
    for line in lines:
        theirs, truth, ours = (float(line[name]) for name in ("theirs", "truth", "ours"))
        assert abs(ours - truth) < 1e-4 * abs(truth), line[0]
        right += [line["case"]] if abs(theirs - truth) < 5e-3 * abs(truth) else []
    assert {*right} == RIGHT


@pytest.mark.filterwarnings("ignore")
def test_reports_to_pytorch_show_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Those to other projects need the projects."""
    ran = 0
    for report in REPORT.findall(REPORTS.read_text("utf-8")):
        program = "\n".join(line[4:] for line in report.splitlines() if not line or line.startswith("    "))
        imported = {*re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)}
        if imported != {"torch"}:
            continue
        exec(program, {"__name__": "report"})
        first, second = map(float, re.findall(r"-?\d+\.\d+", capsys.readouterr().out))
        right = report.startswith("Title: make_fx") and torch.__version__ < "2.14"
        assert (abs(first - second) < 1e-2 * abs(second)) is right, report
        ran += 1
    assert ran == 7
