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
