"""What every test shares: one thread, a limit of time, seeded randomness, and which cases run.

The law of the choice is in `tests/support/choice.py`.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: more threads only compete
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.choice import EXAMPLES, PINNED, left_out, pinned
from tests.support.limits import limited

torch.set_num_threads(1)
MAIN = sys.modules["__main__"]

# The first call through torch's tracing machinery takes longer than Hypothesis's deadline of 200 ms.
# Examples are derived from the property's name, and none is remembered: they are the same on every run.
for _level, _examples in EXAMPLES.items():
    settings.register_profile(
        _level,
        max_examples=_examples,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )

COSTS = {
    "plain": "the fixed choice, about five minutes of one core; --wide runs more (half an hour), --all everything",
    "wide": "the wide choice, about half an hour of one core; --all runs everything",
    "all": "everything, for a night",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="also run what takes long, and more cases of each table")
    parser.addoption("--all", action="store_true", help="run everything: all cases of all tables, sweeps and fuzzes")


STDERR = pytest.StashKey[int]()


def level(config: pytest.Config) -> str:
    """Which of the three choices this run makes."""
    if config.getoption("--all"):
        return "all"
    return "wide" if config.getoption("--wide") else "plain"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(sys.stderr.fileno())  # before what tests print is captured
    settings.load_profile(level(config))


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases: {COSTS[level(config)]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that hangs is told by its name in five minutes, and not by the limit of the whole run."""
    with limited(item.nodeid, 3600 if "nightly" in item.keywords else 300, item.config.stash[STDERR]):
        return (yield)


def pytest_enter_pdb() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    if config.option.keyword or getattr(config.option, "lf", False):
        return
    left = set(left_out(items, level(config), pinned(PINNED.read_text("utf-8"))))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    """Older releases leave a checkpoint's hooks on where its block raised, until the block's frame is collected."""
    yield
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
        gc.collect()


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """`hodiff explain` leaves its program as `__main__`, as Python does, and IPython its cells, already in a fixture.

    A process started later would run the one again, and look in vain for the other's `__spec__`.
    """
    sys.modules["__main__"] = MAIN
    yield
    sys.modules["__main__"] = MAIN


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """A collection looks at what a module's tests make, and not at all that was ever imported: many tests collect."""
    gc.collect()
    gc.freeze()
