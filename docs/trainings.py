"""What recipes show of `docs/training.json`, which `python -m benchmarks.training` writes."""

import json
import statistics
from itertools import cycle
from pathlib import Path
from typing import Any

from docs.figures import subplots, svg

_FILE = Path(__file__).with_name("training.json")
_COLORS = {
    "Levenberg-Marquardt": "#5c6bc0",
    "L-BFGS": "#e57373",
    "Adam": "#66a966",
    "SciPy": "#c99a2e",
}
_MORE = ("#9c6bc0", "#5aa0b8", "#8d6e63", "#f06292")


def stored(problem: str) -> dict[str, Any]:
    """Where a problem was measured, for how many seconds, and its runs."""
    return json.loads(_FILE.read_text("utf-8"))[problem]


def runs(problem: str) -> dict[str, list[list[list[float]]]]:
    """The curves of each method: points of a step, its seconds, and its errors."""
    curves: dict[str, list[list[list[float]]]] = {}
    for run in stored(problem)["runs"]:
        curves.setdefault(run["method"], []).append(run["curve"])
    return curves


def draw(
    axes: Any,
    problem: str,
    *,
    error: int = 0,
    over: str = "seconds",
    leave_out: tuple[str, ...] = (),
) -> None:
    """A line for each run, in the color of its method."""
    x, more = {"step": 0, "seconds": 1}[over], cycle(_MORE)
    for method, curves in runs(problem).items():
        color = _COLORS.get(method) or next(more)
        for number, curve in enumerate([] if method in leave_out else curves):
            label = method if number == 0 else None
            at, errors = (
                [point[x] for point in curve],
                [point[2 + error] for point in curve],
            )
            axes.semilogy(
                at, errors, color=color, linewidth=1.1, alpha=0.8, label=label
            )
    axes.set_xlabel({"step": "step", "seconds": "seconds of one core"}[over])


def chart(
    problem: str, *, says: str, title: str = "relative error", log: bool = False
) -> str:
    """A problem alone."""
    figure, axes = subplots(figsize=(5.6, 2.7))
    draw(axes, problem)
    if log:
        axes.set_xscale("log")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside right center")
    return svg(figure, says=says)


def errors(problem: str, method: str, seconds: float, error: int = 0) -> list[float]:
    """What the runs of a method had reached by then."""
    return [
        [point for point in curve if point[1] <= 1.03 * seconds][-1][2 + error]
        for curve in runs(problem)[method]
    ]


def table(problem: str, at: tuple[float, ...], *, error: int = 0) -> str:
    """The median and the worst of each method's runs, by then."""
    head = " | ".join(f"{seconds:g} s" for seconds in at)
    lines = [
        f"| median (worst) of the runs | runs | {head} |",
        "|---" * (len(at) + 2) + "|",
    ]
    for method, curves in runs(problem).items():
        cells = [f"| {method} | {len(curves)} |"]
        for seconds in at:
            reached = errors(problem, method, seconds, error)
            worst = f" ({max(reached):.1e})" if len(reached) > 1 else ""
            cells.append(f" {statistics.median(reached):.1e}{worst} |")
        lines.append("".join(cells))
    return "\n".join(lines)


def source(problem: str) -> str:
    """Where the numbers are from, and the settings of those beside which ours stand."""
    of = stored(problem)
    rates = [run["options"]["lr"] for run in of["runs"] if run["method"] == "Adam"]
    text = (
        f"Stored results of {of['where']['date']}, on one core of a shared machine "
        f"({of['where']['processor']}, "
        f'PyTorch {of["where"]["torch"]}); `python -m benchmarks.training "{problem}"` makes them '
        "anew. "
        "The clock is the CPU time of the process."
    )
    if rates:
        text += (
            " L-BFGS: strong Wolfe line searches, a history of 100, 10 iterations a step, "
            "no tolerances. "
            f"Adam: the best of three rates, {rates[0]:g}, lowered to 0 by a cosine over the time."
        )
    return text
