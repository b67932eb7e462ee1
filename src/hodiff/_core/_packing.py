"""What a call saves inside of an activation checkpoint of the caller's: kept until the last pass of the call.

PyTorch's checkpoint keeps nothing that its block saves, and runs the block again where a pass needs some of it. A pass
of ours would run it in the middle of the call: with the modules lent, and the call once more inside itself, for a
higher order and so by other operations. What is saved then does not fit what was counted. So the call keeps what it
saves; the checkpoint counts along what a differentiable result needs, and has it alone when the call has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

_autograd: Any = torch._C._autograd
Undo = list[Callable[[], object]]


class Kept:
    """A saved tensor; without it, once the call has ended, what the checkpoint has made of it.

    Attributes:
        tensor: It, without its graph, which its node knows.
        version: How often it had been changed in place as it was saved.
        packed: What the checkpoint has made of it.
        unpack: What makes it of that.
    """

    __slots__ = ("__weakref__", "packed", "tensor", "unpack", "version")
    tensor: Tensor | None
    version: int
    packed: Any
    unpack: Callable[[Any], Tensor]


def given_back(kept: Kept) -> Tensor:
    """What was saved; an error as of PyTorch's, which does not look where a hook has it, if it was changed since."""
    tensor = kept.tensor
    if tensor is None:
        return kept.unpack(kept.packed)
    if tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {[*tensor.shape]}] is at version {tensor._version}; expected version {kept.version} "
            "instead."
        )
    return tensor


def is_open(raw: Any) -> bool:
    """Whether a saved tensor is one that a call keeps, so that a look at it runs nothing."""
    return getattr(raw.unpack_hook, "__code__", None) is given_back.__code__


def keep(undo: Undo, *, shared: bool) -> None:
    """Keep what is saved from now on until it is undone, if a checkpoint would have it.

    Args:
        shared: Whether the checkpoint has it afterwards; if not, it is kept as long as its graph.
    """
    theirs = _autograd._top_saved_tensors_default_hooks(True)
    if theirs is None or getattr(theirs[0], "__module__", "") != checkpoint.__name__:
        return
    made: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept()
        kept.tensor, kept.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version
        if shared:
            kept.packed, kept.unpack = theirs[0](tensor), theirs[1]
            made.append(weakref.ref(kept))
        return kept

    def release() -> None:
        for reference in made:
            kept = reference()
            if kept is not None:
                kept.tensor = None

    undo += [release]
    push(undo, pack, given_back)


def push(undo: Undo, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Let these hooks have what is saved until it is undone."""

    def leave() -> None:
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] is pack:
            _autograd._pop_saved_tensors_default_hooks()

    undo += [leave]
    _autograd._push_saved_tensors_default_hooks(pack, unpack)
