"""The Hessian itself, dense: `hessian`, `value_grad_and_hessian`, `cross_hessian`.

All of them differentiate a gradient that was formed with its graph: double backward, the route that
is right through every layer measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

from torch import Tensor, nn

from hodiff._core import _checks, _dense, _independence, _results, _reverse
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed, ChunkedBatched, ChunkSize, is_set
from hodiff._core._where import Selection, Where

K = TypeVar("K")
V = TypeVar("V")
What = Callable[..., Any] | Tensor
Pair = tuple[Tensor, Tensor]
ByName = dict[str, Tensor]
Blocks = dict[str, dict[str, Tensor]]

WAY_OUT = (
    "Use what does not form it: hodiff.hvp for a product, hodiff.HessianOperator for many products, eigenvalues and "
    "solves, hodiff.hessian_diagonal for its diagonal."
)


@overload
def hessian(f: What, x: Any, *, matrix: Literal[True], **options: Unpack[ChunkedBatched]) -> Tensor: ...


@overload
def hessian(f: What, x: Tensor, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]) -> Tensor: ...


@overload
def hessian(
    f: What, x: nn.Module | Selection, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> Blocks: ...


@overload
def hessian(
    f: What, x: list[Tensor], *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> list[list[Tensor]]: ...


@overload
def hessian(
    f: What, x: dict[K, Tensor], *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> dict[K, dict[K, Tensor]]: ...


@overload
def hessian(
    f: What, x: Pair, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> tuple[Pair, Pair]: ...


@overload
def hessian(f: What, x: Tensor, *, matrix: bool, **options: Unpack[ChunkedBatched]) -> Tensor: ...


@overload
def hessian(f: What, x: Any, *, matrix: bool = False, **options: Unpack[ChunkedBatched]) -> Any: ...


def hessian(
    f: What,
    x: Any = _checks.MISSING,
    *,
    matrix: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The Hessian \(H_{ij} = \partial^2 f / \partial x_i \partial x_j\), dense.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed, as for `grad`.
        x: Where, as for `grad`.
        matrix: Whether to give one `(D, D)` matrix, in the order of *x*, instead of nested blocks.
        batch_ndim: Leading dimensions of *x* that index independent samples; one Hessian for each.
        create_graph: Whether the result can be differentiated again, as for `hvp`.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* gives that the value does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        For a tensor `(*x.shape, *x.shape)`; for containers, the structure of *x* filled with
        structures of *x*; for a module `{name: {name: block}}`. With `matrix=True` a `(D, D)` tensor.
        Under `batch_ndim=1`: `(N, *event, *event)`, or `(N, D, D)`.

    Raises:
        InputError: As for `grad`.
        GraphError: As for `hvp`.

    Cost:
        One evaluation of `f`, one reverse pass for the gradient, and one batched pass per chunk of
        rows, D rows in all (D of one sample, under `batch_ndim`). Memory: the result, and what a
        pass over one chunk needs; the last pass frees the graph as it goes.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.hessian(lambda x: x[0] ** 2 * x[1], torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])
    """
    _, _, second = value_grad_and_hessian(
        f,
        x,
        matrix=matrix,
        batch_ndim=batch_ndim,
        create_graph=create_graph,
        check_independence=check_independence,
        strict=strict,
        allow=allow,
        chunk_size=chunk_size,
        args=args,
        kwargs=kwargs,
    )
    return second


@overload
def value_grad_and_hessian(
    f: What, x: nn.Module | Selection, *, matrix: Literal[True], **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, ByName, Tensor]: ...


@overload
def value_grad_and_hessian(
    f: What, x: V, *, matrix: Literal[True], **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, V, Tensor]: ...


@overload
def value_grad_and_hessian(
    f: What, x: Tensor, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def value_grad_and_hessian(
    f: What, x: nn.Module | Selection, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, ByName, Blocks]: ...


@overload
def value_grad_and_hessian(
    f: What, x: list[Tensor], *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]: ...


@overload
def value_grad_and_hessian(
    f: What, x: dict[K, Tensor], *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, dict[K, Tensor], dict[K, dict[K, Tensor]]]: ...


@overload
def value_grad_and_hessian(
    f: What, x: Pair, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, Pair, tuple[Pair, Pair]]: ...


@overload
def value_grad_and_hessian(
    f: What, x: Any, *, matrix: bool = False, **options: Unpack[ChunkedBatched]
) -> tuple[Tensor, Any, Any]: ...


def value_grad_and_hessian(
    f: What,
    x: Any = _checks.MISSING,
    *,
    matrix: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    r"""Value, gradient and Hessian of a scalar function, from one evaluation: what a Newton step needs.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed, as for `grad`.
        x: Where, as for `grad`.
        matrix: Whether the Hessian is one `(D, D)` matrix, as for `hessian`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether all three results can be differentiated again.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* gives that the value does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        `(value, gradient, hessian)`: the value shaped as `f` gave it, the gradient like *x*, the
        Hessian as for `hessian`.

    Raises:
        InputError: As for `grad`.
        GraphError: As for `hvp`.

    Cost:
        That of `hessian`; value and gradient are by-products.

    Examples:
        One Newton step finds the minimum of a quadratic:

        >>> import torch, hodiff
        >>> x = torch.tensor([5.0, -3.0])
        >>> value, g, H = hodiff.value_grad_and_hessian(lambda x: (x[0] - 1) ** 2 + 2 * (x[1] - 2) ** 2, x)
        >>> value, x - torch.linalg.solve(H, g)
        (tensor(66.), tensor([1., 2.]))
    """
    chunk = _checks.check_chunk_size(chunk_size)
    where = Where(x)
    _checks.check_batch(where.tensors, where.names, batch_ndim)
    _dense.check_fits(where.tensors, where.tensors, batch_ndim, WAY_OUT)
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
        table = _dense.blocks(ev, gradient, chunk_size=chunk)
        gradient = _results.own(gradient if ev.create_graph else [part.detach() for part in gradient])
    if is_set(matrix, "matrix"):
        second = _dense.matrix(table, where.tensors, where.tensors, batch_ndim)
    else:
        second = where.result([where.result(row) for row in table])
    return ev.value(), where.result(gradient), second


@overload
def cross_hessian(f: What, x: Tensor, y: nn.Module | Selection, **options: Unpack[ChunkedBatched]) -> ByName: ...


@overload
def cross_hessian(f: What, x: nn.Module | Selection, y: Tensor, **options: Unpack[ChunkedBatched]) -> ByName: ...


@overload
def cross_hessian(f: What, x: Tensor, y: V, **options: Unpack[ChunkedBatched]) -> V: ...


@overload
def cross_hessian(f: What, x: V, y: Tensor, **options: Unpack[ChunkedBatched]) -> V: ...


@overload
def cross_hessian(f: What, x: Any, y: Any, **options: Unpack[ChunkedBatched]) -> Any: ...


def cross_hessian(
    f: What,
    x: Any,
    y: Any,
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
    r"""The mixed second derivatives \(\partial^2 f / \partial x_i \partial y_j\): one block of the joint Hessian.

    Args:
        f: A function of *x* and *y* that returns one element, or such a tensor already computed.
        x: The first point, as for `grad`.
        y: The second point, as for `grad`.
        batch_ndim: Leading dimensions, of *x* and *y* alike, that index independent samples.
        create_graph: Whether the result can be differentiated again, as for `hvp`.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* or *y* gives that the value does not depend on. None: zeros, and an error where that
            is all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`, after *x* and *y*.
        kwargs: Keyword arguments for `f`.

    Returns:
        For tensors `(*x.shape, *y.shape)`, or `(*batch, *x event, *y event)`; for containers, the
        structure of *x* filled with structures of *y*.

    Raises:
        InputError: As for `grad`.
        GraphError: As for `hvp`.

    Cost:
        One evaluation of `f`, one reverse pass, and one batched pass per chunk of the smaller
        point's entries.

    Examples:
        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> hodiff.cross_hessian(lambda x, y: x @ A @ y, torch.ones(2), torch.ones(3))
        tensor([[1., 2., 3.],
                [4., 5., 6.]])
    """
    chunk = _checks.check_chunk_size(chunk_size)
    first, second = Where(x), Where(y, "y")
    _checks.check_batch(first.tensors, first.names, batch_ndim)
    _dense.check_fits(first.tensors, second.tensors, batch_ndim, WAY_OUT)
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
        split = len(first.tensors)
        xs, ys = ev.leaves[:split], ev.leaves[split:]
        output = ev.scalars()
        swapped = sum(leaf.numel() for leaf in ys) < sum(leaf.numel() for leaf in xs)
        rows, columns = (ys, xs) if swapped else (xs, ys)
        gradient = _reverse.pull(ev, [output], [None], differentiated=True, inputs=rows)
        table = _dense.blocks(ev, gradient, chunk_size=chunk, inputs=columns)
    if swapped:
        table = [[_transposed(table[j][i], ys[j], batch_ndim) for j in range(len(ys))] for i in range(len(xs))]
    return first.result([second.result(row) for row in table])


def _transposed(block: Tensor, row: Tensor, batch_ndim: int) -> Tensor:
    """A block with the row's event dimensions moved behind the column's."""
    event = row.ndim - batch_ndim
    return block.movedim(tuple(range(batch_ndim, batch_ndim + event)), tuple(range(-event, 0)))
