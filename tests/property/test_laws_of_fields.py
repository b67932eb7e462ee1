"""Fields against `torch.func`, one sample at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacrev

import hodiff
from tests.support.inputs import Expression, direction, expressions, points
from tests.support.laws import Field, fields, law
from tests.support.properties import agree

D = torch.float64
routes = st.sampled_from(["auto", "jets", "reverse"])


def looped(function: object, x: Tensor) -> Tensor:
    return torch.stack([function(sample) for sample in x])


def nested(field: Field, route: str) -> str:
    """Mixed derivatives nest expansions, in which atan2 has no rule."""
    return "reverse" if "angle" in str(field.one) else route


def hessian(f: object) -> object:
    return jacrev(grad(f))


@law("laplacian", says="tr H and Σ Cᵢⱼ Hᵢⱼ by both routes")
@law("value_grad_and_laplacian", says="f, ∇f and tr H of one evaluation")
@law("second_order_operator", says="Σ Cᵢⱼ ∂ᵢⱼ + b·∇ + c")
@law("biharmonic", says="Δ Δ f")
@given(field=fields(), route=routes)
def test_second_order_fields(field: Field, route: str) -> None:
    f, x, one = field
    H = looped(hessian(one), x)
    trace = H.diagonal(dim1=1, dim2=2).sum(-1)
    agree(hodiff.laplacian(f, x, method=route), trace, floor=1e-9)
    v = torch.randn(3, *x.shape, dtype=D, generator=torch.Generator().manual_seed(6))
    agree(hodiff.laplacian(f, x, vectors=v, method=route), torch.einsum("kni,nij,knj->n", v, H, v) / 3, floor=1e-9)
    value, g, found = hodiff.value_grad_and_laplacian(f, x, method=route)
    agree((value, g, found), (f(x), looped(grad(one), x), trace), floor=1e-9)
    d = x.shape[1]
    C, b = torch.randn(d, d, dtype=D, generator=torch.Generator().manual_seed(5)), torch.linspace(-1, 1, d, dtype=D)
    expected = (C * H).sum((1, 2)) + looped(grad(one), x) @ b + 0.7 * f(x)
    agree(hodiff.second_order_operator(f, x, C, b, 0.7, method=route), expected, floor=1e-9)
    fourth = looped(lambda s: hessian(lambda t: hessian(one)(t).trace())(s).trace(), x)
    agree(hodiff.biharmonic(f, x, method=nested(field, route)), fourth, 1e-8, 1e-7)


@law("partial", says="∂³f/∂x₀²∂x₁ and ∂f/∂x₀ by both routes")
@law("partials", says="several of them in one call")
@given(field=fields(dimension=2), route=routes)
def test_partials(field: Field, route: str) -> None:
    f, x, one = field
    first = lambda i: lambda s: grad(one)(s)[i]
    third = looped(lambda s: hessian(first(1))(s)[0, 0], x)
    route = nested(field, route)
    agree(hodiff.partial(f, x, (0, 0, 1), method=route), third, 1e-8, 1e-8)
    found = hodiff.partials(f, x, [0, (1, 1)], method=route)
    agree(found[0,], looped(first(0), x), floor=1e-9)
    agree(found[1, 1], looped(hessian(one), x)[:, 1, 1].clone(), floor=1e-9)


@law("derivatives_of", says="∂f/∂x₁ and ∂²f/∂x₀∂x₁ of a tensor already computed")
@given(field=fields(dimension=2))
def test_derivatives_of_a_tensor(field: Field) -> None:
    f, one = field.f, field.one
    x = field.x.clone().requires_grad_()
    d = hodiff.derivatives_of(f(x), x)
    agree(d[1].detach(), looped(grad(one), field.x)[:, 1].clone(), floor=1e-9)
    agree(d[0, 1].detach(), looped(hessian(one), field.x)[:, 0, 1].clone(), floor=1e-9)


@law("divergence", says="tr J")
@law("value_and_divergence", says="f and tr J of one evaluation")
@law("curl", says="∇ × F in three dimensions")
@given(field=fields(dimension=3, outputs=True), route=routes)
def test_vector_fields(field: Field, route: str) -> None:
    f, x, one = field
    J = looped(jacrev(one), x)
    trace = J.diagonal(dim1=1, dim2=2).sum(-1)
    agree(hodiff.divergence(f, x, method=route), trace, floor=1e-9)
    agree(hodiff.value_and_divergence(f, x, method=route), (f(x), trace), floor=1e-9)
    v = torch.randn(2, *x.shape, dtype=D, generator=torch.Generator().manual_seed(6))
    form = torch.einsum("kni,nij,knj->n", v, J, v) / 2
    agree(hodiff.divergence(f, x, vectors=v, method=route), form, floor=1e-9)
    agree(hodiff.value_and_divergence(f, x, vectors=v, method=route), (f(x), form), floor=1e-9)
    expected = torch.stack([J[:, 2, 1] - J[:, 1, 2], J[:, 0, 2] - J[:, 2, 0], J[:, 1, 0] - J[:, 0, 1]], -1)
    agree(hodiff.curl(f, x, method=route), expected, floor=1e-9)


@law("jet", says="dᵏ/dtᵏ f(x(t)), k up to 3, along a curved path")
@given(f=expressions(leaves=4), x=points)
def test_jets(f: Expression, x: Tensor) -> None:
    v, w = direction(x), direction(x, seed=1)
    weight = torch.cos(torch.arange(x.numel(), dtype=D)).reshape(x.shape)
    along = lambda t: (weight * f(x + t * v + t**2 / 2 * w)).sum()
    value, found = hodiff.jet(f, x, [v, w, torch.zeros_like(x)])
    agree(value, f(x))
    zero = torch.zeros((), dtype=D)
    for coefficient in found:
        along = grad(along)
        agree((weight * coefficient).sum(), along(zero), 1e-8, 1e-8)
