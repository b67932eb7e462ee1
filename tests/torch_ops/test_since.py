"""What stock PyTorch gets wrong, on the release at hand: as the page's table of when each came and went says."""

import contextlib
import io
import re
import warnings
from collections import defaultdict

import pytest
import torch
from sybil.document import Document

import hodiff
from hodiff._core._versions import RELEASE
from tests.doc.snippets import ROOT, PythonFenceParser

PAGE = ROOT / "docs" / "explain" / "stock-pytorch.md"
TEXT = PAGE.read_text("utf-8")
ROW = re.compile(r"^\| (?P<what>.+?) \| (?P<came>2\.\d+)[^|]* \| (?P<went>.+?) \|$", re.MULTILINE)
LINE = re.compile(r"^PyTorch (?P<theirs>\S+), differences (?P<truth>\S+), hodiff (?P<ours>\S+)$", re.MULTILINE)
OTHERS = "all others on this page"
D = torch.float64


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)))


def wrong_now(came: str, went: str) -> bool:
    ended = re.match(r"2\.\d+", went)
    return number(came) <= RELEASE and not (ended and number(ended[0]) <= RELEASE)


ROWS = {row["what"]: wrong_now(row["came"], row["went"]) for row in ROW.finditer(TEXT)}


def expected(section: str) -> bool:
    """Whether it is wrong on this release: what its row says, or that of all others."""
    return ROWS[next((what for what in ROWS if section.startswith(what)), OTHERS)]


@pytest.fixture(scope="module")
def found() -> dict[str, list[re.Match[str]]]:
    """What the programs of each section print; nothing where this release has no such function."""
    printed: dict[str, list[re.Match[str]]] = defaultdict(list)
    for example in Document.parse(str(PAGE), PythonFenceParser()).examples():
        section = re.findall(r"^## (.*)$", TEXT[: example.region.start], re.MULTILINE)[-1:]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                example.evaluate()
            except AttributeError as error:
                assert "LinearCrossEntropyOptions" in str(error) and RELEASE < (2, 13)
                printed[section[0]] += []
        for name in section:
            printed[name] += LINE.finditer(output.getvalue())
    return printed


def test_each_is_wrong_from_when_it_came_until_it_went(found: dict[str, list[re.Match[str]]]) -> None:
    assert len(found) >= 25 and len(ROWS) == 5 and OTHERS in ROWS
    for section, lines in found.items():
        off = [line["theirs"] for line in lines if not near(line["theirs"], line["truth"])]
        silent = [each for each in off if each != "raises"]
        assert bool(silent) is expected(section), (section, [line[0] for line in lines])


def test_hodiff_is_right_or_refuses_on_each(found: dict[str, list[re.Match[str]]]) -> None:
    for section, lines in found.items():
        for line in lines:
            warned = section.startswith("Removable") and line["ours"] == "nan"
            assert line["ours"] == "refuses:" or warned or near(line["ours"], line["truth"]), line[0]


def near(given: str, truth: str) -> bool:
    return given != "raises" and abs(float(given) - float(truth)) < 1e-2 * abs(float(truth))


def test_bessel_functions_are_constants() -> None:
    x = torch.tensor(1.0, dtype=D, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.special.bessel_j0(x) + x, x)
    truth = 1 - torch.special.bessel_j1(x.detach())
    assert (abs(gradient - truth) > 0.1) == ROWS["Bessel functions, as constants"]
    if not ROWS["Bessel functions, as constants"]:
        torch.testing.assert_close(gradient, truth)


def test_det_and_solve_in_reverse_over_forward() -> None:
    a = torch.tensor([[2.0, 0.3], [-0.4, 1.5]], dtype=D)
    for f in (torch.linalg.det, lambda a: torch.linalg.solve(a, a.sin()).sum()):

        def tangent(a, f=f):
            return torch.func.jvp(f, (a,), (a.cos(),))[1]

        leaf = a.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(tangent(leaf), leaf)
        truth = torch.stack([difference(tangent, a, place) for place in range(4)]).reshape(2, 2)
        wrong = bool((gradient - truth).abs().max() > 1e-3)
        assert wrong is ROWS["`det`, `solve` and related functions, in reverse mode over forward mode"]
        if wrong and f is not torch.linalg.det:
            with pytest.raises(
                hodiff.GraphError, match="through solve, and the derivative of that tangent is silently"
            ):
                hodiff.grad(tangent, a)
        else:
            torch.testing.assert_close(hodiff.grad(tangent, a), truth, rtol=1e-6, atol=1e-7)


def difference(f, a, place):
    step = torch.zeros(4, dtype=D).index_fill(0, torch.tensor(place), 1e-5).reshape(2, 2)
    return (f(a + step) - f(a - step)) / 2e-5
