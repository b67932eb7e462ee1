"""First derivatives: `grad`, `value_and_grad`, `vjp`, `jvp`, `jacobian`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _reverse, _settings, _tree
from hodiff._core._arguments import Allowed, Checkpoint, ChunkSize, is_set
from hodiff._core._call import call
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph
from hodiff._core._where import Where

if TYPE_CHECKING:
    from hodiff._core._modules import Selection

T = TypeVar("T")
What = Callable[..., Any] | Tensor
OneTensor = Callable[..., Tensor] | Tensor
"""What gives a single tensor, so that the structure of a Jacobian is that of *where*."""
ByName = dict[str, Tensor]
"""A result at a module: one tensor for each parameter."""


# --- options, for overloads alone: at run time signatures are spelled out -------------------------


class CallOptions(TypedDict, total=False):
    """The options of every function that takes a function.

    For overloads alone: at run time signatures are spelled out.
    """

    create_graph: bool | None
    allow: Allowed
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


class CommonOptions(CallOptions, total=False):
    """The options of every function of the calculus."""

    strict: bool | None


class ChunkedOptions(CommonOptions, total=False):
    """The options of functions that take many vectors."""

    chunk_size: ChunkSize


class BatchedOptions(CommonOptions, total=False):
    """The options of functions that know independent samples."""

    batch_ndim: int
    check_independence: bool


class ChunkedBatchedOptions(ChunkedOptions, BatchedOptions, total=False):
    """The options of functions of many vectors at independent samples."""


class ProductOptions(ChunkedBatchedOptions, total=False):
    """The options of products, in which parts of `f` may run again."""

    checkpoint: Checkpoint


class ProductWithoutExtra(ProductOptions, total=False):
    """The options of such a product where `f` returns the loss alone."""

    has_aux: Literal[False]


class WithoutExtra(ChunkedBatchedOptions, total=False):
    """The options of such a function where `f` returns the loss alone."""

    has_aux: Literal[False]


# --- first derivatives ----------------------------------------------------------------------------


@overload
def grad(
    f: What,
    x: nn.Module | Selection,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[BatchedOptions],
) -> ByName: ...


@overload
def grad(
    f: What, x: T, *, has_aux: Literal[False] = False, **options: Unpack[BatchedOptions]
) -> T: ...


@overload
def grad(
    f: What, x: nn.Module | Selection, *, has_aux: Literal[True], **options: Unpack[BatchedOptions]
) -> tuple[ByName, Any]: ...


@overload
def grad(
    f: What, x: T, *, has_aux: Literal[True], **options: Unpack[BatchedOptions]
) -> tuple[T, Any]: ...


def grad(
    f: What,
    x: Any,
    *,
    has_aux: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The gradient of a scalar function, ∇f(x).

    Args:
        f: A function of *x* that returns one element (of any shape), or such a tensor already
            computed from *x*, whose graph is left intact.
        x: Where: a tensor, a nested container of tensors, a module (its trainable parameters; `f`
            receives the module), or `hodiff.select(module, ...)`.
        has_aux: Whether `f` returns `(loss, extra)`, of which only the loss is differentiated.
        batch_ndim: How many leading dimensions of *x* index independent samples. `f` returns one
            element for each, `(N,)` or `(N, 1)`, and the gradient has one entry for each.
        create_graph: Whether the result can be differentiated again, with respect to *x* and
            everything that `f` closes over. None: True inside the `f` of another hodiff call (with
            grad mode on), else False.
        check_independence: Whether to test that samples are independent, as `batch_ndim` assumes,
            at the cost of one evaluation and three passes. A `BatchMixingWarning` says if they are
            not, and by how much.
        strict: What to return for a tensor of *x* that the result does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `@once_differentiable` Functions, as classes or names, to accept in a second
            derivative.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The gradient, with the structure, shapes, dtypes and device of *x*; for a module a dict by
        parameter name. With *has_aux* `(gradient, extra)`.

    Raises:
        InputError: *x* is not real floating point, or `f` does not return one element (per sample).
        GraphError: `f` does not depend on *x*, reaches it other than through its argument, or a
            differentiable result passes an operation without a second derivative.

    Cost:
        One evaluation of `f` and one reverse pass, which frees the graph, unless `create_graph` is
        True or *f* is a tensor.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.grad(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])
        >>> hodiff.grad(
        ...     lambda p: p["a"] * p["b"] ** 2, {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
        ... )
        {'a': tensor(9.), 'b': tensor(12.)}
    """
    where = Where(x, shards=True)
    with OutputGraph(
        call(
            f,
            where,
            1,
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
        gradient = _reverse.gradient(graph)
    result = graph.call.where.result(gradient)
    return (result, graph.extra()) if has_aux else result


@overload
def value_and_grad(
    f: What,
    x: nn.Module | Selection,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[BatchedOptions],
) -> tuple[Tensor, ByName]: ...


@overload
def value_and_grad(
    f: What, x: T, *, has_aux: Literal[False] = False, **options: Unpack[BatchedOptions]
) -> tuple[Tensor, T]: ...


@overload
def value_and_grad(
    f: What, x: nn.Module | Selection, *, has_aux: bool, **options: Unpack[BatchedOptions]
) -> tuple[Any, ByName]: ...


@overload
def value_and_grad(
    f: What, x: T, *, has_aux: bool, **options: Unpack[BatchedOptions]
) -> tuple[Any, T]: ...


def value_and_grad(
    f: What,
    x: Any,
    *,
    has_aux: bool = False,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The value and the gradient of a scalar function, f(x) and ∇f(x), from one evaluation.

    Args:
        f: A function of *x* that returns one element, or such a tensor already computed from *x*.
            With `has_aux` it returns `(loss, extra)`, and only the loss is differentiated.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        has_aux: Whether `f` returns `(loss, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether gradient, value and extra can be differentiated again. None: only
            inside the function of another hodiff call.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* that the value does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        `(value, gradient)`, or `((value, extra), gradient)` with `has_aux`. The value has the shape
        that `f` gave it; the gradient is shaped like *x*. Without `create_graph` all tensors are
        detached.

    Raises:
        InputError: *x* is not real floating point, `f` does not return one element (per sample), or
            `has_aux` finds no pair.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.

    Cost:
        One evaluation of `f` and one reverse pass.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.value_and_grad(lambda x: x @ x, torch.tensor([3.0, 4.0]))
        (tensor(25.), tensor([6., 8.]))
    """
    where = Where(x, shards=True)
    with OutputGraph(
        call(
            f,
            where,
            1,
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
        gradient = _reverse.gradient(graph)
    value = graph.value() if where.layout is None else where.layout.mean(graph.value())
    value = (value, graph.extra()) if has_aux else value
    return value, graph.call.where.result(gradient)


@overload
def vjp(f: Any, x: nn.Module | Selection, u: Any, **options: Unpack[ChunkedOptions]) -> ByName: ...


@overload
def vjp(f: Any, x: T, u: Any, **options: Unpack[ChunkedOptions]) -> T: ...


def vjp(
    f: Any,
    x: Any,
    u: Any,
    *,
    create_graph: bool | None = None,
    strict: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A vector-Jacobian product, Jᵀu with J = ∂f/∂x.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors
            already computed from *x*.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        u: A vector like `f(x)`, or K of them with one extra leading dimension on every leaf; or in
            another form that `hvp` accepts.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        strict: What to return for a tensor of *x* that `f(x)` does not depend on. None: zeros, and
            an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, shaped like *x*; `(K, *shape)` on every leaf for K vectors, and columns
        `(D, K)` for columns.

    Raises:
        InputError: *u* does not resemble `f(x)`.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.

    Cost:
        One evaluation of `f` and one reverse pass; for K vectors, a batched pass per chunk.

    Examples:
        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> hodiff.vjp(lambda x: A @ x, torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor([1., 2.])
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    with OutputGraph(call(f, x, 1, create_graph, strict, allow, args, kwargs)) as graph:
        outputs, names, tree = _tree.flatten(graph.outputs, "f(x)")
        from hodiff._core._vectors import Space

        given = Space(outputs, names, tree, "like f(x)").parse(u, "u")
        pulled = _reverse.products(graph, outputs, given.parts, given.number, chunk_size=chunk)
        return given.arranged(pulled, graph.call.where.tree)


@overload
def jacobian(
    f: Any, x: Any, *, matrix: Literal[True], **options: Unpack[ChunkedBatchedOptions]
) -> Tensor: ...


@overload
def jacobian(
    f: OneTensor,
    x: nn.Module | Selection,
    *,
    matrix: Literal[False] = False,
    **options: Unpack[ChunkedBatchedOptions],
) -> ByName: ...


@overload
def jacobian(
    f: OneTensor, x: T, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatchedOptions]
) -> T: ...


@overload
def jacobian(
    f: Any, x: Any, *, matrix: bool = False, **options: Unpack[ChunkedBatchedOptions]
) -> Any: ...


def jacobian(
    f: Any,
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
) -> Any:
    r"""The Jacobian Jᵢⱼ = ∂fᵢ/∂xⱼ, dense.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors
            already computed from *x*.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        matrix: Whether to return one `(M, D)` matrix instead of blocks, with rows in the order of
            `f(x)` and columns in that of *x*. For outputs `(N, C)` of a model, `.unflatten(0, (N,
            C))` makes it `(N, C, D)`.
        batch_ndim: How many leading dimensions of both *x* and `f(x)` index independent samples.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        check_independence: Whether to test that samples are independent.
        strict: What to return for a tensor of *x* that `f(x)` does not depend on. None: zeros, and
            an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many rows (or columns) one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        For tensors `(*f(x).shape, *x.shape)`, and `(*batch, *output event, *input event)` under
        `batch_ndim`. For containers, the structure of `f(x)` filled with structures of *x*. With
        `matrix=True` one tensor `(M, D)`, or `(*batch, M, D)`.

    Raises:
        InputError: `f(x)` is not made of real floating-point tensors, or lacks the batch
            dimensions.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.

    Cost:
        One evaluation of `f`, and one batched reverse pass per chunk of rows. Where `f(x)` has many
        elements, twice as many as *x* at least, and the result is detached: one pass, which is
        differentiated by one batched pass per chunk of columns, in about the time of
        `torch.func.jacfwd`. Not of a tensor already computed, and not where `f` registers a hook,
        calls a Python
        `autograd.Function` or has an operation without a second derivative: these go by rows.
        Memory: the result, and what a pass over one chunk needs.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.jacobian(
        ...     lambda x: torch.stack([x[0] * x[1], x[0] ** 2]), torch.tensor([2.0, 3.0])
        ... )
        tensor([[3., 2.],
                [4., 0.]])
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    with OutputGraph(
        call(
            f,
            x,
            1,
            create_graph,
            strict,
            allow,
            args,
            kwargs,
            batch_ndim,
            check_independence=check_independence,
        )
    ) as graph:
        outputs = graph.tensors()
        for output in outputs:
            _arguments.check_rows(output, graph.call.batch)
        _reverse.check_fits(outputs, graph.leaves, batch_ndim, JACOBIAN_WAY_OUT)
        table = tall_jacobian(graph, outputs, chunk_size=chunk) or _reverse.blocks(
            graph, outputs, chunk_size=chunk
        )
    if is_set(matrix, "matrix"):
        return joined(table, outputs, graph.leaves, batch_ndim)
    _, _, tree = _tree.flatten(graph.outputs)
    return _tree.rebuild(tree, iter([graph.call.where.result(row) for row in table]))


JACOBIAN_WAY_OUT = (
    "Avoid forming it: hodiff.jvp and hodiff.vjp compute its products, "
    "hodiff.JacobianOperator many of them."
)


# --- products from the right: `jvp`, and the columns of tall Jacobians ---------------------------
# Both by two reverse passes: u -> J'u is linear, and its derivative by u in the direction v is J v.
# PyTorch's forward mode would run `f` again, under transforms that refuse much of Python, take
# `no_grad` for nothing, and leave no graph that could be looked at; and to differentiate its result
# is wrong through norm layers (75 % off through LayerNorm).


@overload
def jvp(f: OneTensor, x: Any, v: Any, **options: Unpack[ChunkedOptions]) -> Tensor: ...


@overload
def jvp(f: Callable[..., T] | T, x: Any, v: Any, **options: Unpack[ChunkedOptions]) -> T: ...


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
    r"""A Jacobian-vector product, J v with J = ∂f/∂x: a directional derivative.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors
            already computed from *x*.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        v: A vector like *x* (a dict by parameter name for a module), or K of them with one extra
            leading dimension on every leaf; or in another form that `hvp` accepts.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        strict: What to return for a tensor of *x* that `f(x)` does not depend on. None: zeros, and
            an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, shaped like `f(x)`; `(K, *shape)` on every leaf for K vectors, and columns
        `(M, K)` for columns.

    Raises:
        InputError: *v* does not resemble *x*.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.

    Cost:
        One evaluation of `f` and two reverse passes. The result of the first is linear in its
        cotangent, and the second differentiates it. This is correct through every layer,
        differentiable, and the same for a tensor already computed. K vectors share the first pass
        and take one batched pass per chunk. If `f` calls a Python `autograd.Function`, one more
        pass checks that its backward uses the cotangent.

    Examples:
        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> hodiff.jvp(lambda x: A @ x, torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor([1., 3.])
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    where = Where(x)
    given = where.parse(v)
    with OutputGraph(call(f, where, 2, create_graph, strict, allow, args, kwargs)) as graph:
        pushed = _reverse.jvp(graph, graph.tensors(), given.parts, given.number, chunk_size=chunk)
        _, _, tree = _tree.flatten(graph.outputs)
        return given.arranged(pushed, tree)


MANY_ROWS = 2
"""How many times as many rows as columns a Jacobian has that is made by columns:
these need a pass more.
"""

SMALL = 2**16
"""Fewer numbers than these, in the cotangents of all rows together,
cost less than the pass more.
"""


def tall_jacobian(
    graph: OutputGraph, outputs: list[Tensor], *, chunk_size: int | None
) -> list[list[Tensor]] | None:
    """The Jacobian's blocks by columns, J e for each unit vector e; None where rows are better, or
    the only right way.

    Rows need first derivatives alone, and have whatever a hook or a Python Function makes of a
    gradient; to columns J'u must be linear in u. So they are held against J'u for one u, which also
    finds what is not finite.
    """
    batch_ndim = graph.call.batch_ndim
    columns = sum(leaf.shape[batch_ndim:].numel() for leaf in graph.leaves)
    rows = sum(output.shape[batch_ndim:].numel() for output in outputs)
    small = MANY_ROWS * columns > rows or rows * sum(output.numel() for output in outputs) < SMALL
    if small or not columns or graph.create_graph or not _is_linear(graph, outputs):
        return None
    from hodiff._core._vectors import generic

    # A cotangent of every sample that no symmetry cancels. Positive, for the backward of
    # logcumsumexp takes its logarithm.
    weights = [
        generic(output.shape[batch_ndim:].numel()).to(output).reshape(output.shape[batch_ndim:])
        for output in outputs
    ]
    cotangents = [
        output.new_empty(output.shape).copy_(w).requires_grad_()
        for output, w in zip(outputs, weights, strict=True)
    ]
    table = []
    try:
        for part in _reverse.vjp(graph, outputs, cotangents, differentiated=True):
            blocks = _columns_of(graph, part, weights, cotangents, chunk_size)
            if blocks is None:
                return None
            table.append(blocks)
    except RuntimeError as error:
        # no second derivative, or no room for its graph: rows need neither
        if not isinstance(error, torch.OutOfMemoryError) and not is_fault(error):
            raise
        return None
    return [
        [
            blocks[i].to(leaf).reshape((*output.shape, *leaf.shape[batch_ndim:]))
            for blocks, leaf in zip(table, graph.leaves, strict=True)
        ]
        for i, output in enumerate(outputs)
    ]


def _is_linear(graph: OutputGraph, outputs: list[Tensor]) -> bool:
    """Whether nothing is known that makes J'u another function of u than a linear one, with a
    derivative.

    Of a tensor already computed it is not known: its graph may have hooks, which nothing shows.
    """
    return (
        all(type(tensor) is Tensor for tensor in (*graph.leaves, *outputs))
        and graph.call.builds_graph
        and not graph.context.hooks.registered()
        and _reverse.has_second_derivatives(graph)
    )


def _columns_of(
    graph: OutputGraph,
    pulled: Tensor,
    weights: list[Tensor],
    cotangents: list[Tensor],
    chunk_size: int | None,
) -> list[Tensor] | None:
    """The derivatives of each output by all entries of one leaf: (samples, entries of the output,
    of the leaf).

    None where they do not add up to J'u for the u that it was computed with, for each sample: no
    NaN or infinity does.
    """
    count, units = _reverse.basis(pulled, graph.call.batch_ndim)
    samples = pulled.shape[: graph.call.batch_ndim].numel()
    whole = [] if count else [w.new_empty((samples, w.numel(), 0)) for w in weights]
    sums, sizes = [], []
    # In memory of their own, small beside the result: products of matrices take one vector for all
    # samples one by one.
    own = lambda start, stop: [unit.contiguous() for unit in units(start, stop)]  # noqa: E731
    for start, stop, parts in _reverse.vjps(
        graph, [pulled], own, count, chunk_size=chunk_size, inputs=cotangents
    ):
        parts = [
            part.reshape(stop - start, samples, w.numel())
            for part, w in zip(parts, weights, strict=True)
        ]
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
    return (
        whole
        if not count or _add_up(sums, sizes, pulled.detach().reshape(samples, count))
        else None
    )


def _sum(parts: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The sum of some columns, for each sample: (columns, samples).

    Before they are turned, which is quicker.
    """
    with _settings.autocast(parts[0].device.type):
        sums = [part.squeeze(1) @ w.reshape(-1) for part, w in zip(parts, weights, strict=True)]
    coarsest = max((part.dtype for part in sums), key=lambda dtype: torch.finfo(dtype).eps)
    return sums[0] if len(sums) == 1 else torch.stack([part.to(coarsest) for part in sums]).sum(0)


def _add_up(sums: list[Tensor], sizes: list[Tensor], expected: Tensor) -> bool:
    """Whether that is J'u, (samples, columns), up to rounding."""
    total = sums[0] if len(sums) == 1 else torch.cat(sums)
    # How large a sum would be, about, were the signs random.
    size = math.hypot(*map(float, sizes)) / max(1, expected.numel()) ** 0.5
    return agree(total.reshape(expected.T.shape).T, expected, size, sums)


def agree(result: Tensor, expected: Tensor, size: float, leaves: Sequence[Tensor] = ()) -> bool:
    """Whether two results of that size are equal up to what batches of another size, or another
    order, may change.

    They round as the leaves do where those are coarser: float32 parameters beside float64 data.
    Not where the size is infinite: anything would agree.
    """
    if not result.numel() or not math.isfinite(size):
        return not result.numel()
    eps = max([torch.finfo(x.dtype).eps for x in (result, expected, *leaves)]) ** 0.5
    apart = (result - expected).abs_()
    # The first tells nearly always.
    return (
        float(apart.max()) <= eps * size
        or float(apart.sub_(expected.abs(), alpha=eps).max()) <= eps * size
    )  # NaN is not


def joined(
    table: list[list[Tensor]], outputs: Sequence[Tensor], leaves: Sequence[Tensor], batch_ndim: int
) -> Tensor:
    """The blocks as one matrix, `(M, D)` or `(*batch, M, D)`,
    rows and columns in the order of the tensors.
    """
    batch = leaves[0].shape[:batch_ndim]
    heights = [output.shape[batch_ndim:].numel() for output in outputs]
    widths = [leaf.shape[batch_ndim:].numel() for leaf in leaves]
    rows = [
        torch.cat(
            [
                block.reshape((*batch, height, width))
                for block, width in zip(line, widths, strict=True)
            ],
            dim=-1,
        )
        if len(widths) > 1
        else line[0].reshape((*batch, height, widths[0]))
        for line, height in zip(table, heights, strict=True)
    ]
    return torch.cat(rows, dim=-2) if len(rows) > 1 else rows[0]
