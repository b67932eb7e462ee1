"""What else to know of `f`: state that it keeps between calls, samples that it mixes, random numbers that it draws."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.verify._evaluation import Evaluation
from hodiff.verify._report import Cause, cause

SHOWN = 4


class Surroundings:
    """The variables that a function brings along, before it ran."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f, self._before = f, _variables(f)

    def changed(self) -> list[str]:
        """The names of those that are others now."""
        now = _variables(self._f)
        return [name for name, state in self._before.items() if now.get(name, state) != state]


def _variables(f: Callable[..., Any]) -> dict[str, Any]:
    """For each variable of a closure, and each global that a function reads, what would show a change."""
    try:
        found = inspect.getclosurevars(f)
    except TypeError:  # a module, a partial
        return {}
    return {
        name: _state(value)
        for name, value in {**found.globals, **found.nonlocals}.items()
        if not callable(value) or isinstance(value, type)
    }


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, (list, dict, set)):
        return id(value), len(value)
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().sum().item()
    return value if isinstance(value, (int, float, str, bool)) else id(value)


def remarks(evaluation: Evaluation, surroundings: Surroundings) -> list[Cause]:
    """All that can be told, after the first run; `f` runs three times more."""
    found = _kept(evaluation, surroundings)
    if evaluation.drew:
        found.append(cause("random", None, "it draws random numbers", "each evaluation draws the same ones (dropout)."))
    return [*found, *_mixing(evaluation)]


def _kept(evaluation: Evaluation, surroundings: Surroundings) -> list[Cause]:
    """What `f` leaves behind for its next call."""
    names = [f"the variable {name}" for name in surroundings.changed()]
    names += evaluation.attributes.changed()
    again = evaluation.run(evaluation.point)
    differs = again.shape != evaluation.output.shape or not torch.equal(again, evaluation.output)
    if not names and not differs:
        return []
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    what = (
        f"it changes {shown}" if names else "it keeps state between calls (a counter, a cache, a generator of its own)"
    )
    value = "; its value at the same point is another then, so that differences mean nothing" if differs else ""
    fix = "let f compute what it needs each time, and return what it would keep."
    return [cause("state", None, f"{what}{value}", fix)]


def _mixing(evaluation: Evaluation) -> list[Cause]:
    """Batch norms in training mode; or rows of the output that move with other rows of x."""
    fix = "with batch_ndim= it has no derivatives of each sample alone: use model.eval(), or another norm."
    norms = dict.fromkeys(place.line for place in evaluation.recorded().batch_norms)
    if norms:
        reason = "a batch norm in training mode mixes the samples of a batch"
        return [cause("mixing", line, reason, fix) for line in norms if line.file]
    x, y = evaluation.point[0], evaluation.output
    if len(evaluation.point) > 1 or x.ndim < 2 or y.ndim < 1 or y.shape[0] != x.shape[0] or len(x) < 2:
        return []
    moved = x.clone()
    moved[0] += 1e-3 * (1 + moved[0].abs())
    others = evaluation.run((moved,))[1:] - y[1:]
    if not bool((others.abs() > 1e-12 * (1 + y[1:].abs())).any()):
        return []
    reason = "each row of f(x) depends on other rows of x: if rows are samples, they are not independent"
    return [cause("mixing", None, reason, "look for an operation over the wrong dimension.")]
