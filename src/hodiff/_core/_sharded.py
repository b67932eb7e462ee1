"""Parameters that are sharded over processes: recognised, and refused with what works instead.

A gradient by shards is None in PyTorch, silently, and a model under `fully_shard` frees what a second pass needs.
Whoever has such tensors has imported the module that defines them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hodiff._core import _tree
from hodiff.errors import GraphError, InputError

LOADED_BY = "torch.distributed.tensor"
"""The module without which there are no such tensors: who calls the checks asks for it first, which costs nothing."""
WAY_OUT = (
    "Gather them once into a plain copy of the model (p.full_tensor() for each parameter p) and share the data by "
    "process_group= of an operator; or differentiate by the local shards, p.to_local(), with an f that gathers them by "
    "DTensor.from_local(...).full_tensor(grad_placements=[Partial()]). The documentation has both, under "
    "'Several processes'."
)


def check_tensor(value: Tensor, name: str) -> None:
    """Raise for a DTensor."""
    if _is_dtensor(value):
        raise InputError(f"{name}: is a DTensor, of which each process holds a shard. {WAY_OUT}")


def check_vectors(value: Any, name: str) -> None:
    """Raise for vectors that are DTensors, alone or in a container."""
    leaves: Any = (value,)
    if isinstance(value, dict):
        leaves = value.values()
    elif _tree.is_container(value):
        leaves = value
    if any(map(_tree.is_container, leaves)):
        leaves = _tree.flatten(value, name)[0]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and _is_dtensor(leaf):
            raise InputError(
                f"{name}: is a DTensor, of which each process holds a shard, and the point is none. Give all of it, "
                f"v.full_tensor(), which is the same on every process."
            )


def check_modules(modules: Iterable[nn.Module], name: str) -> None:
    """Raise for a module under `fully_shard`, or one that has DTensors for parameters."""
    kinds: tuple[type, ...] = ()
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        kinds = FSDPModule, FullyShardedDataParallel
    for module in modules:
        if kinds and isinstance(module, kinds):
            plain = next((k.__name__ for k in type(module).__mro__ if not k.__name__.startswith(("FSDP", "Fully"))), "")
            raise InputError(
                f"{name}: {plain} is sharded (fully_shard), and its parameters are freed between passes, so that it "
                f"has no second derivative. {WAY_OUT}"
            )
        for path, parameter in module._parameters.items():
            if parameter is not None and _is_dtensor(parameter):
                raise InputError(f"{name}: its parameter {path!r} is a DTensor, sharded over processes. {WAY_OUT}")


NODE = "RegisterPostBackwardFunction"
"""The Function by which `fully_shard` notices, in the first pass, that a module's parameters may be freed."""


def freed() -> GraphError:
    """The error for a second pass over a graph that needs such parameters: PyTorch may end the process there."""
    return GraphError.about(
        "the graph goes through a model that is sharded over processes (fully_shard), whose parameters are freed "
        "between passes, so that it has no second derivative. Compute the tensor by a plain copy of the model "
        "(p.full_tensor() for each parameter p); the documentation has more, under 'Several processes'."
    )


def _is_dtensor(value: Tensor) -> bool:
    if LOADED_BY not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor  # which waits where another thread has only begun to load it

    return isinstance(value, DTensor)
