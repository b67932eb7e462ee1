"""What a sweep found, in short: for each operation the routes that are not simply right."""

import json
from collections import Counter
from pathlib import Path

from tests.meta.source import ROOT
from tests.torch_ops.judge import Verdict
from tests.torch_ops.routes import ROUTES

FOLDER = ROOT / "tests" / "torch_ops" / "results"
Found = dict[str, dict[str, str]]
"""operation -> route -> verdict; a route that is missing is right. `samples` is their number."""

RANKS = ("right", "unsure", "defined", "told", "refused", "raises", "wrong")


def kind(verdict: Verdict) -> str:
    """The first word: `wrong` of `wrong 1e-1`."""
    return verdict.partition(":")[0].partition(" ")[0].rstrip(",")


def merged(verdicts: list[Verdict]) -> Verdict:
    """One verdict of several samples: the worst, and in how many of them where others are right."""
    if not verdicts:
        return "none"
    kinds = [kind(verdict) for verdict in verdicts]
    worst = max(kinds, key=RANKS.index)
    if worst == "unsure" and "right" in kinds:
        return "right"
    shown = max((v for v in verdicts if kind(v) == worst), key=_size)
    few = f" (in {kinds.count(worst)} of {len(kinds)})" if "right" in kinds and worst != "right" else ""
    return shown + few


def _size(verdict: Verdict) -> float:
    try:
        return float(verdict.rpartition(" ")[2])
    except ValueError:
        return 0.0


def digest(samples: dict[str, list[dict[str, Verdict]]]) -> Found:
    """The short form of a whole sweep."""
    found: Found = {}
    for name, each in sorted(samples.items()):
        judged = [verdicts for verdicts in each if verdicts]
        routes = {route.name: merged([v[route.name] for v in judged if route.name in v]) for route in ROUTES}
        found[name] = {"samples": str(len(judged)), **{r: v for r, v in routes.items() if v != "right"}}
    return found


def verdict(found: Found, name: str, route: str) -> Verdict:
    return found[name].get(route, "right")


def counts(samples: dict[str, list[dict[str, Verdict]]], ours: bool) -> Counter[str]:
    """How many comparisons came out how."""
    chosen = {route.name for route in ROUTES if route.ours == ours}
    return Counter(kind(v) for each in samples.values() for s in each for r, v in s.items() if r in chosen)


def path(release: str) -> Path:
    return FOLDER / f"{release}.json"


def write(release: str, samples: dict[str, list[dict[str, Verdict]]]) -> None:
    whole = {
        "torch": release,
        "hodiff": dict(counts(samples, ours=True)),
        "PyTorch": dict(counts(samples, ours=False)),
        "operations": digest(samples),
    }
    FOLDER.mkdir(exist_ok=True)
    path(release).write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read(release: str) -> dict[str, object]:
    return json.loads(path(release).read_text("utf-8"))


def releases() -> list[str]:
    """Those that were swept, the oldest first."""
    return sorted((file.stem for file in FOLDER.glob("*.json")), key=lambda name: [*map(int, name.split("."))])
