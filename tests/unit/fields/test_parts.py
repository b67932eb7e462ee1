"""Expansions in parts give what the whole gives, or are not made: f need not be what blocks take it for."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff.fields import _expansions, _field
from tests.support.properties import agree

D = torch.float64
N = 13


@pytest.fixture
def x():
    return torch.randn(N, 3, dtype=D)


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few samples for everything here."""
    monkeypatch.setattr(_expansions, "BLOCK_BYTES", 500)
    monkeypatch.setattr(_expansions, "WHOLE_BYTES", 500)
    monkeypatch.setattr(_field, "WORTHWHILE", 2)


def whole(call):
    """The call with everything at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_expansions, "WHOLE_BYTES", 2**40)
        return call()


class Seen:
    """A function that remembers how many samples it was given each time."""

    def __init__(self, f):
        self.f, self.batches = f, []

    def __call__(self, x, *args, **kwargs):
        self.batches.append(len(x))
        return self.f(x, *args, **kwargs)


def network(outputs=1):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(8, outputs)).to(D).eval()


def smooth(x):
    return torch.sin(x[..., 0] * x[..., 1]) + torch.exp(x / 3).sum(-1)


CALLS = {
    "laplacian": lambda f, x: hodiff.laplacian(f, x, create_graph=False),
    "diagonal weight": lambda f, x: hodiff.laplacian(f, x, weight=torch.arange(-1.0, 2.0, dtype=D), create_graph=False),
    "matrix for each sample": lambda f, x: hodiff.second_order_operator(
        f, x, x.sin()[:, :, None] * x[:, None], create_graph=False
    ),
    "value, gradient": lambda f, x: hodiff.value_grad_and_laplacian(f, x, create_graph=False),
    "operator": lambda f, x: hodiff.second_order_operator(
        f, x, torch.eye(3, dtype=D), x.cos(), 2.0, create_graph=False
    ),
    "estimate": lambda f, x: (
        hodiff.laplacian(f, x, samples=6, generator=torch.Generator().manual_seed(0), create_graph=False).value
    ),
    "stderr": lambda f, x: (
        hodiff.laplacian(f, x, samples=6, generator=torch.Generator().manual_seed(0), create_graph=False).stderr
    ),
    "biharmonic": lambda f, x: hodiff.biharmonic(f, x, create_graph=False),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("f", [network(), network(2), smooth], ids=["network", "two outputs", "function"])
@pytest.mark.parametrize("name", CALLS)
def test_blocks_of_samples_give_the_same(name, f, x):
    call, seen = CALLS[name], Seen(f)
    found = call(seen, x)
    agree(found, whole(lambda: call(f, x)))
    blocks = [size for size in seen.batches if size < N]
    assert sum(blocks[:-1]) == N and min(blocks) >= _expansions.LEAST_BLOCK


@pytest.mark.usefixtures("small")
def test_blocks_of_a_batch_with_two_dimensions(x):
    grid = torch.randn(9, 2, 3, dtype=D)
    seen = Seen(smooth)
    found = hodiff.laplacian(seen, grid, batch_ndim=2, create_graph=False)
    agree(found, hodiff.laplacian(smooth, grid.reshape(18, 3)).reshape(9, 2))
    assert set(seen.batches) != {9}
    image = torch.randn(9, 2, 3, dtype=D)
    found = hodiff.laplacian(lambda x: x.pow(4).sum((1, 2)), image, create_graph=False)
    agree(found, 12 * image.square().sum((1, 2)))


DATA = torch.linspace(1, 2, N, dtype=D)
TABLE = torch.randn(N, 3, dtype=D, generator=torch.Generator().manual_seed(0))

# Not functions of each sample alone: what they give depends on which samples they see together, or on their order.
OTHERS = {
    "data for each sample": lambda x: (x**4).sum(-1) * DATA,
    "a column for each sample": lambda x: ((x * DATA[:, None]) ** 4).sum(-1),
    "rows cut to the batch": lambda x: (x**4).sum(-1) * DATA[: len(x)],
    "rows cut, second order only": lambda x: ((x - x.detach()) ** 2).sum(-1) * DATA[: len(x)] + x.sum(-1),
    "rows cut, below an offset": lambda x: 1e9 + (x**4).sum(-1) * DATA[: len(x)],
    "rows cut, through a product": lambda x: (x * TABLE[: x.shape[0]]).sum(-1) ** 3,
    "the number of samples": lambda x: (x**4).sum(-1) / x.shape[0],
    "positions": lambda x: (x**4).sum(-1) * torch.arange(x.size(0), dtype=D),
    "the mean of the batch": lambda x: (x**4).sum(-1) * x.detach().mean(),
    "a running sum": lambda x: (x**4).sum(-1).cumsum(0),
    "a fixed shape": lambda x: (x.reshape(N, 3) ** 4).sum(-1),
    "dropout": lambda x: F.dropout(x, 0.5, training=True).pow(4).sum(-1),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_done_at_once(name, x):
    f = OTHERS[name]
    call = lambda f: hodiff.laplacian(f, x, create_graph=False)
    torch.manual_seed(3)
    expected = whole(lambda: call(f))
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    seen = Seen(f)
    assert torch.equal(call(seen), expected)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert seen.batches[-1] == N and len(seen.batches) > 1  # it was tried


@pytest.mark.usefixtures("small")
def test_a_point_where_value_and_gradient_vanish_hides_nothing():
    f = lambda x: ((x * DATA[: len(x), None]) ** 2).sum(-1)
    found = hodiff.laplacian(f, torch.zeros(N, 3, dtype=D), create_graph=False)
    agree(found, 6 * DATA**2)


@pytest.mark.usefixtures("small")
def test_values_that_are_not_numbers_stay_so(x):
    x[2] = float("nan")
    x[5] = float("inf")
    f = lambda x: (x**4).sum(-1)
    found = hodiff.laplacian(f, x, create_graph=False)
    expected = whole(lambda: hodiff.laplacian(f, x, create_graph=False))
    assert torch.equal(found.isnan(), expected.isnan()) and bool(found[2].isnan())
    agree(found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))


@pytest.mark.usefixtures("small")
def test_where_nothing_can_be_compared_all_is_done_at_once():
    f = lambda x: x.norm(dim=-1) * DATA[: len(x)]  # not differentiable at zero
    seen = Seen(f)
    with pytest.warns(hodiff.HodiffWarning, match="the result is not finite, although x and f"):
        found = hodiff.laplacian(seen, torch.zeros(N, 3, dtype=D), create_graph=False)
    assert bool(found.isnan().all()) and set(seen.batches) == {N}


@pytest.mark.usefixtures("small")
def test_half_precision_with_many_directions():
    x = torch.rand(N, 400).half()
    data = torch.arange(N).half()
    found = hodiff.laplacian(lambda x: (x**2).mean(-1) * data[: len(x)], x, create_graph=False)
    agree(found.double(), 2 * torch.arange(N, dtype=D), 1e-2)
    seen = Seen(lambda x: (x**3).mean(-1))
    found = hodiff.laplacian(seen, x, create_graph=False)
    agree(found.double(), 6 * x.double().mean(-1), 1e-2)
    assert min(seen.batches) < N


@pytest.mark.usefixtures("small")
def test_what_f_raises_passes_unchanged(x):
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hodiff.laplacian(f, x, create_graph=False)
    with pytest.raises(hodiff.GraphError, match="mixes the samples"):
        hodiff.laplacian(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(D), x, create_graph=False)
    with pytest.warns(hodiff.HodiffWarning, match="Taylor mode has no rule"):
        found = hodiff.laplacian(lambda x: torch.fft.fft(x**2).abs().square().sum(-1), x, create_graph=False)
    assert found.shape == (N,)


@pytest.mark.usefixtures("small")
def test_vmap_around_blocks(x):
    f = lambda x: (x**4).sum(-1)
    for size in ("auto", 2):
        found = torch.vmap(lambda z, size=size: hodiff.laplacian(f, z, chunk_size=size, create_graph=False))(
            torch.stack([x, 2 * x])
        )
        agree(found, torch.stack([hodiff.laplacian(f, x), hodiff.laplacian(f, 2 * x)]))
    scales = torch.tensor([1.0, 2.0], dtype=D)  # batched, but known to f alone
    found = torch.vmap(lambda s: hodiff.laplacian(lambda x: s * f(x), x, create_graph=False))(scales)
    agree(found, torch.stack([hodiff.laplacian(f, x), 2 * hodiff.laplacian(f, x)]))


@pytest.mark.usefixtures("small")
def test_a_graph_is_made_at_once(x):
    seen = Seen(network())
    hodiff.laplacian(seen, x).sum().backward()
    assert seen.batches == [N]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["laplacian", "diagonal weight", "value, gradient", "operator", "estimate"])
def test_chunks_of_directions_give_the_same(name, size, create_graph, x, monkeypatch):
    options = {"create_graph": create_graph}
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=D)
    calls = {
        "laplacian": functools.partial(hodiff.laplacian, **options),
        "diagonal weight": functools.partial(hodiff.laplacian, weight=weight, **options),
        "value, gradient": functools.partial(hodiff.value_grad_and_laplacian, **options),
        "operator": lambda f, x, **more: hodiff.second_order_operator(f, x, weight, x.cos(), 2.0, **options, **more),
        "estimate": lambda f, x, **more: (
            hodiff.laplacian(f, x, samples=5, generator=torch.Generator().manual_seed(0), **options, **more).value
        ),
    }
    net = network()
    seen = Seen(net)
    found, expected = calls[name](seen, x, chunk_size=size), calls[name](net, x)
    directions = 5 if name == "estimate" else 3
    assert seen.batches == [N] * -(-directions // size)
    agree(found, expected) if not create_graph else agree(_detached(found), _detached(expected))
    if create_graph and name != "value, gradient":
        gradient = lambda value: torch.autograd.grad(value.square().sum(), net[0].weight)[0]
        agree(gradient(found), gradient(expected))


def _detached(value):
    return tuple(part.detach() for part in value) if isinstance(value, tuple) else value.detach()


def test_chunks_draw_the_same_random_numbers(x):
    f = lambda x: F.dropout(x, 0.5, training=True).pow(4).sum(-1)
    results = []
    for size in ("auto", 1, 2):
        torch.manual_seed(0)
        results.append((hodiff.laplacian(f, x, chunk_size=size), torch.rand(())))
    agree(results[1], results[0])
    agree(results[2], results[0])


def test_chunks_of_a_function_that_changes_raise(x):
    generator = torch.Generator().manual_seed(0)
    noisy = lambda x: (x**4).sum(-1) * torch.rand((), generator=generator)
    with pytest.raises(hodiff.GraphError, match="a different value when it was evaluated again"):
        hodiff.laplacian(noisy, x, chunk_size=1)
    assert hodiff.laplacian(noisy, x).shape == (N,)


@pytest.mark.parametrize("size", [0, -1, 1.5, "all", True])
def test_bad_chunk_sizes(size, x):
    with pytest.raises(hodiff.InputError, match="chunk_size: got"):
        hodiff.laplacian(smooth, x, chunk_size=size)


def test_many_directions_of_few_samples_come_in_chunks(monkeypatch):
    monkeypatch.setattr(_expansions._reverse, "CHUNK_BYTES", 40 * 100 * 8)
    x = torch.randn(100, dtype=D)
    f = lambda x: (x**4).sum(-1)
    seen = []
    found = hodiff.laplacian(
        lambda x: (seen.append(x.series[1].shape[0]), f(x))[1], x, batch_ndim=0, create_graph=False
    )
    agree(found, 12 * x.square().sum())
    assert seen == [1, 40, 40, 20]
    generator = torch.Generator().manual_seed(0)  # one that cannot be chunked is done at once
    noisy = lambda x: (x**4).sum(-1) * torch.rand((), generator=generator, dtype=D)
    assert hodiff.laplacian(noisy, x, batch_ndim=0, create_graph=False).shape == ()


def test_a_wide_point_is_not_divided_for_its_own_unit_directions():
    """They are the same for all samples, and small; what f makes of them counts."""
    x, seen = torch.randn(256, 300), []
    weight = torch.randn(300, 8) / 300
    hodiff.laplacian(lambda x: (seen.append(len(x)), (x @ weight).tanh().sum(-1))[1], x, create_graph=False)
    assert _expansions.WHOLE_BYTES < 256 * 300 * 300 * 4
    assert seen == [256]
