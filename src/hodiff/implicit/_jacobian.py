"""The transposed Jacobian of a residual at a solution, as an operator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from hodiff._core import _nodes, _reverse, _settings
from hodiff._core._graph import OutputGraph
from hodiff._core._vectors import Leaves
from hodiff.curvature._operator import LinearOperator


@final
class Transposed(LinearOperator):
    """Jᵀ at a solution, by reverse passes through the graph of the residual; J itself by the derivative of those."""

    def __init__(self, graph: OutputGraph, residual: Leaves, *, symmetric: bool) -> None:
        super().__init__()
        self._graph = graph
        self._residual = residual
        self._symmetric = symmetric
        self._space = graph.call.where.space().side()
        self._linear: tuple[Leaves, Leaves] | None = None
        self._calls_back = _nodes.runs_hooks(_nodes.survey([part for part in residual if part.requires_grad]))

    @property
    def symmetric(self) -> bool:
        """Whether J is the Hessian of a function."""
        return self._symmetric

    def ready(self) -> AbstractContextManager[Any]:
        """The state in which passes may run."""
        return self._graph.resumed() if self._calls_back else _settings.recording()

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        with self.ready():
            return _reverse.products(self._graph, self._residual, parts, count, chunk_size=None)

    def _times(self, flat: Tensor) -> Tensor:
        """As for any operator; but what it gives is read alone, and need not be memory of its own."""
        self._count(1)
        with self.ready():
            parts = _reverse.writable(self._graph, self._space.split(flat))
            return self._space.join(_reverse.vjp(self._graph, self._residual, parts), None)

    def _pull(self, parts: Leaves, count: int | None) -> Leaves:
        """The product J v, of the matrix that is not transposed."""
        with self.ready():
            if self._linear is None:
                cotangents = [torch.ones_like(part, requires_grad=True) for part in self._residual]
                self._linear = cotangents, _reverse.transposed_product(self._graph, self._residual, cotangents)
            cotangents, pulled = self._linear
            return _reverse.products(self._graph, pulled, parts, count, chunk_size=None, inputs=cotangents)

    def _about(self) -> str:
        return "at a solution"
