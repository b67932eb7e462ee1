"""First-order operators of vector fields: divergence and curl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _reverse
from hodiff.errors import InputError
from hodiff.fields import _expansions
from hodiff.fields._expansions import Probes
from hodiff.fields._field import FieldCall, FieldOptions, Method, choose, push, released
from hodiff.fields._second_order import Estimate, Given, mean_over
from hodiff.jets._series import entry, full

What = Callable[..., Any] | Tensor


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
    """The value, and the divergence or an estimate of it."""
    with call.grad_mode():
        if samples is None and vectors is None:
            value, each = along(
                call, _expansions.of_laplacian(call.x, call.batch_ndim).vectors, None
            )
            return value, each.sum(0)
        directions, remaining = _expansions.sampled(
            call.x, call.batch_ndim, None, samples, probes, vectors, generator
        )
        value, each = along(call, directions.vectors, directions.weights)
        return value, mean_over(each, remaining, vectors)


def along(call: FieldCall, vectors: Any, weights: Any) -> tuple[Any, Any]:
    """The value, and the forms v · J v, `(R, *batch)`."""
    value, first = jacobian_products(call, vectors)
    dims = tuple(range(1 + call.batch_ndim, first.ndim))
    each = (first * vectors).sum(dims) if dims else first * vectors
    return value, each if weights is None else each * weights.reshape(-1, *[1] * (each.ndim - 1))


def jacobian_products(call: FieldCall, vectors: Any) -> tuple[Any, Any]:
    """The value, which must have the shape of x, and J v for each direction, `(R, *x.shape)`."""
    return choose(call, _by_jets, _by_reverse, vectors)


def _by_jets(call: FieldCall, vectors: Any) -> Any:
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
    with call.grad_mode():
        # J[i, ..., j] = ∂_i f_j
        _, J = jacobian_products(call, _expansions.of_laplacian(x, batch_ndim).vectors)
        return call.with_extra(_curl_of(J))


def _curl_of(J: Any) -> Any:
    if len(J) == 2:
        return J[0][..., 1] - J[1][..., 0]
    return torch.stack(
        [J[1][..., 2] - J[2][..., 1], J[2][..., 0] - J[0][..., 2], J[0][..., 1] - J[1][..., 0]],
        dim=-1,
    )
