"""What looking at graphs costs, in calls of the interpreter for each node: the same on every machine, and linear.

Seconds are in docs/explain/benchmarks.md.
"""

import gc
import sys

import pytest
import torch

import hodiff
from hodiff._core import _nodes, _versions
from hodiff.graph import watch
from tests.support.calls import count

PER_NODE = {"inspect": 23, "predict": 6, "explain": 16, "explain, after the fact": 19}
PER_OPERATION = 20  # with what lies behind each cut, who switched gradients off, and where each tensor was made
"""Calls of the recorder for each operation under a watch."""


def chain(length, x):
    """So many operations; every second one has two saved tensors."""
    value = x
    for index in range(length):
        value = value.sin() if index % 2 else value * x
    return value.sum()


def calls(function):
    """Calls of the interpreter during one run of a function, not warmed up."""
    found = [0]

    def listen(frame, event, _):
        found[0] += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found[0]


def explained(length):
    x = torch.ones(3, requires_grad=True)
    with watch():
        old = chain(length, x)
        old.backward()
        loss = old * 2 + chain(4, x)

        def failing():
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()

        return calls(failing)


def after_the_fact(length):
    x = torch.ones(3, requires_grad=True)
    old = chain(length, x)
    loss = old * 2
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time") as caught:
        loss.backward()
    assert hodiff.graph.explain(caught.value) is not None
    return calls(lambda: hodiff.graph.explain(caught.value))


def looked(look):
    def counted(length):
        loss = chain(length, torch.ones(3, requires_grad=True))
        return count(lambda: look(loss))

    return counted


COUNTS = {
    "inspect": looked(hodiff.graph.inspect),
    "predict": looked(hodiff.graph.predict),
    "explain": explained,
    "explain, after the fact": after_the_fact,
}


@pytest.mark.parametrize("name", COUNTS)
def test_calls_for_each_node(name, monkeypatch):
    monkeypatch.setattr(_nodes, "saved", _versions.look)  # as before the first call inside of a checkpoint
    COUNTS[name](10)  # first calls import and fill caches
    few, some, many = (COUNTS[name](length) for length in (300, 600, 1200))
    assert (many - some) / 600 <= PER_NODE[name]
    assert many - some == pytest.approx(2 * (some - few), rel=0.02)  # linear


def test_calls_for_each_operation_under_a_watch():
    x = torch.ones(3, requires_grad=True)

    def recorded(length):
        with watch():
            chain(length, x)

    plain = count(lambda: chain(600, x)) - count(lambda: chain(300, x))
    watched = count(lambda: recorded(600)) - count(lambda: recorded(300))
    assert (watched - plain) / 300 <= PER_OPERATION
