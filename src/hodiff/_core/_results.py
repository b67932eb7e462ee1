"""What a reverse pass gave, as results: dense, each in memory of its own, finite, connected to the point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _refusals
from hodiff._core._graph import Graph


def filled(found: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for what is missing, and dense tensors throughout (an embedding may give sparse ones)."""
    dense: list[Tensor] = []
    for part, leaf in zip(found, inputs, strict=True):
        if part is None:
            dense.append(torch.zeros_like(leaf))
        else:
            dense.append(part if part.layout is leaf.layout else part.to_dense())
    return dense


def connected(ev: Graph, found: list[Tensor]) -> list[Tensor]:
    """A differentiable result that came out constant is still a function of the point: its derivative is zero.

    The gradient of a linear function carries no graph in PyTorch, and a second `grad` of it would fail. The
    sum of none of a leaf's entries is 0, and depends on the leaf.
    """
    if not ev.create_graph:
        return found
    for part in found:
        if not part.requires_grad:
            break
    else:
        return found
    callers = [leaf for leaf in ev.leaves if not ev.owned or leaf.grad_fn is not None]
    if not callers:
        return found
    nothing = torch.stack([leaf.reshape(-1)[:0].sum().to(callers[0]) for leaf in callers]).sum()
    return [part if part.requires_grad else part + nothing.to(part) for part in found]


def own(found: list[Tensor], vectors: Sequence[Tensor] = ()) -> list[Tensor]:
    """Results that share no memory, so that each may be written into.

    The engine passes one tensor on to both parts of a sum, and spreads one number over all entries of another; and
    the derivative of a linear function may be the vector itself, or a view of it.
    """
    if not vectors and len(found) == 1:
        return [_unspread(found[0])]
    taken = {_memory(vector) for vector in vectors}
    result: list[Tensor] = []
    for part in found:
        memory = _memory(part)
        result += [part.clone(memory_format=torch.contiguous_format) if memory in taken else _unspread(part)]
        taken |= {memory}
    return result


def _memory(tensor: Tensor) -> Any:
    """What two tensors over the same memory have in common."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a subclass that has none
        return tensor.data_ptr() or tensor


def _unspread(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format) if 0 in part.stride() and _is_spread(part) else part


def _is_spread(part: Tensor) -> bool:
    return any(step == 0 and length > 1 for step, length in zip(part.stride(), part.shape, strict=True))


def agree(found: Tensor, expected: Tensor, size: float) -> bool:
    """Whether two results of that size are equal up to what batches of another size, or another order, may change.

    Not where the size is infinite: anything would agree.
    """
    if not found.numel() or not math.isfinite(size):
        return not found.numel()
    eps = torch.finfo(found.dtype).eps ** 0.5
    return float((found - expected).abs_().sub_(expected.abs(), alpha=eps).max()) <= eps * size  # NaN is not


def finite(ev: Graph, found: list[Tensor]) -> list[Tensor]:
    """The results; with a warning where a derivative of higher order does not exist.

    Not on other devices than the processor, where to look is to wait.
    """
    if not ev.higher or ev.create_graph or torch.compiler.is_compiling():
        return found
    if not _are_finite([part for part in found if part.is_cpu]):
        given = [*ev.leaves, *ev.tensors()]
        if all(bool(tensor.detach().isfinite().all()) for tensor in given):
            _refusals.warn_of_non_finite(ev.kinds)
    return found


_SMALL = 4096


def _are_finite(parts: Sequence[Tensor]) -> bool:
    if len(parts) > 1:  # one sum for all small ones, whose calls are what it costs
        small = [part.reshape(-1) for part in parts if part.numel() <= _SMALL]
        parts = [part for part in parts if part.numel() > _SMALL]
        parts += [torch.cat(small)] if small else []
    for part in parts:  # noqa: SIM110 - a generator would be calls of its own
        if not (math.isfinite(part.sum()) or bool(part.isfinite().all())):  # a sum may overflow where no entry does
            return False
    return True
