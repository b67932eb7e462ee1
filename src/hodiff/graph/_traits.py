"""What nodes and tensors tell of themselves under underscored or undocumented names, beside what they saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as _optimizer  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from hodiff._core import _modes, _nodes
from hodiff._core._nodes import Node
from hodiff._core._switches import Scope, Undo

ENGINE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
"""The code that runs a pass: what a traceback has below it ran while the pass did. None: it cannot be told."""


def without_modes() -> _modes.Context:
    """A context in which reading a tensor's attributes calls no mode and no subclass, and meets no inference mode."""
    return Scope(_normal) if torch.is_inference_mode_enabled() else torch._C.DisableTorchFunction()


def _normal(undo: Undo) -> None:
    _modes.record(undo)
    plain = torch._C.DisableTorchFunction()
    undo += [partial(plain.__exit__, None, None, None)]
    plain.__enter__()


def modes() -> int:
    """How many modes see this thread's calls now."""
    return torch._C._len_torch_function_stack()


def innermost(mode: TorchFunctionMode) -> bool:
    """Whether a mode is the first to see this thread's calls."""
    depth = modes()
    return depth > 0 and torch._C._get_function_stack_at(depth - 1) is mode


def hooks_before_steps() -> dict[int, Any]:
    """The hooks before the steps of all optimizers."""
    return _optimizer._global_optimizer_pre_hooks


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What runs around the steps of an optimizer: its own hooks, and those of all optimizers; None if it is unknown."""
    names = [f"optimizer_step_{when}_hooks" for when in ("pre", "post")]
    found = [getattr(optimizer, f"_{name}", {0: None}) for name in names]
    found += [getattr(_optimizer, f"_global_{name.replace('_step', '')}", {0: None}) for name in names]
    return [hook for hooks in found for hook in hooks.values()]


# --- nodes ------------------------------------------------------------------------------------------------------------


def leaf(node: Node) -> Tensor | None:
    """The leaf tensor into whose `.grad` the node accumulates; None for other nodes."""
    return node.variable if node.__class__ is _nodes.ACCUMULATE else None


def children(node: Node) -> Iterator[Node]:
    """The nodes that a reverse pass runs after this one."""
    return (child for child, _ in node.next_functions if child is not None)


def tags(node: Node) -> dict[str, Any]:
    """The node's own dict, which lives as long as the node and is empty until someone writes to it."""
    return node.metadata


def shape(node: Node) -> tuple[int, ...] | None:
    """The shape of the node's (first) output; None where it is not told."""
    try:
        return tuple(node._input_metadata[0].shape)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None


def sequence(node: Node) -> int:
    """The node's place in the order of creation within its thread; leaves come last of all."""
    return node._sequence_nr()


counter: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The place that this thread's next node will get."""


# --- tensors ----------------------------------------------------------------------------------------------------------


def leaf_of(value: Tensor) -> Tensor | None:
    """The trainable leaf whose memory a tensor is: itself, or the one that it is a view of."""
    base = value if value.is_leaf and value.requires_grad else value._base
    return base if base is not None and base.is_leaf and base.requires_grad else None


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._base is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run around a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


_WITHOUT_MEMORY = (RuntimeError, NotImplementedError, ValueError)
"""What tensors raise that have no memory of one piece: sparse and nested ones, and a lazy module's parameters."""


def storage(tensor: Tensor) -> tuple[int, int]:
    """An identity for the memory under a tensor, and its size in bytes: none, if it only says how many it would be."""
    try:
        memory = tensor.untyped_storage()
        return memory._cdata, 0 if tensor.is_meta else memory.nbytes()
    except _WITHOUT_MEMORY:
        return id(tensor), 0


def memory(tensor: Tensor) -> int:
    """An identity for the memory under a tensor."""
    try:
        return tensor.untyped_storage()._cdata
    except _WITHOUT_MEMORY:
        return id(tensor)


def measure(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """A tensor's shape, empty for a nested tensor, which has none; and what `storage` says."""
    try:
        memory = tensor.untyped_storage()
        return tuple(tensor.shape), memory._cdata, 0 if tensor.is_meta else memory.nbytes()
    except _WITHOUT_MEMORY:
        nested = tensor.is_nested and tensor.layout is torch.strided
        return () if nested else tuple(tensor.shape), *storage(tensor)
