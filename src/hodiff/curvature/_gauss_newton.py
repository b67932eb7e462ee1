"""`GaussNewtonOperator`: the part of a Hessian that comes from the loss, J' H_out J."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from hodiff._core import _nodes, _reverse, _tree
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed
from hodiff._core._where import Where
from hodiff.curvature._cache import Piece, Source
from hodiff.curvature._data import NONE, Batches, BatchWeight, Weighted
from hodiff.curvature._from_data import Parts, SummedOperator
from hodiff.curvature._losses import Bend, Loss, Scored, check_loss, score
from hodiff.errors import GraphError, InputError


@final
class Linearised(Piece):
    """The outputs of one batch, linearised: J v and J' u by one pass each.

    `pulled` is J' u as a function of `cotangents`; its derivative by them in the direction v is J v.
    """

    def __init__(self, ev: Graph, cotangents: Parts, pulled: Parts) -> None:
        self.ev, self.cotangents, self.pulled = ev, cotangents, pulled
        self.outputs = ev.tensors()
        self.bend: Bend | None = None

    @property
    def roots(self) -> list[Tensor]:
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


class BentOperator(SummedOperator):
    """J' B J, with a matrix B over the outputs of each batch."""

    @property
    def _passes(self) -> tuple[int, int]:
        return 2, 1

    def _apply(self, piece: Piece, parts: Parts, count: int | None, chunk: int) -> Parts:
        if not isinstance(piece, Linearised) or piece.bend is None:
            raise TypeError("expected a linearised batch")
        if count is None:
            return self._through(piece, piece.bend, parts, None, 1)
        found: Parts | None = None
        for start in range(0, count, chunk):  # the tangents at the outputs are temporaries too
            number = min(chunk, count - start)
            some = [part[start : start + number] for part in parts]
            own = self._through(piece, piece.bend, some, number, chunk)
            if number == count:
                return own
            if found is None:
                found = [part.new_empty((count, *part.shape[1:])) for part in own]
            for whole, part in zip(found, own, strict=True):
                whole[start : start + number] = part
        return found or parts

    def _through(self, piece: Linearised, bend: Bend, parts: Parts, count: int | None, chunk: int) -> Parts:
        tangents = piece.push(parts, count, self._chosen, chunk)
        return piece.pull(bend.times(tangents, count), count, self._chosen, chunk)


@final
class GaussNewtonOperator(BentOperator):
    r"""The generalised Gauss-Newton matrix \(G = \sum_b J_b^\top H_b J_b \,/\, \sum_b w_b\) as an operator.

    \(J_b\) is the Jacobian of the network's outputs on a batch, \(H_b\) the Hessian of the loss (its sum
    over the batch) by these outputs. For a convex loss *G* is positive semi-definite; it is the
    Hessian where the network is linear or fits its targets exactly.

    Args:
        predict: `predict(where, batch)` returns the outputs, a tensor or a container of tensors.
        loss: `loss(outputs, batch)` returns `(sum, weight)`, the sum over the batch and what it is
            divided by. Or an `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss`, whose
            Hessian is written out; the targets are then `batch[1]`, and class weights, ignored
            positions and label smoothing are accounted for, over all batches together.
        where: As for `hodiff.HessianOperator`.
        data: A re-iterable of batches.
        batch_weight: As for `hodiff.HessianOperator`, for a loss that returns a bare mean.
        memory_budget: What the graphs may hold, as for `hodiff.HessianOperator`.
        chunk_size: How many of several vectors one pass takes.
        progress: Whether to show a bar over the batches.
        allow: `@once_differentiable` Functions to accept.

    Attributes:
        value: The value of the loss, a by-product.
        gradient: Its gradient by *where*, a by-product.

    Raises:
        InputError: A loss whose sums and weights are not known; or as for `hodiff.HessianOperator`.
        GraphError: The loss reaches the parameters other than through the outputs (add a regulariser's
            part to the operator: `G + 0.1`); or as for `hodiff.HessianOperator`.

    Cost:
        The first product evaluates `predict` once per batch, and takes one pass to linearise it. Every
        product takes two passes per batch (J v and J' u); a loss that is not written out one more,
        through the loss alone. Memory as for `hodiff.HessianOperator`.

    Examples:
        For least squares it is the Hessian, 2 X'X / n:

        >>> import torch, hodiff
        >>> X, y = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2)
        >>> predict = lambda w, batch: batch[0] @ w
        >>> G = hodiff.GaussNewtonOperator(predict, torch.nn.MSELoss(), torch.ones(2), data=[(X, y)])
        >>> G.dense()
        tensor([[1., 2.],
                [2., 5.]])

    Reference:
        Schraudolph, N. N. (2002). Fast curvature matrix-vector products for second-order gradient descent.
        Neural Computation 14(7). doi:10.1162/08997660260028683.
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        loss: Loss,
        where: Any,
        *,
        data: Any,
        batch_weight: BatchWeight = None,
        memory_budget: float = 0.5,
        chunk_size: int | str = "auto",
        progress: bool = False,
        allow: Allowed = (),
    ) -> None:
        check_predict(predict)
        check_loss(loss, batch_weight)
        check_given(data)
        batches = Batches(data, Where(where).tensors[0].device, progress=progress)
        bend = partial(_hessian_of_loss, loss, Weighted(batches, batch_weight, "loss"), allow)
        build = partial(linearised, predict, bend, allow)
        super().__init__(Source(build, where, batches, memory_budget), chunk_size)
        self._closed_form = isinstance(loss, torch.nn.Module)

    def _route(self) -> str:
        return "linearised outputs, " + ("closed-form" if self._closed_form else "differentiated") + " loss"


def check_predict(predict: Any) -> None:
    """Raise unless `predict` is a function."""
    if not callable(predict) or isinstance(predict, type):
        kind = predict.__name__ if isinstance(predict, type) else type(predict).__name__
        raise InputError(f"predict: is {kind}; expected a function predict(where, batch) that returns the outputs.")


def check_given(data: Any) -> None:
    """Raise without data."""
    if data is None:
        raise InputError("data: is None; expected an iterable of batches, for one batch data=[batch].")


def _hessian_of_loss(
    loss: Loss, weigh: Weighted, allow: Allowed, ev: Graph, batch: Any, number: int
) -> tuple[Scored, Bend]:
    _, _, tree = _tree.flatten(ev.outputs)
    found = score(loss, weigh, ev.tensors(), tree, batch, number, allow, partial(refuse_shortcut, ev))
    return found, found.bend


MakeBend = Callable[[Graph, Any, int], tuple[Scored, Bend]]


def linearised(
    predict: Callable[..., Any], make: MakeBend | None, allow: Allowed, where: Where, batch: Any, number: int
) -> Linearised:
    """Evaluate one batch and linearise it; the gradient of the loss comes free, as J' of the outputs' gradient."""
    given = () if batch is NONE else (batch,)
    with Graph(call(predict, where, passes=2, create_graph=False, args=given, keep=True, allow=allow)) as ev:
        random = ev.drew_random()
        outputs = ev.tensors()
        calls_back = _nodes.runs_hooks(_nodes.survey(outputs))
        if make is None:
            scored, bend = None, None
            cotangents = [torch.ones_like(output, requires_grad=True) for output in outputs]
        else:
            scored, bend = make(ev, batch, number)
            cotangents = [part.detach().clone().requires_grad_() for part in scored.gradient]
        pulled = _reverse.transposed(ev, outputs, cotangents)
    piece = Linearised(ev, cotangents, pulled)
    piece.bend = bend
    piece.random, piece.calls_back = random, calls_back
    piece.gradient = [part.detach() for part in pulled]
    piece.value = torch.zeros((), device=outputs[0].device) if scored is None else scored.value
    piece.weight = None if scored is None else scored.weight
    return piece


def refuse_shortcut(ev: Graph, value: Tensor) -> None:
    """Raise where a loss reaches the parameters other than through the outputs."""
    reached = _nodes.survey([value]).visited
    for leaf, name in zip(ev.leaves, ev.where.names, strict=True):
        if _nodes.node_of(leaf) in reached:
            raise GraphError(
                f"loss reaches {name} other than through the outputs, and that part would be missing from J' H J. "
                f"Leave a regulariser out of the loss and add its Hessian to the operator: G + 0.1 for 0.05 |w|^2."
            )
