"""A result with `create_graph` that is a constant of x is still a function of x, with derivative zero: no error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff._core import _tree

D = torch.float64
GRAPH: dict[str, Any] = {"create_graph": True}


def line(z: Tensor) -> Tensor:
    return 2 * z.sum(-1)


def square(z: Tensor) -> Tensor:
    return z.square().sum(-1)


def named(name: str, f: Callable[[Tensor], Tensor], method: str) -> Callable[[Tensor], Any]:
    return lambda x: getattr(hodiff, name)(f, x, method=method, **GRAPH)


def nth(power: int, order: int) -> Callable[[Tensor], Any]:
    return lambda x: hodiff.nth_derivative(lambda z: z**power, x, order, **GRAPH)


def double(z: Tensor) -> Tensor:
    return 2 * z


EYE = torch.eye(2, dtype=D)
RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: hodiff.grad(line, x, batch_ndim=1, **GRAPH),
    "value_and_grad": lambda x: hodiff.value_and_grad(line, x, batch_ndim=1, **GRAPH)[1],
    "jacobian": lambda x: hodiff.jacobian(double, x, **GRAPH),
    "jvp": lambda x: hodiff.jvp(double, x, torch.ones_like(x), **GRAPH),
    "vjp": lambda x: hodiff.vjp(double, x, torch.ones_like(x), **GRAPH),
    "hvp": lambda x: hodiff.hvp(square, x, torch.ones_like(x), batch_ndim=1, **GRAPH),
    "hessian": lambda x: hodiff.hessian(square, x, batch_ndim=1, **GRAPH),
    "value_grad_and_hessian": lambda x: hodiff.value_grad_and_hessian(square, x, batch_ndim=1, **GRAPH)[2],
    "hessian_diagonal": lambda x: hodiff.hessian_diagonal(square, x, batch_ndim=1, **GRAPH),
    "cross_hessian": lambda x: hodiff.cross_hessian(lambda a, b: (a * b).sum(), x, x.detach().clone(), **GRAPH),
    **{
        f"nth_derivative, {n}": lambda x, n=n: hodiff.nth_derivative(lambda z: z**n, x, n, **GRAPH) for n in range(1, 7)
    },
    **{f"above it, {n}": nth(n, n + 1) for n in range(1, 7)},
    "derivatives": lambda x: hodiff.derivatives(lambda z: z**3, x, 5, **GRAPH)[3:],
    "jet": lambda x: hodiff.jet(double, x, [torch.ones_like(x)] * 3, **GRAPH)[1],
    "jet, along a path": lambda x: hodiff.jet(lambda z: z.detach() * z, x.detach(), [x.detach(), 0 * x], **GRAPH)[1][1],
    "partial": lambda x: hodiff.partial(square, x, (0, 0), **GRAPH),
    "partial, mixed": lambda x: hodiff.partial(square, x, (0, 0, 1, 1), **GRAPH),
    **{
        f"{name}, {method}": lambda x, name=name, method=method: getattr(hodiff, name)(
            square, x, method=method, **GRAPH
        )
        for name in ("laplacian", "biharmonic")
        for method in ("jets", "reverse")
    },
    **{
        f"{name}, {method}": lambda x, name=name, method=method: getattr(hodiff, name)(
            double, x, method=method, **GRAPH
        )
        for name in ("divergence", "curl")
        for method in ("jets", "reverse")
    },
    **{
        f"partials, {m}": lambda x, m=m: hodiff.partials(square, x, [(0, 0), (0, 1), (0,) * 3], method=m, **GRAPH)
        for m in ("auto", "jets", "reverse")
    },
    **{
        f"second_order_operator, {m}": lambda x, m=m: hodiff.second_order_operator(square, x, EYE, method=m, **GRAPH)
        for m in ("jets", "reverse")
    },
    "laplacian, estimated": lambda x: hodiff.laplacian(square, x, samples=3, **GRAPH).value,
    "value_grad_and_laplacian": lambda x: hodiff.value_grad_and_laplacian(square, x, **GRAPH)[2],
    "value_and_divergence": lambda x: hodiff.value_and_divergence(double, x, **GRAPH)[1],
    "derivatives_of": lambda x: (
        hodiff.derivatives_of(square(x), x)[0, 0],
        hodiff.derivatives_of(square(x), x)[0, 0, 1],
    ),
    "gradient_penalty": lambda x: hodiff.gradient_penalty(line, x, **GRAPH),
    "jacobian_penalty": lambda x: hodiff.jacobian_penalty(double, x, **GRAPH),
    "curvature_penalty": lambda x: hodiff.curvature_penalty(square, x, **GRAPH),
    "eikonal_penalty": lambda x: hodiff.eikonal_penalty(line, x, **GRAPH),
}


@pytest.mark.filterwarnings("ignore:no trainable tensor is reachable:hodiff.HodiffWarning")
@pytest.mark.parametrize("name", RESULTS)
def test_the_derivative_of_a_constant_result_is_zero(name: str) -> None:
    x = torch.tensor([[0.3, 0.5], [0.7, 0.2]], dtype=D, requires_grad=True)
    leaves = [leaf for leaf in _tree.flatten(RESULTS[name](x))[0] if isinstance(leaf, Tensor)]
    assert leaves
    for leaf in leaves:
        (found,) = torch.autograd.grad(leaf.sum(), x, retain_graph=True)
        torch.testing.assert_close(found, torch.zeros_like(x), rtol=0.0, atol=1e-12)
