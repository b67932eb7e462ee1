"""What a console, a notebook and an editor show: records by their words, submodules by their names, a bar in time."""

import html
import os
import subprocess
import sys

import pytest
import torch

import hodiff
from hodiff.curvature import _probes

X = torch.randn(4, 3, dtype=torch.float64)


def loss(z):
    return (z**3).sum(-1)


SHOWN = {
    "a report": (lambda: hodiff.check_derivatives(lambda z: (z**3).sum(), X), "derivatives against central"),
    "a prediction": (lambda: hodiff.graph.predict(loss(X.clone().requires_grad_()).sum()), "ok: it would run"),
    "what is shared": (lambda: hodiff.graph.shared(*[X.clone().requires_grad_().sum()] * 2), "shared by two losses"),
    "a monitor": (hodiff.graph.monitor, "no step yet"),
    "a cost": (lambda: hodiff.HessianOperator(lambda z: loss(z).sum(), X).cost(), "dense(): "),
    "Taylor mode": (lambda: hodiff.jets.report(torch.sin, X), "Taylor mode, order 2"),
    "an estimate": (lambda: hodiff.laplacian(loss, X, samples=3), "Estimate(4, 3 samples, ± "),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_record_is_shown_by_its_words(name):
    make, words = SHOWN[name]
    assert repr(make()).startswith(words)


@pytest.mark.parametrize("name", [name for name in SHOWN if name != "an estimate"])
def test_a_notebook_shows_the_same_lines_as_a_table(name):
    shown = SHOWN[name][0]()
    text = html.unescape(shown._repr_html_())
    for line in str(shown).splitlines():
        assert all(part in text for part in line.strip().split(": ", 1)), line
    assert text.count("<tr>") == len(str(shown).splitlines())


def test_a_notebook_shows_what_an_operator_is():
    batch = hodiff.MatrixOperator(torch.eye(3, dtype=torch.float64).expand(2, 3, 3), batch_ndim=1)
    for operator, size in ((hodiff.HessianOperator(lambda z: loss(z).sum(), X), "12 x 12"), (batch, "2 of 3 x 3")):
        text = operator._repr_html_()
        assert f"<caption>{type(operator).__name__}</caption>" in text
        assert f"<td>size</td><td>{size}</td>" in text and "<td>float64</td>" in text
        assert f"({size}, float64" in repr(operator)


def test_a_table_does_not_repeat_its_headings():
    record = hodiff.solve(hodiff.MatrixOperator(torch.eye(3)), torch.ones(3))
    text = record._repr_html_()
    assert ">residual 0<" not in text
    assert ">1<" in text or ">2<" in text


SUBMODULES = "graph", "implicit", "jets", "plotting", "rules", "sparse"


@pytest.mark.wide
def test_submodules_are_there_after_the_import():
    code = f"import hodiff; print(*[getattr(hodiff, name).__name__ for name in {SUBMODULES}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == [f"hodiff.{name}" for name in SUBMODULES]


class Terminal:
    """A terminal that keeps what is written."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("wait", "shown"), [(0.0, True), (3600.0, False)])
def test_a_terminal_that_waits_is_shown_a_bar(monkeypatch, wait, shown):
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(_probes, "WAIT", wait)
    monkeypatch.setattr(sys, "stderr", terminal)
    hodiff.eigsh(hodiff.MatrixOperator(torch.arange(1.0, 41.0)), 20)
    assert ("hodiff: eigsh" in terminal.text) == shown
    terminal.text = ""
    hodiff.eigsh(hodiff.MatrixOperator(torch.arange(1.0, 41.0)), 20, progress=False)
    assert not terminal.text


def test_a_file_is_written_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(_probes, "WAIT", 0.0)
    hodiff.eigsh(hodiff.MatrixOperator(torch.arange(1.0, 41.0)), 3)
    assert not capsys.readouterr().err


@pytest.mark.wide
def test_a_reader_who_has_read_enough_ends_a_command():
    command = f"{sys.executable} -u -m hodiff info | true"
    result = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in result.stderr


@pytest.mark.wide
def test_a_program_without_output_is_explained(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import torch\nx = torch.ones(2, requires_grad=True)\n(x * 2).backward()\n", "utf-8")
    closed = f"import sys; sys.stdout = None; from hodiff.cli import main; sys.exit(main(['explain', {str(script)!r}]))"
    result = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True, check=False, timeout=120)
    assert "hodiff: why this Tensor.backward failed" in result.stderr


@pytest.mark.wide
def test_a_script_s_name_is_legible_where_the_locale_has_no_letters_for_it(tmp_path):
    script = tmp_path / "\xf6k script.py"
    script.write_text("import torch\nx = torch.ones(2, requires_grad=True)\n(x * 2).backward()\n", "utf-8")
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = [sys.executable, "-m", "hodiff", "explain", os.fsencode(script)]
    result = subprocess.run(program, capture_output=True, check=False, timeout=120, env=plain)
    assert rb" \xf6k script.py:3" in result.stderr


def test_a_vector_that_is_not_finite_is_not_the_function_s_fault(recwarn):
    v = torch.tensor([1.0, float("inf"), 0.0], dtype=torch.float64)
    assert hodiff.hvp(lambda z: (z**2).sum(), X[0], v).tolist() == [2, float("inf"), 0]
    assert not recwarn.list
