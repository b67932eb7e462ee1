"""One batch, evaluated, and what evaluates it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from hodiff._core import _modes
from hodiff._core._graph import Graph
from hodiff._core._where import Where
from hodiff.curvature._space import Parts


@dataclass(frozen=True, eq=False)
class BatchGraph(ABC):
    """One batch, evaluated: its part of every sum, and a graph through which products run.

    Attributes:
        ev: The evaluation; its graph is kept.
        value: The batch's sum, detached.
        weight: What the sums are divided by, its part of it; None: by nothing.
        gradient: The gradient of the sum by each leaf, detached.
        random: Whether the function drew random numbers.
        calls_back: Whether passes over the graph run Python (activation checkpoints do).
    """

    ev: Graph
    value: Tensor
    weight: float | None
    gradient: Parts
    random: bool
    calls_back: bool

    @property
    @abstractmethod
    def roots(self) -> Parts:
        """The tensors whose graph a product runs through."""

    def ready(self) -> AbstractContextManager[Any]:
        """The state in which a product may run."""
        if self.calls_back:
            return self.ev.resumed()
        return _modes.recording() if torch.is_inference_mode_enabled() else nullcontext()


G = TypeVar("G", bound=BatchGraph)
"""What kind of graph an operator has."""


class Builder(ABC, Generic[G]):
    """Evaluates one batch at a point. What belongs to one evaluation of all batches (labels drawn) it keeps itself."""

    @abstractmethod
    def build(self, where: Where, batch: Any, number: int) -> G:
        """The graph of batch `number`."""

    def begin(self) -> None:
        """Before the first batch of an evaluation; there may be none."""
        return

    def fresh(self) -> Self:
        """The same builder, as it was before anything was built: itself, where it keeps nothing."""
        return self
