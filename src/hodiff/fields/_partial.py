"""Single and mixed partial derivatives of any order, and truncated Taylor series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _checks, _compiled_callers, _modes, _nesting, _reverse, _tree
from hodiff._core._graph import detached
from hodiff._core._options import is_set
from hodiff.calculus._along import entries
from hodiff.errors import InputError
from hodiff.fields._expand import Common, FieldCall, Method, choose, released
from hodiff.fields._indices import Index, Partials, parsed
from hodiff.jets import _jet, _push
from hodiff.jets._registry import OTHER_ROUTE, NoRule

What = Callable[..., Any] | Tensor

REVERSE_UP_TO = 3
"""Nested reverse passes are faster up to this total order (2-3 times), jets from there on."""


@overload
def partial(
    f: What, x: Tensor, index: int | Sequence[int], *, has_aux: Literal[False] = False, **options: Unpack[Common]
) -> Tensor: ...


@overload
def partial(f: What, x: Tensor, index: int | Sequence[int], *, has_aux: bool, **options: Unpack[Common]) -> Any: ...


def partial(
    f: What,
    x: Tensor,
    index: int | Sequence[int],
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""One partial derivative: `partial(f, x, (0, 0, 1))` is \(\partial^3 f / \partial x_0^2 \partial x_1\), u_xxy.

    Args:
        f: A function of *x*, as for `laplacian`.
        x: The points, `(*batch, D)`.
        index: The coordinates to differentiate by, in any order, one for each derivative.
        has_aux: Whether `f` returns `(value, extra)`, as for `laplacian`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the result can be differentiated again, as for `laplacian`.
        method: `"jets"`, `"reverse"`, or `"auto"`: reverse for a few outputs up to a total order of 3, jets beyond,
            and for as many outputs as make up for the mixed derivatives (two, where there are none).
        check_independence: Whether to test that samples are independent, as for `hodiff.grad`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(that, extra)`.

    Raises:
        InputError: *index* is empty, or names a coordinate that *x* does not have.
        GraphError: As for `laplacian`.

    Cost:
        Reverse: a pass per order, each about 2.7 times as dear as the one before. Jets: nested series,
        one for each coordinate involved, of its multiplicity; the product of (1 + multiplicity)
        evaluations, roughly.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.partial(lambda x: x[:, 0] ** 3 * x[:, 1] ** 2, torch.tensor([[1.0, 2.0]]), (0, 0, 1))
        tensor([24.])
    """
    if isinstance(index, (tuple, list)) and not index:
        raise InputError("index: is empty; expected coordinates such as (0, 0, 1). The value itself is f(x).")
    found = partials(
        f,
        x,
        [index],
        has_aux=has_aux,
        batch_ndim=batch_ndim,
        create_graph=create_graph,
        method=method,
        check_independence=check_independence,
        args=args,
        kwargs=kwargs,
    )
    return (*found[0], found[1]) if has_aux else next(iter(found))


@overload
def partials(
    f: What,
    x: Tensor,
    indices: Sequence[int | Sequence[int]],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[Common],
) -> Partials: ...


@overload
def partials(
    f: What, x: Tensor, indices: Sequence[int | Sequence[int]], *, has_aux: bool, **options: Unpack[Common]
) -> Any: ...


def partials(
    f: What,
    x: Tensor,
    indices: Sequence[int | Sequence[int]],
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""Several partial derivatives that share their work.

    Args:
        f: A function of *x*, as for `laplacian`.
        x: The points, `(*batch, D)`.
        indices: The derivatives, each as for `partial`; `()` is the value.
        has_aux: Whether `f` returns `(value, extra)`, as for `laplacian`.
        batch_ndim: Leading dimensions of *x* that index independent samples.
        create_graph: Whether the results can be differentiated again, as for `laplacian`.
        method: As for `partial`, by the highest order asked for.
        check_independence: Whether to test that samples are independent, as for `hodiff.grad`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The derivatives, each with the shape of `f(x)`, as a tuple in the order of *indices*, which also knows them by
        multi-index: `u, u_x, u_xy = found`, and `found[0, 1]` is u_xy. With *has_aux* `(that, extra)`.

    Raises:
        InputError: An index names a coordinate that *x* does not have.
        GraphError: As for `laplacian`.

    Cost:
        Reverse: one pass for each distinct prefix of the sorted indices. Jets: all pure derivatives
        together in one expansion, and one nested expansion for each mixed one that no other contains.
        Where `"auto"` finds several outputs, `f` is evaluated once more.

    Examples:
        >>> import torch, hodiff
        >>> found = hodiff.partials(lambda x: x[:, 0] ** 2 * x[:, 1], torch.tensor([[3.0, 2.0]]), [0, (0, 0), (0, 1)])
        >>> u_x, u_xx, u_xy = found
        >>> u_x, u_xx, found[0, 1]
        (tensor([12.]), tensor([4.]), tensor([6.]))
    """
    call = FieldCall(
        "partials",
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
    if len(call.event) != 1:
        raise InputError(f"x: has points of shape {call.event}; partial derivatives need vectors, (D,).")
    if not isinstance(indices, (tuple, list)):
        raise InputError(f"indices: got {indices!r}, expected a list of derivatives such as [(0,), (0, 1)].")
    wanted = [parsed(each, call.event[0]) for each in indices]
    if not wanted:
        raise InputError("indices: is empty; expected derivatives such as [(0,), (0, 1)].")
    with call.grad_mode():
        found = _found(call, wanted)
    return call.with_extra(Partials([found[each] for each in wanted], wanted))


def _found(call: FieldCall, wanted: Sequence[Index]) -> dict[Index, Any]:
    """By the route that is faster: reverse for low orders of few outputs, which it takes one by one."""
    jets, reverse = (lambda: _by_jets(call, wanted)), (lambda: _by_reverse(call, wanted))
    if max(len(each) for each in wanted) > REVERSE_UP_TO or _jet.is_jet(call.x):
        return choose(call, jets, reverse)
    if call.method != "auto" or isinstance(call.f, Tensor) or torch.compiler.is_compiling():
        return choose(call, jets, reverse, prefer="reverse")
    found = _by_reverse(call, wanted, most=1 + _expansions(wanted))
    return choose(call, jets, reverse) if found is None else call.finish(found)  # jets take many outputs together


def _expansions(wanted: Sequence[Index]) -> int:
    """How many nested expansions mixed derivatives take: one for each that no other contains."""
    mixed = {each: Counter(each) for each in wanted if len(set(each)) > 1}
    return sum(not any(powers < other for other in mixed.values()) for powers in mixed.values())


def _by_reverse(call: FieldCall, wanted: Sequence[Index], *, most: int | None = None) -> dict[Index, Tensor] | None:
    """Nested passes along the prefixes of the sorted indices, a component of f at a time.

    Of more components than `most` none: f is to be evaluated by another route, which draws the same random numbers.
    """
    prefixes = sorted({each[:k] for each in wanted for k in range(len(each) + 1)}, key=len)
    inner = {each[:-1] for each in prefixes if each}
    order = max(len(each) for each in wanted)
    with call.evaluation(passes=order) as ev:
        output = _checks.check_output(ev.outputs)
        _push.check_batch(output, call.batch)
        columns = entries(output, call.batch_ndim)
        if most is not None and len(columns) > most and order:
            ev.restart()
            return None
        tables = []
        for column in columns:
            table: dict[Index, Tensor] = {(): column}
            gradients: dict[Index, Tensor] = {}
            for each in prefixes:
                if each:
                    table[each] = gradients[each[:-1]].select(-1, each[-1])
                if each in inner:
                    highest = max(inner, key=lambda p: (len(p), prefixes.index(p)))
                    more = each != highest or column is not columns[-1]
                    one = torch.ones_like(table[each])
                    (gradients[each],) = _reverse.pull(
                        ev, [table[each]], [one], more=more, differentiated=len(each) < order - 1
                    )
            tables.append(table)
        results = [torch.stack([t[each] for t in tables], -1).reshape(output.shape) for each in wanted]
        call.note(ev)
    return dict(zip(wanted, released(ev, results), strict=True))


def _by_jets(call: FieldCall, wanted: Sequence[Index]) -> dict[Index, Any]:
    """Pure derivatives from one expansion in several directions, mixed ones from nested expansions."""
    found: dict[Index, Any] = {}
    pure = [each for each in wanted if len(set(each)) <= 1]
    mixed = sorted((each for each in wanted if len(set(each)) > 1), key=len, reverse=True)
    for index in mixed:
        if index not in found:
            found |= _mixed(call, index)
    if not all(each in found for each in pure):
        found |= _pure(call, pure)
    return found


def _pure(call: FieldCall, wanted: Sequence[Index]) -> dict[Index, Any]:
    axes = sorted({each[0] for each in wanted if each}) or [0]
    order = max(1, *(len(each) for each in wanted)) if len(wanted) > 1 else max(1, len(wanted[0]))
    factor = _push.factorials(order, call.x.dtype)
    seeds = _push.units(call.x, call.batch_ndim)[axes]
    output, expansion = _push.push(
        call.f, [call.x], [[seeds]], order, record=call.record, args=call.args, kwargs=call.kwargs
    )
    series = _push.coefficients(output, expansion, call.batch)
    found: dict[Index, Any] = {(): series[0]}
    for k in range(1, order + 1):
        rows = _push.entry(series, k, len(axes)) * factor[k]
        found |= {(axis,) * k: rows[i] for i, axis in enumerate(axes)}
    return found


def _mixed(call: FieldCall, index: Index) -> dict[Index, Any]:
    """All derivatives that `index` contains: a series of series, one level for each coordinate."""
    powers = sorted(Counter(index).items())
    units = _push.units(call.x, call.batch_ndim)

    def expand(level: int, x: Any) -> Any:
        """A stack of the derivatives by the coordinates from `level` on, all those up to their powers."""
        if level == len(powers):
            return call.f(x, *call.args, **(call.kwargs or {})).unsqueeze(0)
        axis, power = powers[level]
        seeds = [[units[axis : axis + 1]]]
        # An inner expansion that is not recorded would cut its point off from the outer ones.
        record = call.record or level > 0
        output, expansion = _push.push(lambda y: expand(level + 1, y), [x], seeds, power, record=record)
        series = _push.coefficients(output, expansion)
        factor = _push.factorials(power, call.x.dtype)
        parts = [series[0], *(_push.entry(series, k, 1)[0] * factor[k] for k in range(1, power + 1))]
        return torch.cat(parts, 0)

    stacked = expand(0, call.x)
    _push.check_batch(stacked[0], call.batch)
    keys: list[Index] = [()]
    for axis, power in reversed(powers):
        keys = [tuple(sorted((axis,) * k + key)) for k in range(power + 1) for key in keys]
    return dict(zip(keys, stacked.unbind(0), strict=True))


def jet(
    f: Callable[..., Any],
    primals: Any,
    series: Any,
    *,
    scaled: bool = False,
    create_graph: bool | None = None,
) -> tuple[Any, Any]:
    r"""The Taylor coefficients of \(f(x(t))\) from those of the path \(x(t) = \sum_k x_k t^k\): Taylor mode itself.

    Args:
        f: A function of one tensor, or of several.
        primals: \(x(0)\): a tensor, or a tuple of them, one for each argument of `f`.
        series: The path's derivatives \(x'(0), x''(0), \dots\) up to the order wanted: a list of
            tensors shaped like the primal; for several primals a tuple of such lists of equal length.
        scaled: Whether coefficients are divided by k!, in *series* and in the result: \(x_k\) instead
            of \(x^{(k)}(0)\).
        create_graph: Whether the results can be differentiated again, as for `laplacian`.

    Returns:
        `(value, coefficients)`: `f(x(0))`, and the list of the derivatives of \(f(x(t))\) at 0, each shaped
        like the value. Where `f` returns a container, each is such a container.

    Raises:
        InputError: *series* does not fit *primals*.
        GraphError: An operation has no rule, or the result does not depend on the primals.

    Cost:
        One evaluation of `f` on K + 1 vectors, with O(K²) products for each nonlinear operation.

    Examples:
        sin(t) = t - t³/6 + ...:

        >>> import torch, hodiff
        >>> hodiff.jet(torch.sin, torch.tensor(0.0), [torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0)])
        (tensor(0.), [tensor(1.), tensor(0.), tensor(-1.)])

    Reference:
        Griewank, A. and Walther, A. (2008). Evaluating Derivatives, chapter 13. doi:10.1137/1.9780898717761.
    """
    if not isinstance(primals, (Tensor, tuple, list)) and not _jet.is_jet(primals):
        raise InputError(f"primals: is a {type(primals).__name__}; expected a tensor, or a tuple of tensors.")
    if not isinstance(series, (tuple, list)):
        raise InputError(f"series: is a {type(series).__name__}; expected a list of tensors for each primal.")
    points, given = ((primals,), (series,)) if isinstance(primals, Tensor) else (tuple(primals), tuple(series))
    scaled = is_set(scaled, "scaled")
    order = _check_series(points, given)
    record = _nesting.loss_recorded(create_graph)
    with _modes.grad_mode(record):
        factor = [1.0] * (order + 1) if scaled else _push.factorials(order, points[0].dtype)
        seeds = [[(c / factor[k]).unsqueeze(0) for k, c in enumerate(each, 1)] for each in given]
        if torch.compiler.is_compiling():
            _compiled_callers.check_point([point for point in points if not _jet.is_jet(point)])
        try:
            output, expansion = _push.push(f, points, seeds, order, record=record)
        except NoRule as error:
            if error.way_out != OTHER_ROUTE:
                raise
            other = "Write it with other operations; hodiff.jet has no other route."
            raise NoRule(error.operation, error.why, other) from error
        items, _, tree = _tree.flatten(output)
        found = [_push.coefficients(item, expansion) for item in items]
        rows = [
            _tree.rebuild(tree, iter([_push.entry(each, k, 1)[0] * factor[k] for each in found]))
            for k in range(1, order + 1)
        ]
        value = _tree.rebuild(tree, iter([each[0] for each in found]))
    if record:
        return _push.connected((value, rows), (*points, *(c for each in given for c in each)))
    return (detached(value), [detached(row) for row in rows])


def _check_series(points: Sequence[Any], given: Sequence[Any]) -> int:
    """The order, after a check that each path fits its primal."""
    if not points or len(points) != len(given):
        raise InputError(f"series: has {len(given)} entries for {len(points)} primals; expected one list for each.")
    for point, each in zip(points, given, strict=True):
        if not _jet.is_jet(point):
            _checks.check_real_tensor(point, "primals")
        if not isinstance(each, (list, tuple)) or not each or len(each) != len(given[0]):
            raise InputError("series: expected a list of at least one tensor for each primal, all of one length.")
        for coefficient in each:
            tensor = isinstance(coefficient, Tensor)
            if not tensor or coefficient.shape != point.shape or coefficient.dtype != point.dtype:
                got = (tuple(coefficient.shape), coefficient.dtype) if tensor else type(coefficient).__name__
                raise InputError(
                    f"series: holds {got}; expected tensors like the primal, {(tuple(point.shape), point.dtype)}."
                )
    return len(given[0])
