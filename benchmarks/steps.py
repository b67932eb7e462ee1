"""Compiled steps against the same loss in eager mode, derivatives by hand;
and what a call costs beside its graph.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import hodiff
from benchmarks.table import Row
from benchmarks.timing import quick_ratio, race, ratios, spread
from hodiff.steps import CompiledStep
from hodiff.steps._graph import StepGraph

OVERHEAD = 100e-6
FOR_EACH = 1e-6


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    rounds = 15 if quick else 60
    yield from compared("replay", rounds)
    if not quick:
        yield from compared("inductor", rounds)
    yield from overhead(rounds)


def perceptron(width: int, inputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1),
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
    apart = (
        (x.unsqueeze(0) - x.unsqueeze(1) + torch.eye(len(x)).unsqueeze(-1)).square().sum(-1).sqrt()
    )
    energy = net(torch.exp(-apart.unsqueeze(-1) * torch.tensor([0.5, 2.0]))).sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return slope.square().mean() + energy.square()


def penalized(critic: nn.Module, x: Tensor) -> Tensor:
    return hodiff.gradient_penalty(critic, x, target=1.0)


def wgan(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The critic's loss of WGAN-GP, by hand."""
    between = torch.lerp(real, fake, 0.5).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (
        critic(fake).mean()
        - critic(real).mean()
        + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
    )


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 3, 2, 1),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 16, 1),
    )  # fmt: skip


class Case(NamedTuple):
    """A step, what it is compared with, and the most that it may take of that by each backend."""

    name: str
    loss: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    net: nn.Module
    data: tuple[Tensor, ...]
    replay: float
    inductor: float


def cases() -> Iterator[Case]:
    """By hand first, then what is hodiff's own in eager mode, too.

    Where no bar is set, eager is it.
    """
    for points, most, least in ((20, 0.7, 1.0), (512, 0.9, 0.55)):
        name = f"PINN 2-64-64-64-1, {points} points, by hand"
        yield Case(
            name, residual, residual, perceptron(64, 2), (torch.rand(points, 2),), most, least
        )
    name = "the same by hodiff.laplacian, 512 points, by hand"
    yield Case(name, laplace, residual, perceptron(64, 2), (torch.rand(512, 2),), 1.0, 0.35)
    images = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16)
    yield Case("WGAN-GP of 8 images, by hand", wgan, wgan, convolutions(), images, 1.0, 0.75)
    for atoms in (24, 48):
        name = f"forces of {atoms} atoms, by hand"
        yield Case(name, forces, forces, perceptron(32, 2), (3 * torch.rand(atoms, 3),), 1.0, 0.3)
    for name, loss, bar in (("Laplacian", laplace, 0.12), ("gradient penalty", penalized, 0.2)):
        name = f"{name} of 20 points, hodiff eager"
        yield Case(name, loss, loss, perceptron(64, 2), (torch.rand(20, 2),), 0.6, bar)


def trained(loss: Callable[..., Tensor], net: nn.Module) -> Callable[..., None]:
    def step(*data: Tensor) -> None:
        net.zero_grad()
        loss(*data).backward()

    return step


def compared(backend: str, rounds: int) -> Iterator[Row]:
    for case in cases():
        step = hodiff.compile_step(case.loss, case.net, backend=backend, fallback="raise")
        ours, theirs = trained(step, case.net), trained(partial(case.eager, case.net), case.net)
        ours(*case.data)
        contenders = {"step": partial(ours, *case.data), "eager": partial(theirs, *case.data)}
        times = race(contenders, rounds=rounds)
        ratio, bar = quick_ratio(times, "step", "eager"), getattr(case, backend)
        text = f"{ratio:.2f}, median and range {spread(ratios(times, 'step', 'eager'))}; "
        text += f"eager {min(times['eager']) * 1e3:.1f} ms; "
        text += f"{step.report.operations} operations, {step.report.seconds:.1f} s to compile"
        yield Row(f"step by {backend} / eager", case.name, text, f"{bar}", ratio <= bar, times)


def overhead(rounds: int) -> Iterator[Row]:
    """What a call takes beside its graph, the hand-over included."""
    for count in (4, 60):
        weights = [torch.ones(2, requires_grad=True) for _ in range(count)]
        seen: list[tuple[StepGraph, tuple[Any, ...]]] = []
        noted = noting(seen)  # a step keeps it weakly
        with mock.patch.object(CompiledStep, "_replay", noted):
            step = hodiff.compile_step(total, weights, backend="replay", fallback="raise")
            x = torch.ones(())
            step(x).backward()
        graph, inputs = seen[0]
        times = race({"call": lambda: step(x), "graph": lambda: graph.run(*inputs)}, rounds=rounds)  # noqa: B023
        least = min(times["call"]) - min(times["graph"])
        bar = OVERHEAD + FOR_EACH * count
        text = f"{least * 1e6:.0f} µs; the graph itself {min(times['graph']) * 1e6:.0f}"
        yield Row(
            "a call beside its graph",
            f"{count} parameters",
            text,
            f"{bar * 1e6:.0f} µs",
            least <= bar,
            times,
        )


def total(weights: list[Tensor], x: Tensor) -> Tensor:
    return torch.stack(weights).sum() * x


def noting(seen: list[tuple[StepGraph, tuple[Any, ...]]]) -> Callable[..., Any]:
    """What a step runs its graphs by, which notes them and their inputs."""
    replay = CompiledStep._replay

    def noted(self: CompiledStep, graph: StepGraph, inputs: tuple[Any, ...]) -> Any:
        seen[:] = [(graph, inputs)]
        return replay(self, graph, inputs)

    return noted
