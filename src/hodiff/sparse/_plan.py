"""Sparse matrices by plans: pattern, colors and recovery, prepared for many points, or for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, Never, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _compiled_callers, _nodes, _reverse, _tree
from hodiff._core._arguments import Allowed, ChunkSize, check_option, is_set
from hodiff._core._call import Call, call, refuse_stand_ins, refuse_tangent
from hodiff._core._graph import OutputGraph
from hodiff._core._records import Unlike
from hodiff._core._settings import RandomState, on
from hodiff._core._vectors import generic
from hodiff._core._where import Where
from hodiff.errors import DerivativeError, InputError
from hodiff.sparse import _pattern, _rules
from hodiff.sparse._pattern import Pattern, given, scipy_sparse
from hodiff.sparse._tracer import Constants, Sets, TooMany, Tracer, exits, tensors_in

SparseOutput = Literal["torch", "csr", "scipy"]
"""In which form a sparse matrix is wanted."""


BREAK_EVEN = 600
"""With fewer columns the dense matrix is computed sooner than a pattern and its colors."""


M = TypeVar("M")


class Plan(Unlike, Generic[M]):
    """A sparse matrix of derivatives, ready to be evaluated at many points.

    Returned by `plan_hessian` and `plan_jacobian`. `plan(x)` is the matrix at *x*; `plan.values(x)`
    its entries, at the fixed positions `plan.rows` and `plan.columns`.

    Attributes:
        pattern: The entries of the matrix.
        kind: How entries share products: `"star"`, `"rows"` or `"columns"`.
        colors: The color of each column (or row).
        products: The number of products for one evaluation, which is the number of colors.
        place: The position of each entry in the products.
    """

    def __init__(
        self,
        f: Any,
        point: Point,
        order: int,
        pattern: Pattern,
        colors: Tensor,
        kind: str,
        options: dict[str, Any],
    ) -> None:
        self.pattern = pattern
        self.colors = colors
        self.kind = kind
        self.products = _pattern.count_of(colors)
        self.place = _pattern.places(pattern, colors, kind)
        self._whole = pattern, self.place
        self._f = f
        self._point = point
        self._order = order
        self._options = options
        self._constants = Constants()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.pattern.shape

    @property
    def rows(self) -> Tensor:
        """The row of each entry."""
        return self.pattern.rows

    @property
    def columns(self) -> Tensor:
        """The column of each entry."""
        return self.pattern.columns

    def lower(self) -> Plan:
        """A plan of the lower triangle alone: what interior-point solvers take of a Hessian."""
        held = self.rows >= self.columns
        part = Plan.__new__(Plan)
        vars(part).update(vars(self))
        remarks = self.pattern.without_rule, self.pattern.values_read
        part.pattern = Pattern(self.rows[held], self.columns[held], self.shape, *remarks)
        part.place = self.place[held]
        return part

    def __call__(
        self,
        x: Any,
        *more: Never,
        check: bool | None = None,
        create_graph: bool | None = None,
        chunk_size: ChunkSize = "auto",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> M:
        """The matrix at a point.

        Args:
            x: A point like the one that the plan was made at; or all its numbers in one vector, a
                tensor or a NumPy array.
            check: Whether to compare one product, as for `sparse_hessian`. None: where the pattern
                may not hold, since Python read values that follow from the point
                (`pattern.values_read`), *args* or *kwargs* hold others of what is not a dense
                tensor (an index, a flag, a sparse matrix) than when the plan was made, a variable
                of `f` holds something else, or a tensor that `f` closes over was written into or is
                gone.
            create_graph: Whether the entries can be differentiated again. None: only inside the
                function of another hodiff call.
            chunk_size: How many products one pass takes.
            args: Further positional arguments for `f`; None: as when the plan was made.
            kwargs: Keyword arguments for `f`, likewise.

        Returns:
            The matrix, of shape `plan.shape`.
        """
        if more:
            raise InputError(
                "x: a plan already has its function; call it with the point alone: plan(x)."
            )
        form: SparseOutput = self._options["output"]
        library = scipy_sparse() if form == "scipy" else None  # before anything is computed
        values = self.values(
            x,
            check=check,
            create_graph=create_graph,
            chunk_size=chunk_size,
            args=args,
            kwargs=kwargs,
        )
        return _matrix(self.pattern, values, form, library)

    def values(
        self,
        x: Any,
        *,
        check: bool | None = None,
        create_graph: bool | None = None,
        chunk_size: ChunkSize = "auto",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The entries of the matrix at a point, in the order of `rows` and `columns`.

        Arguments are those of the plan itself.
        """
        asked = self._options
        chunk = _arguments.check_chunk_size(chunk_size)
        others = (
            asked["args"] if args is None else args,
            asked["kwargs"] if kwargs is None else kwargs,
        )
        if check is None:
            compared = (
                bool(self.pattern.values_read)
                or _are_other((asked["args"], asked["kwargs"]), others)
                or self._constants.changed(self._f)
            )
        else:
            compared = is_set(check, "check")
        where = self._point.where(x)
        passes = 1 if self.kind == "rows" else 2
        made = call(
            self._f,
            where,
            passes=passes,
            create_graph=create_graph,
            allow=asked["allow"],
            args=others[0],
            kwargs=others[1],
        )
        values = self._evaluated(made, chunk, compared)
        if compared:
            self._constants.keep(self._f)
        return values

    def _evaluated(self, made: Call, chunk: int | None, check: bool) -> Tensor:
        with OutputGraph(made) as graph:
            outputs = (
                _reverse.gradient(graph, differentiated=True)
                if self._order == 2
                else self._point.outputs(graph)
            )
            rows, columns = [o.numel() for o in outputs], [leaf.numel() for leaf in graph.leaves]
            if sum(rows) != self.shape[0]:
                raise InputError(
                    f"f returned {sum(rows)} numbers at this point, but {self.shape[0]} when the "
                    f"plan was made. Make a plan for each shape."
                )
            precision = (
                _nodes.coarsest(_nodes.survey(outputs), graph.leaves[0].dtype) if check else None
            )
            likes, sizes = (outputs, rows) if self.kind != "columns" else (graph.leaves, columns)
            random = generic(len(self.colors)).double() if check else None
            seeds = self._seeds(likes, sizes, random)
            count = self.products + check
            if self.kind == "columns":
                products = _reverse.jvp(graph, outputs, seeds, count, chunk_size=chunk)
            else:
                products = _reverse.products(graph, outputs, seeds, count, chunk_size=chunk)
            flat = [part.reshape(count, part.shape[1:].numel()) for part in products]
            whole = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
            values = whole.reshape(-1).index_select(0, self.place.to(whole.device))
        if random is not None and precision is not None:
            self._compare(whole.detach(), random, torch.finfo(precision).eps)
        return values

    def _seeds(
        self, likes: Sequence[Tensor], sizes: Sequence[int], random: Tensor | None
    ) -> list[Tensor]:
        """The sums of unit vectors of each color, and a random vector to compare, leaf by leaf."""
        parts = [
            _pattern.seeds(colors, self.products, like)
            for colors, like in zip(self.colors.split(list(sizes)), likes, strict=True)
        ]
        if random is not None:
            drawn = random.split(list(sizes))
            parts = [
                torch.cat([part, own.to(part)[None]])
                for part, own in zip(parts, drawn, strict=True)
            ]
        return [
            part.reshape(len(part), *like.shape) for part, like in zip(parts, likes, strict=True)
        ]

    def _compare(self, products: Tensor, vector: Tensor, eps: float) -> None:
        """Raise where the matrix times a random vector is not the last product,
        to the precision *eps*.
        """
        (pattern, place), product = self._whole, products[-1]
        values = products.reshape(-1).index_select(0, place.to(products.device))
        rows, columns = pattern.rows.to(values.device), pattern.columns.to(values.device)
        if self.kind == "rows":
            rows, columns = columns, rows
        terms = values.double() * vector.to(values.device, torch.float64)[columns]
        expected = product.new_zeros(len(product), dtype=torch.float64).index_add(0, rows, terms)
        size = product.new_zeros(len(product), dtype=torch.float64).index_add(0, rows, terms.abs())
        off = (expected - product.double()).abs()
        scale = torch.maximum(size, product.double().abs()).max() if len(product) else 0
        wrong = ~(off <= eps ** (2 / 3) * scale)
        if bool(wrong.any()) and bool(product.isfinite().all()):
            at = wrong.nonzero()[:, 0].tolist()
            side = "columns" if self.kind == "rows" else "rows"
            shown = ", ".join(map(str, at[:6])) + (
                f" and {len(at) - 6} more" if len(at) > 6 else ""
            )
            error = float(off.max() / scale)
            rounding = (
                " So small a difference may also be rounding, where large terms cancel."
                if error < 1e-6
                else ""
            )
            raise DerivativeError(
                f"the pattern does not hold at this point: {side} {shown} of the matrix have an "
                f"entry that it misses (its product with a random vector is off by {error:.2g}). "
                f"If f branches on values, or closes over what has changed, make a new plan at "
                f"this point, or give a pattern= that always holds.{self._read()}{rounding}"
            )

    def _read(self) -> str:
        """The values that Python read, in a message."""
        if not self.pattern.values_read:
            return ""
        return (
            f" Here f reads {', '.join(self.pattern.values_read)} from what follows from x. "
            "An index is followed where it is a tensor of one dimension: x[i[None]] for x[i]."
        )

    def __repr__(self) -> str:
        name = "Hessian" if self._order == 2 else "Jacobian"
        by = {"star": "star colors", "rows": "colors of rows", "columns": "colors of columns"}[
            self.kind
        ]
        wide = (
            f"; without a rule: {', '.join(self.pattern.without_rule)}"
            if self.pattern.without_rule
            else ""
        )
        read = (
            "; checked at each point, as f reads values of it" if self.pattern.values_read else ""
        )
        small = "; computed once, the dense matrix is cheaper" if self.shape[1] < BREAK_EVEN else ""
        return (
            f"Plan of a {name} {self.shape[0]} x {self.shape[1]}: {self.pattern.nnz} entries by "
            f"{self.products} products ({by}){wide}{read}{small}"
        )


def _are_other(before: Any, now: Any) -> bool:
    """Whether arguments of `f` differ in more than the values of dense tensors,
    which patterns do not rest on.
    """
    if isinstance(before, Tensor) and before.layout is torch.strided:
        return not isinstance(now, Tensor) or (before.shape, before.dtype, before.layout) != (
            now.shape, now.dtype, now.layout
        )  # fmt: skip
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() != now.keys() or any(
            _are_other(before[key], now[key]) for key in before
        )
    if isinstance(before, (tuple, list)) and isinstance(now, (tuple, list)):
        return len(before) != len(now) or any(map(_are_other, before, now))
    if isinstance(before, (int, float, complex, str, bytes)):
        return type(before) is not type(now) or before != now
    return before is not now


class Point:
    """The structure of a point, without its numbers, and of what `f` returns there.

    Attributes:
        space: The vectors like it.
        returned: The structure of the outputs.
    """

    returned: _tree.Tree

    def __init__(self, where: Where) -> None:
        self.space = where.space().side()
        self._given = where.given_tree
        self._owned = bool(where.module_slices)

    def where(self, x: Any) -> Where:
        """A point of this structure: as such, or as one vector of all its numbers."""
        if type(x).__module__ == "numpy":
            x = self._unflattened(torch.as_tensor(x.copy()))
        elif (
            isinstance(x, Tensor)
            and x.shape == (self.space.size,)
            and [x.shape] != self.space.shapes
        ):
            x = self._unflattened(x)
        where = Where(x)
        if where.names != self.space.names:
            where = self._by_name(x)
        got, shapes = where.space().shapes, self.space.shapes
        if got != shapes:
            raise InputError(
                f"x holds tensors of shape {[*map(tuple, got)]}, expected {[*map(tuple, shapes)]}, "
                f"as when the plan was made."
            )
        return where

    def _by_name(self, x: Any) -> Where:
        """A point whose dicts have their keys in another order, in the order of the plan."""
        different = _tree.difference(self._given, _tree.flatten(x)[2], "x")
        if different:
            raise InputError(f"x: {different}, as when the plan was made.")
        where = Where(_tree.rebuild(self._given, iter(_tree.leaves_like(self._given, x))))
        if where.names != self.space.names:
            raise InputError(
                f"x has the parameters {where.names}, expected {self.space.names}, "
                "as when the plan was made."
            )
        return where

    def outputs(self, graph: OutputGraph) -> list[Tensor]:
        """The outputs at a point, in the order that they had when the plan was made."""
        outputs, tree = graph.tensors(), _tree.flatten(graph.outputs)[2]
        different = _tree.difference(self.returned, tree, "f(x)")
        if different:
            raise InputError(f"f: {different}, as when the plan was made.")
        return _tree.reordered(outputs, tree, self.returned)

    def _unflattened(self, x: Tensor) -> Any:
        if self._owned:
            raise InputError("x: got a vector, but the plan was made at a module; give the module.")
        if x.numel() != self.space.size:
            raise InputError(
                f"x has {x.numel()} numbers, expected {self.space.size}, as when the plan was made."
            )
        return self.space.result(self.space.split(x.reshape(-1).to(self.space.device)))


def _matrix(pattern: Pattern, values: Tensor, output: SparseOutput, library: Any) -> Any:
    """The entries put together in the form that is wanted."""
    refuse_tangent(values, "the sparse matrix")
    if library is not None:
        if values.dtype is torch.bfloat16:
            raise InputError('output="scipy": NumPy has no bfloat16; compute in float32.')
        if values.requires_grad:
            raise InputError(
                'output="scipy": NumPy keeps no graph, but these entries have one '
                "(create_graph=True, or a call inside another hodiff call), so their derivative "
                'would be missing. Use output="csr", or create_graph=False for constants.'
            )
        parts = (values.cpu().numpy(), pattern.columns.numpy(), pattern.starts().numpy())
        return library.csr_array(parts, shape=pattern.shape)
    device = values.device
    if output == "csr":
        matrix = torch.sparse_csr_tensor(
            pattern.starts().to(device),
            pattern.columns.to(device),
            values,
            pattern.shape,
            device=device,
            check_invariants=False,
        )
    else:
        indices = torch.stack([pattern.rows, pattern.columns]).to(device)
        matrix = torch.sparse_coo_tensor(
            indices, values, pattern.shape, device=device, is_coalesced=True, check_invariants=False
        )
    _nodes.mark_results([matrix])
    return matrix


class SparseMatrixOptions(TypedDict, total=False):
    """The options that both take, besides the form of the result; for overloads alone."""

    pattern: Any
    check: bool
    create_graph: bool | None
    allow: Allowed
    chunk_size: ChunkSize
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


@overload
def sparse_hessian(
    f: Any,
    x: Any,
    *,
    output: Literal["torch", "csr"] = "torch",
    **options: Unpack[SparseMatrixOptions],
) -> Tensor: ...


@overload
def sparse_hessian(
    f: Any, x: Any, *, output: SparseOutput, **options: Unpack[SparseMatrixOptions]
) -> Any: ...


def sparse_hessian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: SparseOutput = "torch",
    check: bool = False,
    create_graph: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The Hessian of a function of many variables, most of which do not interact, as a sparse
    matrix.

    hodiff detects which entries can be nonzero, lets columns without common rows share a product,
    \(B = H S\), and reads off each entry where it is the only term. For many points make a plan
    once: `hodiff.sparse.plan_hessian`.

    Args:
        f: A function of *x* that returns one element (of any shape), or such a tensor already
            computed from *x*, whose graph is left intact.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`, with
            D entries in all.
        pattern: The entries that can be nonzero, if you know them: a `Pattern`, a SciPy sparse
            matrix, a sparse tensor (all stored entries count), or a pair of index vectors. It is
            not checked.
        output: `"torch"`, a sparse COO tensor; `"csr"`, a sparse CSR tensor; `"scipy"`, a
            `scipy.sparse.csr_array`, which keeps no graph.
        check: Whether to compare the matrix with a Hessian-vector product for a random vector.
        create_graph: Whether the entries can be differentiated again. None: only inside the
            function of another hodiff call.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many products one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The matrix, of shape `(D, D)`, rows and columns in the order of *x*. It holds an entry for
        each place of the pattern, also where its value happens to be zero.

    Raises:
        InputError: *x* or `f(x)` is not what `hvp` takes; a *pattern* has another shape, is not
            symmetric, or has indices out of range; or the detected pattern is not sparse.
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.
        DerivativeError: With `check`, the matrix misses an entry.

    Cost:
        One evaluation of `f`, one reverse pass, and a batched pass for as many vectors as there are
        colors, once the pattern and its colors are known. To find these is most of a first call. A
        chain has 3 colors, and a grid with eight neighbors 9, whatever their size. `check` adds a
        vector. Memory: the entries, and D numbers for each color.

    Examples:
        >>> import torch, hodiff
        >>> H = hodiff.sparse_hessian(
        ...     lambda x: (x[1:] * x[:-1] ** 2).sum(), torch.tensor([1.0, 2.0, 3.0, 4.0])
        ... )
        >>> H.to_dense()
        tensor([[4., 2., 0., 0.],
                [2., 6., 4., 0.],
                [0., 4., 8., 6.],
                [0., 0., 6., 0.]])

    Reference:
        Gebremedhin, A. H., Manne, F., Pothen, A. (2005). What color is your Jacobian? Graph
        coloring for computing derivatives. SIAM Review 47(4). doi:10.1137/S0036144504444711.
    """
    options = {"output": output, "allow": allow, "args": args, "kwargs": kwargs}
    return _at_once(
        f, x, 2, pattern, options, check, create_graph=create_graph, chunk_size=chunk_size
    )


@overload
def sparse_jacobian(
    f: Any,
    x: Any,
    *,
    output: Literal["torch", "csr"] = "torch",
    **options: Unpack[SparseMatrixOptions],
) -> Tensor: ...


@overload
def sparse_jacobian(
    f: Any, x: Any, *, output: SparseOutput, **options: Unpack[SparseMatrixOptions]
) -> Any: ...


def sparse_jacobian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: SparseOutput = "torch",
    check: bool = False,
    create_graph: bool | None = None,
    allow: Allowed = (),
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The sparse Jacobian Jᵢⱼ = ∂fᵢ/∂xⱼ of many functions, each of few variables.

    Works like `sparse_hessian`, with products from the right, \(J S\), or from the left, \(S^\top
    J\), whichever are fewer. For many points make a plan once: `hodiff.sparse.plan_jacobian`.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors, or such tensors
            already computed.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`, with
            D entries in all.
        pattern: The entries that can be nonzero, if you know them, in one of the forms of
            `sparse_hessian`.
        output: `"torch"`, `"csr"` or `"scipy"`, as for `sparse_hessian`.
        check: Whether to compare the matrix with a product for a random vector.
        create_graph: Whether the entries can be differentiated again. None: only inside the
            function of another hodiff call.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many products one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        The matrix, of shape `(M, D)` for M outputs, in the order of `f(x)` and of *x*.

    Raises:
        InputError: *x* or `f(x)` is not what `jacobian` takes; or the pattern does not fit.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.
        DerivativeError: With `check`, the matrix misses an entry.

    Cost:
        One evaluation of `f`, and a batched pass for as many vectors as there are colors; before
        them `hodiff.sparse.sparsity_pattern` and `hodiff.sparse.color`, and one more pass where
        columns are colored.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.sparse_jacobian(
        ...     lambda x: x[1:] - x[:-1] ** 2, torch.tensor([1.0, 2.0, 3.0])
        ... ).to_dense()
        tensor([[-2.,  1.,  0.],
                [ 0., -4.,  1.]])
    """
    options = {"output": output, "allow": allow, "args": args, "kwargs": kwargs}
    return _at_once(
        f, x, 1, pattern, options, check, create_graph=create_graph, chunk_size=chunk_size
    )


@overload
def plan_hessian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: Literal["torch", "csr"] = "torch",
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan[Tensor]: ...


@overload
def plan_hessian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: SparseOutput,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan[Any]: ...


def plan_hessian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: SparseOutput = "torch",
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan[Any]:
    """A sparse Hessian prepared for many points: pattern, colors and recovery are computed once.

    Args:
        f: A function of *x* that returns one element.
        x: A point: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        pattern: The pattern, if you know it, in one of the forms of `sparse_hessian`.
        output: The form of `plan(x)`, as for `sparse_hessian`.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`; `plan(x, args=...)` may pass others.
        kwargs: Keyword arguments for `f`, likewise.

    Returns:
        A `Plan`: `plan(x)` is the matrix, of shape `(D, D)`; `plan.values(x)` its entries, in the
        order of `plan.rows` and `plan.columns`; `plan.lower()` is the plan of the lower triangle.
        The plan holds as long as `f` takes the same Python branches as at *x*. If `f` reads values
        that depend on *x* (`plan.pattern.values_read`), each `plan(x)` is compared with one
        additional product, and raises if an entry is missing; so is the next `plan(x)` after a
        variable of `f` holds something else, or a tensor that `f` closes over (an index, a mask)
        was written into. `check=False` omits the comparison, and `check=True` always makes it.

    Raises:
        InputError: *f* is a tensor already computed, or *x*, `f(x)` or the pattern does not fit.
        GraphError: An operation has no second derivative, or the value does not depend on the
            point.

    Cost:
        The pattern and its colors, once. Each `plan(x)` is one evaluation of `f`, one reverse
        pass, and one batched pass for `plan.products` vectors.

    Examples:
        A Newton step, and another:

        >>> import torch, hodiff
        >>> f = lambda x: (x**4).sum() / 12
        >>> plan = hodiff.sparse.plan_hessian(f, torch.ones(3))
        >>> plan.rows, plan.columns, plan.products
        (tensor([0, 1, 2]), tensor([0, 1, 2]), 1)
        >>> plan.values(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 4., 9.])
    """
    return _plan(
        f, x, 2, pattern, {"output": output, "allow": allow, "args": args, "kwargs": kwargs}
    )


@overload
def plan_jacobian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: Literal["torch", "csr"] = "torch",
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan[Tensor]: ...


@overload
def plan_jacobian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: SparseOutput,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan[Any]: ...


def plan_jacobian(
    f: Any,
    x: Any,
    *,
    pattern: Any = None,
    output: SparseOutput = "torch",
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan[Any]:
    """A sparse Jacobian prepared for many points: pattern, colors and recovery are computed once.

    Args:
        f: A function of *x* that returns a tensor or a container of tensors.
        x: A point: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        pattern: The pattern, if you know it, in one of the forms of `sparse_hessian`.
        output: The form of `plan(x)`, as for `sparse_hessian`.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`; `plan(x, args=...)` may pass others.
        kwargs: Keyword arguments for `f`, likewise.

    Returns:
        A `Plan`, of shape `(M, D)` for M outputs. Rows or columns are colored, whichever needs
        fewer products.

    Raises:
        InputError: *f* is a tensor already computed, or *x*, `f(x)` or the pattern does not fit.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.

    Cost:
        The pattern and its colors, once. Each `plan(x)` is one evaluation of `f` and one batched
        pass for `plan.products` vectors, and one more pass if columns are colored.

    Examples:
        >>> import torch, hodiff
        >>> plan = hodiff.sparse.plan_jacobian(lambda x: x[1:] * x[:-1], torch.ones(4))
        >>> plan(torch.tensor([1.0, 2.0, 3.0, 4.0])).to_dense()
        tensor([[2., 1., 0., 0.],
                [0., 3., 2., 0.],
                [0., 0., 4., 3.]])
    """
    return _plan(
        f, x, 1, pattern, {"output": output, "allow": allow, "args": args, "kwargs": kwargs}
    )


def _plan(
    f: Any, x: Any, order: int, pattern: Any, options: dict[str, Any], *, again: bool = True
) -> Plan:
    """A plan for many points, or for one, with the caller's pattern or a detected one."""
    check_option(options["output"], SparseOutput, "output")
    asked = {name: options[name] for name in ("allow", "args", "kwargs")}
    request = call(f, x, passes=order, create_graph=False, **asked)
    if again and not request.builds_graph:
        raise InputError(
            "f: got a tensor already computed; a plan is for many points and needs the function."
        )
    point, random = Point(request.where), RandomState(request.where.tensors[0].device)
    noted: list[Any] = []
    if pattern is None:
        detected = detect(request, order, noted)
    else:
        rows = point.space.size if order == 2 else _outputs(request, noted)
        detected = given(pattern, (rows, point.space.size), symmetric=order == 2)
    random.restore()  # what f draws there, it draws again when it is evaluated
    point.returned = noted[0] if noted else _tree.LEAF
    colors, kind = (_pattern.color(detected), "star") if order == 2 else _of_jacobian(detected)
    plan = Plan(f, point, order, detected, colors, kind, options)
    if pattern is None and again:
        plan._constants = noted[1]
        plan._constants.keep(f)
    return plan


def _at_once(
    f: Any, x: Any, order: int, pattern: Any, options: dict[str, Any], check: bool, **later: Any
) -> Any:  # fmt: skip
    """The matrix at one point; what is wrong with the options is said before `f` runs."""
    check = is_set(check, "check")
    _arguments.check_chunk_size(later["chunk_size"])
    if options["output"] == "scipy":
        scipy_sparse()
    return _plan(f, Where(x), order, pattern, options, again=False)(x, check=check, **later)


def _outputs(request: Call, noted: list[Any]) -> int:
    """The number of values that `f` returns; their structure is added to `noted`."""
    with OutputGraph(request) as graph:
        noted.append(_tree.flatten(graph.outputs)[2])
        return sum(output.numel() for output in graph.tensors())


def _of_jacobian(pattern: Pattern) -> tuple[Tensor, str]:
    """Rows or columns, whichever needs fewer colors."""
    # no fewer colors of rows, of columns
    least = {"rows": _longest(pattern.columns), "columns": _longest(pattern.rows)}
    kinds: list[Any] = sorted(least, key=lambda kind: least[kind])
    first = _pattern.color(pattern, kinds[0])
    if _pattern.count_of(first) <= max(least.values()):  # the other kind needs no fewer
        return first, kinds[0]
    second = _pattern.color(pattern, kinds[1])
    pairs = (first, kinds[0]), (second, kinds[1])
    return min(pairs, key=lambda pair: _pattern.count_of(pair[0]))


def _longest(indices: Tensor) -> int:
    return int(torch.bincount(indices).max()) if len(indices) else 0


# --- `sparsity_pattern`: one reverse pass, followed by index sets, tells which entries can be other
# than zero The rows of a Jacobian, or of a Hessian as the Jacobian of the gradient, are what a
# reverse pass makes of unit cotangents. That pass is linear, so which of its results depend on
# which entries of its cotangent is the pattern, and it is followed through the very operations that
# compute the products later.


def sparsity_pattern(
    f: Any,
    x: Any,
    *,
    order: int = 2,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Pattern:
    r"""The entries of a Hessian or Jacobian that can be nonzero.

    Args:
        f: A function of *x* that returns one element for a Hessian, or a tensor or a container of
            tensors for a Jacobian. Or such a tensor already computed; the pattern then holds only
            at this point.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        order: 2 for the Hessian, 1 for the Jacobian.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`. The pattern is valid for all values of dense
            tensors in them.
        kwargs: Keyword arguments for `f`, likewise.

    Returns:
        A `Pattern` of shape `(D, D)`, or `(M, D)` for M outputs, in the order of *x* and `f(x)`. It
        may be wider than necessary, but misses no entry, at *x* and wherever `f` takes the same
        Python branches. If Python reads a value that depends on *x* (an `if`, `.item()`, the index
        in `x[x.argmax()]`, the shape of `x[x > 0]`), `f` may do something else at another point:
        `values_read` records this, and a plan then checks each matrix. A zero in a tensor that `f`
        closes over is assumed to stay zero, unless the tensor requires grad: pass what changes in
        `args`.

    Raises:
        InputError: *order* is neither 1 nor 2, or the pattern has too many entries to store.
        GraphError: As for `hvp` and `jacobian`.

    Cost:
        One evaluation of `f` and one reverse pass, two for a Hessian; about 15 µs for each
        operation, and about 50 ns for each set entry in operations that add, gather or scatter.
        Always on the CPU.

    Examples:
        A chain, each of whose terms couples two neighbors:

        >>> import torch, hodiff
        >>> chain = lambda x: ((x[1:] - x[:-1] ** 2) ** 2).sum()
        >>> print(hodiff.sparse.sparsity_pattern(chain, torch.ones(5)).picture())
        xx···
        xxx··
        ·xxx·
        ··xxx
        ···xx

    Reference:
        Walther, A. (2008). Computing sparse Hessians with automatic differentiation. ACM TOMS
        34(1). doi:10.1145/1322436.1322439. Index sets are propagated there as here; here through
        the linear pass.
    """
    if not isinstance(order, int) or isinstance(order, bool) or order not in (1, 2):
        raise InputError(f"order: got {order!r}, expected 1 (a Jacobian) or 2 (a Hessian).")
    request = call(
        f, Where(x), passes=order, create_graph=False, allow=allow, args=args, kwargs=kwargs
    )
    return detect(request, order)


def detect(request: Call, order: int, noted: list[Any] | None = None) -> Pattern:
    """The pattern of what a call asks for; to `noted` the structure of what `f` returned is added,
    and constants.
    """
    refuse_stand_ins()
    given = [*request.where.tensors, *tensors_in((list(request.args), dict(request.kwargs)))]
    tracer = Tracer(_rules.find, given, anywhere=request.builds_graph)
    with exits(tracer), on(tracer), OutputGraph(request) as graph:
        outputs = _reverse.gradient(graph, differentiated=True) if order == 2 else graph.tensors()
        if noted is not None:
            noted += [_tree.flatten(graph.outputs)[2], tracer.constants]
        cotangents = [
            torch.ones_like(output, memory_format=torch.contiguous_format) for output in outputs
        ]
        tracer.begin(cotangents)
        try:
            gradients = _reverse.vjp(graph, outputs, cotangents)
            sets = Sets.joined([tracer.read(part) for part in gradients])
            columns, rows = (_everything if tracer.lost else Sets.pairs)(sets)
        except TooMany as error:
            raise _too_many(tracer) from error
    names = tuple(tracer.unknown) + ((tracer.lost,) if tracer.lost else ())
    if order == 1:
        return Pattern(rows, columns, (tracer.width, len(sets)), names, tuple(tracer.values_read))
    both = torch.cat([rows, columns]), torch.cat([columns, rows])
    return Pattern(*both, (len(sets), len(sets)), names, tuple(tracer.values_read))


def _everything(sets: Sets) -> tuple[Tensor, Tensor]:
    """All pairs of an element and a number."""
    if len(sets) * sets.width > _DENSE:
        raise TooMany
    return torch.arange(len(sets), device="cpu").repeat_interleave(sets.width), torch.arange(
        sets.width, device="cpu"
    ).repeat(len(sets))


_DENSE = 2**26


def _too_many(tracer: Tracer) -> InputError:
    named = [*([tracer.lost] if tracer.lost else []), *tracer.unknown]
    blamed = (
        f" Without a sparsity rule, and taken to couple all inputs: {', '.join(named)}."
        if named
        else ""
    )
    return InputError(
        f"f: the matrix of derivatives is not sparse, or does not appear to be: the pattern has "
        f"too many entries to store.{blamed} Give the pattern if you know it (pattern=), or use "
        f"products: hodiff.hvp, hodiff.HessianOperator, hodiff.jvp."
    )


_compiled_callers.mark(Plan)
