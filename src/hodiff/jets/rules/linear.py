"""Linear operations: the same one on each coefficient, with one more dimension in front.

The hot ones have a form of their own for that dimension, here and in `shape`; the rest go through
`batched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from hodiff._core import _needed, _reverse
from hodiff.jets import _jet
from hodiff.jets._jet import NoRule, Several, belongs, operation, rule, series_of
from hodiff.jets._series import (
    Expansion,
    Series,
    each,
    entry,
    full,
    linear_combination,
)


@rule("linear", "add", "sub", "rsub")
def add(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A + α b, a - α b."""
    kwargs = dict(kwargs)
    alpha = kwargs.pop("alpha", 1)
    a, b = [*args, *kwargs.values()]
    name = operation(func)
    if name == "rsub":
        a, b = b, a
    terms = [
        (1, series_of(a, expansion)),
        (alpha if name == "add" else -alpha, series_of(b, expansion)),
    ]
    return linear_combination(terms, expansion.order)


@rule(
    "linear", "neg", "positive", "clone", "contiguous", "deg2rad", "rad2deg", "float", "double",
    "half", "bfloat16", "cfloat", "cdouble",
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
        rows = rows_of(parts, k)
        out.append(func([entry(part, k, rows) for part in parts], dim % ndim + 1) if rows else None)
    return out


def rows_of(parts: Iterable[Series], k: int) -> int:
    """The number of directions of the coefficients k of several series; 0 where all are zero."""
    return next((part[k].shape[0] for part in parts if part[k] is not None), 0)


# --- linear operations without a form of their own: the operation itself, batched over the
# directions


def _dense(x: Any) -> Any:
    """2.8 does not transform a tensor that is expanded (MKL: "Inconsistent configuration ...")."""
    return x.contiguous() if _needed.RELEASE < (2, 9) else x


def generic(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Any operation that is linear in all its jets together: batched over the directions,
    a loop where those nest.
    """
    kwargs = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
    jets = [jet for jet in _jet.jets_among((args, kwargs)) if jet.expansion is expansion]

    def at(points: Any) -> Any:
        given = iter(points)
        by = lambda jet: next(given) if jet.expansion is expansion else jet  # noqa: E731
        return func(*_jet.replaced(args, by), **_jet.replaced(kwargs, by))

    values = [jet.series[0] for jet in jets]
    value, zeros = at(values), [_dense(v.new_zeros(()).expand(v.shape)) for v in values]
    # constants among the arguments: the operation is affine, and coefficients are linear
    offset = at(zeros)
    single = isinstance(value, torch.Tensor) or _jet.is_jet(value)
    coefficients: list[Any] = []
    for k in range(1, expansion.order + 1):
        rows = rows_of((jet.series for jet in jets), k)
        points = [_dense(entry(jet.series, k, rows)) for jet in jets]
        coefficients.append(_batched(at, points, single) if rows else None)
    if single:
        return [value, *(None if c is None else c[0] - offset for c in coefficients)]
    return Several(
        [
            [part, *(None if c is None else c[i] - offset[i] for c in coefficients)]
            for i, part in enumerate(value)
        ]
    )


def _batched(function: Callable[[Any], Any], points: list[Any], single: bool) -> list[Any]:
    if not _jet.jets_among(points):
        try:
            return _reverse.batched(
                lambda *each: (function(each),) if single else tuple(function(each)), points
            )
        except RuntimeError as error:
            if "atching rule" not in str(error):
                raise
    rows = [
        function(each) if not single else (function(each),)
        for each in zip(*(p.unbind(0) for p in points), strict=True)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


rule(
    "linear",
    *str.split(
        "roll fliplr flipud rot90 pad repeat tile diagonal trace unfold interpolate tril triu diag "
        "diag_embed diagflat repeat_interleave take take_along_dim hstack vstack dstack "
        "column_stack avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "_adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d pixel_shuffle pixel_unshuffle channel_shuffle "
        "fold im2col col2im diff hsplit vsplit dsplit unsafe_chunk unsafe_split split_with_sizes "
        "index_add index_put index_copy index_fill block_diag meshgrid broadcast_tensors "
        "atleast_1d atleast_2d atleast_3d constant_pad_nd _pad_circular slice_scatter "
        "diagonal_scatter scatter_add masked_select"
    ),
)(generic)


# --- other shapes of the same entries, and indices: the same on each coefficient, a dimension
# further on The forms here are native, since nested expansions need them as well.


Lifted = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def shifted(dim: int, ndim: int) -> int:
    """A dimension of the value as one of a coefficient."""
    return dim % max(ndim, 1) + 1


def dims_of(dim: Any, ndim: int) -> list[int]:
    """Dimensions of the value as those of a coefficient; all of them where none is named."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(1, ndim + 1))
    if not ndim:
        return []
    return [d % ndim + 1 for d in ([dim] if isinstance(dim, int) else dim)]


def lifted(*names: str) -> Callable[[Lifted], Callable[..., Any]]:
    """A rule from `function(coefficient, shape, args, kwargs)`,
    where only the first argument varies.
    """

    def register(function: Lifted) -> Callable[..., Any]:
        def apply(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
            rest = dict(kwargs)
            x, others = (args[0], args[1:]) if args else (rest.pop("input"), ())
            rest.pop("_stacklevel", None)
            jets = _jet.jets_among((*others, *rest.values()))
            if not belongs(x, expansion) or expansion in map(attrgetter("expansion"), jets):
                return generic(expansion, func, args, kwargs)
            series = x.series
            value = func(series[0], *others, **rest)
            if isinstance(value, torch.Tensor) and not (
                value.is_floating_point() or value.is_complex()
            ):
                return value
            rest["value"], shape = value, series[0].shape
            coefficients = [
                None if c is None else function(full(c, shape), shape, others, rest)
                for c in series[1:]
            ]
            if not isinstance(value, (tuple, list)):
                return [value, *coefficients]
            return Several(
                [
                    [part, *(None if c is None else c[i] for c in coefficients)]
                    for i, part in enumerate(value)
                ]
            )

        return rule("linear", *names)(apply)

    return register


def named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Arguments after the first, by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def spread(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[int]:
    """Dimensions or sizes given as a sequence or one by one."""
    for name in names:
        if name in kwargs:
            return list(kwargs[name])
    return (
        list(args[0])
        if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size))
        else list(args)
    )


@lifted("squeeze")
def _reshaped(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c.reshape(c.shape[0], *kwargs["value"].shape)


@rule("linear", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel")
def view(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Another shape; `view(dtype)` reinterprets bits and has no derivative."""
    if any(isinstance(arg, torch.dtype) for arg in args):
        raise NoRule("view(dtype)")
    args = (args[0], *(_jet.value_of(arg) for arg in args[1:]))  # view_as: only the shape matters
    return _reshaped(expansion, func, args, kwargs)


@lifted()
def _item(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c[(slice(None), *args[0])]


@rule("linear", "getitem")
def getitem(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """An index; with integer tensors apart from each other PyTorch would move
    their dimension before the directions.
    """
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if _jet.jets_among(index):
        raise NoRule("indexing with a tensor that depends on the variable")
    kinds = [isinstance(i, (torch.Tensor, list)) for i in index]
    if any(kinds):
        first, last = kinds.index(True), len(kinds) - kinds[::-1].index(True)
        if not all(kinds[first:last]) or any(isinstance(i, int) for i in index):
            return generic(expansion, torch.Tensor.__getitem__, args, kwargs)
    return _item(expansion, torch.Tensor.__getitem__, (x, index), kwargs)


def _along(shape: Any, args: Any, kwargs: Any, *names: str) -> list[Any]:
    """The dimension that is meant, of coefficients, the first where none is named;
    and further arguments.
    """
    given = named(args, kwargs, *names)
    return [
        shifted(given.get("dim", 0), len(shape)),
        *(given.get(name) for name in names if name != "dim"),
    ]


def _each_shifted(shape: Any, args: Any, kwargs: Any) -> list[int]:
    return [shifted(dim, len(shape)) for dim in spread(args, kwargs, "dims")]


def _reduced(reduce: Callable[..., Any]) -> Lifted:
    """Sums and means over all or some dimensions."""

    def apply(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
        given = named(args, kwargs, "dim", "keepdim")
        dims, keep = dims_of(given.get("dim"), len(shape)), bool(given.get("keepdim", False))
        return reduce(c, dims, keepdim=keep).to(kwargs["value"].dtype) if dims else c

    return apply


def _split(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    """The parts of a series, in the sizes of the value's."""
    dim, _ = _along(shape, args, kwargs, "parts", "dim")
    return c.split([part.shape[dim - 1] for part in kwargs["value"]], dim)


def _gathered(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    dim, index = _along(shape, args, kwargs, "dim", "index")
    return c.gather(dim, index.expand(c.shape[0], *index.shape)) if shape else full(c, index.shape)


_ENDS = ("source", "destination")

LIFTED: dict[str, Lifted] = {
    "sum": _reduced(torch.sum),
    "mean": _reduced(torch.mean),
    "permute": lambda c, shape, args, kwargs: c.permute(0, *_each_shifted(shape, args, kwargs)),
    "flip": lambda c, shape, args, kwargs: c.flip(_each_shifted(shape, args, kwargs)),
    "transpose swapaxes swapdims": lambda c, shape, args, kwargs: (
        c.transpose(*_each_shifted(shape, (*args, *kwargs.values())[:2], {})) if shape else c
    ),
    "t mT adjoint": lambda c, shape, args, kwargs: c.transpose(-1, -2) if len(shape) > 1 else c,
    "numpy_T": lambda c, shape, args, kwargs: c.permute(0, *range(len(shape), 0, -1)),
    "movedim moveaxis": lambda c, shape, args, kwargs: c.movedim(
        *(dims_of(named(args, kwargs, *_ENDS)[end], len(shape)) for end in _ENDS)
    ),
    "unsqueeze": lambda c, shape, args, kwargs: c.unsqueeze(
        named(args, kwargs, "dim")["dim"] % (len(shape) + 1) + 1
    ),
    "expand expand_as broadcast_to": lambda c, shape, args, kwargs: full(c, kwargs["value"].shape),
    "select": lambda c, shape, args, kwargs: c.select(*_along(shape, args, kwargs, "dim", "index")),
    "narrow": lambda c, shape, args, kwargs: c.narrow(
        *_along(shape, args, kwargs, "dim", "start", "length")
    ),
    "unbind": lambda c, shape, args, kwargs: c.unbind(*_along(shape, args, kwargs, "dim")),
    "split chunk tensor_split": _split,
    "cumsum": lambda c, shape, args, kwargs: (
        c.cumsum(*_along(shape, args, kwargs, "dim"), dtype=kwargs["value"].dtype) if shape else c
    ),
    "index_select": lambda c, shape, args, kwargs: (
        c.index_select(*_along(shape, args, kwargs, "dim", "index")) if shape else c
    ),
    "gather": _gathered,
}
"""What an operation does with a coefficient, whose dimensions lie one further on."""


for _names, _function in LIFTED.items():
    lifted(*_names.split())(_function)
