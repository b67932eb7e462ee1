"""Functions whose derivatives PyTorch gets wrong at or near 0, written without what goes wrong
there.

PyTorch differentiates `sinc` and the Bessel functions J and I by formulas that divide by x: their
second, third or fourth derivatives lose all digits near 0 (the second of sinc at 1e-7 is 176882
where it should be 6e-7) and are NaN or
a wrong constant at 0, silently: here they are their series there.
Determinants are differentiated by dividing by pivots, or by differences of singular values.
Products are differentiated by dividing the result by each entry, so that the derivative of order n
loses digits as eps / x^(n - 1). Norms of an even power p are taken of |x|, and |x|^p has lost its
p-th derivative at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hodiff._core._refusals import is_even, warn_if_near

_SINC = [(-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(10)]


def sinc(input: Tensor) -> Tensor:
    """`torch.sinc`, by its series for entries below 0.1."""
    small = input.detach().abs() < 0.1
    far = math.pi * torch.where(small, 1.0, input)
    return torch.where(small, _even(torch.where(small, input, 0.0), _SINC), torch.sin(far) / far)


def _bessel(
    function: Callable[..., Tensor],
    n: int,
    sign: int,
    decay: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Tensor]:
    """J_n (sign -1) or I_n (sign 1), n being 0 or 1, times `decay`: by its series below 1."""
    series = [
        sign**k / (2 ** (2 * k + n) * math.factorial(k) * math.factorial(k + n)) for k in range(16)
    ]

    def written(input: Tensor, far: Callable[[Tensor], Tensor] = function) -> Tensor:
        small = input.detach().abs() < 1
        x = torch.where(small, input, 0.0)
        near = x * _even(x, series) if n else _even(x, series)
        near = near if decay is None else near * decay(x)
        return torch.where(small, near, far(torch.where(small, 1.0, input)))

    return written


def _decay(x: Tensor) -> Tensor:
    """exp(-|x|); at its kink, the mean of the derivatives on either side."""
    return torch.where(x.detach() == 0, torch.cosh(x), torch.exp(-x.abs()))


BESSEL: dict[str, Callable[..., Tensor]] = {
    "i0": _bessel(torch.special.i0, 0, 1),
    "i1": _bessel(torch.special.i1, 1, 1),
    "i0e": _bessel(torch.special.i0e, 0, 1, _decay),
    "i1e": _bessel(torch.special.i1e, 1, 1, _decay),
    "bessel_j0": _bessel(torch.special.bessel_j0, 0, -1),
    "bessel_j1": _bessel(torch.special.bessel_j1, 1, -1),
    "modified_bessel_i0": _bessel(torch.special.modified_bessel_i0, 0, 1),
    "modified_bessel_i1": _bessel(torch.special.modified_bessel_i1, 1, 1),
}
"""Those of `torch.special`; `far` is what they call for the other entries."""


def _even(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's rule for a series in x squared."""
    square, total = x * x, 0 * x + coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * square + coefficient
    return total


def prod(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.prod` by multiplying pairs of neighbors."""
    if dim is not None and not isinstance(dim, int):
        return torch.prod(input, dim, keepdim, dtype=dtype)
    x = input if dtype is None else input.to(dtype)
    x = x.reshape(-1) if dim is None or not x.ndim else x.movedim(dim, 0)
    if not (x.is_floating_point() or x.is_complex()):
        return (
            torch.prod(input, dtype=dtype)
            if dim is None
            else torch.prod(input, dim, keepdim, dtype=dtype)
        )
    while len(x) > 1:
        pairs, rest = x[: len(x) // 2 * 2], x[len(x) // 2 * 2 :]
        pairs = pairs[0::2] * pairs[1::2]
        x = torch.cat([pairs, rest]) if len(rest) else pairs
    product = x[0] if len(x) else x.sum(0) + 1
    return product.unsqueeze(dim) if keepdim and dim is not None and input.ndim else product


def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.cumprod` by its recursion."""
    x = input if dtype is None else input.to(dtype)
    if not (x.is_floating_point() or x.is_complex()):
        return torch.cumprod(x, dim)
    if not x.ndim or not x.shape[dim]:
        return x.clone()
    return torch.stack([*accumulate(x.unbind(dim), torch.mul)], dim)


def scatter_product(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`torch.scatter_reduce` of products: the factors of each entry, one after another,
    are multiplied in pairs.
    """
    if (
        reduce != "prod"
        or not index.numel()
        or not index.ndim
        or not (src.is_floating_point() or src.is_complex())
    ):
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    places, order = index.sort(dim=dim, stable=True)
    x = src.gather(dim, order)  # of a `src` that is larger than the index the rest is not used
    length, step = index.shape[dim], 1
    while step < length:
        same = places.narrow(dim, step, length - step) == places.narrow(dim, 0, length - step)
        factors = torch.where(same, x.narrow(dim, 0, length - step), 1.0)
        x = torch.cat([x.narrow(dim, 0, step), x.narrow(dim, step, length - step) * factors], dim)
        step *= 2
    beyond = torch.full_like(places.narrow(dim, 0, 1), input.shape[dim])
    last = places != torch.cat([places.narrow(dim, 1, length - 1), beyond], dim)
    places = torch.where(last, places, beyond)
    room = torch.cat([torch.ones_like(input), torch.ones_like(input.narrow(dim, 0, 1))], dim)
    products = room.scatter(dim, places, x).narrow(dim, 0, input.shape[dim])
    if include_self:
        return input * products
    met = room.to(torch.bool).scatter(dim, places, False).narrow(dim, 0, input.shape[dim])
    return torch.where(met, input, products)


def index_product(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """`torch.index_reduce` of products, as one of `scatter_product`."""
    if reduce != "prod" or not input.ndim:
        return torch.index_reduce(input, dim, index, source, reduce, include_self=include_self)
    shape = [-1 if d == dim % input.ndim else 1 for d in range(input.ndim)]
    places = index.reshape(shape).expand_as(source)
    return scatter_product(input, dim, places, source, reduce, include_self=include_self)


def det(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A spelling of `det`: of up to three rows, multiplied out."""

    def written(*args: Any, **kwargs: Any) -> Tensor:
        x: Any = args[0] if args else kwargs.get("A", kwargs.get("input"))
        given = len(args) + len(kwargs) == 1 and (x.is_floating_point() or x.is_complex())
        rows = x.shape[-1] if given and x.ndim >= 2 and x.shape[-2] == x.shape[-1] else 0
        if rows not in (1, 2, 3):
            return function(*args, **kwargs)
        if rows == 3:
            a, b, c = x.unbind(-2)
            return (a * (b.roll(-1, -1) * c.roll(-2, -1) - b.roll(-2, -1) * c.roll(-1, -1))).sum(-1)
        if rows == 2:
            return x[..., 0, 0] * x[..., 1, 1] - x[..., 0, 1] * x[..., 1, 0]
        return x[..., 0, 0].clone()

    return written


def norm(function: Callable[..., Tensor], first: str) -> Callable[..., Tensor]:
    """A norm whose power is called `first`: of even powers from 4 on,
    the root of a sum of those.
    """

    def written(*args: Any, order: int = 1, **kwargs: Any) -> Tensor:
        given = dict(zip(("input", first, "dim", "keepdim"), args, strict=False)) | kwargs
        x, p, dim = (
            given.pop("input", given.pop("x", None)),
            given.pop(first, None),
            given.pop("dim", None),
        )
        keep = given.pop("keepdim", False)
        given = {name: value for name, value in given.items() if value is not None}
        if (
            not is_even(p)
            or given
            or len(args) > 4
            or not isinstance(x, Tensor)
            or not x.is_floating_point()
        ):
            return function(*args, **kwargs)
        dims, still = tuple(range(x.ndim)) if dim is None else dim, x.detach()
        wide, size = still.abs().amax(dims, keepdim=True), still.abs().amax(dims, keepdim=keep)
        plain = (size == 0) | ~size.isfinite()
        if x.requires_grad:
            warn_if_near(order, size, at_zero=order > 1)
        total = ((x / torch.where((wide == 0) | ~wide.isfinite(), 1.0, wide)) ** p).sum(
            dims, keepdim=keep
        )
        return torch.where(
            plain, function(still, p, dims, keep), torch.where(plain, 1.0, total) ** (1 / p) * size
        )

    return written
