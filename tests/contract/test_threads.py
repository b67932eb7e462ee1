"""Eight threads that differentiate at once, one module between them, get the numbers that one thread gets."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.audit import differences, of_module, process
from tests.support.callers import CALLERS, D, tensors
from tests.support.everything import ALONE, WITH_MODULES, with_a_module
from tests.support.everything import of_module as function_of_module
from tests.support.scene import Model, X

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
THREADS = 8


def in_threads(task: Callable[[int], Any]) -> list[Any]:
    """What `THREADS` threads return that begin at once and take turns as often as they can."""
    results: list[Any] = [None] * THREADS
    barrier, interval = threading.Barrier(THREADS), sys.getswitchinterval()

    def work(number: int) -> None:
        barrier.wait(30)
        try:
            results[number] = task(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    sys.setswitchinterval(1e-4)  # and at each operation of PyTorch, which lets go of the interpreter
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 100
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return results


def same_numbers(task: Callable[[int], Any], *models: Model) -> None:
    expected = [tensors(task(number)) for number in range(THREADS)]
    before = [process(), *map(of_module, models)]
    for number, found in enumerate(in_threads(task)):
        assert not isinstance(found, BaseException), repr(found)
        torch.testing.assert_close(tensors(found), expected[number])
    assert not differences(before, [process(), *map(of_module, models)])


def still(model: Model) -> Model:
    """Without dropout: the threads draw from one generator, so that each would see other numbers in each run."""
    model.table.drop.eval()
    return model


@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_a_module_in_the_function(caller: Any) -> None:
    model = still(Model())
    points = [X + torch.tensor(number, dtype=D) / 10 for number in range(THREADS)]
    same_numbers(lambda number: caller.run(caller.shaped(model), points[number], ()), model)


@pytest.mark.parametrize("caller", WITH_MODULES, ids=repr)
def test_a_module_as_the_point(caller: Any) -> None:
    model = still(Model())
    same_numbers(lambda number: with_a_module(caller, model, function_of_module(caller)), model)


@pytest.mark.parametrize("name", sorted(set(ALONE) - {"plotting.convergence"}))  # matplotlib draws in one thread
def test_without_a_function(name: str) -> None:
    points = [X + torch.tensor(number, dtype=D) / 10 for number in range(THREADS)]
    same_numbers(lambda number: ALONE[name](points[number]))
