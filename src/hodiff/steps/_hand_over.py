"""The hand-over: a loss whose backward pass gives gradients that are there already."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from hodiff.errors import GraphError, InputError

_torch: Any = torch


class HandOver(torch.autograd.Function):
    """The value of a step; its backward pass multiplies the gradients, and looks whether the point has changed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        """Keep gradients and leaves: PyTorch raises where a leaf has been changed in place since."""
        ctx.count = len(gradients)
        ctx.save_for_backward(*gradients, *leaves)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> Any:
        """The gradients, times what arrives."""
        if torch.is_grad_enabled():
            raise GraphError(
                "the value of a compiled step has a first derivative only (create_graph=True was asked for). Take "
                "the further derivative inside of the loss, or differentiate the loss itself."
            )
        gradients: Any = ctx.saved_tensors[: ctx.count]
        return None, None, *_torch._foreach_mul(gradients, factors[0].reshape(()))


# --- DistributedDataParallel: gradients are reduced only after its own forward ----------------------------------------

_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()


def _note(module: Any, name: str, below: Any) -> None:
    if any(cls.__name__ == "DistributedDataParallel" for cls in type(module).__mro__):
        _wrappers.add(module)


def watch_wrappers() -> None:
    """Know each DistributedDataParallel from now on, and those that are there."""
    if _note not in modules._global_module_registration_hooks.values():
        modules.register_module_module_registration_hook(_note)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parallel = torch.nn.parallel.DistributedDataParallel
            _wrappers.update(each for each in gc.get_objects() if issubclass(type(each), parallel))


def check_wrappers(leaves: Sequence[Tensor]) -> None:
    """Raise where gradients of these would not be reduced, because their wrapper's forward is not running."""
    if not _wrappers:
        return
    active = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    ours = {id(leaf) for leaf in leaves}
    for wrapper in _wrappers:
        if wrapper is not active and not ours.isdisjoint(map(id, wrapper.module.parameters())):
            raise InputError(
                "where: its parameters belong to a DistributedDataParallel whose forward is not running, so that no "
                "process would reduce their gradients. Write a module whose forward calls the step, and wrap that."
            )
