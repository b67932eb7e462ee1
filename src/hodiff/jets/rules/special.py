"""Operations that choose, compare or make: their results are constants, or parts of their
arguments; and those that few functions have: tables, complex numbers, special functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hodiff._core import _needed
from hodiff.jets import _jet
from hodiff.jets._jet import NoRule, Several, belongs, operation, rule, series_of
from hodiff.jets._series import Expansion, Series, aligned, each, full, linear_combination
from hodiff.jets.rules.elementwise import elementwise, ndtr
from hodiff.jets.rules.linear import dims_of, generic, named


@rule(
    "constant",
    *str.split(
        "eq ne gt lt ge le equal greater less greater_equal less_equal not_equal isnan isinf "
        "isfinite isclose allclose sign sgn floor ceil round trunc fix floor_divide argmax argmin "
        "argsort nonzero count_nonzero any all logical_and logical_or logical_not logical_xor "
        "signbit zeros_like ones_like empty_like full_like rand_like randn_like randint_like "
        "new_zeros new_ones new_empty new_full new_tensor detach item __bool__ __float__ __int__ "
        "__index__ __len__ __contains__ bool int long heaviside bitwise_and bitwise_or bernoulli "
        "multinomial searchsorted bucketize histc unique bincount is_nonzero is_same_size "
        "result_type can_cast __repr__ __format__ __str__ short byte char isreal isneginf isposinf "
        "get_device is_floating_point __floordiv__ __rfloordiv__ finfo"
    ),
)
def constant(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the values, of this expansion only."""
    lower = lambda jet: jet.series[0] if jet.expansion is expansion else jet  # noqa: E731
    result = func(*_jet.replaced(args, lower), **_jet.replaced(kwargs, lower))
    if operation(func) in ("new_zeros", "zeros_like") and result.__class__ is torch.Tensor:
        return result.as_subclass(_jet.Zeros)
    return result


@rule("special", "where")
def where(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Coefficients from the side that was chosen."""
    if len(args) + len(kwargs) < 3:
        return constant(expansion, func, args, kwargs)
    names = dict(zip(("condition", "input", "other"), args, strict=False)) | kwargs
    condition = names["condition"]
    x = names["input"]
    y = names["other"]
    if isinstance(x, torch.Tensor) and condition is not x and func is torch.Tensor.where:
        condition, x = x, condition  # x.where(condition, y)
    condition = _jet.value_of(condition)
    a, b = series_of(x, expansion), series_of(y, expansion)
    value = torch.where(condition, a[0], b[0])
    return [
        value,
        *(chosen(condition, a[k], b[k], value.ndim) for k in range(1, expansion.order + 1)),
    ]


def chosen(condition: Any, a: Any, b: Any, ndim: int) -> Any:
    """A coefficient of `where`, None being zero."""
    if a is None and b is None:
        return None
    a, b = (None if c is None else aligned(c, ndim) for c in (a, b))
    return torch.where(condition, 0.0 if a is None else a, 0.0 if b is None else b)


@rule("special", "maximum", "minimum")
def extreme(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The greater (lesser) of two; where they are equal, the mean, as in PyTorch."""
    x, y = [*args, *kwargs.values()][:2]
    a, b = series_of(x, expansion), series_of(y, expansion)
    upper = operation(func) in ("maximum", "max")
    value = func(a[0], b[0])
    first, tied = (a[0] > b[0] if upper else a[0] < b[0]), a[0] == b[0]
    mean = linear_combination([(0.5, a), (0.5, b)], expansion.order)
    out: Series = [value]
    for k in range(1, expansion.order + 1):
        part = chosen(first, a[k], b[k], value.ndim)
        out.append(None if part is None else torch.where(tied, aligned(mean[k], value.ndim), part))
    return out


@rule("special", "max", "min", "median", "kthvalue", "sort", "topk", "mode", "nanmedian")
def selected(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Entries chosen by their value: the coefficients at the same places."""
    name = operation(func)
    if (
        name in ("max", "min")
        and len(args) + len(kwargs) > 1
        and not isinstance([*args, *kwargs.values()][1], int)
    ):
        return extreme(expansion, getattr(torch, name), args, kwargs)
    x = series_of(args[0], expansion)
    if name in ("max", "min", "median", "nanmedian") and len(args) + len(kwargs) == 1:
        value = func(x[0])
        index = (x[0].reshape(-1) == value).to(torch.uint8).argmax()
        if int((x[0] == value).sum()) > 1:
            raise NoRule(name, "where several entries are equal")
        return [value, *each(x[1:], lambda c: full(c, x[0].shape).reshape(len(c), -1)[:, index])]
    names = (
        dict(
            zip(("k", "dim") if name in ("topk", "kthvalue") else ("dim",), args[1:], strict=False)
        )
        | kwargs
    )
    values, indices, *_ = result = func(x[0], *args[1:], **kwargs)
    dim = names.get("dim", -1) % max(1, x[0].ndim)
    keep = indices if indices.ndim == x[0].ndim else indices.unsqueeze(dim)

    def picked(c: Any) -> Any:
        wide = full(c, x[0].shape)
        part = (
            torch.gather(wide, dim + 1, keep.expand(c.shape[0], *keep.shape)) if x[0].ndim else wide
        )
        return part if indices.ndim == x[0].ndim else part.squeeze(dim + 1)

    return Several([[values, *each(x[1:], picked)], indices], type(result))


@rule("special", "amax", "amin")
def extreme_along(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Extremes over some dimensions; where several entries are equal, their mean, as in PyTorch."""
    x = series_of(args[0], expansion)
    value = func(x[0], *args[1:], **kwargs)
    if not x[0].ndim:
        return x
    given = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
    dims, keep = dims_of(given.get("dim", ()), x[0].ndim), bool(given.get("keepdim", False))
    mask = (x[0] == value.reshape([1 if d in dims else n for d, n in enumerate(x[0].shape, 1)])).to(
        x[0].dtype
    )
    mask = mask / mask.sum([d - 1 for d in dims], keepdim=True)
    return [value, *each(x[1:], lambda c: (aligned(c, x[0].ndim) * mask).sum(dims, keepdim=keep))]


CLAMPED = (1.0, 1.0) if _needed.RELEASE < (2, 14) else (0.0, 0.5)
"""The slope of clamp at a bound that is a number, and at one that is a tensor."""


@rule("special", "clamp", "clip", "clamp_min", "clamp_max")
def clamp(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The identity between the bounds, which may be constants of any shape."""
    name = operation(func)
    names = {"clamp_min": ("input", "min"), "clamp_max": ("input", "max")}.get(
        name, ("input", "min", "max")
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    low, high = given.get("min"), given.get("max")
    if belongs(low, expansion) or belongs(high, expansion):
        raise NoRule(
            name, "with bounds that depend on the variable; use torch.maximum and torch.minimum"
        )
    x = series_of(given["input"], expansion)
    value = torch.clamp(x[0], low, high)
    inside = torch.ones_like(value)
    for bound, within in ((low, torch.gt), (high, torch.lt)):
        if bound is not None:
            share = CLAMPED[isinstance(bound, torch.Tensor)]
            inside = inside * torch.where(x[0] == bound, share, within(x[0], bound).to(value.dtype))
    return [value, *each(x[1:], lambda c: aligned(c, value.ndim) * inside)]


@rule(
    "special", "dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"
)
def dropout(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """One mask for all coefficients."""
    names = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    x = series_of(names["input"], expansion)
    if not names.get("training", True) or names.get("p", 0.5) == 0:
        return x
    name = operation(func)
    if name not in ("dropout", "dropout1d", "dropout2d", "dropout3d") or _jet.is_jet(x[0]):
        raise NoRule(f"{name} in training mode")
    mask = getattr(F, name)(torch.ones_like(x[0]), p=names.get("p", 0.5), training=True)
    return [x[0] * mask, *each(x[1:], lambda c: aligned(c, mask.ndim) * mask)]


@rule("linear", "embedding")
def embedding(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a table that may depend on the variable; whole numbers have no derivative."""
    # whose first argument is the table, and which has -1 for no padding
    native = func is torch.embedding
    names = ("weight", "indices") if native else ("input", "weight")
    given = named(
        args, kwargs, *names, "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"
    )
    if not native and (given.get("max_norm") is not None or given.get("scale_grad_by_freq")):
        raise NoRule("embedding with max_norm or scale_grad_by_freq", "index the table instead")
    table, index = given["weight"], given["indices" if native else "input"]
    x, padding = series_of(table, expansion), given.get("padding_idx")
    padding = None if padding is None or (native and padding < 0) else padding % len(x[0])

    def rows(c: Any) -> Any:
        """The rows of a table: of one direction by the kernel;
        a row of padding has no derivative.
        """
        chosen = F.embedding(index, c[0]).unsqueeze(0) if len(c) == 1 else c[:, index]
        padded = None if padding is None else (index == padding).unsqueeze(-1)
        return chosen if padded is None else chosen.masked_fill(padded, 0)

    return [F.embedding(index, x[0], padding), *each(x[1:], lambda c: rows(full(c, x[0].shape)))]


@rule(
    "composite",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
)
def max_pool(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The entries that PyTorch chose."""
    name = operation(func)
    x = args[0]
    adaptive = name.startswith("adaptive")
    place = 2 if adaptive else 6
    # which gives the indices too, whatever it is told
    native = adaptive and func is not getattr(F, name)
    if native or kwargs.pop("return_indices", False) or any(args[place:]):
        raise NoRule(f"{name}(return_indices=True)")
    spatial = int(name[-2])
    pool = getattr(F, f"{name}_with_indices")
    value = _jet.series_of(x, expansion)[0]
    if _jet.is_jet(value):
        raise NoRule(name, "inside nested expansions")
    _, index = pool(value, *args[1:place], **kwargs)
    return torch.gather(x.flatten(-spatial), -1, index.flatten(-spatial)).reshape(index.shape)


# --- Fourier transforms, and the little of complex arithmetic that stands between one and its
# inverse The variable is real, so the coefficients of a complex value are complex, and the rules of
# sums, products and shapes hold for them as they are. What is not a holomorphic function of a
# complex value (its absolute value) is refused.


rule(
    "linear",
    *str.split(
        "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 "
        "fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft fft_hfft2 fft_ihfft2 fft_hfftn "
        "fft_ihfftn fft_fftshift fft_ifftshift"
    ),
)(generic)


@rule("linear", "real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg")
def part(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation, coefficient by coefficient: linear over the real numbers."""
    name, x = operation(func), series_of(args[0] if args else kwargs["input"], expansion)
    if not x[0].is_complex():
        if name == "imag":
            raise NoRule("imag", "the tensor is real")
        return x
    return each(x, getattr(torch, name))


@rule("linear", "view_as_real", "view_as_complex")
def viewed(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Complex numbers as pairs, and pairs as complex numbers."""
    x, name = series_of(args[0] if args else kwargs["input"], expansion), operation(func)
    if _jet.is_jet(x[0]):
        raise NoRule(name, "inside nested expansions")
    view = getattr(torch, name)
    return [view(x[0]), *each(x[1:], lambda c: view(full(c, x[0].shape).contiguous()))]


@rule("linear", "complex")
def combined(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A + i b."""
    a, b = (series_of(value, expansion) for value in (*args, *kwargs.values()))
    return linear_combination([(1, a), (1j, b)], expansion.order)


# --- special functions: where their recurrences cancel, by others ---------------------------------


@elementwise("special_erfcx")
def erfcx(x: Any, order: int) -> Series:
    """Y' = 2 x y - 2/√π, then (m + 1) s_{m+1} = 2 (x s_m + s_{m-1}): above 2, where that cancels,
    by ratios.
    """
    y, large = torch.special.erfcx(x), torch.as_tensor(_jet.value_of(x) > 2)
    s: Series = [y, 2 * x * y - 2 / math.sqrt(math.pi)]
    s += [None] * (order - 1)
    for m in range(1, order):
        s[m + 1] = (x * s[m] + s[m - 1]) * (2 / (m + 1))
    far: Any = torch.where(large, x, 2.0)
    ratio, ratios = -1 / far, [None] * (order + 1)
    # the solution that falls, by its continued fraction from the end
    for m in range(order + _TERMS, 0, -1):
        ratio = ratios[min(m, order)] = 2 / ((m + 1) * ratio - 2 * far)
    for m in range(1, order + 1):
        s[m] = torch.where(large, s[m - 1] * ratios[m], s[m])
    return s


_TERMS = 80
"""Of the continued fraction: all digits from x = 2 on."""


@elementwise("special_log_ndtr")
def log_ndtr(x: Any, order: int) -> Series:
    """The logarithm of ndtr; below -1 by ndtr(x) = exp(-x²/2) erfcx(-x/√2) / 2."""
    low = torch.as_tensor(_jet.value_of(x) < -1)
    below, above = torch.where(low, x, -1.0), torch.where(low, 0.0, x)
    scaled_ = [
        c * (-math.sqrt(0.5)) ** m for m, c in enumerate(erfcx(below * -math.sqrt(0.5), order))
    ]
    branches = []
    for s in (scaled_, ndtr(above, order)):
        logarithm: Series = [None]
        for m in range(1, order + 1):
            inner = sum(j * logarithm[j] * s[m - j] for j in range(1, m))
            logarithm.append((s[m] - inner * (1 / m)) / s[0])
        branches.append(logarithm)
    branches[0][1] = branches[0][1] - below
    if order > 1:
        branches[0][2] = branches[0][2] - 0.5
    return [
        torch.special.log_ndtr(x),
        *(torch.where(low, a, b) for a, b in zip(branches[0][1:], branches[1][1:], strict=True)),
    ]
