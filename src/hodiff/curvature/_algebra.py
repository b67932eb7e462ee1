"""The algebra of operators: sums, multiples, products, transposes, blocks, each an operator itself.

The transpose of a sum is the sum of the transposes; so is the block of one the sum of the blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final, overload

import torch

from hodiff._core._vectors import Leaves, Space
from hodiff.curvature._operator import COMPOSED, LinearOperator, check_sizes

ProductOf = Callable[[LinearOperator, Leaves, Any], Leaves]
"""What an operator makes of the parts of one vector, or of so many stacked ones: detached, or with a graph."""


class ComposedOperator(LinearOperator):
    """An operator whose products are those of others, put together."""

    @abstractmethod
    def _composed(self, parts: Leaves, count: int | None, product: ProductOf) -> Leaves:
        """A v, by this product of the operators that it is made of."""

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        return self._composed(parts, count, LinearOperator._product)

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        return self._composed(parts, count, lambda A, v, number: A._recorded(v, number))


@final
class SumOperator(ComposedOperator):
    """The sum A + B of two operators."""

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        super().__init__(left, right)
        for a, b in ((left._domain, right._domain), (left._range, right._range)):
            check_sizes(a, b, "A + B")
        self._space = _structured(left._domain, right._domain)
        self._rows = _structured(left._range, right._range)

    def _composed(self, parts: Leaves, count: int | None, product: ProductOf) -> Leaves:
        left, right = (
            self._range.take(product(A, A._domain.take(parts, count, self._domain), count), count, A._range)
            for A in self._made_of
        )
        return [a + b for a, b in zip(left, right, strict=True)]

    def _transposed(self) -> LinearOperator:
        return SumOperator(*(A.T for A in self._made_of))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        left, right = self._made_of
        alike = left._domain.like(right._domain)
        return SumOperator(left._block(chosen), right._block(chosen)) if alike else super()._blocked(chosen)

    def _about(self) -> str:
        return " + ".join(map(repr, self._made_of))


@final
class AffineOperator(ComposedOperator):
    """c A + λ I."""

    def __init__(self, inner: LinearOperator, factor: float, shift: float = 0.0) -> None:
        super().__init__(inner)
        self._inner = inner
        self._factor = factor
        self._shift = shift

    @property
    def _domain(self) -> Space:
        return self._inner._domain

    @property
    def _range(self) -> Space:
        return self._inner._range

    def _composed(self, parts: Leaves, count: int | None, product: ProductOf) -> Leaves:
        products = product(self._inner, parts, count)
        if self._factor != 1:
            products = [part * self._factor for part in products]
        if not self._shift:
            return products
        own = self._range.take(parts, count, self._domain)
        return [torch.add(part, v, alpha=self._shift) for part, v in zip(products, own, strict=True)]

    def _transposed(self) -> LinearOperator:
        return AffineOperator(self._inner.T, self._factor, self._shift)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return AffineOperator(self._inner._block(chosen), self._factor, self._shift)

    def _about(self) -> str:
        shift = f" + {self._shift:g} I" if self._shift else ""
        return f"{'' if self._factor == 1 else f'{self._factor:g} * '}{self._inner!r}{shift}"


@final
class ProductOperator(ComposedOperator):
    """A B. Between a flat matrix and an operator at a point, vectors are those of the point."""

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        super().__init__(left, right)
        check_sizes(left._domain, right._range, "A @ B")
        middle = _structured(right._range, left._domain)
        self._space = _structured(right._domain, middle)
        self._rows = _structured(left._range, middle)

    @property
    def symmetric(self) -> bool:
        """Whether the product is one of the form A' A, as is the square of a symmetric operator."""
        left, right = self._made_of
        return (left is right and left.symmetric) or left._transpose_of is right or right._transpose_of is left

    @property
    def _turns(self) -> bool:
        left, right = self._made_of
        return left is right and left._turns

    def _composed(self, parts: Leaves, count: int | None, product: ProductOf) -> Leaves:
        left, right = self._made_of
        middle = product(right, right._domain.take(parts, count, self._space), count)
        products = product(left, left._domain.take(middle, count, right._range), count)
        return self._range.take(products, count, left._range)

    def _transposed(self) -> LinearOperator:
        left, right = self._made_of
        turned = right.T
        return ProductOperator(turned, turned if left is right else left.T)

    def _about(self) -> str:
        return " @ ".join(map(repr, self._made_of))


class TwoSpaces(LinearOperator):
    """An operator whose rows and columns may differ in structure.

    There a vector's spelling says nothing of the result's.
    """

    if TYPE_CHECKING:

        @overload
        def __matmul__(self, v: LinearOperator) -> LinearOperator: ...
        @overload
        def __matmul__(self, v: Any) -> Any: ...
        def __matmul__(self, v: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@final
class TransposedOperator(TwoSpaces):
    """The transpose of an operator that knows both of its products: what `J.T` is."""

    @property
    def _domain(self) -> Space:
        return self._made_of[0]._range

    @property
    def _range(self) -> Space:
        return self._made_of[0]._domain

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        return self._made_of[0]._pull(parts, count)

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        self._count(count)
        return self._made_of[0]._recorded_pull(parts, count)

    def _transposed(self) -> LinearOperator:
        return self._made_of[0]

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return self._made_of[0]._blocked(chosen)

    def _about(self) -> str:
        return f"transpose of {self._made_of[0]!r}"


@final
class BlockOperator(ComposedOperator):
    """Some rows, and the same columns, of an operator that has no way of its own: vectors are padded with zeros."""

    def __init__(self, inner: LinearOperator, chosen: list[int]) -> None:
        super().__init__(inner)
        self._inner, self._chosen = inner, chosen
        self._space = inner._domain.only(chosen)

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        # Which `_block_of` counts.
        return self._composed(parts, count, lambda A, v, number: A._multiply(v, number))

    def _composed(self, parts: Leaves, count: int | None, product: ProductOf) -> Leaves:
        padded = self._inner._domain.zeros(count)
        for index, part in zip(self._chosen, parts, strict=True):
            padded[index] = part
        products = product(self._inner, padded, count)
        return [products[index] for index in self._chosen]

    def _transposed(self) -> LinearOperator:
        return BlockOperator(self._inner.T, self._chosen)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return BlockOperator(self._inner, [self._chosen[index] for index in chosen])

    def _about(self) -> str:
        return f"block of {self._inner!r}"


def _structured(first: Space, second: Space) -> Space:
    """Of two spaces of one size that with more structure: vectors beside a flat matrix are those of the point."""
    return second if first.flat and first.size == second.size else first


COMPOSED.update(
    {
        "A + B": SumOperator,
        "c A + λ I": AffineOperator,
        "A @ B": ProductOperator,
        "A.T": TransposedOperator,
        "A.block": BlockOperator,
    }
)
