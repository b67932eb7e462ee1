"""Functions with derivatives written out by hand: exact oracles that use no differentiation at all."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """A scalar function of one tensor with its gradient and Hessian ``(D, D)`` in closed form."""

    name: str
    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    hessian: Callable[[Tensor], Tensor]
    size: int = 4

    def point(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """A fixed generic point, neither at a kink nor at a symmetry."""
        return (torch.linspace(-0.9, 1.3, self.size, dtype=torch.float64) + 0.05).to(dtype)

    def __repr__(self) -> str:
        return self.name


def _coefficients(size: int, like: Tensor) -> Tensor:
    index = torch.arange(size, dtype=like.dtype, device=like.device)
    return torch.cos(1.7 * index) + 0.3


def _matrix(size: int, like: Tensor) -> Tensor:
    """A fixed, deliberately non-symmetric matrix: its quadratic form has the Hessian A + A^T."""
    index = torch.arange(size * size, dtype=like.dtype, device=like.device)
    return torch.sin(0.9 * index + 0.4).reshape(size, size)


def _quadratic(x: Tensor) -> Tensor:
    return x @ _matrix(x.numel(), x) @ x + _coefficients(x.numel(), x) @ x + 3.0


def _quadratic_gradient(x: Tensor) -> Tensor:
    a = _matrix(x.numel(), x)
    return (a + a.T) @ x + _coefficients(x.numel(), x)


def _quadratic_hessian(x: Tensor) -> Tensor:
    a = _matrix(x.numel(), x)
    return a + a.T


def _sin_product(x: Tensor) -> Tensor:
    return torch.sin(x).prod()


def _sin_product_gradient(x: Tensor) -> Tensor:
    return torch.sin(x).prod() / torch.tan(x)


def _sin_product_hessian(x: Tensor) -> Tensor:
    cot = 1 / torch.tan(x)
    off = torch.outer(cot, cot)
    off.fill_diagonal_(-1.0)
    return torch.sin(x).prod() * off


def _logsumexp_hessian(x: Tensor) -> Tensor:
    p = torch.softmax(x, 0)
    return torch.diag(p) - torch.outer(p, p)


def _polynomial(x: Tensor) -> Tensor:
    return (_coefficients(x.numel(), x) * (x**5 - 2 * x**3)).sum() + x[0] ** 2 * x[-1]


def _polynomial_gradient(x: Tensor) -> Tensor:
    g = _coefficients(x.numel(), x) * (5 * x**4 - 6 * x**2)
    g[0] += 2 * x[0] * x[-1]
    g[-1] += x[0] ** 2
    return g


def _polynomial_hessian(x: Tensor) -> Tensor:
    h = torch.diag(_coefficients(x.numel(), x) * (20 * x**3 - 12 * x))
    h[0, 0] += 2 * x[-1]
    h[0, -1] += 2 * x[0]
    h[-1, 0] += 2 * x[0]
    return h


def _rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def _rosenbrock_gradient(x: Tensor) -> Tensor:
    g = torch.zeros_like(x)
    gap = x[1:] - x[:-1] ** 2
    g[:-1] += -400 * x[:-1] * gap - 2 * (1 - x[:-1])
    g[1:] += 200 * gap
    return g


def _rosenbrock_hessian(x: Tensor) -> Tensor:
    n = x.numel()
    h = torch.zeros(n, n, dtype=x.dtype)
    for i in range(n - 1):
        h[i, i] += 1200 * x[i] ** 2 - 400 * x[i + 1] + 2
        h[i, i + 1] += -400 * x[i]
        h[i + 1, i] += -400 * x[i]
        h[i + 1, i + 1] += 200
    return h


def _linear_gradient(x: Tensor) -> Tensor:
    return _coefficients(x.numel(), x)


def _zero_hessian(x: Tensor) -> Tensor:
    return torch.zeros(x.numel(), x.numel(), dtype=x.dtype)


PROBLEMS = (
    Problem("quadratic", _quadratic, _quadratic_gradient, _quadratic_hessian, 5),
    Problem("sin_product", _sin_product, _sin_product_gradient, _sin_product_hessian, 4),
    Problem("logsumexp", lambda x: torch.logsumexp(x, 0), lambda x: torch.softmax(x, 0), _logsumexp_hessian, 6),
    Problem("polynomial", _polynomial, _polynomial_gradient, _polynomial_hessian, 4),
    Problem("rosenbrock", _rosenbrock, _rosenbrock_gradient, _rosenbrock_hessian, 4),
    Problem("linear", lambda x: _coefficients(x.numel(), x) @ x, _linear_gradient, _zero_hessian, 3),
    Problem("one_variable", lambda x: (x**3).sum(), lambda x: 3 * x**2, lambda x: torch.diag(6 * x), 1),
)


@dataclass(frozen=True)
class Elementwise:
    """A function of one real number with its n-th derivative in closed form."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, int], Tensor]

    def __repr__(self) -> str:
        return self.name


def _power_derivative(x: Tensor, n: int, power: int = 4) -> Tensor:
    factor = 1
    for k in range(n):
        factor *= power - k
    return factor * x ** max(power - n, 0) if factor else torch.zeros_like(x)


ELEMENTWISE = (
    Elementwise("sin", torch.sin, lambda x, n: torch.sin(x + n * torch.pi / 2)),
    Elementwise("exp", torch.exp, lambda x, n: torch.exp(x)),
    Elementwise("exp_3x", lambda x: torch.exp(3 * x), lambda x, n: 3.0**n * torch.exp(3 * x)),
    Elementwise("fourth_power", lambda x: (x**2) ** 2, _power_derivative),
    Elementwise(
        "reciprocal",
        lambda x: 1 / (x + 5),
        lambda x, n: (
            (-1.0) ** n
            * float(torch.exp(torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64))))
            / (x + 5) ** (n + 1)
        ),
    ),
    Elementwise(
        "linear", lambda x: 2 * x, lambda x, n: [2 * x, torch.full_like(x, 2.0)][n] if n < 2 else torch.zeros_like(x)
    ),
)
