"""`cross_hvp`: a product with the mixed second derivatives of a function of two points, without the block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _independence, _reverse
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed, ChunkedBatched, ChunkSize, is_set
from hodiff._core._where import Selection, Where

V = TypeVar("V")
What = Callable[..., Any] | Tensor
ByName = dict[str, Tensor]


@overload
def cross_hvp(f: What, x: nn.Module | Selection, y: Any, v: Any, **options: Unpack[ChunkedBatched]) -> ByName: ...


@overload
def cross_hvp(f: What, x: V, y: Any, v: Any, **options: Unpack[ChunkedBatched]) -> V: ...


def cross_hvp(
    f: What,
    x: Any,
    y: Any,
    v: Any,
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
    r"""A product with the mixed second derivatives, \(\nabla_x (\partial f / \partial y \cdot v)\), without the block.

    It is what a hypergradient is made of: how the gradient by *y* (weights), along *v*, changes with *x*
    (architecture, hyperparameters). The usual difference of two gradients is an approximation of it.

    Args:
        f: A function of *x* and *y* that returns one element, or such a tensor already computed.
        x: The point that the result is shaped like, as for `grad`.
        y: The point that *v* is shaped like, as for `grad`.
        v: A vector like *y* (a dict by parameter name for a module), or K vectors with one extra
            leading dimension on every leaf; or in another spelling, as for `hvp`.
        batch_ndim: Leading dimensions, of *x* and *y* alike, that index independent samples.
        create_graph: Whether the product can be differentiated again, as for `hvp`.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* or *y* gives that the value does not depend on. None: zeros, and an error where that
            is all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many of K vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`, after *x* and *y*.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, with the structure and shapes of *x*; for K vectors, with one more leading dimension, and
        columns for columns.

    Raises:
        InputError: *v* does not resemble *y*; or as for `grad`.
        GraphError: As for `hvp`.

    Cost:
        One evaluation of `f` and two reverse passes, as for `hvp`. The difference of two gradients by *x* alone is
        quicker where *x* is small beside *y*: by 1.4 to 1.6 for architectures, at four digits.

    Examples:
        For \(x^\top A y\) it is \(A v\):

        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> hodiff.cross_hvp(lambda x, y: x @ A @ y, torch.ones(2), torch.ones(3), torch.tensor([1.0, 0.0, -1.0]))
        tensor([-2., -2.])

    Reference:
        Liu, H., Simonyan, K., Yang, Y. (2019). DARTS: differentiable architecture search.
        arXiv:1806.09055. Its equation 8 approximates this product by a difference.
    """
    chunk = _checks.check_chunk_size(chunk_size)
    first, second = Where(x), Where(y, "y")
    given = second.vectors(v, "v")
    if is_set(check_independence, "check_independence"):
        _independence.check(f, first, second, batch_ndim=batch_ndim, args=args, kwargs=kwargs)
    with Graph(
        call(
            f,
            Where.joined(first, second),
            passes=2,
            batch_ndim=batch_ndim,
            create_graph=create_graph,
            strict=strict,
            allow=allow,
            args=args,
            kwargs=kwargs,
            spread=True,
        )
    ) as ev:
        split, output = len(first.tensors), ev.scalars()
        gradient = _reverse.pull(ev, [output], [torch.ones_like(output)], differentiated=True, inputs=ev.leaves[split:])
        inputs = ev.leaves[:split]
        products = _reverse.products(ev, gradient, given.leaves, given.number, chunk_size=chunk, inputs=inputs)
        return given.arranged(products, first.tree())
