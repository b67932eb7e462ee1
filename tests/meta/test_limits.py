"""What would hang ends, and says where."""

import faulthandler
import threading
import time

import pytest

from tests.support.limits import in_threads, limited


def test_a_test_that_hangs_ends_the_run_by_its_name() -> None:
    stands = r"the one takes longer than 1 seconds\n[\s\S]*MainThread:\n[\s\S]*threading\.Event\(\)\.wait\(20\)"
    try:
        with pytest.raises(pytest.exit.Exception, match=stands), limited("the one", 1, 2):
            threading.Event().wait(20)
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_threads_that_do_not_end_fail() -> None:
    go = threading.Event()
    with pytest.raises(AssertionError, match=r"threads do not end:\n[\s\S]*go\.wait\(20\)"):
        in_threads(lambda: go.wait(20), lambda: 1, seconds=0.05)
    go.set()


def test_what_threads_return_and_raise() -> None:
    assert in_threads(lambda: 1, lambda: time.sleep(0.01)) == [1, None]
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        in_threads(lambda: 1, lambda: 1 / 0)
