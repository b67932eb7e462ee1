"""Second derivatives without the Hessian: products with it, `hvp`, and its diagonal, `hessian_diagonal`.

Both differentiate a gradient that was formed with its graph: double backward, the route that
is right through every layer measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _dense, _independence, _reverse
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed, ChunkedBatched, ChunkSize, is_set
from hodiff._core._where import Selection, Where

V = TypeVar("V")
What = Callable[..., Any] | Tensor
ByName = dict[str, Tensor]


def hvp(
    f: What,
    x: Any,
    v: V,
    *,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> V:
    r"""A Hessian-vector product, \(H v\) with \(H = \nabla^2 f(x)\), without forming the Hessian.

    Args:
        f: A function of *x* that returns one element (of any shape), or such a tensor already
            computed from *x*, whose graph is then left as it was.
        x: Where: a tensor, a nested container of tensors, a module (its trainable parameters; `f`
            receives the module), or `hodiff.select(module, ...)`.
        v: A vector like *x* (a dict by parameter name for a module), or K vectors with one extra
            leading dimension on every leaf; or a list of the leaves in the order of *x*; or flat `(D,)`, or columns
            `(D, K)`. Where *x* is one tensor of one dimension, `(D, D)` could be rows or columns and is refused: give
            `[V]` for rows, or `[V.T]` for columns. NumPy arrays and lists of numbers are converted.
        batch_ndim: So many leading dimensions of *x* index independent samples, as for `grad`; each
            sample has its own Hessian and its own part of *v*.
        create_graph: Whether the product can be differentiated again, as for `grad`. That is a third
            derivative: given a function, layer, batch and instance norm are then computed from their
            definition, since PyTorch's own third derivative of them is wrong.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* gives that the value does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many of K vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, in the spelling of *v*, with its structure and shapes.

    Raises:
        InputError: *v* does not resemble *x*; or as for `grad`.
        GraphError: An operation has no second derivative (it is named, with a way out); or as for `grad`.

    Cost:
        One evaluation of `f` and two reverse passes, about three gradients; for K vectors the second
        pass is batched, chunk by chunk. Memory: about twice that of a gradient.

    Examples:
        The Hessian of \(\tfrac12 x^\top A x\) is \(A\):

        >>> import torch, hodiff
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> hodiff.hvp(lambda x: 0.5 * x @ A @ x, torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor([2., 1.])

    Reference:
        Pearlmutter, B. A. (1994). Fast exact multiplication by the Hessian. Neural Computation 6(1).
        doi:10.1162/neco.1994.6.1.147. Double backward is its reverse-over-reverse form.
    """
    chunk = _checks.check_chunk_size(chunk_size)
    where = Where(x)
    given = where.vectors(v, "v")
    if is_set(check_independence, "check_independence"):
        _independence.check(f, where, batch_ndim=batch_ndim, args=args, kwargs=kwargs)
    with Graph(
        call(
            f,
            where,
            passes=2,
            batch_ndim=batch_ndim,
            create_graph=create_graph,
            strict=strict,
            allow=allow,
            args=args,
            kwargs=kwargs,
        )
    ) as ev:
        gradient = _reverse.gradient(ev, differentiated=True)
        return given.like(_reverse.products(ev, gradient, given.leaves, given.number, chunk_size=chunk))


@overload
def hessian_diagonal(f: What, x: nn.Module | Selection, **options: Unpack[ChunkedBatched]) -> ByName: ...


@overload
def hessian_diagonal(f: What, x: V, **options: Unpack[ChunkedBatched]) -> V: ...


def hessian_diagonal(
    f: What,
    x: Any = _checks.MISSING,
    *,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The diagonal of the Hessian, \(\partial^2 f / \partial x_i^2\), exact.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed, as for `grad`.
        x: Where, as for `grad`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the result can be differentiated again, as for `hvp`.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* gives that the value does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The diagonal, shaped like *x* (a dict by parameter name for a module).

    Raises:
        InputError: As for `grad`.
        GraphError: As for `hvp`.

    Cost:
        As many passes as `hessian`, D rows in chunks, but only one chunk of rows in memory. For an
        elementwise function `nth_derivative(f, x, 2)` costs two passes.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.hessian_diagonal(lambda x: x[0] ** 2 * x[1] ** 3, torch.tensor([1.0, 2.0]))
        tensor([16., 12.])
    """
    chunk = _checks.check_chunk_size(chunk_size)
    if is_set(check_independence, "check_independence"):
        _independence.check(f, x, batch_ndim=batch_ndim, args=args, kwargs=kwargs)
    with Graph(
        call(
            f,
            x,
            passes=2,
            batch_ndim=batch_ndim,
            create_graph=create_graph,
            strict=strict,
            allow=allow,
            args=args,
            kwargs=kwargs,
        )
    ) as ev:
        gradient = _reverse.gradient(ev, differentiated=True)
        pairs = list(zip(gradient, ev.leaves, strict=True))
        diagonals = [
            _diagonal(ev, part, leaf, chunk, more=index < len(pairs) - 1) for index, (part, leaf) in enumerate(pairs)
        ]
    return ev.where.result(diagonals)


def _diagonal(ev: Graph, gradient: Tensor, leaf: Tensor, chunk: int | None, *, more: bool) -> Tensor:
    """The diagonal of one leaf's block, keeping of each chunk of rows only the entries wanted."""
    count, units = _dense.basis(gradient, ev.batch_ndim)
    samples = leaf.shape[: ev.batch_ndim].numel()
    kept = []
    for start, stop, (rows,) in _reverse.pull_many(
        ev, [gradient], units, count, chunk_size=chunk, more=more, inputs=[leaf]
    ):
        entries = rows.reshape(stop - start, samples, count)[:, :, start:stop]
        kept.append(entries.diagonal(dim1=0, dim2=2).clone())  # (samples, stop - start); the rows may go
    return (torch.cat(kept, dim=1) if kept else leaf.new_zeros(0)).reshape(leaf.shape)
