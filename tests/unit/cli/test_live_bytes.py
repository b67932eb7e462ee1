"""The byte counter of the tour and the benchmarks, where the bytes are known."""

import gc

import torch

from hodiff.curvature._memory import LiveBytes


def test_new_storages_count_once_and_go_at_once():
    gc.disable()
    try:
        with LiveBytes() as live:
            x = torch.zeros(100)
            view = x[:50].reshape(5, 10)
            x.add_(1)
            assert live.now == 400
            del x
            assert live.now == 400
            del view
            assert live.now == 0
            assert live.peak == 400
    finally:
        gc.enable()


def test_what_was_there_before_does_not_count():
    x = torch.zeros(100, requires_grad=True)
    with LiveBytes() as live:
        kept = [x.detach(), *x.split(10)]
        assert live.now == 0
        del kept


def test_what_only_a_graph_holds_counts():
    x = torch.zeros(100, requires_grad=True)
    with LiveBytes() as live:
        y = x.exp().sum()  # exp saves its result
        assert live.now == 400 + 4
        (g,) = torch.autograd.grad(y, x)
        assert live.now == 400 + 4
        del g
        assert live.now == 4


def test_batched_work_counts_in_full():
    x = torch.zeros(100)
    with LiveBytes() as live:
        torch.vmap(torch.sin)(x.expand(7, 100))
        assert live.peak == 7 * 400
        assert live.now == 0
