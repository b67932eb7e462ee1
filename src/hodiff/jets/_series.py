r"""Arithmetic of truncated Taylor series in several directions at once.

A series is a list of K + 1 scaled coefficients: coefficient k belongs to \(t^k\), so it is the k-th
derivative over k!. Coefficient 0 has the shape S of the value. The others have one more dimension
in front, for the R directions, and are *broadcastable* to `(R, *S)`: what does not depend on the
sample stays small. None is zero, structurally.

The last coefficient enters every operation linearly (Faà di Bruno: \(y_K = f'(x_0) x_K + \dots\),
the dots being terms in \(x_1 \dots x_{K-1}\)), so where only the sum over directions is wanted,
only the sum is carried: its leading dimension is `groups` (1, or as many sums as are kept apart)
instead of R.

Reference:
    Griewank, A. and Walther, A. (2008). Evaluating Derivatives, chapter 13.
    doi:10.1137/1.9780898717761. Dangel, F. et al. (2025). Collapsing Taylor Mode Automatic
    Differentiation. arXiv:2505.13644.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _versions
from hodiff._core._settings import InTime, Undo

Series = list[Any]
"""Coefficients: tensors (or jets of an outer expansion), numbers among derivatives,
None for zero.
"""


TILE_BYTES = 2**18
"""A product of coefficients that is summed at once need not leave the processor's nearer caches."""


class CoefficientTooLarge(Exception):
    """A coefficient would take more memory than its expansion allows; fields then expand in parts.

    It is raised with the bytes of one direction's.
    """


class _Inside(threading.local):
    """The state of this thread: expansions, rules (a disabled grad mode is ours there), bodies."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.rules = 0
        self.bodies: list[Any] = []


inside = _Inside()

# --- what jets ask of PyTorch by private names ----------------------------------------------------

TRACERS = "torch.fx.experimental.proxy_tensor"
"""The module of `make_fx`, which whoever traces has loaded."""


def without_data(cls: type, value: Tensor, **options: Any) -> Any:
    """A tensor of a class of ours that has the shape and dtype of another, and no data."""
    plain: Any = Tensor
    return plain._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, **options)


def surroundings() -> tuple[Any, ...]:
    """The transform of `torch.func` and the tracer that operations run in now:
    a jet knows those it was made in.
    """
    # A mode below autograd, or one above it (`make_fx(pre_dispatch=True)`).
    any_mode = _versions.count_below() or _versions.is_included(torch.DispatchKey.PreDispatch)
    # Another thread may be loading the module.
    tracer = getattr(sys.modules.get(TRACERS), "get_proxy_mode", type(None))() if any_mode else None
    return len(_versions.transforms() or ()), tracer, torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def begin(undo: Undo) -> int:
    """Begin an expansion, until it is undone, and give its number: later ones have higher numbers.

    Of the outermost the beginning switches forward mode on: the engine switches it off for the
    forward of an `autograd.Function`, and nothing else does but the user's inference mode. So it is
    on where `f` begins, also where hodiff itself is called inside the forward of a Function, and
    off where jets are seen in one, which they must not pass.
    """
    numbers = inside.numbers
    number = max(numbers, default=0) + 1
    undo += [partial(numbers.discard, number)]
    if not numbers:
        # An interrupt may have kept them from being counted out.
        inside.rules, inside.bodies = 0, []
        undo += [InTime(_versions.set_forward_mode, _versions.forward_mode_on())]
        _versions.set_forward_mode(True)
    numbers.add(number)
    return number


class Expansion:
    """One Taylor expansion in progress: its order, its directions, and how the top order is summed.

    Attributes:
        number: Expansions begun later have higher numbers, and treat the earlier ones' jets as
            constants.
        order: K, the highest power carried.
        directions: R.
        groups: How many sums of the top coefficient over directions are kept; R keeps all.
        weights: A weight per direction in those sums, or None for ones.
        record: Whether rules record a graph for a reverse pass.
        counter: What is told of each rule, for `hodiff.jets.report`; or None.
        max_bytes: How many bytes a coefficient may take, or None for any number.
        widest: The bytes of the largest value met, where there is a limit.
        nests: Whether a later expansion began at a jet of this one.
        mixes: Whether samples may be mixed (batch norm in training mode): nothing is told of one.
        constants: Tensors with a graph that met its jets, by identity: none may lead to the point.
        operations: The names of those that met its jets, in their order.
        surroundings: The transform and the tracer that it began in.
        refused: The refusal of an operation that was met last.
        top: The order at which products are summed over directions: K, or -1 where they all are
            kept.
    """

    __slots__ = (
        "constants",
        "counter",
        "directions",
        "groups",
        "max_bytes",
        "mixes",
        "nests",
        "number",
        "operations",
        "order",
        "record",
        "refused",
        "surroundings",
        "top",
        "weights",
        "widest",
    )

    def __init__(
        self,
        number: int,
        order: int,
        directions: int,
        *,
        groups: int | None = None,
        weights: Tensor | None = None,
        record: bool = True,
        counter: Any = None,
        max_bytes: float | None = None,
        mixes: bool = False,
    ) -> None:
        self.number = number
        self.order = order
        self.directions = directions
        self.groups = directions if groups is None else groups
        self.weights = weights
        self.top = -1 if weights is None and self.groups == directions else order
        self.record = record
        self.counter = counter
        self.max_bytes = max_bytes
        self.widest = 0
        self.nests = False
        self.mixes = mixes
        self.constants: dict[int, Tensor] = {}
        self.refused: Exception | None = None
        self.operations: list[str] = []
        self.surroundings = surroundings()

    def meet(self, values: Iterable[Any]) -> None:
        """Note the constants with a graph among the arguments of an operation."""
        for value in values:
            if isinstance(value, Tensor):
                if type(value) in (Tensor, torch.nn.Parameter) and value.requires_grad:
                    self.constants[id(value)] = value
            elif isinstance(value, (list, tuple)):
                self.meet(value)

    def check_width(self, value: Any) -> None:
        """Raise `CoefficientTooLarge` where the coefficients that belong to a
        value would pass the limit, before.
        """
        self.widest = max(self.widest, value.numel() * value.element_size())
        if self.max_bytes is not None and self.widest * self.directions > self.max_bytes:
            raise CoefficientTooLarge(self.widest)

    def collapse(self, product: Any) -> Any:
        """The sums of a top-order product over directions, `(R, *S)` to `(groups, *S)`."""
        if self.weights is not None:
            product = product * self.weights.reshape(-1, *[1] * (product.ndim - 1))
        if self.groups == self.directions:
            return product
        if self.groups == 1:
            return product.sum(0, keepdim=True)
        return product.reshape(self.groups, len(product) // self.groups, *product.shape[1:]).sum(1)

    def plus(
        self,
        sum_so_far: Any,
        a: Any,
        b: Any,
        k: int,
        multiply: Callable[[Any, Any], Any] = torch.mul,
    ) -> Any:
        """A sum at order k, and a product: at the top, that is summed over directions."""
        if a is None or b is None:
            return sum_so_far
        if k == self.top:
            tiles = (
                not self.record
                and self.groups == 1
                and self.weights is None
                and type(a) is type(b) is Tensor
                and a.device.type == "cpu"
                and len(a) == len(b) == self.directions
            )
            top = _summed_in_tiles(a, b, multiply) if tiles else self.collapse(multiply(a, b))
            return total(sum_so_far, top)
        if multiply is torch.mul:
            return added(sum_so_far, a, b)
        return total(sum_so_far, multiply(a, b))

    def constant(self, value: Any) -> Series:
        """The series of something that does not depend on the variable."""
        return [value, *[None] * self.order]


def _summed_in_tiles(a: Tensor, b: Tensor, multiply: Callable[[Any, Any], Any]) -> Tensor:
    """A product summed over directions, a few of them at a time: as many as stay in the cache."""
    size = max(a.numel(), b.numel()) * a.element_size()
    step = max(1, TILE_BYTES * len(a) // max(1, size))
    parts = zip(a.split(step), b.split(step), strict=True)
    return functools.reduce(
        Tensor.add_, (multiply(left, right).sum(0, keepdim=True) for left, right in parts)
    )


def aligned(coefficient: Any, ndim: int) -> Any:
    """A coefficient with singleton dimensions behind the first, so that it broadcasts to `(R, *S)`,
    S of `ndim`.
    """
    for _ in range(ndim + 1 - coefficient.ndim):
        coefficient = coefficient.unsqueeze(1)
    return coefficient


def full(coefficient: Any, shape: Sequence[int]) -> Any:
    """A coefficient expanded (without a copy) to its leading dimension and `shape`."""
    wanted = (coefficient.shape[0], *shape)
    if tuple(coefficient.shape) == wanted:
        return coefficient
    return aligned(coefficient, len(shape)).expand(wanted)


def entry(series: Series, k: int, rows: int) -> Any:
    """Coefficient k at full size, `(rows, *S)`; zeros where it is structurally zero."""
    if series[k] is None:
        return series[0].new_zeros(()).expand(rows, *series[0].shape)
    return full(series[k], series[0].shape)


def total(a: Any, b: Any) -> Any:
    """A + b, where None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def scaled(coefficient: Any, factor: Any) -> Any:
    """A coefficient times a factor (a number, or shaped like the value), where None is zero."""
    if coefficient is None or factor is None:
        return None
    return coefficient if isinstance(factor, (int, float)) and factor == 1 else coefficient * factor


def added(sum_so_far: Any, coefficient: Any, factor: Any) -> Any:
    """The sum so far + coefficient · factor, in one kernel where that can be; None is zero."""
    if type(sum_so_far) is type(coefficient) is Tensor:
        if type(factor) is Tensor:
            return torch.addcmul(sum_so_far, coefficient, factor)
        if isinstance(factor, (int, float)):
            return torch.add(sum_so_far, coefficient, alpha=factor)
    return total(sum_so_far, scaled(coefficient, factor))


def each(series: Series, function: Callable[[Any], Any]) -> Series:
    """A function of every coefficient that does not care how many dimensions are in front."""
    return [None if c is None else function(c) for c in series]


def ndim_of(value: Any) -> int:
    """Dimensions of a tensor; a number has none."""
    return 0 if isinstance(value, (int, float, complex)) else value.ndim


def linear_combination(terms: Sequence[tuple[Any, Series]], order: int) -> Series:
    """Σ factor · series, coefficient by coefficient; shapes broadcast."""
    ndim = max(ndim_of(series[0]) for _, series in terms)
    out: Series = []
    for k in range(order + 1):
        combination = None
        for factor, series in terms:
            part = series[k]
            if part is not None and k:
                part = aligned(part, ndim)
            combination = added(combination, part, factor)
        out.append(combination)
    return out


def product(expansion: Expansion, a: Series, b: Series) -> Series:
    """The product of two series, elementwise."""
    ndim = max(ndim_of(a[0]), ndim_of(b[0]))
    left = right = [a[0], *(None if c is None else aligned(c, ndim) for c in a[1:])]
    if a is not b:
        right = [b[0], *(None if c is None else aligned(c, ndim) for c in b[1:])]
    return [convolved(expansion, left, right, k) for k in range(expansion.order + 1)]


def convolved(
    expansion: Expansion,
    a: Series,
    b: Series,
    k: int,
    multiply: Callable[[Any, Any], Any] = torch.mul,
) -> Any:
    """Coefficient k of a product: Σ a_j b_{k-j}; of the top one,
    the inner terms are summed over directions.
    """
    if a is b and multiply is torch.mul:
        outer = _times(a[0], a[k], multiply)
        return total(scaled(outer, 2) if k else outer, _square(expansion, a, k))
    inner = None
    for j in range(1, k):
        inner = expansion.plus(inner, a[j], b[k - j], k, multiply)
    outer = _times(a[0], b[k], multiply)
    if k:
        outer = total(outer, _times(a[k], b[0], multiply))
    return total(outer, inner)


def _square(expansion: Expansion, a: Series, k: int) -> Any:
    """[(a - a_0)²]_k, each pair of different coefficients once."""
    square = None
    for j in range(1, (k + 1) // 2):
        square = expansion.plus(square, a[j], a[k - j], k)
    square = scaled(square, 2)
    return expansion.plus(square, a[k // 2], a[k // 2], k) if k and k % 2 == 0 else square


def _times(a: Any, b: Any, multiply: Callable[[Any, Any], Any]) -> Any:
    if a is None or b is None:
        return None
    return multiply(a, b)


def quotient(expansion: Expansion, a: Series, b: Series) -> Series:
    r"""A / b, from \(y b = a\): \(y_k = (a_k - \sum_{j \ge 1} b_j y_{k-j}) / b_0\)."""
    value = a[0] / b[0]
    ndim = ndim_of(value)
    b = [b[0], *(None if c is None else aligned(c, ndim) for c in b[1:])]
    y: Series = [value]
    for k in range(1, expansion.order + 1):
        inner = None
        for j in range(1, k):
            inner = expansion.plus(inner, b[j], y[k - j], k)
        inner = total(inner, scaled(b[k], value))
        numerator = None if a[k] is None else aligned(a[k], ndim)
        numerator = total(numerator, None if inner is None else -inner)
        y.append(None if numerator is None else numerator / b[0])
    return y


def composed(expansion: Expansion, s: Series, x: Series) -> Series:
    r"""\(f(x(t))\) for an elementwise f with \(s_m = f^{(m)}(x_0) / m!\), by Faà di Bruno.

    \(y_k = \sum_m s_m [(x - x_0)^m]_k\). The powers are independent of f; at the top order they are
    summed over directions before they are multiplied.
    """
    y: Series = [s[0], *map(scaled, x[1:], repeat(s[1]))]
    power: Series = []  # [(x - x_0)^m]_k
    for m in range(2, expansion.order + 1):
        if all(later is None for later in s[m:]):
            break
        power = (
            _next_power(expansion, power, x, m)
            if power
            else [_square(expansion, x, k) for k in range(expansion.order + 1)]
        )
        for k in range(m, expansion.order + 1):
            y[k] = added(y[k], power[k], s[m])
    return y


def _next_power(expansion: Expansion, power: Series, x: Series, m: int) -> Series:
    """[(x - x_0)^m] from that to the power of m - 1 (whose top coefficient, summed already,
    is not needed).
    """
    out: Series = [None] * (expansion.order + 1)
    for k in range(m, expansion.order + 1):
        for j in range(1, k - m + 2):
            out[k] = expansion.plus(out[k], x[j], power[k - j], k)
    return out
