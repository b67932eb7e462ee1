"""An automatic route never goes where Taylor mode refuses because there is no derivative; and orders have a bound."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff._core import _messages

D = torch.float64
X = torch.tensor([[0.3, 0.7]], dtype=D)

CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bessel_j0": torch.special.bessel_j0,
    "airy_ai": torch.special.airy_ai,
    "chebyshev_polynomial_t": lambda z: torch.special.chebyshev_polynomial_t(z, 3),
}
"""Smooth, and constants to autograd on some release; what gets a derivative from hodiff leaves this table."""
CONSTANTS = {name: f for name, f in CONSTANTS.items() if not f(X.clone().requires_grad_()).requires_grad}

CALLS: dict[str, Callable[..., Any]] = {
    "laplacian": lambda h, v, **k: hodiff.laplacian(h, X, **k),
    "laplacian, estimated": lambda h, v, **k: hodiff.laplacian(h, X, samples=2, **k),
    "value_grad_and_laplacian": lambda h, v, **k: hodiff.value_grad_and_laplacian(h, X, **k),
    "second_order_operator": lambda h, v, **k: hodiff.second_order_operator(h, X, torch.eye(2, dtype=D), **k),
    "biharmonic": lambda h, v, **k: hodiff.biharmonic(h, X, **k),
    "divergence": lambda h, v, **k: hodiff.divergence(v, X, **k),
    "value_and_divergence": lambda h, v, **k: hodiff.value_and_divergence(v, X, **k),
    "curl": lambda h, v, **k: hodiff.curl(v, X, **k),
    **{f"partial, order {n}": lambda h, v, n=n, **k: hodiff.partial(h, X, (0,) * n, **k) for n in range(1, 5)},
    "partials": lambda h, v, **k: hodiff.partials(h, X, [(), (0, 0), (0, 1)], **k),
    "partials of several": lambda h, v, **k: hodiff.partials(v, X, [(0, 0), (1, 1)], **k),
    "partials, has_aux": lambda h, v, **k: hodiff.partials(lambda z: (h(z), z), X, [0], has_aux=True, **k),
    **{f"nth_derivative, {n}": lambda h, v, n=n, **k: hodiff.nth_derivative(v, X, n, **k) for n in range(1, 5)},
    "derivatives": lambda h, v, **k: hodiff.derivatives(v, X, 2, **k),
}


@pytest.mark.table(wide=60)
@pytest.mark.filterwarnings("ignore:.*Nested reverse mode is used:hodiff.HodiffWarning")
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind an operation without a rule"])
@pytest.mark.parametrize("operation", CONSTANTS)
@pytest.mark.parametrize("name", CALLS)
def test_no_derivative_is_final(name: str, operation: str, behind: bool, create_graph: bool) -> None:
    """Beside another term that depends on x, the part that is lost would not be seen."""
    first = torch.vmap(lambda y: y * 1.0) if behind else lambda z: z
    v = lambda z: CONSTANTS[operation](first(z)) + z**3
    with pytest.raises(hodiff.GraphError, match=f"{operation}: PyTorch has no derivative of it"):
        CALLS[name](lambda z: v(z).sum(-1), v, create_graph=create_graph)


def test_reverse_mode_by_name_refuses_it_too() -> None:
    """Where each call is seen; and constants of other things are no concern."""
    f = lambda z: (torch.special.airy_ai(z) + z**3).sum(-1)
    with pytest.raises(hodiff.GraphError, match="treats the result of special_airy_ai as a constant"):
        hodiff.laplacian(f, X, method="reverse")
    g = lambda z: (torch.special.airy_ai(X) * z**3).sum(-1)
    torch.testing.assert_close(hodiff.partial(g, X, (0, 0)), 6 * X[:, 0] * torch.special.airy_ai(X)[:, 0])


def test_the_table_of_smooth_operations_is_not_empty() -> None:
    assert len(_messages.CONSTANTS) > 15


@pytest.mark.parametrize("n", [20, 21, 22, 60, 169, 170])
def test_orders_up_to_170_are_right(n: int) -> None:
    x = torch.tensor([0.5, 1.2], dtype=D)
    expected = [torch.sin, torch.cos, lambda z: -torch.sin(z), lambda z: -torch.cos(z)][n % 4](x)
    torch.testing.assert_close(hodiff.nth_derivative(torch.sin, x, n), expected)
    torch.testing.assert_close(hodiff.derivatives(torch.sin, x, n)[-1], expected)
    torch.testing.assert_close(hodiff.partial(lambda z: torch.sin(z).sum(-1), x[None], (0,) * n), expected[:1])
    _, coefficients = hodiff.jet(torch.exp, x, [torch.ones_like(x), *[torch.zeros_like(x)] * (n - 1)])
    torch.testing.assert_close(coefficients[-1], x.exp())


@pytest.mark.parametrize(("dtype", "last"), [(torch.float64, 170), (torch.float32, 33), (torch.float16, 7)])
def test_orders_beyond_the_numbers_of_a_dtype_are_refused(dtype: torch.dtype, last: int) -> None:
    x = torch.tensor([0.5], dtype=dtype)
    got = hodiff.nth_derivative(lambda z: z**last, x, last)
    assert abs(math.log(float(got)) - math.lgamma(last + 1)) < 1e-3
    for call in (hodiff.nth_derivative, hodiff.derivatives):
        with pytest.raises(hodiff.InputError, match=f"order {last + 1} is too high for Taylor mode in {dtype}"):
            call(torch.exp, x, last + 1)
    with pytest.raises(hodiff.InputError, match=f"order {last + 1} is too high"):
        hodiff.jet(torch.exp, x, [x] * (last + 1))
    with pytest.raises(hodiff.InputError, match=f"order {last + 1} is too high"):
        hodiff.partial(lambda z: z.exp().sum(-1), x[None], (0,) * (last + 1))


def test_what_pytorch_has_a_derivative_of_is_no_constant() -> None:
    """From 2.15 on Bessel functions have theirs."""
    j0 = torch.special.bessel_j0
    if not j0(X.clone().requires_grad_()).requires_grad:
        return
    f = lambda z: (j0(z) + z**3).sum(-1)
    expected = (6 * X - j0(X) + torch.special.bessel_j1(X) / X).sum(-1)
    torch.testing.assert_close(hodiff.laplacian(f, X, method="jets"), expected)
    torch.testing.assert_close(sum(hodiff.partials(f, X, [(0, 0), (1, 1)])), expected)
