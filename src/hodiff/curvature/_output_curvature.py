"""A loss on one batch of outputs: its sum, its gradient, and a matrix over the outputs by its products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

from hodiff.curvature._space import Parts
from hodiff.errors import InputError


class OutputCurvature(ABC):
    """A symmetric matrix over the outputs of one batch, by its products."""

    @abstractmethod
    def times(self, tangents: Parts, count: int | None) -> Parts:
        """The product with one vector like the outputs, or with `count` stacked ones."""


@final
class DiagonalHessian(OutputCurvature):
    """Of a loss that is a sum over entries: a diagonal."""

    def __init__(self, diagonal: Tensor | float) -> None:
        self._diagonal = diagonal

    def times(self, tangents: Parts, count: int | None) -> Parts:
        """See `OutputCurvature`."""
        return [v * self._diagonal for v in tangents]


@dataclass(frozen=True, eq=False)
class Scored:
    """A loss on one batch.

    Attributes:
        value: The sum, detached.
        weight: What it is divided by; None: by nothing.
        gradient: The gradient of the sum by each output, detached.
        curvature: Its Hessian by the outputs.
        fisher: The expectation of that over labels of the model's own; None where it is the same.
    """

    value: Tensor
    weight: float | None
    gradient: Parts
    curvature: OutputCurvature
    fisher: OutputCurvature | None = None


def check_shapes(z: Tensor, target: Tensor) -> None:
    """Raise unless targets have the shape of the outputs."""
    if z.shape != target.shape:
        raise InputError(
            f"loss: targets have shape {tuple(target.shape)}, the outputs {tuple(z.shape)}; they must agree."
        )
