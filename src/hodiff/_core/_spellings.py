"""What stands for a tensor where a vector is wanted: NumPy arrays, lists of numbers, lists of the leaves in order."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hodiff._core import _tree
from hodiff.errors import InputError


class SupportsArray(Protocol):
    """What NumPy can read: an array, for the type checker."""

    def __array__(self) -> Any: ...


def check_dense(value: Tensor, name: str, advice: str = "") -> None:
    """Raise where a tensor is nested or sparse."""
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout)
        raise InputError(f"{name}: is a {kind} tensor; give a dense one{advice}.")


def as_tensors(value: Any, dtype: torch.dtype, device: torch.device, name: str) -> Any:
    """NumPy arrays, also in a container, and lists of numbers as tensors; anything else as it is."""
    if isinstance(value, Tensor):
        if value.is_nested:
            check_dense(value, name)
        return value
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    if _is_array(value) or _is_numbers(value):
        return _tensor(value, dtype, device, name)
    if _tree.is_container(value) and any(map(_is_array, _tree.flatten(value, name)[0])):
        return _tree.tree_map(lambda leaf: _tensor(leaf, dtype, device, name) if _is_array(leaf) else leaf, value)
    return value


def listing(value: Any, tree: _tree.Tree, number: int) -> _tree.Tree:
    """The structure of a list (or tuple) of the leaves in the order of the point, where it is no such point."""
    if not isinstance(value, (list, tuple)) or len(value) != number:
        return None
    if not all(isinstance(part, Tensor) for part in value):
        return None
    _, _, found = _tree.flatten(value)
    return found if _tree.difference(tree, found, "") else None


def _tensor(value: Any, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """Numbers from elsewhere, copied, in the precision of flat vectors."""
    if _is_array(value):
        if value.dtype.kind not in "fiu":
            raise InputError(f"{name}: is an array of {value.dtype}; expected real numbers.")
        double = dtype is torch.float64
        value = torch.from_numpy(value.astype("float64" if double else "float32", order="C", copy=True))
        return value.to(device, dtype)
    try:
        return torch.tensor(value, dtype=dtype, device=device)
    except ValueError as error:
        raise InputError(f"{name}: is a nested list whose rows differ in length ({error}).") from error


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_numbers(value: Any, depth: int = 0) -> bool:
    """Whether this is a list of numbers, or of such lists, and no list in itself."""
    if not isinstance(value, (list, tuple)) or not value or depth > _tree.DEEPEST:
        return False
    return all(
        _is_numbers(item, depth + 1) or (isinstance(item, numbers.Real) and type(item) is not bool) for item in value
    )
