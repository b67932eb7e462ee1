"""`docs/explain/operations.md`, written from the stored results alone."""

import json
from collections import defaultdict
from typing import Any

from tests.meta.source import ROOT
from tests.torch_ops import results
from tests.torch_ops.results import kind
from tests.torch_ops.routes import ROUTES

PAGE = ROOT / "docs" / "explain" / "operations.md"
DATA = ROOT / "docs" / "assets" / "operations.json"
WORDS = {
    "right": "right",
    "refused": "refused",
    "told": "not finite, and said so",
    "unsure": "unsure",
    "defined": "PyTorch's gradient by definition",
    "none": "",
    "raises": "an error of PyTorch's",
    "wrong": "WRONG",
}
HEAD = """\
# Every operation, every order

This page covers PyTorch's own database of operations, and a few known problem cases that it lacks. Each operation,
with some of its samples, is differentiated once, twice and three times by hodiff's routes and by plain PyTorch's, in
double precision on a CPU. Once order k - 1 is found correct, order k is compared with its extrapolated central
differences along random directions. All tensors of a sample vary together, weights included. A program writes this
page from the results.

"""

COMMANDS = """\
## How to run it

```bash
python -m tests.torch_ops build/2.13.0.jsonl  # all; continues where it was stopped
python -m tests.torch_ops build/2.13.0.jsonl --only linalg.det
# the results in short, and this page
python -m tests.torch_ops build/2.13.0.jsonl --publish
```

The test suite runs a fixed share and compares it with this page.

"""


def _counts(runs: dict[str, Any]) -> str:
    lines = [
        "## Counts\n",
        "| torch | operations | samples | by | right | refused | not finite, told | other error | **wrong** | unsure |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for release, run in runs.items():
        found = run["operations"]
        samples = sum(int(each["samples"]) for each in found.values())
        judged = sum(each["samples"] != "0" for each in found.values())
        for by in ("hodiff", "PyTorch"):
            n = run[by]
            told = [n.get(k, 0) for k in ("right", "refused", "told", "raises")]
            cells = [release, judged, samples, by, *told, f"**{n.get('wrong', 0)}**", n.get("unsure", 0)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + (
        "\n\nThe numbers after *by* count comparisons: one sample by one route. *Unsure*: the sample lies at a kink, "
        "or the differences are too inaccurate. *Other errors* of hodiff's routes are also PyTorch's, in the "
        "backward pass of a result that the caller differentiates (transposed convolutions with `output_padding`, "
        "`to_sparse`). "
        f"{_defined(runs)}\n\n"
    )


def _defined(runs: dict[str, Any]) -> str:
    """What is a gradient by definition alone."""
    why: dict[str, set[str]] = defaultdict(set)
    for run in runs.values():
        for name, routes in run["operations"].items():
            for verdict in routes.values():
                if kind(verdict) == "defined":
                    why[verdict.removeprefix("defined: ").partition(" (in ")[0]] |= {name}
    told = "; ".join(f"{_names(sorted(names))}: {reason}" for reason, names in sorted(why.items()))
    return (
        "Some operations are not counted, because PyTorch's gradient is not a derivative of its values, by definition "
        f"or by rounding, and hodiff passes it on: {told}."
    )


def _refused(runs: dict[str, Any]) -> str:
    """The reasons, each with the operations that it stands for; the box has the routes."""
    reasons: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for release, run in runs.items():
        for name, routes in run["operations"].items():
            for verdict in routes.values():
                if kind(verdict) == "refused":
                    reason = verdict.removeprefix("refused: ").partition(" (in ")[0]
                    reasons[reason][name] |= {release}
    lines = ["## What hodiff refuses, why, and the way out\n", "| operations | what the error says |", "|---|---|"]
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        seen = {entry for entries in names.values() for entry in entries}
        only = "" if seen == set(runs) else f" (torch {', '.join(release for release in runs if release in seen)})"
        lines.append(f"| {_names(sorted(names))}{only} | {_cell(reason)} |")
    return "\n".join(lines) + "\n\n"


def _stock(runs: dict[str, Any]) -> str:
    """Where plain PyTorch gives a wrong number; the box says by how much, and what hodiff does."""
    stock = [route for route in ROUTES if not route.ours]
    wrong: dict[str, set[str]] = defaultdict(set)
    for release, run in runs.items():
        for name, routes in run["operations"].items():
            if any(_error(routes.get(route.name, "right")) for route in stock):
                wrong[name].add(release)
    everywhere = [name for name in sorted(wrong) if len(wrong[name]) == len(runs)]
    some = [f"`{name}` ({', '.join(sorted(wrong[name]))})" for name in sorted(wrong) if name not in everywhere]
    return (
        "## Where plain PyTorch is silently wrong\n\n"
        "By some route, or not finite where the derivative is finite. The box above says by which, and by how much. "
        "[What stock PyTorch gets wrong](stock-pytorch.md) has short programs for the most important.\n\n"
        f"In all of these releases: {_names(everywhere)}.\n\nIn some: {', '.join(some)}.\n\n"
    )


SEARCH = """\
## One operation

Its verdicts by each route, the worst of its samples; those that are not named were not tried (a whole Hessian is made
up to 24 entries).

<p><input id="operation" type="search" placeholder="logsumexp" aria-label="Name of an operation"></p>
<dl id="operations"></dl>
<script src="../../assets/operations.js"></script>
"""


def write() -> None:
    PAGE.write_text(text(), encoding="utf-8")
    DATA.write_text(data(), encoding="utf-8")


def text() -> str:
    runs = {release: results.read(release) for release in results.releases()}
    return HEAD + _counts(runs) + COMMANDS + SEARCH + _refused(runs) + _stock(runs)


def data() -> str:
    """The verdicts on all operations, for the box that looks for one."""
    runs = {release: results.read(release) for release in results.releases()}
    lines = []
    for name in sorted({name for run in runs.values() for name in run["operations"]}):
        each = {release: run["operations"][name] for release, run in runs.items() if name in run["operations"]}
        routes: dict[str, list[str]] = defaultdict(list)
        for route in ROUTES:
            verdicts: dict[str, list[str]] = defaultdict(list)
            for release, found in each.items():
                verdicts[WORDS[kind(found.get(route.name, "right"))]].append(release)
            said = "; ".join(
                verdict if len(verdicts) == 1 else f"{verdict} ({', '.join(releases)})"
                for verdict, releases in verdicts.items()
                if verdict
            )
            if said:
                routes[said].append(route.name.replace("`", ""))
        if routes and any(found["samples"] != "0" for found in each.values()):
            lines.append(json.dumps([name, [[said, ", ".join(names)] for said, names in routes.items()]]))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _error(verdict: str) -> str:
    return verdict.removeprefix("wrong").strip(" ,").partition(" (in ")[0] if kind(verdict) == "wrong" else ""


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;")
