"""`FisherOperator`: the Fisher information, exact, sampled, or "empirical"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _tree
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed
from hodiff._core._where import Where
from hodiff.curvature._cache import Source
from hodiff.curvature._data import Batches, BatchWeight, Weighted
from hodiff.curvature._gauss_newton import BentOperator, check_given, check_predict, linearised, refuse_shortcut
from hodiff.curvature._losses import Bend, Loss, Outer, Scored, Softmax, check_loss, score
from hodiff.errors import InputError

KINDS = ("exact", "mc", "empirical")


@final
class FisherOperator(BentOperator):
    r"""The Fisher information matrix \(F = \sum_i \mathbb{E}\, g_i g_i^\top \,/\, \sum_b w_b\) as an operator.

    \(g_i\) is the gradient of the loss of sample *i*, a negative log-likelihood. `kind` says over what the
    expectation is taken:

    * `"exact"`: over labels drawn from the model's own distribution, in closed form. For cross-entropy and
      squared error it equals the Gauss-Newton matrix.
    * `"mc"`: the same by `samples` labels drawn for each position, once; an unbiased estimate.
    * `"empirical"`: no expectation, the labels of the data. It is not an estimate of the Fisher
      information, and differs from it at any distance from a perfect fit; some methods want it. A
      sample is one entry of the outputs' leading dimension.

    Args:
        predict: `predict(where, batch)` returns the outputs.
        loss: `nn.CrossEntropyLoss()`, `nn.MSELoss()` or `nn.BCEWithLogitsLoss()`, with targets `batch[1]`;
            for `"empirical"` also a function `loss(outputs, batch)` that returns `(sum, weight)`.
        where: As for `hodiff.HessianOperator`.
        data: A re-iterable of batches.
        kind: `"exact"`, `"mc"` or `"empirical"`.
        samples: How many labels `"mc"` draws for each position.
        generator: Where `"mc"` draws from; None is PyTorch's default generator.
        batch_weight: As for `hodiff.GaussNewtonOperator`.
        memory_budget: What the graphs may hold, as for `hodiff.HessianOperator`.
        chunk_size: How many of several vectors one pass takes.
        progress: Whether to show a bar over the batches.
        allow: `@once_differentiable` Functions to accept.

    Attributes:
        value: The value of the loss, a by-product.
        gradient: Its gradient by *where*, a by-product.

    Raises:
        InputError: A loss that is no likelihood for `"exact"` or `"mc"`: any function, class weights,
            label smoothing, probabilities as targets. (Use `hodiff.GaussNewtonOperator` there.)
        GraphError: As for `hodiff.HessianOperator`.

    Cost:
        As for `hodiff.GaussNewtonOperator`: two passes per product and batch. `"mc"` keeps the batches of
        the first pass, unless `data` is a sequence, so that its labels stay the same.

    Examples:
        Of a linear model with squared error, a Gaussian of variance 1/2: 2 X'X / n.

        >>> import torch, hodiff
        >>> X, y = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([1.0, -1.0])
        >>> predict = lambda w, batch: batch[0] @ w
        >>> hodiff.FisherOperator(predict, torch.nn.MSELoss(), torch.ones(2), data=[(X, y)], kind="exact").dense()
        tensor([[1., 2.],
                [2., 5.]])

    Reference:
        Martens, J. (2020). New insights and perspectives on the natural gradient method. JMLR 21(146).
        arXiv:1412.1193. Kunstner, F., Hennig, P., Balles, L. (2019). Limitations of the empirical Fisher
        approximation for natural gradient descent. arXiv:1905.12558.
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        loss: Loss,
        where: Any,
        *,
        data: Any,
        kind: str,
        samples: int = 1,
        generator: torch.Generator | None = None,
        batch_weight: BatchWeight = None,
        memory_budget: float = 0.5,
        chunk_size: int | str = "auto",
        progress: bool = False,
        allow: Allowed = (),
    ) -> None:
        check_predict(predict)
        check_loss(loss, batch_weight)
        check_given(data)
        _check_kind(kind, loss)
        _checks.check_integer(samples, "samples", least=1)
        batches = Batches(data, Where(where).tensors[0].device, keep=kind == "mc", progress=progress)
        weigh = Weighted(batches, batch_weight, "loss", bare=kind != "empirical")
        self._scores: dict[int, Tensor] = {}
        draw = (samples, generator, self._scores) if kind == "mc" else None
        bend = partial(_bend, kind, loss, weigh, allow, draw)
        super().__init__(Source(partial(linearised, predict, bend, allow), where, batches, memory_budget), chunk_size)
        self.kind = kind

    def refresh(self) -> FisherOperator:
        """Forget all graphs, and the labels drawn. Returns the operator."""
        self._scores.clear()
        self._source.refresh()
        return self

    def _route(self) -> str:
        return f"{self.kind}, linearised outputs"


def _check_kind(kind: str, loss: Any) -> None:
    if kind not in KINDS:
        raise InputError(f"kind: got {kind!r}, expected one of {', '.join(map(repr, KINDS))}.")
    if kind == "empirical":
        return
    if not isinstance(loss, nn.Module):
        raise InputError(
            f"loss: a function does not say what distribution it is the likelihood of, so kind={kind!r} needs "
            f"nn.CrossEntropyLoss(), nn.MSELoss() or nn.BCEWithLogitsLoss(). For any loss: kind='empirical', or "
            f"hodiff.GaussNewtonOperator."
        )
    weighted = getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None
    if weighted or getattr(loss, "label_smoothing", 0.0):
        raise InputError(
            f"loss: with class weights or label smoothing it is no likelihood, so its Fisher information is not "
            f"defined (kind={kind!r}). Use hodiff.GaussNewtonOperator, which accounts for them."
        )


Draw = tuple[int, torch.Generator | None, dict[int, Tensor]]


def _bend(
    kind: str, loss: Loss, weigh: Weighted, allow: Allowed, draw: Draw | None, ev: Graph, batch: Any, number: int
) -> tuple[Scored, Bend]:
    _, _, tree = _tree.flatten(ev.outputs)
    outputs = ev.tensors()
    found = score(loss, weigh, outputs, tree, batch, number, allow, partial(refuse_shortcut, ev))
    if kind == "empirical":
        _check_samples(outputs, loss)
        scores = [part.unsqueeze(0) for part in found.gradient]
        return found, Outer(scores, lambda s: tuple(range(1 - s.ndim, 0)))
    if kind == "exact" or draw is None:
        return found, found.bend
    if number not in draw[2]:
        draw[2][number] = _drawn(loss, found, outputs[0].detach(), draw[0], draw[1])
    return found, Outer([draw[2][number]], _position(found.bend, outputs[0]))


def _check_samples(outputs: list[Tensor], loss: Loss) -> None:
    least = 2 if isinstance(loss, nn.CrossEntropyLoss) else 1  # of a single dimension it is the classes
    lengths = {output.shape[0] if output.ndim >= least else None for output in outputs}
    if None in lengths or len(lengths) != 1:
        raise InputError(
            f"predict: kind='empirical' needs samples in the leading dimension of every output; got shapes "
            f"{[tuple(output.shape) for output in outputs]}."
        )


def _position(bend: Bend, z: Tensor) -> Callable[[Tensor], tuple[int, ...]]:
    """The dimensions within which scores are not independent: the classes; else none."""
    if isinstance(bend, Softmax):
        return lambda s: (bend.dim,)
    return lambda s: ()


def _drawn(loss: Any, found: Scored, z: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """The gradients by the outputs for labels drawn from the model: `(samples, *z.shape)`."""
    device = "cpu" if generator is None else generator.device
    shape = (samples, *z.shape)
    if isinstance(found.bend, Softmax):
        return found.bend.sampled(samples, generator)
    if isinstance(loss, nn.MSELoss):  # y - z is Gaussian of variance 1/2, and the score 2 (z - y)
        return torch.randn(shape, generator=generator, device=device, dtype=z.dtype).to(z.device) * 2**0.5
    uniform = torch.rand(shape, generator=generator, device=device, dtype=z.dtype).to(z.device)
    p = torch.sigmoid(z)
    return p - (uniform < p).to(z.dtype)
