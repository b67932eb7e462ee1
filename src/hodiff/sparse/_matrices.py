"""`sparse_hessian`, `sparse_jacobian`: a plan, made and evaluated at one point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor

from hodiff._core import _arguments, _needed
from hodiff._core._arguments import Allowed, ChunkSize, SparseOutput, check_option, is_set
from hodiff._core._call import call
from hodiff._core._where import Where


class SparseMatrixOptions(TypedDict, total=False):
    """For overloads alone: what both take, besides the form of the result."""

    pattern: Any
    check: bool
    create_graph: bool | None
    allow: Allowed
    chunk_size: ChunkSize
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


@overload
def sparse_hessian(
    f: Any, x: Any, *, output: Literal["torch", "csr"] = "torch", **options: Unpack[SparseMatrixOptions]
) -> Tensor: ...


@overload
def sparse_hessian(f: Any, x: Any, *, output: SparseOutput, **options: Unpack[SparseMatrixOptions]) -> Any: ...


def sparse_hessian(
    f: Any,
    x: Any = _arguments.MISSING,
    *,
    pattern: Any = None,
    output: SparseOutput = "torch",
    check: bool = False,
    create_graph: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The Hessian of a function of many variables, most of which do not interact, as a sparse matrix.

    hodiff detects which entries can be nonzero, lets columns without common rows share a product,
    \(B = H S\), and reads off each entry where it is the only term. For many points make a plan
    once: `hodiff.sparse.plan_hessian`.

    Args:
        f: A function of *x* that returns one element (of any shape), or such a tensor already
            computed from *x*, whose graph is left intact.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`, with
            D entries in all.
        pattern: The entries that can be nonzero, if you know them: a `Pattern`, a SciPy sparse
            matrix, a sparse tensor (all stored entries count), or a pair of index vectors. It is
            not checked.
        output: `"torch"`, a sparse COO tensor; `"csr"`, a sparse CSR tensor; `"scipy"`, a
            `scipy.sparse.csr_array`, which keeps no graph; `"auto"`, a dense tensor if that is
            cheaper (fewer than 600 variables, or products for more than half of them), else as
            `"torch"`.
        check: Whether to compare the matrix with a Hessian-vector product for a random vector.
        create_graph: Whether the entries can be differentiated again. None: only inside the
            function of another hodiff call.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many products one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The matrix, of shape `(D, D)`, rows and columns in the order of *x*. It holds an entry for
        each place of the pattern, also where its value happens to be zero.

    Raises:
        InputError: *x* or `f(x)` is not what `hvp` takes; a *pattern* has another shape, is not
            symmetric, or has indices out of range; or the detected pattern is not sparse.
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.
        DerivativeError: With `check`, the matrix misses an entry.

    Cost:
        One evaluation of `f`, one reverse pass, and a batched pass for as many vectors as there are
        colors, once the pattern and its colors are known. To find these is most of a first call. A
        chain has 3 colors, and a grid with eight neighbors 9, whatever their size. `check` adds a
        vector. Memory: the entries, and D numbers for each color.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.sparse_hessian(lambda x: (x[1:] * x[:-1] ** 2).sum(), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> H.to_dense()
        tensor([[4., 2., 0., 0.],
                [2., 6., 4., 0.],
                [0., 4., 8., 6.],
                [0., 0., 6., 0.]])

    Reference:
        Gebremedhin, A. H., Manne, F., Pothen, A. (2005). What color is your Jacobian? Graph
        coloring for computing derivatives. SIAM Review 47(4). doi:10.1137/S0036144504444711.
    """
    return _matrix(f, x, 2, pattern, output, check, create_graph, allow, chunk_size, args, kwargs)


@overload
def sparse_jacobian(
    f: Any, x: Any, *, output: Literal["torch", "csr"] = "torch", **options: Unpack[SparseMatrixOptions]
) -> Tensor: ...


@overload
def sparse_jacobian(f: Any, x: Any, *, output: SparseOutput, **options: Unpack[SparseMatrixOptions]) -> Any: ...


def sparse_jacobian(
    f: Any,
    x: Any = _arguments.MISSING,
    *,
    pattern: Any = None,
    output: SparseOutput = "torch",
    check: bool = False,
    create_graph: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The sparse Jacobian Jᵢⱼ = ∂fᵢ/∂xⱼ of many functions, each of few variables.

    Works like `sparse_hessian`, with products from the right, \(J S\), or from the left, \(S^\top
    J\), whichever are fewer. For many points make a plan once: `hodiff.sparse.plan_jacobian`.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors
            already computed.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`, with
            D entries in all.
        pattern: The entries that can be nonzero, if you know them, in one of the forms of
            `sparse_hessian`.
        output: `"torch"`, `"csr"`, `"scipy"` or `"auto"`, as for `sparse_hessian`.
        check: Whether to compare the matrix with a product for a random vector.
        create_graph: Whether the entries can be differentiated again. None: only inside the
            function of another hodiff call.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many products one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The matrix, of shape `(M, D)` for M outputs, in the order of `f(x)` and of *x*.

    Raises:
        InputError: *x* or `f(x)` is not what `jacobian` takes; or the pattern does not fit.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.
        DerivativeError: With `check`, the matrix misses an entry.

    Cost:
        One evaluation of `f`, and a batched pass for as many vectors as there are colors; before
        them `hodiff.sparse.sparsity_pattern` and `hodiff.sparse.color`, and one more pass where
        columns are colored.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.sparse_jacobian(lambda x: x[1:] - x[:-1] ** 2, torch.tensor([1.0, 2.0, 3.0])).to_dense()
        tensor([[-2.,  1.,  0.],
                [ 0., -4.,  1.]])
    """
    return _matrix(f, x, 1, pattern, output, check, create_graph, allow, chunk_size, args, kwargs)


def _matrix(
    f: Any,
    x: Any,
    order: int,
    pattern: Any,
    output: SparseOutput,
    check: bool,
    create_graph: bool | None,
    allow: Allowed,
    chunk_size: ChunkSize,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    from hodiff.calculus import _second

    _needed.check("sparse")
    from hodiff.sparse import _plan

    check_option(output, SparseOutput, "output")
    check = is_set(check, "check")
    _arguments.check_chunk_size(chunk_size)
    if output == "scipy":
        _plan.scipy_sparse()
    where = Where(x)
    size = sum(tensor.numel() for tensor in where.tensors)
    common: dict[str, Any] = {"allow": allow, "args": args, "kwargs": kwargs}
    later: dict[str, Any] = {"create_graph": create_graph, "chunk_size": chunk_size}
    if output == "auto" and pattern is None and size < _plan.BREAK_EVEN and order == 2:
        return _second.hessian(f, x, matrix=True, **common, **later)
    request = call(f, where, passes=order, create_graph=False, **common)
    plan = _plan.prepared(request, where, f, order, pattern, {"output": output, **common})
    return plan(x, check=check, **later)
