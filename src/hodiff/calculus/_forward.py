"""Forward mode: `jvp`, and the columns of tall Jacobians.

Forward mode serves detached results only. To differentiate its result would be reverse-over-forward,
which PyTorch gets wrong through norm layers (75 % off through LayerNorm); a differentiable `jvp` is
made of two reverse passes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hodiff._core import _checks, _dense, _nesting, _reverse, _tree, _versions
from hodiff._core._call import call
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


def tall_jacobian(ev: Graph, outputs: list[Tensor], *, chunk_size: int | None) -> list[list[Tensor]] | None:
    """The Jacobian's blocks by columns, in forward mode; None where rows are better, or the only right way.

    Forward mode evaluates `f` again, so it must find what the first evaluation found: not when `f`
    draws random numbers, and not inside another call, whose derivative would reach into it.
    """
    leaves, batch_ndim = ev.leaves, ev.batch_ndim
    columns = sum(leaf.shape[batch_ndim:].numel() for leaf in leaves)
    rows = sum(output.shape[batch_ndim:].numel() for output in outputs)
    if not ev.owned or ev.create_graph or _nesting.nested() or not 0 < columns < rows or ev.drew_random():
        return None
    largest = max(output.numel() for output in outputs)
    size = chunk_size or max(8, _reverse.CHUNK_BYTES // (8 * largest * outputs[0].element_size()))
    primals = [leaf.detach() for leaf in leaves]
    try:
        _versions.load_forward_mode()
        blocks = [_columns_of(ev, primals, index, len(outputs), size) for index in range(len(primals))]
    except Exception:  # no forward rule, no batching rule, or data-dependent Python: the rows need none of these
        return None
    return [
        [_as_block(blocks[j][i], output, leaf, batch_ndim) for j, leaf in enumerate(leaves)]
        for i, output in enumerate(outputs)
    ]


def _columns_of(ev: Graph, primals: list[Tensor], index: int, outputs: int, size: int) -> list[Tensor]:
    """The derivatives of all outputs by each entry of one leaf: (entries, *output shape) for each output."""

    def push(tangent: Tensor) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            duals = list(primals)
            duals[index] = forward_ad.make_dual(primals[index], tangent)
            values, _, _ = _tree.flatten(ev.at(duals))
            found = [forward_ad.unpack_dual(value) for value in values]
            return tuple(torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in found)

    count, units = _dense.basis(primals[index], ev.batch_ndim)
    with torch.no_grad():
        parts = [_reverse.batched(push, units(start, min(start + size, count))) for start in range(0, count, size)] or [
            []
        ]
    return [torch.cat([part[i] for part in parts]) if len(parts) > 1 else parts[0][i] for i in range(outputs)]


def _as_block(columns: Tensor, output: Tensor, leaf: Tensor, batch_ndim: int) -> Tensor:
    """From (input event, *output shape) to (*batch, *output event, *input event)."""
    return columns.movedim(0, -1).reshape((*output.shape, *leaf.shape[batch_ndim:]))
