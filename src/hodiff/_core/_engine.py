"""PyTorch's autograd engine, called where all arguments are our own.

`torch.autograd.grad` looks at each argument in Python before it calls the engine: 40 calls and more for
six inputs, in each pass; `torch.vmap` takes 130 calls. Shapes, dtypes and numbers are right here, so both are entered
directly; by the public function where a tensor subclass or a mode wants to see the call, or where this
PyTorch has no such entry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function


class _Passing(threading.local):
    ours = 0


passing = _Passing()
"""How many passes of ours go through PyTorch's public function now, in this thread."""

_run = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)


def grad(
    outputs: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Tensor | None], *, keep: bool, build: bool
) -> Sequence[Tensor | None]:
    """One reverse pass: the gradients by `inputs`, None for one that does not matter."""
    outputs, inputs = tuple(outputs), tuple(inputs)
    ones = [  # of samples' scalars too, which the public function would refuse
        torch.ones_like(output) if cotangent is None else cotangent
        for output, cotangent in zip(outputs, cotangents, strict=True)
    ]
    if _run is None or has_torch_function(outputs + inputs):
        return public(outputs, inputs, ones, keep=keep, build=build)
    return _run(outputs, tuple(ones), keep, build, inputs, allow_unreachable=True, accumulate_grad=False)


def public(
    outputs: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Tensor | None], *, keep: bool, build: bool
) -> Sequence[Tensor | None]:
    """The same by the public function, which checks everything."""
    passing.ours += 1
    try:
        return torch.autograd.grad(
            outputs, inputs, cotangents, retain_graph=keep, create_graph=build, allow_unused=True
        )
    finally:
        passing.ours -= 1


_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_ENTRIES = ("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim")


class _Batches:
    direct = False
    """Whether they are entered directly: after the first, with which PyTorch loads their rules."""


def mapped(function: Callable[..., tuple[Tensor, ...] | Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """`function` of each of the stacked vectors, in one batch. An error may leave the batch's level on."""
    if not _Batches.direct or torch.compiler.is_compiling() or has_torch_function(tuple(vectors)):
        found = torch.vmap(function, randomness="same")(*vectors)
        _Batches.direct = all(hasattr(_functorch, name) for name in _ENTRIES)
        return [found] if isinstance(found, Tensor) else list(found)
    count = len(vectors[0])
    level = _functorch._vmap_increment_nesting(count, "same")
    found = function(*[_functorch._add_batch_dim(vector, 0, level) for vector in vectors])
    parts = (found,) if isinstance(found, Tensor) else found
    whole = [_functorch._remove_batch_dim(part, level, count, 0) for part in parts]
    _functorch._vmap_decrement_nesting()
    return whole
