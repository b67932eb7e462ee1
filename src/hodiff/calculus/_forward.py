"""Products from the right: `jvp`, and the columns of tall Jacobians.

Both by two reverse passes: u -> J'u is linear, and its derivative by u in the direction v is J v. PyTorch's forward
mode would run `f` again, under transforms that refuse much of Python, take `no_grad` for nothing, and leave no graph
that could be looked at; and to differentiate its result is wrong through norm layers (75 % off through LayerNorm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _checks, _dense, _modes, _results, _reverse, _tree
from hodiff._core._call import call
from hodiff._core._faults import is_fault
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed, Chunked, ChunkSize
from hodiff._core._where import Where

R = TypeVar("R")


@overload
def jvp(f: Callable[..., R], x: Any, v: Any, **options: Unpack[Chunked]) -> R: ...


@overload
def jvp(f: R, x: Any, v: Any, **options: Unpack[Chunked]) -> R: ...


def jvp(
    f: Any,
    x: Any,
    v: Any,
    *,
    create_graph: bool | None = None,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A Jacobian-vector product, \(J v\) with \(J = \partial f / \partial x\): a directional derivative.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors already
            computed from *x*.
        x: Where, as for `grad`.
        v: A vector like *x* (a dict by parameter name for a module), or K of them with one extra
            leading dimension on every leaf; or in another spelling, as for `hvp`.
        create_graph: Whether the result can be differentiated again, as for `grad`.
        strict: What a part of *x* gives that `f(x)` does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, shaped like `f(x)`; `(K, *shape)` on every leaf for K vectors, and columns `(M, K)` for columns.

    Raises:
        InputError: *v* does not resemble *x*.
        GraphError: As for `grad`.

    Cost:
        Two reverse passes over one evaluation of `f`: the product is linear in the cotangent of the
        first. This is right through every layer, differentiable, and the same for a tensor already
        computed. K vectors share the first pass and take one batched pass per chunk. Where `f` calls a
        Python `autograd.Function`, one pass more checks that its backward passes the cotangent on.

    Examples:
        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> hodiff.jvp(lambda x: A @ x, torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor([1., 3.])
    """
    chunk = _checks.check_chunk_size(chunk_size)
    where = Where(x)
    given = where.vectors(v, "v")
    with Graph(
        call(f, where, passes=2, create_graph=create_graph, strict=strict, allow=allow, args=args, kwargs=kwargs)
    ) as ev:
        outputs = ev.tensors()
        pushed = _reverse.pushforward(ev, outputs, given.leaves, given.number, chunk_size=chunk)
        _, _, tree = _tree.flatten(ev.outputs)
        return given.arranged(pushed, tree)


MANY_ROWS = 2
"""How many times as many rows as columns a Jacobian has that is made by columns: these need a pass more."""

SMALL = 2**16
"""Fewer numbers than these, in the cotangents of all rows together, cost less than the pass more."""


def tall_jacobian(ev: Graph, outputs: list[Tensor], *, chunk_size: int | None) -> list[list[Tensor]] | None:
    """The Jacobian's blocks by columns, J e for each unit vector e; None where rows are better, or the only right way.

    Rows need first derivatives alone, and have whatever a hook or a Python Function makes of a gradient; to columns
    J'u must be linear in u. So they are held against J'u for one u, which also finds what is not finite.
    """
    batch_ndim = ev.batch_ndim
    columns = sum(leaf.shape[batch_ndim:].numel() for leaf in ev.leaves)
    rows = sum(output.shape[batch_ndim:].numel() for output in outputs)
    small = MANY_ROWS * columns > rows or rows * sum(output.numel() for output in outputs) < SMALL
    if small or not columns or ev.create_graph or not _is_linear(ev, outputs):
        return None
    weights = [_generic(output, batch_ndim) for output in outputs]
    cotangents = [
        output.new_empty(output.shape).copy_(w).requires_grad_() for output, w in zip(outputs, weights, strict=True)
    ]
    found = []
    try:
        for part in _reverse.pull(ev, outputs, cotangents, differentiated=True):
            blocks = _columns_of(ev, part, weights, cotangents, chunk_size)
            if blocks is None:
                return None
            found.append(blocks)
    except RuntimeError as error:  # no second derivative, or no room for its graph: rows need neither
        if not isinstance(error, torch.OutOfMemoryError) and not is_fault(error):
            raise
        return None
    return [
        [
            blocks[i].to(leaf).reshape((*output.shape, *leaf.shape[batch_ndim:]))
            for blocks, leaf in zip(found, ev.leaves, strict=True)
        ]
        for i, output in enumerate(outputs)
    ]


def _is_linear(ev: Graph, outputs: list[Tensor]) -> bool:
    """Whether nothing is known that makes J'u another function of u than a linear one, with a derivative.

    Of a tensor already computed it is not known: its graph may have hooks, which nothing shows.
    """
    plain = all(type(tensor) is Tensor for tensor in (*ev.leaves, *outputs))
    return plain and ev.owned and not ev.hooked() and _reverse.has_second_derivatives(ev)


def _generic(output: Tensor, batch_ndim: int) -> Tensor:
    """A cotangent of every sample that no symmetry cancels: the same at every call, of numbers between 1 and 2.

    Positive ones, for the backward of logcumsumexp takes their logarithm.
    """
    event = output.shape[batch_ndim:]
    count = event.numel()
    numbers = torch.linspace(0, 0.6180339887 * count, count, device=output.device).frac_().add_(1)
    return numbers.to(output.dtype).reshape(event)


def _columns_of(
    ev: Graph, pulled: Tensor, weights: list[Tensor], cotangents: list[Tensor], chunk_size: int | None
) -> list[Tensor] | None:
    """The derivatives of each output by all entries of one leaf: (samples, entries of the output, of the leaf).

    None where they do not add up to J'u for the u that it was computed with, for each sample: no NaN or infinity does.
    """
    count, units = _dense.basis(pulled, ev.batch_ndim)
    samples = pulled.shape[: ev.batch_ndim].numel()
    whole = [] if count else [w.new_empty((samples, w.numel(), 0)) for w in weights]
    sums, sizes = [], []
    # In memory of their own, small beside the result: products of matrices take one vector for all samples one by one.
    own = lambda start, stop: [unit.contiguous() for unit in units(start, stop)]  # noqa: E731
    for start, stop, parts in _reverse.pull_many(ev, [pulled], own, count, chunk_size=chunk_size, inputs=cotangents):
        parts = [part.reshape(stop - start, samples, w.numel()) for part, w in zip(parts, weights, strict=True)]
        sums.append(_sum(parts, weights))
        sizes += [torch.linalg.vector_norm(part) for part in parts]
        if stop - start == count:
            whole = [part.movedim(0, -1).contiguous() for part in parts]
            continue
        whole = whole or [part.new_empty((*part.shape[1:], count)) for part in parts]
        for block, part in zip(whole, parts, strict=True):
            block[..., start:stop] = part.movedim(0, -1)
            del part  # before the next chunk is made
        del parts
    return whole if not count or _add_up(sums, sizes, pulled.detach().reshape(samples, count)) else None


def _sum(parts: list[Tensor], weights: list[Tensor]) -> Tensor:
    """What some columns give, for each sample: (columns, samples). Before they are turned, which is quicker."""
    with _modes.autocast(parts[0].device.type):
        sums = [part.squeeze(1) @ w.reshape(-1) for part, w in zip(parts, weights, strict=True)]
    return sums[0] if len(sums) == 1 else torch.stack([part.to(_coarsest(sums)) for part in sums]).sum(0)


def _add_up(sums: list[Tensor], sizes: list[Tensor], expected: Tensor) -> bool:
    """Whether that is J'u, (samples, columns), up to rounding."""
    coarse = _coarsest([expected, *sums])
    found = sums[0] if len(sums) == 1 else torch.cat(sums)
    # How large a sum would be, about, were the signs random.
    size = math.hypot(*map(float, sizes)) / max(1, expected.numel()) ** 0.5
    return _results.agree(found.reshape(expected.T.shape).T.to(coarse), expected.to(coarse), size)


def _coarsest(tensors: list[Tensor]) -> torch.dtype:
    return max((tensor.dtype for tensor in tensors), key=lambda dtype: torch.finfo(dtype).eps)
