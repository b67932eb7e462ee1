"""First derivatives by reverse mode: `grad`, `value_and_grad`, `vjp`, `jacobian`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _dense, _independence, _reverse, _tree
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._options import Allowed, Batched, Chunked, ChunkedBatched, ChunkSize, is_set
from hodiff._core._selection import Selection
from hodiff._core._vectors import match
from hodiff.calculus import _forward

T = TypeVar("T")
What = Callable[..., Any] | Tensor
OneTensor = Callable[..., Tensor] | Tensor
"""What gives a single tensor, so that the structure of a Jacobian is that of *where*."""
ByName = dict[str, Tensor]
"""A result at a module: one tensor for each parameter."""


@overload
def grad(f: What, x: nn.Module | Selection, **options: Unpack[Batched]) -> ByName: ...


@overload
def grad(f: What, x: T, **options: Unpack[Batched]) -> T: ...


def grad(
    f: What,
    x: Any = _checks.MISSING,
    *,
    batch_ndim: int = 0,
    create_graph: bool | None = None,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The gradient of a scalar function, \(\nabla f(x)\).

    Args:
        f: A function of *x* that returns one element (of any shape), or such a tensor already
            computed from *x*, whose graph is then left as it was.
        x: Where: a tensor, a nested container of tensors, a module (its trainable parameters; `f`
            receives the module), or `hodiff.select(module, ...)`.
        batch_ndim: So many leading dimensions of *x* index independent samples; `f` returns one
            element for each, `(N,)` or `(N, 1)`, and so does the gradient hold one for each.
        create_graph: Whether the result can be differentiated again, by everything that required
            grad and entered: *x* and what `f` closes over. None means True inside the `f` of
            another hodiff call (with grad mode on), else False.
        check_independence: Whether to test, for one more evaluation and two passes, that samples are independent, as
            `batch_ndim` supposes; a `BatchMixingWarning` says if they are not, and by how much.
        strict: What a part of *x* gives that the result does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `autograd.Function`s, or their names, that may be `@once_differentiable` where a
            second derivative follows.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The gradient, with the structure, shapes, dtypes and device of *x*; for a module a dict by
        parameter name.

    Raises:
        InputError: *x* is not real floating point, or `f` does not return one element (per sample).
        GraphError: `f` does not depend on *x*, reaches it other than through its argument, or a
            differentiable result passes an operation without a second derivative.

    Cost:
        One evaluation of `f` and one reverse pass. The graph is freed by that pass, unless
        `create_graph` or *f* is a tensor.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.grad(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])
        >>> hodiff.grad(lambda p: p["a"] * p["b"] ** 2, {"a": torch.tensor(2.0), "b": torch.tensor(3.0)})
        {'a': tensor(9.), 'b': tensor(12.)}
    """
    _, gradient = value_and_grad(
        f,
        x,
        batch_ndim=batch_ndim,
        create_graph=create_graph,
        check_independence=check_independence,
        strict=strict,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )
    return gradient


@overload
def value_and_grad(
    f: What, x: nn.Module | Selection, *, has_aux: Literal[False] = False, **options: Unpack[Batched]
) -> tuple[Tensor, ByName]: ...


@overload
def value_and_grad(
    f: What, x: T, *, has_aux: Literal[False] = False, **options: Unpack[Batched]
) -> tuple[Tensor, T]: ...


@overload
def value_and_grad(
    f: What, x: nn.Module | Selection, *, has_aux: bool, **options: Unpack[Batched]
) -> tuple[Any, ByName]: ...


@overload
def value_and_grad(f: What, x: T, *, has_aux: bool, **options: Unpack[Batched]) -> tuple[Any, T]: ...


def value_and_grad(
    f: What,
    x: Any = _checks.MISSING,
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
    r"""The value and the gradient of a scalar function, \(f(x)\) and \(\nabla f(x)\), from one evaluation.

    Args:
        f: As for `grad`; with `has_aux` it returns `(loss, extra)`, and only the loss is differentiated.
        x: Where, as for `grad`.
        has_aux: Whether `f` returns something beside the loss.
        batch_ndim: Leading dimensions of *x* that index independent samples, as for `grad`.
        create_graph: Whether gradient, value and extra keep their graph, as for `grad`.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* gives that the value does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        `(value, gradient)`, or `((value, extra), gradient)` with `has_aux`. The value has the shape
        that `f` gave it; the gradient is shaped like *x*. Without `create_graph` all tensors are detached.

    Raises:
        InputError: As for `grad`, and when `has_aux` finds no pair.
        GraphError: As for `grad`.

    Cost:
        One evaluation of `f` and one reverse pass.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.value_and_grad(lambda x: x @ x, torch.tensor([3.0, 4.0]))
        (tensor(25.), tensor([6., 8.]))
    """
    if is_set(check_independence, "check_independence"):
        _independence.check(f, x, batch_ndim=batch_ndim, args=args, kwargs=kwargs, has_aux=has_aux)
    with Graph(
        call(
            f,
            x,
            passes=1,
            has_aux=has_aux,
            batch_ndim=batch_ndim,
            create_graph=create_graph,
            strict=strict,
            allow=allow,
            args=args,
            kwargs=kwargs,
        )
    ) as ev:
        gradient = _reverse.gradient(ev)
    value = (ev.value(), ev.extra()) if has_aux else ev.value()
    return value, ev.where.result(gradient)


@overload
def vjp(f: Any, x: nn.Module | Selection, u: Any, **options: Unpack[Chunked]) -> ByName: ...


@overload
def vjp(f: Any, x: T, u: Any, **options: Unpack[Chunked]) -> T: ...


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
    r"""A vector-Jacobian product, \(J^\top u\) with \(J = \partial f / \partial x\).

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors already
            computed from *x*.
        x: Where, as for `grad`.
        u: A vector like `f(x)`, or K of them with one extra leading dimension on every leaf; or in another
            spelling, as for `hvp`.
        create_graph: Whether the result can be differentiated again, as for `grad`.
        strict: What a part of *x* gives that `f(x)` does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many vectors one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The product, shaped like *x*; `(K, *shape)` on every leaf for K vectors, and columns `(D, K)` for columns.

    Raises:
        InputError: *u* does not resemble `f(x)`.
        GraphError: As for `grad`.

    Cost:
        One evaluation of `f` and one reverse pass; for K vectors, a batched pass per chunk.

    Examples:
        >>> import torch, hodiff
        >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> hodiff.vjp(lambda x: A @ x, torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor([1., 2.])
    """
    chunk = _checks.check_chunk_size(chunk_size)
    with Graph(
        call(f, x, passes=1, create_graph=create_graph, strict=strict, allow=allow, args=args, kwargs=kwargs)
    ) as ev:
        outputs = ev.tensors()
        _, _, tree = _tree.flatten(ev.outputs)
        given = match(u, tree, outputs, "u", "like f(x)")
        pulled = _reverse.products(ev, outputs, given.leaves, given.number, chunk_size=chunk)
        return given.arranged(pulled, ev.where.tree())


@overload
def jacobian(f: Any, x: Any, *, matrix: Literal[True], **options: Unpack[ChunkedBatched]) -> Tensor: ...


@overload
def jacobian(
    f: OneTensor, x: nn.Module | Selection, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]
) -> ByName: ...


@overload
def jacobian(f: OneTensor, x: T, *, matrix: Literal[False] = False, **options: Unpack[ChunkedBatched]) -> T: ...


@overload
def jacobian(f: Any, x: Any, *, matrix: bool = False, **options: Unpack[ChunkedBatched]) -> Any: ...


def jacobian(
    f: Any,
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
    r"""The Jacobian \(J_{ij} = \partial f_i / \partial x_j\), dense.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors already
            computed from *x*.
        x: Where, as for `grad`.
        matrix: Whether to give one `(M, D)` matrix instead of blocks: rows in the order of `f(x)`, columns in that of
            *x*. For outputs `(N, C)` of a model, `.unflatten(0, (N, C))` makes it `(N, C, D)`.
        batch_ndim: So many leading dimensions, of *x* and of `f(x)` alike, index independent samples.
        create_graph: Whether the result can be differentiated again, as for `grad`.
        check_independence: Whether to test that samples are independent, as for `grad`.
        strict: What a part of *x* gives that `f(x)` does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        chunk_size: How many rows (or columns) one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        For tensors `(*f(x).shape, *x.shape)`, and `(*batch, *output event, *input event)` under
        `batch_ndim`. For containers, the structure of `f(x)` filled with structures of *x*. With `matrix=True` one
        tensor `(M, D)`, or `(*batch, M, D)`.

    Raises:
        InputError: `f(x)` is not made of real floating point tensors, or lacks the batch dimensions.
        GraphError: As for `grad`.

    Cost:
        One evaluation of `f`, and one batched reverse pass per chunk of rows. Where `f(x)` has many
        elements, twice as many as *x* at least, and the result is detached: one pass, which is
        differentiated by one batched pass per chunk of columns, in about the time of `torch.func.jacfwd`.
        Not of a tensor already computed, and not where `f` registers a hook, calls a Python
        `autograd.Function` or has an operation without a second derivative: these go by rows.
        Memory: the result, and what a pass over one chunk needs.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.jacobian(lambda x: torch.stack([x[0] * x[1], x[0] ** 2]), torch.tensor([2.0, 3.0]))
        tensor([[3., 2.],
                [4., 0.]])
    """
    chunk = _checks.check_chunk_size(chunk_size)
    if is_set(check_independence, "check_independence"):
        _independence.check(f, x, batch_ndim=batch_ndim, args=args, kwargs=kwargs)
    with Graph(
        call(
            f,
            x,
            passes=1,
            batch_ndim=batch_ndim,
            create_graph=create_graph,
            strict=strict,
            allow=allow,
            args=args,
            kwargs=kwargs,
        )
    ) as ev:
        outputs = ev.tensors()
        _check_output_batch(outputs, ev)
        _dense.check_fits(outputs, ev.leaves, batch_ndim, JACOBIAN_WAY_OUT)
        table = _forward.tall_jacobian(ev, outputs, chunk_size=chunk) or _dense.blocks(ev, outputs, chunk_size=chunk)
    if is_set(matrix, "matrix"):
        return _dense.matrix(table, outputs, ev.leaves, batch_ndim)
    _, _, tree = _tree.flatten(ev.outputs)
    return _tree.rebuild(tree, iter([ev.where.result(row) for row in table]))


JACOBIAN_WAY_OUT = (
    "Use what does not form it: hodiff.jvp and hodiff.vjp for its products, hodiff.JacobianOperator for many of them."
)


def _check_output_batch(outputs: list[Tensor], ev: Graph) -> None:
    for output in outputs:
        if output.shape[: ev.batch_ndim] != torch.Size(ev.batch):
            raise _checks.InputError(
                f"f: returned shape {tuple(output.shape)}; with batch_ndim={ev.batch_ndim} it must begin with "
                f"{tuple(ev.batch)}, one row per sample."
            )
