"""Functions run from their definition, where PyTorch's own derivatives are wrong or missing.

And, as each call is seen here, what else is not right: smooth functions that PyTorch takes for
constants, and operations whose tangents (forward mode inside of f) it gives wrong derivatives, are
refused or written otherwise.

PyTorch's double backward of `layer_norm`, `batch_norm` (training) and `instance_norm` is right, but
its derivative is not: a third derivative through them is 3-81 % off, silently
(pytorch#175754, pytorch#186256). That of `weight_norm` is wrong at second order already, by the
parameters: it takes the norm for a constant. The definitions below are plain arithmetic and right
at every order. `group_norm` and `rms_norm` are right as they are.

The tangent of these norms in forward mode has a wrong first derivative already: its rule reads the
mean and the deviation that the kernel returns beside its result, and autograd takes those for
constants.

At or near 0 others go wrong: PyTorch differentiates `sinc` and the Bessel functions J and I by
formulas that divide by x, so that their second, third or fourth derivatives lose all digits near 0
(the second of sinc at 1e-7 is 176882 where it should be 6e-7) and are NaN or a wrong constant at 0,
silently: here they are their series there. Determinants are differentiated by dividing by pivots,
or by differences of singular values. Products are differentiated by dividing the result by each
entry, so that the derivative of order n loses digits as eps / x^(n - 1). Norms of an even power p
are taken of |x|, and |x|^p has lost its p-th derivative at 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff._core import _call, _hooks, _messages, _settings, _versions
from hodiff._core._lending import OfCall
from hodiff._core._refusals import is_even, warn_if_near

__all__ = [
    "BY_DEFINITION",
    "ExactNorms",
]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`torch.nn.functional.layer_norm` from its definition."""
    dims = tuple(range(-len(normalized_shape), 0))
    return _affine(_standardize(input, dims, eps), weight, bias)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.nn.functional.batch_norm` from its definition;
    running statistics are updated as usual.
    """
    dims = (0, *range(2, input.ndim))
    if training or running_mean is None or running_var is None:
        if training and input.numel() == input.shape[1]:
            raise ValueError(
                "Expected more than 1 value per channel when training, "
                f"got input size {input.shape}"
            )
        _update(input, dims, running_mean, running_var, momentum)
        normal = _standardize(input, dims, eps)
    else:
        normal = (input - _per_channel(running_mean, input)) * (
            _per_channel(running_var, input) + eps
        ).rsqrt()
    return _affine(normal, _per_channel(weight, input), _per_channel(bias, input))


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.nn.functional.instance_norm` from its definition."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = tuple(range(2, input.ndim))
    _update(input, dims, running_mean, running_var, momentum)
    return _affine(
        _standardize(input, dims, eps), _per_channel(weight, input), _per_channel(bias, input)
    )


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
    **given: Any,
) -> Tensor:
    """`torch.nn.functional.group_norm`, with a bias that stands alone added by itself."""
    alone = weight is None
    result = torch.group_norm(input, num_groups, weight, None if alone else bias, *rest, **given)
    return result + _per_channel(bias, input) if alone and bias is not None else result


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`torch._weight_norm` from its definition, v g / |v|, with a norm for each index of `dim`."""
    dims = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / torch.linalg.vector_norm(v, dim=dims, keepdim=True))


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.hardsigmoid` from its definition;
    PyTorch has no second derivative of it.
    """
    result = F.hardtanh(input / 6, -0.5, 0.5) + 0.5
    return input.copy_(result) if inplace else result


def _standardize(input: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    # as the kernels accumulate
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    centered = wide - wide.mean(dims, keepdim=True)
    normal = centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    return normal.to(input.dtype)


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normal = normal * weight
    return normal if bias is None else normal + bias


def _per_channel(value: Any, input: Tensor) -> Any:
    return None if value is None else value.reshape(1, -1, *[1] * (input.ndim - 2))


def _update(
    input: Tensor, dims: tuple[int, ...], mean: Tensor | None, var: Tensor | None, momentum: float
) -> None:
    """Move the running statistics, as the kernels do (they are clones here, see `_lending`)."""
    # instance norm averages the statistics of its instances
    average = (0,) if 0 not in dims else ()
    with _settings.grad_mode(False):
        if mean is not None:
            batch_mean = input.mean(dims)
            mean.lerp_(
                (batch_mean.mean(average) if average else batch_mean).to(mean.dtype), momentum
            )
        if var is not None:
            batch_var = input.var(dims)
            var.lerp_((batch_var.mean(average) if average else batch_var).to(var.dtype), momentum)


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """`torch.logcumsumexp` by its recursion:
    PyTorch's backward takes the logarithm of the cotangent, zeros too.
    """
    if not input.ndim or not input.shape[dim]:
        return torch.cumsum(input, dim)  # of one entry it is that, too
    add = torch.logaddexp if input.is_complex() else _logaddexp
    return torch.stack([*accumulate(input.unbind(dim), add)], dim)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """`torch.logaddexp`, whose second derivative is not finite where one is much larger."""
    larger, smaller = torch.where(a > b, a, b), torch.where(a > b, b, a)
    return larger + F.softplus((smaller - larger).nan_to_num(0.0, neginf=-math.inf))


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


def _kernel(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.batch_norm` or `torch.instance_norm`, whose arguments have another order."""
    return lambda input, weight, bias, running_mean, running_var, *args, **kwargs: norm(
        input, running_mean, running_var, weight, bias, *args, **kwargs
    )


def _spellings(name: str) -> Iterator[Callable[..., Any]]:
    """The functions, methods and operators that PyTorch has under a name."""
    places = (torch, torch.linalg, torch.special, Tensor, torch.ops.aten)
    for place, prefix in product(places, ("", "linalg_", "_linalg_", "special_")):
        function = getattr(place, prefix + name, None)
        if function is not None:
            yield function
            if place is torch.ops.aten:
                yield from (getattr(function, overload) for overload in function.overloads())


_REPLACED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    _versions.weight_norm: weight_norm,  # what nn's weight_norm calls
    **dict.fromkeys(_spellings("logcumsumexp"), logcumsumexp),
    **dict.fromkeys(_spellings("prod"), prod),
    **dict.fromkeys(_spellings("cumprod"), cumprod),
    **dict.fromkeys(_spellings("scatter_reduce"), scatter_product),
    **dict.fromkeys(_spellings("index_reduce"), index_product),
    **dict.fromkeys(_spellings("sinc"), sinc),
    **{each: function for name, function in BESSEL.items() for each in _spellings(name)},
    F.hardsigmoid: hardsigmoid,
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.batch_norm: batch_norm,
    torch.batch_norm: _kernel(batch_norm),
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.instance_norm: instance_norm,
    torch.instance_norm: _kernel(instance_norm),
}


def _refusing(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        given = any(
            isinstance(each, Tensor) and each.requires_grad for each in (*args, *kwargs.values())
        )
        if given and torch.is_grad_enabled() and not result.requires_grad:
            raise _messages.constant(name)
        return result

    return refuse


_REPLACED |= {
    function: _refusing(name, function)
    for name in _messages.CONSTANTS
    for home in (torch.special if name.startswith("special_") else torch,)
    for function in (getattr(home, name.removeprefix("special_")),)
}


def _by_tangents(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is refused where an argument carries a tangent."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        if _call.tangents() and any(map(_call.carries_tangent, (*args, *kwargs.values()))):
            raise _messages.wrong_tangent(name)
        return function(*args, **kwargs)

    return choose


for _name in _messages.WRONG_TANGENTS:
    for _function in _spellings(_name):
        _REPLACED.setdefault(_function, _by_tangents(_name, _function))
_REPLACED |= {
    each: det(_REPLACED.get(each, each)) for each in (torch.linalg.det, torch.det, Tensor.det)
}


def power(base: Tensor, exponent: Tensor, *, base_varies: bool = True, order: int = 2) -> Tensor:
    """A power by a^b_0 exp((b - b_0) log a), for PyTorch's rule for a has zeros where b is 0, as if
    b were constant.

    Where a is 0 its derivatives by b are 0, as PyTorch has the first; its further ones are not
    numbers. Below 0, and where b is so small that a derivative of that order is infinite, all is as
    PyTorch has it.
    """
    base = base if base.is_floating_point() or base.is_complex() else base.to(exponent.dtype)
    value, start = base.detach(), exponent.detach()
    still = value == 0
    if value.is_complex() or start.is_complex():
        ours = ~still
    else:
        ours = (value > 0) | (still & (start > (order - 1 if base_varies else 0)))
    kept, logarithm = torch.where(ours, base, 1.0), torch.where(ours & ~still, base, 1.0).log()
    near = torch.pow(kept, start) * torch.exp((exponent - start) * logarithm)
    far = torch.pow(torch.where(ours, 1.0, base), torch.where(ours, 0.5, exponent))
    return torch.where(ours, near, far.to(near.dtype))


def _power(function: Callable[..., Any], wide: bool, inside: bool) -> Callable[..., Any]:
    """A spelling of `pow`, in double precision or in place,
    that is `power` where the exponent varies.
    """

    def varies(x: Tensor) -> bool:
        return x.requires_grad or (_call.tangents() and _call.carries_tangent(x))

    def choose(mode: ExactNorms, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) != 2 or not isinstance(given[1], Tensor) or not varies(given[1]):
            return function(*args, **kwargs)
        if not isinstance(given[0], Tensor):
            if given[0] != 0:
                return function(*args, **kwargs)
            given[0] = torch.zeros_like(given[1].detach())
        pair = [x.to(torch.promote_types(x.dtype, torch.float64)) for x in given] if wide else given
        base = pair[0].clone() if inside else pair[0]
        value = power(base, pair[1], base_varies=varies(given[0]), order=mode.order)
        return given[0].copy_(value) if inside else value

    return choose


_TOLD: dict[Callable[..., Any], Callable[..., Any]] = {
    function: _power(function, name == "float_power", bool(ending))
    for name, ending in product(("pow", "float_power"), ("", "_"))
    for function in _spellings(name + ending)
}
"""Definitions whose first argument is the mode in which they stand."""

_reflected = _power(lambda base, exponent: Tensor.__rpow__(exponent, base), False, False)
_TOLD |= {
    Tensor.__pow__: _TOLD[Tensor.pow],
    Tensor.__ipow__: _TOLD[Tensor.pow_],
    Tensor.__rpow__: lambda mode, exponent, base: _reflected(mode, base, exponent),
}


def _norm(function: Callable[..., Tensor], first: str) -> Callable[..., Tensor]:
    written = norm(function, first)
    return lambda mode, *args, **kwargs: written(*args, order=mode.order, **kwargs)


_TOLD |= {
    function: _norm(plain, "ord" if plain is torch.linalg.vector_norm else "p")
    for name, plain in (("norm", torch.norm), ("vector_norm", torch.linalg.vector_norm))
    for function in _spellings(name)
    if not function.__name__.startswith("linalg_norm")  # which may be that of a matrix
}


def _of_lists(single: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The spelling of a function that takes lists of tensors, and what they have in common."""
    return lambda mode, *args, **kwargs: [
        single(mode, *row, **kwargs)
        for row in zip(*(x if isinstance(x, Sequence) else repeat(x) for x in args), strict=False)
    ]


_TOLD |= {
    function: _of_lists(single)
    for name, single in (
        ("pow", _TOLD[Tensor.pow]),
        ("pow_", _TOLD[Tensor.pow_]),
        ("norm", _TOLD[torch.linalg.vector_norm]),
        ("sqrt", lambda mode, x: x.sqrt()),
    )
    for function in _spellings(f"_foreach_{name}")
}


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The spelling of a function that writes into its argument."""
    return lambda input, *args, **kwargs: input.copy_(function(input.clone(), *args, **kwargs))


_REPLACED |= {
    function: _in_place(_REPLACED.get(plain) or plain)
    for plain in (
        Tensor.cumprod, Tensor.scatter_reduce, Tensor.index_reduce, Tensor.sinc, Tensor.i0,
        Tensor.renorm,
    )
    for function in _spellings(f"{plain.__name__}_")
}  # fmt: skip


def _noted(definition: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A batch norm that tells the mode whether it mixes samples."""

    def norm(mode: ExactNorms, *args: Any, **kwargs: Any) -> Tensor:
        mode.mixes_samples |= bool(args[5] if len(args) > 5 else kwargs.get("training", False))
        return definition(*args, **kwargs)

    return norm


_TOLD |= {function: _noted(_REPLACED[function]) for function in (F.batch_norm, torch.batch_norm)}


def _seen(operator: Any, mode: ExactNorms, *args: Any, **kwargs: Any) -> Any:
    """An operator that takes functions, under a mode that sees what these call as well."""
    if _settings.tracing():
        return operator(*args, **kwargs)
    with _settings.on(mode):
        return operator.dispatch(None, *args, **kwargs)


_TOLD |= {operator: functools.partial(_seen, operator) for _, operator in _hooks.operators()}


class ExactNorms(OfCall):
    """A context in which layer, batch, instance and weight norm (and a few others) are computed
    from their definition.

    Attributes:
        order: Up to which order there are derivatives.
        mixes_samples: Whether a batch norm in training mode was met: written out, it leaves no node
            in the graph by which to recognize it.
    """

    def __init__(self, order: int = 2) -> None:
        super().__init__()
        self.order, self.mixes_samples = order, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace these functions, pass everything else through."""
        given = kwargs or {}
        if given.get("out") is not None:  # what is written there has no derivative
            return func(*args, **given)
        definition = _TOLD.get(func)
        if definition is not None:
            return definition(self, *args, **_versions.named_by_torch(given))
        definition = _REPLACED.get(func, func)
        return definition(
            *args, **(given if definition is func else _versions.named_by_torch(given))
        )


BY_DEFINITION: dict[str, Callable[..., Any]] = {
    "_weight_norm": weight_norm,
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "pow": power,
    "prod": prod,
    "cumprod": cumprod,
    "sinc": sinc,
    "det": det,
    **{f"special_{name}": function for name, function in BESSEL.items()},
}
"""By name, by its definition, what has a derivative of PyTorch's that is wrong at some order."""
