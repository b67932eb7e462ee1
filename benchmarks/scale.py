"""What sharing the data among processes costs."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hodiff
from benchmarks.table import Row

SIZES = {"MLP, D = 85 k": (64, 256, 128), "MLP, D = 1.3 M": (256, 1024, 256)}


def rows(quick: bool) -> Iterator[Row]:
    for name in SIZES:
        yield from shared(name, 5 if quick else 101)


def shared(name: str, rounds: int) -> Iterator[Row]:
    """A product over two processes of this machine, each with a batch, beside the local one."""
    with tempfile.TemporaryDirectory() as folder:
        two = [_start(folder, name, rounds, rank) for rank in range(2)]
        first, _ = map(_answer, two)
        yield from shared_rows(name, first)


def shared_rows(name: str, times: dict[str, list[float]]) -> Iterator[Row]:
    """The rows of such a run."""
    at = {key: statistics.median(found) for key, found in times.items()}
    small = "85 k" in name
    allowed = (
        at["local"] + 1.5 * at["flat sum"] + 0.2 * at["gradient"] if small else 1.35 * at["local"]
    )
    words = "local + 1.5 flat sums + 0.2 gradient" if small else "1.35 local"
    measured = ", ".join(f"{key} {value * 1e3:.2f} ms" for key, value in at.items())
    yield Row(
        "product over two processes",
        name,
        measured,
        f"{words}: {allowed * 1e3:.2f} ms",
        at["shared"] <= allowed,
    )


def measure_shared(name: str, rounds: int, rank: int, folder: str) -> dict[str, list[float]]:
    """Seconds by the clock, for all of this waits for the other process; in turns,
    each after a barrier.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    inputs, width, batch = SIZES[name]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 10),
    )
    data = [(torch.randn(batch, inputs), torch.randint(10, (batch,)))]

    def loss(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(
            batch[1]
        )

    leaves = list(model.parameters())
    alone = hodiff.HessianOperator(loss, model, data=data)
    together = hodiff.HessianOperator(loss, model, data=data, process_group=dist.group.WORLD)
    flat = torch.randn(sum(p.numel() for p in leaves))
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def by_hand() -> None:
        """What there is to gain: the local product and the sum, unchecked."""
        dist.all_reduce(torch.cat([part.reshape(-1) for part in (alone @ v).values()]))

    calls: dict[str, Callable[[], object]] = {
        "local": lambda: alone @ v,
        "shared": lambda: together @ v,
        "by hand": by_hand,
        "flat sum": lambda: dist.all_reduce(flat.zero_()),
        "gradient": lambda: torch.autograd.grad(loss(model, data[0])[0], leaves),
    }
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(rounds + 5):
        for key, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    dist.destroy_process_group()
    return {key: found[5:] for key, found in times.items()}


def _start(folder: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scale", folder, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return json.loads(out.splitlines()[-1])


def main(folder: str, name: str, rounds: str, rank: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps(measure_shared(name, int(rounds), int(rank), folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
