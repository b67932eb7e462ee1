"""One row per claim, as a line of a table and as what a page draws."""

import json
import os
import platform
import statistics
from datetime import date
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Times

PEERS = (
    "asdex",
    "backpack-for-pytorch",
    "curvlinops-for-pytorch",
    "hessian-eigenthings",
    "higher",
    "jax",
    "jet-for-pytorch",
    "matfree",
    "opacus",
    "pyhessian",
    "torchjd",
    "torchopt",
)


class Row(NamedTuple):
    subject: str
    case: str
    measured: str
    bar: str = ""
    met: bool | None = None  # None: shown for comparison, no bar
    times: Times | None = None  # of the contenders, where a page draws them


def header() -> str:
    return "| subject | case | measured | bar | met |\n|---|---|---|---|---|"


def line(row: Row) -> str:
    verdict = {True: "yes", False: "**no**", None: ""}[row.met]
    return f"| {row.subject} | {row.case} | {row.measured} | {row.bar} | {verdict} |"


def write(path: Path, subject: str, rows: list[Row], *, quick: bool) -> None:
    """Puts a subject's rows into the file, in the place of those that were there;
    the other subjects stay.
    """
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    found[subject] = {"where": where() | {"quick": quick}, "rows": [_plain(row) for row in rows]}
    path.write_text(
        json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


def where() -> dict[str, Any]:
    """What was compared, where and when."""
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "device": device(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": {name: version(name) for name in PEERS if list(distributions(name=name))},
    }


def device() -> str:
    return (
        "CPU, one thread"
        if torch.get_default_device().type == "cpu"
        else torch.cuda.get_device_name()
    )


def _plain(row: Row) -> dict[str, Any]:
    times = {
        name: [1e3 * f(of) for f in (min, statistics.median, max)]
        for name, of in (row.times or {}).items()
    }
    rounded = {name: [float(f"{value:.4g}") for value in of] for name, of in times.items()}
    return row._asdict() | {"times": rounded}


def _processor() -> str:
    facts = Path("/proc/cpuinfo")  # Linux's
    if not facts.exists():
        return platform.processor() or platform.machine()
    lines = facts.read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
