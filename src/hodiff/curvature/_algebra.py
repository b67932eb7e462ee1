"""Sums, multiples, products and transposes of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from hodiff.curvature._block import BlockOperator, OfOne, chosen_leaves
from hodiff.curvature._operator import ALGEBRA, LinearOperator
from hodiff.curvature._space import Space
from hodiff.errors import InputError

Parts = list[Tensor]


def number(value: Any, sign: str) -> float:
    """A scalar operand as a float."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    what = "a tensor that requires grad" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    if isinstance(value, Tensor) and value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}"
    raise InputError(
        f"operator {sign} {what}: expected a number or an operator; for a matrix write hodiff.MatrixOperator(A)."
    )


def _bridge(parts: Parts, count: int | None, source: Space, target: Space) -> Parts:
    """Parts of one space as parts of another of the same size."""
    return parts if source.shapes == target.shapes else target.split(source.join(parts, count))


def _check_sizes(left: Space, right: Space, what: str) -> None:
    compatible = left.size == right.size and (left.like(right) or left.flat or right.flat)
    if not compatible:
        raise InputError(
            f"{what}: the sizes {left.size} and {right.size}, or the structures (the order of keys too), differ; "
            f"operators combine over the same point, or with a flat MatrixOperator of the same size."
        )
    if left.dtype != right.dtype or left.device != right.device:
        raise InputError(
            f"{what}: {left.dtype} on {left.device} and {right.dtype} on {right.device}; make both the same."
        )


@final
class SumOperator(LinearOperator):
    """A + B."""

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        super().__init__()
        for a, b in ((left._domain, right._domain), (left._range, right._range)):
            _check_sizes(a, b, "A + B")
        self._left, self._right = left, right
        self._lead = right if left._domain.flat and not right._domain.flat else left

    @property
    def _domain(self) -> Space:
        return self._lead._domain

    @property
    def _range(self) -> Space:
        return self._lead._range

    @property
    def symmetric(self) -> bool:
        """Whether both summands are."""
        return self._left.symmetric and self._right.symmetric

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return self._sum(parts, count, self._domain, self._range, lambda a: (a._product, a._domain, a._range))

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        turned = lambda a: (a._product_transposed, a._range, a._domain)  # noqa: E731
        return self._sum(parts, count, self._range, self._domain, turned)

    def _sum(
        self, parts: Parts, count: int | None, source: Space, target: Space, side: Callable[[LinearOperator], Any]
    ) -> Parts:
        found = []
        for operator in (self._left, self._right):
            product, domain, codomain = side(operator)
            own = product(_bridge(parts, count, source, domain), count)
            found.append(_bridge(own, count, codomain, target))
        return [a + b for a, b in zip(*found, strict=True)]

    def _chunk(self, count: int) -> int:
        return min(self._left._chunk(count), self._right._chunk(count))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        if self._left._domain.like(self._right._domain):
            return SumOperator(self._left._blocked(chosen), self._right._blocked(chosen))
        return BlockOperator(self, chosen)

    def _about(self) -> str:
        return f"{self._left!r} + {self._right!r}"


@final
class ScaledOperator(OfOne):
    """c A."""

    def __init__(self, inner: LinearOperator, factor: float) -> None:
        super().__init__(inner)
        self._factor = factor

    @property
    def _domain(self) -> Space:
        return self._inner._domain

    @property
    def _range(self) -> Space:
        return self._inner._range

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return [part * self._factor for part in self._inner._product(parts, count)]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return [part * self._factor for part in self._inner._product_transposed(parts, count)]

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return ScaledOperator(self._inner._blocked(chosen), self._factor)

    def _about(self) -> str:
        return f"{self._factor:g} * {self._inner!r}"


@final
class ShiftedOperator(OfOne):
    """A + λ I."""

    def __init__(self, inner: LinearOperator, shift: float) -> None:
        super().__init__(inner)
        _check_sizes(inner._domain, inner._range, "A + number")
        self._shift = shift

    @property
    def _domain(self) -> Space:
        return self._inner._domain

    @property
    def _range(self) -> Space:
        return self._inner._range

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        own = _bridge(parts, count, self._domain, self._range)
        found = self._inner._product(parts, count)
        return [torch.add(part, v, alpha=self._shift) for part, v in zip(found, own, strict=True)]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        own = _bridge(parts, count, self._range, self._domain)
        found = self._inner._product_transposed(parts, count)
        return [torch.add(part, v, alpha=self._shift) for part, v in zip(found, own, strict=True)]

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return ShiftedOperator(self._inner._blocked(chosen), self._shift)

    def _about(self) -> str:
        return f"{self._inner!r} + {self._shift:g} I"


@final
class ProductOperator(LinearOperator):
    """A B. Between a flat matrix and an operator at a point, vectors are those of the point."""

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        super().__init__()
        _check_sizes(left._domain, right._range, "A @ B")
        self._left, self._right = left, right
        middle = left._domain if right._range.flat else right._range
        self._columns = middle if right._domain.flat and right._domain.size == middle.size else right._domain
        self._rows = middle if left._range.flat and left._range.size == middle.size else left._range

    @property
    def _domain(self) -> Space:
        return self._columns

    @property
    def _range(self) -> Space:
        return self._rows

    @property
    def symmetric(self) -> bool:
        """Whether the product is one of the form A' A."""
        left, right = self._left, self._right
        turned = isinstance(left, TransposedOperator) and left._inner is right
        return turned or (isinstance(right, TransposedOperator) and right._inner is left)

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        left, right = self._left, self._right
        middle = right._product(_bridge(parts, count, self._columns, right._domain), count)
        found = left._product(_bridge(middle, count, right._range, left._domain), count)
        return _bridge(found, count, left._range, self._rows)

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        left, right = self._left, self._right
        middle = left._product_transposed(_bridge(parts, count, self._rows, left._range), count)
        found = right._product_transposed(_bridge(middle, count, left._domain, right._range), count)
        return _bridge(found, count, right._domain, self._columns)

    def _chunk(self, count: int) -> int:
        return min(self._left._chunk(count), self._right._chunk(count))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return BlockOperator(self, chosen)

    def _about(self) -> str:
        return f"{self._left!r} @ {self._right!r}"


@final
class TransposedOperator(OfOne):
    """A'."""

    @property
    def _domain(self) -> Space:
        return self._inner._range

    @property
    def _range(self) -> Space:
        return self._inner._domain

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return self._inner._product_transposed(parts, count)

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return self._inner._product(parts, count)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return TransposedOperator(self._inner._blocked(chosen))

    def _about(self) -> str:
        return f"transpose of {self._inner!r}"


def _transpose(operator: LinearOperator) -> LinearOperator:
    return operator._inner if isinstance(operator, TransposedOperator) else TransposedOperator(operator)


ALGEBRA.update(
    {
        "sum": SumOperator,
        "shift": lambda operator, shift: ShiftedOperator(operator, number(shift, "+")),
        "multiple": lambda operator, factor: ScaledOperator(operator, number(factor, "*")),
        "quotient": lambda operator, factor: ScaledOperator(operator, 1 / number(factor, "/")),
        "product": ProductOperator,
        "transpose": _transpose,
        "block": lambda operator, patterns: operator._blocked(chosen_leaves(operator, patterns)),
    }
)
