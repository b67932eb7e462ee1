"""Products from the right: `jvp`, and the columns of tall Jacobians.

Both by two reverse passes: u -> J'u is linear, and its derivative by u in the direction v is J v. PyTorch's forward
mode would run `f` again, under transforms that refuse much of Python, take `no_grad` for nothing, and leave no graph
that could be looked at; and to differentiate its result is wrong through norm layers (75 % off through LayerNorm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _checks, _dense, _results, _reverse, _tree
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
    cotangents = [_generic(output) for output in outputs]
    try:
        pulled = _reverse.pull(ev, outputs, cotangents, differentiated=True)
        found = [_columns_of(ev, part, cotangents, chunk_size) for part in pulled]
    except RuntimeError as error:  # no second derivative, or no room for its graph: rows need neither
        if not isinstance(error, torch.OutOfMemoryError) and not is_fault(error):
            raise
        return None
    agree = all(_add_up(blocks, part, cotangents) for blocks, part in zip(found, pulled, strict=True))
    if not agree:
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


def _generic(output: Tensor) -> Tensor:
    """A cotangent that no symmetry cancels: the same at every call, of numbers between 1 and 2.

    Positive ones, for the backward of logcumsumexp takes their logarithm.
    """
    count = output.numel()
    numbers = torch.linspace(0, 0.6180339887 * count, count, device=output.device).frac_().add_(1)
    return numbers.to(output.dtype).reshape(output.shape).requires_grad_()


def _columns_of(ev: Graph, pulled: Tensor, cotangents: list[Tensor], chunk_size: int | None) -> list[Tensor]:
    """The derivatives of each output by all entries of one leaf: (samples, entries of the output, of the leaf)."""
    count, units = _dense.basis(pulled, ev.batch_ndim)
    chunks = _reverse.pull_many(ev, [pulled], units, count, chunk_size=chunk_size, inputs=cotangents)
    samples = pulled.shape[: ev.batch_ndim].numel()
    return [
        columns.reshape(count, samples, u.shape[ev.batch_ndim :].numel()).movedim(0, -1).contiguous()
        for columns, u in zip(_reverse.stacked(ev, chunks, count, cotangents), cotangents, strict=True)
    ]


def _add_up(blocks: list[Tensor], pulled: Tensor, cotangents: list[Tensor]) -> bool:
    """Whether the columns give J'u for the u that it was computed with, for each sample: no NaN or infinity does."""
    coarse = max((pulled.dtype, *(u.dtype for u in cotangents)), key=lambda dtype: torch.finfo(dtype).eps)
    samples, _, entries = blocks[0].shape
    expected = pulled.detach().to(coarse).reshape(samples, entries)
    sums = [
        (u.detach().reshape(samples, 1, block.shape[1]) @ block).squeeze(1).to(expected)
        for u, block in zip(cotangents, blocks, strict=True)
    ]
    # How large a sum would be, about, were the signs random.
    sizes = [torch.linalg.vector_norm(block).to(expected) / max(1, expected.numel()) ** 0.5 for block in blocks]
    found, size = (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0) for parts in (sums, sizes))
    return _results.agree(found, expected, size)
