"""What a product with the Hessian of a sharded model, and a Lanczos process, hold on each rank."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hodiff
from benchmarks.memory import peak
from benchmarks.table import Row

WIDTH, DEPTH, STEPS = 64, 12, 20
BLOCKS = 7
"""How many blocks a product may hold whole, or their cotangents and copies, at its peak."""


def rows(quick: bool) -> Iterator[Row]:
    for world in (1, 2) if quick else (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_start(folder, world, rank) for rank in range(world)]
            answers = [*map(_answer, ranks)]
        most = {key: max(answer[key] for answer in answers) for key in answers[0]}
        allowed = 3.2 / world + BLOCKS * most["block"]
        case = "rank" if world == 1 else "ranks"
        yield Row(
            "peak of a Hessian product, numbers per parameter",
            f"{world} {case}, {DEPTH} blocks of {most['block']:.3f} D",
            f"hvp {most['hvp']:.2f}, grad {most['grad']:.2f}",
            f"3.2 D / ranks + {BLOCKS} blocks: {allowed:.2f}",
            most["hvp"] <= allowed,
        )
        allowed = 1.15 * (STEPS + 4) / world
        yield Row(
            f"peak of a Lanczos process of {STEPS} steps, numbers per parameter",
            f"{world} {case}, the basis sharded",
            f"spectral_density {most['density']:.2f}, eigsh {most['eigsh']:.2f}",
            f"1.15 ({STEPS} + 4) D / ranks: {allowed:.2f}",
            max(most["density"], most["eigsh"]) <= allowed,
        )


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def measured(world: int, rank: int, folder: str) -> dict[str, float]:
    """Peaks of this rank, in numbers per parameter of the whole model, with what stands."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH))).double()
    size = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    v = {name: torch.ones_like(p.detach()) for name, p in model.named_parameters()}
    held = sum(p.to_local().numel() for p in model.parameters())

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    product = peak(lambda: hodiff.hvp(loss, model, v)) / 8 + 2 * held
    gradient = peak(lambda: hodiff.grad(loss, model)) / 8 + held
    H = hodiff.HessianOperator(loss, model)
    pairs = {"rtol": 1e-3, "basis": STEPS, "generator": torch.Generator().manual_seed(0)}
    density = peak(lambda: hodiff.spectral_density(H, samples=1, steps=STEPS)) / 8 + held
    eigenvalue = peak(lambda: hodiff.eigsh(H, 1, **pairs)) / 8 + held
    dist.destroy_process_group()
    peaks = {"hvp": product, "grad": gradient, "density": density, "eigsh": eigenvalue}
    return {name: numbers / size for name, numbers in peaks.items()} | {"block": 1 / DEPTH}


def _start(folder: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.sharded", folder, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return json.loads(out.splitlines()[-1])


def main(folder: str, world: str, rank: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps(measured(int(world), int(rank), folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
