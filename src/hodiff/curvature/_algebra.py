"""Operators made of operators, and of matrices."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor

from hodiff._reverse import CHUNK_BYTES
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


def chosen_leaves(operator: LinearOperator, patterns: tuple[str, ...]) -> list[int]:
    """The numbers of the leaves whose names match."""
    if operator.shape[0] != operator.shape[1] or not operator._domain.like(operator._range):
        raise InputError(f"block: needs rows and columns of the same kind; {operator!r} has not.")
    names = operator._domain.names
    chosen: set[int] = set()
    for pattern in patterns or ("*",):
        if not isinstance(pattern, str):
            raise InputError(
                f"block: got a {type(pattern).__name__}, expected names of leaves: {', '.join(names[:6])}."
            )
        found = {index for index, name in enumerate(names) if _matches(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern.rstrip(".*"), names, n=3, cutoff=0.4) or names[:6]
            raise InputError(f"block: {pattern!r} matches no leaf. Near: {', '.join(near)}.")
        chosen |= found
    return sorted(chosen)


def _matches(name: str, pattern: str) -> bool:
    if name == pattern:  # names like x[0] are no patterns
        return True
    while name:
        if fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]
    return False


def _bridge(parts: Parts, count: int | None, source: Space, target: Space) -> Parts:
    """Parts of one space as parts of another of the same size."""
    return parts if source.shapes == target.shapes else target.split(source.join(parts, count))


def _check_sizes(left: Space, right: Space, what: str) -> None:
    compatible = left.size == right.size and (left.like(right) or left.flat or right.flat)
    if not compatible:
        raise InputError(
            f"{what}: the sizes {left.size} and {right.size}, or the structures, differ; "
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
class ScaledOperator(LinearOperator):
    """c A."""

    def __init__(self, inner: LinearOperator, factor: float) -> None:
        super().__init__()
        self._inner, self._factor = inner, factor

    @property
    def _domain(self) -> Space:
        return self._inner._domain

    @property
    def _range(self) -> Space:
        return self._inner._range

    @property
    def symmetric(self) -> bool:
        """Whether A is."""
        return self._inner.symmetric

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return [part * self._factor for part in self._inner._product(parts, count)]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return [part * self._factor for part in self._inner._product_transposed(parts, count)]

    def _chunk(self, count: int) -> int:
        return self._inner._chunk(count)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return ScaledOperator(self._inner._blocked(chosen), self._factor)

    def _about(self) -> str:
        return f"{self._factor:g} * {self._inner!r}"


@final
class ShiftedOperator(LinearOperator):
    """A + λ I."""

    def __init__(self, inner: LinearOperator, shift: float) -> None:
        super().__init__()
        _check_sizes(inner._domain, inner._range, "A + number")
        self._inner, self._shift = inner, shift

    @property
    def _domain(self) -> Space:
        return self._inner._domain

    @property
    def _range(self) -> Space:
        return self._inner._range

    @property
    def symmetric(self) -> bool:
        """Whether A is."""
        return self._inner.symmetric

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        own = _bridge(parts, count, self._domain, self._range)
        found = self._inner._product(parts, count)
        return [torch.add(part, v, alpha=self._shift) for part, v in zip(found, own, strict=True)]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        own = _bridge(parts, count, self._range, self._domain)
        found = self._inner._product_transposed(parts, count)
        return [torch.add(part, v, alpha=self._shift) for part, v in zip(found, own, strict=True)]

    def _chunk(self, count: int) -> int:
        return self._inner._chunk(count)

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
class TransposedOperator(LinearOperator):
    """A'."""

    def __init__(self, inner: LinearOperator) -> None:
        super().__init__()
        self._inner = inner

    @property
    def _domain(self) -> Space:
        return self._inner._range

    @property
    def _range(self) -> Space:
        return self._inner._domain

    @property
    def symmetric(self) -> bool:
        """Whether A is."""
        return self._inner.symmetric

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return self._inner._product_transposed(parts, count)

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return self._inner._product(parts, count)

    def _chunk(self, count: int) -> int:
        return self._inner._chunk(count)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return TransposedOperator(self._inner._blocked(chosen))

    def _about(self) -> str:
        return f"transpose of {self._inner!r}"


@final
class BlockOperator(LinearOperator):
    """Some rows, and the same columns, of any operator: its vectors are padded with zeros."""

    def __init__(self, inner: LinearOperator, chosen: list[int]) -> None:
        super().__init__()
        self._inner, self._chosen = inner, chosen
        self._space = inner._domain.only(chosen)

    @property
    def _domain(self) -> Space:
        return self._space

    @property
    def _range(self) -> Space:
        return self._space

    @property
    def symmetric(self) -> bool:
        """Whether the whole is."""
        return self._inner.symmetric

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return self._cut(self._inner._product(self._padded(parts, count), count))

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return self._cut(self._inner._product_transposed(self._padded(parts, count), count))

    def _padded(self, parts: Parts, count: int | None) -> Parts:
        whole = self._inner._domain.zeros(count)
        for index, part in zip(self._chosen, parts, strict=True):
            whole[index] = part
        return whole

    def _cut(self, parts: Parts) -> Parts:
        return [parts[index] for index in self._chosen]

    def _chunk(self, count: int) -> int:
        return self._inner._chunk(count)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return BlockOperator(self._inner, [self._chosen[index] for index in chosen])

    def _about(self) -> str:
        return f"block of {self._inner!r}"


@final
class MatrixOperator(LinearOperator):
    r"""A matrix as an operator: for sums with others, as a preconditioner, and in tests.

    Args:
        A: A matrix of shape `(M, D)`, or a vector of shape `(D,)` for a diagonal one.
        symmetric: Whether it is its own transpose; by default this is looked at.

    Raises:
        InputError: *A* is not a real floating point matrix or vector, or `symmetric=True` is not true.

    Cost:
        A product is a matrix product. The matrix is not copied.

    Examples:
        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
        >>> (A + 1.0) @ torch.tensor([1.0, 0.0])
        tensor([3., 1.])
        >>> hodiff.eigsh(hodiff.MatrixOperator(torch.tensor([1.0, 5.0, 3.0])), k=1).value
        tensor([5.])
    """

    def __init__(self, A: Tensor, *, symmetric: bool | None = None) -> None:
        super().__init__()
        if not isinstance(A, Tensor) or A.ndim not in (1, 2) or not A.is_floating_point() or not A.numel():
            kind = f"{A.dtype} of shape {tuple(A.shape)}" if isinstance(A, Tensor) else type(A).__name__
            raise InputError(f"A: is {kind}; expected a real floating point matrix (M, D), or the (D,) of a diagonal.")
        self._matrix = A.detach()
        diagonal, square = A.ndim == 1, A.ndim == 2 and A.shape[0] == A.shape[1]
        found = diagonal or (square and bool(torch.equal(self._matrix, self._matrix.T)))
        if symmetric and not found:
            raise InputError("symmetric=True: A differs from its transpose; give (A + A.T) / 2.")
        self._symmetric = found if symmetric is None else symmetric
        self._columns_space = Space.line(self._matrix.new_empty(()).expand(A.shape[-1]))
        self._rows_space = Space.line(self._matrix.new_empty(()).expand(A.shape[0]))

    @property
    def _domain(self) -> Space:
        return self._columns_space

    @property
    def _range(self) -> Space:
        return self._rows_space

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is its own transpose."""
        return self._symmetric

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        (v,) = parts
        return [self._matrix * v if self._matrix.ndim == 1 else v @ self._matrix.T]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        (u,) = parts
        return [self._matrix * u if self._matrix.ndim == 1 else u @ self._matrix]

    def _chunk(self, count: int) -> int:
        return max(1, CHUNK_BYTES // (2 * max(self.shape) * self._matrix.element_size()))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return self

    def _about(self) -> str:
        return "diagonal" if self._matrix.ndim == 1 else "matrix"


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
