"""What pages show of `docs/ports.json`, which `python -m benchmarks.ports` writes."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("ports.json")


def stored() -> dict[str, Any]:
    """Of each port where it was measured, and its rows."""
    return json.loads(_FILE.read_text("utf-8"))


def table(port: str) -> str:
    """How far both are apart, and the milliseconds of each."""
    lines = ["| | apart | before | with hodiff |", "|---|---|---|---|"]
    for row in stored()[port]["rows"]:
        lines.append(
            f"| {row['case']} | {row['error']:.0e} | {row['before']:g} ms | {row['after']:g} ms |"
        )
    return "\n".join(lines)


def errors(port: str = "deepxde") -> str:
    """Of its optimizers, after ten seconds."""
    lines = ["| optimizer | calls of `train_step` | relative error |", "|---|---|---|"]
    for row in stored()[port]["rows"]:
        lines.append(f"| {row['case']} | {row['steps']} | {row['error']:.1e} |")
    return "\n".join(lines)


def source() -> str:
    """Where the numbers are from."""
    at = stored()["torchjd"]["where"]
    return (
        f"Stored results of {at['date']} ({at['processor']}, one thread, PyTorch {at['torch']}, "
        f"load {at['load']}); `python -m benchmarks.ports` makes them anew. "
        "Milliseconds are CPU time, medians of interleaved rounds."
    )
