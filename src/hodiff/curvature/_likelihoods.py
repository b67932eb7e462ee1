"""Two more negative log-likelihoods, written out: a Gaussian with its variance, and counts.

Their output Hessian depends on the labels, so the Fisher information, its expectation, is another matrix.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hodiff._core._random_vectors import draw
from hodiff.curvature._output_curvature import DiagonalHessian, OutputCurvature, Scored, check_shapes
from hodiff.curvature._space import Parts, sum_dtype
from hodiff.errors import InputError


@final
class PairHessian(OutputCurvature):
    """Of two outputs that meet entry by entry: a symmetric matrix of two rows for each."""

    def __init__(self, first: Tensor, mixed: Tensor | float, second: Tensor) -> None:
        self._first = first
        self._mixed = mixed
        self._second = second

    def times(self, tangents: Parts, count: int | None) -> Parts:
        """See `OutputCurvature`."""
        a, b = tangents
        return [self._first * a + self._mixed * b, self._mixed * a + self._second * b]


def gaussian(loss: nn.GaussianNLLLoss, outputs: Parts, target: Tensor) -> Scored:
    r"""\(\tfrac12 (\log v + (y - m)^2 / v)\) of outputs (m, v); a variance below `eps` counts as `eps`."""
    m, v = _mean_and_variance(outputs, loss)
    check_shapes(m, target)
    r = m - target
    value = F.gaussian_nll_loss(m, target, v, loss.full, loss.eps, reduction="sum")
    v = v.clamp(min=loss.eps)
    hessian = PairHessian(1 / v, -r / v**2, r**2 / v**3 - 0.5 / v**2)
    weight = float(m.numel()) if loss.reduction == "mean" else None
    gradient = [r / v, 0.5 * (1 / v - r**2 / v**2)]
    return Scored(value, weight, gradient, hessian, PairHessian(1 / v, 0.0, 0.5 / v**2))


def poisson(loss: nn.PoissonNLLLoss, z: Tensor, target: Tensor) -> Scored:
    r"""\(e^z - y z\), or \(z - y \log (z + \epsilon)\) without `log_input`."""
    check_shapes(z, target)
    y = target.to(z)
    value = F.poisson_nll_loss(z, y, loss.log_input, loss.full, eps=loss.eps, reduction="sum")
    weight = float(z.numel()) if loss.reduction == "mean" else None
    if loss.log_input:
        return Scored(value, weight, [z.exp() - y], DiagonalHessian(z.exp()))
    rate = z + loss.eps
    return Scored(value, weight, [1 - y / rate], DiagonalHessian(y / rate**2), DiagonalHessian(z / rate**2))


def scores_of(
    loss: nn.GaussianNLLLoss | nn.PoissonNLLLoss, outputs: Parts, samples: int, generator: torch.Generator | None
) -> Parts:
    """The gradients by the outputs for labels drawn from the model: `(samples, *shape)` on each."""
    if isinstance(loss, nn.GaussianNLLLoss):
        m, v = _mean_and_variance(outputs, loss)
        v = v.clamp(min=loss.eps)
        normal = draw((samples, *m.shape), m, "gaussian", generator)
        return [-normal / v.sqrt(), 0.5 * (1 - normal**2) / v]
    (z,) = outputs
    rate = z.exp() if loss.log_input else z
    device = z.device if generator is None else generator.device
    wide = rate.to(device, sum_dtype(z.dtype)).expand(samples, *z.shape).contiguous()
    counts = torch.poisson(wide, generator=generator).to(z)
    return [rate - counts if loss.log_input else 1 - counts / (z + loss.eps)]


def _mean_and_variance(outputs: Parts, loss: nn.Module) -> tuple[Tensor, Tensor]:
    if len(outputs) != 2 or outputs[0].shape != outputs[1].shape:
        raise InputError(
            f"loss: {type(loss).__name__} takes a mean and a variance of one shape, (mean, var), and predict returned "
            f"{[tuple(output.shape) for output in outputs]}."
        )
    return outputs[0].detach(), outputs[1].detach()
