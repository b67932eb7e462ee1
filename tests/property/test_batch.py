"""batch_ndim=k is a Python loop over the samples, faster."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hodiff
from tests.support.inputs import Scalar, direction, expressions, values
from tests.support.properties import agree

batched = st.sampled_from([((2,), (3,)), ((3,), ()), ((1,), (2, 2)), ((2, 2), (3,)), ((2, 1), (1,)), ((4,), (1,))])
cases = batched.flatmap(  # without event dimensions a roll would mix the samples
    lambda s: st.tuples(st.just(s), values(s[0] + s[1]), expressions(roll=bool(s[1]), leaves=4))
)
kept = pytest.mark.parametrize("keep", [False, True], ids=["(N,)", "(N, 1)"])


def looped(function: object, x: Tensor, k: int, *more: Tensor) -> Tensor:
    """Apply to each sample, stack again."""
    flat = [t.reshape(-1, *t.shape[k:]) for t in (x, *more)]
    results = torch.stack([function(*sample) for sample in zip(*flat, strict=True)])
    return results.reshape(*x.shape[:k], *results.shape[1:])


@kept
@given(case=cases)
def test_batch_equals_loop(keep: bool, case: tuple) -> None:
    (lead, event), x, f = case
    k, f = len(lead), Scalar(f, len(event))
    g = (lambda t: f(t).unsqueeze(-1)) if keep else f
    v = direction(x)
    agree(hodiff.grad(g, x, batch_ndim=k), looped(lambda t: hodiff.grad(f, t), x, k))
    agree(hodiff.hvp(g, x, v, batch_ndim=k), looped(lambda t, u: hodiff.hvp(f, t, u), x, k, v))
    hessian = looped(lambda t: hodiff.hessian(f, t), x, k)
    agree(hodiff.hessian(g, x, batch_ndim=k), hessian)
    agree(hodiff.hessian(g, x, batch_ndim=k, chunk_size=1), hessian)
    agree(hodiff.hessian_diagonal(g, x, batch_ndim=k), looped(lambda t: hodiff.hessian_diagonal(f, t), x, k))
    agree(hodiff.hessian(g, x, batch_ndim=k, matrix=True), looped(lambda t: hodiff.hessian(f, t, matrix=True), x, k))
    value, gradient = hodiff.value_and_grad(g, x, batch_ndim=k)
    assert value.shape == g(x).shape
    agree((value, gradient), (g(x), hodiff.grad(g, x, batch_ndim=k)))
    value, gradient, second = hodiff.value_grad_and_hessian(g, x, batch_ndim=k)
    agree((value, gradient, second), (g(x), hodiff.grad(g, x, batch_ndim=k), hessian))
    many = direction(x, 4, 3)
    agree(
        hodiff.hvp(g, x, [many], batch_ndim=k),
        [torch.stack([hodiff.hvp(g, x, u, batch_ndim=k) for u in many])],
    )


@given(case=cases)
def test_batched_jacobian_equals_loop(case: tuple) -> None:
    (lead, _), x, f = case
    k = len(lead)
    out = lambda t: torch.cat([f(t[..., None]), torch.sin(t[..., None])], -1)
    expected = looped(lambda t: hodiff.jacobian(out, t), x, k)
    agree(hodiff.jacobian(out, x, batch_ndim=k), expected)
    agree(hodiff.jacobian(out, x, batch_ndim=k, chunk_size=1), expected)


@given(f=expressions(leaves=4), g=expressions(leaves=4), x=values((3, 2)), y=values((3, 4)))
def test_batched_cross_hessian_equals_loop(f: object, g: object, x: Tensor, y: Tensor) -> None:
    f, g = Scalar(f, 1), Scalar(g, 1)
    both = lambda a, b: f(a) * g(b) + torch.sin(f(a) + g(b))
    got = hodiff.cross_hessian(both, x, y, batch_ndim=1)
    agree(got, torch.stack([hodiff.cross_hessian(both, a, b) for a, b in zip(x, y, strict=True)]))
    product = hodiff.cross_hvp(both, x, y, direction(y), batch_ndim=1)
    agree(product, torch.einsum("nij,nj->ni", got, direction(y)))


@pytest.mark.parametrize("event", [(), (3,), (2, 2)])
def test_empty_batch(event: tuple[int, ...]) -> None:
    x = torch.zeros(0, *event, dtype=torch.float64)
    f = lambda t: t.pow(3).sum(tuple(range(1, t.ndim))) if t.ndim > 1 else t.pow(3)
    assert hodiff.grad(f, x, batch_ndim=1).shape == x.shape
    assert hodiff.hvp(f, x, x.clone(), batch_ndim=1).shape == x.shape
    assert hodiff.hessian(f, x, batch_ndim=1).shape == (0, *event, *event)
    assert hodiff.hessian_diagonal(f, x, batch_ndim=1).shape == x.shape
    d = int(torch.Size(event).numel())
    assert hodiff.hessian(f, x, batch_ndim=1, matrix=True).shape == (0, d, d)
    assert hodiff.jacobian(lambda t: t**2, x, batch_ndim=1).shape == (0, *event, *event)


def test_containers_under_batch_ndim() -> None:
    x = {"a": torch.randn(5, 2, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    f = lambda t: (t["a"] ** 3).sum(-1) * t["b"] ** 2
    a, b = x["a"], x["b"]
    h = hodiff.hessian(f, x, batch_ndim=1)
    agree(h["a"]["a"], torch.diag_embed(6 * a) * (b**2)[:, None, None])
    agree(h["a"]["b"], 3 * a**2 * (2 * b)[:, None])
    agree(h["b"]["a"], 3 * a**2 * (2 * b)[:, None])
    agree(h["b"]["b"], 2 * (a**3).sum(-1))
    m = hodiff.hessian(f, x, batch_ndim=1, matrix=True)
    assert m.shape == (5, 3, 3)
    agree(m[:, :2, 2].clone(), h["a"]["b"])
    agree(m, m.mT.clone())


def test_batched_output_with_args_that_mix_nothing() -> None:
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    got = hodiff.hessian_diagonal(
        lambda t, w, power: (t**power).sum(-1) * w, x, batch_ndim=1, args=(w,), kwargs={"power": 3}
    )
    agree(got, 6 * x * w[:, None])
