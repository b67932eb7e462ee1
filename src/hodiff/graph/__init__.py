"""Graphs explained: what is alive, what a backward pass would do, why one failed, what to free.

* `inspect`, `predict`, `shared` look at a graph; `explain` at a failure, after the fact.
* `watch` and `lifetime` record a program while it runs; `hodiff explain SCRIPT` does so from
  outside.
* `release` gives memory back; `monitor` tells a graph that grows.
"""

from typing import TYPE_CHECKING

from hodiff._core import _compiled_callers

if TYPE_CHECKING:
    from hodiff.graph._case import Explanation
    from hodiff.graph._explain import explain
    from hodiff.graph._growth import Monitor, Step, monitor
    from hodiff.graph._inspect import (
        Finding,
        Graph,
        Leaf,
        NodeRecord,
        Prediction,
        Released,
        Saved,
        Shared,
        inspect,
        predict,
        release,
        shared,
    )
    from hodiff.graph._watch import Lifetime, Watch, lifetime, watch

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

# Explaining is for the rare case.
__getattr__, __dir__ = _compiled_callers.names(
    globals(),
    {
        "_case": ("Explanation",),
        "_explain": ("explain",),
        "_growth": ("Monitor", "Step", "monitor"),
        "_inspect": (
            "Finding",
            "Graph",
            "Leaf",
            "NodeRecord",
            "Prediction",
            "Released",
            "Saved",
            "Shared",
            "inspect",
            "predict",
            "release",
            "shared",
        ),
        "_watch": ("Lifetime", "Watch", "lifetime", "watch"),
    },
)
