"""Whether samples are independent, as `batch_ndim` supposes: a test of it,
for one more evaluation.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff._core import _arguments, _reverse, _settings
from hodiff._core._call import Call
from hodiff._core._graph import OutputGraph
from hodiff.errors import BatchMixingWarning, InputError


def check(settled: Call) -> None:
    """Warn, and say by how much, where the outputs of one sample depend on the points of another.

    The gradient of a sum of outputs is compared with that of a weighted sum, which multiplies each
    sample's own gradient by its weight, and nothing else. That is done beside the point, since at a
    special one (zeros, equal samples) what mixes may have no derivative; a tensor already computed
    is taken where it is. Draws of `f` in this evaluation leave no trace in the default generators.
    """
    batch_ndim, where, batch = settled.batch_ndim, settled.where, settled.batch
    if not batch_ndim:
        raise InputError(
            "check_independence: with batch_ndim=0 there are no samples; pass batch_ndim=1 as well."
        )
    count = batch.numel()
    if count < 2:
        return
    ours = torch.Generator().manual_seed(0)
    random = _settings.RandomState(where.tensors[0].device)
    # whose parameters are what they are
    if settled.builds_graph and not where.module_slices:
        where = copy.copy(where)
        where.tensors = _beside(where.tensors, ours)
    # Without batch_ndim: what is measured says more than the warning about BatchNorm.
    alone = settled._replace(where=where, create_graph=False, order=1, strict=None, keep=False)
    with OutputGraph(alone._replace(batch_ndim=0, batch=torch.Size())) as graph:
        random.restore()
        outputs = graph.tensors()
        if any(output.shape[:batch_ndim] != batch for output in outputs):
            return  # the call itself says so
        weights = torch.linspace(-1, 1, count, dtype=torch.float64, device="cpu")[
            torch.randperm(count, generator=ours, device="cpu")
        ]
        given = [_cotangents(output, weights, batch_ndim, ours) for output in outputs]
        rows = lambda start, stop: [three[start:stop] for three in given]  # noqa: E731
        passes = _reverse.vjps(graph, outputs, rows, 3, chunk_size=1)
        products = _reverse.stacked(graph, passes, 3, graph.leaves)
    _judge(products, weights)


def _beside(tensors: Sequence[Tensor], ours: torch.Generator) -> list[Tensor]:
    """A point 1 % away, on the same side of zero; zeros become small positive numbers."""
    moved = []
    with _settings.grad_mode(False):
        for leaf in tensors:
            noise = torch.rand(leaf.shape, generator=ours, dtype=torch.float32, device="cpu").to(
                leaf.device, leaf.dtype
            )
            size = leaf.abs().mean()
            step = torch.where(leaf == 0, torch.where(size > 0, size, 1), leaf)
            moved.append(leaf + (0.005 + 0.005 * noise) * step)
    return moved


def _cotangents(output: Tensor, weights: Tensor, batch_ndim: int, ours: torch.Generator) -> Tensor:
    """Random numbers for the entries of one output, the same for each sample; those by its weight,
    and by one.
    """
    event = output.shape[batch_ndim:]
    # Ones would not do: the sum of a softmax has no derivative.
    entries = (
        torch.randn(event, generator=ours, dtype=torch.float64, device="cpu")
        if event.numel() > 1
        else torch.ones(event, device="cpu")
    )
    plain = entries.to(torch.float64).expand(output.shape)
    weighted = plain * weights.reshape(*output.shape[:batch_ndim], *[1] * len(event))
    return torch.stack([plain, weighted, _WEIGHT * plain]).to(output)


_WEIGHT = 0.7
"""One for all samples, which shows how a pass rounds: it mixes nothing."""


def _judge(products: list[Tensor], weights: Tensor) -> None:
    errors = torch.zeros(2, weights.numel(), dtype=torch.float64, device="cpu")
    sizes, eps = errors[0].clone(), 0.0
    factors = torch.stack([weights, torch.full_like(weights, _WEIGHT)]).unsqueeze(-1)
    for three in products:
        if not three.numel():
            continue
        plain, *others = three.cpu().double().reshape(3, weights.numel(), -1)
        off = (plain * factors - torch.stack(others)).nan_to_num(0, 0, 0)
        errors = errors.maximum(off.abs().amax(2))
        sizes = sizes.maximum(plain.nan_to_num(0, 0, 0).abs().amax(1))
        eps = max(eps, torch.finfo(three.dtype).eps)
    # Each by its own size, and no smaller than the usual one: one that is much larger hides nothing
    # of the others.
    usual = sizes[sizes > 0].median() if sizes.any() else 0.0
    shares = (errors / sizes.clamp(min=usual)).nan_to_num(0, float("inf"), 0)
    share, rounding = map(float, shares.amax(1))
    tolerance = max(100 * rounding, 8 * eps if eps > 1e-3 else eps**0.75)
    if share > tolerance:
        warnings.warn(
            f"the samples of f are not independent: one random probe finds derivatives of one "
            f"sample's output with respect to another's input of up to {share:.2g} times the size "
            f"of a sample's own gradient. The result is then not each sample's own derivative. "
            f"Usual causes: BatchNorm in training mode, minibatch statistics, an operation over "
            f"the wrong dimension; or one point (D,) in place of points (N, D): give x[None], or "
            f"batch_ndim=0.",
            BatchMixingWarning,
            stacklevel=_arguments.outside(),
        )
