"""One function at one point, evaluated again and again: its random numbers, its kinks, its memory of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _settings
from hodiff._core._lending import EvaluationContext
from hodiff.curvature._staleness import variables
from hodiff.graph._names import HIDDEN
from hodiff.graph._source import Line
from hodiff.verify._differences import Cause, Point, cause, normal
from hodiff.verify._trace import HeldValues, Key, Recorder, Site


class Attributes:
    """What the attributes of the modules that `f` called were before it ran first, to be put back."""

    def __init__(self, borrowed: Mapping[nn.Module, dict[str, Any] | None]) -> None:
        self._before = {module: dict(before) for module, before in borrowed.items() if before is not None}

    def _others(self) -> Iterator[tuple[nn.Module, str]]:
        """The attributes that are others now."""
        for module, before in self._before.items():
            for name in {**before, **module.__dict__}:
                if name in HIDDEN or name.startswith("_flat_weight"):  # what RNNs keep of their parameters
                    continue
                if name not in before or name not in module.__dict__ or module.__dict__[name] is not before[name]:
                    yield module, name

    def changed(self) -> list[str]:
        """The names of those that are others now."""
        return [f"{type(module).__name__}.{name}" for module, name in self._others()]

    def restore(self) -> None:
        """Put the attributes back."""
        for module, name in [*self._others()]:
            if name in self._before[module]:
                module.__dict__[name] = self._before[module][name]
            else:
                del module.__dict__[name]


class ScalarEvaluation:
    """The function of a context, as a number: its output times fixed random weights.

    Attributes:
        lending: The state in which it runs.
        point: Where.
        output: What the function returned in the first run.
        drew: Whether it drew random numbers.
        attributes: What its modules keep.
        allowed: Cuts that the caller means: their values are held always.
        steady: Whether each run begins with the attributes that the modules had before the first
            one.
    """

    def __init__(self, context: EvaluationContext, generator: torch.Generator | None) -> None:
        self.context = context
        self.point: Point = tuple(leaf.detach().clone() for leaf in context.leaves())
        self._held: dict[Key, Any] = {}
        self._hooks, self.steady = True, False
        self.allowed: list[Site] = []
        context.remember()
        self.output = _arguments.check_output(self.run(self.point))
        self.drew, self.attributes = context.random.moved(), Attributes(context.borrowed)
        self._weights = torch.ones((), device="cpu") if self.output.numel() == 1 else normal(self.output, generator)

    def run(self, leaves: Point) -> Any:
        """What the function returns: with a graph, for leaves that require grad."""
        if not any(leaf.requires_grad for leaf in leaves):  # f sees such leaves always
            value = self.run(tuple(leaf.detach().clone().requires_grad_() for leaf in leaves))
            return value.detach() if isinstance(value, Tensor) else value
        self.context.random.restore()
        if self.steady:
            self.attributes.restore()
        held = {site.key: site.value for site in self.allowed} | self._held
        with _settings.on(HeldValues(held, hooks=self._hooks)) if held or not self._hooks else nullcontext():
            return self.context.run(leaves, leaves)

    def allow(self, places: Iterable[Any]) -> None:
        """Hold the values that are cut at these places, now and always."""
        if any(isinstance(place, str) for place in places):
            self.allowed = [site for site in self.recorded().sites if site.place.is_named(places)]

    def scalar(self, leaves: Point) -> Tensor:
        """What the function returns, as a number."""
        return (self.run(leaves) * self._weights).sum()

    def recorded(self, leaves: Point | None = None, **what: bool) -> Recorder:
        """What happens in an evaluation, at the point or elsewhere."""
        leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves or self.point)
        self.context.random.restore()
        self.attributes.restore()
        recorder = Recorder(**what)
        with _settings.grad_mode(True), _settings.on(recorder):
            self.context.run(leaves, leaves)
        return recorder

    @contextmanager
    def altered(self, held: Mapping[Key, Any] | None = None, *, hooks: bool = True) -> Iterator[None]:
        """Inside it, these values are what they were at the point, or hooks on tensors are taken off."""
        self._held, self._hooks = dict(held or {}), hooks
        try:
            yield
        finally:
            self._held, self._hooks = {}, True


# --- what else to know of `f` ---------------------------------------------------------------------


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
    """For each variable that a function reads, what would show a change."""
    return {
        name: _state(value)
        for name, (_, _, value) in variables(f, assigned=True).items()
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


def remarks(evaluation: ScalarEvaluation, surroundings: Surroundings) -> list[Cause]:
    """All that can be told, after the first run; `f` runs three times more."""
    noted = _kept(evaluation, surroundings)
    if evaluation.drew:
        noted.append(cause("random", None, "it draws random numbers", "each evaluation draws the same ones (dropout)."))
    return [*noted, *_mixing(evaluation)]


def _kept(evaluation: ScalarEvaluation, surroundings: Surroundings) -> list[Cause]:
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


def _mixing(evaluation: ScalarEvaluation) -> list[Cause]:
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


# --- kinks and jumps: decisions that fall otherwise right beside a point --------------------------


def kinks(evaluation: ScalarEvaluation, direction: Point, step: float) -> list[Cause]:
    """The decisions that are others at a step to either side of the point: at most one for a line and a function."""
    right, left = (
        evaluation.recorded(
            tuple(leaf + t * part for leaf, part in zip(evaluation.point, direction, strict=True)), choices=True
        ).choices
        for t in (step, -step)
    )
    by_place: dict[tuple[Line, str], Cause] = {}
    for key in right.keys() & left.keys():
        (one, name, place), (other, *_) = right[key], left[key]
        if not _same(one, other):
            reason = f"{name} has a kink or a jump here, at x: the derivatives of the two sides differ"
            fix = "check at another point (move x a little), or write a function that is smooth there."
            by_place[place.line, name] = cause("kink", place.line, reason, fix)
    return list(by_place.values())


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one == other
