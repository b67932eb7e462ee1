"""What steps reach besides the parameters: tensors that require grad, seen as operations meet them; and stand-ins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core import _nodes, _tree


class Met(TorchFunctionMode):
    """Inside it, tensors that require grad and come from outside are noted.

    Attributes:
        tensors: What has been noted, by identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self._inside: dict[int, Tensor] = {}
        self._leaves: set[int] = set()
        self._new: list[Tensor] = []

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """A step, at these leaves."""
        self._inside = {id(leaf): leaf for leaf in leaves}  # held, so that identities stay their own
        self._leaves, self._new = set(self._inside), []

    def end(self) -> None:
        """The end of it. What a nested call computed of the leaves looked as if it came from outside, and does not."""
        for tensor in self._new:
            if tensor.grad_fn is not None and any(id(v) in self._leaves for v in _nodes.leaves_below([tensor])):
                del self.tensors[id(tensor)]
        self._inside = {}
        self._leaves = set()
        self._new = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the arguments and what becomes of them, and call the operation."""
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._look(value)
            elif _tree.is_container(value):
                for item in _tree.flatten(value)[0]:
                    if isinstance(item, Tensor):
                        self._look(item)
        found = func(*args, **kwargs)
        for item in _tree.flatten(found)[0]:
            if isinstance(item, Tensor) and id(item) not in self.tensors:
                self._inside[id(item)] = item
        return found

    def _look(self, tensor: Tensor) -> None:
        key = id(tensor)
        if key not in self._inside and key not in self.tensors and tensor.requires_grad:
            self.tensors[key] = tensor
            self._new.append(tensor)


class Instead(TorchFunctionMode):
    """Inside it, operations get stand-ins for some tensors."""

    def __init__(self, tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> None:
        super().__init__()
        self._pairs = {id(tensor): (tensor, other) for tensor, other in zip(tensors, stand_ins, strict=True)}
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the arguments, and call the operation."""
        found = func(*_tree.tree_map(self._other, args), **_tree.tree_map(self._other, kwargs or {}))
        if isinstance(found, Tensor) and found.grad_fn is None:
            self._made[id(found)] = weakref.ref(found)
        return found

    def _other(self, value: Any) -> Any:
        pair = self._pairs.get(id(value)) if isinstance(value, Tensor) else None
        return value if pair is None else pair[1]

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor without a graph was made inside."""
        found = self._made.get(id(tensor))
        return found is not None and found() is tensor
