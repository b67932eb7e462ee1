"""What pages show of `docs/proofs.json`, which `python -m benchmarks.proofs` writes."""

import json
import statistics
from pathlib import Path
from typing import Any

from docs import trainings
from docs.figures import subplots, svg

_FILE = Path(__file__).with_name("proofs.json")
_COLORS = ("#5c6bc0", "#ef6c00", "#66a966")


def stored(proof: str) -> dict[str, Any]:
    """Where it was measured, in how many seconds, and its runs."""
    return json.loads(_FILE.read_text("utf-8"))[proof]


def edge(width: float = 6.0) -> str:
    """Sharpness over the steps, a line for each step size, and 2 / η."""
    figure, axes = subplots(figsize=(width, 0.5 * width))
    for color, (eta, points) in zip(
        _COLORS, stored("edge")["runs"].items(), strict=True
    ):
        steps, _, sharpness, _ = zip(*points, strict=True)
        axes.plot(steps, sharpness, color=color, label=f"η = {eta}")
        axes.axhline(2 / float(eta), color=color, linestyle=":", linewidth=1)
    axes.set(
        xlabel="step of gradient descent", ylabel="largest eigenvalue", ylim=(0, None)
    )
    axes.legend()
    return svg(
        figure, says="The largest eigenvalue of the Hessian settles at 2 / η (dotted)"
    )


def settled(after: int = 1500) -> str:
    """How far from 2 / η, and by how many products: a table."""
    lines = [
        "| η | 2 / η | sharpness from step 1,500 on | products a point |",
        "|---|---|---|---|",
    ]
    for eta, points in stored("edge")["runs"].items():
        found = [sharpness for step, _, sharpness, _ in points if step > after]
        most = max(products for *_, products in points)
        lines.append(
            f"| {eta} | {2 / float(eta):g} | {min(found):.2f} to {max(found):.2f} | at most {most} |"
        )
    return "\n".join(lines)


def energies() -> str:
    """Errors of a quantum state's energy by each method, of several seeds: a table."""
    lines = [
        "| 600 steps | error of the energy, by seed | seconds of one core |",
        "|---|---|---|",
    ]
    for name, runs in stored("quantum")["runs"].items():
        errors = ", ".join(f"{run['errors'][-1]:.1e}" for run in runs)
        seconds = [run["seconds"] for run in runs]
        lines.append(
            f"| {name} | {errors} | {min(seconds):.1f} to {max(seconds):.1f} |"
        )
    return "\n".join(lines)


def dimensions() -> str:
    """Time of a step through a sampled Laplacian, in plain gradients, over the dimension."""
    runs = stored("million")["runs"]
    figure, axes = subplots(figsize=(4.6, 2.3))
    at = [int(dimension) for dimension in runs]
    ratios = [run["step"] / run["plain"] for run in runs.values()]
    axes.semilogx(at, ratios, "o-", color=_COLORS[0])
    axes.set(
        xlabel="dimension", ylabel="time of a step,\nin plain gradients", ylim=(0, None)
    )
    return svg(figure, says="A step costs a few gradients, less in higher dimensions")


def of_dimensions() -> str:
    """The same in seconds, and how far the estimates are off: a table."""
    lines = [
        "| dimension | a plain gradient | a step | their ratio "
        "| relative error | within two standard errors |",
        "|---|---|---|---|---|---|",
    ]
    for dimension, run in stored("million")["runs"].items():
        ratio = run["step"] / run["plain"]
        lines.append(
            f"| {int(dimension):,} | {1e3 * run['plain']:.3g} ms | {1e3 * run['step']:.3g} ms "
            f"| {ratio:.1f} | {run['relative error']:.0%} | {run['in two errors']:.0%} |"
        )
    return "\n".join(lines)


def left_out() -> str:
    """Agreement of predicted and found losses over the share that is left out."""
    runs = stored("metagradients")["runs"]["agreement"]
    figure, axes = subplots(figsize=(4.6, 2.5))
    shares = [100 * float(share) for share in runs]
    for color, (name, means) in zip(_COLORS, _of_ways().items(), strict=True):
        axes.plot(shares, means, "o-", color=color, label=name)
    axes.set(xlabel="% of the images left out", ylabel="rank correlation", ylim=(0, 1))
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.minorticks_off()
    axes.legend()
    return svg(
        figure, says="Metagradients predict losses better than influence functions"
    )


def _of_ways() -> dict[str, list[float]]:
    """Means over images for each share; of influence functions those of the best damping."""
    runs = stored("metagradients")["runs"]["agreement"]
    means = {
        way: [statistics.mean(each[way]) for each in runs.values()]
        for way in next(iter(runs.values()))
    }
    best = max(
        (way for way in means if way.startswith("influence")),
        key=lambda way: sum(means[way]),
    )
    return {way: means[way] for way in ("metagradients", best, "gradients")}


def of_trainings() -> str:
    """The same as a table, and what a metagradient costs."""
    of = stored("metagradients")["runs"]
    shares, seconds = list(of["agreement"]), of["seconds"]
    lines = [
        "| rank correlation, mean of ten images | "
        + " | ".join(f"without {float(share):.0%}" for share in shares)
        + " |",
        "|---" * (len(shares) + 1) + "|",
    ]
    for way, means in _of_ways().items():
        lines.append(f"| {way} | " + " | ".join(f"{each:.2f}" for each in means) + " |")
    whole, parts = (
        seconds[name] / seconds["training"]
        for name in ("metagradient", "metagradient, segments")
    )
    return (
        "\n".join(lines)
        + f"\n\nA metagradient takes the time of {whole:.1f} trainings, "
        + f"{parts:.1f} in segments."
    )


def headlines() -> str:
    """The best that is stored of each proof: a table of the home page."""
    quantum, million = stored("quantum")["runs"]["SPRING"], stored("million")["runs"]
    error = statistics.median(run["errors"][-1] for run in quantum)
    seconds = statistics.median(run["seconds"] for run in quantum)
    largest = million["1000000"]
    of = stored("metagradients")["runs"]["seconds"]
    found = _of_ways()["metagradients"][0]
    ours, adam = (
        trainings.errors("DeepXDE, Helmholtz", method, 30)[0]
        for method in ("Levenberg-Marquardt", "Adam")
    )
    rows = {
        "[A neural quantum state](recipes/quantum-state/)": f"its energy to {error:.0e} "
        f"in {seconds:.1f} seconds",
        "[A Laplacian in a million dimensions](recipes/poisson-5d/#million)": "a training step "
        f"in {largest['step'] / largest['plain']:.1f} gradients",
        "[Metagradients of a whole training](recipes/metagradients/)": "which images matter, "
        f"rank correlation {found:.2f}, in {of['metagradient'] / of['training']:.1f} trainings",
        "[Hessians of sharded models](recipes/sharded-models/)": "exact; no process holds all",
        "[DeepXDE's Helmholtz](ports/)": f"to {ours:.0e} in 30 seconds; Adam to {adam:.0e}",
    }
    lines = [f"| {name} | {what} |" for name, what in rows.items()]
    return "\n".join(["| proof | measured |", "|---|---|", *lines])


def source(proof: str) -> str:
    """Where the numbers are from."""
    at = stored(proof)["where"]
    return (
        f"Stored results of {at['date']} ({at['processor']}, one thread, PyTorch {at['torch']}, "
        f"load {at['load']}); `python -m benchmarks.proofs {proof}` makes them anew in "
        f"{stored(proof)['seconds']} seconds of one core."
    )
