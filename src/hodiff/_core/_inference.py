"""Tensors made in inference mode, which cannot be saved for a backward pass: copied where an operation meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core import _tree


class NormalTensors(TorchFunctionMode):
    """Inside it, every operation gets ordinary copies of tensors made in inference mode (outside of that mode)."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the arguments, and call the operation."""
        return func(*_tree.tree_map(self._normal, args), **_tree.tree_map(self._normal, kwargs or {}))

    def _normal(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_inference():
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, value.clone()  # the original is held, so that its id stays its own
        return self._copies[id(value)][1]
