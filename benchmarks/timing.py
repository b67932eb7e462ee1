"""Times of contenders that take turns in one process, so that a busy machine slows all of them alike.

Times are CPU times of the calling thread, which is the only one that works here (`main` sets one
thread, and reverse passes on the CPU run in their caller): what other processes take does not count.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping

Times = dict[str, list[float]]


def race(contenders: Mapping[str, Callable[[], object]], *, rounds: int, least: float = 2e-3) -> Times:
    """Seconds per call, for each contender a list with one entry per round.

    A contender is repeated within its turn until the turn takes about `least` seconds. The order of
    the turns rotates; the collector is off while a turn is timed.
    """
    repeats = {name: _repeats(call, least) for name, call in contenders.items()}
    names = list(contenders)
    times: Times = {name: [] for name in names}
    for turn in range(rounds):
        gc.collect()
        gc.disable()
        try:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(_time(contenders[name], repeats[name]))
        finally:
            gc.enable()
    return times


def _repeats(call: Callable[[], object], least: float) -> int:
    for _ in range(3):
        call()  # warm up
    return max(1, round(least / _time(call, 1)))


def _time(call: Callable[[], object], repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - start) / repeats


def best(times: Times, names: list[str]) -> str:
    """The contender with the least median."""
    return min(names, key=lambda name: statistics.median(times[name]))


def ratios(times: Times, one: str, other: str) -> list[float]:
    """`one` over `other`, round by round."""
    return [a / b for a, b in zip(times[one], times[other], strict=True)]


def differences(times: Times, one: str, other: str) -> list[float]:
    """`one` minus `other`, round by round."""
    return [a - b for a, b in zip(times[one], times[other], strict=True)]


def spread(values: list[float], digits: int = 2) -> str:
    """Median [least - most]."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} - {max(values):.{digits}f}]"
