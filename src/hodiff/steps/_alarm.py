"""The alarm of a step: its result held against the eager loss,
from the same random state and the same buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hodiff._core import _settings
from hodiff._core._settings import RandomState
from hodiff._core._substitutes import ExactNorms
from hodiff.steps._backends import trees

if TYPE_CHECKING:
    from hodiff.steps._graph import StepGraph


class Before:
    """The state that a call of a graph is going to change: the tensors that it writes into,
    and the random state.
    """

    def __init__(self, graph: StepGraph, inputs: Sequence[Any]) -> None:
        self.tensors = [inputs[i] for i in graph.written]
        on_gpu = torch.cuda.is_initialized()
        self.random = RandomState(torch.device(torch.cuda.current_device() if on_gpu else "cpu"))
        self.values = [x.detach().clone() for x in self.tensors]

    def restore(self) -> None:
        """Put it back, by value: a batch norm does not count its writes; nor does this,
        for graphs that hold them.
        """
        self.random.restore()
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.data.copy_(value)


class EagerCheck:
    """A call held against the eager loss, which leaves behind it what that leaves.

    Attributes:
        difference: The largest difference, relative to what it is part of.
        wrong: What is wrong, in words that end a sentence; empty where nothing is.
    """

    def __init__(
        self,
        graph: StepGraph,
        inputs: Sequence[Any],
        before: Before,
        loss: Callable[[], Any],
        has_aux: bool,
    ) -> None:
        self.graph, self.inputs = graph, inputs
        self.before, self.loss = before, loss
        self.has_aux = has_aux
        self.leaves = [inputs[i] for i in graph.wanted]
        self.behind = has_graph(self.leaves)
        self.difference, self.wrong = 0.0, ""
        self.aux: Any = None

    def run(self, ours: Sequence[Tensor], aux: Any, outputs: Sequence[Any]) -> None:
        """Compare with what the eager loss gives; where that is not the same, all is as before the
        call.

        Args:
            ours: Loss and gradients.
            aux: What the loss returned beside, made of tensors among *outputs*.
            outputs: What the graph gave without its gradients.
        """
        graph, before = self.graph, self.before
        # any pass would run them, and they are for `backward()`
        if any(x._backward_hooks for x in self.leaves):
            return
        ours = [ours[0], *self._whole(ours[1:]), *(x.detach().clone() for x in before.tensors)]
        theirs = self._eager()
        if ours[0].dtype != theirs[0].dtype:
            self.wrong = (
                f"its result is {ours[0].dtype}, and the eager one {theirs[0].dtype}; "
                "PyTorch's tracer takes numbers of NumPy for tensors, so write float(number)"
            )
            before.restore()
            return
        self.difference = self._distance(ours, theirs)
        beside, most = _apart(aux, self.aux), max(MOST, 8 * graph.eps)
        limit = min(64 * graph.eps, most)
        if self.difference <= limit and beside <= most:
            return
        after = Before(graph, self.inputs)
        before.restore()
        moved = self._moved()
        results = graph.run(*moved)
        close = [
            results[0],
            *self._whole(results[graph.outputs :]),
            *(moved[i] for i in graph.written),
        ]
        # what only the inputs as they are get wrong is as far from there, and the eager loss is not
        rounding = min(self._distance(ours, close), self._distance(close, theirs))
        if self.difference > min(max(limit, 100 * rounding), most):
            self.wrong = (
                f"its result differs from the eager one by {self.difference:.0e}, "
                f"more than is taken for rounding ({min(100 * rounding, most):.0e})"
            )
        elif beside > max(most, 100 * _apart(aux, _replaced(aux, outputs, results))):
            kinds = "in its parts, their kinds, shapes or dtypes, or in what is not finite"
            kind = kinds if math.isinf(beside) else f"by {beside:.0e}"
            self.wrong = (
                f"its aux differs from the eager one {kind}, which rounding does not explain"
            )
        (before if self.wrong else after).restore()

    def _whole(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients of the inputs, with what reaches one by way of another that
        was computed from it.
        """
        if not self.behind:
            return gradients
        return torch.autograd.grad(self.leaves, self.leaves, gradients, retain_graph=True)

    def _eager(self) -> list[Any]:
        """The eager results from the same state, as far as they are compared: loss, gradients,
        buffers.
        """
        self.before.restore()
        with _settings.on(ExactNorms(self.graph.order)) if self.graph.exact else nullcontext():
            eager = self.loss()
        value, self.aux = eager if self.has_aux else (eager, None)
        with _settings.autocast(value.device.type):
            gradients = torch.autograd.grad(
                value, self.leaves, allow_unused=True, retain_graph=self.behind or None
            )
        return [value.detach(), *gradients, *self.before.tensors]

    def _distance(self, ours: Sequence[Tensor], theirs: Sequence[Tensor | None]) -> float:
        """The largest difference: of the loss by what its gradient makes of the point, of a
        gradient by all of it.
        """
        count = len(self.leaves)
        slope = _norm(ours[1 : 1 + count])
        scales = [_norm(ours[:1]) + slope * _norm(self.leaves), *[slope] * count]
        scales += [_norm([x]) for x in ours[1 + count :]]
        return max(
            _far(mine, other) / (scale or 1.0)
            for mine, other, scale in zip(ours, theirs, scales, strict=True)
        )

    def _moved(self) -> list[Any]:
        """The inputs, moved by the rounding of what is computed with them."""
        written = dict(zip(self.graph.written, self.before.values, strict=True))
        moved = []
        for index, x in enumerate(self.inputs):
            x = written[index].clone() if index in written else x
            if isinstance(x, Tensor) and x.is_floating_point():
                draws = torch.Generator("cpu").manual_seed(index)
                noise = (
                    torch.rand(x.shape, generator=draws, dtype=torch.float64, device="cpu") - 0.5
                )
                x = x.detach() * (1 + 2 * self.graph.eps * noise).to(x)
            moved.append(x)
        return moved


MOST = 0.01
"""What is never taken for rounding, but in formats of two digits.

Up to there a number beside the loss may be another: one sample of many that is counted, or not, by
rounding.
"""


def _apart(mine: Any, other: Any) -> float:
    """The distance of numbers beside the loss, each relative to what it is part of; infinite where
    they are no like numbers.
    """
    (ours, tree), (theirs, other_tree) = trees.tree_flatten(mine), trees.tree_flatten(other)
    if tree != other_tree:
        return math.inf
    return max(map(_far_beside, ours, theirs), default=0.0)


def _far_beside(mine: Any, other: Any) -> float:
    if isinstance(mine, (int, float)) and isinstance(other, (int, float)):
        mine, other = (
            torch.tensor(float(x), dtype=torch.float64, device="cpu") for x in (mine, other)
        )
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return (
            0.0
            if type(mine) is type(other) and not (isinstance(mine, str) and mine != other)
            else math.inf
        )
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return math.inf
    # an index of the largest of two equal ones is any
    inexact = mine.is_floating_point() or mine.is_complex()
    return _far(mine, other) / (_norm([mine]) or 1.0) if inexact else 0.0


def _replaced(aux: Any, outputs: Sequence[Any], results: Sequence[Any]) -> Any:
    """A structure like this one, with other results of the graph."""
    places = {id(x): index for index, x in enumerate(outputs) if isinstance(x, Tensor)}
    return trees.tree_map(lambda x: results[places[id(x)]] if id(x) in places else x, aux)


def has_graph(inputs: Sequence[Tensor]) -> bool:
    """Whether some of them were computed, maybe from others."""
    return not all(x.is_leaf for x in inputs)


def _far(mine: Tensor, other: Tensor | None) -> float:
    """The distance of two tensors; infinite and missing numbers are the same as themselves."""
    mine, other = (
        (torch.view_as_real(x) if x.is_complex() else x).detach().double()
        for x in (mine, torch.zeros_like(mine) if other is None else other)
    )
    same = (mine == other) | (mine.isnan() & other.isnan())
    far = float(torch.where(same, 0.0, mine - other).norm())
    return math.inf if math.isnan(far) else far


def _norm(tensors: Sequence[Tensor]) -> float:
    norms = [float(x.detach().abs().double().norm()) for x in tensors]
    return math.hypot(*[norm for norm in norms if math.isfinite(norm)])
