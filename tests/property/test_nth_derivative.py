"""nth_derivative against closed forms, SymPy and differences of the order below."""

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hodiff
from tests.support.differences import first_difference
from tests.support.inputs import Expression, expressions, points, values
from tests.support.problems import ELEMENTWISE, Elementwise
from tests.support.properties import agree


@pytest.mark.parametrize("function", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize("n", range(8))
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_closed_form(function: Elementwise, n: int, shape: tuple[int, ...]) -> None:
    x = torch.linspace(-1.2, 1.7, int(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    agree(hodiff.nth_derivative(function.function, x, n), function.derivative(x, n), 1e-10)
    agree(hodiff.derivatives(function.function, x, n), tuple(function.derivative(x, k) for k in range(n + 1)), 1e-10)


def test_the_second_derivative_that_the_documents_got_wrong() -> None:
    """z = (x^2)^2: z'' is 12 x^2; the recipe that calls dy/dx = 2x "second-order" agrees with neither z' nor z''."""
    x = torch.tensor([1.5], dtype=torch.float64)
    assert hodiff.nth_derivative(lambda t: (t**2) ** 2, x, 2).item() == pytest.approx(27.0)
    assert hodiff.nth_derivative(lambda t: (t**2) ** 2, x, 1).item() == pytest.approx(13.5)


@settings(max_examples=15)
@given(f=expressions(roll=False, leaves=3), x=values((2,)), n=st.integers(1, 5))
def test_sympy(f: Expression, x: Tensor, n: int) -> None:
    t = sympy.Symbol("t", real=True)
    derivative = sympy.diff(f.sympy(t), t, n)
    exact = [float(derivative.evalf(30, subs={t: sympy.Rational(entry)})) for entry in x.tolist()]
    agree(hodiff.nth_derivative(f, x, n), torch.tensor(exact, dtype=torch.float64), 1e-8, 1e-9)


@given(f=expressions(roll=False, leaves=4), x=points, n=st.integers(1, 4))
def test_differences_of_the_order_below(f: Expression, x: Tensor, n: int) -> None:
    below = first_difference(lambda t: hodiff.nth_derivative(f, x + t, n - 1), 4e-3)
    agree(hodiff.nth_derivative(f, x, n), below, 1e-5, 1e-5)


@given(f=expressions(roll=False, leaves=3), x=points)
def test_create_graph_gives_the_next_order(f: Expression, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    second = hodiff.nth_derivative(f, leaf, 2, create_graph=True)
    third = hodiff.nth_derivative(f, x, 3)
    if second.requires_grad:
        agree(torch.autograd.grad(second.sum(), leaf, allow_unused=True, materialize_grads=True)[0], third)
    else:
        agree(torch.zeros_like(third), third)


def test_zero_derivatives_of_a_polynomial_are_zeros_not_errors() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    for n in range(3, 7):
        assert torch.equal(hodiff.nth_derivative(lambda t: t**2, x, n), torch.zeros_like(x))
    assert all(torch.equal(d, torch.zeros_like(x)) for d in hodiff.derivatives(lambda t: 3 * t, x, 5)[2:])


def test_constant_of_the_argument_is_an_error_not_a_zero() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    with pytest.raises(hodiff.GraphError, match=r"(?is)depend|graph"):
        hodiff.nth_derivative(lambda t: torch.ones_like(t), x, 1)


ZEROS = torch.zeros(4, dtype=torch.float64)

MIXED_FROM = {
    "a product": (2, lambda x: x * x.roll(1)),
    "another's square": (2, lambda x: x + x.roll(1) ** 2),
    "what the sum over entries hides": (2, lambda x: x + torch.tensor([1.0, -1.0, 0.0, 0.0]) * x[1] ** 2),
    "what ones hide": (2, lambda x: torch.stack([x[0] * x[1] - x[1] ** 2 / 2, *x[1:]])),
    "a product of third order": (3, lambda x: x.square() * x.roll(1)),
    "at fifth order": (5, lambda x: x + x.roll(1) ** 5),
}


@pytest.mark.parametrize("form", ["function", "tensor"])
@pytest.mark.parametrize("name", MIXED_FROM)
def test_entries_that_mix_at_a_higher_order_only(name: str, form: str) -> None:
    """At 0 the first derivatives of these are those of an elementwise function."""
    order, f = MIXED_FROM[name]
    x = ZEROS.clone().requires_grad_()
    for n in range(order, order + 2):
        with pytest.raises(hodiff.InputError, match=f"not elementwise: .*seen at order {order}"):
            hodiff.nth_derivative(f, ZEROS, n) if form == "function" else hodiff.nth_derivative(f(x), x, n)


@pytest.mark.parametrize("n", range(1, 5))
def test_no_order_of_an_elementwise_function_is_taken_for_mixed(n: int) -> None:
    x = torch.tensor([0.0, 1e-3, 1.0, 30.0], dtype=torch.float32)
    agree(hodiff.nth_derivative(torch.exp, x, n), torch.exp(x), 1e-5)
    agree(hodiff.nth_derivative(lambda t: 3 * t, x, n), torch.full_like(x, 3.0 * (n == 1)))
    scaled = hodiff.nth_derivative(lambda t: t**2 / t.detach().sum(), x, n)  # a constant is not a dependence
    agree(scaled, {1: 2 * x, 2: torch.full_like(x, 2.0)}.get(n, torch.zeros_like(x)) / x.sum(), 1e-6)


def test_the_check_draws_what_f_drew() -> None:
    """Another dropout mask would look like entries that mix; and f has drawn once, to whoever draws after it."""
    x = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    f = lambda t: torch.nn.functional.dropout(t, 0.5, training=True) ** 3
    torch.manual_seed(0)
    mask, after = torch.nn.functional.dropout(torch.ones_like(x), 0.5), torch.rand(1)
    torch.manual_seed(0)
    agree(hodiff.nth_derivative(f, x, 3), 6 * mask**3)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_are_not_taken_for_mixed_entries(n: int, dtype: torch.dtype) -> None:
    """Where everything cancels, what is left differs along weights, but is not a dependence."""
    gauss = lambda t: torch.exp(-t.square())
    for f in (
        lambda t: gauss(t) - gauss(t),
        lambda t: (t + 1) ** 2 - t**2 - 2 * t - 1,
        lambda t: t.sin() ** 2 + t.cos() ** 2,
        lambda t: torch.log(t.exp()) - t,
    ):
        for seed in range(8):
            x = torch.randn(5, dtype=dtype, generator=torch.Generator().manual_seed(seed))
            x[0] = 0
            found = hodiff.nth_derivative(f, x, n)
            assert found.abs().max() < 1e3 * torch.finfo(dtype).eps
