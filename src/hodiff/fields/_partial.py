"""Partial derivatives of any order: single, mixed, as a Taylor series,
or computed when looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _compiled_callers, _reverse, _settings, _tree
from hodiff._core._call import call
from hodiff._core._graph import OutputGraph, detached
from hodiff.errors import InputError
from hodiff.fields._expansions import entries
from hodiff.fields._field import FieldCall, FieldOptions, Method, What, choose, push, released
from hodiff.jets import _jet, _pushforward
from hodiff.jets._series import entry

REVERSE_UP_TO = 3
"""Nested reverse passes are faster up to this total order (2-3 times), jets from there on."""


@overload
def partial(
    f: What,
    x: Tensor,
    index: int | Sequence[int],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[FieldOptions],
) -> Tensor: ...


@overload
def partial(
    f: What,
    x: Tensor,
    index: int | Sequence[int],
    *,
    has_aux: bool,
    **options: Unpack[FieldOptions],
) -> Any: ...


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
    r"""One partial derivative: `partial(f, x, (0, 0, 1))` is ∂³f/∂x₀²∂x₁, u_xxy.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, D)`.
        index: The coordinates to differentiate by, in any order, one for each derivative.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again. None: if grad mode is on.
        method: `"jets"`, `"reverse"`, or `"auto"`, which chooses the faster: reverse mode for few
            outputs up to a total order of 3, and jets for higher orders or more outputs.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(result, extra)`.

    Raises:
        InputError: *index* is empty, or names a coordinate that *x* does not have.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        Reverse: one pass per order, each about 2.7 times as expensive as the one before. Jets:
        nested series, one for each coordinate involved, of the order of its multiplicity; roughly
        the product of (1 + multiplicity) evaluations.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.partial(
        ...     lambda x: x[:, 0] ** 3 * x[:, 1] ** 2, torch.tensor([[1.0, 2.0]]), (0, 0, 1)
        ... )
        tensor([24.])
    """
    if isinstance(index, (tuple, list)) and not index:
        raise InputError(
            "index: got an empty one, expected coordinates such as (0, 0, 1). "
            "The value itself is f(x)."
        )
    derivatives = partials(
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
    return (*derivatives[0], derivatives[1]) if has_aux else next(iter(derivatives))


@overload
def partials(
    f: What,
    x: Tensor,
    indices: Sequence[int | Sequence[int]],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[FieldOptions],
) -> Partials: ...


@overload
def partials(
    f: What,
    x: Tensor,
    indices: Sequence[int | Sequence[int]],
    *,
    has_aux: bool,
    **options: Unpack[FieldOptions],
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
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, D)`.
        indices: The derivatives, each as a tuple of coordinates; `()` is the value.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the results can be differentiated again. None: if grad mode is on.
        method: `"jets"`, `"reverse"`, or `"auto"`, which chooses the faster by the highest order.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The derivatives, each with the shape of `f(x)`, as a tuple in the order of *indices*, which
        also knows them by multi-index: `u, u_x, u_xy = found`, and `derivatives[0, 1]` is u_xy.
        With *has_aux* `(result, extra)`.

    Raises:
        InputError: An index names a coordinate that *x* does not have.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        Reverse: one pass for each distinct prefix of the sorted indices. Jets: all pure derivatives
        in one expansion, and one nested expansion for each mixed derivative that no other contains.
        If `"auto"` finds several outputs, `f` is evaluated once more.

    Examples:
        >>> import torch, hodiff
        >>> found = hodiff.partials(
        ...     lambda x: x[:, 0] ** 2 * x[:, 1], torch.tensor([[3.0, 2.0]]), [0, (0, 0), (0, 1)]
        ... )
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
        raise InputError(
            f"x: points have shape {call.event}; partial derivatives need vectors, (D,)."
        )
    if not isinstance(indices, (tuple, list)):
        raise InputError(
            f"indices: got {indices!r}, expected a list of derivatives such as [(0,), (0, 1)]."
        )
    wanted = [parsed(each, call.event[0]) for each in indices]
    if not wanted:
        raise InputError("indices: got none, expected derivatives such as [(0,), (0, 1)].")
    with _settings.grad_mode(call.record):
        derivatives = _derivatives(call, wanted)
    return call.with_extra(Partials([derivatives[each] for each in wanted], wanted))


def _derivatives(call: FieldCall, wanted: Sequence[Index]) -> dict[Index, Any]:
    """Derivatives by the faster route: reverse for low orders of few outputs, which it takes one by
    one; jets take many together.
    """
    # inside `vmap` reverse passes have no leaves of their own
    low = max(map(len, wanted)) <= REVERSE_UP_TO and not _call.inside_vmap()
    function = not isinstance(call.f, Tensor) and not _jet.is_jet(call.x)
    if low and function and call.method == "auto":
        derivatives = _by_reverse(call, wanted, most=1 + _expansions(wanted))
        if derivatives is not None:
            return call.finish(derivatives)
    return choose(call, _by_jets, _by_reverse, wanted)


def _expansions(wanted: Sequence[Index]) -> int:
    """The number of nested expansions that mixed derivatives take:
    one for each that no other contains.
    """
    mixed = {each: Counter(each) for each in wanted if len(set(each)) > 1}
    return sum(not any(powers < other for other in mixed.values()) for powers in mixed.values())


def _by_reverse(
    call: FieldCall, wanted: Sequence[Index], *, most: int | None = None
) -> dict[Index, Tensor] | None:
    """Nested passes along the prefixes of the sorted indices, a component of f at a time.

    Of more components than `most` none: f is to be evaluated by another route, which draws the same
    random numbers.
    """
    prefixes = sorted({each[:k] for each in wanted for k in range(len(each) + 1)}, key=len)
    inner = {each[:-1] for each in prefixes if each}
    order = max(len(each) for each in wanted)
    with call.evaluation(passes=order) as graph:
        output = _arguments.check_output(graph.outputs)
        _arguments.check_rows(output, call.batch)
        columns = entries(output, call.batch_ndim)
        if most is not None and len(columns) > most and order:
            graph.context.random.restore()
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
                    (gradients[each],) = _reverse.vjp(
                        graph, [table[each]], [one], more=more, differentiated=len(each) < order - 1
                    )
            tables.append(table)
        results = [
            torch.stack([t[each] for t in tables], -1).reshape(output.shape) for each in wanted
        ]
        if order >= 2:
            second = [
                result for index, result in zip(wanted, results, strict=True) if len(index) >= 2
            ]
            graph.warn_of_zeros(second)
        call.note(graph)
    return dict(zip(wanted, released(graph, results), strict=True))


def _by_jets(call: FieldCall, wanted: Sequence[Index]) -> dict[Index, Any]:
    """Pure derivatives from one expansion in several directions, mixed ones from nested expansions.

    All of the same random numbers.
    """
    derivatives: dict[Index, Any] = {}
    random = _settings.RandomState(_jet.value_of(call.x).device)
    again = lambda: random.replayed() if derivatives else nullcontext()  # noqa: E731
    pure = [each for each in wanted if len(set(each)) <= 1]
    mixed = sorted((each for each in wanted if len(set(each)) > 1), key=len, reverse=True)
    for index in mixed:
        if index not in derivatives:
            with again():
                derivatives |= _mixed(call, index)
    if not all(each in derivatives for each in pure):
        with again():
            derivatives |= _pure(call, pure)
    return derivatives


def _pure(call: FieldCall, wanted: Sequence[Index]) -> dict[Index, Any]:
    axes = sorted({each[0] for each in wanted if each}) or [0]
    order = max(1, *(len(each) for each in wanted)) if len(wanted) > 1 else max(1, len(wanted[0]))
    factor = _pushforward.factorials(order, call.x.dtype)
    series, _ = push(call, [_pushforward.units(call.x, call.batch_ndim)[axes]], order)
    derivatives: dict[Index, Any] = {(): series[0]}
    for k in range(1, order + 1):
        rows = entry(series, k, len(axes)) * factor[k]
        derivatives |= {(axis,) * k: rows[i] for i, axis in enumerate(axes)}
    return derivatives


def _mixed(call: FieldCall, index: Index) -> dict[Index, Any]:
    """All derivatives that `index` contains: a series of series, one level for each coordinate."""
    powers = sorted(Counter(index).items())
    units = _pushforward.units(call.x, call.batch_ndim)

    def expand(level: int, x: Any) -> list[Any]:
        """The derivatives by the coordinates from `level` on, all those up to their powers."""
        if level == len(powers):
            return [call.f(x, *call.args, **(call.kwargs or {}))]
        axis, power = powers[level]
        seeds = [[units[axis : axis + 1]]]
        # An inner expansion that is not recorded would cut its point off from the outer ones.
        record = call.record or level > 0
        outputs, expansion = _pushforward.push(
            lambda y: expand(level + 1, y), [x], seeds, power, record=record
        )
        expanded = [_pushforward.coefficients(output, expansion) for output in outputs]
        factor = _pushforward.factorials(power, call.x.dtype)
        parts = [series[0] for series in expanded]
        return parts + [
            entry(series, k, 1)[0] * factor[k] for k in range(1, power + 1) for series in expanded
        ]

    # apart: in one tensor, a derivative would depend on all that others depend on
    derivatives = expand(0, call.x)
    _arguments.check_rows(derivatives[0], call.batch)
    keys: list[Index] = [()]
    for axis, power in reversed(powers):
        keys = [tuple(sorted((axis,) * k + key)) for k in range(power + 1) for key in keys]
    return dict(zip(keys, derivatives, strict=True))


def jet(
    f: Callable[..., Any],
    primals: Any,
    series: Any,
    *,
    scaled: bool = False,
    create_graph: bool | None = None,
) -> tuple[Any, Any]:
    r"""The Taylor coefficients of f(x(t)) from those of the path x(t) = Σ xₖ tᵏ, by Taylor mode.

    Args:
        f: A function of one tensor, or of several.
        primals: \(x(0)\): a tensor, or a tuple of them, one for each argument of `f`.
        series: The path's derivatives \(x'(0), x''(0), \dots\) up to the order wanted: a list of
            tensors shaped like the primal; for several primals a tuple of such lists of equal
            length.
        scaled: Whether coefficients are divided by k!, in *series* and in the result: \(x_k\)
            instead of \(x^{(k)}(0)\).
        create_graph: Whether the results can be differentiated again. None: if grad mode is on.

    Returns:
        `(value, coefficients)`: `f(x(0))`, and the list of the derivatives of \(f(x(t))\) at 0,
        each shaped like the value. Where `f` returns a container, each is such a container.

    Raises:
        InputError: *series* does not fit *primals*.
        GraphError: An operation has no rule, or the result does not depend on the primals.

    Cost:
        One evaluation of `f` on K + 1 vectors, with O(K²) products for each nonlinear operation.

    Examples:
        sin(t) = t - t³/6 + ...:

        >>> import torch, hodiff
        >>> hodiff.jet(
        ...     torch.sin,
        ...     torch.tensor(0.0),
        ...     [torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0)],
        ... )
        (tensor(0.), [tensor(1.), tensor(0.), tensor(-1.)])

    Reference:
        Griewank, A. and Walther, A. (2008). Evaluating Derivatives, chapter 13.
        doi:10.1137/1.9780898717761.
    """
    if not isinstance(primals, (Tensor, tuple, list)) and not _jet.is_jet(primals):
        raise InputError(
            f"primals: got {_arguments.kind(primals)}, expected a tensor, or a tuple of tensors."
        )
    if not isinstance(series, (tuple, list)):
        raise InputError(
            f"series: got {_arguments.kind(series)}, expected a list of tensors for each primal."
        )
    points, given = (
        ((primals,), (series,)) if isinstance(primals, Tensor) else (tuple(primals), tuple(series))
    )
    scaled = _arguments.is_set(scaled, "scaled")
    order = _check_series(points, given)
    record = _call.loss_recorded(create_graph)
    with _settings.grad_mode(record):
        factor = [1.0] * (order + 1) if scaled else _pushforward.factorials(order, points[0].dtype)
        seeds = [[(c / factor[k]).unsqueeze(0) for k, c in enumerate(each, 1)] for each in given]
        try:
            output, expansion = _pushforward.push(
                f, points, seeds, order, record=record, mixes=True
            )
        except _jet.NoRule as error:
            if not str(error).endswith(_jet.OTHER_ROUTE):
                raise
            other = "Write it with other operations; hodiff.jet has no other route."
            raise _jet.NoRule(error.operation, error.why, other) from error
        items, _, tree = _tree.flatten(output)
        coefficients = [_pushforward.coefficients(item, expansion) for item in items]
        rows = [
            _tree.rebuild(tree, iter([entry(each, k, 1)[0] * factor[k] for each in coefficients]))
            for k in range(1, order + 1)
        ]
        value = _tree.rebuild(tree, iter([each[0] for each in coefficients]))
    if record:
        return _pushforward.connected(
            (value, rows), (*points, *(c for each in given for c in each))
        )
    theirs = {*map(_tree.memory_of, [*points, *(c for each in given for c in each)])}
    return detached((value, rows), theirs)


def _check_series(points: Sequence[Any], given: Sequence[Any]) -> int:
    """The order, after a check that each path fits its primal."""
    if not points or len(points) != len(given):
        raise InputError(
            f"series: got {len(given)} for {len(points)} primals, expected one list for each."
        )
    for point, each in zip(points, given, strict=True):
        _arguments.check_real_tensor(point, "primals")
        if not isinstance(each, (list, tuple)) or not each or len(each) != len(given[0]):
            raise InputError(
                "series: expected a list of at least one tensor for each primal, "
                "all of the same length."
            )
        for coefficient in each:
            tensor = isinstance(coefficient, Tensor)
            if not tensor or coefficient.shape != point.shape or coefficient.dtype != point.dtype:
                got = (
                    (tuple(coefficient.shape), coefficient.dtype)
                    if tensor
                    else type(coefficient).__name__
                )
                raise InputError(
                    f"series: got {got}, expected tensors like the primal, "
                    f"{(tuple(point.shape), point.dtype)}."
                )
    return len(given[0])


# --- multi-indices: which partial derivatives are wanted, and a record of those found -------------


Index = tuple[int, ...]


def parsed(index: Any, size: int) -> Index:
    """A multi-index, sorted; a number is a derivative of first order."""
    index = (index,) if isinstance(index, int) and not isinstance(index, bool) else index
    if not isinstance(index, (tuple, list)):
        raise InputError(
            f"index: got {index!r}, expected a tuple of coordinates such as (0, 0, 1)."
        )
    for coordinate in index:
        if (
            isinstance(coordinate, bool)
            or not isinstance(coordinate, int)
            or not 0 <= coordinate < size
        ):
            raise InputError(f"index: got {coordinate!r}, but x has coordinates 0 to {size - 1}.")
    return tuple(sorted(index))


class Partials(tuple[Tensor, ...]):
    r"""Some partial derivatives, as a tuple in the requested order that also knows them by name.

    `u_x, u_yy = found` unpacks them, and `found[1, 1]` is \(u_{yy}\). `found[0]` is ambiguous (a
    position or a coordinate), so it raises.

    Attributes:
        indices: The multi-index of each, sorted.
    """

    indices: tuple[Index, ...]

    def __new__(cls, values: Iterable[Tensor] = (), indices: Sequence[Index] = ()) -> Partials:
        """Values in order, and the multi-index of each."""
        made = super().__new__(cls, values)
        made.indices = tuple(indices)
        return made

    def __getitem__(self, index: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One of them, by its multi-index in any order:
        `[0, 1]` and `[1, 0]` are the same derivative.
        """
        if not isinstance(index, tuple):
            raise InputError(
                f"index: got {index!r}, which could be a position or a coordinate. Unpack the "
                f"derivatives in the order requested, u_x, u_y = ..., or index by a multi-index, "
                f"[0,] or [0, 1]."
            )
        wanted = tuple(sorted(index))
        if wanted not in self.indices:
            raise InputError(
                f"index: {index!r} was not requested; "
                f"there are {', '.join(map(str, self.indices))}."
            )
        return tuple.__getitem__(self, self.indices.index(wanted))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.indices

    def __repr__(self) -> str:
        pairs = zip(self.indices, self, strict=False)
        return f"Partials({', '.join(f'{index}: {value!r}' for index, value in pairs)})"


# --- the derivatives of a tensor, computed when they are looked at, and once ----------------------


def derivatives_of(u: Tensor, x: Tensor, *, batch_ndim: int = 1) -> Derivatives:
    r"""The partial derivatives of a tensor already computed, each computed on first access and then
    kept.

    For losses written from pieces, as in physics-informed networks: `d[0]` is \(\partial u /
    \partial x_0\), `d[0, 1]` is \(\partial^2 u / \partial x_0 \partial x_1\), to any order. The
    pieces share common work.

    Args:
        u: A tensor computed from *x*, with one or several numbers for each point: `(N,)`, `(N, 1)`
            or `(N, m)`, each row from its own point alone. Its graph is left intact.
        x: The points, `(*batch, D)`, which require grad.
        batch_ndim: How many leading dimensions of *x* index independent samples.

    Returns:
        A view. `d[i]` and `d[i, j, ...]` have the shape of *u*, and the order of the coordinates
        does not matter. If grad mode is on, they can be differentiated with respect to everything
        that *u* can; under `torch.no_grad()` they are detached.

    Raises:
        InputError: *u* is a function (evaluate it: `u = f(x)`; or use `partials`), or there is no
            such coordinate.
        GraphError: *u* does not depend on *x*; or as for `grad`. From the second order on (whose
            results are differentiable, which makes three) that includes layer, batch and instance
            norm, whose third derivative PyTorch gets wrong (but not by fixed statistics, as batch
            norm in `eval()`); `partials` takes the function, and is right there.

    Cost:
        One reverse pass for each gradient, of *u* or of one of its derivatives, on first access.
        `d[0]` and `d[1]` share one, and `d[0, 0]` and `d[0, 1]` another; for m numbers at each
        point, m times as many. Everything that was computed is kept as long as the view, including
        memory and graphs.

    Examples:
        u = x² t solves u_xx = 2 u_t / x²:

        >>> import torch, hodiff
        >>> x = torch.tensor([[3.0, 2.0]], requires_grad=True)
        >>> u = x[:, 0] ** 2 * x[:, 1]
        >>> d = hodiff.derivatives_of(u, x)
        >>> d[0].detach(), d[1].detach(), d[0, 0].detach(), d[1, 0] is d[0, 1]
        (tensor([12.]), tensor([9.]), tensor([4.]), True)
    """
    if not isinstance(u, Tensor):
        raise InputError(
            f"u: got {_arguments.kind(u)}, expected a tensor computed from x: u = f(x). For a "
            f"function, use hodiff.partials(f, x, [...])."
        )
    _arguments.check_real_tensor(_arguments.check_output(u, "u"), "u")
    if isinstance(x, (tuple, list, dict)):
        raise InputError(
            f"x: got {_arguments.kind(x)}, expected the one tensor that u was computed from. Join "
            f"the columns first: z = torch.cat([x, t], 1), u = net(z), d = "
            f"hodiff.derivatives_of(u, z); then d[0] is u_x and d[1] is u_t. Or take them one by "
            f"one: hodiff.derivatives_of(u, x) and hodiff.derivatives_of(u, t)."
        )
    _arguments.check_real_tensor(x, "x")
    batch = _arguments.check_batch([x], ["x"], batch_ndim)
    if x.ndim != batch_ndim + 1:
        raise InputError(
            f"x: points have shape {tuple(x.shape[batch_ndim:])}; partial derivatives need "
            "vectors, (D,)."
        )
    _arguments.check_rows(u, batch, "u: has")
    return Derivatives(u, x, batch_ndim)


class Derivatives:
    """The result of `derivatives_of`: `d[0, 1]` is a derivative of the tensor,
    computed at the first look.
    """

    def __init__(self, u: Tensor, x: Tensor, batch_ndim: int) -> None:
        self._u = u
        self._x = x
        self._batch_ndim = batch_ndim
        self._known: dict[Index, Tensor] = {(): u}
        # For each number of a point one tensor with a graph of its own: a pass through one visits
        # no other's.
        with _settings.recording():
            self._columns: dict[Index, Sequence[Tensor]] = {(): entries(u, batch_ndim)}
        self._gradients: dict[Index, list[Tensor]] = {}

    def __getitem__(self, index: Any) -> Tensor:
        wanted = parsed(index, self._x.shape[-1])
        recorded = torch.is_grad_enabled()
        if wanted not in self._known:
            with _settings.recording():
                columns = self._partial(wanted)
                whole = self._u.ndim > self._batch_ndim
                self._known[wanted] = (
                    torch.stack([*columns], -1).reshape(self._u.shape) if whole else columns[0]
                )
        return self._known[wanted] if recorded else detached(self._known[wanted])

    def __iter__(self) -> Any:
        raise TypeError(
            "there are derivatives of every order, so iteration would not end; index each: d[0], "
            "d[0, 1]."
        )

    def __repr__(self) -> str:
        known = ", ".join(map(str, sorted(index for index in self._known if index)))
        return (
            f"Derivatives(of {tuple(self._u.shape)} by {tuple(self._x.shape)}, computed: "
            f"{known or 'none'})"
        )

    def _partial(self, index: Index) -> Sequence[Tensor]:
        if index not in self._columns:
            inner, last = self._lower(index)
            if inner not in self._gradients:
                self._gradients[inner] = self._gradient(self._partial(inner), len(index))
            self._columns[index] = [
                gradient.select(-1, last) for gradient in self._gradients[inner]
            ]
        return self._columns[index]

    def _lower(self, index: Index) -> tuple[Index, int]:
        """A derivative of one order less, one whose gradient is known where there is one,
        and the coordinate left.
        """
        for place in reversed(range(len(index))):
            inner = index[:place] + index[place + 1 :]
            if inner in self._gradients:
                return inner, index[place]
        return index[:-1], index[-1]

    def _gradient(self, columns: Sequence[Tensor], order: int) -> list[Tensor]:
        """The gradients of each number at each point, `(*batch, D)`."""
        # The passes below count too: of the second order on, a differentiable result is a third
        # derivative.
        with OutputGraph(
            call([*columns], self._x, order, create_graph=True, batch_ndim=self._batch_ndim)
        ) as graph:
            return [
                _reverse.vjp(graph, [column], [torch.ones_like(column)])[0] for column in columns
            ]


_compiled_callers.mark(Derivatives)  # `derivatives_of` gives these out
