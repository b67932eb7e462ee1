"""Fields: evaluations of f, and the peak of live memory, as the docstrings state them."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import hodiff
from hodiff.curvature._memory import LiveBytes
from hodiff.fields import _expansions

SAMPLES, COORDINATES, WIDTH = 96, 32, 64


class Counted(nn.Module):
    """A network that knows the samples of each of its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [COORDINATES, WIDTH, WIDTH, WIDTH]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        self.batches: list[int] = []

    def forward(self, x):
        self.batches.append(len(x))
        return self.layers(x)


@pytest.fixture
def f():
    return Counted()


@pytest.fixture
def x():
    return torch.randn(SAMPLES, COORDINATES)


BLOCKS = 8


@pytest.fixture
def small(monkeypatch):
    """A bound that the whole batch passes eight times over."""
    whole = COORDINATES * SAMPLES * WIDTH * 4
    monkeypatch.setattr(_expansions, "BLOCK_BYTES", whole // BLOCKS)
    monkeypatch.setattr(_expansions, "WHOLE_BYTES", whole // BLOCKS)
    return whole // BLOCKS


def peak(call) -> int:
    call()
    with LiveBytes() as live:
        call()
    return live.peak


def by_loop(f, x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(g[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(rows).sum(0)


def test_one_evaluation_where_it_is_small_or_recorded(f, x):
    hodiff.laplacian(f, x, create_graph=False)
    hodiff.laplacian(f, x)
    assert f.batches == [SAMPLES] * 2


@pytest.mark.usefixtures("small")
def test_evaluations_in_blocks(f, x):
    """The whole batch until a coefficient is too large, in one direction, the blocks, one direction of the last."""
    hodiff.laplacian(f, x, create_graph=False)
    size = SAMPLES // BLOCKS
    assert f.batches == [SAMPLES] * 2 + [size] * BLOCKS + [size]


@pytest.mark.parametrize(("size", "evaluations"), [(32, 1), (16, 2), (10, 4), (1, 32)])
def test_evaluations_in_chunks(size, evaluations, f, x):
    hodiff.laplacian(f, x, chunk_size=size, create_graph=False)
    assert f.batches == [SAMPLES] * evaluations


def test_few_directions_are_not_rehearsed(f, small):
    factor = torch.randn(COORDINATES, 4)
    hodiff.second_order_operator(f, torch.randn(SAMPLES * 10, COORDINATES), factor, create_graph=False)
    assert f.batches == [SAMPLES * 10]


def test_peak_memory_of_a_value(f, x, small, monkeypatch):
    """Two coefficients of a block and a tile, beside a few tensors of the size of the value; no graph is kept."""
    found = peak(lambda: hodiff.laplacian(f, x, create_graph=False))
    value = SAMPLES * WIDTH * 4
    assert found < 3 * small + 12 * value
    monkeypatch.setattr(_expansions, "WHOLE_BYTES", 2**40)
    assert found < 0.3 * peak(lambda: hodiff.laplacian(f, x, create_graph=False))


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("samples", [64, 256])
@pytest.mark.parametrize("coordinates", [3, 30, 100, 150, 300])
def test_no_block_is_worth_less_than_its_calls(samples, coordinates, width):
    """All at once up to some 20 MiB; beyond, in fewer chunks than of 64 directions: two at 38 MiB, three at 75."""
    net = nn.Sequential(nn.Linear(coordinates, width), nn.Tanh(), nn.Linear(width, 1))

    def evaluations(chunk_size):
        found = []
        with net.register_forward_hook(lambda *_: found.append(1)):
            hodiff.laplacian(net, torch.randn(samples, coordinates), create_graph=False, chunk_size=chunk_size)
        return len(found)

    large = {150: 2, 300: 3} if samples == width == 256 else {}
    assert evaluations("auto") == large.get(coordinates, 1) <= evaluations(64)


@pytest.mark.nightly
def test_peak_memory_against_the_coordinate_loop():
    """At a size that the bound is meant for: half of what the graph of the loop takes."""
    f = nn.Sequential(nn.Linear(50, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    f = nn.Sequential(*f, nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    x = torch.randn(4096, 50)
    assert peak(lambda: hodiff.laplacian(f, x, create_graph=False)) < 0.5 * peak(lambda: by_loop(f, x))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_peak_memory_of_chunks(size, f, x):
    coefficient = size * SAMPLES * WIDTH * 4
    assert peak(lambda: hodiff.laplacian(f, x, chunk_size=size, create_graph=False)) < 3 * coefficient + 12 * (
        SAMPLES * WIDTH * 4
    )


def test_nothing_is_left_but_the_result(f, x, small):
    with LiveBytes() as live:
        found = hodiff.laplacian(f, x, create_graph=False)
    assert live.now == found.untyped_storage().nbytes()


@pytest.mark.parametrize("create_graph", [True, False])
def test_the_reverse_route_takes_the_memory_of_a_hessian_diagonal(f, x, create_graph):
    route = lambda: hodiff.laplacian(f, x, method="reverse", create_graph=create_graph)
    assert peak(route) < 1.2 * peak(lambda: hodiff.hessian_diagonal(f, x, batch_ndim=1, create_graph=create_graph))


def test_the_reverse_route_holds_one_chunk_of_directions(f, x):
    chunks = lambda size: peak(lambda: hodiff.laplacian(f, x, method="reverse", create_graph=False, chunk_size=size))
    assert chunks(2) < 0.3 * chunks(COORDINATES)
