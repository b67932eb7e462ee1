"""Which tests run a line, how long they take, and which of them to ask: from one run of the suite under coverage."""

import json
import random
from collections import defaultdict
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.rules import SOURCE, Mutant

CONFIG = "[run]\nsource = hodiff\nbranch = false\n"


class Seconds:
    """A plugin that notes how long each test took that passed."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.found[report.nodeid] = report.duration


def record(folder: Path, tests: list[str]) -> None:
    """Run the tests, and note which lines each of them runs."""
    folder.mkdir(parents=True, exist_ok=True)
    config, seconds = folder / "coverage.ini", Seconds()
    config.write_text(f"{CONFIG}data_file = {folder / 'coverage'}\n", encoding="utf-8")
    options = ["--cov=hodiff", "--cov-context=test", f"--cov-config={config}", "--cov-report=", "--cov-append"]
    pytest.main(["-q", "-p", "no:cacheprovider", *options, *tests], plugins=[seconds])
    file = folder / "seconds.json"
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(before | seconds.found), encoding="utf-8")


class Choice:
    """The tests for each mutant."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text("utf-8"))

    @cache  # noqa: B019
    def _lines(self, file: str) -> dict[int, set[str]]:
        found = self._data.contexts_by_lineno(str(SOURCE / file))
        return {line: {context.partition("|")[0] for context in contexts} for line, contexts in found.items()}

    def tests(self, mutant: Mutant, seconds: float) -> list[str]:
        """Those that run its lines, by turns from each file of tests, quick ones first, as many as fit.

        Where none does in the process that was recorded, those of the part, which start others.
        """
        lines = self._lines(mutant.file)
        found = set(chain.from_iterable(lines.get(n, ()) for n in range(mutant.line, mutant.last + 1)))
        part = f"tests/unit/{Path(mutant.file).parts[1]}/"
        known = found & set(self._seconds) or {test for test in self._seconds if test.startswith(part)}
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(known):
            files[test.partition("::")[0]].append(test)
        chance = random.Random(mutant.name)
        for group in files.values():
            chance.shuffle(group)
            group.sort(key=lambda test: round(self._seconds[test], 1))
        order = sorted(files, key=lambda file: (-self._share(files[file], file), file))
        chosen, left = [], seconds
        for test in chain.from_iterable(zip_longest(*(files[file] for file in order))):
            if test is not None and self._seconds[test] <= left:
                chosen.append(test)
                left -= self._seconds[test] + 0.02
        return chosen

    def _share(self, tests: list[str], file: str) -> float:
        """How much of a file of tests runs the line: all of it, where the line is what it is about."""
        return len(tests) / sum(test.startswith(f"{file}::") for test in self._seconds)
