"""What `docs/benchmarks.md` shows of `docs/benchmarks.json`, which `python -m benchmarks --json` writes."""

import json
import re
from pathlib import Path
from typing import Any

from docs.figures import INK, subplots, svg
from matplotlib.ticker import LogLocator, NullFormatter

_FILE = Path(__file__).with_name("benchmarks.json")
_SPREAD = re.compile(r"[;\[]|, median")
_COLORS = ("#5c6bc0", "#e57373", "#66a966", "#c99a2e", "#9c6bc0", "#5aa0b8")


_SHORT = {  # what a reader asks first: subject, row, case, the fastest alternative and its name
    "Hessian-vector product, 2-layer transformer": (
        ("hvp", "hvp / best by hand, x = module", "2-layer transformer"),
        {
            "by hand, grad_outputs": "hand-written",
            "jvp(grad)": "`torch.func.jvp(grad)`",
        },
    ),
    "one product of a Hessian operator, 1.3 million parameters": (
        ("curvature", "H @ v / curvlinops", "MLP 256-1024-1024-10, D = 1323018"),
        {"curvlinops": "curvlinops"},
    ),
    "WGAN-GP penalty and its backward, 16 images of 64 × 64": (
        (
            "penalties",
            "WGAN-GP penalty + backward / best by hand",
            "conv critic, 16 x 3 x 64 x 64",
        ),
        {"by hand, sum": "hand-written"},
    ),
    "Laplacian in 50 dimensions, batch 256, with its gradient": (
        (
            "fields",
            "laplacian: other / ours",
            "D = 50, 4x256 tanh, batch 256, training",
        ),
        {"vmap(jvp(grad))": "`torch.func.vmap(jvp(grad))`"},
    ),
    "dense Hessian of an MLP by its 1000 inputs": (
        ("hessian", "hessian / fastest stock route", "MLP of its input, n = 1000"),
        {
            "jacrev(jacrev)": "`torch.func.jacrev(jacrev)`",
            "torch.func.hessian": "`torch.func.hessian`",
        },
    ),
}


def measured() -> dict[str, Any]:
    """Subjects, each with where it was measured and its rows."""
    return json.loads(_FILE.read_text("utf-8"))


def chart(
    subject: str,
    start: str | tuple[str, ...],
    *,
    says: str,
    leave_out: tuple[str, ...] = (),
) -> str:
    """Times of a subject's rows whose name starts so: a line for each case, a dot at each contender's median."""
    rows = [
        row
        for row in measured()[subject]["rows"]
        if row["subject"].startswith(start) and row["times"]
    ]
    names = list(
        dict.fromkeys(
            name for row in rows for name in row["times"] if name not in leave_out
        )
    )
    figure, axes = subplots(figsize=(7.5, 0.9 + 0.42 * len(rows)))
    for place, row in enumerate(rows):
        axes.axhline(place, color=INK, linewidth=0.3, alpha=0.4)
        for name, color in zip(names, _COLORS, strict=False):
            if name in row["times"]:
                least, median, most = row["times"][name]
                axes.plot(
                    [least, most], [place, place], color=color, linewidth=1.2, alpha=0.6
                )
                label = (
                    name
                    if place
                    == next(i for i, r in enumerate(rows) if name in r["times"])
                    else None
                )
                axes.plot(
                    median,
                    place,
                    "o",
                    color=color,
                    markersize=7 if name == "hodiff" else 5,
                    label=label,
                )
    labels = [
        row["case"]
        if len({r["subject"] for r in rows}) == 1
        else f"{row['subject']}: {row['case']}"
        for row in rows
    ]
    axes.set(
        xscale="log",
        xlabel="milliseconds, CPU time",
        yticks=range(len(rows)),
        yticklabels=labels,
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(len(rows) - 0.5, -0.5)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return svg(figure, says=says)


def short() -> str:
    """Five rows: times of hodiff and of what else computes the same."""
    lines = ["| computation | hodiff | others |", "|---|---|---|"]
    for what, ((subject, name, case), others) in _SHORT.items():
        (times,) = (
            row["times"]
            for row in measured()[subject]["rows"]
            if (row["subject"], row["case"]) == (name, case)
        )
        besides = ", ".join(
            f"{times[key][1]:.0f} ms {shown}" for key, shown in others.items()
        )
        lines.append(f"| {what} | {times['hodiff'][1]:.0f} ms | {besides} |")
    return "\n".join(lines)


def verdicts() -> tuple[int, int]:
    """How many bars are met, and how many there are."""
    met = [
        row["met"]
        for subject in measured().values()
        for row in subject["rows"]
        if row["met"] is not None
    ]
    return sum(met), len(met)


def table(*, met: bool) -> str:
    """The rows that met their target, or those that missed it: each claim once, with its cases."""
    lines = ["| what, and case | measured | target |", "|---|---|---|"]
    for subject in measured().values():
        claims: dict[str, list[str]] = {}
        for row in subject["rows"]:
            if row["met"] is met:
                figure = _SPREAD.split(row["measured"], maxsplit=1)[0]
                cells = map(_cell, (row["case"], figure.strip(), row["bar"]))
                claims.setdefault(row["subject"], []).append(f"| {' | '.join(cells)} |")
        for claim, rows in claims.items():
            lines += [f"| **{_cell(claim)}** | | |", *rows]
    return "\n".join(lines)


def machines() -> str:
    """Where the subjects were measured: each machine once."""
    at: dict[tuple[str, str], list[str]] = {}
    for name, subject in measured().items():
        where = subject["where"]
        peers = ", ".join(
            f"{peer} {release}" for peer, release in where["peers"].items()
        )
        machine = f"{where['processor']} ({where['device']}), PyTorch {where['torch']}"
        with_peers = f", with {peers}" if peers else ""
        said = f"{name} ({where['date']}, load {where['load']})"
        at.setdefault((machine, with_peers), []).append(said)
    return "\n".join(
        f"* **{machine}**{with_peers}: {', '.join(subjects)}"
        for (machine, with_peers), subjects in at.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
