"""No test hangs for good: threads that do not end fail their test, a test that does not end ends the run, by name."""

import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def where_threads_stand(*but: int) -> str:
    """The innermost lines of each thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(number, 'a thread')}:\n{''.join(traceback.format_stack(frame, 30))}"
        for number, frame in sys._current_frames().items()
        if number not in but
    )


@contextmanager
def limited(name: str, seconds: float, stderr: int) -> Iterator[None]:
    """End the run where a test takes longer, with its name, and the place where each thread stands.

    The handler of a signal says so, wherever the main thread waits in Python. Code that never comes back to Python, and
    threads that the process would wait for at its end, are ended a minute later: the interpreter prints where they are.
    """

    def end(*_: Any) -> None:
        pytest.exit(f"{name} takes longer than {seconds:g} seconds\n{where_threads_stand()}", 1)

    faulthandler.dump_traceback_later(seconds + 60, exit=True, file=stderr)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    yield  # where this raises, the run ends: the minute goes on
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()


def in_threads(*calls: Callable[[], Any], seconds: float = 60) -> list[Any]:
    """What the calls return, each in a thread of its own; what one raises is raised. Fails where one does not end."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"threads do not end:\n{where_threads_stand()}"
    for error in errors:
        raise error
    return results
