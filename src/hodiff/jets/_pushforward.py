"""Pushing a series through a function: the only place where jets are made;
`report` tells its operations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _messages, _needed, _nodes, _refusals, _tree
from hodiff._core._call import call, cut
from hodiff._core._lending import EvaluationContext
from hodiff.errors import GraphError, HodiffError, InputError
from hodiff.jets import _jet, _series
from hodiff.jets._series import CoefficientTooLarge, Expansion, Series


def units(x: Any, batch_ndim: int) -> Tensor:
    """The coordinate directions of one sample, `(D, 1, ..., *event)`: the same for every sample."""
    value = _jet.value_of(x)
    count = (event := value.shape[batch_ndim:]).numel()
    return torch.eye(count, dtype=value.dtype, device=value.device).reshape(
        count, *[1] * batch_ndim, *event
    )


def push(
    f: Callable[..., Any],
    points: Sequence[Any],
    seeds: Sequence[Sequence[Any]],
    order: int,
    *,
    groups: int | None = None,
    weights: Tensor | None = None,
    record: bool = True,
    counter: Any = None,
    max_bytes: float | None = None,
    mixes: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, Expansion]:
    """F at jets: what it returns, with jets in it, and their expansion.

    Args:
        f: The user's function, called with one jet for each of *points*.
        points: Where the expansion begins.
        seeds: For each point its coefficients 1, 2, ...: `(R, *shape)` or broadcastable; missing
            ones are zero.
        order: K.
        groups: How many sums over directions the top coefficient keeps; None keeps every direction.
        weights: A weight for each direction in those sums.
        record: Whether the result can be differentiated by reverse mode.
        counter: What is told of each rule: its operation's name, its kind, its time.
        max_bytes: How many bytes a coefficient may take; `CoefficientTooLarge` is raised where one
            would take more.
        mixes: Whether `f` may mix samples, as batch norm in training mode does.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.
    """
    _needed.check("Taylor mode")
    rows = next(filter(torch.is_tensor, chain(*seeds))).shape[0]
    # No leaves and no passes of the road's own: the series is what comes out of it.
    where = points[0] if len(points) == 1 else tuple(points)
    request = call(
        f,
        where,
        passes=order,
        create_graph=False,
        unpack_point=len(points) > 1,
        args=args,
        kwargs=kwargs,
    )
    with EvaluationContext(request) as context:
        context.remember()
        expansion = Expansion(
            _series.begin(context.undo), order, rows,
            groups=groups, weights=weights, record=record, counter=counter, mixes=mixes,
        )  # fmt: skip
        # else it is small: that of all samples
        if seeds[0][0] is None or seeds[0][0].shape[1:] == points[0].shape:
            expansion.max_bytes = max_bytes
        jets, bases = _jets(points, seeds, expansion)
        expansion.max_bytes = max_bytes
        seen = filterfalse(Tensor.is_inference, map(_jet.value_of, points))
        try:
            output = _jet.settled(context.run(jets, [*seen]))
            if expansion.refused is not None:  # which f has caught, to go another way
                raise expansion.refused
        except Exception as error:
            _refuse_in_other_words(error, expansion, context)
            raise
        finally:
            expansion.refused = None  # it has frames with jets
        _refuse_bypass(points, bases, output, expansion)
        if record and context.packs_blocks:
            raise _jet.NoRule(
                "a checkpointed block, inside another checkpoint or saved_tensors_hooks"
            )
    return output, expansion


def _refuse_in_other_words(
    error: Exception, expansion: Expansion, context: EvaluationContext
) -> None:
    """Raise in the words of Taylor mode what f has met because its argument is a jet, and PyTorch
    says in its own.

    The interpreter of TorchScript wraps what its operations raise; Dynamo, where f is the first to
    load it, raises on jets what it likes (where it was there before, it is off); and other code
    speaks of the type, or of a tensor without data.
    """
    if isinstance(error, (HodiffError, CoefficientTooLarge)):
        return
    if expansion.refused is not None:
        raise expansion.refused from error
    if context.has_loaded_dynamo:
        raise _jet.NoRule(
            "torch.compile, or an operator that it runs (torch.cond, ...), inside f"
        ) from error
    if re.search(r"\bJet\b|\bmeta\b|incompatible tensor type|a leaf Variable", str(error)):
        raise _jet.NoRule("what f does", f"{type(error).__name__}: {error}") from error


def _jets(
    points: Sequence[Any], seeds: Sequence[Sequence[Any]], expansion: Expansion
) -> tuple[list[Any], list[Any]]:
    """A jet for each point, and the values that they begin with."""
    for outer in _jet.jets_among([*points, *chain(*seeds)]):
        outer.expansion.nests = True
    bases = [base(point, expansion.record) for point in points]
    missing = [[None] * (expansion.order - len(given)) for given in seeds]
    rows = zip(bases, seeds, missing, strict=True)
    return [_jet.wrap([point, *given, *rest], expansion) for point, given, rest in rows], bases


def base(point: Any, record: bool) -> Any:
    """The value that an expansion begins with: an alias of the caller's tensor,
    or a copy without its graph.
    """
    if isinstance(point, _jet.Jet):
        return point if record else point.detach()
    if point.is_inference():
        point = point.clone()
    if not record:
        return cut(point)
    return point.view_as(point) if point.requires_grad else point


def _refuse_bypass(
    points: Sequence[Any], bases: Sequence[Any], output: Any, expansion: Expansion
) -> None:
    """Raise where `f` reaches the point other than through its argument: by the result,
    or by a constant in it.
    """
    value = _jet.value_of(output)  # a jet's is made of what has been met
    plain = value is output and isinstance(value, Tensor) and value.requires_grad
    roots = [*expansion.constants.values(), *([value] if plain else [])]
    made = list(filter(attrgetter("grad_fn"), roots))
    if made and any(map(_jet.is_jet, _nodes.survey(made).variables())):
        raise _jet.NoRule(*_jet.BY_A_FUNCTION)
    wanted = list(filter(attrgetter("requires_grad"), points))
    if not wanted or _jet.jets_among(points):
        return
    stop = {start.grad_fn for start in bases if start is not None and start.grad_fn is not None}
    graph = _nodes.survey(roots, stop - {point.grad_fn for point in wanted})
    if any(graph.contains(point) for point in wanted):
        raise _refusals.bypass("x")


def coefficients(output: Any, expansion: Expansion, batch: Sequence[int] = ()) -> Series:
    """The series of a single output, checked to be a real tensor with the batch in front."""
    value = _jet.value_of(output)
    _arguments.check_output(value)
    _arguments.check_rows(value, batch)
    if not _jet.belongs(output, expansion) and not expansion.nests:
        raise GraphError(
            "the result of f does not depend on x: it was computed from other tensors, or every "
            "path was cut (.detach(), .data, a no_grad block, a comparison). Use the argument that "
            "f is given."
        )
    return _jet.series_of(output, expansion)


def factorials(order: int, dtype: torch.dtype) -> list[float]:
    """The factors between coefficients and derivatives: 0!, 1!, ...

    up to the order, as far as the dtype can hold both.
    """
    if math.log(torch.finfo(dtype).tiny) + math.lgamma(order + 1) > 0:
        raise InputError(
            f"order {order} is too high for Taylor mode in {dtype}: coefficient n is the "
            f"derivative divided by n!, which underflows. Use orders up to 170 in torch.float64, "
            f"up to 33 in torch.float32."
        )
    return [float(math.factorial(k)) for k in range(order + 1)]


def connected(result: Any, points: Iterable[Any]) -> Any:
    """A differentiable result that came out constant (of a polynomial)
    is still a function of the points: plus 0.
    """
    ends = [
        x
        for x in points
        if isinstance(x, Tensor) and x.requires_grad and not isinstance(x, _jet.Jet)
    ]
    if not ends:
        return result
    items, _, tree = _tree.flatten(result)
    for index, item in enumerate(items):
        if isinstance(item, Tensor) and not _jet.is_jet(item) and not item.requires_grad:
            items[index] = item + sum(x.reshape(-1)[:0].sum().to(item) for x in ends)
    return items[0] if tree is None else _tree.rebuild(tree, iter(items))


# --- `report`: which operations of a function have a rule, what each costs ------------------------


@dataclass(frozen=True)
class Operation:
    """One operation that `f` used.

    Attributes:
        name: Its name in PyTorch.
        kind: The kind of its rule: elementwise, bilinear, linear, special, constant, fused (one
            formula, at first order), or `"fallback"`.
        calls: How often it was called.
        seconds: The time that its rule took, in all.
    """

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Report(_messages.Reported):
    """The way in which Taylor mode computed a function; `str` of it is a table.

    Attributes:
        order: The order of the expansion.
        directions: How many directions it carried.
        operations: The operations of `f`, the most expensive first. Composite operations appear as
            their parts.
        missing: The operation that stopped the evaluation; None if the evaluation succeeded.
    """

    order: int
    directions: int
    operations: tuple[Operation, ...]
    missing: str | None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The operations that had no rule of their own and went through nested reverse mode."""
        return tuple(each.name for each in self.operations if each.kind == "fallback")

    def __str__(self) -> str:
        lines = [f"Taylor mode, order {self.order}, {self.directions} direction(s)"]
        lines += [
            f"  {each.name:<24} {each.kind:<12} {each.calls:>5} calls {1e3 * each.seconds:>9.2f} ms"
            for each in self.operations
        ]
        if self.missing:
            lines.append(f"  stopped: {self.missing}")
        return "\n".join(lines)


def _summed(counted: Sequence[tuple[str, str, float]]) -> tuple[Operation, ...]:
    """The operations whose calls were counted, the dearest first."""
    spent: dict[tuple[str, str], list[float]] = {}
    for name, kind, seconds in counted:
        spent.setdefault((name, kind), []).append(seconds)
    operations = [Operation(*key, len(each), sum(each)) for key, each in spent.items()]
    return tuple(sorted(operations, key=lambda each: -each.seconds))


def report(
    f: Callable[..., Any],
    x: Tensor,
    *,
    order: int = 2,
    batch_ndim: int = 1,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """The way in which Taylor mode computes each operation of `f`, by a rule or by nested reverse
    mode, and the times.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: A tensor of shape `(*batch, *event)`.
        order: The order of the expansion; 2 is that of a Laplacian.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A record with one row for each operation; printed, it is a table.

    Raises:
        InputError: *x* is not a real floating-point tensor.

    Cost:
        One evaluation of `f` in Taylor mode, in as many directions as a sample of *x* has entries.

    Examples:
        >>> import torch, hodiff
        >>> found = hodiff.jets.report(
        ...     lambda x: torch.logaddexp(x.sin(), x).sum(-1), torch.ones(1, 2)
        ... )
        >>> sorted((each.name, each.kind) for each in found.operations)
        [('logaddexp', 'fallback'), ('sin', 'elementwise'), ('sum', 'linear')]
    """
    _arguments.check_real_tensor(x, "x")
    _arguments.check_batch([x], ["x"], batch_ndim)
    _arguments.check_integer(order, "order", least=1)
    if isinstance(f, Tensor):
        raise InputError("f: got a tensor already computed; give the function, not its value.")
    counted, missing = list[Any](), None
    seeds = units(x, batch_ndim)
    try:
        push(
            f, [x], [[seeds]], order, record=False, args=args, kwargs=kwargs,
            counter=lambda *rule: counted.append(rule),
        )  # fmt: skip
    except _jet.NoRule as error:
        missing = str(error)
    return Report(order, len(seeds), _summed(counted), missing)
