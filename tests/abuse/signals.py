"""`python -m tests.abuse.signals 5000`: real signals at random moments of public calls; what they leave behind.

python -m tests.abuse.signals 5000                          # whose handler raises KeyboardInterrupt
python -m tests.abuse.signals 1000 --error TimeoutError     # or MemoryError, RuntimeError, Own
python -m tests.abuse.signals 5000 --begin 3 --seconds 600  # other moments; so long at most

After each, the state of the process and of the model is compared, the locks are tried, and a few calls must give the
values that they gave before. What Python swallows ("Exception ignored in") is counted, and what the library does.
"""

import argparse
import gc
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch._dynamo

import hodiff
from tests.contract.test_events import CALLS, ENTERED, Call
from tests.support.audit import differences, of_module, of_tensor, process, taken_locks
from tests.support.callers import SCALE, tensors
from tests.support.interrupts import HERE
from tests.support.processes import group_of_one
from tests.support.scene import Model, X


class Own(Exception):
    """An error that no library can know."""


ERRORS = {kind.__name__: kind for kind in (KeyboardInterrupt, TimeoutError, MemoryError, RuntimeError, Own)}
PROBES = ("hvp, module as point", "laplacian, module in f", "HessianOperator, module in f", "graph.inspect")
SLOWER = 0.08
"""Seconds: what takes longer is left out, so that moments are spread over many calls."""


def calls(model: Model) -> dict[str, tuple[Callable[[], Any], float]]:
    """The calls, and how long each takes."""
    found = {}
    for name, call in {**CALLS, **ENTERED, "eager again": _cached()}.items():
        if "together" in name or "plotting" in name or "Scope(partial(_push_operations" in name:
            continue
        run = lambda call=call: call(model)
        run()
        begun = time.perf_counter()
        run()
        taken = time.perf_counter() - begun
        if taken < SLOWER:
            found[name] = run, taken
    return found


def _cached() -> Call:
    """Products through a graph that was kept."""
    H = hodiff.HessianOperator(lambda z: (z.sin() ** 3).sum(), X)
    return lambda _: H @ X


class Alarm:
    """Raises an error from the handler of a real signal, once.

    Attributes:
        place: The lines of hodiff that it came in.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error
        self.place, self.fired = "", False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.fired, lines = True, []
        where = frame.f_code.co_qualname if frame is not None else ""
        while frame is not None and len(lines) < 3:
            if frame.f_code.co_filename.startswith(HERE):
                lines.append(f"{frame.f_code.co_filename[len(HERE) + 1 :]}:{frame.f_lineno}")
            frame = frame.f_back
        self.place = f"{where}, {' for '.join(lines)}"
        raise self._error("from a handler")

    def during(self, run: Callable[[], Any], seconds: float) -> str:
        """What became of a call: `whole`, `raised`, `swallowed` or the name of another error."""
        self.place, self.fired = "", False
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                run()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            error.__traceback__ = None
            chain, each = [error], error
            while each := each.__cause__ or each.__context__:
                each.__traceback__ = None
                chain.append(each)
            if not self.fired:
                return f"raised by itself: {error!r:.80}"
            return "raised" if type(error) is self._error else f"became {type(error).__name__}"
        return "swallowed" if self.fired else "whole"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("signals", type=int)
    parser.add_argument("--error", choices=ERRORS, default="KeyboardInterrupt")
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ignored: Counter[str] = Counter()
    sys.unraisablehook = lambda found: ignored.update([f"{getattr(found.object, '__qualname__', found.object)!s:.90}"])
    model, choice = Model(), random.Random(given.begin)
    table = calls(model)
    alarm = Alarm(ERRORS[given.error])
    probes = {name: table[name][0] for name in PROBES if name in table}
    look = lambda: {"process": process(), "model": of_module(model), "x": of_tensor(X), "scale": of_tensor(SCALE)}
    expected = {name: _values(run) for name, run in probes.items()}
    before, counts, bad, end = look(), Counter(), Counter(), time.monotonic() + given.seconds
    names, fired, rest = list(table), 0, []
    while fired < given.signals and time.monotonic() < end:
        name = choice.choice(names)
        run, taken = table[name]
        outcome = alarm.during(run, max(1e-6, choice.random() * taken))
        fired += alarm.fired
        counts[outcome] += 1
        if outcome not in ("raised", "whole"):
            bad[f"{outcome}: {name} at {alarm.place}"] += 1
        if not alarm.fired:
            continue
        torch.manual_seed(fired)
        wrong = [line.split(":")[0] for line in differences(before, look())]
        wrong += [f"values of {each}" for each, probe in probes.items() if _differ(_values(probe), expected[each])]
        wrong += taken_locks() if fired % 50 == 0 else []
        if wrong:
            gc.collect()
            again = [line.split(":")[0] for line in differences(before, look())]
            bad[f"LEFT {wrong[:4]} (after a collection {again[:4]}): {name} at {alarm.place}"] += 1
            print(f"{fired}: {wrong[:6]} in {name} at {alarm.place}", flush=True)
            if again:
                rest = [str(given.signals - fired), "--error", given.error, "--begin", str(given.begin + 1)]
                break
        if fired % 500 == 0:
            print(fired, dict(counts), sum(ignored.values()), flush=True)
    print(f"torch {torch.__version__}, {given.error}: {fired} signals in {len(table)} calls: {dict(counts)}")
    for what, number in (bad + Counter({f"Python ignored it in {k}": n for k, n in ignored.items()})).most_common():
        print(f"{number:5} {what}", flush=True)
    if rest:  # the state is not what it was
        seconds = str(end - time.monotonic())
        os.execv(sys.executable, [sys.executable, "-m", "tests.abuse.signals", *rest, "--seconds", seconds])


def _values(run: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(7)
    try:
        return tensors(run())
    except Exception as error:
        return [repr(error)]


def _differ(found: list[Any], expected: list[Any]) -> bool:
    return list(map(type, found)) != list(map(type, expected)) or not all(map(torch.allclose, found, expected))


if __name__ == "__main__":
    with group_of_one():
        main()
