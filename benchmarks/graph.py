"""What explaining costs: `watch` beside anomaly mode, `inspect` per node;
and the memory of `multi_grad`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import hodiff
from benchmarks.table import Row
from benchmarks.timing import race, ratios, spread
from hodiff.curvature._memory import LiveBytes

WATCH = 1.15
PER_NODE = 10e-6
EXPLAINED = 2.0


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    rounds = 5 if quick else 21
    for name, step in {
        "MLP 8 x 256, batch 128, SGD": mlp(),
        "transformer, 4 layers, Adam": transformer(),
    }.items():
        yield from watching(name, step, rounds)
    yield from inspecting(rounds)
    yield from explaining()
    yield from heads()


def mlp() -> Callable[[], None]:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return training(model, optimizer, torch.randn(128, 256))


def transformer() -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return training(model, torch.optim.Adam(model.parameters(), lr=1e-5), torch.randn(8, 64, 128))


def training(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def watching(name: str, step: Callable[[], None], rounds: int) -> Iterator[Row]:
    def under(context: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
        def several() -> None:
            with context():
                for _ in range(5):
                    step()

        return several

    times = race(
        {
            "plain": under(nullcontext),
            "watch": under(hodiff.graph.watch),
            "anomaly": under(lambda: torch.autograd.set_detect_anomaly(True)),
        },
        rounds=rounds,
        least=5e-2,
    )
    found = ratios(times, "watch", "plain")
    yield Row(
        "training under watch / plain",
        name,
        spread(found),
        f"{WATCH}",
        statistics.median(found) <= WATCH,
    )
    yield Row("training in anomaly mode / plain", name, spread(ratios(times, "anomaly", "plain")))


def chain(length: int) -> Tensor:
    x = torch.randn(8, requires_grad=True)
    value = x
    for index in range(length):
        value = value.sin() if index % 2 else value * x
    return value.sum()


def inspecting(rounds: int) -> Iterator[Row]:
    for length in (1000, 4000, 16000):
        loss = chain(length)
        for name, call in {
            "inspect": hodiff.graph.inspect,
            "predict": hodiff.graph.predict,
        }.items():
            samples = []
            for _ in range(max(3, rounds // 3)):
                gc.collect()
                gc.disable()
                # as everywhere here: what other processes take does not count
                start = time.thread_time()
                call(loss)
                samples.append((time.thread_time() - start) / (length + 2))
                gc.enable()
            median = statistics.median(samples)
            shown = f"{spread([sample * 1e6 for sample in samples], 1)} us"
            yield Row(
                f"{name}, per node",
                f"{length + 2} nodes",
                shown,
                f"{PER_NODE * 1e6:.0f} us",
                median <= PER_NODE,
            )


def explaining() -> Iterator[Row]:
    """A pass over an old graph; of many chains,
    as PyTorch cannot take down one so deep once it was looked at.
    """
    for chains, length in ((10, 1000), (20, 5000)):
        x = torch.randn(8, requires_grad=True)
        with hodiff.graph.watch():
            old = torch.stack([chain(length) for _ in range(chains)]).sum()
            old.backward()
            loss = old * 2 + x.sum()
            start = time.thread_time()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
            seconds = time.thread_time() - start
        yield Row(
            "explaining a failure",
            f"{chains * length} nodes",
            f"{seconds:.2f} s",
            "2 s",
            seconds <= EXPLAINED,
        )


def heads(k: int = 6, width: int = 512, batch: int = 4096) -> Iterator[Row]:
    trunk = nn.Sequential(*[nn.Linear(width, width) for _ in range(2)])
    each = nn.ModuleList(
        [nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]) for _ in range(k)]
    )
    model = nn.ModuleDict({"trunk": trunk, "heads": each})
    parameters = list(model.parameters())
    x = torch.randn(batch, width)

    def losses() -> list[Tensor]:
        z = model["trunk"](x).tanh()
        return [head(z).square().mean() for head in each]

    def retained() -> object:
        found = losses()
        rows = [
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            for loss in found
        ]
        return rows, found

    def ours(release: bool) -> Callable[[], object]:
        def call() -> object:
            found = losses()
            return hodiff.multi_grad(found, model, release=release), found

        return call

    def sequential() -> object:
        calls = [lambda m, z, i=i: m["heads"][i](z).square().mean() for i in range(k)]
        return hodiff.multi_grad(calls, model, shared=lambda m: m["trunk"](x).tanh())

    contenders = {
        "retain_graph=True": retained,
        "multi_grad": ours(release=False),
        "multi_grad, release=True": ours(release=True),
        "multi_grad, functions and shared=": sequential,
    }
    for name, call in contenders.items():
        gc.collect()
        with LiveBytes() as live:
            result = call()
            left = live.now
        del result
        yield Row(
            "bytes of six heads' own gradients",
            f"{name}; batch {batch}, width {width}",
            f"peak {live.peak / 2**20:.0f} MiB, left with losses and results alive "
            f"{left / 2**20:.0f}",
        )
