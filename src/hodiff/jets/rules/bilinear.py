"""Products: a convolution of the coefficients; of the top one,
the directions are summed with the product.
"""

from __future__ import annotations

from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F

from hodiff.jets import _jet
from hodiff.jets._jet import (
    NoRule,
    belongs,
    first_order,
    operation,
    rule,
    series_of,
    value_and_tangent,
)
from hodiff.jets._series import (
    Expansion,
    Series,
    aligned,
    convolved,
    each,
    full,
    product,
    quotient,
    total,
)


@rule("bilinear", "mul")
def multiply(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The product a b."""
    a, b = (series_of(x, expansion) for x in (*args, *kwargs.values()))
    return product(expansion, a, b)


@rule("bilinear", "div", "rdiv")
def divide(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The quotient a / b."""
    if kwargs.get("rounding_mode") is not None:
        return func(*_jet.replaced(args, _jet.value_of), **_jet.replaced(kwargs, _jet.value_of))
    a, b = [*args, *(kwargs[name] for name in kwargs if name != "rounding_mode")]
    if operation(func) == "rdiv":
        a, b = b, a
    return quotient(expansion, series_of(a, expansion), series_of(b, expansion))


@rule("bilinear", "matmul", "mm", "bmm", "mv", "dot")
def matmul(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A @ b, by NumPy's rules for vectors and stacks."""
    a, b = (series_of(x, expansion) for x in (*args, *kwargs.values()))
    row, column = a[0].ndim == 1, b[0].ndim == 1
    a = _matrices(a, -2) if row else _contracted(a, -1)
    b = _matrices(b, -1) if column else _contracted(b, -2)
    ndim = max(a[0].ndim, b[0].ndim)
    a = [a[0], *each(a[1:], lambda c: aligned(c, ndim))]
    b = [b[0], *each(b[1:], lambda c: aligned(c, ndim))]
    out = [convolved(expansion, a, b, k, torch.matmul) for k in range(expansion.order + 1)]
    if column:
        out = each(out, lambda c: c.squeeze(-1))
    if row:
        out = each(out, lambda c: c.squeeze(-1 if column else -2))
    return out


def _matrices(series: Series, dim: int) -> Series:
    """Vectors as matrices of one row or column."""
    shape = series[0].shape
    return [series[0].unsqueeze(dim), *each(series[1:], lambda c: full(c, shape).unsqueeze(dim))]


def _contracted(series: Series, dim: int) -> Series:
    """Matrices, whose coefficients get the dimensions of matrices at full size."""
    shape = series[0].shape
    return [series[0], *each(series[1:], lambda c: _full_matrices(c, shape, dim))]


def _full_matrices(coefficient: Any, shape: Any, dim: int) -> Any:
    """A coefficient with the matrix dimensions at full size; the others may stay small."""
    coefficient = aligned(coefficient, len(shape))
    if coefficient.shape[-1] == shape[-1] and coefficient.shape[-2] == shape[-2]:
        return coefficient
    if coefficient.shape[dim] == shape[dim] and coefficient.ndim > 2:
        return coefficient  # a size of one in a dimension that is kept broadcasts
    return coefficient.expand(*coefficient.shape[:-2], *shape[-2:])


@rule("bilinear", "linear")
def linear(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """X Wᵀ + b."""
    names = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x = names["input"]
    weight = names["weight"]
    bias = names.get("bias")
    series = series_of(x, expansion)
    if belongs(weight, expansion) or belongs(bias, expansion):
        made = torch.matmul(x, weight.mT if weight.ndim > 1 else weight)
        return series_of(made if bias is None else made + bias, expansion)
    width = series[0].shape[-1]
    wide = each(series[1:], lambda c: c if c.shape[-1] == width else c.expand(*c.shape[:-1], width))
    return [F.linear(series[0], weight, bias), *each(wide, lambda c: F.linear(c, weight))]


@first_order("matmul", "mm", "bmm")
def matmul_along(a: Any, b: Any) -> Any:
    """A matrix product without a dimension for directions, which would make copies of a stack."""
    (x, t), (y, u) = value_and_tangent(a), value_and_tangent(b)
    given = [pair for pair in ((t, y), (x, u)) if pair[0] is not None and pair[1] is not None]
    return torch.matmul(x, y), sum(starmap(torch.matmul, given[1:]), torch.matmul(*given[0]))


@rule("bilinear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))
def convolution(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A convolution: of constant weights the directions join the batch;
    those of weights are taken one by one.
    """
    names = ("input", "weight", "bias", "stride", "padding")
    given = dict(zip(names, args, strict=False)) | kwargs
    behind = _BEHIND[len(args) > 5 and "transpose" in operation(func)]
    given |= dict(zip(behind, args[5:], strict=False))
    x, w, bias = (series_of(given.pop(name, None), expansion) for name in names[:3])
    spatial, shape = w[0].ndim - 2, x[0].shape

    def convolve(a: Any, b: Any) -> Any:
        """A convolution of coefficients, which have a dimension for directions in front; of one
        factor it may be the value.
        """
        if b.ndim == w[0].ndim:
            made = func(full(a, shape).flatten(0, -spatial - 2), b, None, **given)
            return made.unflatten(0, (a.shape[0], *shape[: -spatial - 1]))
        kernels, apart = full(b, w[0].shape), a.ndim > len(shape)
        count = max(len(a), len(b)) if apart else len(b)
        signals = full(a, shape).expand(count, *shape) if apart else [a] * count
        pairs = zip(signals, kernels.expand(count, *w[0].shape), strict=True)
        return torch.stack([func(signal, kernel, None, **given) for signal, kernel in pairs])

    x, w = ([s[0], *each(s[1:], lambda c, s=s: aligned(c, s[0].ndim))] for s in (x, w))
    out = [convolved(expansion, x, w, k, convolve) for k in range(1, expansion.order + 1)]
    value = func(x[0], w[0], bias[0], **given)
    along = each(bias[1:], lambda c: full(c, bias[0].shape).reshape(len(c), -1, *[1] * spatial))
    along = each(along, lambda c: full(c, value.shape))
    return [value, *map(total, out, along)]


_BEHIND = {False: ("dilation", "groups"), True: ("output_padding", "groups", "dilation")}


@rule("composite", "addmm", "addbmm", "baddbmm", "addmv", "addr")
def add_product(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """β c + α a b."""
    kwargs = dict(kwargs)
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    c, a, b = [*args, *kwargs.values()]
    name = operation(func)
    made = torch.outer(a, b) if name == "addr" else torch.matmul(a, b)
    made = (made.sum(0) if name == "addbmm" else made) * alpha
    return made if beta == 0 else c * beta + made  # as in PyTorch, a NaN in c does not matter then


@rule("composite", "inner", "vdot", "linalg_vecdot", "vecdot")
def inner(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Σ a b over the last dimension."""
    a, b = args
    if not a.ndim or not b.ndim:
        return a * b
    if operation(func) == "inner" and a.ndim > 1 and b.ndim > 1:
        return (a.flatten(0, -2) @ b.flatten(0, -2).mT).reshape((*a.shape[:-1], *b.shape[:-1]))
    return (a * b).sum(kwargs.get("dim", -1))


@rule("bilinear", "einsum")
def einsum(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum of products in index notation, two at most of which are jets;
    directions get a letter of their own.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        raise NoRule("einsum in sublist format", "write the equation as a string")
    places = [i for i, operand in enumerate(operands) if belongs(operand, expansion)]
    if len(places) > 2:
        raise NoRule(
            "einsum of more than two operands that depend on the variable", "split it into two"
        )
    equation = equation.replace(" ", "")
    letter = next(
        c for c in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in equation
    )
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        )
    jets = [series_of(operands[i], expansion) for i in places]
    wide = [[x[0], *each(x[1:], lambda c, x=x: full(c, x[0].shape))] for x in jets]

    def multiply(*parts: Any) -> Any:
        """The sum of products, of values or of coefficients."""
        given = dict(zip(places, parts, strict=True))
        wider = [i for i, part in given.items() if part.ndim > operands[i].ndim]
        left = ",".join(letter * (i in wider) + term for i, term in enumerate(terms))
        values = [given.get(i, operand) for i, operand in enumerate(operands)]
        return torch.einsum(f"{left}->{letter * bool(wider)}{right}", *values)

    if len(wide) == 1:
        return each(wide[0], multiply)
    a, b = wide
    return [convolved(expansion, a, b, k, multiply) for k in range(expansion.order + 1)]
