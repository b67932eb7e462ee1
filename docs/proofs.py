"""What pages show of `docs/proofs.json`, which `python -m benchmarks.proofs` writes."""

import json
from pathlib import Path
from typing import Any

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


def source(proof: str) -> str:
    """Where the numbers are from."""
    at = stored(proof)["where"]
    return (
        f"Stored results of {at['date']} ({at['processor']}, one thread, PyTorch {at['torch']}, "
        f"load {at['load']}); `python -m benchmarks.proofs {proof}` makes them anew in "
        f"{stored(proof)['seconds']} seconds of one core."
    )
