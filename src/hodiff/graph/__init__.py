"""Graphs explained: what is alive, what a backward pass would do, why one failed, what to free.

* `inspect`, `predict`, `shared` look at a graph; `explain` at a failure, after the fact.
* `watch` and `lifetime` record a program while it runs; `hodiff explain SCRIPT` does so from outside.
* `release` gives memory back; `monitor` tells a graph that grows.
"""

from hodiff._core import _compiled_callers
from hodiff.graph import _failure as _failure  # registers itself, to word the calculus's errors
from hodiff.graph._explain import Explanation, explain
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

_compiled_callers.break_graphs(vars())
