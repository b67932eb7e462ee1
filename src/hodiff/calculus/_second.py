"""Second derivatives: `hvp`, `cross_hvp`, `hessian_diagonal`; dense, `hessian`, `cross_hessian`
with their kin.

Both differentiate a gradient that was formed with its graph: double backward, the route that
is right through every layer measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _nodes, _reverse
from hodiff._core._arguments import Allowed, Checkpoint, ChunkSize, is_set
from hodiff._core._call import call, cut
from hodiff._core._graph import OutputGraph
from hodiff._core._where import Where
from hodiff.calculus import _first
from hodiff.calculus._first import (
    ByName,
    ChunkedBatchedOptions,
    ProductOptions,
    ProductWithoutExtra,
    T,
    What,
    WithoutExtra,
)

if TYPE_CHECKING:
    from hodiff._core._modules import Selection


@overload
def hvp(f: What, x: Any, v: T, **options: Unpack[ProductWithoutExtra]) -> T: ...


@overload
def hvp(
    f: What, x: Any, v: T, *, has_aux: Literal[True], **options: Unpack[ProductOptions]
) -> tuple[T, Any]: ...  # fmt: skip


def hvp(
    f: What,
    x: Any,
    v: Any,
    *,
    has_aux: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    checkpoint: Checkpoint = False,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A Hessian-vector product, H v with H = ∇²f(x), without forming the Hessian.

    Args:
        f: A function of *x* that returns one element (of any shape), or such a tensor already
            computed from *x*, whose graph is left intact.
        x: Where: a tensor, a nested container of tensors, a module (its trainable parameters; `f`
            receives the module), or `hodiff.select(module, ...)`.
        v: A vector like *x* (a dict by parameter name for a module), or K vectors with one extra
            leading dimension on every leaf; or a list of the leaves in the order of *x*; or flat
            `(D,)`, or columns `(D, K)`. If *x* is one tensor of one dimension, `(D, D)` could be
            rows or columns and is refused: pass `[V]` for rows, or `[V.T]` for columns. NumPy
            arrays and lists of numbers are converted.
        has_aux: Whether `f` returns `(loss, extra)`, of which only the loss is differentiated.
        batch_ndim: How many leading dimensions of *x* index independent samples. Each sample has
            its own Hessian and its own part of *v*.
        create_graph: Whether the product can be differentiated again. None: only inside the
            function of another hodiff call. This is a third derivative: layer, batch and instance
            norm are then computed from their definition, because PyTorch's own third derivative of
            them is wrong.
        checkpoint: Modules that keep only their input and run again in each pass. `"layers.*"`: the
            outermost modules of *x* (or of `f`, if that is a module) whose names match. True: what
            `f` itself runs under `torch.utils.checkpoint.checkpoint` (which alone saves nothing in
            a second derivative).
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* that the value does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many of the K vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, with the form, structure and shapes of *v*. With *has_aux* `(product, extra)`.

    Raises:
        InputError: *v* does not resemble *x*, *x* is not real floating point, or `f` does not
            return one element (per sample).
        GraphError: An operation has no second derivative (it is named, with a way out); `f` does
            not depend on *x*, or reaches it other than through its argument.

    Cost:
        One evaluation of `f` and two reverse passes, about three gradients; for K vectors the
        second pass is batched, chunk by chunk. Memory: about twice that of a gradient. With
        *checkpoint* a block runs four times, which takes about one and a half times as long, in the
        memory of one block and of the inputs of the others: less than a gradient needs.

    Examples:
        The Hessian of \(\tfrac12 x^\top A x\) is \(A\):

        >>> import torch, hodiff
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> hodiff.hvp(lambda x: 0.5 * x @ A @ x, torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor([2., 1.])

    Reference:
        Pearlmutter, B. A. (1994). Fast exact multiplication by the Hessian. Neural Computation
        6(1). doi:10.1162/neco.1994.6.1.147. Double backward is its reverse-over-reverse form.
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    where = Where(x, shards=True)
    given = where.parse(v)
    if checkpoint is not False:
        from hodiff.memory._blocks import in_blocks

        f = in_blocks(f, where, checkpoint)
    with OutputGraph(
        call(
            f,
            where,
            2,
            create_graph,
            strict,
            allow,
            args,
            kwargs,
            batch_ndim,
            has_aux=has_aux,
            check_independence=check_independence,
        )
    ) as graph:
        gradient: Sequence[Any] = _reverse.gradient(graph, differentiated=True)
        if checkpoint is not False or where.layout is not None:
            gradient = _nodes.without_values(gradient)
        parts = _reverse.products(graph, gradient, given.parts, given.number, chunk_size=chunk)
        graph.warn_of_zeros(parts, given.parts)
        if where.layout is not None:
            parts = where.layout.placed(parts)
        products = given.like(parts)
        return (products, graph.extra()) if has_aux else products


@overload
def hessian_diagonal(
    f: What, x: nn.Module | Selection, **options: Unpack[WithoutExtra]
) -> ByName: ...


@overload
def hessian_diagonal(f: What, x: T, **options: Unpack[WithoutExtra]) -> T: ...


@overload
def hessian_diagonal(
    f: What,
    x: nn.Module | Selection,
    *,
    has_aux: Literal[True],
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[ByName, Any]: ...


@overload
def hessian_diagonal(
    f: What, x: T, *, has_aux: Literal[True], **options: Unpack[ChunkedBatchedOptions]
) -> tuple[T, Any]: ...


def hessian_diagonal(
    f: What,
    x: Any,
    *,
    has_aux: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The diagonal of the Hessian, ∂²f/∂xᵢ², exact.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed from *x*.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        has_aux: Whether `f` returns `(loss, extra)`, of which only the loss is differentiated.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* that the value does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The diagonal, shaped like *x* (a dict by parameter name for a module). With *has_aux*
        `(result, extra)`.

    Raises:
        InputError: *x* is not real floating point, or `f` does not return one element (per sample).
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.

    Cost:
        As many passes as `hessian`, D rows in chunks, but only one chunk of rows in memory. For an
        elementwise function `nth_derivative(f, x, 2)` costs two passes. For a sum over independent
        samples give their function itself and *batch_ndim*: *D* is then the size of one sample.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.hessian_diagonal(lambda x: x[0] ** 2 * x[1] ** 3, torch.tensor([1.0, 2.0]))
        tensor([16., 12.])
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    with OutputGraph(
        call(
            f,
            x,
            2,
            create_graph,
            strict,
            allow,
            args,
            kwargs,
            batch_ndim,
            has_aux=has_aux,
            check_independence=check_independence,
        )
    ) as graph:
        pairs = list(zip(_reverse.gradient(graph, differentiated=True), graph.leaves, strict=True))
        diagonals = [
            _diagonal(graph, part, leaf, chunk, more=index < len(pairs) - 1)
            for index, (part, leaf) in enumerate(pairs)
        ]
        graph.warn_of_zeros(diagonals)
    result = graph.call.where.result(diagonals)
    return (result, graph.extra()) if has_aux else result


def _diagonal(
    graph: OutputGraph, gradient: Tensor, leaf: Tensor, chunk: int | None, *, more: bool
) -> Tensor:
    """The diagonal of one leaf's block, keeping of each chunk of rows only the entries wanted."""
    count, units = _reverse.basis(gradient, graph.call.batch_ndim)
    samples = leaf.shape[: graph.call.batch_ndim].numel()
    kept = []
    for start, stop, (rows,) in _reverse.vjps(
        graph, [gradient], units, count, chunk_size=chunk, more=more, inputs=[leaf]
    ):
        entries = rows.reshape(stop - start, samples, count)[:, :, start:stop]
        # (samples, stop - start); the rows may go
        kept.append(entries.diagonal(dim1=0, dim2=2).clone())
    return (torch.cat(kept, dim=1) if kept else leaf.new_zeros(0)).reshape(leaf.shape)


# --- `cross_hvp`: a product with the mixed second derivatives of a function of two points, without
# the block


@overload
def cross_hvp(
    f: What, x: nn.Module | Selection, y: Any, v: Any, **options: Unpack[ProductOptions]
) -> ByName: ...


@overload
def cross_hvp(f: What, x: T, y: Any, v: Any, **options: Unpack[ProductOptions]) -> T: ...


def cross_hvp(
    f: What,
    x: Any,
    y: Any,
    v: Any,
    *,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    checkpoint: Checkpoint = False,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A product with the mixed second derivatives, ∇ₓ(∂f/∂y · v), without the block.

    Hypergradients consist of such products: how the gradient with respect to *y* (weights), along
    *v*, changes with *x* (architecture, hyperparameters). The usual difference of two gradients
    approximates it.

    Args:
        f: A function of *x* and *y* that returns one element, or such a tensor already computed.
        x: The point that the result is shaped like: a tensor, a container of tensors, a module, or
            `hodiff.select(module, ...)`.
        y: The point that *v* is shaped like, in the same forms.
        v: A vector like *y* (a dict by parameter name for a module), or K vectors with one extra
            leading dimension on every leaf; or in another form that `hvp` accepts.
        batch_ndim: How many leading dimensions of both *x* and *y* index independent samples.
        create_graph: Whether the product can be differentiated again. None: only inside the
            function of another hodiff call.
        checkpoint: Modules of `f` that keep only their input and run again in each pass, as for
            `hvp`.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* or *y* that the value does not depend on. None:
            zeros, and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many of the K vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`, after *x* and *y*.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, with the structure and shapes of *x*; for K vectors, with one more leading
        dimension, and columns for columns.

    Raises:
        InputError: *v* does not resemble *y*, a point is not real floating point, or `f` does not
            return one element (per sample).
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.

    Cost:
        One evaluation of `f` and two reverse passes. If *x* is small compared with *y*, a
        difference of two gradients with respect to *x* is faster, by 1.4 to 1.6 for architectures,
        but has only four digits.

    Examples:
        For \(x^\top A y\) it is \(A v\):

        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> hodiff.cross_hvp(
        ...     lambda x, y: x @ A @ y, torch.ones(2), torch.ones(3), torch.tensor([1.0, 0.0, -1.0])
        ... )
        tensor([-2., -2.])

    Reference:
        Liu, H., Simonyan, K., Yang, Y. (2019). DARTS: differentiable architecture search.
        arXiv:1806.09055. Its equation 8 approximates this product by a difference.
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    first, second = Where(x, shards=True), Where(y, "y", shards=True)
    given = second.parse(v)
    where = Where.joined(first, second)
    if checkpoint is not False:
        from hodiff.memory._blocks import in_blocks

        f = in_blocks(f, where, checkpoint)
    with OutputGraph(
        call(
            f,
            where,
            2,
            create_graph,
            strict,
            allow,
            args,
            kwargs,
            batch_ndim,
            unpack_point=True,
            check_independence=check_independence,
        )
    ) as graph:
        split, output = len(first.tensors), graph.scalars()
        gradient: Sequence[Any] = _reverse.vjp(
            graph,
            [output],
            [torch.ones_like(output)],
            differentiated=True,
            inputs=graph.leaves[split:],
        )
        if checkpoint is not False or where.layout is not None:
            gradient = _nodes.without_values(gradient)
        products = _reverse.products(
            graph,
            gradient,
            given.parts,
            given.number,
            chunk_size=chunk,
            inputs=graph.leaves[:split],
        )
        if first.layout is not None:
            products = first.layout.placed(products)
        return given.arranged(products, first.tree)


# --- the Hessian itself, dense: `hessian`, `value_grad_and_hessian`, `cross_hessian` --------------
# All of them differentiate a gradient that was formed with its graph: double backward, the route
# that is right through every layer measured.


Pair = tuple[Tensor, Tensor]
Blocks = dict[str, dict[str, Tensor]]

WAY_OUT = (
    "Avoid forming it: hodiff.hvp computes a product, hodiff.HessianOperator many products, "
    "eigenvalues and solves, hodiff.hessian_diagonal the diagonal."
)


@overload
def hessian(
    f: What,
    x: Tensor,
    *,
    has_aux: Literal[True],
    matrix: bool = False,
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[Tensor, Any]: ...


@overload
def hessian(
    f: What,
    x: Any,
    *,
    has_aux: Literal[True],
    matrix: bool = False,
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[Any, Any]: ...


@overload
def hessian(
    f: What, x: Any, *, matrix: Literal[True], **options: Unpack[WithoutExtra]
) -> Tensor: ...


@overload
def hessian(
    f: What, x: Tensor, *, matrix: bool = False, **options: Unpack[WithoutExtra]
) -> Tensor: ...


@overload
def hessian(
    f: What,
    x: nn.Module | Selection,
    *,
    matrix: Literal[False] = False,
    **options: Unpack[WithoutExtra],
) -> Blocks: ...


@overload
def hessian(
    f: What, x: list[Tensor], *, matrix: Literal[False] = False, **options: Unpack[WithoutExtra]
) -> list[list[Tensor]]: ...


@overload
def hessian(
    f: What, x: dict[T, Tensor], *, matrix: Literal[False] = False, **options: Unpack[WithoutExtra]
) -> dict[T, dict[T, Tensor]]: ...


@overload
def hessian(
    f: What, x: Pair, *, matrix: Literal[False] = False, **options: Unpack[WithoutExtra]
) -> tuple[Pair, Pair]: ...


@overload
def hessian(f: What, x: Any, *, matrix: bool = False, **options: Unpack[WithoutExtra]) -> Any: ...


def hessian(
    f: What,
    x: Any,
    *,
    matrix: bool = False,
    has_aux: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The Hessian Hᵢⱼ = ∂²f/∂xᵢ∂xⱼ, dense.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed from *x*.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        matrix: Whether to return one `(D, D)` matrix, in the order of *x*, instead of nested
            blocks.
        has_aux: Whether `f` returns `(loss, extra)`, of which only the loss is differentiated.
        batch_ndim: How many leading dimensions of *x* index independent samples, each with its own
            Hessian.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* that the value does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        For a tensor `(*x.shape, *x.shape)`; for containers, the structure of *x* filled with
        structures of *x*; for a module `{name: {name: block}}`. With `matrix=True` a `(D, D)`
        tensor. Under `batch_ndim=1`: `(N, *event, *event)`, or `(N, D, D)`. With *has_aux*
        `(result, extra)`.

    Raises:
        InputError: *x* is not real floating point, or `f` does not return one element (per sample).
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.

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
    graph, _, second = _dense(
        f,
        x,
        chunk_size,
        matrix=matrix,
        has_aux=has_aux,
        batch_ndim=batch_ndim,
        check_independence=check_independence,
        create_graph=create_graph,
        strict=strict,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )
    return (second, graph.extra()) if has_aux else second


@overload
def value_grad_and_hessian(
    f: What,
    x: nn.Module | Selection,
    *,
    matrix: Literal[True],
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[Tensor, ByName, Tensor]: ...


@overload
def value_grad_and_hessian(
    f: What, x: T, *, matrix: Literal[True], **options: Unpack[ChunkedBatchedOptions]
) -> tuple[Tensor, T, Tensor]: ...


@overload
def value_grad_and_hessian(
    f: What, x: Tensor, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatchedOptions]
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def value_grad_and_hessian(
    f: What,
    x: nn.Module | Selection,
    *,
    matrix: Literal[False] = False,
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[Tensor, ByName, Blocks]: ...


@overload
def value_grad_and_hessian(
    f: What,
    x: list[Tensor],
    *,
    matrix: Literal[False] = False,
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]: ...


@overload
def value_grad_and_hessian(
    f: What,
    x: dict[T, Tensor],
    *,
    matrix: Literal[False] = False,
    **options: Unpack[ChunkedBatchedOptions],
) -> tuple[Tensor, dict[T, Tensor], dict[T, dict[T, Tensor]]]: ...


@overload
def value_grad_and_hessian(
    f: What, x: Pair, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatchedOptions]
) -> tuple[Tensor, Pair, tuple[Pair, Pair]]: ...


@overload
def value_grad_and_hessian(
    f: What, x: Any, *, matrix: bool = False, **options: Unpack[ChunkedBatchedOptions]
) -> tuple[Tensor, Any, Any]: ...


def value_grad_and_hessian(
    f: What,
    x: Any,
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
    r"""Value, gradient and Hessian of a scalar function from one evaluation, as a Newton step needs
    them.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed from *x*.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        matrix: Whether the Hessian is one `(D, D)` matrix instead of nested blocks.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether all three results can be differentiated again.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* that the value does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        `(value, gradient, hessian)`: the value shaped as `f` gave it, the gradient like *x*, the
        Hessian as for `hessian`.

    Raises:
        InputError: *x* is not real floating point, or `f` does not return one element (per sample).
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.

    Cost:
        The same as `hessian`; value and gradient are by-products.

    Examples:
        One Newton step finds the minimum of a quadratic:

        >>> import torch, hodiff
        >>> x = torch.tensor([5.0, -3.0])
        >>> value, g, H = hodiff.value_grad_and_hessian(
        ...     lambda x: (x[0] - 1) ** 2 + 2 * (x[1] - 2) ** 2, x
        ... )
        >>> value, x - torch.linalg.solve(H, g)
        (tensor(66.), tensor([1., 2.]))
    """
    graph, gradient, second = _dense(
        f,
        x,
        chunk_size,
        matrix=matrix,
        batch_ndim=batch_ndim,
        check_independence=check_independence,
        create_graph=create_graph,
        strict=strict,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )
    return graph.value(), graph.call.where.result(gradient), second


def _dense(
    f: What,
    x: Any,
    chunk_size: ChunkSize,
    *,
    matrix: bool,
    batch_ndim: int,
    **options: Any,
) -> tuple[OutputGraph, Sequence[Tensor], Any]:
    """The evaluation of `f`, its gradient by each leaf, and its Hessian as the caller wants it."""
    chunk = _arguments.check_chunk_size(chunk_size)
    where = Where(x)
    _arguments.check_batch(where.tensors, where.names, batch_ndim)
    _reverse.check_fits(where.tensors, where.tensors, batch_ndim, WAY_OUT)
    with OutputGraph(call(f, where, 2, batch_ndim=batch_ndim, **options)) as graph:
        gradient = _reverse.gradient(graph, differentiated=True)
        table = _reverse.blocks(graph, gradient, chunk_size=chunk)
        graph.warn_of_zeros([block for row in table for block in row])
        gradient = _reverse.unaliased(
            gradient if graph.create_graph else [cut(part) for part in gradient]
        )
    if is_set(matrix, "matrix"):
        second = _first.joined(table, where.tensors, where.tensors, batch_ndim)
    else:
        second = where.result([where.result(row) for row in table])
    return graph, gradient, second


@overload
def cross_hessian(
    f: What, x: Tensor, y: nn.Module | Selection, **options: Unpack[ChunkedBatchedOptions]
) -> ByName: ...


@overload
def cross_hessian(
    f: What, x: nn.Module | Selection, y: Tensor, **options: Unpack[ChunkedBatchedOptions]
) -> ByName: ...


@overload
def cross_hessian(f: What, x: Tensor, y: T, **options: Unpack[ChunkedBatchedOptions]) -> T: ...


@overload
def cross_hessian(f: What, x: T, y: Tensor, **options: Unpack[ChunkedBatchedOptions]) -> T: ...


@overload
def cross_hessian(f: What, x: Any, y: Any, **options: Unpack[ChunkedBatchedOptions]) -> Any: ...


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
    r"""The mixed second derivatives ∂²f/∂xᵢ∂yⱼ: one block of the joint Hessian.

    Args:
        f: A function of *x* and *y* that returns one element, or such a tensor already computed.
        x: The first point: a tensor, a container of tensors, a module, or `hodiff.select(module,
            ...)`.
        y: The second point, in the same forms.
        batch_ndim: How many leading dimensions of both *x* and *y* index independent samples.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* or *y* that the value does not depend on. None:
            zeros, and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many rows one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`, after *x* and *y*.
        kwargs: Keyword arguments for `f`.

    Returns:
        For tensors `(*x.shape, *y.shape)`, or `(*batch, *x event, *y event)`; for containers, the
        structure of *x* filled with structures of *y*.

    Raises:
        InputError: A point is not real floating point, or `f` does not return one element (per
            sample).
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.

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
    chunk = _arguments.check_chunk_size(chunk_size)
    first, second = Where(x), Where(y, "y")
    _arguments.check_batch(first.tensors, first.names, batch_ndim)
    _reverse.check_fits(first.tensors, second.tensors, batch_ndim, WAY_OUT)
    where = Where.joined(first, second)
    with OutputGraph(
        call(
            f,
            where,
            2,
            create_graph,
            strict,
            allow,
            args,
            kwargs,
            batch_ndim,
            unpack_point=True,
            check_independence=check_independence,
        )
    ) as graph:
        split = len(first.tensors)
        xs, ys = graph.leaves[:split], graph.leaves[split:]
        output = graph.scalars()
        swapped = sum(leaf.numel() for leaf in ys) < sum(leaf.numel() for leaf in xs)
        rows, columns = (ys, xs) if swapped else (xs, ys)
        gradient = _reverse.vjp(graph, [output], [None], differentiated=True, inputs=rows)
        table = _reverse.blocks(graph, gradient, chunk_size=chunk, inputs=columns)
    if swapped:
        table = [
            [_transposed(table[j][i], ys[j], batch_ndim) for j in range(len(ys))]
            for i in range(len(xs))
        ]
    return first.result([second.result(row) for row in table])


def _transposed(block: Tensor, row: Tensor, batch_ndim: int) -> Tensor:
    """A block with the row's event dimensions moved behind the column's."""
    event = row.ndim - batch_ndim
    return block.movedim(tuple(range(batch_ndim, batch_ndim + event)), tuple(range(-event, 0)))
