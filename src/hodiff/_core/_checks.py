"""Checks of arguments, made before anything is computed. Each says what was got and what to write."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hodiff._core import _sharded, _tree
from hodiff._core._spellings import check_dense
from hodiff.errors import InputError

LARGEST = 2**63 - 1
"""The largest integer that PyTorch takes."""


class Missing:
    """The default of a point that was not given."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = Missing()

ACCEPTED = "a tensor, a container of tensors (tuple, list, dict, nested), an nn.Module, or hodiff.select(module, ...)"


def check_real_tensor(value: Any, name: str) -> None:
    """Raise unless `value` is a strided, real floating point tensor."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: {_not_a_tensor(value)}")
    if _sharded.LOADED_BY in sys.modules:
        _sharded.check_tensor(value, name)
    if value.dtype.is_floating_point:
        if value.dtype.itemsize == 1:
            raise InputError(f"{name}: has dtype {value.dtype}, in which PyTorch only stores; convert it (x.half()).")
        if value.is_meta:
            raise InputError(f"{name}: is on the meta device, whose tensors hold no numbers; give a real one.")
        if value.layout is not torch.strided or value.is_nested:  # asked here too: it saves a call
            check_dense(value, name, " (x.to_dense(), or its .values())")
        return
    if value.is_complex():
        raise InputError(
            f"{name}: is complex ({value.dtype}); derivatives here are those of real variables. Pass "
            f"torch.view_as_real(z) and let f begin with torch.view_as_complex(...)."
        )
    raise InputError(
        f"{name}: has dtype {value.dtype}; derivatives need a real floating point tensor. "
        f"Convert it (x.double()), or pass it to f through args= or kwargs= if it is data."
    )


def _not_a_tensor(value: Any) -> str:
    if inspect.isgenerator(value) or hasattr(value, "__next__"):
        return (
            "is a generator (model.parameters()?), which can be read only once. "
            "Pass the module itself; f then receives the module, and results are a dict by parameter name."
        )
    if isinstance(value, (bool, int, float)):
        return (
            f"is the {type(value).__name__} {value!r}, expected a floating point tensor: torch.tensor({float(value)})."
        )
    if callable(value) and not isinstance(value, nn.Module):
        return f"is a function; the function comes first and the point second. Expected {ACCEPTED}."
    if type(value).__module__ == "numpy":
        return "is a NumPy object; wrap it: torch.from_numpy(array)."
    return f"is a {type(value).__name__}; expected {ACCEPTED}."


def check_integer(value: Any, name: str, *, least: int) -> int:
    """Raise unless `value` is an int of at least `least`."""
    if value.__class__ is int and least <= value <= LARGEST:  # as nearly always
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        bound = f"at least {least}" if not isinstance(value, int) or value < least else "64 bits at most"
        raise InputError(f"{name}: got {value!r}, expected an integer of {bound}.")
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite float, or an int that PyTorch takes."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def check_chunk_size(value: int | str) -> int | None:
    """The chunk size as an int, or None for `"auto"`."""
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f'chunk_size: got {value!r}, expected an integer of at least 1, or "auto".')
    return value


def check_output(value: Any, name: str = "f(x)") -> Tensor:
    """Raise unless `value`, an output of `f`, is a real floating point tensor."""
    if not isinstance(value, Tensor):
        hint = " (has_aux=True if f returns (loss, extra))" if isinstance(value, tuple) else ""
        raise InputError(f"f: returned a {type(value).__name__}, expected a tensor{hint}.")
    if value.dtype.is_floating_point:
        if value.layout is not torch.strided or value.is_nested:
            kind, way_out = ("nested", ".values()") if value.is_nested else (str(value.layout), ".to_dense()")
            raise InputError(f"f: {name} is a {kind} tensor; return a dense one (its {way_out}), or a sum of it.")
        return value
    if value.is_complex():
        raise InputError(f"f: {name} is complex; return a real quantity (its .real, .abs(), or view_as_real).")
    raise InputError(f"f: {name} has dtype {value.dtype}, which has no derivative; return a floating point tensor.")


def check_scalars(output: Tensor, batch_ndim: int, batch: torch.Size) -> None:
    """Raise unless `output` is one element, or one element per sample of `batch`."""
    if batch_ndim == 0:
        if output.numel() != 1:
            raise InputError(
                f"f: returned shape {tuple(output.shape)}, expected one element. Reduce it (.sum(), .mean()), use "
                f"hodiff.jacobian for all outputs, or batch_ndim=1 if each row is an independent sample."
            )
        return
    if tuple(output.shape[:batch_ndim]) != tuple(batch) or output.numel() != batch.numel():
        averaged = " (an output already reduced over the batch scales every gradient by 1/N)" if not output.ndim else ""
        more = output.ndim - batch_ndim
        total = "sum(-1)" if more == 1 else f"flatten({batch_ndim}).sum(-1)"
        way_out = (
            f" For several outputs of each sample, take one at a time (lambda x: f(x)[..., {', '.join('0' * more)}]), "
            f"reduce them (lambda x: f(x).{total}), or use hodiff.jacobian(f, x, batch_ndim={batch_ndim})."
            if tuple(output.shape[:batch_ndim]) == tuple(batch)
            else " Return one number for each sample, not reduced over the batch."
        )
        raise InputError(
            f"f: returned shape {tuple(output.shape)}{averaged}, expected one element per sample: {tuple(batch)}, "
            f"or {tuple(batch)} followed by ones, for batch_ndim={batch_ndim}.{way_out}"
        )


def check_batch(tensors: list[Tensor], names: list[str], batch_ndim: int) -> torch.Size:
    """The shape of the batch that all `tensors` share in their leading dimensions."""
    if batch_ndim.__class__ is int and batch_ndim == 0:
        return torch.Size()
    check_integer(batch_ndim, "batch_ndim", least=0)
    first = tensors[0].shape[:batch_ndim]
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.ndim < batch_ndim:
            raise InputError(
                f"{name}: has shape {tuple(tensor.shape)}, which has no {batch_ndim} leading batch dimension(s) "
                f"(batch_ndim={batch_ndim})."
            )
        if tensor.shape[:batch_ndim] != first:
            raise InputError(
                f"{name}: has batch shape {tuple(tensor.shape[:batch_ndim])}, {names[0]} has {tuple(first)}; "
                f"with batch_ndim={batch_ndim} all must agree. The function comes first and the samples second; "
                f"parameters are no samples, for them batch_ndim=0."
            )
    return first


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame runs a module of this package; `hodiff_experiments` is the user's."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith("hodiff.")


def called() -> str:
    """The public function that the caller called: the outermost of our own frames."""
    name, frame = "grad", inspect.currentframe()
    while frame is not None and _is_ours(frame):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


def outside() -> int:
    """The stack level, as `warnings` counts, of the first frame that is not ours."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    return level


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise unless `args` is a tuple (or list) and `kwargs` a mapping."""
    if not isinstance(args, (tuple, list)):
        raise InputError(f"args: is a {type(args).__name__}; expected a tuple of arguments for f: args=(data,).")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs: is a {type(kwargs).__name__}; expected a dict of keyword arguments for f.")
    for name in kwargs or ():
        if not isinstance(name, str):
            raise InputError(f"kwargs: has a key of type {type(name).__name__}; expected names of arguments of f.")


def check_container(tree: _tree.Tree, count: int, name: str) -> None:
    """Raise for an empty container."""
    if not count:
        raise InputError(f"{name}: is empty ({_tree.describe(tree)}, without any tensor); expected {ACCEPTED}.")
