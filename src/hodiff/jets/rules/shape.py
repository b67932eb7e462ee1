"""Other shapes of the same entries, and indices: the same on each coefficient, a dimension further on.

The forms here are native, since nested expansions need them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.jets import _jet
from hodiff.jets._jet import belongs
from hodiff.jets._registry import RULES, NoRule, Several, rule
from hodiff.jets._series import Expansion, full
from hodiff.jets.rules.batched import generic

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
    return [shifted(d, ndim) for d in ([dim] if isinstance(dim, int) else dim)]


def lifted(*names: str) -> Callable[[Lifted], Lifted]:
    """Register `function(coefficient, shape, args, kwargs)` for operations linear in their first argument alone."""

    def register(function: Lifted) -> Lifted:
        def apply(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
            rest = dict(kwargs)
            x, others = (args[0], args[1:]) if args else (rest.pop("input"), ())
            rest.pop("_stacklevel", None)
            if not belongs(x, expansion) or any(belongs(j, expansion) for j in _jet.jets_among((others, rest))):
                return generic(expansion, func, args, kwargs)
            series = x.series
            value = func(series[0], *others, **rest)
            if isinstance(value, torch.Tensor):
                rest["value"] = value
            shape = series[0].shape
            found = [None if c is None else function(full(c, shape), shape, others, rest) for c in series[1:]]
            return assembled(value, found)

        rule("linear", *names)(apply)
        return function

    return register


def assembled(value: Any, found: list[Any]) -> Any:
    """A series from its value and other coefficients, or one for each part of them."""
    if isinstance(value, (tuple, list)):
        parts = [[part, *(None if c is None else c[i] for c in found)] for i, part in enumerate(value)]
        return Several(parts)
    return [value, *found]


def named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Arguments after the first, by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def spread(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[int]:
    """Dimensions or sizes given as a sequence or one by one."""
    for name in names:
        if name in kwargs:
            return list(kwargs[name])
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else list(args)


@lifted("reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "squeeze_all")
def _reshaped(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c.reshape(c.shape[0], *kwargs["value"].shape)


def _view(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """`view` and its kin; `view(dtype)` reinterprets bits and has no derivative."""
    if any(isinstance(arg, torch.dtype) for arg in args):
        raise NoRule("view(dtype)")
    args = (args[0], *(_jet.value_of(arg) for arg in args[1:]))  # view_as: only the shape matters
    return _reshape_rule(expansion, func, args, kwargs)


_reshape_rule = RULES.known["reshape"].apply
rule("linear", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel")(_view)


@lifted("permute")
def _permuted(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c.permute(0, *(shifted(d, len(shape)) for d in spread(args, kwargs, "dims")))


@lifted("transpose", "swapaxes", "swapdims")
def _transposed(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    names = [*args, *(v for k, v in kwargs.items() if k != "value")]
    return c.transpose(shifted(names[0], len(shape)), shifted(names[1], len(shape))) if shape else c


@lifted("t", "mT", "adjoint")
def _turned(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c.transpose(-1, -2) if len(shape) > 1 else c


@rule("linear", "numpy_T")
def reverseddims_of(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """`x.T`: all dimensions in reverse order."""
    return RULES.known["permute"].apply(expansion, torch.permute, (args[0], list(range(args[0].ndim))[::-1]), {})


@lifted("movedim", "moveaxis")
def _moved(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    given = named(args, kwargs, "source", "destination")
    return c.movedim(dims_of(given["source"], len(shape)), dims_of(given["destination"], len(shape)))


@lifted("squeeze")
def _squeezed(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c.reshape(c.shape[0], *kwargs["value"].shape)


@lifted("unsqueeze")
def _unsqueezed(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return c.unsqueeze(named(args, kwargs, "dim")["dim"] % (len(shape) + 1) + 1)


@lifted("expand", "expand_as", "broadcast_to")
def _expanded(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    return full(c, kwargs["value"].shape)


@lifted("getitem")
def _item(c: Any, shape: Any, args: Any, kwargs: Any) -> Any:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    return c[(slice(None), *index)]


def _getitem(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """An index; with integer tensors apart from each other PyTorch would move their dimension before the directions."""
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if _jet.jets_among(index):
        raise NoRule("indexing with a tensor that depends on the variable")
    kinds = [isinstance(i, (torch.Tensor, list)) for i in index]
    if any(kinds):
        first, last = kinds.index(True), len(kinds) - kinds[::-1].index(True)
        if not all(k or isinstance(i, int) for k, i in zip(kinds[first:last], index[first:last], strict=True)):
            return generic(expansion, torch.Tensor.__getitem__, args, kwargs)
        if any(isinstance(i, int) for i in index):
            return generic(expansion, torch.Tensor.__getitem__, args, kwargs)
    return _getitem_rule(expansion, torch.Tensor.__getitem__, (x, index), kwargs)


_getitem_rule = RULES.known["getitem"].apply
rule("linear", "getitem")(_getitem)
