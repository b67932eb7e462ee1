"""`JacobianOperator`: products with a Jacobian and its transpose, from linearized outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from hodiff._core import _nodes, _reverse, _tree
from hodiff._core._arguments import Allowed, ChunkSize
from hodiff._core._call import cut
from hodiff._core._graph import OutputGraph
from hodiff._core._tree import Leaves
from hodiff._core._vectors import Space, sum_dtype
from hodiff._core._where import Where
from hodiff.calculus._factors import units
from hodiff.curvature._data import check_predict
from hodiff.curvature._data_operator import Builder, GraphCache, accumulate
from hodiff.curvature._gauss_newton import Linearized, RowsOperator, linearize, predicted
from hodiff.curvature._operator import LinearOperator, TransposedOperator, TwoSpaces, say_detached
from hodiff.errors import InputError


@final
class JacobianOperator(RowsOperator[Linearized], TwoSpaces):
    r"""The Jacobian J = ∂f/∂x of a network's outputs as an operator; `J.T` is its transpose.

    With several batches, the outputs of all batches are concatenated along their leading dimension.

    Args:
        predict: `predict(where)`, or with `data` `predict(where, batch)`, returns the outputs: a
            tensor or a container of tensors.
        where: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        data: Batches, as an iterable that can be iterated repeatedly. Unless it is a sequence, the
            batches of the first pass are kept, so that rows keep their order.
        batch_ndim: How many leading dimensions of *where*, and of all outputs, index independent
            samples: each has its own Jacobian. A vector is like *where*, or flat `(*batch, D)`. A
            product multiplies all samples at once, and `hodiff.solve`, `hodiff.trace`
            and `hodiff.diagonal` return a result for each. Not for modules, whose parameters are
            not samples.
        memory_budget: How much memory the graphs may hold: bytes (an int, 0 to keep none), or a
            fraction of the free memory (a float).
        chunk_size: How many vectors one pass takes.
        progress: Whether to show a progress bar over the batches.
        allow: `autograd.Function`s to accept in a second derivative, as they are.

    Attributes:
        value: The outputs, a by-product.

    Raises:
        InputError: The outputs of several batches cannot be concatenated, the data can be read only
            once, or *where* is not real floating point.
        GraphError: The parameters have changed since the graphs were built (call `refresh()`); an
            operation has no derivative; or as for `hodiff.HessianOperator`.

    Cost:
        The first product, and `J.shape`, evaluate `predict` once per batch and take one pass to
        linearize it (two with a Python `autograd.Function`). A product with `J` or `J.T` takes one
        pass per batch.

        `(J @ J.T).dense()` and `hodiff.diagonal(J @ J.T)` take no products where `predict` returns
        one tensor with samples in its leading dimension, of layers that `hodiff.gram` names: a pass
        for each of at most 64 outputs of a sample, and one that proves samples apart. So do
        `hodiff.diagonal`, `hodiff.trace`, `hodiff.logdet`, `hodiff.solve` and `hodiff.eigsh` of
        `J.T @ J` and `J.T @ J + 0.1`, as of a `hodiff.GaussNewtonOperator`.

    Examples:
        >>> import torch, hodiff
        >>> J = hodiff.JacobianOperator(
        ...     lambda x: torch.stack([x[0] * x[1], x[0] ** 2]), torch.tensor([2.0, 3.0])
        ... )
        >>> J @ torch.tensor([1.0, 0.0]), J.T @ torch.tensor([1.0, 0.0])
        (tensor([3., 4.]), tensor([3., 2.]))
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        where: Any,
        *,
        data: Any = None,
        batch_ndim: int = 0,
        memory_budget: float = 0.5,
        chunk_size: ChunkSize = "auto",
        progress: bool = False,
        allow: Allowed = (),
    ) -> None:
        check_predict(predict, data is not None)
        super().__init__(
            where, data,
            lambda *_: JacobianBuilder(predict, allow, Outputs(batch_ndim), batch_ndim),
            memory_budget=memory_budget, chunk_size=chunk_size, progress=progress,
            keep=data is not None, batch_ndim=batch_ndim,
        )  # fmt: skip

    if TYPE_CHECKING:

        @property
        def T(self) -> TransposedOperator: ...

    _route = "linearized outputs"

    @property
    def _range(self) -> Space:
        return _outputs(self._graphs).space()

    @property
    def value(self) -> Any:
        """The outputs at the point, of all batches."""
        say_detached("A.value", self._live)
        graphs = self._graphs
        graphs.evaluate()
        outputs = graphs.builder.outputs
        return outputs.space().result([part.clone() for part in outputs.whole()])

    @property
    def gradient(self) -> Any:
        """A Jacobian has none."""
        raise AttributeError(
            "a JacobianOperator has no gradient; J.T @ u is the gradient of the inner product u'f."
        )

    def _multiply(self, parts: Leaves, count: int | None) -> Leaves:
        chunk, lead = (1, 0) if count is None else (self._inner_chunk(), 1)
        products: list[Leaves] = []
        self._graphs.each_graph(
            lambda graph, number: products.append(graph.jvp(parts, count, self._chosen, chunk))
        )
        if len(products) == 1:
            return products[0]
        return [torch.cat(column, dim=lead) for column in zip(*products, strict=True)]

    def _pull(self, parts: Leaves, count: int | None) -> Leaves:
        """J' u: each batch takes its rows of u."""
        chunk, lead = (1, 0) if count is None else (self._inner_chunk(), 1)
        graphs, total, place = self._graphs, list[Tensor](), [0]
        lengths = _outputs(graphs).lengths

        def add(graph: Linearized, number: int) -> None:
            start, length = place[0], lengths[number]
            own = (
                parts if len(lengths) == 1 else [part.narrow(lead, start, length) for part in parts]
            )
            products = graph.vjp(own, count, self._chosen, chunk)
            total[:] = (
                accumulate([part.contiguous() for part in total], products) if total else products
            )
            place[0] = start + length

        graphs.each_graph(add)
        leaves = [graphs.where.tensors[index] for index in self._chosen]
        return [part.to(leaf.dtype) for part, leaf in zip(total, leaves, strict=True)]

    def _recorded(self, parts: Leaves, count: int) -> Leaves:
        self._count(count)
        return self._rows_recorded(parts, count, transposed=False)

    def _recorded_pull(self, parts: Leaves, count: int) -> Leaves:
        return self._rows_recorded(parts, count, transposed=True)

    def _rows_recorded(self, parts: Leaves, count: int, *, transposed: bool) -> Leaves:
        """The products, or those of the transpose: each batch has its rows."""
        graphs, starts = self._graphs, [0]
        lengths = _outputs(graphs).lengths

        def made(batch: Any, number: int) -> Leaves:
            starts.append(starts[-1] + lengths[number])
            own = parts
            if transposed and len(lengths) > 1:
                own = [part[:, starts[number] : starts[number + 1]] for part in parts]
            return graphs.builder.recorded(
                graphs.where,
                batch,
                number,
                own,
                count,
                self._chosen,
                self._chunk_size,
                transposed=transposed,
            )

        columns = zip(*graphs.each(made), strict=True)
        if transposed:
            return [torch.stack(column).sum(0) for column in columns]
        return [torch.cat(column, 1) for column in columns]

    def _seeds(self, graph: Linearized, most: int) -> Leaves | None:
        numbers = sum(output[0].numel() for output in graph.outputs)
        return None if self._domain.batch or numbers > most else units(graph.outputs)

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        raise InputError(
            "block: a Jacobian's rows and columns differ; give hodiff.select(model, ...) as where."
        )


def _outputs(graphs: GraphCache[Linearized, JacobianBuilder]) -> Outputs:
    """The outputs that an evaluation has noted; it is made where it has not been."""
    if graphs.first is None:
        graphs.evaluate()
    return graphs.builder.outputs


class Outputs:
    """The outputs of each batch, detached: their values, and where their rows lie in the whole."""

    def __init__(self, batch_ndim: int = 0) -> None:
        self._batch_ndim = batch_ndim
        self._values: dict[int, Leaves] = {}
        self._tree: _tree.Tree = _tree.LEAF
        self._space: Space | None = None

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each batch."""
        return [parts[0].shape[0] if parts[0].ndim else 1 for parts in self._values.values()]

    def noted(self, number: int, outputs: Leaves, value: Any) -> Leaves:
        """The outputs of a batch, in the order of the first batch's: dicts are matched by key."""
        _, _, tree = _tree.flatten(value)
        if not self._values:
            self._tree = tree
        different = _tree.difference(self._tree, tree, "f(x)")
        if different:
            raise InputError(
                f"predict: outputs of all batches are joined, but {different}, "
                "as for the first batch."
            )
        outputs = _tree.reordered(outputs, tree, self._tree)
        if number not in self._values:
            if self._values:
                _check_alike(self._values[0], outputs)
            self._values[number] = [cut(output) for output in outputs]
        return outputs

    def whole(self) -> Leaves:
        """The outputs of all batches."""
        if len(self._values) == 1:
            return self._values[0]
        return [torch.cat(column) for column in zip(*self._values.values(), strict=True)]

    def space(self) -> Space:
        """The space of vectors like them."""
        if self._space is None:
            names = _tree.paths(self._tree, "f(x)")
            self._space = Space(self.whole(), names, self._tree, "like f(x)").side(self._batch_ndim)
        return self._space


def _check_alike(first: Leaves, outputs: Leaves) -> None:
    shapes = [tuple(part.shape) for part in outputs]
    alike = len(first) == len(outputs) and all(
        a.ndim and b.ndim and a.shape[1:] == b.shape[1:]
        for a, b in zip(first, outputs, strict=True)
    )
    if not alike or len({part.shape[0] for part in outputs}) != 1:
        raise InputError(
            f"predict: outputs of several batches are joined along their leading dimension, which "
            f"shapes {[tuple(part.shape) for part in first]} and {shapes} do not allow."
        )


def _check_samples(outputs: Leaves, batch: torch.Size) -> None:
    for output in outputs:
        if output.shape[: len(batch)] != batch:
            raise InputError(
                f"predict returned shape {tuple(output.shape)}; with batch_ndim={len(batch)} the "
                f"shape must begin with {tuple(batch)}, one row per sample."
            )


@final
@dataclass(frozen=True)
class JacobianBuilder(Builder[Linearized]):
    """Evaluates and linearizes one batch, and notes its outputs.

    Attributes:
        predict: `predict(where)` or `predict(where, batch)`.
        allow: `allow=` of the operator.
        outputs: What has been noted.
    """

    predict: Callable[..., Any]
    allow: Allowed
    outputs: Outputs = field(default_factory=Outputs)
    batch_ndim: int = 0

    @property
    def functions(self) -> Sequence[Any]:
        """The network, a function of the point."""
        return [self.predict]

    def evaluation(self, where: Where, batch: Any) -> OutputGraph:
        """The outputs of a batch, not yet entered."""
        return predicted(self.predict, where, batch, self.allow, keep=False)

    def build(self, where: Where, batch: Any, number: int) -> Linearized:
        """The graph of one batch; its value, by which passes are compared,
        is the sum of its outputs.
        """
        with predicted(self.predict, where, batch, self.allow, self.batch_ndim) as graph:
            random, outputs = (
                graph.context.random.moved(),
                self.outputs.noted(number, graph.tensors(), graph.outputs),
            )
            _check_samples(outputs, graph.call.batch)
            calls_back = _nodes.runs_hooks(_nodes.survey(outputs))
            cotangents, pulled = linearize(
                graph, outputs, [torch.ones_like(output) for output in outputs]
            )
        value = sum(
            (part.detach().sum(dtype=sum_dtype(part.dtype)) for part in outputs),
            torch.zeros((), device=where.tensors[0].device),
        )
        gradient = [part.detach() for part in pulled]
        return Linearized(
            graph, value, None, gradient, pulled, random, calls_back, outputs, cotangents
        )

    def recorded(
        self,
        where: Where,
        batch: Any,
        number: int,
        vectors: Leaves,
        count: int,
        chosen: list[int],
        chunk: int | None,
        *,
        transposed: bool,
    ) -> Leaves:
        """The products of one batch's rows, or of their transpose, which can be differentiated."""
        evaluation = predicted(
            self.predict, where, batch, self.allow, self.batch_ndim, create_graph=True
        )  # fmt: skip
        with evaluation as graph:
            outputs = self.outputs.noted(number, graph.tensors(), graph.outputs)
            if transposed:
                roots, inputs = outputs, [graph.leaves[index] for index in chosen]
            else:
                ones = [torch.ones_like(output) for output in outputs]
                inputs, pulled = linearize(graph, outputs, ones)
                roots = [pulled[index] for index in chosen]
            return _reverse.products(graph, roots, vectors, count, chunk_size=chunk, inputs=inputs)

    def fresh(self, *, begins: bool = False) -> JacobianBuilder:
        """The builder without the outputs that it noted."""
        return replace(self, outputs=Outputs(self.batch_ndim))
