"""Operators J' B J: a matrix B over the outputs of each batch, pulled back to the parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hodiff._core import _nodes
from hodiff._core._call import Allowed
from hodiff._core._where import Where
from hodiff.curvature import _signatures
from hodiff.curvature._batch_graph import Builder
from hodiff.curvature._data import Weighted
from hodiff.curvature._data_operator import SummedOperator
from hodiff.curvature._linearised import Linearised, linearise, predicted
from hodiff.curvature._losses import Loss, OutputCurvature, Scored, score
from hodiff.curvature._space import Parts
from hodiff.errors import InputError


@dataclass(frozen=True, eq=False)
class CurvedOutputs(Linearised):
    """A batch's outputs, linearised, and the matrix B over them."""

    curvature: OutputCurvature


@dataclass(frozen=True)
class PullbackBuilder(Builder[CurvedOutputs]):
    """Evaluates the outputs of a batch and the loss of these; the gradient comes free, as J' of the outputs' gradient.

    Attributes:
        predict: `predict(where, batch)`.
        loss: `loss(outputs, batch)`, or a module whose Hessian is known.
        weigh: Turns what the loss returns into `(sum, weight)`.
        allow: `allow=` of the operator.
    """

    predict: Callable[..., Any]
    loss: Loss
    weigh: Weighted
    allow: Allowed

    def build(self, where: Where, batch: Any, number: int) -> CurvedOutputs:
        """Evaluate one batch and linearise it."""
        with predicted(self.predict, where, batch, self.allow) as ev:
            random, outputs = ev.drew_random(), ev.tensors()
            calls_back = _nodes.runs_hooks(_nodes.survey(outputs))
            scored = score(self.loss, self.weigh, ev, batch, number, self.allow)
            curvature = self.curvature(scored, outputs, number)
            cotangents, pulled = linearise(ev, outputs, scored.gradient)
        gradient = [part.detach() for part in pulled]
        traits = (scored.value, scored.weight, gradient, random, calls_back)
        return CurvedOutputs(ev, *traits, outputs, cotangents, pulled, curvature)

    @abstractmethod
    def curvature(self, scored: Scored, outputs: Parts, number: int) -> OutputCurvature:
        """The matrix B of batch `number`."""


class PullbackOperator(SummedOperator[CurvedOutputs]):
    """J' B J, of each batch's outputs."""

    @property
    def _passes(self) -> tuple[int, int]:
        return 2, 1

    def _apply(self, graph: CurvedOutputs, parts: Parts, count: int | None, chunk: int) -> Parts:
        if count is None or count <= chunk:
            return self._through(graph, parts, count, chunk)
        found: Parts = []
        for start in range(0, count, chunk):  # the tangents at the outputs are temporaries too
            number = min(chunk, count - start)
            own = self._through(graph, [part[start : start + number] for part in parts], number, chunk)
            found = found or [part.new_empty((count, *part.shape[1:])) for part in own]
            for whole, part in zip(found, own, strict=True):
                whole[start : start + number] = part
        return found

    def _through(self, graph: CurvedOutputs, parts: Parts, count: int | None, chunk: int) -> Parts:
        tangents = graph.push(parts, count, self._chosen, chunk)
        return graph.pull(graph.curvature.times(tangents, count), count, self._chosen, chunk)


def check_operands(predict: Any, loss: Any, where: Any, data: Any) -> None:
    """Raise unless `predict`, `loss`, `where` and `data` are what they should be, and in this order."""
    if _is_loss(predict) or _is_loss(where):
        raise InputError("predict, loss, where: in this order; a loss was given in another place.")
    if data is None:
        raise InputError("data: is None; expected an iterable of batches, for one batch data=[batch].")
    _signatures.check_predict(predict, True)


def _is_loss(value: Any) -> bool:
    """Whether it is one of PyTorch's losses: a module, or a function such as `F.mse_loss`."""
    if getattr(value, "__module__", "") == "torch.nn.functional":
        return any(word in value.__name__ for word in ("loss", "entropy", "kl_div"))
    return isinstance(value, nn.modules.loss._Loss)
