"""`LinearOperator`: what every operator can do, given products of parts (see `_space`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _nesting
from hodiff.curvature import _export
from hodiff.curvature._memory import free_bytes, readable
from hodiff.curvature._space import Space
from hodiff.errors import GraphError, InputError

Product = Callable[[list[Tensor], "int | None"], list[Tensor]]

ALGEBRA: dict[str, Callable[..., LinearOperator]] = {}
"""What makes operators of operators; `_algebra`, which stands on this module, fills it in."""


class LinearOperator(ABC):
    r"""A matrix \(A\) of shape `(M, D)` that is known by its products \(A v\) alone.

    A vector is given, and comes back, in one of four spellings: with the structure of the point (a
    dict by parameter name for a module); `K` of those, stacked in one extra leading dimension on
    every leaf; flat, of shape `(D,)`; or as the columns of a `(D, K)` matrix. Where the point is one
    tensor of one dimension, several vectors are always columns. Products are detached: to
    differentiate one, use `hodiff.hvp(..., create_graph=True)`.

    | written | means |
    |---|---|
    | `A @ v`, `u @ A` | products |
    | `A + B`, `A - B`, `2 * A`, `-A`, `A / 2`, `A @ B` | sums, multiples, products of operators |
    | `A + 0.1` | \(A + 0.1 I\): damping |
    | `A.T` | the transpose |
    | `A.block("layer1.*")` | the rows and columns of some leaves |

    Attributes:
        products: How many products with a single vector have been computed.

    Cost:
        A product costs what its class says. Several vectors are taken in chunks whose temporaries
        stay within some 32 MiB, and written into the result as they come.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        >>> isinstance(H, hodiff.LinearOperator), (H + 0.5).dense()
        (True, tensor([[ 6.5000,  0.0000],
                [ 0.0000, 12.5000]]))
    """

    __array_ufunc__ = None  # an array on the left leaves the operation to us, which says what is expected

    def __init__(self) -> None:
        self.products = 0

    # --- what a class provides

    @property
    @abstractmethod
    def _domain(self) -> Space: ...

    @property
    @abstractmethod
    def _range(self) -> Space: ...

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether the operator is its own transpose by construction."""

    @abstractmethod
    def _multiply(self, parts: list[Tensor], count: int | None) -> list[Tensor]:
        """A v, for the parts of one vector or of `count` stacked ones."""

    @abstractmethod
    def _multiply_transposed(self, parts: list[Tensor], count: int | None) -> list[Tensor]:
        """A' u."""

    @abstractmethod
    def _chunk(self, count: int) -> int:
        """How many of `count` vectors one product should take."""

    @abstractmethod
    def _blocked(self, chosen: list[int]) -> LinearOperator:
        """The block of the leaves with these numbers."""

    @abstractmethod
    def _about(self) -> str:
        """What `repr` says beside class, size and dtype."""

    # --- size

    @property
    def shape(self) -> torch.Size:
        """`(M, D)`."""
        return torch.Size((self._range.size, self._domain.size))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: that of the point's tensors, promoted where they differ."""
        return self._domain.dtype

    @property
    def device(self) -> torch.device:
        """Where the vectors live."""
        return self._domain.device

    def __repr__(self) -> str:
        rows, columns = self.shape
        about = self._about()
        size = f"{rows} x {columns}, {str(self.dtype).removeprefix('torch.')}"
        return f"{type(self).__name__}({size}{', ' if about else ''}{about})"

    # --- products

    def __matmul__(self, v: Any) -> Any:
        """`A @ v`: a product in the spelling of `v`; with an operator, their product."""
        if isinstance(v, LinearOperator):
            return ALGEBRA["product"](self, v)
        return _times(self, v, self._domain, self._range, self._product)

    def __rmatmul__(self, u: Any) -> Any:
        """`u @ A`: the row vector u'A, or, for a `(K, M)` matrix, K of them as rows."""
        if isinstance(u, Tensor) and u.ndim == 2 and u.shape[1] == self.shape[0]:
            return _times(self, u.T, self._range, self._domain, self._product_transposed).T
        return _times(self, u, self._range, self._domain, self._product_transposed)

    def _product(self, parts: list[Tensor], count: int | None) -> list[Tensor]:
        self.products += 1 if count is None else count
        return self._multiply(parts, count)

    def _product_transposed(self, parts: list[Tensor], count: int | None) -> list[Tensor]:
        self.products += 1 if count is None else count
        return self._multiply_transposed(parts, count)

    def flatten(self, v: Any) -> Tensor:
        """A vector like the point as a flat one `(D,)`; K stacked ones as columns `(D, K)`. A flat one is itself."""
        vectors = self._domain.parse(v)
        if vectors.kind in ("flat", "columns"):
            return v
        joined = self._domain.join(vectors.parts, vectors.number)
        return joined if vectors.number is None else joined.T

    def unflatten(self, flat: Tensor) -> Any:
        """A flat vector `(D,)` with the structure of the point, as views; columns `(D, K)` as K stacked ones."""
        vectors = self._domain.parse(flat)
        if vectors.kind == "columns" and not self._domain.flat:
            return self._domain.result(self._domain.rows(flat))
        return self._domain.result(self._domain.split(flat)) if vectors.kind == "flat" else flat

    # --- algebra

    @property
    def T(self) -> LinearOperator:
        """The transpose; a symmetric operator is its own."""
        return self if self.symmetric else ALGEBRA["transpose"](self)

    def block(self, *patterns: str) -> LinearOperator:
        """The diagonal block of some leaves of the point, by name.

        Args:
            *patterns: Names of leaves (`"0.weight"`, `"x[1]"`), of submodules, or patterns with `*`,
                `?` and `[...]`, as for `hodiff.select`.

        Returns:
            An operator whose vectors are dicts by name. It shares what has been computed.

        Raises:
            InputError: A pattern that matches nothing, or an operator that is not square.
        """
        return ALGEBRA["block"](self, patterns)

    def __add__(self, other: Any) -> LinearOperator:
        """`A + B`, and `A + 0.1` for A + 0.1 I."""
        return ALGEBRA["sum" if isinstance(other, LinearOperator) else "shift"](self, other)

    def __radd__(self, other: Any) -> LinearOperator:
        """`0.1 + A`."""
        return self + other

    def __mul__(self, factor: Any) -> LinearOperator:
        """`A * 2`."""
        return ALGEBRA["multiple"](self, factor)

    def __rmul__(self, factor: Any) -> LinearOperator:
        """`2 * A`."""
        return self * factor

    def __truediv__(self, factor: Any) -> LinearOperator:
        """`A / 2`."""
        return ALGEBRA["quotient"](self, factor)

    def __neg__(self) -> LinearOperator:
        """`-A`."""
        return self * -1.0

    def __sub__(self, other: Any) -> LinearOperator:
        """`A - B`, and `A - 0.1` for A - 0.1 I."""
        return self + -other

    def __rsub__(self, other: Any) -> LinearOperator:
        """`0.1 - A`."""
        return -self + other

    # --- exports

    def dense(self) -> Tensor:
        """The matrix itself, `(M, D)`.

        Returns:
            A tensor of `M * D` entries, in the order of flat vectors.

        Raises:
            InputError: It would not fit into the memory that is free; the message says how large it is.

        Cost:
            One product for each column (or, where there are fewer, for each row), in chunks.
        """
        rows, columns = self.shape
        needed, free = rows * columns * self._domain.itemsize(), free_bytes(self.device)
        if needed > free:
            raise InputError(
                f"dense: a {rows} x {columns} matrix of {self.dtype} takes {readable(needed)}, and "
                f"{readable(free)} are free. Use products (A @ v), hodiff.eigsh, hodiff.trace, hodiff.diagonal, or "
                f"a block of it: A.block('...')."
            )
        if rows < columns:
            return _columns(self, self._range, self._domain, self._product_transposed)
        return _columns(self, self._domain, self._range, self._product).T

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, in the operator's own dtype.

        Raises:
            ImportError: SciPy is not installed.
            InputError: NumPy has no such dtype (bfloat16).
        """
        return _export.to_scipy(self)


def _times(operator: LinearOperator, v: Any, domain: Space, target: Space, product: Product) -> Any:
    """One product or several, in the spelling of `v`."""
    refuse_differentiation()
    kind, parts, count = domain.parse(v)
    if count is None:
        found = product([part.detach() for part in parts], None)
        return target.join(found, None) if kind == "flat" else target.result(found)
    size = operator._chunk(count)
    parts = [part.detach() for part in parts]
    if kind == "columns":
        return _times_columns(parts[0], size, domain, target, product).T
    results = target.empty(count)
    for start, stop, found in _in_chunks(parts, count, size, product):
        for result, part in zip(results, found, strict=True):
            result[start:stop] = part
    return target.result(results)


def _times_columns(columns: Tensor, size: int, domain: Space, target: Space, product: Product) -> Tensor:
    """Products with columns `(D, K)`, as rows `(K, M)`."""
    count = columns.shape[1]
    rows = columns.new_empty((count, target.size), dtype=target.dtype)
    block = domain.turned_at_once(size)
    for first in range(0, count, block):
        some = domain.rows(columns[:, first : first + block])
        for start, stop, found in _in_chunks(some, min(block, count - first), size, product):
            target.join_into(rows[first + start : first + stop], found)
    return rows


def _in_chunks(parts: list[Tensor], count: int, size: int, product: Product) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Products of `size` vectors at a time: `(start, stop, results)`. One that stands alone is not stacked."""
    for start in range(0, count, size):
        stop = min(start + size, count)
        if stop - start == 1:
            found = [part.unsqueeze(0) for part in product([part[start] for part in parts], None)]
        else:
            found = product([part[start:stop] for part in parts], stop - start)
        yield start, stop, found


def _columns(operator: LinearOperator, domain: Space, target: Space, product: Product) -> Tensor:
    """Products with the unit vectors, each as a row: `(D, M)`."""
    refuse_differentiation()
    rows = torch.empty((domain.size, target.size), dtype=target.dtype, device=target.device)
    size = operator._chunk(domain.size)
    for start in range(0, domain.size, size):
        stop = min(start + size, domain.size)
        units = torch.zeros((stop - start, domain.size), dtype=domain.dtype, device=domain.device)
        units[:, start:stop].fill_diagonal_(1)
        target.join_into(rows[start:stop], product(domain.split(units), stop - start))
    return rows


def refuse_differentiation() -> None:
    """Raise inside the `f` of another hodiff call: an operator's products would be constants in it."""
    if _nesting.inside() and torch.is_grad_enabled():
        raise GraphError(
            "an operator's products are detached, so inside the function of another hodiff call they would count as "
            "constants, silently. Use hodiff.hvp(f, x, v) there, or compute the product outside; if a constant is "
            "meant, write `with torch.no_grad():` around it."
        )
