"""First-order operators of vector fields: divergence and curl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks, _reverse
from hodiff.errors import InputError
from hodiff.fields import _directions
from hodiff.fields._directions import Probes
from hodiff.fields._expand import FieldCall, Method, choose, push, released
from hodiff.fields._laplacian import Estimate, estimate
from hodiff.jets import _push
from hodiff.jets._series import full

What = Callable[..., Any] | Tensor


def divergence(
    f: What,
    x: Tensor = _checks.MISSING,
    *,
    samples: int | None = None,
    probes: Probes = "rademacher",
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Tensor | Estimate:
    r"""The divergence of a vector field, \(\nabla \cdot f = \sum_i \partial f_i / \partial x_i\).

    Args:
        f: A function of *x* that gives a vector for each point, shaped like *x*; or such a tensor.
        x: The points, `(*batch, *event)`.
        samples: Estimate it from so many random directions, \(v^\top J v\), instead of all D.
        probes: `"rademacher"`, `"gaussian"` or `"coordinates"`, as for `laplacian`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the result can be differentiated again, as for `laplacian`.
        method: As for `laplacian`.
        check_independence: Whether to test that samples are independent, as for `hodiff.grad`.
        generator: Source of the random directions; None means the device's default.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of the batch, `(N,)`. With `samples`, an `Estimate` of it.

    Raises:
        InputError: `f(x)` does not have the shape of *x*.
        GraphError: As for `laplacian`.

    Cost:
        One evaluation of `f` on D + 1 vectors (S + 1 for S samples); reverse: D passes.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.divergence(lambda x: x**2, torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([12.])
    """
    call = FieldCall(
        "divergence", f, x, batch_ndim, create_graph, method, args, kwargs, check_independence=check_independence
    ).checked()
    if samples is None:
        with call.grad_mode():
            return along(call, _directions.of_laplacian(x, batch_ndim).vectors, None).sum(0)
    _checks.check_integer(samples, "samples", least=1)
    directions, remaining = _directions.sampled(x, batch_ndim, None, samples, probes, generator)
    with call.grad_mode():
        return estimate(along(call, directions.vectors, directions.weights), remaining)


def along(call: FieldCall, vectors: Any, weights: Any) -> Any:
    """The forms v · J v, `(R, *batch)`."""
    first = jacobian_products(call, vectors)
    dims = tuple(range(1 + call.batch_ndim, first.ndim))
    each = (first * vectors).sum(dims) if dims else first * vectors
    return each if weights is None else each * weights.reshape(-1, *[1] * (each.ndim - 1))


def jacobian_products(call: FieldCall, vectors: Any) -> Any:
    """J v for each direction, `(R, *x.shape)`; `f(x)` must have the shape of x."""

    def jets() -> Any:
        series, _ = push(call, [vectors], 1)
        _check_shape(series[0], call)
        return _push.entry(series, 1, vectors.shape[0])

    def reverse() -> Any:
        with call.evaluation(passes=2) as ev:
            output = _checks.check_output(ev.outputs)
            _check_shape(output, call)
            wide = full(vectors, call.x.shape).contiguous()
            found = _reverse.pushforward(ev, [output], [wide], len(wide), chunk_size=None)
        return released(ev, found)[0]

    return choose(call, jets, reverse)


def _check_shape(value: Any, call: FieldCall) -> None:
    if value.shape != call.x.shape:
        raise InputError(
            f"f: returned shape {tuple(value.shape)} for x of shape {tuple(call.x.shape)}; {call.name} needs a vector "
            f"field, whose value has the shape of the point."
        )


def curl(
    f: What,
    x: Tensor = _checks.MISSING,
    *,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""The curl of a field, \(\nabla \times f\) in three dimensions, or \(\partial_1 f_2 - \partial_2 f_1\) in two.

    Args:
        f: A function of *x* that gives a vector for each point, shaped like *x*; or such a tensor.
        x: The points, `(*batch, 3)` or `(*batch, 2)`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the result can be differentiated again, as for `laplacian`.
        method: As for `laplacian`.
        check_independence: Whether to test that samples are independent, as for `hodiff.grad`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor of shape `(*batch, 3)`, or `(*batch,)` in two dimensions.

    Raises:
        InputError: *x* does not have two or three coordinates, or `f(x)` has another shape.
        GraphError: As for `laplacian`.

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
        "curl", f, x, batch_ndim, create_graph, method, args, kwargs, check_independence=check_independence
    ).checked()
    if call.event not in ((2,), (3,)):
        raise InputError(f"x: has points of shape {call.event}; a curl needs (2,) or (3,).")
    with call.grad_mode():
        J = jacobian_products(call, _directions.of_laplacian(x, batch_ndim).vectors)  # J[i, ..., j] = ∂_i f_j
        if call.event == (2,):
            return J[0][..., 1] - J[1][..., 0]
        return torch.stack(
            [J[1][..., 2] - J[2][..., 1], J[2][..., 0] - J[0][..., 2], J[0][..., 1] - J[1][..., 0]], dim=-1
        )
