"""The operators of fields beside the Laplacian: of vectors, divergence and curl; of second order
with any coefficients, `second_order_operator`; of fourth, `biharmonic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _reverse, _settings
from hodiff.errors import InputError
from hodiff.fields._expansions import Estimate, inner, mean_over, sampled, shaped
from hodiff.fields._field import (
    Directions,
    FieldCall,
    FieldOptions,
    Method,
    Probes,
    SecondOrderOptions,
    What,
    choose,
    diagonal,
    holds,
    is_differentiable,
    like_point,
    of_laplacian,
    push,
    released,
)
from hodiff.fields._second_order import Given, laplacian, second_order
from hodiff.jets import _pushforward
from hodiff.jets._series import entry, full


class DivergenceOptions(FieldOptions, total=False):
    """The further options of the divergences; for overloads alone."""

    probes: Probes
    generator: torch.Generator | None


@overload
def divergence(
    f: What,
    x: Tensor,
    *,
    samples: None = None,
    vectors: Given | None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor: ...


@overload
def divergence(
    f: What,
    x: Tensor,
    *,
    samples: int,
    vectors: None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> Estimate: ...


@overload
def divergence(
    f: What,
    x: Tensor,
    *,
    samples: int | None = None,
    vectors: Any = None,
    has_aux: bool = False,
    **options: Unpack[DivergenceOptions],
) -> Any: ...


def divergence(
    f: What,
    x: Tensor,
    *,
    samples: int | None = None,
    probes: Probes = "rademacher",
    vectors: Any = None,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The divergence of a vector field, ∇·f = Σᵢ ∂fᵢ/∂xᵢ.

    Args:
        f: A function of *x* that returns a vector for each point, shaped like *x*; or such a
            tensor.
        x: The points, `(*batch, *event)`.
        samples: Estimate it from this many random directions, \(v^\top J v\), instead of all D.
        probes: The distribution of the directions: `"rademacher"`, `"gaussian"` or `"coordinates"`.
        vectors: Your own directions instead of `samples`, for example for an ODE solver, whose
            right-hand side must remain the same function between stages.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again. None: if grad mode is on.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        generator: The source of the random directions; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of the batch, `(N,)`: with *vectors* the mean over them. With
        *samples*, an `Estimate` of it. With *has_aux* `(result, extra)`.

    Raises:
        InputError: `f(x)` does not have the shape of *x*.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        One evaluation of `f` on D + 1 vectors (S + 1 for S samples); reverse: D passes.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.divergence(lambda x: x**2, torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([12.])
    """
    call = FieldCall(
        "divergence",
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
    _, estimate = _divergence(call, samples, probes, vectors, generator)
    return call.with_extra(estimate)


@overload
def value_and_divergence(
    f: What,
    x: Tensor,
    *,
    samples: None = None,
    vectors: Given | None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def value_and_divergence(
    f: What,
    x: Tensor,
    *,
    samples: int,
    vectors: None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> tuple[Tensor, Estimate]: ...


@overload
def value_and_divergence(
    f: What,
    x: Tensor,
    *,
    samples: int | None = None,
    vectors: Any = None,
    has_aux: bool = False,
    **options: Unpack[DivergenceOptions],
) -> tuple[Any, Any]: ...


def value_and_divergence(
    f: What,
    x: Tensor,
    *,
    samples: int | None = None,
    probes: Probes = "rademacher",
    vectors: Any = None,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    r"""A vector field and its divergence, f(x) and ∇·f, from one evaluation.

    A continuous normalizing flow integrates \(\dot x = f\) and \(\tfrac{d}{dt} \log p = -\nabla
    \cdot f\). With your own `vectors=`, drawn once for a solve, the estimated divergence is a fixed
    function of *x*, as an adaptive solver needs.

    Args:
        f: A function of *x* that returns a vector for each point, shaped like *x*; or such a
            tensor.
        x: The points, `(*batch, *event)`.
        samples: Estimate the divergence from this many random directions instead of all D.
        probes: The distribution of the directions: `"rademacher"`, `"gaussian"` or `"coordinates"`.
        vectors: Your own directions instead of `samples`.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the results can be differentiated again. None: if grad mode is on.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        generator: The source of the random directions; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        `(value, divergence)`: the first with the shape of *x*, the second as for `divergence`. With
        *has_aux* `((value, extra), divergence)`.

    Raises:
        InputError: `f(x)` does not have the shape of *x*.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        The same as `divergence`; the value is a by-product.

    Examples:
        A linear field has the trace of its matrix, and a Rademacher vector finds that of a diagonal
        one exactly:

        >>> import torch, hodiff
        >>> hodiff.value_and_divergence(
        ...     lambda x: x * torch.tensor([1.0, 2.0]),
        ...     torch.tensor([[3.0, 4.0]]),
        ...     vectors=torch.tensor([[1.0, -1.0]]),
        ... )
        (tensor([[3., 8.]]), tensor([3.]))

    Reference:
        Grathwohl, W. et al. (2019). FFJORD: free-form continuous dynamics for scalable reversible
        generative models. arXiv:1810.01367. Their noise, too, is fixed for the duration of each
        solve.
    """
    call = FieldCall(
        "value_and_divergence",
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
    value, estimate = _divergence(call, samples, probes, vectors, generator)
    return call.with_extra(value), estimate


def _divergence(
    call: FieldCall,
    samples: int | None,
    probes: Probes,
    vectors: Any,
    generator: torch.Generator | None,
) -> tuple[Any, Any]:
    """The value, and the divergence or an estimate of it, by the forms v · J v."""
    exact = samples is None and vectors is None
    with _settings.grad_mode(call.record):
        directions, remaining = (
            (of_laplacian(call.x, call.batch_ndim), 0.0)
            if exact
            else sampled(call.x, call.batch_ndim, None, samples, probes, vectors, generator)
        )
        value, first = choose(call, _by_jets, _by_reverse, directions.vectors)
        each = inner(first, directions.vectors, call.batch_ndim)
        if directions.weights is not None:
            each = each * directions.weights.reshape(-1, *[1] * (each.ndim - 1))
        return value, each.sum(0) if exact else mean_over(each, remaining, vectors)


def _by_jets(call: FieldCall, vectors: Any) -> Any:
    """The value, which must have the shape of x, and J v for each direction, `(R, *x.shape)`."""
    series, _ = push(call, [vectors], 1)
    _check_shape(series[0], call)
    return series[0], entry(series, 1, vectors.shape[0])


def _by_reverse(call: FieldCall, vectors: Any) -> Any:
    with call.evaluation(passes=2) as graph:
        output = _arguments.check_output(graph.outputs)
        _check_shape(output, call)
        wide = full(vectors, call.x.shape).contiguous()
        products = _reverse.jvp(graph, [output], [wide], len(wide), chunk_size=None)
        value = graph.value()
        call.note(graph)
    return tuple(released(graph, [value, *products]))


def _check_shape(value: Any, call: FieldCall) -> None:
    if value.shape != call.x.shape:
        raise InputError(
            f"f returned shape {tuple(value.shape)} for x of shape {tuple(call.x.shape)}; "
            f"{call.name} needs a vector field, whose value has the shape of the point."
        )


@overload
def curl(
    f: What, x: Tensor, *, has_aux: Literal[False] = False, **options: Unpack[FieldOptions]
) -> Tensor: ...


@overload
def curl(f: What, x: Tensor, *, has_aux: bool, **options: Unpack[FieldOptions]) -> Any: ...


def curl(
    f: What,
    x: Tensor,
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The curl of a field, ∇ × f in three dimensions, or ∂₁f₂ - ∂₂f₁ in two.

    Args:
        f: A function of *x* that returns a vector for each point, shaped like *x*; or such a
            tensor.
        x: The points, `(*batch, 3)` or `(*batch, 2)`.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again. None: if grad mode is on.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor of shape `(*batch, 3)`, or `(*batch,)` in two dimensions; with *has_aux*
        `(result, extra)`.

    Raises:
        InputError: *x* does not have two or three coordinates, or `f(x)` has another shape.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        One evaluation of `f` on D + 1 vectors; reverse: D passes.

    Examples:
        A rotation about the third axis has curl 2 along it:

        >>> import torch, hodiff
        >>> rotation = lambda x: torch.stack([-x[:, 1], x[:, 0], 0 * x[:, 2]], dim=1)
        >>> hodiff.curl(rotation, torch.ones(1, 3)) @ torch.tensor([0.0, 0.0, 1.0])
        tensor([2.])
    """
    call = FieldCall(
        "curl",
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
    if call.event not in ((2,), (3,)):
        raise InputError(f"x: points have shape {call.event}; a curl needs (2,) or (3,).")
    with _settings.grad_mode(call.record):
        # J[i, ..., j] = ∂_i f_j
        _, J = choose(call, _by_jets, _by_reverse, of_laplacian(x, batch_ndim).vectors)
        axes = [(0, 1)] if len(J) == 2 else [(1, 2), (2, 0), (0, 1)]
        parts = [J[i][..., j] - J[j][..., i] for i, j in axes]
        return call.with_extra(parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1))


# --- a linear operator of second order, in one pass; the biharmonic operator ----------------------


@overload
def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[SecondOrderOptions],
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
    **options: Unpack[SecondOrderOptions],
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
    chunk_size: _arguments.ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A linear second-order operator, Σᵢⱼ Cᵢⱼ ∂ᵢ∂ⱼf + b·∇f + c f.

    Fokker-Planck, Kolmogorov, Black-Scholes, convection-diffusion and Laplace-Beltrami operators
    are of this form.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, *event)`, with D coordinates each.
        C: The matrix: a diagonal of shape `(D,)`; a matrix `(D, D)`, which may be indefinite; a
            factor S `(D, R)` with C = S Sᵀ, of lower cost where R < D; or a matrix or factor for
            each sample, `(N, D, D)` or `(N, D, R)`. A square one is always the matrix.
        b: The drift: `(D,)`, or shaped like *x*. None is zero.
        c: A number, or a tensor that broadcasts to `f(x)`. None is zero.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again, also with respect to *C*, *b*
            and *c*.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        chunk_size: How many directions one evaluation of `f` carries, or `"auto"`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(result, extra)`.

    Raises:
        InputError: *C* or *b* has a shape that does not fit *x*, or *c* one that does not fit
            `f(x)`.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        The same as `laplacian` with R directions, where R is the rank of C. The drift is part of
        the same curves, \(x + t v_r + t^2 b / 2\), and costs nothing. A matrix also takes its
        eigenvectors, and one that requires grad takes D (D + 1) / 2 directions.

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
    with _settings.grad_mode(call.record):
        directions = _of_matrix(x, batch_ndim, C)
        value, _, second = second_order(call, directions, None if b is None else _drift(b, call))
        return call.with_extra(
            second[0] if c is None else second[0] + _factor(c, value.shape) * value
        )


def _factor(c: Any, shape: torch.Size) -> Any:
    if not isinstance(c, Tensor):
        _arguments.check_number(c, "c", more=", or a tensor that broadcasts to f(x)")
        return c
    _arguments.check_real_tensor(c, "c")
    if c.ndim > len(shape) or any(
        a not in (1, b) for a, b in zip(c.shape[::-1], shape[::-1], strict=False)
    ):
        raise InputError(
            f"c has shape {tuple(c.shape)}, which does not broadcast to the shape of f(x), "
            f"{tuple(shape)}; give a number, or a tensor that does."
        )
    return c


def _drift(b: Any, call: FieldCall) -> Any:
    _arguments.check_real_tensor(b, "b")
    size = torch.Size(call.event).numel()
    if tuple(b.shape) == (size,):
        return b.reshape(*[1] * call.batch_ndim, *call.event).expand(call.x.shape)
    if tuple(b.shape) != tuple(call.x.shape):
        raise InputError(
            f"b has shape {tuple(b.shape)}, expected ({size},) or the shape of x, "
            f"{tuple(call.x.shape)}."
        )
    return b


@overload
def biharmonic(
    f: What, x: Tensor, *, has_aux: Literal[False] = False, **options: Unpack[FieldOptions]
) -> Tensor: ...


@overload
def biharmonic(f: What, x: Tensor, *, has_aux: bool, **options: Unpack[FieldOptions]) -> Any: ...


def biharmonic(
    f: What,
    x: Tensor,
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The biharmonic operator, Δ²f = Σᵢⱼ ∂ᵢ²∂ⱼ²f, of plates and slow flows.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, *event)`.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again. None: if grad mode is on.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(result, extra)`.

    Raises:
        InputError: *x* or *weight* is not what the call needs, or `f(x)` lacks the batch
            dimensions.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        A Laplacian of a Laplacian: one evaluation of `f` on (D + 2)² vectors, and memory in
            proportion.
        Reverse: D² passes, on graphs of fourth order.

    Examples:
        \(\Delta^2 \lVert x \rVert^4 = 8 D (D + 2)\):

        >>> import torch, hodiff
        >>> hodiff.biharmonic(lambda x: x.square().sum(-1) ** 2, torch.ones(1, 3))
        tensor([120.])

    Reference:
        Dangel, F. et al. (2025), arXiv:2505.13644, find nested forward Laplacians the fastest
        route.
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
        raise InputError("f: got a tensor already computed; biharmonic needs the function.")
    both = {"batch_ndim": batch_ndim, "has_aux": has_aux}
    inner = {**both, "args": args, "kwargs": kwargs}

    def nested(call: FieldCall, route: Method = "jets") -> Any:
        outer = {**both, "create_graph": call.record, "method": route}
        once = _call.in_place_of(
            f, lambda y: laplacian(f, y, create_graph=True, method=route, **inner)
        )
        return laplacian(once, x, **outer)

    def reverse(call: FieldCall) -> Any:
        with call.watched():
            return nested(call, "reverse")

    with _settings.grad_mode(call.record):
        return choose(call, nested, reverse, nested=True)


# --- directions of a matrix --------------------------------------------------------------------


def _of_matrix(x: Any, batch_ndim: int, weight: Any) -> Directions:
    """Directions of the operator with the matrix C, here `weight`."""
    axes = _pushforward.units(x, batch_ndim)
    weight = _matrix(weight, x, batch_ndim, len(axes))
    if weight.ndim == 1:
        return diagonal(axes, weight, units=False)
    if weight.ndim == 2 and weight.shape[1] != weight.shape[0]:
        return Directions(shaped(weight.mT, x, batch_ndim))
    if weight.ndim > 2 and weight.shape[-1] != weight.shape[-2]:
        return Directions(_per_sample(weight, x, batch_ndim))
    if is_differentiable(weight):
        return _pairs(weight, x, batch_ndim)
    return _eigenvectors(weight, x, batch_ndim)


def _matrix(C: Any, x: Any, batch_ndim: int, size: int) -> Tensor:
    """The matrix of an operator, in any of its forms."""
    _arguments.check_real_tensor(C, "C")
    _call.refuse_tangent(C, "C")
    batch, shape = tuple(x.shape[:batch_ndim]), tuple(C.shape)
    fits = (
        shape == (size,)
        or (len(shape) == 2 and shape[0] == size)
        or (
            batch_ndim > 0
            and len(shape) == batch_ndim + 2
            and shape[:batch_ndim] == batch
            and shape[-2] == size
        )
    )
    if not fits:
        raise InputError(
            f"C has shape {shape}; with {size} coordinates it must be a diagonal ({size},), a "
            f"matrix ({size}, {size}), a factor ({size}, R), or one of the last two per sample, "
            f"({', '.join(map(str, (*batch, size)))}, R)."
        )
    return like_point(C, x, "C")


def _per_sample(factor: Any, x: Any, batch_ndim: int) -> Any:
    """`(*batch, D, R)` as directions."""
    return factor.movedim(-1, 0).reshape(factor.shape[-1], *x.shape)


def _eigenvectors(weight: Tensor, x: Any, batch_ndim: int) -> Directions:
    """The eigenvectors of the symmetric part, scaled by the roots of |λ|, with the signs of λ."""
    weight = weight.detach()
    # there is no eigh of halves
    wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    values, vectors = torch.linalg.eigh((wide + wide.mT) / 2)
    if weight.ndim == 2:  # before they are rounded to halves, of which a large part would be noise
        negligible = values.abs() <= values.abs().amax() * len(wide) * torch.finfo(wide.dtype).eps
        if holds((~negligible).any()):
            values, vectors = values[~negligible], vectors[:, ~negligible]
    values, vectors = values.to(weight.dtype), vectors.to(weight.dtype)
    if weight.ndim == 2:
        rows = shaped((vectors * values.abs().sqrt()).mT, x, batch_ndim)
        return Directions(rows) if holds((values > 0).all()) else Directions(rows, values.sign())
    # Signs differ from sample to sample: one block of directions for each, empty entries being
    # zero.
    up = _per_sample(vectors * values.clamp(min=0).sqrt().unsqueeze(-2), x, batch_ndim)
    if holds((values >= 0).all()):
        return Directions(up)
    down = _per_sample(vectors * values.clamp(max=0).neg().sqrt().unsqueeze(-2), x, batch_ndim)
    return Directions(
        torch.cat([up, down]), torch.cat([values.new_ones(len(up)), -values.new_ones(len(down))])
    )


def _pairs(weight: Any, x: Any, batch_ndim: int) -> Directions:
    r"""Directions and weights for a weight that is differentiated by: eigenvectors have no
    derivative where eigenvalues meet.

    \(C : H = \sum_{i \le j} w_{ij} \, (e_i + e_j)^\top H (e_i + e_j)\) with coefficients linear in
    C. One weight per sample becomes a pair of directions, \(w = ((1 + w)/2)^2 - ((1 - w)/2)^2\)
    times a square.
    """
    size = weight.shape[-1]
    symmetric = (weight + weight.mT) * 0.5
    axes = torch.eye(size, dtype=x.dtype, device=x.device)
    rows, columns = torch.triu_indices(size, size, 1, device=x.device)
    own = torch.diagonal(symmetric, dim1=-2, dim2=-1) * 2 - symmetric.sum(-1)
    vectors = torch.cat([axes, axes[rows] + axes[columns]])
    weights = torch.cat([own, symmetric[..., rows, columns]], -1)
    if weight.ndim == 2:
        return Directions(shaped(vectors, x, batch_ndim), weights)
    plus, minus = (1 + weights) * 0.5, (1 - weights) * 0.5
    each = torch.cat([plus.unsqueeze(-2) * vectors.mT, minus.unsqueeze(-2) * vectors.mT], -1)
    return Directions(
        _per_sample(each, x, batch_ndim),
        axes.new_tensor([1.0, -1.0]).repeat_interleave(len(vectors)),
    )
