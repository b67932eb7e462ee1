"""`sample_norm`: right values, and right derivatives of every order, where other norms fail."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import hodiff
from hodiff.penalties import _gradient

DOUBLE = torch.float64
INF = float("inf")


def by_definition(flat: Tensor, ord: float) -> Tensor:
    return {1: flat.abs().sum(-1), 2: flat.square().sum(-1).sqrt(), INF: flat.abs().amax(-1)}[ord]


@given(
    batch=st.lists(st.integers(1, 4), max_size=2),
    events=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=3),
    ord=st.sampled_from([1, 2, INF]),
)
def test_joint_over_leaves_and_all_but_the_batch(batch, events, ord):
    leaves = [torch.randn((*batch, *event), dtype=DOUBLE) for event in events]
    flat = torch.cat([leaf.reshape(*batch, -1) for leaf in leaves], dim=-1)
    got = hodiff.sample_norm({str(i): leaf for i, leaf in enumerate(leaves)}, batch_ndim=len(batch), ord=ord)
    assert got.shape == tuple(batch)
    torch.testing.assert_close(got, by_definition(flat, ord))


@pytest.mark.parametrize("ord", [1, 2, INF])
def test_zero_has_zero_derivatives_of_order_one_to_three(ord):
    g = torch.zeros(2, 5, dtype=DOUBLE, requires_grad=True)
    value = (hodiff.sample_norm(g, ord=ord) - 1).square().sum()
    assert value == 2
    for order in (1, 2, 3):
        (value,) = torch.autograd.grad(value, g, torch.ones_like(value), create_graph=True)
        assert not value.any(), f"order {order}"
        value = value + 0 * g


def test_zero_defeats_the_usual_norms():
    """What the test above would catch: NaN at the first order, and at the second."""
    g = torch.zeros(1, 5, requires_grad=True)
    (first,) = torch.autograd.grad(g.square().sum(1).sqrt().sum(), g)
    assert first.isnan().all()
    (first,) = torch.autograd.grad((g.norm(dim=1) - 1).square().sum(), g, create_graph=True)
    assert not first.any()
    (second,) = torch.autograd.grad(first.sum(), g)
    assert second.isnan().all()


@pytest.fixture(params=["as on the CPU", "as on a GPU"])
def route(request, monkeypatch):
    """On the CPU ordinary gradients take a shorter route; a GPU, and a traced region, take the long one for all."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(_gradient, "_ordinary", lambda norms: False)


@pytest.mark.parametrize("scale", [1e-30, 1e-13, 1e-11, 1.0, 1e11, 1e13, 1e30])
def test_right_and_twice_differentiable_at_any_scale(scale, route):
    g = torch.randn(3, 4, dtype=DOUBLE)
    unit = lambda g: hodiff.sample_norm(g * scale) / scale
    torch.testing.assert_close(unit(g), g.square().sum(1).sqrt())
    inputs = g.requires_grad_()
    assert gradcheck(unit, inputs)
    assert gradgradcheck(unit, inputs)


def test_under_vmap():
    g = torch.randn(3, 4, 5, dtype=DOUBLE)
    torch.testing.assert_close(torch.vmap(hodiff.sample_norm)(g), g.square().sum(2).sqrt())


def test_gradgradcheck_of_other_norms_and_of_a_container(route):
    a, b = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True), torch.randn(2, 2, 2, dtype=DOUBLE, requires_grad=True)
    assert gradgradcheck(lambda a, b: hodiff.sample_norm((a, b)), (a, b))
    assert gradgradcheck(lambda a: hodiff.sample_norm(a, ord=1), a)
    assert gradgradcheck(lambda a: hodiff.sample_norm(a, ord=INF), a)


@pytest.mark.parametrize("entry", [1e-24, 1e-3, 1e30])
def test_float32_neither_underflows_nor_overflows(entry):
    g = torch.full((1, 100), entry, requires_grad=True)
    n = hodiff.sample_norm(g)
    (d,) = torch.autograd.grad(n.sum(), g)
    torch.testing.assert_close(n, torch.tensor([10 * entry]))
    torch.testing.assert_close(d, torch.full((1, 100), 0.1))
    if entry != 1e-3:
        assert g.detach().square().sum().sqrt() != n.item(), "the plain root would have done"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entry", [1e-4, 100.0])
def test_half_precision_is_accumulated_in_float32(dtype, entry):
    g = torch.full((2, 100), entry, dtype=dtype, requires_grad=True)
    n = hodiff.sample_norm(g)
    assert n.dtype == torch.float32
    torch.testing.assert_close(n, 10 * g.detach()[:, 0].float())
    (d,) = torch.autograd.grad(n.sum(), g)
    assert d.dtype == dtype
    torch.testing.assert_close(d.float(), torch.full((2, 100), 0.1), rtol=1e-2, atol=0)


def test_what_is_not_finite_shows():
    n = hodiff.sample_norm(torch.tensor([[1.0, INF], [1.0, math.nan], [3.0, 4.0]]))
    assert n[0] == INF
    assert n[1].isnan()
    assert n[2] == 5


def test_empty_events_and_batches():
    assert hodiff.sample_norm(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert hodiff.sample_norm([torch.zeros(3, 0), torch.ones(3, 4)]).tolist() == [2, 2, 2]
    assert hodiff.sample_norm(torch.zeros(0, 4)).shape == (0,)
    assert hodiff.sample_norm(torch.tensor([-2.0, 3.0])).tolist() == [2, 3]  # a sample is one number


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hodiff.sample_norm(torch.ones(2, 3), ord=3), r"ord: got 3, expected 2, 1 or float\(.inf.\)"),
        (lambda: hodiff.sample_norm(torch.arange(3)), "grads has dtype torch.int64"),
        (lambda: hodiff.sample_norm([]), "grads: got a list of 0"),
        (lambda: hodiff.sample_norm(torch.tensor(1.0)), r"grads has shape \(\), too few dimensions"),
        (lambda: hodiff.sample_norm((torch.ones(2, 3), torch.ones(4, 3))), r"grads\[1\] has batch shape \(4,\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(hodiff.InputError, match=message):
        call()
