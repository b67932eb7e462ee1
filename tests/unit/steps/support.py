"""What the tests of steps share: how two results are compared, and what ran."""

import pytest
import torch
from torch import Tensor, nn

from hodiff._core._versions import RELEASE

MARKS = [
    pytest.mark.skipif(RELEASE < (2, 13), reason="compile_step asks for PyTorch 2.13"),
    pytest.mark.filterwarnings("default::hodiff.HodiffWarning", "ignore:.*:DeprecationWarning"),
]


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def off(ours: list, theirs: list) -> float:
    """The largest difference, relative to what is largest; infinite where one of two is missing."""
    scale = max([x.abs().max().item() for x in theirs if x is not None and x.numel()], default=1.0) or 1.0
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if (mine is None) != (other is None) or (mine is not None and mine.shape != other.shape):
            return float("inf")
        if mine is not None and mine.numel():
            worst = max(worst, (mine - other).abs().max().item() / scale)
    return worst


def tangent(net: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(net, (x,), (torch.ones_like(x),))[1].square().mean()


def of_gradient_alone(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].square().mean()
