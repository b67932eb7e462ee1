"""The outputs of one batch, linearised: what Jacobian, Gauss-Newton and Fisher products run through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hodiff._core import _reverse
from hodiff._core._call import Allowed, call
from hodiff._core._graph import Graph
from hodiff._core._where import Where
from hodiff.curvature._batch_graph import BatchGraph
from hodiff.curvature._data import NONE
from hodiff.curvature._space import Parts


@dataclass(frozen=True, eq=False)
class Linearised(BatchGraph):
    """J v and J' u by one pass each.

    Attributes:
        outputs: The outputs, with their graph.
        cotangents: A point in the space of the outputs' gradients: u.
        pulled: J' u as a function of u; its derivative by u in the direction v is J v.
    """

    outputs: Parts
    cotangents: Parts
    pulled: Parts

    @property
    def roots(self) -> Parts:
        """The gradient, as a function of the outputs' gradient."""
        return self.pulled

    def push(self, parts: Parts, count: int | None, chosen: list[int], chunk: int) -> Parts:
        """J v."""
        pulled = [self.pulled[index] for index in chosen]
        return _reverse.products(self.ev, pulled, parts, count, chunk_size=chunk, inputs=self.cotangents)

    def pull(self, parts: Parts, count: int | None, chosen: list[int], chunk: int) -> Parts:
        """J' u."""
        leaves = [self.ev.leaves[index] for index in chosen]
        return _reverse.products(self.ev, self.outputs, parts, count, chunk_size=chunk, inputs=leaves)


def predicted(predict: Callable[..., Any], where: Where, batch: Any, allow: Allowed) -> Graph:
    """The evaluation of a batch's outputs, not yet entered."""
    given = () if batch is NONE else (batch,)
    return Graph(call(predict, where, passes=2, create_graph=False, args=given, keep=True, allow=allow))


def linearise(ev: Graph, outputs: Parts, at: list[Tensor]) -> tuple[Parts, Parts]:
    """J' u as a function of u, at a u: `(u, J' u)`."""
    cotangents = [part.detach().clone().requires_grad_() for part in at]
    return cotangents, _reverse.transposed(ev, outputs, cotangents)
