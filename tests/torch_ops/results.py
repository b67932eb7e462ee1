"""What a sweep found, in short: for each operation the routes that are not simply right.

The sweeps of all releases are three tables in `results/`, which say once what several found: `counts.tsv` how many
comparisons came out how, `samples.tsv` how many samples of each operation were judged, and `verdicts.tsv` which routes
got which verdict in which releases.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.meta.source import ROOT
from tests.torch_ops.judge import Verdict
from tests.torch_ops.routes import ROUTES

FOLDER = ROOT / "tests" / "torch_ops" / "results"
Found = dict[str, dict[str, str]]
"""operation -> route -> verdict; a route that is missing is right. `samples` is their number."""

Sweep = dict[str, Any]
"""Of one release: `torch`, the counts of `hodiff` and of `PyTorch`, and its `operations`."""

ABSENT = "-"
"""In place of a number of samples: the release has no such operation."""

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


def write(release: str, samples: dict[str, list[dict[str, Verdict]]]) -> None:
    """Put a sweep into the tables, in the place of an earlier one of its release."""
    found = {
        "torch": release,
        "hodiff": dict(counts(samples, ours=True)),
        "PyTorch": dict(counts(samples, ours=False)),
        "operations": digest(samples),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, text in tables({**_published(), release: found}).items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def tables(sweeps: Mapping[str, Sweep]) -> dict[str, str]:
    """The files of these sweeps, each by its name."""
    releases = sorted(sweeps, key=_in_order)
    operations = sorted({name for sweep in sweeps.values() for name in sweep["operations"]})
    numbers = (
        [name, *(sweeps[release]["operations"].get(name, {"samples": ABSENT})["samples"] for release in releases)]
        for name in operations
    )
    counted = (
        [release, by, *(str(sweeps[release][by].get(rank, 0)) for rank in RANKS)]
        for release in releases
        for by in ("hodiff", "PyTorch")
    )
    verdicts = (row for name in operations for row in _rows(name, {r: sweeps[r]["operations"] for r in releases}))
    return {
        "counts.tsv": _text(["release", "by", *RANKS], counted),
        "samples.tsv": _text(["operation", *releases], numbers),
        "verdicts.tsv": _text(["operation", "routes", "releases", "verdict"], verdicts),
    }


def _rows(name: str, found: Mapping[str, Found]) -> list[list[str]]:
    """An operation's verdicts: each with its routes, and with the releases that have it for just these."""
    routes: dict[tuple[str, Verdict], list[str]] = defaultdict(list)
    for release, operations in found.items():
        for route, verdict in operations.get(name, {}).items():
            if route != "samples":
                routes[release, verdict].append(route)
    rows: dict[tuple[str, Verdict], list[str]] = defaultdict(list)
    for (release, verdict), names in routes.items():
        rows[", ".join(sorted(names)), verdict].append(release)
    return sorted([name, names, " ".join(releases), verdict] for (names, verdict), releases in rows.items())


def read(release: str) -> Sweep:
    return _published()[release]


def releases() -> list[str]:
    """Those that were swept, the oldest first."""
    return list(_published())


def _published() -> dict[str, Sweep]:
    """What the tables hold, by release, the oldest first."""
    sweeps: dict[str, Sweep] = {}
    for row in _lines("counts.tsv"):
        sweep = sweeps.setdefault(row["release"], {"torch": row["release"]})
        sweep[row["by"]] = {rank: int(row[rank]) for rank in sorted(RANKS) if row[rank] != "0"}
    found: dict[str, Found] = {release: {} for release in sweeps}
    for row in _lines("samples.tsv"):
        for release in sweeps:
            if row[release] != ABSENT:
                found[release][row["operation"]] = {"samples": row[release]}
    for row in _lines("verdicts.tsv"):
        for release in row["releases"].split():
            found[release][row["operation"]].update(dict.fromkeys(row["routes"].split(", "), row["verdict"]))
    for release, sweep in sweeps.items():
        sweep["operations"] = {name: dict(sorted(routes.items())) for name, routes in sorted(found[release].items())}
    return sweeps


def _in_order(release: str) -> list[int]:
    return [*map(int, release.split("."))]


def _text(head: list[str], rows: Iterable[list[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in [head, *rows])


def _lines(name: str) -> Iterator[dict[str, str]]:
    """The rows of a table, by the names of its columns."""
    if (FOLDER / name).exists():
        head, *rows = [line.split("\t") for line in (FOLDER / name).read_text("utf-8").splitlines()]
        yield from (dict(zip(head, row, strict=True)) for row in rows)
