"""`hodiff tour`: one screen, every number of hodiff's checked, and a wrong one ends in status 1."""

import re
import sys
import tomllib

import pytest
import torch

import hodiff
from hodiff.__main__ import main
from hodiff.cli import _tour
from tests.meta.source import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def failures(printed):
    return [line for line in printed.splitlines() if "  FAILED" in line]


def test_all_is_right_on_one_screen(capsys):
    before = torch.get_rng_state()
    assert main(["tour"]) == 0
    printed = capsys.readouterr().out
    assert not failures(printed)
    lines = printed.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert printed.isascii()  # any terminal can show it
    assert torch.equal(before, torch.get_rng_state())

    # the copied program prints z' and y'; the second derivative is another number
    rows = [("z.backward", "32", "right"), ("x.grad.zero_", "4", "right"), ("hodiff.nth_derivative", "48", "ok")]
    for row, value, verdict in rows:
        assert re.search(rf"^   {re.escape(row)}.* {value} +{value}  {verdict}", printed, re.MULTILINE), row
    # all checks are counted
    assert lines[-1] == f"{sum('  ok' in line for line in lines)} of hodiff's numbers checked."


def remembering(method, labels):
    """The method, which notes the label that it is given."""

    def noted(self, label, *rest):
        labels.append(label)
        return method(self, label, *rest)

    return noted


def test_only_numbers_of_ours_are_checks(monkeypatch, capsys):
    """PyTorch's own are shown beside them; the README says how many checks there are."""
    checked, compared = [], []
    for name, labels in (("check", checked), ("compare", compared)):
        monkeypatch.setattr(_tour.Screen, name, remembering(getattr(_tour.Screen, name), labels))
    assert main(["tour"]) == 0
    derivatives = [label for label in checked if "hodiff." in label]
    kept = [label for label in checked if label.startswith(("function:", "tensor:"))]
    assert (len(derivatives), len(kept), len(checked)) == (3, 5, 8)
    assert compared and not [label for label in compared if "hodiff" in label]
    assert capsys.readouterr().out.endswith("8 of hodiff's numbers checked.\n")
    assert "three derivatives against closed forms, five checks of memory" in README


def test_the_table_of_the_readme_is_right_where_the_tour_is(capsys):
    """A cell in percent is an error, and one such as 1e-9 is none."""
    assert main(["tour"]) == 0
    printed = capsys.readouterr().out
    shown = {
        "Hessian times vector": ["hodiff.hvp(", "H v: autograd.grad, twice", "H v: torch.func"],
        "gradient of vᵀHv": ["hodiff.grad(", "autograd.grad, three times", "v'Hv: torch.func"],
    }
    for quantity, routes in shown.items():
        (row,) = [line for line in README.splitlines() if line.startswith(f"| {quantity} |")]
        for cell, route in zip(row.strip("| ").split("|")[1:], routes, strict=True):
            (line,) = [line for line in printed.splitlines() if route in line]
            assert ("%" in cell) == ("  wrong  silently" in line), line
            assert ("%" in cell) != bool(re.match(r" \de-\d ", cell)), cell


def test_no_address_is_given_before_there_is_a_site(capsys):
    """It stands in one place, for the day that the site is published."""
    assert main(["tour"]) == 0
    assert "http" not in capsys.readouterr().out
    holders = [ROOT / "mkdocs.yml", ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py"), *ROOT.glob("*.cff")]
    assert sum("hodiff.github.io" in path.read_text("utf-8") for path in holders) == 1
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def doubled(function):
    """The function with a wrong result."""

    def wrong(*args, **kwargs):
        result = function(*args, **kwargs)
        return {name: 2 * part for name, part in result.items()} if isinstance(result, dict) else 2 * result

    return wrong


@pytest.mark.parametrize(("name", "count"), [("nth_derivative", 1), ("hvp", 2), ("grad", 2)])
def test_a_wrong_number_fails(name, count, monkeypatch, capsys):
    monkeypatch.setattr(hodiff, name, doubled(getattr(hodiff, name)))
    assert main(["tour"]) == 1
    printed = capsys.readouterr().out
    assert len(failures(printed)) >= count
    assert "FAILED" in printed.splitlines()[-1]


def test_a_leak_fails(monkeypatch, capsys):
    kept = []
    hvp = hodiff.hvp
    monkeypatch.setattr(hodiff, "hvp", lambda *args: kept.append(hvp(*args)) or kept[-1])
    assert main(["tour"]) == 1
    assert "function: without the result" in failures(capsys.readouterr().out)[0]


def test_a_freed_graph_fails(monkeypatch, capsys):
    """If hodiff freed the caller's graph, the bytes beside the result would show it."""
    losses = []

    def remembered():
        source, model, loss = classifier()
        losses.append(loss)
        return source, model, loss

    def frees(f, model, vector):
        result = hvp(f, model, vector)
        if isinstance(f, torch.Tensor):
            torch.autograd.grad(f, list(model.parameters()))
            f.backward = lambda: losses[0](model).backward()  # let the tour go on
        return result

    hvp, classifier = hodiff.hvp, _tour.classifier
    monkeypatch.setattr(hodiff, "hvp", frees)
    monkeypatch.setattr(_tour, "classifier", remembered)
    assert main(["tour"]) == 1
    assert "beside result" in failures(capsys.readouterr().out)[0]


def test_without_scikit_learn_it_says_so_and_goes_on(monkeypatch, capsys):
    for module in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["tour"]) == 0
    printed = capsys.readouterr().out
    assert "scikit-learn is not installed" in printed
    assert max(map(len, printed.splitlines())) <= 100
