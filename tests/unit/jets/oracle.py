"""Taylor coefficients without Taylor mode: nested reverse passes of plain PyTorch along a path."""

import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hodiff.jets import _pushforward
from hodiff.jets._series import entry


def derivative(output: Tensor, by: Tensor) -> Tensor:
    if not output.requires_grad:
        return torch.zeros_like(by)
    found = torch.autograd.grad(output, by, create_graph=True, allow_unused=True, materialize_grads=True)
    return found[0]


def nested(f, x: Tensor, path: list[Tensor], order: int) -> list[Tensor]:
    """Coefficients 0 to `order` of f(x + t path[0] + t² path[1] + ...)."""
    t = torch.zeros((), dtype=x.dtype, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):  # the fused one has no second derivative
        y = f(x + sum(c * t**k for k, c in enumerate(path, 1)))
    u = torch.ones_like(y, requires_grad=True)
    g, out = (u * y).sum(), [y]
    for k in range(1, order + 1):
        g = derivative(g, t)
        out.append(derivative(g, u) / math.factorial(k))
    return out


def pushed(f, x: Tensor, path: list[Tensor], order: int) -> list[Tensor]:
    """The same by jets."""
    output, expansion = _pushforward.push(f, [x], [[c.unsqueeze(0) for c in path[:order]]], order)
    series = _pushforward.coefficients(output, expansion)
    return [series[0], *(entry(series, k, 1)[0] for k in range(1, order + 1))]


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float(((got - expected).abs().max() / (1 + expected.abs().max())).detach())


def lean(loss, points, directions, **options):
    """The derivative along the directions, and its gradient: Hessian-vector product."""
    points = [x.detach().requires_grad_() for x in points]
    seeds = [[v.unsqueeze(0)] for v in directions]
    output, expansion = _pushforward.push(loss, points, seeds, 1, mixes=True, **options)
    slope = _pushforward.coefficients(output, expansion)[1].squeeze(0)
    return slope.detach(), torch.autograd.grad(slope, points, materialize_grads=True, allow_unused=True)


def twice(loss, points, directions):
    """The same by PyTorch's double backward."""
    points = [x.detach().requires_grad_() for x in points]
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(loss(*points), points, create_graph=True)
    slope = sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))
    return slope.detach(), torch.autograd.grad(slope, points, materialize_grads=True, allow_unused=True)
