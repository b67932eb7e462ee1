"""A machine that lacks something: a home, a compiler, a network, a locale, open streams.

A reader who has read enough is in `test_shown`.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.meta.source import ROOT
from tests.support.releases import STEPS

PROGRAM = """\
import torch
straße = torch.ones(2, requires_grad=True)
größe = (straße * straße).sum()
größe.backward()
größe.backward()
"""
ALONE = """\
import socket, sys
def refused(*given, **options):
    raise OSError("no network here")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
from hodiff.cli import main
sys.exit(main(sys.argv[1:]))
"""
FULL = os.strerror(errno.ENOSPC)
COMMANDS = {"info": 0, "tour": 0, "explain": 1}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "straße.py"
    path.write_text(PROGRAM, "utf-8")
    return path


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """No home that can be written to, no programs (so no compiler), no characters but ASCII."""
    return {
        "PATH": str(tmp_path / "no programs"), "CC": "/no/compiler", "CXX": "/no/compiler",
        "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null",
        "LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }  # fmt: skip


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, check=False, text=True, timeout=240, **options)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform == "win32", reason="/dev/null is no folder where there is one")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_machine_without_anything(command: str, bare: dict[str, str], program: Path) -> None:
    given = [str(program)] if command == "explain" else []
    ran = run([sys.executable, "-c", ALONE, command, *given], env=bare, encoding="ascii")
    assert ran.returncode == COMMANDS[command], ran.stderr
    if command == "explain":
        assert "=> same loss twice" in ran.stderr and not ran.stdout
        assert "gr\\xf6\\xdfe" in ran.stderr  # which ASCII has no letters for
    else:
        assert not ran.stderr and len(ran.stdout.splitlines()) > (20 if command == "tour" else 5)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("command", "closed"), [("info", "2>&-"), ("tour", ">&- 2>&- <&-"), ("explain", ">&-"), ("explain", "2>&-")]
)
def test_closed_streams(command: str, closed: str, program: Path) -> None:
    """What would be written is lost, and nothing else: the status is the same, and an open stream has its part."""
    given = f"'{program}'" if command == "explain" else ""
    ran = run(["/bin/sh", "-c", f"exec '{sys.executable}' -m hodiff {command} {given} {closed}"])
    assert ran.returncode == COMMANDS[command], ran.stderr
    if command == "explain":
        assert ("differentiated twice" in ran.stderr) is (closed == ">&-")
    else:
        assert not ran.stderr and bool(ran.stdout) is (closed == "2>&-")


@pytest.mark.wide
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that takes nothing is Linux's")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_stream_that_takes_nothing(command: str, buffered: bool, program: Path) -> None:
    """One line for ours; a program's is Python's matter, which ends with 120, and stderr has its explanation."""
    program.write_text("print('begins')\n" + PROGRAM, "utf-8")
    given = f"'{program}'" if command == "explain" else ""
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    ran = run(["/bin/sh", "-c", f"exec '{sys.executable}' -m hodiff {command} {given} > /dev/full"], env=environment)
    if command != "explain":
        assert (ran.returncode, ran.stderr) == (1, f"hodiff {command}: can't write the output: {FULL}\n")
    elif buffered:
        assert ran.returncode == 120 and "=> same loss twice" in ran.stderr
        assert ran.stderr.endswith(f"OSError: [Errno {errno.ENOSPC}] {FULL}\n") and "hodiff/cli" not in ran.stderr
    else:  # the program fails where it prints
        assert ran.returncode == 1 and ran.stderr.endswith(f"OSError: [Errno {errno.ENOSPC}] {FULL}\n")


@pytest.mark.wide
def test_a_reader_who_has_read_enough_hears_the_explanation(program: Path) -> None:
    program.write_text("print('begins')\n" + PROGRAM, "utf-8")
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    begun = subprocess.Popen(
        [sys.executable, "-m", "hodiff", "explain", str(program)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert begun.stdout is not None and begun.stderr is not None
    begun.stdout.close()
    with begun.stderr as stderr:
        said = stderr.read()
    assert begun.wait(240) and "=> same loss twice" in said


@pytest.mark.wide
@pytest.mark.skipif(sys.platform == "win32", reason="/dev/null is no folder where there is one")
def test_what_is_compiled_needs_a_compiler_and_nothing_else_does(bare: dict[str, str]) -> None:
    """PyTorch's error says what is missing; the same call, not compiled, is right before and after."""
    ran = run([sys.executable, "-c", COMPILED], env=bare | {"PYTHONUTF8": "1"})  # PyTorch's compiler needs it
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["right", "a compiler is missing", "right"], ran


COMPILED = """\
import torch, hodiff
x = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
f = lambda x: (x ** 3).sum(-1)
right = lambda: print("right" if torch.allclose(hodiff.laplacian(f, x), 6 * x.sum(-1)) else "wrong")
right()
try:
    torch.compile(lambda x: hodiff.laplacian(f, x).sin().cos() * 2)(x)
except Exception as error:
    print("a compiler is missing" if "compiler" in str(error) else error)
right()
"""


@pytest.mark.wide
@STEPS
@pytest.mark.skipif(sys.platform == "win32", reason="/dev/null is no folder where there is one")
@pytest.mark.parametrize("utf8", ["1", pytest.param("0", marks=pytest.mark.nightly)])
def test_a_step_says_which_backend_needs_no_compiler(bare: dict[str, str], utf8: str) -> None:
    """It runs uncompiled, and by replay it does not. (Until 2.14 PyTorch's compiler reads its files by the locale.)"""
    ran = run([sys.executable, "-c", STEP], env=bare | {"PYTHONUTF8": utf8})
    assert ran.stdout.splitlines() == ["(0, -8.0)", "(1, -8.0)"], ran.stderr
    (warning,) = ran.stderr.splitlines()
    assert "HodiffWarning: compile_step: it cannot be compiled: inductor fails (" in warning
    assert "No working C++ compiler" in warning or "'ascii' codec can't decode" in warning
    assert warning.endswith("); backend='replay' needs no compiler. This step runs uncompiled.")


STEP = """\
import torch, hodiff
w = torch.tensor(2.0, requires_grad=True)
def loss(w, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(w * x**2, x, create_graph=True)
    return (slope - 6) ** 2
for backend in ("replay", "inductor"):
    step, w.grad = hodiff.compile_step(loss, w, backend=backend), None
    step(torch.tensor(1.0)).backward()
    print((step.report.eager, w.grad.item()))
"""
