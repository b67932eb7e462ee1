r"""Elementwise operations: their Taylor coefficients at the value, by closed recurrences.

For \(y = f(x)\) entry by entry only \(s_m = f^{(m)}(x_0) / m!\) is needed, of the size of the
value; `composed` does the rest. Each function below gives \(s_0 \dots s_K\) from the differential
equation that f satisfies, in plain PyTorch: right at any order, differentiable, and jets of an
outer expansion pass through. A number stands for a constant coefficient, None for zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hodiff._core import _refusals
from hodiff.jets import _jet
from hodiff.jets._jet import (
    NoRule,
    first_order,
    operation,
    rule,
    series_of,
    value_and_tangent,
)
from hodiff.jets._series import Expansion, Series, added, aligned, composed, scaled, total

Coefficients = Callable[..., Series]


def elementwise(*names: str) -> Callable[[Coefficients], Coefficients]:
    """Register `coefficients(x0, order, *args, **kwargs)` under names of
    operations of one tensor.
    """

    def register(coefficients: Coefficients) -> Coefficients:
        def apply(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
            given = dict(kwargs)
            x, rest = (args[0], args[1:]) if args else (given.pop("input"), ())
            given.pop("inplace", None)
            if ((rest or given) and _jet.jets_among((rest, given))) or not _jet.belongs(
                x, expansion
            ):
                raise NoRule(names[0], "with a parameter that depends on the variable")
            series = series_of(x, expansion)
            return composed(
                expansion, coefficients(series[0], expansion.order, *rest, **given), series
            )

        rule("elementwise", *names)(apply)
        return coefficients

    return register


def looked(root: Any, order: int, *, at_zero: bool = False) -> Any:
    """A norm or a root; with a warning where it is near 0, where that is seen without a wait."""
    value = root
    while isinstance(value, _jet.Jet):
        order += value.expansion.order
        value = value.series[0]
    if order > 2 - at_zero and value.is_cpu:
        _refusals.warn_if_near(order, value, at_zero=at_zero)
    return root


def integrated(value: Any, derivative: Series) -> Series:
    """The series of f from its value and the series of f'."""
    return [value, *(scaled(d, 1 / (m + 1)) for m, d in enumerate(derivative))]


def squared(s: Series, m: int) -> Any:
    """Coefficient m of the square of a primal series."""
    product = None
    for j in range((m + 1) // 2):
        product = added(product, s[j], s[m - j])
    product = scaled(product, 2)
    return product if m % 2 else added(product, s[m // 2], s[m // 2])


@elementwise("tanh")
def tanh(x: Any, order: int) -> Series:
    """Y' = 1 - y²."""
    y = torch.tanh(x)
    minus = y * y - 1  # a number on the left of a minus is slow in PyTorch
    s = [y, -minus]
    for m in range(1, order):
        s.append(squared(s, m) * (-1 / (m + 1)) if m > 1 else y * minus)
    return s[: order + 1]


@elementwise("sigmoid", "special_expit", "expit")
def sigmoid(x: Any, order: int) -> Series:
    """Y' = y (1 - y)."""
    y = torch.sigmoid(x)
    s = [y, y - y * y]
    for m in range(1, order):
        s.append((s[m] - squared(s, m)) * (1 / (m + 1)) if m > 1 else (0.5 - y) * s[1])
    return s[: order + 1]


def _growing(y: Any, rate: float, order: int) -> Series:
    """The coefficients of y' = rate y."""
    return [scaled(y, rate**m / math.factorial(m)) for m in range(order + 1)]


def _waves(even: Any, odd: Any, signs: tuple[int, ...], order: int) -> Series:
    """Two functions that are each other's derivatives, up to signs."""
    return [
        scaled((even, odd)[m % 2], signs[m % len(signs)] / math.factorial(m))
        for m in range(order + 1)
    ]


@elementwise("tan")
def tan(x: Any, order: int) -> Series:
    """Y' = 1 + y²."""
    s = [torch.tan(x)]
    for m in range(order):
        square = squared(s, m)
        s.append((1 + square if m == 0 else square) * (1 / (m + 1)))
    return s


def power_series(x: Any, p: float, order: int) -> Series:
    """The coefficients of x**p: binomial(p, m) x**(p - m); those that are constant, as numbers."""
    s: Series = []
    binomial = 1.0
    for m in range(order + 1):
        if binomial == 0:
            s.append(None)
        elif p == m:
            s.append(torch.ones_like(x) if m == 0 else binomial)
        else:
            s.append(scaled(torch.pow(x, p - m) if p - m != 1 else x, binomial))
        binomial *= (p - m) / (m + 1)
    return s


def _falling(value: Any, x: Any, p: float, order: int) -> Series:
    """The coefficients of x**p, each from the one before: s_m = s_{m-1} (p - m + 1) / (m x)."""
    s, inverse = [value], 1 / x
    for m in range(1, order + 1):
        s.append(s[-1] * inverse * ((p - m + 1) / m))
    return s


def _of_quadratic(p: float, c0: Any, c1: Any, c2: float, order: int) -> Series:
    """q**p for q = c0 + c1 t + c2 t²: m c0 y_m = (p - m + 1) c1 y_{m-1} + (2p - m + 2)
    c2 y_{m-2}.
    """
    y = [torch.pow(c0, p)]
    for m in range(1, order + 1):
        coefficient = c1 * y[m - 1] * (p - m + 1)
        if m > 1:
            coefficient = coefficient + y[m - 2] * (c2 * (2 * p - m + 2))
        y.append(coefficient / (c0 * m))
    return y


def _gaussian(x: Any, scale: float, rate: float, order: int) -> Series:
    """Scale * exp(-rate x²): y' = -2 rate x y."""
    s = [torch.exp(x * x * -rate) * scale]
    for m in range(order):
        coefficient = x * s[m] if m == 0 else x * s[m] + s[m - 1]
        s.append(coefficient * (-2 * rate / (m + 1)))
    return s


@elementwise("special_ndtr", "ndtr")
def ndtr(x: Any, order: int) -> Series:
    """The normal distribution function: y' = exp(-x²/2)/√(2π)."""
    value = torch.erfc(x * -math.sqrt(0.5)) * 0.5
    return integrated(value, _gaussian(x, 1 / math.sqrt(2 * math.pi), 0.5, order - 1))


def times_variable(x: Any, s: Series, value: Any) -> Series:
    """The series of x g(x) from that of g."""
    return [value, *(x * s[m] + s[m - 1] for m in range(1, len(s)))]


@elementwise("gelu")
def gelu(x: Any, order: int, approximate: str = "none") -> Series:
    """X Φ(x); or x times the sigmoid of a cubic, in the other approximation."""
    value = F.gelu(x, approximate=approximate)
    if approximate == "none":
        return times_variable(x, ndtr(x, order), value)
    c = 2 * math.sqrt(2 / math.pi)
    inner = [
        (x + 0.044715 * x**3) * c,
        (1 + 0.134145 * x * x) * c,
        x * (0.134145 * c),
        0.044715 * c,
    ]
    inner = [*inner, *[None] * order][: order + 1]
    return times_variable(x, _logistic_of(inner, order), value)


def _logistic_of(inner: Series, order: int) -> Series:
    """Y = σ(u) from the series of u, by y' = y (1 - y) u'."""
    y: Series = [torch.sigmoid(inner[0])]
    w: Series = []
    for k in range(1, order + 1):
        w.append(y[k - 1] - squared(y, k - 1))
        coefficient = None
        for j in range(1, k + 1):
            if inner[j] is not None:
                coefficient = total(coefficient, w[k - j] * inner[j] * (j / k))
        y.append(coefficient)
    return y


@elementwise("silu")
def silu(x: Any, order: int) -> Series:
    """The SiLU function: x σ(x)."""
    s = sigmoid(x, order)
    return times_variable(x, s, x * s[0])


@elementwise("softplus")
def softplus(x: Any, order: int, beta: float = 1.0, threshold: float = 20.0) -> Series:
    """Y' = σ(βx); the identity above the threshold, as PyTorch has it."""
    value = F.softplus(x, beta=beta, threshold=threshold)
    s = sigmoid(beta * x, order - 1)
    linear = beta * x > threshold
    curved = [s[m - 1] * (beta ** (m - 1) / m) for m in range(1, order + 1)]
    return [value, *(torch.where(linear, 0.0 if m else 1.0, part) for m, part in enumerate(curved))]


@elementwise("logsigmoid", "log_sigmoid")
def logsigmoid(x: Any, order: int) -> Series:
    """Y' = 1 - σ(x)."""
    s = sigmoid(x, order - 1)
    return [F.logsigmoid(x), torch.sigmoid(-x), *(s[m - 1] * (-1 / m) for m in range(2, order + 1))]


@rule("elementwise", "pow", "float_power")
def power(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """`x ** p` for a number or a constant tensor p, `a ** x`, and `x ** y` as exp(y log x)."""
    base, exponent = [*args, *kwargs.values()][:2]
    if operation(func) == "float_power" and getattr(base, "dtype", torch.float64) != torch.float64:
        raise NoRule("float_power", "it changes the dtype; use pow")
    if not _jet.belongs(exponent, expansion):
        series = series_of(base, expansion)
        if isinstance(exponent, (int, float)):
            return composed(expansion, power_series(series[0], exponent, expansion.order), series)
        if not (_jet.is_jet(exponent) or exponent.requires_grad):
            return _tensor_power(expansion, series, exponent)
    series = series_of(exponent, expansion)
    if _jet.belongs(base, expansion):
        return _power_of_both(expansion, base, exponent)
    value = torch.pow(base, series[0])
    if isinstance(base, (int, float)):
        logarithm: Any = math.log(base)
    else:
        logarithm = torch.where((base == 0) & (series[0] >= 0), 0.0, torch.log(base))
    s: Series = [value]
    for m in range(1, expansion.order + 1):
        s.append(s[-1] * logarithm * (1 / m))
    return composed(
        expansion, s, [value, *(None if c is None else aligned(c, value.ndim) for c in series[1:])]
    )


def _power_of_both(expansion: Expansion, base: Any, exponent: Any) -> Series:
    """X ** y = x ** y_0 exp((y - y_0) log x): of whole y_0 it has a value also where x is negative,
    and 0 ** y is 0.
    """
    from hodiff._core._substitutes import BY_DEFINITION

    start = _jet.value_of(exponent).detach()
    still = _jet.value_of(base).detach() == 0
    logarithm = torch.log(torch.where(still, 1.0, base))
    power = series_of(torch.pow(base, start) * torch.exp((exponent - start) * logarithm), expansion)
    return [
        BY_DEFINITION["pow"](series_of(base, expansion)[0], series_of(exponent, expansion)[0]),
        *power[1:],
    ]


def _tensor_power(expansion: Expansion, series: Series, exponent: Any) -> Series:
    """X ** p for a tensor p: a coefficient whose binomial vanishes is zero also
    where its power of x is infinite.
    """
    x = series[0]
    s: Series = [torch.pow(x, exponent)]
    binomial = torch.ones_like(exponent)
    for m in range(1, expansion.order + 1):
        binomial = binomial * (exponent - (m - 1)) * (1 / m)
        s.append(
            torch.where(
                binomial == 0,
                0.0,
                binomial * torch.pow(x, torch.where(binomial == 0, 1.0, exponent - m)),
            )
        )
    ndim = s[0].ndim
    return composed(
        expansion, s, [x, *(None if c is None else aligned(c, ndim) for c in series[1:])]
    )


# --- elementwise operations put together from pieces: their derivatives at a kink are those of
# PyTorch, or zero


@elementwise("elu")
def elu(
    x: Any, order: int, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Series:
    """An exponential below zero, linear above."""
    below = torch.exp(torch.clamp(x, max=0) * input_scale)
    y = [torch.where(x > 0, x * scale, (below - 1) * (alpha * scale))]
    for m in range(1, order + 1):
        part = below * (alpha * scale * input_scale**m / math.factorial(m))
        y.append(torch.where(x > 0, scale, part) if m == 1 else torch.where(x < 0, part, 0.0))
    return y


# --- tables: operations of which a formula says all -----------------------------------------------


SERIES: dict[str, Coefficients] = {
    "exp": lambda x, order: _growing(torch.exp(x), 1.0, order),
    "exp2 special_exp2": lambda x, order: _growing(torch.exp2(x), math.log(2), order),
    "sin": lambda x, order: _waves(torch.sin(x), torch.cos(x), (1, 1, -1, -1), order),
    "cos": lambda x, order: _waves(torch.cos(x), torch.sin(x), (1, -1, -1, 1), order),
    "sinh": lambda x, order: _waves(torch.sinh(x), torch.cosh(x), (1,), order),
    "cosh": lambda x, order: _waves(torch.cosh(x), torch.sinh(x), (1,), order),
    "square": lambda x, order: power_series(x, 2, order),
    "sqrt": lambda x, order: _falling(looked(torch.sqrt(x), order), x, 0.5, order),
    "rsqrt": lambda x, order: _falling(torch.rsqrt(x), x, -0.5, order),
    "reciprocal": lambda x, order: _falling(torch.reciprocal(x), x, -1.0, order),
    "digamma special_psi special_digamma": lambda x, order: [
        torch.digamma(x),
        *(torch.polygamma(m, x) * (1 / math.factorial(m)) for m in range(1, order + 1)),
    ],
    "celu": lambda x, order, alpha=1.0: elu(x, order, alpha, 1.0, 1 / alpha),
    "selu": lambda x, order: elu(x, order, 1.6732632423543772, 1.0507009873554805),
}
"""All coefficients."""

INTEGRALS: dict[str, tuple[Callable[[Any], Any], Coefficients]] = {
    "expm1 special_expm1": (torch.expm1, SERIES["exp"]),
    "log": (torch.log, SERIES["reciprocal"]),
    "log2": (torch.log2, lambda x, order: _falling(1 / (x * math.log(2)), x, -1.0, order)),
    "log10": (torch.log10, lambda x, order: _falling(1 / (x * math.log(10)), x, -1.0, order)),
    "log1p special_log1p": (torch.log1p, lambda x, order: SERIES["reciprocal"](1 + x, order)),
    "atan arctan": (torch.atan, lambda x, order: _of_quadratic(-1, 1 + x * x, 2 * x, 1, order)),
    "atanh arctanh": (
        torch.atanh,
        lambda x, order: _of_quadratic(-1, 1 - x * x, -2 * x, -1, order),
    ),
    "asin arcsin": (torch.asin, lambda x, order: _of_quadratic(-0.5, 1 - x * x, -2 * x, -1, order)),
    "acos arccos": (
        torch.acos,
        lambda x, order: [-s for s in _of_quadratic(-0.5, 1 - x * x, -2 * x, -1, order)],
    ),
    "asinh arcsinh": (
        torch.asinh,
        lambda x, order: _of_quadratic(-0.5, x * x + 1, 2 * x, 1, order),
    ),
    "acosh arccosh": (
        torch.acosh,
        lambda x, order: _of_quadratic(-0.5, x * x - 1, 2 * x, 1, order),
    ),
    "erf special_erf": (
        torch.erf,
        lambda x, order: _gaussian(x, 2 / math.sqrt(math.pi), 1.0, order),
    ),
    "erfc special_erfc": (
        torch.erfc,
        lambda x, order: _gaussian(x, -2 / math.sqrt(math.pi), 1.0, order),
    ),
    "lgamma special_gammaln": (torch.lgamma, SERIES["digamma special_psi special_digamma"]),
}
"""The function, and the coefficients of its derivative."""

LINES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "relu": lambda x: (torch.relu(x), x > 0),
    "relu6": lambda x: (torch.clamp(x, 0, 6), (x > 0) & (x < 6)),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: (
        torch.clamp(x, min_val, max_val),
        (x > min_val) & (x < max_val),
    ),
    "leaky_relu": lambda x, negative_slope=0.01: (
        F.leaky_relu(x, negative_slope),
        torch.where(x > 0, torch.ones_like(x), negative_slope),
    ),
    "threshold": lambda x, threshold, value: (torch.where(x > threshold, x, value), x > threshold),
    "hardshrink": lambda x, lambd=0.5: (F.hardshrink(x, lambd), (x > lambd) | (x < -lambd)),
    "softshrink": lambda x, lambd=0.5: (F.softshrink(x, lambd), (x > lambd) | (x < -lambd)),
    "abs fabs": lambda x: (torch.abs(x), torch.sign(x)),
    "nan_to_num": lambda x, nan=0.0, posinf=None, neginf=None: (
        torch.nan_to_num(x, nan, posinf, neginf),
        torch.isfinite(x),
    ),
}
"""The value and the slope of what is linear in pieces;
higher derivatives are zero nearly everywhere.
"""


def _integral(value: Callable[[Any], Any], derivative: Coefficients) -> Coefficients:
    return lambda x, order: integrated(value(x), derivative(x, order - 1))


def _line(value_and_slope: Callable[..., tuple[Any, Any]]) -> Coefficients:
    def coefficients(x: Any, order: int, *args: Any, **kwargs: Any) -> Series:
        value, slope = value_and_slope(x, *args, **kwargs)
        return [value, slope.to(x.dtype), *[None] * (order - 1)]

    return coefficients


for _names, _coefficients in {
    **SERIES,
    **{names: _integral(*given) for names, given in INTEGRALS.items()},
    **{names: _line(given) for names, given in LINES.items()},
}.items():
    elementwise(*_names.split())(_coefficients)


# --- first order in one direction: PyTorch's backward kernels, where Jacobians are symmetric ------


_ATEN = torch.ops.aten


def _bent(x: Any, t: Any) -> tuple[Any, Any]:
    """The SiLU function; PyTorch's kernel of its slope has no derivative."""
    value, s = F.silu(x), torch.sigmoid(x)
    return value, t * torch.addcmul(s, value, 1 - s)


def _along_softmax(x: Any, t: Any, dim: int | None = None, dtype: Any = None) -> Any:
    if dim is None:
        return NotImplemented
    value = F.softmax(x, dim, dtype=dtype)
    return value, vars(torch)["_softmax_backward_data"](t.to(value.dtype), value, dim, value.dtype)


def _along_log_softmax(x: Any, t: Any, dim: int | None = None, dtype: Any = None) -> Any:
    if dim is None:
        return NotImplemented
    value = F.log_softmax(x, dim, dtype=dtype)
    wide = torch.promote_types(value.dtype, torch.float32)  # in which PyTorch takes sums
    return value, t - (F.softmax(x, dim, dtype=wide) * t).sum(dim, keepdim=True)


TANGENTS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, t: (torch.relu(x), _ATEN.threshold_backward(t, x, 0)),
    "tanh": lambda x, t: (y := torch.tanh(x), _ATEN.tanh_backward(t, y)),
    "sigmoid expit special_expit": lambda x, t: (
        y := torch.sigmoid(x),
        _ATEN.sigmoid_backward(t, y),
    ),
    "gelu": lambda x, t, approximate="none": (
        F.gelu(x, approximate=approximate),
        _ATEN.gelu_backward(t, x, approximate=approximate),
    ),
    "silu": _bent,
    "softmax special_softmax": _along_softmax,
    "log_softmax special_log_softmax": _along_log_softmax,
}
"""The value and the tangent of an operation of one tensor, from those of that."""


def _of_one(along: Callable[..., Any]) -> Callable[..., Any]:
    def formula(input: Any, *args: Any, **kwargs: Any) -> Any:
        x, t = value_and_tangent(input)
        return NotImplemented if t is None else along(x, t, *args, **kwargs)

    return formula


for _names, _along in TANGENTS.items():
    first_order(*_names.split())(_of_one(_along))
