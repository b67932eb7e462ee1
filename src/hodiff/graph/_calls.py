"""What a call of PyTorch is to the recorder, and what its arguments are."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph._case import PASSES

OPERATION, INPLACE, CUT, GRADIENT, PLAIN, PASS = range(6)  # what is recorded comes first


def kind_of(func: Callable[..., Any]) -> int:
    """What a function is to the recorder."""
    if func in PASSES:
        return PASS
    name = getattr(func, "__name__", "")
    if name in _ASKING or (name.startswith("is_") and name != "is_nonzero"):
        return PLAIN
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in ("data", "grad"):
            return CUT if attribute == "data" else GRADIENT
        return OPERATION if attribute in ("T", "mT", "H", "mH", "real", "imag") else PLAIN
    if name in LEAVING or name in ("detach", "detach_"):
        return CUT
    if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") != "data":
        return PLAIN  # x.grad = None and the like: no value changes
    if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
        return INPLACE
    if name.startswith("__i") and name[3:-2] in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor"):
        return INPLACE
    return OPERATION


_ASKING = frozenset({"size", "dim", "numel", "stride", "storage_offset", "element_size", "get_device", "__len__"})
"""What tells of a tensor what is none of its values."""


LEAVING = frozenset({"item", "tolist", "numpy", "__array__", "__float__"})
"""What gives the values of a tensor to Python or NumPy."""


def is_gradient(func: Any) -> bool:
    """Whether a function is the getter of `x.grad`."""
    return kind_of(func) == GRADIENT


def roots_of(given: dict[str, Any]) -> list[Node]:
    """The nodes where a pass begins."""
    return [node for item in as_list(given.get("tensors")) or () if (node := _node(item)) is not None]


def _node(item: Any) -> Node | None:
    return _nodes.node_of(item) if isinstance(item, Tensor) else getattr(item, "node", None)


def as_list(value: Any) -> list[Any] | None:
    """What a pass was given, as a list; None stays."""
    if value is None:
        return None
    return [value] if isinstance(value, Tensor) or hasattr(value, "node") else list(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments, two levels deep."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return []
    found = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            found += tensors_in(item)
    return found


def surroundings(frame: FrameType | None) -> tuple[str, FrameType | None]:
    """What of PyTorch runs code with gradients switched off, `checkpoint` or `inside a Function`, and its frame."""
    forwards = _forwards()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("checkpoint.py") and "torch" in file:
            return "checkpoint", frame
        if frame.f_code in forwards:
            return "inside a Function", frame
        frame = frame.f_back
    return "", None


def _forwards() -> set[Any]:
    """The code of each Function's forward: from PyTorch 2.14 on, `apply`, which runs it, has no frame."""
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {getattr(kind.forward, "__code__", None) for kind in kinds}
