"""`LinearOperator`: what every operator can do, given products of parts (see `_core._vectors`).

Each operator knows one product, A v. What is made of operators is one as well, its transpose too.
"""

from __future__ import annotations

import copy
import numbers
import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, final, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _locks, _settings
from hodiff._core._arguments import SupportsArray
from hodiff._core._records import Unlike
from hodiff._core._tree import Leaves
from hodiff._core._vectors import Space
from hodiff.calculus._factors import Outer, Stack
from hodiff.curvature._memory import free_bytes, readable
from hodiff.curvature._process_group import ProcessGroupSum
from hodiff.curvature._records import Described
from hodiff.curvature._thin import NUMBERS, Thin, ThinMatrix
from hodiff.errors import GraphError, HodiffWarning, InputError

# --- `LinearOperator` -----------------------------------------------------------------------------


Container = TypeVar("Container", bound="dict[Any, Any] | tuple[Any, ...] | list[Tensor]")
Scalar = float | Tensor
"""A number, or a tensor of one element."""


class LinearOperator(Described, Unlike):
    r"""A matrix A of shape `(M, D)`, represented by its products A v.

    A vector has one of these forms, and the product has the same: the structure of the point (a
    dict by parameter name for a module); a list of the leaves in their order; `K` of either,
    stacked in one extra leading dimension on every leaf; flat, of shape `(D,)`; or the columns of a
    `(D, K)` matrix. If the point is one tensor of one dimension, a matrix always holds columns. On
    the left, `V @ A`, several vectors are rows. NumPy arrays and lists of numbers are converted to
    the operator's dtype and device, and the product is a tensor.

    Products are detached, as are `dense()`, `value`, `gradient` and the results of estimators,
    except for `hodiff.trace`, `hodiff.diagonal`, `hodiff.logdet`, `hodiff.eigsh` and `hodiff.solve`
    with `create_graph=True`. If that makes a constant of something that requires grad (a vector,
    the matrix of a `MatrixOperator`, a computed point), a `HodiffWarning` says so once for each
    calling line, and says how to get the derivative. Inside the function of another hodiff call it
    is an error. There is no warning for leaves, such as the parameters of a module as the point,
    nor for what a function closes over.

    | written | means |
    |---|---|
    | `A @ v`, `u @ A` | products |
    | `A + B`, `A - B`, `2 * A`, `-A`, `A / 2`, `A @ B` | sums, multiples, products of operators |
    | `A + 0.1` | \(A + 0.1 I\): damping |
    | `A.T` | the transpose |
    | `A.block("layer1.*")` | the rows and columns of some leaves |

    Cost:
        The class of the operator states the cost of a product. Several vectors are multiplied in
        chunks whose temporaries take about 32 MiB at most.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        >>> isinstance(H, hodiff.LinearOperator), (H + 0.5).dense()
        (True, tensor([[ 6.5000,  0.0000],
                [ 0.0000, 12.5000]]))
    """

    __array_ufunc__ = None  # an array on the left leaves the operation to us

    def __init__(self, *made_of: LinearOperator) -> None:
        self._taken: dict[int, int] = {}  # of each thread, which alone adds to it
        self._made_of, self._own = made_of, ""
        self._group_sum: ProcessGroupSum | None = next(
            (part._group_sum for part in made_of if part._group_sum is not None), None
        )
        self._transpose_of: LinearOperator | None = None
        self._block_of: LinearOperator | None = None
        self._fixed_of: LinearOperator | None = None

    # --- what a class provides

    _space: Space
    _rows: Space | None = None
    """The space of its products, where that is another."""

    @abstractmethod
    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        """A v, for the parts of one vector or of `count` stacked ones."""

    def _transposed(self) -> LinearOperator:
        """The transpose of an operator that is not symmetric, as a new one."""
        return TransposedOperator(self)

    def _pull(self, parts: Leaves, count: int | None) -> Leaves:
        """A'u, of an operator that knows this product too."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def _about(self) -> str:
        """The text of `repr` beside class, size and dtype."""

    # --- what a class has from the operators that it is made of, unless it knows better

    @property
    def _domain(self) -> Space:
        return self._space

    @property
    def _range(self) -> Space:
        return self._rows or self._space

    @property
    def symmetric(self) -> bool:
        """Whether the operator is its own transpose by construction."""
        return bool(self._made_of) and all(part.symmetric for part in self._made_of)

    @property
    def _turns(self) -> bool:
        """Whether it may be symmetric at its values alone;
        its transpose has other derivatives then.
        """
        return any(part._turns for part in self._made_of)

    def _halves(self) -> LinearOperator:
        """Half the sum with its transpose, where derivatives tell the two apart."""
        return 0.5 * (self + self.T) if self._turns else self

    def _chunk(self, count: int) -> int:
        """The number of vectors, of `count`, that one product should take."""
        return min([part._chunk(count) for part in self._made_of], default=count)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        """The block of the leaves with these numbers, as a new operator."""
        return BlockOperator(self, chosen)

    @property
    def _live(self) -> str:
        """The parts that require grad, in words (see `say_detached`)."""
        for part in self._made_of:
            if part._live:
                return part._live
        return self._own

    def _thin(self) -> Thin | None:
        """The operator as a sum of matrices M'M and a multiple of the identity, if it is one."""
        return None

    def _squares(self, most: int) -> tuple[Tensor, int] | None:
        """The squares of the rows, added up, and how many passes; None where more than so many."""
        return None

    def _factored(self, limit: Callable[[int], int]) -> tuple[list[list[Outer]], float, int] | None:
        """The rows of each batch, leaf by leaf; what A'A is divided by; and how many passes.

        None where they are more than `limit` says of so many samples, or not all in factors; nor
        do the rows of several processes meet.
        """
        return None

    def _crossed(self, most: int) -> Stack | None:
        """The rows of A, of A A'; None where they take more than so many passes."""
        return None

    def _by_rows(self, most: int) -> ThinMatrix | None:
        """The operator by all rows of M, where these are known and cost less than
        so many products.
        """
        thin = self._thin() if self._domain.layout is None else None
        return None if thin is None else thin.matrix(self.shape[-1], most)

    def _raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """A context whose errors in one process are raised in all of those that share the data."""
        return nullcontext() if self._group_sum is None else self._group_sum.raise_on_all_ranks()

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        """The products with `count` stacked vectors, differentiable in them and in what the
        operator is made of.
        """
        raise InputError(
            f"create_graph: products of {_arguments.kind(self)} cannot be differentiated; those of "
            f"hodiff.HessianOperator, GaussNewtonOperator, JacobianOperator and MatrixOperator "
            f"can, and of their blocks, sums, products, multiples and transposes."
        )

    def _recorded_pull(self, parts: Leaves, count: int) -> Leaves:
        """The products of the transpose, likewise."""
        return LinearOperator._recorded(self, parts, count)

    def _recorded_rows(self, rows: Tensor) -> Tensor:
        """The products with flat rows `(K, D)`, as rows,
        with their graph whatever the caller's modes are.
        """
        domain = self._domain
        if domain.batch and rows.ndim == 2:
            count = len(rows) // max(1, domain.batch.numel())
            return self._recorded_rows(rows.reshape(count, *domain.batch, domain.size)).flatten(
                0, -2
            )
        with _settings.recording():
            return self._range.join(
                self._recorded(self._domain.split(normal(rows)), len(rows)), len(rows)
            )

    # --- size

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix, `(M, D)`; of a stack of them, `(*batch, M, D)`."""
        return torch.Size((*self._domain.batch, self._range.size, self._domain.size))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: that of the point's tensors, promoted where they differ."""
        return self._domain.dtype

    @property
    def device(self) -> torch.device:
        """The device of the vectors."""
        return self._domain.device

    def _facts(self) -> dict[str, str]:
        *batch, rows, columns = self.shape
        return {
            "size": "".join(f"{number} of " for number in batch) + f"{rows} x {columns}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "made of": self._about(),
        }

    # --- copies

    def __copy__(self) -> Self:
        """One that shares what has been computed, and counts its own products."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._taken = {}
        return copied

    def _fixed(self, made: dict[int, Any] | None = None) -> Self:
        """A copy for what takes several products: it stays with the evaluation at hand, and counts
        its own.

        Another thread's `refresh()` does not reach it, and the products that others take are not
        among its own.
        """
        if self._fixed_of is not None:
            return self
        made = {} if made is None else made
        if id(self) not in made:
            made[id(self)] = copied = copy.copy(self)
            copied._block_of = copied._fixed_of = None
            copied._made_of = tuple(part._fixed(made) for part in self._made_of)
            for name, value in list(vars(copied).items()):
                if hasattr(value, "_fixed"):
                    setattr(copied, name, value._fixed(made))
            copied._fixed_of = self
        return made[id(self)]

    # --- products

    @overload
    def __matmul__(self, v: LinearOperator) -> LinearOperator: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __matmul__(self, v: Tensor | list[float] | SupportsArray) -> Tensor: ...
    @overload
    def __matmul__(self, v: Container) -> Container: ...
    def __matmul__(self, v: Any) -> Any:
        """`A @ v`: a product in the spelling of `v`; with an operator, their product."""
        if isinstance(v, LinearOperator):
            return ProductOperator(self, v)
        return self._applied(v, self._live)

    @overload
    def __rmatmul__(self, u: Tensor | list[float] | SupportsArray) -> Tensor: ...
    @overload
    def __rmatmul__(self, u: Container) -> Container: ...
    def __rmatmul__(self, u: Any) -> Any:
        """`u @ A`: the row vector u'A, or, for a `(K, M)` matrix, K of them as rows."""
        u = self._range.as_tensors(u)
        rows = isinstance(u, Tensor) and u.ndim == 2 and not self._domain.batch
        if rows and u.shape[1] == self.shape[0]:
            return (self.T @ u.T).T
        if rows and u.shape[0] == self.shape[0] and [u.shape] != self._range.shapes:
            raise InputError(
                f"u has shape {tuple(u.shape)}, expected ({len(u)},), or (K, {len(u)}) for K "
                f"vectors; several vectors on the left are rows: give u.T."
            )
        return self.T @ u

    def _applied(self, v: Any, live: str) -> Any:
        """`A @ v`, of which it is said that it is detached, if something is `live`."""
        domain, target = self._domain, self._range
        with self._raise_on_all_ranks():
            kind, parts, count, tree = domain.parse(v)
            requiring = True in [part.requires_grad for part in parts]
            say_detached("A @ v", live or ("v requires grad" if requiring else ""))
            if requiring:
                _call.refuse_transforms()
                parts = [part.detach() for part in parts]
            back = tree if target is domain or target.like(domain) else target.tree
            if count is not None:
                fixed = self._fixed()  # for all of them
                if kind == "columns" and not domain.batch:
                    return fixed._columns(parts[0])
                products = fixed._stacked(parts)
                if kind == "columns":
                    return products[0].movedim(0, -1)
                return target.result(products, back)
            products = self._product(parts, None)
            return target.join(products, None) if kind == "flat" else target.result(products, back)

    def _stacked(self, parts: Leaves) -> Leaves:
        """Products with stacked vectors, some at a time."""
        count = len(parts[0])
        size, results = self._chunk(count), self._range.empty(count)
        for start in range(0, count, size):
            for result, part in zip(results, self._some(parts, start, size), strict=True):
                result[start : start + size] = part
        return results

    def _columns(self, columns: Tensor) -> Tensor:
        """Products with columns `(D, K)`, as columns."""
        count = columns.shape[1]
        size, rows = (
            self._chunk(count),
            columns.new_empty((count, self._range.size), dtype=self._range.dtype),
        )
        block = self._domain.turned_at_once(size)
        for first in range(0, count, block):
            parts = self._domain.rows(columns[:, first : first + block])
            for start in range(0, len(parts[0]), size):
                products = self._some(parts, start, size)
                self._range.join_into(rows[first + start :][: len(products[0])], products)
        return rows.T

    def _some(self, parts: Leaves, start: int, size: int) -> Leaves:
        """Products with some of the stacked vectors. One that stands alone is not stacked."""
        some = [part[start : start + size] for part in parts]
        if len(some[0]) == 1:
            return [part.unsqueeze(0) for part in self._product([part[0] for part in some], None)]
        return self._product(some, len(some[0]))

    def _times(self, flat: Tensor) -> Tensor:
        """The product with one flat vector of the operator's own,
        whose spelling need not be recognized.
        """
        with self._raise_on_all_ranks():
            product = self._range.join(self._product(self._domain.split(flat), None), None)
            _call.refuse_tangent(product, MADE_OF)
            return product

    def _times_rows(self, rows: Tensor) -> Tensor:
        """The products with several, as rows."""
        if len(rows) == 1:
            return self._times(rows[0])[None]
        with self._raise_on_all_ranks():
            products = self._range.join(self._stacked(self._domain.split(rows)), len(rows))
            _call.refuse_tangent(products, MADE_OF)
            return products

    def _times_some(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The products of systems with these numbers, by vector and then by place in the batch."""
        batch, count = self._domain.batch, self._domain.batch.numel()
        if not len(numbers) % count and torch.equal(
            numbers, torch.arange(len(numbers), device="cpu")
        ):
            # all, without a copy
            return self._times_rows(rows.reshape(-1, *batch, rows.shape[-1])).flatten(0, -2)
        kinds, places = (numbers // count).unique(return_inverse=True)
        at = (places * count + numbers % count).to(rows.device)
        whole = rows.new_zeros((len(kinds) * count, rows.shape[1]))
        whole[at] = rows
        return self._times_rows(whole.reshape(len(kinds), *batch, -1)).flatten(0, -2)[at]

    def _product(self, parts: Leaves, count: int | None) -> Leaves:
        self._count(1 if count is None else count)
        return self._multiply(parts, count)

    @property
    def products(self) -> int:
        """The number of products with a single vector computed so far, those of its transpose and
        its blocks among them.

        In all threads. A pass for rows (see `hodiff.GaussNewtonOperator`) counts as one.
        """
        return sum(self._taken.values())

    def _count(self, number: int) -> None:
        """A product of a transpose or of a block is one of the operator that it belongs to."""
        me = _locks.here.thread
        self._taken[me] = self._taken.get(me, 0) + number
        for whole in (
            (self._fixed_of,)
            if self._fixed_of is not None
            else (self._transpose_of, self._block_of)
        ):
            if whole is not None:
                whole._count(number)

    def flatten(self, v: Any) -> Tensor:
        """A vector like the point as a flat one `(D,)`; K stacked ones as columns `(D, K)`.

        A flat one is itself.
        """
        if self._domain.layout is not None:
            self._domain.layout.refuse_flat("A.flatten")
        v = self._domain.as_tensors(v)
        vectors = self._domain.parse(v)
        if vectors.kind in ("flat", "columns"):
            return v
        joined = self._domain.join(vectors.parts, vectors.number)
        return joined if vectors.number is None else joined.movedim(0, -1)

    def unflatten(self, flat: Any) -> Any:
        """A flat vector `(D,)` with the structure of the point, as views;
        columns `(D, K)` as K stacked ones.
        """
        kind, parts, _, _ = self._domain.parse(flat)
        if kind == "columns" and not self._domain.flat:
            return self._domain.result(self._domain.rows(parts[0]))
        return self._domain.result(parts) if kind == "flat" else flat

    # --- algebra

    @property
    def T(self) -> LinearOperator:
        """The transpose; a symmetric operator is its own."""
        if self.symmetric and not self._turns:
            return self
        if self._transpose_of is not None:
            return self._transpose_of
        turned = self._transposed()
        turned._transpose_of = self
        return turned

    def block(self, *patterns: str) -> LinearOperator:
        """The diagonal block of some leaves of the point, by name.

        Args:
            *patterns: Names of leaves (`"0.weight"`, `"x[1]"`), of submodules, or patterns with
                `*`, `?` and `[...]`, as for `hodiff.select`.

        Returns:
            An operator whose vectors are dicts by name. It shares what has been computed.

        Raises:
            InputError: A pattern that matches nothing, or an operator that is not square.
        """
        if self.shape[-2] != self.shape[-1] or not self._domain.like(self._range):
            raise InputError(
                f"block: {self!r} has rows and columns of different kinds; a block needs the same."
            )
        return self._block(self._domain.numbers_of(patterns or ("*",)))

    def _block(self, chosen: list[int]) -> LinearOperator:
        block = self._blocked(chosen)
        block._block_of = self
        return block

    def __add__(self, other: LinearOperator | Scalar) -> LinearOperator:
        """`A + B`, and `A + 0.1` or `0.1 + A` for A + 0.1 I."""
        if isinstance(other, LinearOperator):
            return SumOperator(self, other)
        check_sizes(self._domain, self._range, "A + number")
        return AffineOperator(self, 1.0, as_number(other, "+"))

    __radd__ = __add__

    def __mul__(self, factor: Scalar) -> LinearOperator:
        """The multiple `A * 2` or `2 * A` of an operator."""
        return AffineOperator(self, as_number(factor, "*"))

    __rmul__ = __mul__

    def __truediv__(self, factor: Scalar) -> LinearOperator:
        """The multiple `A / 2` of an operator."""
        return AffineOperator(self, 1 / as_number(factor, "/"))

    def __neg__(self) -> LinearOperator:
        """The negative `-A` of an operator."""
        return AffineOperator(self, -1.0)

    def __sub__(self, other: LinearOperator | Scalar) -> LinearOperator:
        """`A - B`, and `A - 0.1` for A - 0.1 I."""
        return self + (-other if isinstance(other, LinearOperator) else -as_number(other, "-"))

    def __rsub__(self, other: Scalar) -> LinearOperator:
        """The operator `0.1 - A`, that is 0.1 I - A."""
        return -self + other

    # --- exports

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """NumPy would make an array without dimensions that holds the operator,
        and fail later and elsewhere.
        """
        raise TypeError(
            f"{self!r} is not an array: it does not store its entries. Give SciPy's routines "
            f"H.to_scipy(), which computes products; the whole matrix is H.dense().numpy()."
        )

    def _instead(self, name: str) -> str:
        if name == "matvec":  # SciPy asks for it by `hasattr`, which would hide the words
            self.__array__()
        return super()._instead(name)

    if not TYPE_CHECKING:  # a checker of types says it before anything runs

        def __call__(self, *args: object) -> NoReturn:
            """As other libraries write a product;
            a power or an inverse is taken for one as well.
            """
            raise InputError(
                "an operator is not a function or a number: write H @ v for a product, H @ H for a "
                "power, hodiff.solve(H, b) for its inverse times b, and H.to_scipy() for SciPy."
            )

        __pow__ = __rtruediv__ = __float__ = __call__

        def __getitem__(self, index: object) -> NoReturn:
            """Entries are not known; and a loop over rows would ask for them one by one."""
            raise InputError(
                f"{self!r} cannot be indexed: it does not store its entries. Its matrix is "
                f"H.dense(), its diagonal is hodiff.diagonal(H), and H.block(pattern) is the block "
                f"of some leaves."
            )

    def dense(self) -> Tensor:
        """The matrix itself, `(M, D)`.

        Returns:
            A tensor of `M * D` entries, in the order of flat vectors.

        Raises:
            InputError: It would not fit into the memory that is free; the message says how large it
                is.

        Cost:
            One product for each column (or, where there are fewer, for each row), in chunks; of
            `J @ J.T`, see `hodiff.JacobianOperator`.
        """
        say_detached("A.dense()", self._live)
        if self._domain.layout is not None:
            self._domain.layout.refuse_flat("A.dense()")
        with self._raise_on_all_ranks():
            return self._fixed()._dense()

    def _dense(self) -> Tensor:
        rows, columns = self.shape[-2:]
        needed = self.shape.numel() * self._domain.dtype.itemsize
        if needed > 2**23 and needed > (free := free_bytes(self.device)):  # which reads a file
            raise InputError(
                f"dense: a {rows} x {columns} matrix of {self.dtype} takes {readable(needed)}, but "
                f"only {readable(free)} are free. Use products (A @ v), hodiff.eigsh, "
                f"hodiff.trace, hodiff.diagonal, or a block: A.block('...')."
            )
        stack = self._crossed(rows)
        if stack is not None:
            product = stack.gram()
            return product.tril() + product.tril(-1).mT
        A = self.T if rows < columns else self
        domain, size = A._domain, A._chunk(A._domain.size)
        shape = (domain.size, *domain.batch, A._range.size)
        turned = torch.empty(shape, dtype=A._range.dtype, device=A._range.device)
        for start in range(0, domain.size, size):
            stop = min(start + size, domain.size)
            products = A._product(domain.split(domain.units(start, stop)), stop - start)
            A._range.join_into(turned[start:stop], products)
        return turned.movedim(0, -2 if A is not self else -1)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, in the operator's own
        dtype.

        Raises:
            ImportError: SciPy is not installed.
            InputError: NumPy has no such dtype (bfloat16).
        """
        say_detached("A.to_scipy()", self._live)
        _call.refuse_stand_ins()
        if self._domain.batch:
            raise InputError(
                "to_scipy takes one matrix at a time; make an operator of each, "
                "without batch_ndim=."
            )
        try:
            from scipy.sparse.linalg import LinearOperator as ScipyOperator
        except ImportError as error:
            raise ImportError("to_scipy() needs SciPy: pip install scipy") from error
        if self.dtype is torch.bfloat16:
            raise InputError("to_scipy: NumPy has no bfloat16; make the operator in float32.")
        dtype = torch.empty((), dtype=self.dtype, device="cpu").numpy().dtype

        def product(turned: bool, straight: bool, array: Any) -> Any:
            # SciPy may spell a vector as one column
            _call.refuse_stand_ins()
            array = array.reshape(-1) if straight else array
            v = torch.from_numpy(array.astype(dtype, copy=True)).to(self.device)
            return constant((self.T if turned else self)._applied(v, "")).cpu().numpy()

        products = {
            "matvec": partial(product, False, True),
            "rmatvec": partial(product, True, True),
            "matmat": partial(product, False, False),
            "rmatmat": partial(product, True, False),
        }
        return ScipyOperator(shape=tuple(self.shape), dtype=dtype, **products)  # pyright: ignore[reportArgumentType, reportCallIssue]


def normal(tensor: Tensor) -> Tensor:
    """A tensor that can be saved for a backward pass."""
    return tensor.clone() if tensor.is_inference() else tensor


MADE_OF = "what the operator is made of"


def constant(product: Tensor) -> Tensor:
    """A product that counts as a constant in what follows from it: it carries no tangent."""
    _call.refuse_tangent(product, MADE_OF)
    return product


def as_number(value: object, sign: str) -> float:
    """A scalar operand as a float."""
    if isinstance(value, Tensor):
        _call.refuse_stand_ins()
        _call.refuse_tangent(value, f"the number after {sign}")
        if not (value.is_nested or value.requires_grad) and value.numel() == 1:
            return float(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    live = getattr(value, "requires_grad", False)
    what = "a tensor that requires grad" if live else _arguments.kind(value)
    raise InputError(
        f"operator {sign} {what}: expected a number or an operator; wrap a matrix: "
        "hodiff.MatrixOperator(A)."
    )


def check_sizes(left: Space, right: Space, what: str) -> None:
    if left.batch != right.batch:
        raise InputError(
            f"{what}: got stacks of {tuple(left.batch)} and {tuple(right.batch)} matrices; "
            "give both the same batch."
        )
    compatible = left.size == right.size and (left.like(right) or left.flat or right.flat)
    check_places(left, right, what)
    if not compatible:
        raise InputError(
            f"{what}: the sizes {left.size} and {right.size}, or the structures (including the "
            f"order of keys), differ; combine operators over the same point, or with a flat "
            f"MatrixOperator of the same size."
        )
    if left.dtype != right.dtype or left.device != right.device:
        raise InputError(
            f"{what}: got {left.dtype} on {left.device} and {right.dtype} on {right.device}; "
            "make both the same."
        )


def check_places(left: Space, right: Space, what: str) -> None:
    """Raise where two operators have their entries in different processes."""
    if getattr(left.layout, "places", None) != getattr(right.layout, "places", None):
        raise InputError(
            f"{what}: one of the two is sharded over processes, and the other is not, or is "
            f"otherwise. Combine operators over the same sharded point."
        )


class SymmetricOperator(LinearOperator):
    """An operator that is its own transpose."""

    @property
    def symmetric(self) -> bool:
        """A symmetric operator is always that."""
        return True


# --- what is made of operators: sums, multiples, products, transposes, blocks, each an operator
# itself --- The transpose of a sum is the sum of the transposes; so is the block of one the sum of
# the blocks.


ProductOf = Callable[[LinearOperator, Leaves, Any], Leaves]
"""What an operator makes of the parts of one vector, or of so many stacked ones: detached,
or with a graph.
"""


class ComposedOperator(LinearOperator):
    """An operator whose products are those of others, put together."""

    @abstractmethod
    def _composed(self, parts: Leaves, count: int | None, product: ProductOf) -> Leaves:
        """A v, by this product of the operators that it is made of."""

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        return self._composed(parts, count, LinearOperator._product)

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        self._count(count)
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
            self._range.take(
                product(A, A._domain.take(parts, count, self._domain), count), count, A._range
            )
            for A in self._made_of
        )
        return [a + b for a, b in zip(left, right, strict=True)]

    def _thin(self) -> Thin | None:
        A, B = self._made_of
        left, right = A._thin(), B._thin()
        if left is None or right is None or not A._domain.like(B._domain):
            return None
        made = (*left.made, *right.made, self)
        return Thin(left.terms + right.terms, left.shift + right.shift, made)

    def _transposed(self) -> LinearOperator:
        return SumOperator(*(A.T for A in self._made_of))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        left, right = self._made_of
        alike = left._domain.like(right._domain)
        return (
            SumOperator(left._block(chosen), right._block(chosen))
            if alike
            else super()._blocked(chosen)
        )

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
        return [
            torch.add(part, v, alpha=self._shift) for part, v in zip(products, own, strict=True)
        ]

    def _thin(self) -> Thin | None:
        thin, c = self._inner._thin(), self._factor
        if thin is None:
            return None
        terms = tuple((c * factor, A) for factor, A in thin.terms)
        return Thin(terms, c * thin.shift + self._shift, (*thin.made, self))

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
        return (
            (left is right and left.symmetric)
            or left._transpose_of is right
            or right._transpose_of is left
        )

    @property
    def _turns(self) -> bool:
        left, right = self._made_of
        return left is right and left._turns

    def _thin(self) -> Thin | None:
        left, right = self._made_of
        return Thin(((1.0, right),), made=(self,)) if left._transpose_of is right else None

    def _crossed(self, most: int) -> Stack | None:
        left, right = self._made_of
        alone = len(left._range.names) == 1  # rows of several outputs are in another order
        limit = min(most, NUMBERS)
        turned = alone and right._transpose_of is left
        known = left._factored(lambda samples: limit) if turned else None
        if known is None:
            return None
        self._count(known[2])
        return Stack(known[0])

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
    """Some rows, and the same columns, of an operator that has no way of its own:
    vectors are padded with zeros.
    """

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
    """The one of two spaces of one size that has more structure: vectors beside a flat matrix are
    those of the point.
    """
    return second if first.flat and first.size == second.size else first


# --- what products round as, and that they are detached -------------------------------------------


def as_given(tensor: Tensor) -> AbstractContextManager[None]:
    """Matrix products in the dtype of their factors,
    whatever the caller's autocast would have them rounded to.
    """
    return _settings.autocast(tensor.device.type)


WAYS = {
    "A @ v": "hodiff.hvp, hodiff.jvp or hodiff.vjp with create_graph=True; for a matrix, "
    "PyTorch's own product",
    "A.dense()": "hodiff.hessian(..., matrix=True) or hodiff.jacobian with create_graph=True; "
    "for a matrix, itself",
    "A.to_scipy()": "hodiff.hvp, hodiff.jvp or hodiff.vjp with create_graph=True (NumPy arrays "
    "carry no derivative)",
    "A.value": "the function itself, or hodiff.value_and_grad with create_graph=True",
    "A.gradient": "hodiff.grad with create_graph=True",
    **dict.fromkeys(
        ("trace", "eigsh", "diagonal", "solve", "logdet"),
        "create_graph=True, for hodiff.HessianOperator, GaussNewtonOperator, JacobianOperator, "
        "MatrixOperator, and their blocks, sums, products and multiples",
    ),
    "spectral_density": (
        "torch.linalg.eigvalsh of hodiff.hessian(..., matrix=True, create_graph=True), "
        "or of the matrix"
    ),
}
"""Where the derivative of a detached result is to be had."""


def say_detached(name: str, live: str) -> None:
    """Raise for a detached result inside the `f` of another hodiff call; warn where it should not
    be detached.

    The warning is given once for each line of the caller's, by Python's own rule.

    Args:
        name: The result, a key of `WAYS`.
        live: What requires grad of all that it is computed from, in words; nothing, where nothing
            does.
    """
    if not torch.is_grad_enabled():
        return
    if _call.inside():
        raise GraphError(
            "an operator's products are detached, so inside the function of another hodiff call "
            "they would silently count as constants. Use hodiff.hvp(f, x, v) there, or compute the "
            "product outside; if a constant is meant, wrap it in `with torch.no_grad():`, or pass "
            "create_graph=False if the call takes it."
        )
    if live:
        _call.refuse_transforms()
        said = "" if "." in name or "@" in name else "create_graph=False, "
        warnings.warn(
            f"{name}: the result is detached, although {live}, so it counts as a constant in what "
            f"is computed from it. For its derivative, use {WAYS[name]}. If a constant is meant, "
            f"say so: {said}.detach() on what requires grad, or torch.no_grad().",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )
