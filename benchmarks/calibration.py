"""Standard errors against true errors, and estimates against dense truth, over a zoo of spectra."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hodiff
from benchmarks.table import Row

SIZE, VECTORS, STEPS = 120, 20, 20
DENSITY_VECTORS = 6
SHIFT = 0.5
D = torch.float64
Estimate = Callable[[hodiff.MatrixOperator, torch.Generator], Any]


def zoo() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=D, generator=draws))
    half = SIZE // 2
    with_values = lambda values: (Q * values) @ Q.T  # noqa: E731
    above = torch.triu(torch.randn(SIZE, SIZE, dtype=D, generator=draws), 1)
    return {
        "spread, indefinite": with_values(torch.linspace(-5, 10, SIZE, dtype=D)),
        "two clusters": with_values(
            torch.cat([torch.full((half,), 1.0), torch.full((half,), 5.0)]).to(D)
        ),
        "one eigenvalue": with_values(torch.full((SIZE,), 3.0, dtype=D)),
        "half of it zero": with_values(
            torch.cat([torch.zeros(half), torch.linspace(1, 4, half)]).to(D)
        ),
        "decaying, 0.8^i": with_values(0.8 ** torch.arange(SIZE, dtype=D)),
        "spiked, 1 and five of 20 to 100": with_values(
            torch.cat([torch.ones(SIZE - 5, dtype=D), torch.linspace(20, 100, 5, dtype=D)])
        ),
        "not normal": torch.diag(torch.linspace(1, 3, SIZE, dtype=D)) + 0.1 * above,
    }


def seen(t: Tensor) -> Tensor:
    """A smooth function of eigenvalues, whose mean the density is asked for."""
    return torch.atan(t - 1)


ESTIMATES: dict[str, Estimate] = {
    "Hutchinson": lambda A, g: hodiff.trace(A, samples=VECTORS, generator=g),
    "Hutch++": lambda A, g: hodiff.trace(A, samples=VECTORS, generator=g, method="hutch++"),
    "diagonal": lambda A, g: hodiff.diagonal(A, samples=VECTORS, generator=g),
    "density's mean": lambda A, g: hodiff.spectral_density(A, vectors=signs(g), steps=STEPS).mean(
        seen
    ),
    "log-determinant": lambda A, g: hodiff.logdet(A, vectors=signs(g), steps=STEPS),
    "log-determinant, shifted": lambda A, g: hodiff.logdet(
        A, vectors=signs(g), steps=STEPS, shift=SHIFT
    ),
}


def signs(generator: torch.Generator) -> Tensor:
    return torch.randn(SIZE, DENSITY_VECTORS, dtype=D, generator=generator).sign()


def truth(name: str, A: Tensor) -> Tensor | None:
    """What is estimated; None where the estimate is not for this matrix."""
    if name == "diagonal":
        return A.diagonal()
    if name in ("Hutchinson", "Hutch++"):
        return A.trace()
    if not torch.allclose(A, A.T):
        return None
    values = torch.linalg.eigvalsh(A)
    least = float(values.min())
    if name == "density's mean":
        return seen(values).mean()
    shift = SHIFT if name.endswith("shifted") else 0.0
    # An eigenvalue of 1e-12 beside 1 has no logarithm that products could tell.
    return (values + shift).log().sum() if least + shift > 1e-8 else None


def calibrated(A: Tensor, name: str, seeds: int) -> str:
    """The standard error over the true error, both as root mean squares;
    and how often two of it are enough.
    """
    expected = truth(name, A)
    if expected is None:
        return ""
    operator = hodiff.MatrixOperator((A + A.T) / 2 if torch.allclose(A, A.T) else A)
    errors, bars = [], []
    for seed in range(seeds):
        found = ESTIMATES[name](operator, torch.Generator().manual_seed(seed))
        value, bar = found if isinstance(found, tuple) else (found.value, found.stderr)
        errors.append(value - expected)
        bars.append(bar)
    error, bar = torch.stack(errors), torch.stack(bars)
    scale = float(expected.norm()) / math.sqrt(expected.numel())
    true, said = (float(values.square().mean().sqrt()) for values in (error, bar))
    if true <= 1e-9 * scale and said <= 1e-7 * scale:
        return "exact"
    inside = float((error.abs() <= 2 * bar).double().mean())
    return f"{said / true:.2f}, {inside:.2f}"


def rows(quick: bool) -> Iterator[Row]:
    seeds = 20 if quick else 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.ConvergenceWarning)
        for case, A in zoo().items():
            for name in ESTIMATES:
                measured = calibrated(A, name, seeds)
                if measured:
                    yield Row(f"{name}: standard / true error, within two", case, measured)
    for case, A in zoo().items():
        yield from against_dense(case, A)


def against_dense(case: str, A: Tensor) -> Iterator[Row]:
    """The largest relative error of five eigenvalues, and of a solution."""
    operator, b = hodiff.MatrixOperator(A), torch.ones(SIZE, dtype=D)
    values = torch.linalg.eigvals(A)
    if torch.allclose(A, A.T):
        draws = torch.Generator().manual_seed(0)
        found = hodiff.eigsh(hodiff.MatrixOperator((A + A.T) / 2), 5, generator=draws)
        off = float((found.value - values.real.sort(descending=True).values[:5]).abs().max())
        scale = float(values.abs().max())
        yield Row("eigsh, five largest", case, f"{off / scale:.0e}; {found.products} products")
    if float(values.abs().min()) > 1e-6:
        found = hodiff.solve(operator, b, method="gmres", rtol=1e-8)
        x = torch.linalg.solve(A, b)
        off = float((found.value - x).norm() / x.norm())
        yield Row("solve by GMRES", case, f"{off:.0e}; {found.products} products")
