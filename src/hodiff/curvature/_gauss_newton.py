"""`GaussNewtonOperator`: the part of a Hessian that comes from the loss, J' H_out J."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from hodiff._core._call import Allowed
from hodiff._core._where import Where
from hodiff.curvature._cache import GraphCache
from hodiff.curvature._data import Batches, BatchWeight, Weighted
from hodiff.curvature._data_operator import ChunkSize
from hodiff.curvature._losses import Loss, OutputCurvature, Scored, check_loss
from hodiff.curvature._pullback import PullbackBuilder, PullbackOperator, check_operands
from hodiff.curvature._shares import ProcessGroup, shared
from hodiff.curvature._space import Parts


@final
@dataclass(frozen=True)
class GaussNewtonBuilder(PullbackBuilder):
    """With the Hessian of the loss by the outputs."""

    def curvature(self, scored: Scored, outputs: Parts, number: int) -> OutputCurvature:
        """That of the loss."""
        return scored.curvature


@final
class GaussNewtonOperator(PullbackOperator):
    r"""The generalised Gauss-Newton matrix \(G = \sum_b J_b^\top H_b J_b \,/\, \sum_b w_b\) as an operator.

    \(J_b\) is the Jacobian of the network's outputs on a batch, \(H_b\) the Hessian of the loss (its sum
    over the batch) by these outputs. For a convex loss *G* is positive semi-definite; it is the
    Hessian where the network is linear or fits its targets exactly.

    What counts as the outputs is part of the definition. Of a Gaussian at log σ = 0 and a residual of 2, outputs
    (m, log σ) give the matrix [[1, -4], [-4, 8]]; the redundant (m, log σ, σ) of the same function, whose quadratic
    term takes σ, give [[1, -4], [-4, 12]], since σ = exp(log σ) then belongs to the network, which is linearised.

    Args:
        predict: `predict(where, batch)` returns the outputs, a tensor or a container of tensors.
        loss: `loss(outputs, batch)` returns `(sum, weight)`, the sum over the batch and what it is
            divided by, as for `hodiff.HessianOperator` (**never a mean beside a weight**); its Hessian is taken
            exactly. Or an `nn.CrossEntropyLoss`, `nn.MSELoss`, `nn.BCEWithLogitsLoss`, `nn.PoissonNLLLoss` or
            `nn.GaussianNLLLoss` (of outputs mean and variance), whose Hessian is written out; the targets are then
            `batch[1]`, and class weights, ignored positions and label smoothing are accounted for, over all
            batches together.
        where: As for `hodiff.HessianOperator`.
        data: A re-iterable of batches.
        batch_weight: As for `hodiff.HessianOperator`, for a loss that returns a bare mean.
        memory_budget: What the graphs may hold, as for `hodiff.HessianOperator`.
        chunk_size: How many of several vectors one pass takes.
        progress: Whether to show a bar over the batches.
        process_group: The processes that share the data, as for `hodiff.HessianOperator`.
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
        data: Any = None,
        batch_weight: BatchWeight = None,
        memory_budget: float = 0.5,
        chunk_size: ChunkSize = "auto",
        progress: bool = False,
        process_group: ProcessGroup | None = None,
        allow: Allowed = (),
    ) -> None:
        check_operands(predict, loss, where, data)
        check_loss(loss, batch_weight)
        point = Where(where)
        batches = Batches(data, point.tensors[0].device, progress=progress, shared=process_group is not None)
        builder = GaussNewtonBuilder(predict, loss, Weighted(batches, batch_weight, "loss"), allow)
        shares = shared(process_group, point, data, type(self).__name__, chunk_size)
        super().__init__(GraphCache(builder, where, batches, memory_budget, shares), chunk_size)
        self._closed_form = isinstance(loss, torch.nn.Module)

    def _route(self) -> str:
        return "linearised outputs, " + ("closed-form" if self._closed_form else "differentiated") + " loss"
