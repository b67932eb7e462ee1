"""Gradient penalties against the best that one writes by hand,
and against the loop with `retain_graph=True`.
"""

import gc
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import hodiff
from benchmarks.table import Row
from benchmarks.timing import best, race, ratios, spread
from hodiff.curvature._memory import LiveBytes

RATIO = 1.05
AGAINST_RETAINED = 0.6

BY_HAND = ["by hand, sum", "by hand, ones_like"]


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    rounds = 5 if quick else 15
    for batch, size in ((16, 32), (16, 64), (64, 28)):
        critic, real, fake = (
            conv(),
            torch.randn(batch, 3, size, size),
            torch.randn(batch, 3, size, size),
        )
        case = f"conv critic, {batch} x 3 x {size} x {size}"
        for name, contenders in {
            "WGAN-GP penalty + backward": wgan_gp(critic, real, fake),
            "R1 penalty + backward": r1(critic, real),
        }.items():
            times = race(contenders, rounds=rounds)
            fastest = best(times, BY_HAND)
            found = ratios(times, "hodiff", fastest)
            ours, theirs = (statistics.median(times[key]) * 1e3 for key in ("hodiff", fastest))
            measured = f"{spread(found)}; {ours:.1f} ms, by hand {theirs:.1f}"
            yield Row(
                f"{name} / best by hand",
                case,
                measured,
                f"{RATIO}",
                statistics.median(found) <= RATIO,
                times,
            )
    yield from memory()


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 1),
    )


def between(real: Tensor, fake: Tensor) -> Tensor:
    alpha = torch.rand(len(real), 1, 1, 1)
    return (real + alpha * (fake - real)).requires_grad_()


def by_hand(critic: nn.Module, x: Tensor) -> Tensor:
    """Each sample's gradient, as one writes it who knows: no `retain_graph`,
    all dimensions but the first.
    """
    return torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0].flatten(1)


def by_hand_ones_like(critic: nn.Module, x: Tensor) -> Tensor:
    outputs = critic(x)
    return torch.autograd.grad(outputs, x, torch.ones_like(outputs), create_graph=True)[0].flatten(
        1
    )


def step(critic: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        critic.zero_grad()
        loss().backward()

    return run


def wgan_gp(critic: nn.Module, real: Tensor, fake: Tensor) -> dict[str, Callable[[], object]]:
    def hand(gradient: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: 10 * (gradient(critic, between(real, fake)).norm(dim=1) - 1).square().mean()

    return {
        "hodiff": step(critic, lambda: hodiff.wgan_gp_penalty(critic, real, fake)),
        BY_HAND[0]: step(critic, hand(by_hand)),
        BY_HAND[1]: step(critic, hand(by_hand_ones_like)),
    }


def r1(critic: nn.Module, real: Tensor) -> dict[str, Callable[[], object]]:
    def hand(gradient: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: 5 * gradient(critic, real.detach().requires_grad_()).square().sum(1).mean()

    return {
        "hodiff": step(critic, lambda: hodiff.r1_penalty(critic, real)),
        BY_HAND[0]: step(critic, hand(by_hand)),
        BY_HAND[1]: step(critic, hand(by_hand_ones_like)),
    }


def memory() -> Iterator[Row]:
    """Peak bytes of tensors in two training steps: what the critic's loss and penalty, and Adam,
    keep alive.
    """
    case = "two steps, conv critic, 16 x 3 x 64 x 64"
    peaks = {name: peak(penalty, popular=name == "popular") for name, penalty in PENALTIES.items()}
    ours, hand, popular = (peaks[name] / 2**20 for name in PENALTIES)
    measured = f"{ours:.2f} MiB, by hand {hand:.2f}"
    yield Row("peak memory of training / by hand", case, measured, "1", ours <= hand)
    measured = f"{ours / popular:.2f}; {popular:.2f} MiB"
    yield Row(
        "peak memory / the loop with retain_graph=True",
        case,
        measured,
        f"{AGAINST_RETAINED}",
        ours <= 0.6 * popular,
    )


PENALTIES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "hodiff": hodiff.wgan_gp_penalty,
    "by hand": lambda D, real, fake: (
        10 * (by_hand(D, between(real, fake)).norm(dim=1) - 1).square().mean()
    ),
    "popular": lambda D, real, fake: (
        10 * (retained(D, between(real, fake)).norm(dim=1) - 1).square().mean()
    ),
}


def retained(critic: nn.Module, x: Tensor) -> Tensor:
    outputs = critic(x)
    return torch.autograd.grad(
        outputs, x, torch.ones_like(outputs), create_graph=True, retain_graph=True, only_inputs=True
    )[0].flatten(1)


def peak(penalty: Callable[[nn.Module, Tensor, Tensor], Tensor], *, popular: bool) -> int:
    """Two steps of a critic.

    The popular loop keeps its graph (`backward(retain_graph=True)`) and does not detach.
    """
    torch.manual_seed(0)
    critic, generator = (
        conv(),
        nn.Sequential(nn.ConvTranspose2d(8, 16, 8, 8), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)),
    )
    optimizer = torch.optim.Adam(critic.parameters())
    reals, noise = torch.randn(2, 16, 3, 64, 64), torch.randn(2, 16, 8, 8, 8)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            for real, z in zip(reals, noise, strict=True):
                fake = generator(z).detach()
                loss = critic(fake).mean() - critic(real).mean() + penalty(critic, real, fake)
                optimizer.zero_grad()
                loss.backward(retain_graph=popular)
                optimizer.step()
        return live.peak
    finally:
        gc.enable()
