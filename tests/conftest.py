"""What every test shares: one thread, a limit of time, seeded randomness, Hypothesis profiles, --slow.

A table of thousands of cases is marked `drawn(n)`: of each of its functions n cases run, others after each change of
the tree. All run under `--slow`, and whatever is named (`FILE::CASE`, `-k`, `--lf`) runs.
"""

import gc
import hashlib
import os
import random
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: more threads only compete
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from hodiff._core._versions import RELEASE
from tests.support.limits import limited
from tests.support.releases import UNTOLD

torch.set_num_threads(1)
MAIN = sys.modules["__main__"]

# The first call through torch's tracing machinery takes longer than Hypothesis's deadline of 200 ms.
_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **_COMMON)
settings.register_profile("deep", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow, and all cases of all tables")


STDERR = pytest.StashKey[int]()
SEED = pytest.StashKey[str]()
CHANGED = pytest.StashKey[list[object]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(sys.stderr.fileno())  # before what tests print is captured
    config.stash[SEED] = os.environ.get("HODIFF_SEED") or hash_of_the_tree(config.rootpath)


def hash_of_the_tree(root: Path) -> str:
    """Of what is tested and what tests it: a copy without .git draws the same cases."""
    found = hashlib.sha256()
    for path in sorted(path for folder in ("src", "tests") for path in (root / folder).rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases of tables: drawn by HODIFF_SEED={config.stash[SEED]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that hangs is told by its name in five minutes, and not by the limit of the whole run."""
    with limited(item.nodeid, 3600 if "slow" in item.keywords else 300, item.config.stash[STDERR]):
        return (yield)


def pytest_enter_pdb() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    named = any("::" in argument for argument in config.args) or config.option.keyword
    if not named and not getattr(config.option, "lf", False):
        left = left_out(items, config.stash[SEED])
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def left_out(items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    """Of each function marked `drawn(n)` all cases but n; which ones depends on nothing else that is collected."""
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            tables[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for name, cases in tables.items():
        number = cases[0].get_closest_marker("drawn").args[0]
        left.update(random.Random(f"{seed} {name}").sample(cases, max(0, len(cases) - number)))
    return left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and any(item.stash.get(CHANGED, ())):
        report.outcome, report.wasxfail = "skipped", UNTOLD  # counted as an expected failure
    if report.failed and item.get_closest_marker("drawn"):
        report.sections.append(("drawn from a table; to repeat it", f"python -m pytest {shlex.quote(item.nodeid)}"))
    return report


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """`hodiff explain` leaves its program as `__main__`, as Python does, and IPython its cells, already in a fixture.

    A process started later would run the one again, and look in vain for the other's `__spec__`.
    """
    sys.modules["__main__"] = MAIN
    yield
    sys.modules["__main__"] = MAIN


@pytest.fixture(autouse=True)
def untold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note where PyTorch does not tell which tensor was changed in place: what a test then misses is no failure."""
    if RELEASE < (2, 12):
        from hodiff.graph import _in_place

        words, found = _in_place._unnamed, request.node.stash.setdefault(CHANGED, [])
        monkeypatch.setattr(_in_place, "_unnamed", lambda case: (found.append(said := words(case)), said)[1])


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """A collection looks at what a module's tests make, and not at all that was ever imported: many tests collect."""
    gc.collect()
    gc.freeze()
