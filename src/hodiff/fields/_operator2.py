"""A general linear operator of second order, in one pass; and the biharmonic operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff._core._options import ChunkSize
from hodiff.errors import InputError
from hodiff.fields import _directions
from hodiff.fields._expand import Chunked, Common, FieldCall, Method, choose
from hodiff.fields._laplacian import laplacian
from hodiff.fields._parts import second_order
from hodiff.jets import _jet

What = Callable[..., Any] | Tensor


@overload
def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[Chunked],
) -> Tensor: ...


@overload
def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: bool,
    **options: Unpack[Chunked],
) -> Any: ...


def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A linear operator of second order, \(\sum_{ij} C_{ij} \partial_i \partial_j f + b \cdot \nabla f + c f\).

    Fokker-Planck, Kolmogorov, Black-Scholes, convection-diffusion and Laplace-Beltrami operators are
    of this form.

    Args:
        f: A function of *x*, as for `laplacian`.
        x: The points, `(*batch, *event)`, with D coordinates each.
        C: The matrix: a diagonal of shape `(D,)`; a matrix `(D, D)`, which may be indefinite; a factor
            S `(D, R)` with C = S Sᵀ, of lower cost where R < D; or a matrix or factor for each sample,
            `(N, D, D)` or `(N, D, R)`. A square one is always the matrix.
        b: The drift: `(D,)`, or shaped like *x*. None is zero.
        c: A number, or a tensor that broadcasts to `f(x)`. None is zero.
        has_aux: Whether `f` returns `(value, extra)`, as for `laplacian`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the result can be differentiated again, also by *C*, *b* and *c*.
        method: As for `laplacian`.
        check_independence: Whether to test that samples are independent, as for `hodiff.grad`.
        chunk_size: As for `laplacian`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(that, extra)`.

    Raises:
        InputError: *C* or *b* has a shape that does not fit *x*, or *c* one that does not fit `f(x)`.
        GraphError: As for `laplacian`.

    Cost:
        That of `laplacian` with R directions, R the rank of C: the drift is bent into the same curves,
        \(x + t v_r + t^2 b / 2\), and costs nothing. A matrix costs its eigenvectors; one that requires grad,
        D (D + 1) / 2 directions.

    Examples:
        u = sin(x) exp(-t) solves the heat equation, u_xx - u_t = 0:

        >>> import torch, hodiff
        >>> u = lambda z: torch.sin(z[:, 0]) * torch.exp(-z[:, 1])
        >>> C, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, -1.0])
        >>> hodiff.second_order_operator(u, torch.zeros(1, 2), C, b).abs()
        tensor([0.])
    """
    call = FieldCall(
        "second_order_operator",
        f,
        x,
        batch_ndim,
        create_graph,
        method,
        args,
        kwargs,
        chunk_size,
        check_independence=check_independence,
        has_aux=has_aux,
    ).checked()
    with call.grad_mode():
        directions = _directions.of_matrix(x, batch_ndim, C)
        value, _, second = second_order(call, directions, None if b is None else _drift(b, call))
        return call.with_extra(second[0] if c is None else second[0] + _factor(c, value.shape) * value)


def _factor(c: Any, shape: torch.Size) -> Any:
    if _checks.is_number(c):
        return c
    if not _jet.is_jet(c):
        if not isinstance(c, Tensor):
            raise InputError(f"c: got {c!r}, expected a finite number, or a tensor that broadcasts to f(x).")
        _checks.check_real_tensor(c, "c")
    if c.ndim > len(shape) or any(a not in (1, b) for a, b in zip(c.shape[::-1], shape[::-1], strict=False)):
        raise InputError(
            f"c: has shape {tuple(c.shape)}, which does not broadcast to the shape of f(x), {tuple(shape)}; give a "
            f"number, or a tensor that does."
        )
    return c


def _drift(b: Any, call: FieldCall) -> Any:
    if not _jet.is_jet(b):
        _checks.check_real_tensor(b, "b")
    size = torch.Size(call.event).numel()
    if tuple(b.shape) == (size,):
        return b.reshape(*[1] * call.batch_ndim, *call.event).expand(call.x.shape)
    if tuple(b.shape) != tuple(call.x.shape):
        raise InputError(f"b: has shape {tuple(b.shape)}, expected ({size},) or that of x, {tuple(call.x.shape)}.")
    return b


@overload
def biharmonic(f: What, x: Tensor, *, has_aux: Literal[False] = False, **options: Unpack[Common]) -> Tensor: ...


@overload
def biharmonic(f: What, x: Tensor, *, has_aux: bool, **options: Unpack[Common]) -> Any: ...


def biharmonic(
    f: What,
    x: Tensor = _checks.MISSING,
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The biharmonic operator, \(\Delta^2 f = \sum_{ij} \partial_i^2 \partial_j^2 f\), of plates and slow flows.

    Args:
        f: A function of *x*, as for `laplacian`.
        x: The points, `(*batch, *event)`.
        has_aux: Whether `f` returns `(value, extra)`, as for `laplacian`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the result can be differentiated again, as for `laplacian`.
        method: As for `laplacian`.
        check_independence: Whether to test that samples are independent, as for `hodiff.grad`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(that, extra)`.

    Raises:
        InputError: As for `laplacian`.
        GraphError: As for `laplacian`.

    Cost:
        A Laplacian of a Laplacian: one evaluation of `f` on (D + 2)² vectors, and memory in proportion.
        Reverse: D² passes, on graphs of fourth order.

    Examples:
        \(\Delta^2 \lVert x \rVert^4 = 8 D (D + 2)\):

        >>> import torch, hodiff
        >>> hodiff.biharmonic(lambda x: x.square().sum(-1) ** 2, torch.ones(1, 3))
        tensor([120.])

    Reference:
        Dangel, F. et al. (2025), arXiv:2505.13644, find nested forward Laplacians the fastest route.
    """
    call = FieldCall(
        "biharmonic",
        f,
        x,
        batch_ndim,
        create_graph,
        method,
        args,
        kwargs,
        check_independence=check_independence,
        has_aux=has_aux,
    ).checked()
    if not callable(f):
        raise InputError("f: is a tensor already computed; biharmonic needs the function.")
    both = {"batch_ndim": batch_ndim, "has_aux": has_aux}
    inner = {**both, "args": args, "kwargs": kwargs}

    def nested(route: Method) -> Any:
        outer = {**both, "create_graph": call.record, "method": route}
        return laplacian(lambda y: laplacian(f, y, create_graph=True, method=route, **inner), x, **outer)

    def reverse() -> Any:
        with call.watched():
            return nested("reverse")

    with call.grad_mode():
        return choose(call, lambda: nested("jets"), reverse)
