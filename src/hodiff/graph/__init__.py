"""Graphs explained: what is alive, what a backward pass would do, why one failed, what to free.

* `inspect`, `predict`, `shared` look at a graph; `explain` at a failure, after the fact.
* `watch` and `lifetime` record a program while it runs; `hodiff explain SCRIPT` does so from outside.
* `release` gives memory back; `monitor` tells a graph that grows.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hodiff._core import _compiled_callers, _why

if TYPE_CHECKING:
    from hodiff.graph._case import Explanation
    from hodiff.graph._explain import explain
    from hodiff.graph._inspect import Graph, Leaf, NodeRecord, Saved, inspect
    from hodiff.graph._lifetime import Lifetime, lifetime
    from hodiff.graph._monitor import Monitor, Step, monitor
    from hodiff.graph._predict import Finding, Prediction, Shared, predict, shared
    from hodiff.graph._release import Released, release
    from hodiff.graph._watch import Watch, watch

__all__ = [
    "Explanation",
    "Finding",
    "Graph",
    "Leaf",
    "Lifetime",
    "Monitor",
    "NodeRecord",
    "Prediction",
    "Released",
    "Saved",
    "Shared",
    "Step",
    "Watch",
    "explain",
    "inspect",
    "lifetime",
    "monitor",
    "predict",
    "release",
    "shared",
    "watch",
]

# Explaining is for the rare case: its modules are loaded when they are asked for, not with `import hodiff`.
_HOMES = {
    "_case": ("Explanation",),
    "_explain": ("explain",),
    "_inspect": ("Graph", "Leaf", "NodeRecord", "Saved", "inspect"),
    "_lifetime": ("Lifetime", "lifetime"),
    "_monitor": ("Monitor", "Step", "monitor"),
    "_predict": ("Finding", "Prediction", "Shared", "predict", "shared"),
    "_release": ("Released", "release"),
    "_watch": ("Watch", "watch"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    _compiled_callers.mark(name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _words(failure: _why.Failure) -> str:
    from hodiff.graph import _failure

    return _failure.words(failure)


_why.register(_words)  # to word the calculus's errors
