"""`python -m benchmarks gpu`: hodiff on a GPU in two minutes, as one table to send.

The tests of `tests/gpu` run first, in a process of their own. Then derivatives by hodiff stand
beside the same ones by hand: time, peak memory, and each one's error against double precision.
"""

import copy
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from benchmarks.models import Transformer

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
SECONDS = 90
"""For the tests, of the two minutes."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Derivative = Callable[[], Tensor]


class Case(NamedTuple):
    """One derivative in one precision, by hodiff and by hand."""

    name: str
    ours: Derivative
    by_hand: Derivative


class Measured(NamedTuple):
    result: Tensor
    milliseconds: float
    mebibytes: float


def main() -> int:
    if not torch.cuda.is_available():
        print("python -m benchmarks gpu: PyTorch sees no GPU on this machine.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    driver = f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}".replace(", ROCm None", "")
    versions = f"hodiff {hodiff.__version__}, torch {torch.__version__}, {driver}"
    print(f"{torch.cuda.get_device_name(device)}, {versions}\n")
    passed, said = tests()
    print(f"tests/gpu: {said}\n")
    print("| derivative | dtype | ms, by hand | MiB, by hand | error, by hand |")
    print("|---|---|---|---|---|")
    for line in lines(device):
        print(line, flush=True)
    return 0 if passed else 1


def tests() -> tuple[bool, str]:
    """Whether the tests of a GPU pass, and pytest's last line."""
    with subprocess.Popen(
        COMMAND, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        watch = threading.Timer(SECONDS, ran.kill)
        watch.start()
        said = ran.communicate()[0]
        watch.cancel()
    if ran.returncode < 0:
        return False, f"not done after {SECONDS} s"
    failed = re.findall(r"^FAILED .*", said, re.MULTILINE)
    return ran.returncode == 0, "\n".join([said.strip("= \n").splitlines()[-1], *failed])


def lines(device: torch.device, width: int = 256) -> Iterator[str]:
    """A line for each derivative and precision."""
    for make in (product, penalty, laplacian):
        exact = make(device, torch.float64, width).by_hand()
        for dtype in DTYPES:
            case = make(device, dtype, width)
            ours, theirs = measured(case.ours, device), measured(case.by_hand, device)
            errors = (error(each.result, exact) for each in (ours, theirs))
            yield (
                f"| {case.name} | {str(dtype).removeprefix('torch.')} "
                f"| {ours.milliseconds:.2f}, {theirs.milliseconds:.2f} "
                f"| {ours.mebibytes:.0f}, {theirs.mebibytes:.0f} "
                f"| {', '.join(f'{each:.0e}' for each in errors)} |"
            )


def measured(call: Derivative, device: torch.device, rounds: int = 7) -> Measured:
    """The median time of some calls, and the peak of one beyond what was there."""
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    result, before = call(), torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return Measured(result, statistics.median(times) * 1e3, peak / 2**20)


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def flat(tensors: object) -> Tensor:
    """The tensors of a dict or a tuple as one vector."""
    values = tensors.values() if isinstance(tensors, dict) else tensors
    return torch.cat([each.flatten() for each in values])  # type: ignore[attr-defined]


def cast(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(module).to(device, dtype)


def product(device: torch.device, dtype: torch.dtype, width: int) -> Case:
    """A Hessian-vector product of a small transformer; by hand without fused attention."""
    torch.manual_seed(0)
    model = cast(Transformer(width, tokens=128), device, dtype)
    x = torch.randn(16, 128, width, dtype=torch.float64).to(device, dtype)
    y = torch.randint(10, (16,)).to(device)
    v = [torch.randn(p.shape, dtype=torch.float64).to(device, dtype) for p in model.parameters()]

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y)

    def by_hand() -> Tensor:
        parameters = [*model.parameters()]
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(loss(model), parameters, create_graph=True)
        return flat(torch.autograd.grad(gradients, parameters, v))

    return Case("hvp, transformer", lambda: flat(hodiff.hvp(loss, model, v)), by_hand)


def penalty(device: torch.device, dtype: torch.dtype, width: int) -> Case:
    """The gradient of a convolutional critic's WGAN penalty; by hand with points of its own."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 4, 2, 1), nn.SiLU(), nn.Conv2d(64, width, 4, 2, 1), nn.SiLU()
    critic = cast(nn.Sequential(*layers, nn.Conv2d(width, 1, 8), nn.Flatten(0)), device, dtype)
    points = torch.randn(32, 3, 32, 32, dtype=torch.float64).to(device, dtype)

    def ours() -> Tensor:
        value = hodiff.gradient_penalty(critic, points, target=1.0, weight=10.0)
        return flat(torch.autograd.grad(value, [*critic.parameters()], allow_unused=True)[:-1])

    def by_hand() -> Tensor:
        x = points.clone().requires_grad_()
        (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        value = 10 * (g.flatten(1).norm(dim=1) - 1).square().mean()
        return flat(torch.autograd.grad(value, [*critic.parameters()], allow_unused=True)[:-1])

    return Case("gradient of a penalty", ours, by_hand)


def laplacian(device: torch.device, dtype: torch.dtype, width: int) -> Case:
    """The Laplacian of a network in ten coordinates; by hand one second derivative for each."""
    torch.manual_seed(0)
    layers = nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    net = cast(nn.Sequential(*layers, nn.Linear(width, 1)), device, dtype)
    points = torch.randn(2048, 10, dtype=torch.float64).to(device, dtype)

    def ours() -> Tensor:
        return hodiff.laplacian(net, points, create_graph=False)

    def by_hand() -> Tensor:
        x = points.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        seconds = (
            torch.autograd.grad(g[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(10)
        )
        return sum(seconds, torch.zeros_like(x[:, 0]))[:, None]

    return Case("laplacian, 10 coordinates", ours, by_hand)
