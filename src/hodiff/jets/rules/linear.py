"""Linear operations: the same one on each coefficient, with one more dimension in front.

The hot ones have a form of their own for that dimension, here and in `shape`; the rest go through `batched`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.jets import _jet
from hodiff.jets._jet import belongs, series_of
from hodiff.jets._registry import NoRule, listed, operation, rule
from hodiff.jets._series import Expansion, Series, aligned, full, linear_combination, ndim_of, total
from hodiff.jets.rules.batched import generic
from hodiff.jets.rules.shape import assembled, dims_of, named, shifted, spread


@rule("linear", "add", "sub", "rsub", "radd")
def add(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A + α b, a - α b."""
    kwargs = dict(kwargs)
    alpha = kwargs.pop("alpha", 1)
    a, b = [*args, *kwargs.values()]
    name = operation(func)
    if name == "rsub":
        a, b = b, a
    factor = alpha if name == "add" else -alpha
    a, b = series_of(a, expansion), series_of(b, expansion)
    if factor == 1 or b[1:] == [None] * expansion.order:
        if factor == 1:
            value = a[0] + b[0]
        else:
            value = a[0] - (b[0] if factor == -1 else b[0] * -factor)
        ndim = ndim_of(value)
        return [value, *(_sum(x, y, ndim) for x, y in zip(a[1:], b[1:], strict=True))]
    return linear_combination([(1, a), (factor, b)], expansion.order)


def _sum(a: Any, b: Any, ndim: int) -> Any:
    a, b = (None if c is None else aligned(c, ndim) for c in (a, b))
    return total(a, b)


@rule("linear", "subtract_operator")
def subtract(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A - b."""
    a, b = args
    return linear_combination([(1, series_of(a, expansion)), (-1, series_of(b, expansion))], expansion.order)


def each(series: Series, function: Callable[[Any], Any]) -> Series:
    """A function of every coefficient that does not care how many dimensions are in front."""
    return [None if c is None else function(c) for c in series]


@rule(
    "linear", "neg", "positive", "clone", "contiguous", "deg2rad", "rad2deg", "float", "double", "half", "bfloat16",
    "cfloat", "cdouble",
)  # fmt: skip
def pointwise(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation, coefficient by coefficient, whatever their shape."""
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return each(series_of(args[0], expansion), lambda c: func(c, **kwargs))


@rule("linear", "to", "type_as", "type", "cpu", "cuda", "alias")
def converted(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Another dtype or device."""
    x, *rest = args
    rest = [_jet.value_of(item) for item in rest]
    target = func(torch.empty(0, dtype=x.dtype, device=x.device), *rest, **kwargs)
    if not isinstance(target, torch.Tensor):
        return target
    if x.dtype.is_complex and not target.dtype.is_complex:
        raise NoRule(operation(func), "of complex numbers to real ones", "Take .real of it.")
    if not (target.dtype.is_floating_point or target.dtype.is_complex):
        return func(_jet.series_of(x, expansion)[0], *rest, **kwargs)
    return each(series_of(x, expansion), lambda c: c.to(target.dtype).to(target.device))


@rule("linear", "sum", "mean")
def reduced(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Sums and means over all or some dimensions."""
    given = dict(kwargs)
    x = args[0] if args else given.pop("input")
    rest = named(args[1:], given, "dim", "keepdim")
    series = series_of(x, expansion)
    value = func(series[0], *args[1:], **given)
    dims, keep = dims_of(rest.get("dim"), series[0].ndim), bool(rest.get("keepdim", False))
    if not dims:
        return [value, *series[1:]]
    reduce = torch.mean if operation(func) == "mean" else torch.sum
    return [
        value,
        *(
            None if c is None else reduce(full(c, series[0].shape), dims, keepdim=keep).to(value.dtype)
            for c in series[1:]
        ),
    ]


DIM_LAST = {"split": "split_size_or_sections", "chunk": "chunks", "tensor_split": "indices_or_sections"}


@rule("linear", *listed("select narrow index_select gather split chunk tensor_split unbind cumsum"))
def along_dim(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Operations along one dimension, which moves by one."""
    name, x = operation(func), args[0] if args else kwargs["input"]
    if not belongs(x, expansion) or _jet.jets_among((args[1:], [v for k, v in kwargs.items() if k != "input"])):
        return generic(expansion, func, args, kwargs)
    if not x.ndim:  # a number has no dimension to move, but takes part
        return generic(expansion, func, args, kwargs)
    series = x.series
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "self", "dtype")}
    if name in DIM_LAST:
        given = dict(zip(("how", "dim"), args[1:], strict=False))
        how = given.get("how", next((v for k, v in rest.items() if k != "dim"), None))
        dim, behind = given.get("dim", rest.get("dim", 0)), ()
        call = lambda c, d: getattr(torch, name)(c, how, d)  # noqa: E731
    else:
        given = list(args[1:])
        dim = rest.pop("dim", None)
        if dim is None:
            dim = given.pop(0) if given else 0
        behind = (*given, *rest.values())
        call = lambda c, d: getattr(torch, name)(c, d, *_leading(name, behind, c, series))  # noqa: E731
    value = func(*((series[0], *args[1:]) if args else ()), **({**kwargs, "input": series[0]} if not args else kwargs))
    ndim = series[0].ndim
    found = [None if c is None else call(full(c, series[0].shape), shifted(dim, ndim)) for c in series[1:]]
    if kwargs.get("dtype") is not None:  # of a running sum
        if not value.is_floating_point():
            return value
        found = [None if c is None else c.to(value.dtype) for c in found]
    return assembled(value, found)


def _leading(name: str, behind: tuple[Any, ...], c: Any, series: Series) -> tuple[Any, ...]:
    """A gather's index, with the directions in front."""
    if name != "gather":
        return behind
    index = behind[0].unsqueeze(0)
    return (index.expand(c.shape[0], *index.shape[1:]),)


@rule("linear", "flip")
def flipped(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Entries in reverse order."""
    x = series_of(args[0], expansion)
    dims = [shifted(d, x[0].ndim) for d in spread(args[1:], kwargs, "dims")]
    turned = (None if c is None else full(c, x[0].shape).flip(dims) for c in x[1:])
    return [func(x[0], *args[1:], **kwargs), *turned]


@rule("linear", "cat", "stack")
def joined(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors side by side; a missing coefficient is zeros only where another one is present."""
    names = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    dim = names.get("dim", names.get("axis", 0))
    parts = [series_of(part, expansion) for part in names["tensors"]]
    new = operation(func) == "stack"
    if not new:  # legacy: cat ignores empty vectors
        parts = [part for part in parts if part[0].numel() or part[0].ndim > 1] or parts
    ndim = parts[0][0].ndim + new
    out: Series = [func([part[0] for part in parts], dim)]
    for k in range(1, expansion.order + 1):
        present = [part[k] for part in parts if part[k] is not None]
        if not present:
            out.append(None)
            continue
        rows = present[0].shape[0]
        filled = [
            part[0].new_zeros(()).expand(rows, *part[0].shape) if part[k] is None else full(part[k], part[0].shape)
            for part in parts
        ]
        out.append(func(filled, dim % ndim + 1))
    return out


@rule("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """With constant weights: the directions join the batch."""
    names = ("input", "weight", "bias", "stride", "padding")
    given = dict(zip(names, args, strict=False)) | kwargs
    given |= dict(zip(_BEHIND[len(args) > 5 and "transpose" in operation(func)], args[5:], strict=False))
    x = series_of(given.pop("input"), expansion)
    weight, bias = given.pop("weight"), given.pop("bias", None)
    if belongs(weight, expansion) or belongs(bias, expansion):
        raise NoRule(operation(func), "with weights that depend on the variable")
    return [func(x[0], weight, bias, **given), *_folded(x, lambda c: func(c, weight, None, **given), weight.ndim - 2)]


_BEHIND = {False: ("dilation", "groups"), True: ("output_padding", "groups", "dilation")}


def _folded(x: Series, function: Callable[[Any], Any], spatial: int) -> list[Any]:
    """A function of (N, C, *spatial) on coefficients, all leading dimensions as one."""
    out = []
    for c in x[1:]:
        if c is None:
            out.append(None)
            continue
        c = full(c, x[0].shape)
        lead = c.shape[: c.ndim - spatial - 1]
        found = function(c.reshape(-1, *c.shape[c.ndim - spatial - 1 :]))
        out.append(found.reshape(*lead, *found.shape[1:]))
    return out


@rule("linear", "embedding")
def embedding(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a table that may depend on the variable; whole numbers have no derivative."""
    native = func is torch.embedding  # whose first argument is the table, and which has -1 for no padding
    given = dict(zip(("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"), args[2:], strict=False)) | kwargs
    padded = given.get("padding_idx", -1 if native else None) not in ((-1,) if native else (None,))
    if padded or (not native and (given.get("max_norm") is not None or given.get("scale_grad_by_freq"))):
        raise NoRule("embedding with padding_idx, max_norm or scale_grad_by_freq", "index the table instead")
    index, table = [*args, *kwargs.values()][:2]
    if not isinstance(index, torch.Tensor) or _jet.is_jet(
        index
    ):  # F.embedding takes the index first, torch's the table
        index, table = table, index
    if index.is_floating_point():
        index, table = table, index
    x = series_of(table, expansion)
    return [x[0][index], *(None if c is None else full(c, x[0].shape)[:, index] for c in x[1:])]
