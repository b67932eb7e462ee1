"""`hodiff explain` as a command: the process is the program's, and its errors look as without us."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hodiff
from hodiff.__main__ import main
from hodiff.graph import watch
from tests.programs.test_programs import path


def command(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", "")]))}
    command, how = [sys.executable, *arguments], {"capture_output": True, "text": True}
    return subprocess.run(command, input=stdin, cwd=cwd, env=environment, check=False, timeout=240, **how)


@pytest.mark.wide
def test_the_process_is_the_programs(tmp_path):
    explained = command("-m", "hodiff", "explain", path("exits"), "--flag", "-m", "x", stdin="input", cwd=tmp_path)
    plain = command(path("exits"), "--flag", "-m", "x", stdin="input", cwd=tmp_path)
    assert explained.stdout == plain.stdout
    assert "'--flag', '-m', 'x'" in plain.stdout
    assert explained.stderr == plain.stderr == ""
    assert explained.returncode == plain.returncode == 7


@pytest.mark.wide
def test_a_crash_looks_as_without_us():
    explained = command("-m", "hodiff", "explain", path("crashes"), "a", "b")
    plain = command(path("crashes"), "a", "b")
    assert explained.stderr == plain.stderr
    assert "ZeroDivisionError" in plain.stderr
    assert explained.returncode == plain.returncode == 1


@pytest.mark.wide
def test_a_module(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("", "utf-8")
    (package / "train.py").write_text(Path(path("reused_in_loop")).read_text("utf-8"), "utf-8")
    done = command("-m", "hodiff", "explain", "-m", "pkg.train", cwd=tmp_path)
    assert done.returncode == 1
    assert "made         train.py:10   y = t @ a" in done.stderr


def test_a_script_that_is_not_there(process, capsys):
    assert main(["explain", path("nowhere")]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_keyboard_interrupt(process, capsys, monkeypatch, tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text("raise KeyboardInterrupt('now')\n", "utf-8")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt, match="now"):
        main(["explain", str(script)])
    assert capsys.readouterr().err.count("KeyboardInterrupt: now") == 1


def test_errors_of_hodiff_are_explained_through_their_cause():
    a = torch.rand(4, requires_grad=True)
    with watch(), pytest.raises(hodiff.GraphError, match="freed") as caught:
        loss = a.exp().sum()
        loss.backward()
        hodiff.grad(loss, a)
    assert "`loss`" in caught.value.__cause__.__notes__[0]


def test_stdin_stays(process, monkeypatch, tmp_path, capsys):
    script = tmp_path / "reads.py"
    script.write_text("import sys\nprint(sys.stdin.read().upper())\n", "utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("words"))
    assert main(["explain", str(script)]) == 0
    assert capsys.readouterr().out == "WORDS\n"


def test_python_before_the_script_is_left_out(process, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "python", "train.py"]) == 2
    assert "leave python out: hodiff explain SCRIPT" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"cells": [], "metadata": null}', '{"cells": []}'])
def test_a_notebook_is_no_script(process, capsys, tmp_path, text):
    """Run as Python one fails at its null, and another ends without a word."""
    notebook = tmp_path / "work.ipynb"
    notebook.write_text(text, "utf-8")
    assert main(["explain", str(notebook)]) == 2
    assert "a notebook is no script; make one of it: jupyter nbconvert" in capsys.readouterr().err
