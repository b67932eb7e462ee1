"""Operators J' B J, a matrix over the outputs pulled back: `GaussNewtonOperator`,
`FisherOperator`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _nodes, _reverse
from hodiff._core._arguments import Allowed, Checkpoint, ChunkSize
from hodiff._core._call import call, refuse_tangent
from hodiff._core._graph import OutputGraph
from hodiff._core._tree import Leaves
from hodiff._core._vectors import check_generator, sum_dtype
from hodiff._core._where import Where
from hodiff.calculus._factors import Factors, Outer
from hodiff.curvature._data import (
    NONE,
    Batches,
    BatchWeight,
    DataReduction,
    Weighted,
    check_predict,
)
from hodiff.curvature._data_operator import BatchGraph, Builder, DataOperator, SummedOperator
from hodiff.curvature._losses import (
    LIKELIHOODS,
    Curvature,
    Loss,
    LossAtOutputs,
    OuterProducts,
    check_loss,
    is_of_torch,
    likelihood_names,
    loss_at_outputs,
    recorded_curvature,
    roots,
)
from hodiff.curvature._process_group import ProcessGroup, ProcessGroupSum
from hodiff.curvature._thin import Thin
from hodiff.errors import InputError

# --- the outputs of one batch, linearized: what Jacobian, Gauss-Newton and Fisher products run
# through


@dataclass(frozen=True, eq=False)
class Linearized(BatchGraph):
    """J v and J' u by one pass each.

    Attributes:
        outputs: The outputs, with their graph.
        cotangents: A point in the space of the outputs' gradients: u.
        roots: J' u as a function of u; its derivative by u in the direction v is J v.
    """

    outputs: Leaves
    cotangents: Leaves

    def jvp(self, parts: Leaves, count: int | None, chosen: list[int], chunk: int) -> Leaves:
        """The product J v, for the outputs."""
        pulled = [self.roots[index] for index in chosen]
        return _reverse.products(
            self.evaluation, pulled, parts, count, chunk_size=chunk, inputs=self.cotangents
        )

    def vjp(self, parts: Leaves, count: int | None, chosen: list[int], chunk: int) -> Leaves:
        """The product J' u, for the point."""
        leaves = [self.evaluation.leaves[index] for index in chosen]
        return _reverse.products(
            self.evaluation, self.outputs, parts, count, chunk_size=chunk, inputs=leaves
        )


def predicted(
    predict: Callable[..., Any],
    where: Where,
    batch: Any,
    allow: Allowed,
    batch_ndim: int = 0,
    *,
    create_graph: bool = False,
    keep: bool = True,
) -> OutputGraph:
    """The evaluation of a batch's outputs, not yet entered."""
    given = () if batch is NONE else (batch,)
    return OutputGraph(call(
        predict, where, passes=2, create_graph=create_graph, args=given,
        keep=keep and not create_graph, allow=allow, batch_ndim=batch_ndim,
    ))  # fmt: skip


def linearize(graph: OutputGraph, outputs: Leaves, at: list[Tensor]) -> tuple[Leaves, Leaves]:
    """J' u as a function of u, at a u: `(u, J' u)`. It is linear, so that any u will do."""
    cotangents = [part.detach().requires_grad_() for part in at]
    return cotangents, _reverse.transposed_product(graph, outputs, cotangents)


# --- M'M of the rows of J, weighed: what follows from them in factors -----------------------------


L = TypeVar("L", bound=Linearized)


class RowsOperator(DataOperator[L]):
    """An operator of outputs whose samples have rows."""

    @abstractmethod
    def _seeds(self, graph: L, most: int) -> Leaves | None:
        """The sums of a sample's outputs whose rows these are, `(R, N, *output)`."""

    def _sums(self, graph: L, most: int) -> Leaves | None:
        counts = {len(output) if output.ndim else 0 for output in graph.outputs}
        return None if len(counts) > 1 or 0 in counts else self._seeds(graph, most)

    def _batches(self, take: Callable[[L], int]) -> tuple[float, int]:
        """Show each batch; what sums are divided by, and the most passes, 0 where one took none."""
        passes = list[int]()

        def add(graph: L, number: int) -> None:
            passes.append(0 if 0 in passes else take(graph))

        weight = self._graphs.each_graph(add).everywhere.weight
        return weight, max(passes, default=1) if all(passes) else 0

    def _squares(self, most: int) -> tuple[Tensor, int] | None:
        """The diagonal, and how many passes it took."""
        with self._raise_on_all_ranks():
            # replaced, for it may be a tensor of the caller's inference mode
            totals = [self._space.zeros_flat(self.shape[1]).to(sum_dtype(self.dtype))]
            add = partial(self._add_squares, totals, most, self._inner_chunk())
            weight, passes = self._batches(add)
            group_sum, known = self._group_sum, [passes]
            if group_sum is not None:
                step, who = "takes a diagonal", self._names()
                (totals, known) = group_sum.sum(step, totals, who=who, fact=passes)
            if not all(known):
                return None
            self._count(max(known))
            return totals[0] / weight, max(known)

    def _factored(self, limit: Callable[[int], int]) -> tuple[list[list[Outer]], float, int] | None:
        batches = list[list[Outer]]()

        def keep(graph: L) -> int:
            own = graph.outputs[0].shape[:1].numel()
            most = limit(own + sum(len(parts[0].left) for parts in batches))
            seeds = self._sums(graph, most + 1)  # of classes there is one less
            if not seeds or len(seeds[0]) > most:
                return 0
            of = Factors(graph.evaluation, graph.outputs, seeds).of
            batches.append([of[index] for index in self._chosen if index in of])
            return len(seeds[0]) if len(batches[-1]) == len(self._chosen) else 0

        if self._group_sum is not None:
            return None
        weight, passes = self._batches(keep)
        if not batches or not passes:
            return None
        self._count(passes)
        return batches, weight, passes

    def _add_squares(self, totals: Leaves, most: int, size: int, graph: L) -> int:
        """Add the squares of J's of a batch; in how many passes, 0 where more than so many."""
        seeds = self._sums(graph, most)
        if not seeds:
            return 0
        [total], like = totals, graph.evaluation.leaves
        numbers, samples = seeds[0].shape[:2]
        of = Factors(graph.evaluation, graph.outputs, seeds).of
        missing = [index for index in self._chosen if index not in of]
        passes = numbers * (samples if missing else 1)
        if passes > most:
            return 0
        squares = {index: total.new_zeros(like[index].shape) for index in missing}
        squares |= {index: of[index].squares() for index in self._chosen if index in of}
        for start in range(0, passes if missing else 0, size):
            which = torch.arange(start, min(start + size, passes), device=total.device)
            of_one = which.unsqueeze(1) % samples == torch.arange(samples, device=total.device)
            places = [of_one.view(*of_one.shape, *[1] * (seed.ndim - 2)) for seed in seeds]
            alone = [seed[which // samples] * at for seed, at in zip(seeds, places, strict=True)]
            rows = graph.vjp(alone, len(which), missing, size)
            for index, part in zip(missing, rows, strict=True):
                squares[index] += part.to(total.dtype).square().sum(0)
        totals[0] = total + torch.cat([squares[index].reshape(-1) for index in self._chosen])
        return max(1, passes)


# --- operators J' B J: a matrix B over the outputs of each batch, pulled back to the parameters ---


@dataclass(frozen=True, eq=False)
class CurvedOutputs(Linearized):
    """A batch's outputs, linearized, and the matrix B over them."""

    curvature: Curvature


@dataclass(frozen=True, eq=False)
class BlockOutputs(CurvedOutputs):
    """A batch's outputs by blocks that keep only what enters them, and run again for J' u.

    The cotangents are the gradient of the loss by the outputs.

    Attributes:
        tangents: What gives J v (see `memory._blocks`).
    """

    tangents: Any

    def jvp(self, parts: Leaves, count: int | None, chosen: list[int], chunk: int) -> Leaves:
        """The product J v, one vector after the other."""
        at = {index: n for n, index in enumerate(chosen)}
        numbers, made = range(len(self.evaluation.leaves)), list[Leaves]()
        for k in range(count or 1):
            row = parts if count is None else [part[k] for part in parts]
            vectors = [row[at[n]] if n in at else None for n in numbers]
            made += [self.tangents.along(vectors, self.outputs)]
        if count is None:
            return made[0]
        return [torch.stack(column) for column in zip(*made, strict=True)]

    def vjp(self, parts: Leaves, count: int | None, chosen: list[int], chunk: int) -> Leaves:
        """The product J' u. With one vector the graph is freed on the way, where none is kept."""
        taken = self if count is None else replace(self, evaluation=self.evaluation.kept())
        return super(BlockOutputs, taken).vjp(parts, count, chosen, chunk)

    def slope(self, *, keep: bool = False) -> Leaves:
        """The gradient, J' of the outputs' gradient."""
        if self.gradient:
            return self.gradient
        graph = self.evaluation.kept() if keep else self.evaluation
        return _reverse.products(graph, self.outputs, self.cotangents, None, chunk_size=None)


@dataclass(frozen=True)
class PullbackBuilder(Builder[CurvedOutputs]):
    """Evaluates the outputs of a batch and the loss of these; the gradient comes free, as J' of the
    outputs' gradient.

    Attributes:
        predict: `predict(where, batch)`.
        loss: `loss(outputs, batch)`, or a module whose Hessian is known.
        weigh: Turns what the loss returns into `(sum, weight)`.
        allow: `allow=` of the operator.
        checkpoint: `checkpoint=` of the operator.
        keep: Whether graphs are kept for several products.
        lazily: Whether the gradient can be left for later.
    """

    predict: Callable[..., Any]
    loss: Loss
    weigh: Weighted
    allow: Allowed
    checkpoint: Checkpoint
    keep: bool
    lazily: bool

    @property
    def functions(self) -> Sequence[Any]:
        """The network and the loss."""
        return self.predict, self.loss

    def evaluation(self, where: Where, batch: Any) -> OutputGraph:
        """The outputs of a batch, not yet entered."""
        return predicted(self.predict, where, batch, self.allow, keep=False)

    def build(self, where: Where, batch: Any, number: int) -> CurvedOutputs:
        """Evaluate one batch and linearize it."""
        predict: Any = self.predict
        if self.checkpoint is not False:
            from hodiff.memory import _blocks

            predict = _blocks.in_blocks(predict, where, self.checkpoint)
        in_blocks_alone = where.layout is not None and where.layout.groups is not None
        lean = self.checkpoint is not False or in_blocks_alone  # where parameters are whole
        keep = self.keep or not lean
        with predicted(predict, where, batch, self.allow, keep=keep) as graph:
            random, outputs = graph.context.random.moved(), graph.tensors()
            calls_back = _nodes.runs_hooks(_nodes.survey(outputs))
            tangents = graph.call.what.tangents(graph) if lean else None
            at_outputs = loss_at_outputs(self.loss, self.weigh, graph, batch, number, self.allow)
            for part in (*outputs, at_outputs.value):  # at which the loss takes constants
                refuse_tangent(part, "what predict or the loss returns")
            curvature = self.curvature(at_outputs, outputs, number)
            if tangents is not None:
                traits = (at_outputs.value, at_outputs.weight, [], outputs, random, True)
                ends = (outputs, at_outputs.gradient)
                made = BlockOutputs(graph, *traits, *ends, curvature, tangents)
                return made if self.lazily else replace(made, gradient=made.slope(keep=True))
            cotangents, pulled = linearize(graph, outputs, at_outputs.gradient)
        gradient = [part.detach() for part in pulled]
        traits = (at_outputs.value, at_outputs.weight, gradient, pulled, random, calls_back)
        return CurvedOutputs(graph, *traits, outputs, cotangents, curvature)

    def curvature(self, at_outputs: LossAtOutputs, outputs: Leaves, number: int) -> Curvature:
        """The matrix B of batch `number`: the Hessian of the loss by the outputs."""
        return at_outputs.curvature

    def recorded(
        self,
        where: Where,
        batch: Any,
        number: int,
        vectors: Leaves,
        count: int,
        chosen: list[int],
        chunk: int | None,
    ) -> tuple[Leaves, float | None]:
        """The products of one batch's sum, which can be differentiated, and the batch's weight."""
        with predicted(self.predict, where, batch, self.allow, create_graph=True) as graph:
            outputs = graph.tensors()
            at_outputs = loss_at_outputs(self.loss, self.weigh, graph, batch, number, self.allow)
            if self.curvature(at_outputs, outputs, number) is not at_outputs.curvature:
                raise InputError(
                    "create_graph: a Fisher matrix made of drawn labels or outer products "
                    "cannot be differentiated. Use hodiff.GaussNewtonOperator, or "
                    "kind='exact' with cross-entropy or squared error."
                )
            cotangents, pulled = linearize(graph, outputs, at_outputs.gradient)
            own, leaves = ([part[i] for i in chosen] for part in (pulled, graph.leaves))
            tangents = _reverse.products(
                graph, own, vectors, count, chunk_size=chunk, inputs=cotangents
            )  # fmt: skip
            curved = recorded_curvature(
                self.loss, self.weigh, graph, batch, number, self.allow, tangents, count
            )  # fmt: skip
            products = _reverse.products(
                graph, outputs, curved, count, chunk_size=chunk, inputs=leaves
            )  # fmt: skip
        return products, at_outputs.weight


class PullbackOperator(SummedOperator[CurvedOutputs], RowsOperator[CurvedOutputs]):
    """J' B J, of each batch's outputs."""

    _passes = 2, 1

    def _apply(self, graph: CurvedOutputs, parts: Leaves, count: int | None, chunk: int) -> Leaves:
        if count is None or count <= chunk:
            tangents = graph.jvp(parts, count, self._chosen, chunk)
            return graph.vjp(graph.curvature.times(tangents, count), count, self._chosen, chunk)
        # some at a time, for the tangents at the outputs are temporaries too
        pieces = zip(*(part.split(chunk) for part in parts), strict=True)
        products = [self._apply(graph, [*some], len(some[0]), chunk) for some in pieces]
        return [torch.cat(column) for column in zip(*products, strict=True)]

    def _thin(self) -> Thin:
        """The factored form: where B is a sum of outer products s s',
        the rows of M are those J's.
        """
        return Thin(((1.0, self),))

    def _seeds(self, graph: CurvedOutputs, most: int) -> Leaves | None:
        return roots(graph.curvature, graph.outputs, most)


def check_operands(predict: Any, loss: Any, where: Any, data: Any) -> None:
    """Raise unless `predict`, `loss`, `where` and `data` are what they should be,
    and in this order.
    """
    if _is_loss(predict) or _is_loss(where):
        raise InputError("the order is predict, loss, where; the loss was given in another place.")
    if data is None:
        raise InputError(
            "data: got None, expected an iterable of batches; for one batch, data=[batch]."
        )
    check_predict(predict, True)


def _is_loss(value: Any) -> bool:
    """Whether it is one of PyTorch's losses: a module, or a function such as `F.mse_loss`."""
    if getattr(value, "__module__", "") == "torch.nn.functional":
        return any(word in value.__name__ for word in ("loss", "entropy", "kl_div"))
    return is_of_torch(value)


# --- `GaussNewtonOperator`: the part of a Hessian that comes from the loss ------------------------


@final
class GaussNewtonOperator(PullbackOperator):
    r"""The generalized Gauss-Newton matrix G = Σ JᵀHJ / Σ w, summed over batches, as an operator.

    \(J_b\) is the Jacobian of the network's outputs on a batch, and \(H_b\) the Hessian of the loss
    (its sum over the batch) with respect to these outputs. For a convex loss *G* is positive
    semi-definite. It equals the Hessian if the network is linear or fits its targets exactly.

    The matrix depends on the choice of outputs. For a Gaussian at log σ = 0 and a residual of 2,
    the outputs (m, log σ) give [[1, -4], [-4, 8]]. The redundant outputs (m, log σ, σ) of the same
    function, whose quadratic term uses σ, give [[1, -4], [-4, 12]], because σ = exp(log σ) then
    belongs to the network, which is linearized.

    Args:
        predict: `predict(where, batch)` returns the outputs, a tensor or a container of tensors.
        loss: `loss(outputs, batch)` returns `(sum, weight)`, the sum over the batch and its divisor
            (**never a mean with a weight**). Its Hessian is exact. Or an `nn.CrossEntropyLoss`,
            `nn.MSELoss`, `nn.BCEWithLogitsLoss`, `nn.PoissonNLLLoss` or `nn.GaussianNLLLoss` (of
            outputs mean and variance), whose Hessian is known in closed form. The targets are then
            `batch[1]`, and class weights, ignored positions and label smoothing are accounted for
            over all batches.
        where: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        data: Batches, as an iterable that can be iterated repeatedly.
        batch_weight: For a loss that returns a bare mean: a function of the batch that returns how
            much the mean counts, or `"equal"`.
        reduction: `"mean"`: the sums of all batches divided by their weights. `"sum"`: not divided,
            which is also the case for a loss module whose own reduction is `"sum"`.
        checkpoint: Modules of `predict` that keep only their input and run again in each pass, such
            as `"layers.*"`, or True for what `predict` itself checkpoints. Forward mode then
            computes J v, without a graph.
        memory_budget: How much memory the graphs may hold: bytes (an int, 0 to keep none), or a
            fraction of the free memory (a float).
        chunk_size: How many vectors one pass takes.
        progress: Whether to show a progress bar over the batches.
        process_group: The processes that share the data; None: this process has all of it.
        allow: `autograd.Function`s to accept in a second derivative, as they are.

    Attributes:
        value: The value of the loss, a by-product.
        gradient: Its gradient with respect to *where*, a by-product.

    Raises:
        InputError: The sums and weights of the loss are not known, the data can be read only once,
            or *where* is not real floating point.
        GraphError: The loss reaches the parameters other than through the outputs (add a
            regularizer's part to the operator: `G + 0.1`); or as for `hodiff.HessianOperator`.

    Cost:
        The first product evaluates `predict` once per batch, and takes one pass to linearize it.
        Every product takes two passes per batch (J v and J' u), and one more through the loss alone
        if its Hessian is not known in closed form. The graphs take about twice the memory of the
        activations. With *checkpoint* and `memory_budget=0` the memory is about that of a gradient
        with activation checkpoints, and the time is that without checkpoints.

        Where the loss is a convex function of each sample's own C outputs, G is M'M / Σ w, with at
        most C rows of M for each sample. The exact diagonal then takes at most C passes per batch
        and one that proves that samples are apart, in place of a product for each column. For
        parameters of layers that are not known (as those of `hodiff.gram`), and where samples mix,
        it takes C passes for each sample. The estimates of `hodiff.trace` and `hodiff.diagonal` are
        exact if they allow as many products. Outputs in half precision, as under autocast, have no
        such rows.

        If the rows are few, `hodiff.logdet` is exact in these passes, `hodiff.solve` with damping
        takes them and one product, and `hodiff.eigsh` takes them and one product for each of the
        largest eigenvalues: M M' gives the rest. Few are at most D / 2 and 2048 in all, 64 for each
        sample, and not so many that products would be cheaper: with 10 classes, 660 rows for
        `solve` and `eigsh`. The layers must be known, and the data in one process. Multiples, sums,
        blocks and `G + 0.1` do the same; what asks for a method, a callback or a graph goes by
        products. In records each of the C passes counts as a product, which itself takes two.

    Examples:
        For least squares it is the Hessian, 2 X'X / n:

        >>> import torch, hodiff
        >>> X, y = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2)
        >>> predict = lambda w, batch: batch[0] @ w
        >>> G = hodiff.GaussNewtonOperator(
        ...     predict, torch.nn.MSELoss(), torch.ones(2), data=[(X, y)]
        ... )
        >>> G.dense()
        tensor([[1., 2.],
                [2., 5.]])

    Reference:
        Schraudolph, N. N. (2002). Fast curvature matrix-vector products for second-order gradient
        descent. Neural Computation 14(7). doi:10.1162/08997660260028683.
    """

    _takes_shards = True

    def __init__(
        self,
        predict: Callable[..., Any],
        loss: Loss,
        where: Any,
        *,
        data: Any = None,
        batch_weight: BatchWeight = None,
        reduction: DataReduction = "mean",
        checkpoint: Checkpoint = False,
        memory_budget: float = 0.5,
        chunk_size: ChunkSize = "auto",
        progress: bool = False,
        process_group: ProcessGroup | None = None,
        allow: Allowed = (),
    ) -> None:
        check_operands(predict, loss, where, data)
        check_loss(loss, batch_weight)
        super().__init__(
            where, data,
            lambda batches, group: PullbackBuilder(
                predict, loss, Weighted(batches, batch_weight, "loss", reduction=reduction), allow,
                checkpoint, memory_budget != 0, group is None,
            ),
            memory_budget=memory_budget, chunk_size=chunk_size, progress=progress,
            process_group=process_group, reduction=reduction,
        )  # fmt: skip
        self._check_blocks(predict, checkpoint)
        form = "closed-form" if type(loss) in LIKELIHOODS else "differentiated"
        self._route = f"linearized outputs, {form} loss"


# --- `FisherOperator`: the Fisher information, exact, sampled, or "empirical" ---------------------


Kind = Literal["exact", "mc", "empirical"]


@final
@dataclass(frozen=True)
class FisherBuilder(PullbackBuilder):
    """A builder with the expected outer product of the scores, the gradients of each sample's loss
    by the outputs.

    Attributes:
        kind: Over what the expectation is taken.
        samples: How many labels are drawn for each position.
        generator: From where.
        group_sum: The processes that share the data.
        device: Where labels are drawn without a generator.
        source: The generator of this evaluation.
        scores: Those of the labels drawn, by batch: they stay the same when a batch is evaluated
            again.
    """

    kind: Kind
    samples: int
    generator: torch.Generator | None
    group_sum: ProcessGroupSum | None
    source: list[torch.Generator | None] = field(default_factory=list)
    scores: dict[int, Leaves] = field(default_factory=dict)

    @property
    def by_samples(self) -> bool:
        """Whether each output counts as a sample's."""
        return self.kind == "empirical"

    def curvature(self, at_outputs: LossAtOutputs, outputs: Leaves, number: int) -> Curvature:
        """The mean outer product of the scores."""
        if self.kind == "exact":
            return at_outputs.fisher or at_outputs.curvature
        if self.kind == "empirical":
            _check_samples(outputs, at_outputs.curvature.dims)
            return OuterProducts(
                [part.unsqueeze(0) for part in at_outputs.gradient],
                lambda s: tuple(range(1 - s.ndim, 0)),
            )
        if number not in self.scores:
            # for cost() any labels will do
            source = self.source[0] if self.source else torch.Generator()
            self.scores[number] = at_outputs.drawn(self.samples, source)  # pyright: ignore[reportOptionalCall] - see `_check_kind`
        return OuterProducts(self.scores[number], lambda s: at_outputs.curvature.dims)

    def fresh(self, *, begins: bool = False) -> FisherBuilder:
        """The builder without the labels that it drew.

        Those of several processes are independent of each other, though they may have one seed.
        """
        source = [] if self.kind != "mc" or not begins else [self.generator]
        if source and self.group_sum is not None:
            source = [self.group_sum.own(self.generator)]
        return replace(self, source=source, scores={})


@final
class FisherOperator(PullbackOperator):
    r"""The Fisher information matrix F = Σᵢ E[gᵢ gᵢᵀ] / Σ w as an operator.

    \(g_i\) is the gradient of the loss of sample *i*, a negative log-likelihood. `kind` is the
    distribution of the labels in the expectation:

    * `"exact"`: over labels drawn from the model's own distribution, in closed form. For
      cross-entropy and squared error it equals the Gauss-Newton matrix.
    * `"mc"`: the same, estimated without bias from `samples` labels for each position, drawn once.
    * `"empirical"`: the labels of the data, without an expectation. It is not an estimate of the
    Fisher information, and differs from it except at a perfect fit. A sample is one entry of the
    outputs' leading dimension.

    Args:
        predict: `predict(where, batch)` returns the outputs.
        loss: One of the losses of `torch.nn` that `hodiff.GaussNewtonOperator` lists, with targets
            `batch[1]`; for `"empirical"` also a function `loss(outputs, batch)` that returns `(sum,
            weight)` (**never a mean with a weight**).
        where: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        data: Batches, as an iterable that can be iterated repeatedly.
        kind: `"exact"`, `"mc"` or `"empirical"`.
        samples: How many labels `"mc"` draws for each position.
        reduction: `"mean"`: the sums of all batches divided by their weights. `"sum"`: not divided.
        generator: The source of the labels of `"mc"`; None: the default generator of its device.
            With several processes, each draws its own labels from seeds of this generator, even if
            all processes have the same one.
        batch_weight: For a loss that returns a bare mean: how much the mean of a batch counts.
        checkpoint: Modules of `predict` that keep only their input and run again in each pass, such
            as `"layers.*"`, or True for what `predict` itself checkpoints.
        memory_budget: How much memory the graphs may hold: bytes (an int, 0 to keep none), or a
            fraction of the free memory (a float).
        chunk_size: How many vectors one pass takes.
        progress: Whether to show a progress bar over the batches.
        process_group: The processes that share the data; None: this process has all of it.
        allow: `autograd.Function`s to accept in a second derivative, as they are.

    Attributes:
        value: The value of the loss, a by-product.
        gradient: Its gradient with respect to *where*, a by-product.

    For your own likelihood: the Fisher information is the Hessian of the Kullback-Leibler
    divergence from the current model, so `hodiff.GaussNewtonOperator(predict, loss, ...)` with a
    `loss(outputs, batch)` that returns `(kl(outputs detached, outputs).sum(), weight)` equals it
    exactly.

    Raises:
        InputError: A loss that is not a likelihood for `"exact"` or `"mc"`: any function, class
            weights, label smoothing, probabilities as targets. (Use `hodiff.GaussNewtonOperator`
            there.)
        GraphError: The parameters have changed since the graphs were built (call `refresh()`); an
            operation has no derivative; or as for `hodiff.HessianOperator`.

    Cost:
        Two passes per product and batch. `"mc"` keeps the batches of the first pass, unless `data`
        is a sequence, so that its labels stay the same. The exact diagonal of `"empirical"` takes
        one pass per batch, that of `"mc"` one for each label of a sample, that of `"exact"` at most
        one for each output of a sample, as that of `hodiff.GaussNewtonOperator`.

    Examples:
        Of a linear model with squared error, a Gaussian of variance 1/2: 2 X'X / n.

        >>> import torch, hodiff
        >>> X, y = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([1.0, -1.0])
        >>> predict = lambda w, batch: batch[0] @ w
        >>> hodiff.FisherOperator(
        ...     predict, torch.nn.MSELoss(), torch.ones(2), data=[(X, y)], kind="exact"
        ... ).dense()
        tensor([[1., 2.],
                [2., 5.]])

    Reference:
        Martens, J. (2020). New insights and perspectives on the natural gradient method. JMLR
        21(146). arXiv:1412.1193. Kunstner, F., Hennig, P., Balles, L. (2019). Limitations of the
        empirical Fisher approximation for natural gradient descent. arXiv:1905.12558.
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        loss: Loss,
        where: Any,
        *,
        data: Any = None,
        kind: Kind | None = None,
        samples: int = 1,
        batch_weight: BatchWeight = None,
        reduction: DataReduction = "mean",
        generator: torch.Generator | None = None,
        checkpoint: Checkpoint = False,
        memory_budget: float = 0.5,
        chunk_size: ChunkSize = "auto",
        progress: bool = False,
        process_group: ProcessGroup | None = None,
        allow: Allowed = (),
    ) -> None:
        check_operands(predict, loss, where, data)
        _check_kind(kind, loss)
        check_loss(loss, batch_weight)
        _arguments.check_integer(samples, "samples", least=1)
        check_generator(generator)

        def builder(batches: Batches, group_sum: ProcessGroupSum | None) -> FisherBuilder:
            weigh = Weighted(
                batches, batch_weight, "loss", bare=kind != "empirical", reduction=reduction
            )
            traits = (checkpoint, memory_budget != 0, group_sum is None)
            drawn = (kind or "exact", samples, generator, group_sum)
            return FisherBuilder(predict, loss, weigh, allow, *traits, *drawn)

        super().__init__(
            where, data, builder, memory_budget=memory_budget, chunk_size=chunk_size,
            progress=progress, process_group=process_group, keep=kind == "mc", reduction=reduction,
        )  # fmt: skip
        self._check_blocks(predict, checkpoint)
        self.kind, self._route = kind, f"{kind}, linearized outputs"


def _check_kind(kind: Any, loss: Any) -> None:
    if kind is None:
        raise InputError(
            'kind is missing. "exact" is the expectation over labels of the model\'s own '
            'distribution; "mc" estimates it from samples= drawn labels; "empirical" uses the '
            "labels of the data, which is not the Fisher information."
        )
    _arguments.check_option(kind, Kind, "kind")
    if kind == "empirical":
        return
    if callable(loss) and not isinstance(loss, type) and type(loss) not in LIKELIHOODS:
        what = type(loss).__name__ if isinstance(loss, nn.Module) else "a function"
        raise InputError(
            f"loss: {what} does not name a distribution to draw labels from, so kind={kind!r} "
            f"needs one of {likelihood_names()}. For any other loss, write a function "
            f"loss(outputs, batch) -> (sum, weight) and use kind='empirical' or "
            f"hodiff.GaussNewtonOperator."
        )
    weighted = (
        getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None
    )
    if weighted or getattr(loss, "label_smoothing", 0.0):
        raise InputError(
            f"loss: with class weights or label smoothing, the loss is not a likelihood, so it has "
            f"no Fisher information (kind={kind!r}). Use hodiff.GaussNewtonOperator, which "
            f"accounts for them."
        )


def _check_samples(outputs: Leaves, classes: tuple[int, ...]) -> None:
    """Raise unless every output has samples, and not its classes, in its leading dimension."""
    lengths = {
        output.shape[0] if output.ndim and -output.ndim not in classes else None
        for output in outputs
    }
    if None in lengths or len(lengths) != 1:
        raise InputError(
            f"predict returned shapes {[tuple(output.shape) for output in outputs]}; "
            f"kind='empirical' needs the samples in the leading dimension of every output."
        )
