"""Derivatives of any order of elementwise functions: nested reverse mode, and Taylor mode above."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _reverse, _settings, _vectors
from hodiff._core._call import call
from hodiff._core._graph import OutputGraph, Watched, detached
from hodiff._core._tree import memory_of
from hodiff.calculus._first import What
from hodiff.errors import InputError
from hodiff.jets import _jet, _pushforward
from hodiff.jets._series import Series, entry

TAYLOR_FROM = {False: 2, True: 3}
"""The order from which one expansion beats nested passes, without a graph and with one.

At order 2 it takes 0.7 to 0.9 of their time without, and 1.05 to 1.4 with one; at order 1 it loses.
"""

MULTIPLES = (0.73, 1.37, 1.91)
"""Of the weights; no powers of two, along which rounding errors are multiples, too."""


def nth_derivative(
    f: What,
    x: Tensor,
    n: int,
    *,
    create_graph: bool | None = None,
    allow: _arguments.Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""The n-th derivative of an elementwise function, f⁽ⁿ⁾(x).

    Each entry of *x* is one real variable, and `f(x)` has the shape of *x*: entry i of `f(x)` may
    depend only on entry i of *x*. (For functions that mix entries use `hessian` and `jacobian`.)

    Args:
        f: An elementwise function of *x*, or such a tensor already computed from *x*.
        x: A tensor.
        n: The order, at least 0.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor shaped like *x*; `f(x)` itself for order 0.

    Raises:
        InputError: *n* is not an integer of at least 0, or above 170 (33 for single precision);
            `f(x)` has another shape than *x*, or an entry of `f(x)` depends on other entries of
            *x*.
        GraphError: An operation has no further derivative; `f` does not depend on *x*.

    Cost:
        One evaluation of `f`, with two reverse passes for order 1, and by Taylor mode for higher
        orders. In detail: order 1, and order 2 of a differentiable result, take n reverse passes,
        and n more that check at every order that `f` is elementwise (none if *x* has one entry).
        Higher orders take one Taylor-mode evaluation on 2 n + 1 vectors, including the check; for a
        differentiable result, one on n + 1 vectors and another as the check. A tensor already
        computed, or an operation of `f` without a Taylor rule, takes 2 n reverse passes, each pair
        about 2.7 times as expensive as the one before.

    Examples:
        \(z = (x^2)^2\) has \(z' = 4x^3\) and \(z'' = 12x^2\):

        >>> import torch, hodiff
        >>> hodiff.nth_derivative(lambda x: (x**2) ** 2, torch.tensor([1.0, 2.0]), 2)
        tensor([12., 48.])
    """
    return derivatives(f, x, n, create_graph=create_graph, allow=allow, args=args, kwargs=kwargs)[n]


def derivatives(
    f: What,
    x: Tensor,
    n: int,
    *,
    create_graph: bool | None = None,
    allow: _arguments.Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Tensor, ...]:
    r"""All derivatives of an elementwise function up to order n: f(x), f′(x), …, f⁽ⁿ⁾(x).

    Args:
        f: An elementwise function of *x* (see `nth_derivative`), or such a tensor already computed.
        x: A tensor.
        n: The highest order, at least 0.
        create_graph: Whether the results can be differentiated again. None: only inside the
            function of another hodiff call.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        n + 1 tensors shaped like *x*.

    Raises:
        InputError: *n* is out of range, or `f` is not elementwise.
        GraphError: An operation has no further derivative, or `f` does not depend on *x*.

    Cost:
        The same as `nth_derivative`; the lower orders are by-products.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.derivatives(lambda x: x**3, torch.tensor(2.0), 3)
        (tensor(8.), tensor(12.), tensor(12.), tensor(6.))
    """
    _arguments.check_integer(n, "n", least=0)
    if not _jet.is_jet(x):
        _arguments.check_real_tensor(x, "x")
    _arguments.check_arguments(args, kwargs)
    least = TAYLOR_FROM[_call.recorded(create_graph)]
    if callable(f) and not isinstance(f, Tensor) and (n >= least or _jet.is_jet(x)):
        try:
            return _by_jets(f, x, n, create_graph, args, kwargs)
        except _jet.NoRule as error:
            if _jet.is_jet(x) or isinstance(error, _jet.NoDerivative):
                raise
    given = {"allow": allow, "args": args, "kwargs": kwargs}
    state = _settings.RandomState(x.device)
    watch = (
        partial(_settings.on, _jet.NoConstants()) if n else nullcontext
    )  # where Taylor mode raises
    with Watched(call(f, x, passes=n, create_graph=create_graph, **given), watch) as graph:
        value = _check_shape(_arguments.check_output(graph.outputs), x)
        weights = _weights(value) if n and value.numel() > 1 else None
        orders, weighted = [value], [value]
        for order in range(1, n + 1):
            if weights is not None:  # first, for the last pass of the other chain frees the graph
                weighted.append(_along(graph, weighted[-1], weights, last=order == n))
            orders += _reverse.vjp(
                graph, orders[-1:], [torch.ones_like(value)], differentiated=order < n
            )
    if weights is not None:

        def again(weights: Tensor) -> list[Tensor]:
            with (
                state.replayed(),
                OutputGraph(call(f, x, passes=n, create_graph=False, **given)) as graph,
            ):
                chain = [graph.outputs]
                for order in range(1, n + 1):
                    chain.append(_along(graph, chain[-1], weights, last=order == n))
            return chain

        _check_elementwise(weighted, orders, weights, again)
    if graph.create_graph:
        return graph.value(), *orders[1:]
    return graph.value(), *_reverse.warned_if_not_finite(
        graph, [_call.cut(part) for part in orders[1:]]
    )


def _weights(like: Tensor) -> Tensor:
    """Numbers in [1, 2), always the same ones, that touch nobody's random state."""
    return _vectors.generic(like.numel()).reshape(like.shape).to(like)


def _along(graph: OutputGraph, below: Tensor, weights: Tensor, *, last: bool) -> Tensor:
    """The order above `below` with weights for ones; the last one is only looked at."""
    if last and graph.create_graph:
        graph = graph.kept()
    return _reverse.vjp(graph, [below], [weights], more=True, differentiated=not last)[0]


def _check_elementwise(
    weighted: Sequence[Tensor],
    plain: Sequence[Tensor],
    weights: Tensor,
    again: Callable[[Tensor], Sequence[Tensor]],
) -> None:
    """Raise where entries mix at some order up to n, given the derivatives along the weights w and
    along ones.

    That of order k along w is w^k times that along ones where each entry has a variable of its own;
    and, for a w that
    knows nothing of f, only there: both are polynomials in w. At the first order, J w = w J 1.
    Where all cancels but rounding errors, they differ, too; but along other multiples of w (by
    `again`) then by something else.
    """
    if _settings.tracing():
        return
    for order, (weighted_derivative, ones) in enumerate(
        zip(weighted[1:], plain[1:], strict=True), 1
    ):
        given, expected = (
            weighted_derivative.detach(),
            (weights**order if order > 1 else weights) * ones.detach(),
        )
        difference, bound = given - expected, torch.finfo(given.dtype).eps ** 0.5
        # As nearly always; both are NaN where an entry is.
        size = float(torch.linalg.vector_norm(given, math.inf))
        if float(torch.linalg.vector_norm(difference, math.inf)) <= bound * size < math.inf:
            continue
        mixed = _largest(difference) > bound * max(_largest(given), _largest(expected))
        if mixed and all(
            _repeats(difference, order, weights, again, factor) for factor in MULTIPLES
        ):
            raise InputError(
                f"f is not elementwise: entries of f(x) depend on other entries of x (seen at "
                f"order {order}), so the derivative of an entry is not a single number. Use "
                f"hodiff.hessian or hodiff.jacobian, with batch_ndim=1 for independent rows."
            )


def _repeats(
    difference: Tensor,
    order: int,
    weights: Tensor,
    again: Callable[[Tensor], Sequence[Tensor]],
    factor: float,
) -> bool:
    """Whether what is apart along w and ones is so along multiples of them:
    rounding errors are not.
    """
    weighted, ones = (
        again(along * factor)[order].detach() for along in (weights, torch.ones_like(weights))
    )
    apart = (weighted - weights**order * ones) / factor**order
    return _largest(apart - difference) <= 0.05 * _largest(difference)


def _largest(values: Tensor) -> float:
    """The largest size of finite values."""
    return float(values.abs().nan_to_num(0.0, 0.0).max())


def _check_shape(value: Tensor, x: Tensor) -> Tensor:
    if value.shape != x.shape:
        raise InputError(
            f"f returned shape {tuple(value.shape)} for x of shape {tuple(x.shape)}; an "
            f"elementwise function keeps the shape. For other functions use hodiff.grad, "
            f"hodiff.hessian or hodiff.jacobian; along a line, f(x + t * v) is one of t."
        )
    return value


def _by_jets(
    f: Callable[..., Any],
    x: Tensor,
    n: int,
    create_graph: bool | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> tuple[Tensor, ...]:
    """All orders from an expansion along ones; one along weights tells whether f is elementwise."""
    record = _call.recorded(create_graph)
    if not record or _call.inside_vmap():
        _call.refuse_transforms(batched=True)
    factor = _pushforward.factorials(n, x.dtype)
    state = _settings.RandomState(x.device)
    given = {"args": args, "kwargs": kwargs}
    weights = _weights(x) if n and x.numel() > 1 and not _jet.is_jet(x) else None
    lines = torch.ones_like(x).unsqueeze(0)
    if weights is not None and not record:  # both at once; a graph would hold them both
        lines = torch.cat([lines, weights.unsqueeze(0)])
    output, expansion = _pushforward.push(f, [x], [[lines]], max(n, 1), record=record, **given)
    series = _pushforward.coefficients(output, expansion)
    _check_shape(series[0], x)
    plain, *weighted = _orders(series, n, len(lines))
    if weights is not None:

        def again(weights: Tensor) -> list[Tensor]:
            with state.replayed():
                output, expansion = _pushforward.push(
                    f, [x], [[weights.unsqueeze(0)]], n, record=False, **given
                )
            return _orders(_pushforward.coefficients(output, expansion), n, 1)[0]

        _check_elementwise(weighted[0] if weighted else again(weights), plain, weights, again)
    with _settings.grad_mode(record):
        orders = tuple(part * factor[k] if k else part for k, part in enumerate(plain))
        if record:
            return _pushforward.connected(orders, [x])
    return orders if _jet.is_jet(x) else detached(orders, {memory_of(x)})


def _orders(series: Series, n: int, lines: int) -> list[list[Any]]:
    """The coefficients up to n along each line."""
    rows = [entry(series, k, lines) for k in range(1, n + 1)]
    return [[series[0], *(row[line] for row in rows)] for line in range(lines)]
