"""One function at one point, evaluated again and again: the same random numbers, and values held where they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _modes
from hodiff._core._lending import Lending
from hodiff.graph._names import HIDDEN
from hodiff.verify._compare import Point, normal
from hodiff.verify._trace import Holder, Key, Recorder, Site


class Attributes:
    """What the attributes of the modules that `f` called were before it ran first, to be put back."""

    def __init__(self, borrowed: Mapping[nn.Module, dict[str, Any] | None]) -> None:
        self._before = {module: dict(before) for module, before in borrowed.items() if before is not None}

    def _others(self) -> Iterator[tuple[nn.Module, str]]:
        """Those that are others now."""
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
        """Put them back."""
        for module, name in [*self._others()]:
            if name in self._before[module]:
                module.__dict__[name] = self._before[module][name]
            else:
                del module.__dict__[name]


class Evaluation:
    """The function of a lending, as a number: its output times fixed random weights.

    Attributes:
        lending: The state in which it runs.
        point: Where.
        output: What the function returned in the first run.
        drew: Whether it drew random numbers.
        attributes: What its modules keep.
        allowed: Cuts that the caller means: their values are held always.
    """

    def __init__(self, lending: Lending, generator: torch.Generator | None) -> None:
        self.lending = lending
        self.point: Point = tuple(leaf.detach().clone() for leaf in lending.leaves())
        self._held: dict[Key, Any] = {}
        self._hooks, self._steady = True, False
        self.allowed: list[Site] = []
        lending.remember()
        self.output = _checks.check_output(self.run(self.point))
        self.drew, self.attributes = lending.drew_random(), Attributes(lending.borrowed)
        self._weights = torch.ones((), device="cpu") if self.output.numel() == 1 else normal(self.output, generator)

    def run(self, leaves: Point) -> Any:
        """What the function returns: with a graph, for leaves that require grad."""
        if not any(leaf.requires_grad for leaf in leaves):  # f sees such leaves always
            return _detached(self.run(tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)))
        self.lending.restart()
        if self._steady:
            self.attributes.restore()
        held = {site.key: site.value for site in self.allowed} | self._held
        with _modes.on(Holder(held, hooks=self._hooks)) if held or not self._hooks else nullcontext():
            return self.lending.run(leaves, leaves)

    def steady(self) -> None:
        """From now on begin each run with the attributes that the modules had before the first one."""
        self._steady = True

    def allow(self, places: Iterable[Any]) -> None:
        """Hold the values that are cut at these places, now and always."""
        if any(isinstance(place, str) for place in places):
            self.allowed = [site for site in self.recorded().sites if site.place.is_named(places)]

    def scalar(self, leaves: Point) -> Tensor:
        """The same, as a number."""
        return (self.run(leaves) * self._weights).sum()

    def recorded(self, leaves: Point | None = None, **what: bool) -> Recorder:
        """What happens in an evaluation, at the point or elsewhere."""
        leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves or self.point)
        self.lending.restart()
        self.attributes.restore()
        recorder = Recorder(**what)
        with _modes.grad_mode(True), _modes.on(recorder):
            self.lending.run(leaves, leaves)
        return recorder

    @contextmanager
    def holding(self, held: Mapping[Key, Any]) -> Iterator[None]:
        """Inside it, these values are what they were at the point."""
        before, self._held = self._held, dict(held)
        try:
            yield
        finally:
            self._held = before

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Inside it, hooks that the function puts on tensors are taken off at once."""
        self._hooks = False
        try:
            yield
        finally:
            self._hooks = True


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
