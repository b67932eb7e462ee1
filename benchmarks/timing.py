"""Times of contenders that take turns in one process, so that a busy machine slows all of them
alike.

Times are CPU times of the calling thread, which is the only one that works here (`main` sets one
thread, and reverse passes on the CPU run in their caller): what other processes take does not
count. With `--device cuda` they are those of the clock, and all that was queued is waited for.
"""

import ctypes
import functools
import gc
import mmap
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Times = dict[str, list[float]]


def race(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, least: float = 2e-3
) -> Times:
    """Seconds per call, for each contender a list with one entry per round.

    A contender is repeated within its turn until the turn takes about `least` seconds. The order of
    the turns rotates; the collector is off while a turn is timed, and runs before every tenth of
    many.
    """
    repeats = {name: _repeats(call, least) for name, call in contenders.items()}
    names = list(contenders)
    times: Times = {name: [] for name in names}
    for turn in range(rounds):
        if rounds <= 25 or not turn % 10:
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
    start = _now()
    for _ in range(repeats):
        call()
    return (_now() - start) / repeats


def _now() -> float:
    if torch.get_default_device().type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def best(times: Times, names: list[str]) -> str:
    """The contender with the least median."""
    return min(names, key=lambda name: statistics.median(times[name]))


def ratios(times: Times, one: str, other: str) -> list[float]:
    """`one` over `other`, round by round."""
    return [a / b for a, b in zip(times[one], times[other], strict=True)]


def quick_ratio(times: Times, one: str, other: str) -> float:
    """The ratio of their quicker turns (of the fifth of each that took least):
    the others had guests.
    """
    a, b = (statistics.quantiles(times[name], n=5)[0] for name in (one, other))
    return a / b


def differences(times: Times, one: str, other: str) -> list[float]:
    """`one` minus `other`, round by round."""
    return [a - b for a, b in zip(times[one], times[other], strict=True)]


def spread(values: list[float], digits: int = 2) -> str:
    """Median [least - most]."""
    return (
        f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} - "
        f"{max(values):.{digits}f}]"
    )


# --- instructions, as valgrind counts them: the same on every run, whatever else the machine does
# Times of small calls are the processor's, its caches' and the neighbors': on a busy machine two
# runs were 10 to 40 % apart. Instructions are not what a user waits for (ours are spread over more
# code than a loop's, and each takes longer), but they can be compared.


COUNTED = "HODIFF_BENCHMARKS_COUNT"
"""The variable of the environment that says where valgrind writes."""
_START, _STOP, _ZERO, _DUMP = (0x43540000 + request for request in (4, 5, 1, 0))


def under_valgrind(module: str) -> str | None:
    """What a module prints as a program whose instructions can be counted;
    None where they cannot.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None or platform.machine() != "x86_64":
        return None
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "counts"))
        tool = [
            valgrind,
            "-q",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={place}",
        ]
        environment = os.environ | {COUNTED: place, "PYTHONHASHSEED": "0"}
        command = [*tool, sys.executable, "-m", module]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout


def instructions(call: Callable[[], object], repeats: int = 5) -> float:
    """Of a call that is warm, in a program of `under_valgrind`."""
    for _ in range(25):  # the interpreter has specialised its byte codes by then
        call()
    gc.collect()
    gc.disable()
    _tell(_START)
    call()
    _tell(_ZERO)
    for _ in range(repeats):
        call()
    _tell(_DUMP)
    _tell(_STOP)
    gc.enable()
    place = Path(os.environ[COUNTED])
    [written] = place.parent.glob(f"{place.name}.*")
    [total] = re.findall(r"^(?:totals|summary): (\d+)", written.read_text(), re.MULTILINE)[-1:]
    written.unlink()
    return int(total) / repeats


def _tell(request: int) -> None:
    """Valgrind, by the instructions for which it looks: others do nothing there."""
    _entry()(ctypes.byref((ctypes.c_uint64 * 6)(request)))


@functools.cache
def _entry() -> Callable[[object], int]:
    # mov rax, rdi; xor edx, edx; rol rdi, 3; rol rdi, 13; rol rdi, 61; rol rdi, 51; xchg rbx, rbx;
    # mov rax, rdx; ret
    code = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
    _page.append(mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))
    _page[0].write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(_page[0]))
    return ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)


_page: list[mmap.mmap] = []
