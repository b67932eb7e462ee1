"""Compiled steps against the same loss in eager mode, derivatives by hand; and what a call costs beside its graph."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import hodiff
from benchmarks.table import Row
from benchmarks.timing import race, ratios, spread

OVERHEAD = 100e-6
FOR_EACH = 1e-6


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    rounds = 15 if quick else 60
    yield from replayed(rounds)
    if not quick:
        yield from compiled(rounds)
    yield from overhead(rounds)


def perceptron(width: int, inputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 1),
    )  # fmt: skip


def residual(net: nn.Module, x: Tensor) -> Tensor:
    """Of Poisson's equation, by nested reverse mode."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    u_xx = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0][:, 0]
    u_yy = torch.autograd.grad(slope[:, 1].sum(), x, create_graph=True)[0][:, 1]
    return (u_xx + u_yy - 1).square().mean()


def laplace(net: nn.Module, x: Tensor) -> Tensor:
    return (hodiff.laplacian(net, x) - 1).square().mean()


def forces(net: nn.Module, x: Tensor) -> Tensor:
    """A pair potential: a network of the distances between atoms."""
    x = x.detach().requires_grad_()
    apart = (x.unsqueeze(0) - x.unsqueeze(1) + torch.eye(len(x)).unsqueeze(-1)).square().sum(-1).sqrt()
    energy = net(torch.exp(-apart.unsqueeze(-1) * torch.tensor([0.5, 2.0]))).sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return slope.square().mean() + energy.square()


def cases() -> Iterator[tuple[str, Callable[..., Tensor], nn.Module, Tensor, float]]:
    """Name, loss, network, data, and the bar by replay."""
    yield "PINN 2-64-64-64-1, 20 points", residual, perceptron(64, 2), torch.rand(20, 2), 0.7
    yield "PINN 2-64-64-64-1, 512 points", residual, perceptron(64, 2), torch.rand(512, 2), 0.9
    yield "forces of 24 atoms", forces, perceptron(32, 2), 3 * torch.rand(24, 3), 1.0


def trained(loss: Callable[..., Tensor], net: nn.Module) -> Callable[[Tensor], None]:
    def step(x: Tensor) -> None:
        net.zero_grad()
        loss(x).backward()

    return step


def compared(backend: str, rounds: int, bars: dict[str, float]) -> Iterator[Row]:
    for case, loss, net, x, bar in cases():
        step = hodiff.compile_step(loss, net, backend=backend, fallback="raise")
        ours = trained(step, net)
        ours(x)
        by_hand = trained(lambda x, loss=loss, net=net: loss(net, x), net)
        times = race({"step": lambda: ours(x), "by hand": lambda: by_hand(x)}, rounds=rounds)  # noqa: B023
        measured = ratios(times, "step", "by hand")
        bar = bars.get(case, bar)
        text = f"{spread(measured)}; {step.report.operations} operations, {step.report.seconds:.1f} s to compile"
        yield Row(f"step by {backend} / by hand", case, text, f"{bar}", statistics.median(measured) <= bar, times)


def replayed(rounds: int) -> Iterator[Row]:
    yield from compared("replay", rounds, {})


def compiled(rounds: int) -> Iterator[Row]:
    bars = {"PINN 2-64-64-64-1, 512 points": 0.55, "forces of 24 atoms": 0.3}
    yield from compared("inductor", rounds, bars)


def overhead(rounds: int) -> Iterator[Row]:
    """A step of next to no operations, called and handed over."""
    for count in (4, 60):
        weights = [torch.ones(2, requires_grad=True) for _ in range(count)]
        step = hodiff.compile_step(lambda ws, x: torch.stack(ws).sum() * x, weights, backend="replay", fallback="raise")
        x = torch.ones(())
        step(x).backward()
        times = race({"call": lambda: step(x)}, rounds=rounds)  # noqa: B023
        least = min(times["call"])
        bar = OVERHEAD + FOR_EACH * count
        text = f"{least * 1e6:.0f} µs, {least * 1e6 / count:.1f} for each"
        yield Row("a call beside its graph", f"{count} parameters", text, f"{bar * 1e6:.0f} µs", least <= bar, times)
