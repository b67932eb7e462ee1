"""Whether tests see a planted bug: they run on a copy of the library, in a process that has PyTorch already."""

import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants.rules import SOURCE, Mutant

LOADED_ONCE = (
    "torch", "torch._dynamo", "torch.testing", "numpy", "scipy.linalg", "scipy.optimize", "scipy.sparse",
    "scipy.special", "scipy.stats", "sympy", "hypothesis.extra.numpy", "hypothesis.strategies", "sklearn.datasets",
)  # fmt: skip


OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


class Result(NamedTuple):
    """`"killed"`, `"killed by time"` or `"lives"`; by which test; and how long the processor took."""

    outcome: str
    by: str
    seconds: float


class First:
    """A plugin that notes the first test that fails, or the first file that cannot be read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid, encoding="utf-8")

    pytest_collectreport = pytest_runtest_logreport


def _outcome(status: int | None, by: str) -> str:
    if status in (None, -signal.SIGXCPU):
        return "killed by time"
    if status == 0:
        return "lives"
    return "killed" if by or status < 0 else f"no verdict, status {status}"  # a signal ends a process as an error does


class Copy:
    """A copy of the library, in which one bug after the other is planted; its bytecode lies beside it."""

    def __init__(self) -> None:
        for name in LOADED_ONCE:
            importlib.import_module(name)
        self._folder = Path(tempfile.mkdtemp(prefix="mutants"))
        self._planted = 0
        shutil.copytree(SOURCE, self._folder / "src", ignore=shutil.ignore_patterns("__pycache__"))

    def close(self) -> None:
        shutil.rmtree(self._folder)

    def run(self, mutant: Mutant | None, tests: list[str], limit: int) -> Result:
        """Run tests with a bug, or without one, until the first fails; `limit` seconds of the processor at most."""
        first = self._folder / "first"
        first.unlink(missing_ok=True)
        if mutant is not None:
            self._plant(mutant)
        try:
            status, seconds = self._forked(tests, first, limit)
        finally:
            if mutant is not None:
                shutil.copy2(SOURCE / mutant.file, self._folder / "src" / mutant.file)
        by = first.read_text("utf-8") if first.exists() else ""
        return Result(_outcome(status, by), by, round(seconds, 1))

    def _plant(self, mutant: Mutant) -> None:
        """Each bug has a time of its own, by which Python tells that the bytecode of another is none of it."""
        self._planted += 1
        file = self._folder / "src" / mutant.file
        file.write_text(mutant.planted(file.read_text("utf-8")), encoding="utf-8")
        os.utime(file, (self._planted, self._planted))

    def _forked(self, tests: list[str], first: Path, limit: int) -> tuple[int | None, float]:
        """The exit status of pytest in a process of its own, None where it slept too long; and its seconds."""
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            self._child(tests, first)
        end = time.monotonic() + 10 * limit
        while time.monotonic() < end:
            done, status, used = os.wait4(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
        return None, used.ru_utime + used.ru_stime

    def _child(self, tests: list[str], first: Path) -> None:
        """Never returns."""
        status = 70
        try:
            out = os.open(self._folder / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.dont_write_bytecode, sys.pycache_prefix = False, str(self._folder / "bytecode")
            sys.path.insert(0, str(self._folder / "src"))
            os.environ["PYTHONPATH"] = str(self._folder / "src")
            status = pytest.main([*OPTIONS, *tests], plugins=[First(first)])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(int(status))
