"""What `hodiff info` reads: the results in short, by release, inside the package."""

import json

from tests.meta.source import ROOT
from tests.torch_ops import results
from tests.torch_ops.results import kind
from tests.torch_ops.routes import ROUTES

FILE = ROOT / "src" / "hodiff" / "cli" / "operations.json"
OURS = ("hvp", "hessian", "grad of hvp")
"""The function form: it writes out operations that plain PyTorch gets wrong. (Taylor mode has refusals of its own.)"""


def write() -> None:
    FILE.write_text(text(), encoding="utf-8")


def text() -> str:
    found = {release: _of(results.read(release)["operations"]) for release in results.releases()}
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def _of(operations: dict[str, dict[str, str]]) -> dict[str, object]:
    judged = {name: routes for name, routes in operations.items() if routes["samples"] != "0"}
    return {
        "operations": len(judged),
        "samples": sum(int(routes["samples"]) for routes in judged.values()),
        "refused": {name: words for name, routes in judged.items() if (words := _refusal(routes))},
        "defined": {name: why for name, routes in judged.items() if (why := _definition(routes))},
        "wrong": {name: found for name, routes in judged.items() if (found := _wrong(routes))},
    }


def _refusal(routes: dict[str, str]) -> dict[str, str]:
    """The lowest order that hodiff refuses, and why."""
    for route in sorted((route for route in ROUTES if route.name in OURS), key=lambda route: route.order):
        verdict = routes.get(route.name, "right")
        if kind(verdict) == "refused":
            return {"order": str(route.order), "why": verdict.removeprefix("refused: ").partition(" (in ")[0]}
    return {}


def _wrong(routes: dict[str, str]) -> dict[str, str]:
    """Plain PyTorch's routes that give a wrong number silently, and how wrong."""
    if _definition(routes):
        return {}
    verdicts = {route.name.replace("`", ""): routes.get(route.name, "right") for route in ROUTES if not route.ours}
    return {
        name: verdict.removeprefix("wrong").strip(" ,").partition(" (in ")[0]
        for name, verdict in verdicts.items()
        if kind(verdict) == "wrong"
    }


def _definition(routes: dict[str, str]) -> str:
    """Why PyTorch's gradient is not a derivative, where that is on purpose."""
    found = [verdict for verdict in routes.values() if kind(verdict) == "defined"]
    return found[0].removeprefix("defined: ").partition(" (in ")[0] if found else ""
