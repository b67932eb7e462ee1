"""Whether tests see a planted bug: they run on a copy of the library, in a process that has PyTorch already."""

import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants.rules import SOURCE, Mutant

LOADED_ONCE = ("torch", "numpy", "scipy.linalg", "scipy.sparse", "sympy")


class Result(NamedTuple):
    """`"killed"`, `"killed by time"` or `"lives"`; by which test; and how long it took."""

    outcome: str
    by: str
    seconds: float


class First:
    """A plugin that notes the first test that fails."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and not self._file.exists():
            self._file.write_text(str(getattr(report, "nodeid", "")), encoding="utf-8")


class Copy:
    """A copy of the library, in which one bug after the other is planted."""

    def __init__(self) -> None:
        for name in LOADED_ONCE:
            importlib.import_module(name)
        self._folder = Path(tempfile.mkdtemp(prefix="mutants"))
        shutil.copytree(SOURCE, self._folder / "src", ignore=shutil.ignore_patterns("__pycache__"))

    def close(self) -> None:
        shutil.rmtree(self._folder)

    def run(self, mutant: Mutant | None, tests: list[str], limit: float) -> Result:
        """Run tests with a bug, or without one, until the first fails."""
        start, first = time.monotonic(), self._folder / "first"
        first.unlink(missing_ok=True)
        if mutant is not None:
            file = self._folder / "src" / mutant.file
            source = file.read_text("utf-8")
            file.write_text(mutant.planted(source), encoding="utf-8")
        try:
            status = self._forked(tests, first, limit)
        finally:
            if mutant is not None:
                file.write_text(source, encoding="utf-8")
        by = first.read_text("utf-8") if first.exists() else ""
        outcome = {0: "lives", None: "killed by time"}.get(status, "killed")
        return Result(outcome, by, round(time.monotonic() - start, 1))

    def _forked(self, tests: list[str], first: Path, limit: float) -> int | None:
        """The exit status of pytest in a process of its own; None where it took too long."""
        child = os.fork()
        if not child:
            os.setsid()
            self._child(tests, first)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(child, 9)
        os.waitpid(child, 0)
        return None

    def _child(self, tests: list[str], first: Path) -> None:
        """Never returns."""
        status = 70
        try:
            out = os.open(self._folder / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(self._folder / "src"))
            os.environ["PYTHONPATH"] = str(self._folder / "src")
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[First(first)])
        finally:
            os._exit(int(status))
