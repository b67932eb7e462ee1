import threading

import pytest
import torch

from hodiff._core import _safety
from hodiff._core._safety import Counted


def switch():
    """A counted switch over a plain flag, and a log of what it did."""
    log = []

    def turn():
        log.append("on")
        return lambda: log.append("off")

    return Counted(turn), log


def test_the_first_switches_and_the_last_restores():
    counted, log = switch()
    counted.enter()
    counted.enter()
    counted.leave()
    assert log == ["on"]
    counted.leave()
    assert log == ["on", "off"]


def test_overlapping_threads_restore_once():
    counted, log = switch()
    inside, leave = threading.Event(), threading.Event()

    def stay():
        counted.enter()
        inside.set()
        leave.wait(10)
        counted.leave()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(10)
    counted.enter()
    counted.leave()
    assert log == ["on"]
    leave.set()
    thread.join(10)
    assert log == ["on", "off"]


def test_everything_is_undone_when_entering_fails(monkeypatch):
    def broken():
        raise RuntimeError("no such backend")

    monkeypatch.setattr(_safety, "plain_attention", Counted(broken))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="no such backend"):
            _safety.Evaluating(order=2)
        assert not torch.is_grad_enabled()
    assert not _safety.inside()


@pytest.mark.parametrize(
    ("passes", "create_graph", "order"), [(1, False, 1), (1, True, 2), (2, False, 2), (2, True, 3)]
)
def test_order_outside_any_call(passes, create_graph, order):
    assert _safety.total_order(passes, create_graph) == order


def test_order_inside_a_call_counts_its_passes():
    held = _safety.Evaluating(order=2)
    try:
        assert _safety.total_order(1, True) == 3
        assert _safety.total_order(1, False) == 1
    finally:
        held.close()
