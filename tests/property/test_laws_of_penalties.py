"""Each penalty against its formula, by per-sample derivatives of `torch.func`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacrev, vjp

import hodiff
from tests.support.inputs import direction
from tests.support.laws import Field, Setting, fields, gradient, law, settings
from tests.support.properties import agree

D = torch.float64
# The functions drawn have no parameters: nothing could be trained by these penalties.
pytestmark = pytest.mark.filterwarnings("ignore:no trainable tensor:hodiff.HodiffWarning")
reductions = st.sampled_from(["mean", "sum"])


def looped(function: object, x: Tensor) -> Tensor:
    return torch.stack([function(sample) for sample in x])


def reduced(each: Tensor, how: str) -> Tensor:
    return each.mean() if how == "mean" else each.sum()


def apart(norms: Tensor, target: float) -> Tensor:
    return (norms - target).square()


def tilted(field: Field) -> Field:
    """Away from a vanishing gradient, where the norm has a kink."""
    f = lambda z: field.f(z) + 3 * z.sum(-1)
    return Field(f, field.x, f)


@law("gradient_penalty", says="w · mean |‖∇f(xᵢ)‖ - t|²")
@law("r1_penalty", "r2_penalty", says="γ/2 · mean ‖∇f(xᵢ)‖²")
@law("eikonal_penalty", says="λ · mean (‖∇f(xᵢ)‖ - 1)²")
@given(field=fields(), how=reductions)
def test_penalties_of_gradients(field: Field, how: str) -> None:
    f, x, one = tilted(field)
    norms = looped(grad(one), x).norm(dim=1)
    agree(hodiff.gradient_penalty(f, x, target=0.7, weight=3.0, reduction=how), 3 * reduced(apart(norms, 0.7), how))
    agree(hodiff.r1_penalty(f, x, reduction=how), 5 * reduced(norms**2, how))
    agree(hodiff.r2_penalty(f, x, gamma=1.0, reduction=how), reduced(norms**2, how) / 2)
    agree(hodiff.eikonal_penalty(f, x, reduction=how), 0.1 * reduced(apart(norms, 1.0), how), floor=1e-10)


@law("wgan_gp_penalty", says="10 · mean (‖∇f(x̂ᵢ)‖ - 1)² at the points that `interpolate` draws")
@law("dragan_penalty", says="the same without noise; of a linear critic with any noise")
@given(field=fields(), seed=st.integers(0, 99))
def test_penalties_at_drawn_points(field: Field, seed: int) -> None:
    f, x, one = tilted(field)
    draw, other = lambda: torch.Generator().manual_seed(seed), x.flip(0) + 1
    points = hodiff.interpolate(x, other, generator=draw())
    share = (hodiff.interpolate(x, x + 1, generator=draw()) - x)[:, :1]
    assert ((share >= 0) & (share < 1)).all()
    agree(points, x + share * (other - x), 1e-9)
    expected = 10 * apart(looped(grad(one), points).norm(dim=1), 1.0).mean()
    agree(hodiff.wgan_gp_penalty(f, x, other, generator=draw()), expected, floor=1e-10)
    expected = 10 * apart(looped(grad(one), x).norm(dim=1), 1.0).mean()
    agree(hodiff.dragan_penalty(f, x, std=0.0, generator=draw()), expected, floor=1e-10)
    weight = direction(x[0]) + 0.1
    linear = lambda z: z @ weight
    agree(hodiff.dragan_penalty(linear, x, generator=draw()), 10 * apart(weight.norm(), 1.0), floor=1e-10)


@law("gradient_norm_penalty", says="μ ‖∇L‖², over all parameters at once")
@given(setting=settings())
def test_gradient_norm(setting: Setting) -> None:
    expected = 0.5 * gradient(setting).square().sum()
    agree(hodiff.gradient_norm_penalty(setting.f, setting.where, weight=0.5).detach(), expected, floor=1e-10)


@law("jacobian_penalty", says="λ/2 · mean ‖Jᵢ‖², exactly and with given vectors")
@law("sliced_score_matching_loss", says="mean vᵀ∇s v + ½‖s‖² with given vectors")
@law("PathLengthPenalty", says="2 · mean (‖Jᵢᵀy‖ - a)² and the running mean a")
@given(field=fields(outputs=True))
def test_penalties_of_jacobians(field: Field) -> None:
    f, x, one = field
    J, v = looped(jacrev(one), x), direction(x, seed=7)
    agree(hodiff.jacobian_penalty(f, x, samples=None), 0.005 * J.square().sum((1, 2)).mean(), floor=1e-10)
    pulled = torch.einsum("no,noi->ni", v, J)
    agree(hodiff.jacobian_penalty(f, x, vectors=v), 0.005 * pulled.square().sum(1).mean(), floor=1e-10)
    expected = (torch.einsum("no,no->n", pulled, v) + f(x).square().sum(1) / 2).mean()
    agree(hodiff.sliced_score_matching_loss(f, x, vectors=v), expected, floor=1e-10)
    penalty = hodiff.PathLengthPenalty(decay=0.25).double()
    lengths = pulled.square().sum(1).sqrt()
    if (lengths > 1e-3).all():
        found = penalty(lambda z: f(z)[:, :, None, None], x, vectors=v[:, :, None, None])
        agree(found, 2 * apart(lengths, 0.25 * lengths.mean()).mean(), floor=1e-10)
        agree(penalty.mean_length, 0.25 * lengths.mean())


@law("hessian_penalty", says="the largest variance of vᵀH_a v over given vectors")
@law("curvature_penalty", says="γ · mean ‖∇f(xᵢ + h zᵢ) - ∇f(xᵢ)‖²")
@given(field=fields(outputs=True))
def test_penalties_of_hessians(field: Field) -> None:
    f, x, one = field
    v = direction(x, seed=8, many=3)
    forms = torch.stack([
        torch.stack([torch.stack([u @ jacrev(grad(lambda t, a=a: one(t)[a]))(s) @ u for a in range(len(s))])
                     for s, u in zip(x, many, strict=True)])
        for many in v
    ])  # fmt: skip
    agree(hodiff.hessian_penalty(f, x, vectors=v), forms.var(0).max(), floor=1e-9)
    each = lambda z: f(z).sum(-1) + z.sum(-1)
    first = grad(each)
    steps = looped(first, x).sign()
    if (steps != 0).any(1).all() and (looped(first, x).abs() > 1e-6).all():
        moved = x + 1.5 * steps / steps.norm(dim=1, keepdim=True)
        expected = 4 * (looped(first, moved) - looped(first, x)).square().sum(1).mean()
        agree(hodiff.curvature_penalty(each, x), expected, 1e-8, 1e-9)


@law("sample_norm", says="‖gᵢ‖ over all tensors of a container", oracle="`torch.linalg.vector_norm`")
@given(field=fields())
def test_norms(field: Field) -> None:
    x = field.x + 2
    expected = torch.linalg.vector_norm(torch.cat([x, x**2], 1), dim=1)
    agree(hodiff.sample_norm({"a": x, "b": x**2}), expected)
    assert vjp(hodiff.sample_norm, x)[0].shape == (len(x),)
