"""Powers whose exponent varies: at 0, 1, 2, ... PyTorch's reverse passes lose a part of their derivatives."""

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

import hodiff
from hodiff import GraphError

D = torch.float64
Function = Callable[[Tensor], Tensor]
Power = Callable[[Tensor, Tensor], Tensor]

SPELLINGS: dict[str, Power] = {
    "**": lambda a, b: a**b,
    "torch.pow": lambda a, b: torch.pow(a, b),
    "by name": lambda a, b: torch.pow(input=a, exponent=b),
    "method": lambda a, b: a.pow(b),
    "in place": lambda a, b: (a * 1).pow_(b),
    "float_power": lambda a, b: torch.float_power(a, b),
    "a method in place": lambda a, b: (a * 1).float_power_(b),
    "reflected": lambda a, b: b.__rpow__(a),
    "aten": lambda a, b: torch.ops.aten.pow.Tensor_Tensor(a, b),
}


def in_place(a: Tensor, b: Tensor) -> Tensor:
    a = a * 1
    a **= b
    return a


SPELLINGS["**="] = in_place


def exact(a: float, b: float, i: int, j: int) -> float:
    """The derivative of a ** b, i times by a and j times by b."""
    with mpmath.workdps(40):
        return float(mpmath.diff(lambda x, y: x**y, (mpmath.mpf(a), mpmath.mpf(b)), (i, j)))


def mixed(f: Power, a: float, b: float, i: int, j: int) -> float:
    """The same by nested gradients."""
    g: Power = f
    for number in [0] * i + [1] * j:
        lower = g
        g = lambda x, y, lower=lower, number=number: hodiff.grad(lambda z: lower(z[0], z[1]), (x, y))[number]
    return float(g(torch.tensor(a, dtype=D), torch.tensor(b, dtype=D)))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_hessian_at_an_exponent_of_zero(name: str) -> None:
    f, point = SPELLINGS[name], torch.tensor([2.0, 0.0], dtype=D)
    expected = torch.tensor([[0.0, 0.5], [0.5, exact(2, 0, 0, 2)]], dtype=D)
    torch.testing.assert_close(hodiff.hessian(lambda p: f(p[0], p[1]), point), expected)
    torch.testing.assert_close(hodiff.hessian(lambda p: f(p[0], -p[1]), point)[0, 1], -expected[0, 1])


@pytest.mark.parametrize("b", [0.0, 1.0, 2.0, 3.0, 0.7])
@pytest.mark.parametrize(("i", "j"), [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3)])
def test_mixed_derivatives(b: float, i: int, j: int) -> None:
    f: Power = lambda a, b: a**b
    assert mixed(f, 1.7, b, i, j) == pytest.approx(exact(1.7, b, i, j), rel=1e-9, abs=1e-12)


def test_by_two_arguments_in_either_order() -> None:
    a, b = torch.tensor([2.0], dtype=D), torch.tensor([0.0], dtype=D)
    assert float(hodiff.cross_hessian(lambda a, b: (a**b).sum(), a, b)) == pytest.approx(0.5)
    assert float(hodiff.cross_hessian(lambda b, a: (a**b).sum(), b, a)) == pytest.approx(0.5)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_x_to_the_x_at_one(n: int) -> None:
    with mpmath.workdps(40):
        expected = float(mpmath.diff(lambda t: t**t, 1, n))
    assert float(hodiff.nth_derivative(lambda x: x**x, torch.ones(1, dtype=D), n)) == pytest.approx(expected)


@pytest.mark.parametrize(("b", "order"), [(0.0, 2), (1.0, 3), (2.0, 4)])
def test_a_graph_is_refused_from_the_order_that_is_wrong(b: float, order: int) -> None:
    x = torch.tensor([2.0], dtype=D, requires_grad=True)
    given = lambda: x ** (b * x / x.detach())
    with pytest.raises(
        GraphError, match=rf"order {order} of a \*\* b is silently wrong .* where b is 0.*Give hodiff the function"
    ):
        hodiff.nth_derivative(given(), x, order)
    if order > 2:
        hodiff.nth_derivative(given(), x, order - 1)


def test_a_graph_with_a_constant_exponent_is_not() -> None:
    x = torch.tensor([2.0, 3.0], dtype=D, requires_grad=True)
    found = hodiff.hvp((x ** torch.tensor([0.0, 2.0], dtype=D)).sum(), x, torch.ones_like(x))
    torch.testing.assert_close(found, torch.tensor([0.0, 2.0], dtype=D))


def test_a_loss_of_derivatives_by_the_exponent() -> None:
    x, b = torch.tensor([[1.3, 0.6]], dtype=D), torch.ones((), dtype=D, requires_grad=True)
    for method in ("jets", "reverse"):
        loss = hodiff.laplacian(lambda z: (z**b).sum(-1), x, method=method).sum()
        assert float(hodiff.grad(loss, b)) == pytest.approx(sum(exact(a, 1, 2, 1) for a in (1.3, 0.6)))


def test_derivatives_that_f_takes_itself() -> None:
    def f(p: Tensor) -> Tensor:
        a = p[0] * 1
        return torch.autograd.grad(a ** p[1], a, create_graph=True)[0]

    torch.testing.assert_close(hodiff.grad(f, torch.tensor([2.0, 0.0], dtype=D)), torch.tensor([0.0, 0.5], dtype=D))
    tangent = lambda p: torch.func.jvp(lambda a: a ** p[1], (p[0],), (torch.ones_like(p[0]),))[1]
    torch.testing.assert_close(
        hodiff.grad(tangent, torch.tensor([2.0, 0.0], dtype=D)), torch.tensor([0.0, 0.5], dtype=D)
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_by_the_exponent_where_the_base_is_zero(n: int) -> None:
    base, b = torch.tensor([0.0, 2.0], dtype=D), torch.tensor(1.0, dtype=D)
    f: Callable[[Tensor], Tensor] = lambda b: (base**b).sum()
    assert float(hodiff.nth_derivative(f, b, n)) == pytest.approx(exact(2, 1, 0, n))
    if n == 2:
        assert float(hodiff.hessian(f, b)) == pytest.approx(exact(2, 1, 0, 2))
        both = hodiff.hessian(lambda p: p[0] ** p[1], torch.tensor([0.0, 2.0], dtype=D))
        torch.testing.assert_close(both, torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=D))


def test_where_a_mixed_derivative_is_infinite_the_result_says_so() -> None:
    with pytest.warns(hodiff.HodiffWarning, match=r"not finite.*a power of 0"):
        hodiff.hessian(lambda p: p[0] ** p[1], torch.tensor([0.0, 1.0], dtype=D))


@pytest.mark.parametrize("base", [torch.float32, torch.float64, torch.int64, torch.complex128])
@pytest.mark.parametrize("exponent", [torch.float32, torch.float64])
def test_values_and_dtypes_are_those_of_the_kernel(base: torch.dtype, exponent: torch.dtype) -> None:
    from hodiff._core._substitutes import ExactNorms

    a = torch.tensor([[-2], [0], [1], [3]]).to(base)
    for b in (torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor(2.0), torch.tensor([0.5, -1.0])):
        b = b.to(exponent).requires_grad_()
        for name in ("**", "float_power", "torch.pow"):
            with ExactNorms():
                found = SPELLINGS[name](a, b)
            torch.testing.assert_close(found, SPELLINGS[name](a, b), equal_nan=True)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_jets_of_an_exponent_that_is_broadcast(shape: tuple[int, ...], n: int) -> None:
    base = torch.tensor([[3.0, 2.0], [1.5, 0.5], [0.3, 4.0]], dtype=D)
    b, v = torch.rand(shape, dtype=D) + 0.5, torch.rand(shape, dtype=D)
    found = hodiff.jet(lambda b: (base**b).sum(), b, [v] + [0 * v] * (n - 1))[1][n - 1]
    torch.testing.assert_close(found, (base**b * (base.log() * v) ** n).sum())


ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "**": lambda x: 0.0**x,
    "torch.pow": lambda x: torch.pow(0, x),
    "reflected": lambda x: x.__rpow__(0.0),
    "float_power": lambda x: torch.float_power(0, x),
    "a tensor": lambda x: torch.zeros(2, dtype=D) ** x,
    "an argument": lambda x: (0 * x) ** x,
}


@pytest.mark.parametrize("name", ZERO)
def test_powers_of_zero_have_derivatives(name: str) -> None:
    x, f = torch.tensor([5.0, 61.0], dtype=D), ZERO[name]
    for n in (1, 2, 3, 4):
        assert hodiff.nth_derivative(f, x, n).equal(0 * x)
    total: Function = lambda x: f(x).sum()
    assert hodiff.hessian(total, x).equal(torch.zeros(2, 2, dtype=D))
    assert hodiff.grad(lambda x: hodiff.hessian(total, x).sum(), x).equal(0 * x)
    by_hand = lambda x: torch.autograd.grad(total(x), x, create_graph=True)[0].sum()
    assert hodiff.grad(by_hand, x).equal(0 * x)


def test_where_a_higher_derivative_of_a_power_of_zero_is_infinite_it_is_not_finite() -> None:
    """The derivative by b of b (b - 1) a ** (b - 2) has a logarithm of a at b = 2, and none at 2.5."""
    f: Function = lambda p: hodiff.hessian(lambda p: p[0] ** p[1], p)[0, 0]
    assert not hodiff.grad(f, torch.tensor([0.0, 2.0], dtype=D)).isfinite().all()
    assert hodiff.grad(f, torch.tensor([0.0, 3.5], dtype=D)).equal(torch.zeros(2, dtype=D))


def test_orders_of_an_elementwise_function_say_where_they_are_not_finite() -> None:
    x = torch.ones(2, dtype=D)
    with pytest.warns(hodiff.HodiffWarning, match=r"not finite.*a power of 0"):
        hodiff.nth_derivative(lambda x: 0.0 ** (x - 1), x, 2)


def test_a_cumulative_product_with_zeros_in_forward_mode_of_f() -> None:
    def tangent(x: Tensor) -> Tensor:
        product = lambda t: torch.stack([t, 0 * t, t + 1]).cumprod(0).sum()
        return torch.func.jvp(product, (x,), (x.cos(),))[1]

    assert float(hodiff.hessian(tangent, torch.tensor(0.3, dtype=D))) == pytest.approx(-float(torch.tensor(0.3).cos()))


class Plain(Tensor):
    """A subclass that overrides nothing."""


@pytest.mark.parametrize("name", [name for name in SPELLINGS if "in place" not in name and name != "**="])
def test_a_hessian_of_a_subclass_at_an_exponent_of_zero(name: str) -> None:
    f, point = SPELLINGS[name], torch.tensor([2.0, 0.0], dtype=D)
    expected = torch.tensor([[0.0, 0.5], [0.5, exact(2, 0, 0, 2)]], dtype=D)
    given = hodiff.hessian(lambda p: f(p[0], p[1]), point.as_subclass(Plain))
    torch.testing.assert_close(given.as_subclass(Tensor), expected)
    inside = hodiff.hessian(lambda p: f(p.as_subclass(Plain)[0], p.as_subclass(Plain)[1]), point)
    torch.testing.assert_close(inside.as_subclass(Tensor), expected)


def test_a_graph_of_parameters_is_refused() -> None:
    a, b = (torch.nn.Parameter(torch.tensor(value, dtype=D)) for value in (2.0, 0.0))
    with pytest.raises(GraphError, match=r"order 2 of a \*\* b is silently wrong .* where b is 0"):
        hodiff.hessian(a**b, [a, b])


def assigned(p: Tensor) -> Tensor:
    whole = p * 1
    part = whole[:1]
    part **= p[1:]
    return whole[0]


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "pow_": lambda p: (p * 1)[:1].pow_(p[1:]).squeeze(),
    "float_power_": lambda p: (p * 1)[0].float_power_(p[1]),
    "**=": assigned,
    "aten": lambda p: torch.ops.aten.pow_.Tensor((p * 1)[0], p[1]),
    "a subclass": lambda p: (p.as_subclass(Plain)[0] * 1).pow_(p[1]),
    "lists": lambda p: torch._foreach_pow([p[0]], [p[1]])[0],
}
"""Powers whose node cannot be seen, or has another name."""


@pytest.mark.parametrize("name", HIDDEN)
def test_a_power_that_is_hidden_is_refused_where_it_is_wrong(name: str) -> None:
    f = HIDDEN[name]
    x = torch.tensor([2.0, 0.0], dtype=D, requires_grad=True)
    for what in (f, f(x)) if name != "lists" else (f(x),):
        with pytest.raises(GraphError, match=r"order 2 of a \*\* b is .* where b is 0 .* written into a view"):
            hodiff.hessian(what, x)
    value = {2: exact(2, 1, 1, 1), 3: exact(2, 1, 1, 2)}
    point = torch.tensor([2.0, 1.0], dtype=D)
    assert float(hodiff.hessian(f, point)[0, 1]) == pytest.approx(value[2])
    third = hodiff.grad(lambda p: hodiff.hessian(f, p).as_subclass(Tensor)[0, 1], point)
    torch.testing.assert_close(third, torch.tensor([exact(2, 1, 2, 1), value[3]], dtype=D))


def test_a_power_that_is_hidden_is_right_at_third_order() -> None:
    point = torch.tensor([2.0, 0.0], dtype=D)
    for f in HIDDEN.values():
        mixed = lambda p, f=f: hodiff.hessian(f, p).as_subclass(Tensor)[0, 1]
        torch.testing.assert_close(
            hodiff.grad(mixed, point), torch.tensor([exact(2, 0, 2, 1), exact(2, 0, 1, 2)], dtype=D)
        )


def test_powers_of_lists_are_written_out() -> None:
    point, number = torch.tensor([2.0, 0.0], dtype=D), torch.tensor(0.0, dtype=D)
    torch.testing.assert_close(hodiff.hessian(HIDDEN["lists"], point)[0, 1], torch.tensor(0.5, dtype=D))
    lists: dict[str, Callable[[Tensor], Tensor]] = {
        "in place": lambda p: torch._foreach_pow_([p[0] * 1], [p[1]])[0],
        "of numbers": lambda p: torch._foreach_pow([p[0]], 2.0)[0] * torch._foreach_pow(2.0, [p[1]])[0],
        "aten": lambda p: torch.ops.aten._foreach_pow.List([p[0]], [p[1]])[0],
    }
    expected = {"in place": 0.5, "of numbers": 4 * float(torch.tensor(2.0).log()), "aten": 0.5}
    for name, f in lists.items():
        assert float(hodiff.hessian(f, point)[0, 1]) == pytest.approx(expected[name])
    zero: Function = lambda x: torch._foreach_pow(0.0, [x + 5])[0]
    assert float(hodiff.nth_derivative(zero, number, 3)) == 0


def test_a_derivative_that_f_takes_of_a_power_in_a_view() -> None:
    def f(p: Tensor) -> Tensor:
        return torch.autograd.grad(assigned(p), p, create_graph=True)[0][0]

    found = hodiff.grad(f, torch.tensor([2.0, 0.0], dtype=D))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5], dtype=D))


@pytest.mark.parametrize(("b", "order"), [(0.0, 2), (1.0, 3), (2.0, 4)])
def test_a_graph_that_hides_it_in_a_view_is_refused(b: float, order: int) -> None:
    x = torch.tensor([2.0, 0.5], dtype=D, requires_grad=True)

    def given() -> Tensor:
        y = x * 1
        y[:1].pow_(b * x[:1] / x[:1].detach())
        return y * 1

    with pytest.raises(GraphError, match=rf"order {order} of a \*\* b is silently wrong .* where b is 0"):
        hodiff.nth_derivative(given(), x, order)
    if order > 2:
        hodiff.nth_derivative(given(), x, order - 1)
