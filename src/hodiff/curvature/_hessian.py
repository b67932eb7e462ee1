"""`HessianOperator`: products with a Hessian, from gradient graphs that are built once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor

from hodiff._core import _arguments, _nodes, _reverse
from hodiff._core._arguments import Allowed, Checkpoint, ChunkSize
from hodiff._core._call import call, cut, in_place_of
from hodiff._core._graph import OutputGraph
from hodiff._core._tree import Leaves
from hodiff._core._where import Where
from hodiff.curvature._data import (
    NONE,
    BatchWeight,
    DataReduction,
    Weighted,
    add_batch,
    check_signature,
)
from hodiff.curvature._data_operator import BatchGraph, Builder, SummedOperator
from hodiff.curvature._process_group import ProcessGroup
from hodiff.errors import InputError


@final
@dataclass(frozen=True)
class HessianBuilder(Builder[BatchGraph]):
    """Evaluates one batch, and its gradient with a graph.

    Attributes:
        f: The function, or a tensor already computed.
        weigh: Turns what the function returns into `(sum, weight)`.
        checkpoint: `checkpoint=` of the operator.
        options: Its keywords that a call takes, as they were given.
    """

    f: Callable[..., Any] | Tensor
    weigh: Weighted
    checkpoint: Checkpoint
    options: Mapping[str, Any]

    @property
    def functions(self) -> Sequence[Any]:
        """The function, and what holds its further arguments."""
        if isinstance(self.f, Tensor):
            return ()
        return self.f, partial(tuple, *self.options["args"], **(self.options["kwargs"] or {}))

    def build(self, where: Where, batch: Any, number: int) -> BatchGraph:
        """The graph of one batch."""
        computed = isinstance(self.f, Tensor)
        with self.evaluation(where, batch, number) as evaluation:
            random = not computed and evaluation.context.random.moved()
            calls_back = _nodes.runs_hooks(_nodes.survey(evaluation.tensors()))
            graph = _reverse.gradient(evaluation, differentiated=True)
        batch = evaluation.call.batch
        off = cut if evaluation.context.forward_mode else Tensor.detach
        value, gradient = off(evaluation.scalars()).reshape(batch), [*map(off, graph)]
        weight = 1.0 if computed else evaluation.aux
        return BatchGraph(evaluation, value, weight, gradient, graph, random, calls_back)

    def recorded(
        self,
        where: Where,
        batch: Any,
        number: int,
        vectors: Leaves,
        count: int,
        chosen: list[int],
        chunk: int | None,
    ) -> tuple[Leaves, float]:
        """The products of one batch's sum with `count` vectors, which can be differentiated,
        and the batch's weight.
        """
        with self.evaluation(where, batch, number, create_graph=True) as graph:
            gradient = _reverse.gradient(graph, differentiated=True)
            own, leaves = (
                [values[index] for index in chosen] for values in (gradient, graph.leaves)
            )
            products = _reverse.products(
                graph, own, vectors, count, chunk_size=chunk, inputs=leaves
            )
        return products, 1.0 if isinstance(self.f, Tensor) else graph.aux

    def evaluation(
        self, where: Where, batch: Any, number: int = 0, *, create_graph: bool = False
    ) -> OutputGraph:
        """The sum over a batch, not yet entered."""
        f, computed = self.f, isinstance(self.f, Tensor)

        def weighed(point: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            given = () if batch is NONE else (batch,)
            try:
                return self.weigh(f(point, *given, *args, **kwargs), batch, number)  # pyright: ignore[reportCallIssue]
            except (AttributeError, TypeError) as error:
                add_batch(error, "f(where, batch)", batch)
                raise

        what = f if computed else in_place_of(f, weighed)
        if self.checkpoint is not False:
            from hodiff.memory import _blocks

            what = _blocks.in_blocks(what, where, self.checkpoint)
        return OutputGraph(call(
            what, where, passes=2, create_graph=create_graph, has_aux=not computed,
            keep=not create_graph, **self.options,
        ))  # fmt: skip


@final
class HessianOperator(SummedOperator[BatchGraph]):
    r"""The Hessian H = ∇²f(x) as an operator, without the matrix.

    With `data`, \(f\) is a mean over all batches, \(f(x) = \sum_b s_b(x) \,/\, \sum_b w_b\), where
    the function returns \((s_b, w_b)\), the sum over the batch and its weight. Averages are exact
    for ragged, masked and class-weighted batches.

    The first product builds the gradient's graph of each batch and keeps it, so that every further
    product costs one reverse pass. If the graphs do not fit into `memory_budget`, batches are
    evaluated again for each product: all of them, unless `data` is a list (or another sequence),
    whose order is fixed.

    Args:
        f: A function of *where* that returns one element; with `data`, `f(where, batch)` returns
            `(sum, weight)`. **The first is the sum over the batch, never its mean**, and the
            weights of all batches are added up: for the mean over samples
            `(sum, number of samples)`. Or, without `data`, such a tensor already computed, whose
            graph stays.
        where: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        data: Batches, as an iterable that can be iterated repeatedly: a list, a DataLoader. Tensors
            in a batch are moved to the device of *where*.
        reduction: `"mean"`: the sums of all batches divided by their weights. `"sum"`: the sum over
            all data, not divided, whatever the weights are.
        batch_ndim: How many leading dimensions of *where* index independent samples: `f` returns
            one element for each, and each has its own Hessian. A vector is like *where*, or flat
            `(*batch, D)`. A product multiplies all samples at once, and `hodiff.solve`,
            `hodiff.trace`, `hodiff.diagonal` and `hodiff.logdet` return a result for each. Not for
            modules, whose parameters are not samples.
        batch_weight: For a function that returns a bare mean of its batch: a function of the batch
            that returns how much the mean counts (its number of samples), or `"equal"`. Not needed
            for a single batch.
        checkpoint: Modules of `f` that keep only their input and run again in each pass, such as
            `"layers.*"`, or True for what `f` itself checkpoints.
        memory_budget: How much memory the graphs may hold: bytes (an int, 0 to keep none), or a
            fraction of the free memory (a float).
        chunk_size: How many vectors one pass takes; `"auto"` bounds its memory.
        progress: Whether to show a progress bar over the batches.
        process_group: The processes that share the data (`torch.distributed.group.WORLD`, which is
            None before `init_process_group()`). Each passes its own batches, ragged or none, and
            gets the product of all. None: this process has all the data. Each of several processes
            uses the group in one thread.
        strict: What to return for a tensor of *where* that the value does not depend on. None:
            zeros, and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`, after the batch.
        kwargs: Keyword arguments for `f`.

    Attributes:
        value: The value of the function, a by-product.
        gradient: Its gradient, like *where*, a by-product.

    Raises:
        InputError: The data can be read only once, or `f` returns a bare mean of several batches;
            or as for `hodiff.hvp`.
        GraphError: A parameter was changed or replaced, or a module was switched between train()
            and eval(), or a variable that `f` reads has changed (call `H.refresh()`); two passes
            over the data disagree; an operation has no second derivative. Values of parameters are
            compared too, because PyTorch does not record some changes (`p.data.mul_(2)`, NumPy):
            all entries of a tensor of up to 1024, and of a larger one some 64 and 1021 sums of
            bits. The documentation of operators lists what `f` may read unseen.

    Warns:
        RandomnessWarning: `f` draws random numbers (dropout). The operator is that of one draw.
        HodiffWarning: A mean is returned with a weight above 1, or a sum over samples with the
            weight 1 and several batches, if the last operation of `f` shows it; with
            `process_group`, the processes' modules have different buffers.

    Cost:
        One pass for each batch and product, and an evaluation and a pass more if its graph is not
        kept. The first product takes one evaluation and one pass for each batch; construction
        evaluates nothing. `H.cost()` states the numbers. Memory: the graphs, about twice the
        activations.

    Examples:
        The Hessian of a sum of squares is 2 X'X:

        >>> import torch, hodiff
        >>> X = torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]])
        >>> H = hodiff.HessianOperator(lambda w: (X @ w).square().sum(), torch.zeros(2))
        >>> H @ torch.tensor([1.0, 0.0])
        tensor([4., 4.])
        >>> def loss(w, rows):
        ...     return (rows @ w).square().sum(), len(rows)
        >>> H = hodiff.HessianOperator(
        ...     loss, torch.zeros(2), data=[X[:2], X[2:]]
        ... )  # the mean: 2 X'X / 3
        >>> 3 * H.dense()
        tensor([[ 4.,  4.],
                [ 4., 10.]])

    Reference:
        Pearlmutter, B. A. (1994). Fast exact multiplication by the Hessian. Neural Computation
        6(1). doi:10.1162/neco.1994.6.1.147.
    """

    _route = "double backward"
    _takes_shards = True

    def __init__(
        self,
        f: Callable[..., Any] | Tensor,
        where: Any,
        *,
        data: Any = None,
        batch_weight: BatchWeight = None,
        reduction: DataReduction = "mean",
        batch_ndim: int = 0,
        checkpoint: Checkpoint = False,
        memory_budget: float = 0.5,
        chunk_size: ChunkSize = "auto",
        progress: bool = False,
        process_group: ProcessGroup | None = None,
        strict: bool | None = None,
        allow: Allowed = (),
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        _arguments.check_arguments(args, kwargs)
        _check_function(f, data, args, kwargs)
        options = {
            "strict": strict, "allow": allow, "args": args, "kwargs": kwargs,
            "batch_ndim": batch_ndim,
        }  # fmt: skip
        super().__init__(
            where, data,
            lambda batches, _: HessianBuilder(
                f, Weighted(batches, batch_weight, reduction=reduction), checkpoint, options
            ),
            memory_budget=memory_budget, chunk_size=chunk_size, progress=progress,
            process_group=process_group, batch_ndim=batch_ndim, reduction=reduction,
        )  # fmt: skip
        self._check_blocks(f, checkpoint)

    def _apply(self, graph: BatchGraph, parts: Leaves, count: int | None, chunk: int) -> Leaves:
        ends = (graph.roots, graph.evaluation.leaves)
        gradient, leaves = ([values[index] for index in self._chosen] for values in ends)
        return _reverse.products(
            graph.evaluation, gradient, parts, count, chunk_size=chunk, inputs=leaves
        )


def _check_function(
    f: Any, data: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> None:
    """Raise unless `f` can be evaluated with the data."""
    if isinstance(f, Tensor):
        if data is not None:
            raise InputError(
                "data: batches are passed to a function, but f is a tensor already computed."
            )
    elif callable(f):
        check_signature(f, "f", ("where",) if data is None else ("where", "batch"), args, kwargs)
    else:
        raise InputError(
            f"f: got {_arguments.kind(f)}, expected a function of the point, "
            "or a tensor computed from it."
        )
