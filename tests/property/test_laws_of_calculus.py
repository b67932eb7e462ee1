"""Each name of the calculus against `torch.func`, over random functions, shapes, containers and modules."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hodiff
from tests.support.inputs import Expression, direction, expressions, points, scalars
from tests.support.laws import Setting, gradient, hessian, jacobian, law, like, rows, settings
from tests.support.oracle import flatten
from tests.support.properties import agree, leaves


@law("grad", "value_and_grad", says="∇f, and f(x) beside it")
@given(setting=settings())
def test_first_derivatives(setting: Setting) -> None:
    f, where = setting.f, setting.where
    agree(flatten(hodiff.grad(f, where)), gradient(setting))
    value, found = hodiff.value_and_grad(f, where)
    agree(value.detach(), setting.flat(setting.x))
    agree(flatten(found), gradient(setting))


@law("jacobian", says="every block of J")
@law("vjp", says="Jᵀu", oracle="`torch.func`, and ⟨u, Jv⟩ = ⟨Jᵀu, v⟩")
@law("jvp", says="Jv, for one v and for three at once")
@given(setting=settings(outputs=True))
def test_jacobians(setting: Setting) -> None:
    f, where, J = setting.f, setting.where, jacobian(setting)
    blocks = hodiff.jacobian(f, where)
    parts = [blocks] if isinstance(blocks, Tensor) else _leaves(blocks)
    agree(torch.cat([part.reshape(J.shape[0], -1) for part in parts], 1), J)
    u, v = direction(setting.flat(setting.x), seed=1), direction(setting.x, seed=2)
    back, forth = flatten(hodiff.vjp(f, where, u)), hodiff.jvp(f, where, like(setting, v))
    agree(back, u.reshape(-1) @ J, floor=1e-10)
    agree(forth.reshape(-1), J @ v, floor=1e-10)
    agree(forth.reshape(-1) @ u.reshape(-1), back @ v, floor=1e-9)
    many = direction(setting.x, seed=3, many=3)
    agree(hodiff.jvp(f, where, like(setting, many)).reshape(3, -1), many @ J.T, floor=1e-10)


@law("hvp", says="Hv, for one v and for three at once")
@law("hessian", says="all blocks of H in the order of *where*, and H = Hᵀ")
@law("value_grad_and_hessian", says="f, ∇f and H of one evaluation")
@law("hessian_diagonal", says="the diagonal of H")
@given(setting=settings())
def test_second_derivatives(setting: Setting) -> None:
    f, where, H, v = setting.f, setting.where, hessian(setting), direction(setting.x)
    agree(flatten(hodiff.hvp(f, where, like(setting, v))), H @ v, floor=1e-10)
    many = direction(setting.x, seed=3, many=3)
    agree(rows(hodiff.hvp(f, where, like(setting, many)), 3), many @ H, floor=1e-10)
    found = hodiff.hessian(f, where, matrix=True)
    agree(found, H, floor=1e-10)
    agree(found, found.mT.clone(), floor=1e-10)
    value, g, second = hodiff.value_grad_and_hessian(f, where, matrix=True)
    agree((value.detach(), flatten(g), second), (setting.flat(setting.x), gradient(setting), H), floor=1e-10)
    agree(flatten(hodiff.hessian_diagonal(f, where)), H.diagonal().clone(), floor=1e-10)


@law("cross_hessian", says="∂²f/∂x∂y")
@law("cross_hvp", says="∂²f/∂x∂y · v")
@given(f=scalars(leaves=3), g=scalars(leaves=3), x=points, y=points)
def test_mixed_derivatives(f: object, g: object, x: Tensor, y: Tensor) -> None:
    both = lambda a, b: f(a) * g(b) + torch.sin(f(a) - g(b))
    expected = torch.func.jacrev(torch.func.grad(both, 0), 1)(x, y)
    agree(hodiff.cross_hessian(both, x, y), expected, floor=1e-10)
    v = direction(y)
    product = expected.reshape(x.numel(), y.numel()) @ v.reshape(-1)
    agree(hodiff.cross_hvp(both, x, y, v), product.reshape(x.shape), floor=1e-10)


@law("nth_derivative", says="f⁽ⁿ⁾ entry by entry, n up to 4")
@law("derivatives", says="all orders up to 4")
@given(f=expressions(roll=False, leaves=3), x=points, n=st.integers(1, 4))
def test_elementwise_derivatives(f: Expression, x: Tensor, n: int) -> None:
    one = f
    expected = [f(x)]
    for _ in range(4):
        one = torch.func.grad(one)
        expected.append(torch.stack([one(entry) for entry in x.reshape(-1)]).reshape(x.shape))
    agree(hodiff.nth_derivative(f, x, n), expected[n], 1e-8, 1e-8)
    for found, wanted in zip(hodiff.derivatives(f, x, 4), expected, strict=True):
        agree(found, wanted, 1e-8, 1e-8)


@law("multi_grad", says="∇f and ∇g in one call")
@given(setting=settings(), other=scalars(leaves=3))
def test_several_losses(setting: Setting, other: object) -> None:
    second = lambda w: torch.sin(setting.f(w)) * 2
    found = hodiff.multi_grad([setting.f, second], setting.where)
    agree(flatten(found[0]), gradient(setting))
    agree(flatten(found[1]), gradient(setting) * 2 * torch.cos(setting.flat(setting.x)), floor=1e-10)


@law("grad", "jvp", "vjp", "jacobian", says="with `strict=False` zeros of a constant; else what it is without")
@law("hvp", "hessian", "hessian_diagonal", says="with `strict=False` zeros of what is constant, or linear")
@given(setting=settings(), kind=st.sampled_from(["constant", "linear", "whole"]))
def test_zeros_that_are_asked_for(setting: Setting, kind: str) -> None:
    weights = torch.linspace(0.5, 2, len(setting.x), dtype=torch.float64)
    entries = lambda w: torch.cat(
        [t.reshape(-1) for t in leaves(dict(w.named_parameters()) if hasattr(w, "deep") else w)]
    )
    f, flat = {
        "constant": (lambda w: weights.sum(), lambda x: weights.sum()),
        "linear": (lambda w: entries(w) @ weights, lambda x: x @ weights),
        "whole": (setting.f, setting.flat),
    }[kind]
    setting = setting._replace(f=f, flat=flat)
    where, v, H = setting.where, direction(setting.x), hessian(setting)
    one, several = gradient(setting), lambda w: f(w).reshape(1)
    agree(flatten(hodiff.grad(f, where, strict=False)), one)
    agree(flatten(hodiff.vjp(several, where, torch.ones(1, dtype=H.dtype), strict=False)), one)
    agree(hodiff.jvp(several, where, like(setting, v), strict=False), (one @ v).reshape(1), floor=1e-10)
    agree(torch.cat([part.reshape(-1) for part in leaves(hodiff.jacobian(several, where, strict=False))]), one)
    agree(flatten(hodiff.hvp(f, where, like(setting, v), strict=False)), H @ v, floor=1e-10)
    agree(hodiff.hessian(f, where, matrix=True, strict=False), H, floor=1e-10)
    agree(flatten(hodiff.hessian_diagonal(f, where, strict=False)), H.diagonal().clone(), floor=1e-10)
    if kind == "constant":
        with pytest.raises(hodiff.GraphError, match="carries no graph"):
            hodiff.grad(f, where)


@law("check_derivatives", says="agrees up to third order; finds a detached factor", oracle="differences, its own")
@given(f=scalars(leaves=3), x=points, order=st.integers(1, 3))
def test_checking(f: object, x: Tensor, order: int) -> None:
    g = lambda z: f(z) + (z**3).sum() / 3
    report = hodiff.check_derivatives(g, x + 0.1, order=order, directions=1)
    assert report.ok and report.order == order
    try:
        hodiff.check_derivatives(lambda z: (z**2 * z.detach() + z).sum(), x.abs() + 0.5, order=1, directions=1)
    except hodiff.DerivativeError:
        return
    raise AssertionError("a cut was not seen")


def _leaves(blocks: object) -> list[Tensor]:
    parts = blocks.values() if isinstance(blocks, dict) else blocks
    return [leaf for part in parts for leaf in ([part] if isinstance(part, Tensor) else _leaves(part))]
