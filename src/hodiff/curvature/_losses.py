"""Losses as functions of a network's outputs: their sum, what it is divided by, their output
Hessian.

For the likelihoods of `LIKELIHOODS` the Hessian is written out; any other twice differentiable loss
is differentiated twice, which concerns the outputs only and is cheap.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hodiff._core import _arguments, _nodes, _reverse, _tree
from hodiff._core._arguments import Allowed
from hodiff._core._call import call, cut, in_place_of
from hodiff._core._graph import OutputGraph
from hodiff._core._tree import Leaves
from hodiff._core._vectors import draw, generic, sum_dtype
from hodiff.calculus._factors import units
from hodiff.curvature._data import NONE, Weighted, add_batch, check_signature
from hodiff.errors import GraphError, InputError

# --- a loss on one batch of outputs: its sum, its gradient, a matrix over the outputs by its
# products


class OutputCurvature(NamedTuple):
    """A symmetric matrix over the outputs of one batch, by its products.

    Attributes:
        times: The product with one vector like the outputs, or with so many stacked ones.
        dims: The dimensions, counted from the end, within which it mixes entries of one output: the
            classes.
    """

    times: Callable[[Leaves, int | None], Leaves]
    dims: tuple[int, ...] = ()


def diagonal_curvature(diagonal: Tensor | float) -> OutputCurvature:
    """The second derivatives of a loss that is a sum over entries: a diagonal."""
    return OutputCurvature(lambda tangents, count: [v * diagonal for v in tangents])


@dataclass(frozen=True, eq=False)
class LossAtOutputs:
    """A loss on one batch.

    Attributes:
        value: The sum, detached.
        weight: What it is divided by; None: by nothing.
        gradient: The gradient of the sum by each output, detached.
        curvature: Its Hessian by the outputs.
        drawn: The gradients by the outputs for labels drawn from the model, `(samples, *shape)` on
            each; None for a loss that does not say what distribution it is the likelihood of.
        fisher: The expectation of the Hessian over labels of the model's own; None where it is the
            same.
    """

    value: Tensor
    weight: float | None
    gradient: Leaves
    curvature: OutputCurvature
    drawn: Callable[[int, torch.Generator | None], Leaves] | None = None
    fisher: OutputCurvature | None = None


def check_shapes(z: Tensor, target: Tensor) -> None:
    """Raise unless targets have the shape of the outputs."""
    if z.shape != target.shape:
        raise InputError(
            f"loss: targets have shape {tuple(target.shape)}, the outputs {tuple(z.shape)}; "
            "they must agree."
        )


Loss = Callable[..., Any] | nn.Module


def softmax_curvature(p: Tensor, scale: Tensor, classes: int) -> OutputCurvature:
    r"""The second derivatives of cross-entropy, for each position:
    \(s\,(\operatorname{diag} p - p p^\top)\).
    """
    dims = (classes - p.ndim,)

    def times(tangents: Leaves, count: int | None) -> Leaves:
        weighted = p * tangents[0]
        return [(weighted - p * weighted.sum(dims, keepdim=True)) * scale]

    return OutputCurvature(times, dims)


def pair_curvature(first: Tensor, mixed: Tensor | float, second: Tensor) -> OutputCurvature:
    """The second derivatives by two outputs that meet entry by entry:
    a symmetric matrix of two rows for each.
    """

    def times(tangents: Leaves, count: int | None) -> Leaves:
        a, b = tangents
        return [first * a + mixed * b, mixed * a + second * b]

    return OutputCurvature(times)


@final
class OuterProducts:
    r"""A mean over M draws of \(\sum_i s_i s_i^\top\): Fisher matrices of given scores.

    The scores are stacked, `(M, *outputs)` on each leaf; `dims` says which dimensions, counted from
    the end, belong to one sample. The others tell the samples apart.
    """

    def __init__(self, scores: Leaves, dims: Callable[[Tensor], tuple[int, ...]]) -> None:
        self._scores, self._dims = scores, dims

    def times(self, tangents: Leaves, count: int | None) -> Leaves:
        """The product of the sum of outer products with tangents of the outputs."""
        draws, lead = self._scores[0].shape[0], 0 if count is None else 1
        total = [torch.zeros_like(v, dtype=sum_dtype(v.dtype)) for v in tangents]
        for each in range(draws):
            scores = [score[each] for score in self._scores]
            inner = [self._inner(s, v) for s, v in zip(scores, tangents, strict=True)]
            weight = (
                inner[0].flatten(lead)
                if len(inner) == 1
                else torch.stack([p.flatten(lead) for p in inner]).sum(0)
            )
            for sum_, s, part in zip(total, scores, inner, strict=True):
                sum_ += s * weight.reshape(part.shape) / draws
        return [sum_.to(v.dtype) for sum_, v in zip(total, tangents, strict=True)]

    def roots(self) -> Leaves | None:
        """The scores, stacked, those of all samples at one place in each.

        None where no dimension is the samples', or they would fill memory.
        """
        stacks: Leaves = []
        for scores in self._scores:
            rest, dims = scores.shape[2:], self._dims(scores[0])
            if not dims or -len(rest) - 1 not in dims:
                shape = [1 if dim in dims else rest[dim] for dim in range(-len(rest), 0)]
                places = torch.arange(math.prod(shape), device=scores.device)
                at = places.reshape(-1, 1, *[1] * len(rest)) == places.reshape(shape)
                if len(places) * scores.numel() * scores.element_size() <= _reverse.CHUNK_BYTES:
                    stacks += [(scores.unsqueeze(1) * at).flatten(0, 1) / len(scores) ** 0.5]
        return stacks if len(stacks) == len(self._scores) else None

    def _inner(self, s: Tensor, v: Tensor) -> Tensor:
        dims = self._dims(s)
        # an empty tuple would sum over all
        return (s * v).sum(dims, keepdim=True) if dims else s * v


Curvature = OutputCurvature | OuterProducts


def roots(curvature: Curvature, outputs: Leaves, most: int) -> Leaves | None:
    """Vectors `(R, N, *output)`: the matrix is the sum of s s', of each sample's part s of each.

    None where there are none, as samples meet in the loss, or it is not convex; or more than so
    many. Nor in halves, where what is told from rounding would be most of the matrix.
    """
    if isinstance(curvature, OuterProducts):
        return curvature.roots()
    sizes, like = [output[0].numel() for output in outputs], outputs[0]
    numbers, unit = sum(sizes), ROUNDING * torch.finfo(like.dtype).eps
    size = numbers**2 * len(like) * like.element_size()
    if unit > 1e-3 or numbers > most or size > _reverse.CHUNK_BYTES:
        return None
    matrices = _lines(curvature.times(units(outputs), numbers), 2).movedim(0, 1)
    some = [generic(output.numel()).to(output).reshape(output.shape) for output in outputs]
    apart = _lines(curvature.times(some, None), 1)
    apart = apart - torch.einsum("nij,nj->ni", matrices, _lines(some, 1))
    if not bool(matrices.isfinite().all()):
        return None
    values, vectors = torch.linalg.eigh(matrices)
    noise = unit * values.abs().amax(1, keepdim=True)
    # Where a sample is sure of its class, all of its entries are differences of larger numbers.
    largest = noise.max()
    if not bool((apart.abs() <= largest * numbers).all() and (values >= -largest).all()):
        return None
    kept = values > noise
    lines = (vectors * (values * kept).sqrt().unsqueeze(1))[:, :, kept.any(0)].movedim(2, 0)
    parts = zip(lines.to(like.dtype).split(sizes, 2), outputs, strict=True)
    return [part.reshape(len(part), *output.shape) for part, output in parts]


ROUNDING = 100
"""How far two results may be apart, in units of it."""


def _lines(parts: Leaves, leading: int) -> Tensor:
    """The numbers of all outputs that belong to a sample, as one line, in float64."""
    lines = [part.reshape(*part.shape[:leading], part.shape[leading:].numel()) for part in parts]
    return torch.cat(lines, -1).double()


def is_of_torch(loss: Any) -> bool:
    """Whether it is one of PyTorch's modules of losses, or of a class that is made of one."""
    return any(cls.__module__ == "torch.nn.modules.loss" for cls in type(loss).__mro__)


def check_loss(loss: Any, batch_weight: Any) -> None:
    """Raise unless the loss is a function, or one of the modules whose Hessian is known."""
    if isinstance(loss, type):
        raise InputError(f"loss: got the class {loss.__name__}; give an instance of it.")
    if is_of_torch(loss):
        if type(loss) not in LIKELIHOODS:  # a subclass computes what it likes
            takes = list(inspect.signature(loss.forward).parameters)
            more = (
                ["outputs", "batch[1]"]
                if len(takes) == 2
                else [*takes[:1], *(f"... {name}" for name in takes[1:])]
            )
            raise InputError(
                f"loss: hodiff knows the sums and weights of {likelihood_names()}, not of "
                f"{type(loss).__name__}. Give a function that returns (sum, weight):\n"
                f"    def loss(outputs, batch):\n"
                f"        return {type(loss).__name__}(reduction='sum')({', '.join(more)}), "
                "len(outputs)"
            )
        if loss.reduction == "none":
            raise InputError('loss: reduction="none" gives no scalar; use "mean" or "sum".')
        if loss._forward_hooks or loss._forward_pre_hooks:
            raise InputError(
                f"loss: this {type(loss).__name__} has forward hooks, which its closed-form "
                f"Hessian would bypass; give a function loss(outputs, batch) -> (sum, weight)."
            )
        if batch_weight is not None:
            raise InputError(
                f"batch_weight: {type(loss).__name__} determines the weight of a batch itself; "
                f"leave it out, or give a function loss(outputs, batch)."
            )
    elif not callable(loss):
        raise InputError(
            f"loss: got {_arguments.kind(loss)}, expected loss(outputs, batch) -> (sum, weight), "
            f"or an instance of one of {likelihood_names()}."
        )
    else:
        check_signature(loss, "loss", ("outputs", "batch"))


def target_of(batch: Any) -> Tensor:
    """The second item of a batch, for losses that are given as modules."""
    if isinstance(batch, (tuple, list)) and len(batch) >= 2 and isinstance(batch[1], Tensor):
        return batch[1]
    raise InputError(
        "loss: a loss module takes its targets from batch[1], but this batch is not a pair "
        "(inputs, targets); give a function loss(outputs, batch) -> (sum, weight)."
    )


def loss_at_outputs(
    loss: Any, weigh: Weighted, graph: OutputGraph, batch: Any, number: int, allow: Allowed
) -> LossAtOutputs:
    """The loss of one batch's outputs, its gradient by them, and its output Hessian."""
    result, _, tree = _tree.flatten(graph.outputs)
    outputs = [output.detach() for output in result]
    likelihood = LIKELIHOODS.get(type(loss))
    if likelihood is not None:
        scored = likelihood(loss, outputs, target_of(batch))
        return scored if loss.reduction == "mean" else replace(scored, weight=None)
    point = _tree.rebuild(tree, iter(outputs))
    _refuse_functional(loss, batch)

    def weighed(values: Any) -> tuple[Any, Any]:
        try:
            returned = loss(values) if batch is NONE else loss(values, batch)
        except (AttributeError, TypeError) as error:
            add_batch(error, "loss(outputs, batch)", batch)
            raise
        return weigh(returned, batch, number)

    def times(tangents: Leaves, count: int | None) -> Leaves:
        """Products by a second pass through the graph of the gradient."""
        return _reverse.products(at, gradient, tangents, count, chunk_size=count)

    in_place_of(loss, weighed)
    with OutputGraph(
        call(weighed, point, passes=2, create_graph=False, has_aux=True, keep=True, allow=allow)
    ) as at:
        _refuse_shortcut(graph, at.scalars())
        gradient = _reverse.gradient(at, differentiated=True)
        value = cut(at.scalars()).reshape(())
    return LossAtOutputs(
        value, at.aux, [part.detach() for part in gradient], OutputCurvature(times)
    )


def recorded_curvature(
    loss: Any,
    weigh: Weighted,
    graph: OutputGraph,
    batch: Any,
    number: int,
    allow: Allowed,
    tangents: Leaves,
    count: int,
) -> Leaves:
    """The products of the output Hessian with tangents, which can be differentiated."""
    outputs, _, tree = _tree.flatten(graph.outputs)
    summed = copy.copy(loss) if type(loss) in LIKELIHOODS else None
    if summed is not None:
        summed.reduction = "sum"

    def total(values: Any) -> Any:
        if summed is None:
            return weigh(loss(values) if batch is NONE else loss(values, batch), batch, number)[0]
        (first, *more), target = _tree.flatten(values)[0], target_of(batch)
        labels = type(loss) is nn.CrossEntropyLoss and not target.is_floating_point()
        return summed(first, target if labels else target.to(first), *more)

    point = _tree.rebuild(tree, iter(outputs))
    with OutputGraph(
        call(in_place_of(loss, total), point, passes=2, create_graph=True, allow=allow)
    ) as at:
        gradient = _reverse.gradient(at, differentiated=True)
        return _reverse.products(at, gradient, tangents, count, chunk_size=count)


def _refuse_functional(loss: Any, batch: Any) -> None:
    """Raise for `F.mse_loss`: it would get the whole batch for its targets."""
    if getattr(loss, "__module__", "") == "torch.nn.functional" and _tree.is_container(batch):
        raise InputError(
            f"loss: F.{loss.__name__} takes targets, but loss(outputs, batch) is called with the "
            f"whole batch, {_tree.describe(_tree.flatten(batch)[2])}. Give nn.CrossEntropyLoss(), "
            "nn.MSELoss() or nn.BCEWithLogitsLoss(), which take batch[1], "
            "or a function that returns (sum, weight):\n    def loss(outputs, "
            f"batch):\n        return F.{loss.__name__}(outputs, batch[1], reduction='sum'), "
            "len(outputs)"
        )


def _refuse_shortcut(graph: OutputGraph, value: Tensor) -> None:
    """Raise where a loss reaches the parameters other than through the outputs."""
    reached = _nodes.survey([value]).visited
    for leaf, name in zip(graph.leaves, graph.call.where.names, strict=True):
        if _nodes.node_of(leaf) in reached:
            raise GraphError(
                f"loss reaches {name} other than through the outputs, and that part would be "
                f"missing from J' H J. Leave a regularizer out of the loss and add its Hessian to "
                f"the operator: G + 0.1 for 0.05 |w|^2."
            )


# --- likelihoods: losses of `torch.nn`, written out -----------------------------------------------


def _single(loss: nn.Module, outputs: Leaves, target: Tensor | None = None) -> Tensor:
    """The one output, of the shape of the targets where these are given."""
    if len(outputs) != 1:
        raise InputError(
            f"loss: {type(loss).__name__} takes one tensor, but predict returned {len(outputs)}."
        )
    if target is not None:
        check_shapes(outputs[0], target)
    return outputs[0]


def cross_entropy(loss: nn.CrossEntropyLoss, outputs: Leaves, target: Tensor) -> LossAtOutputs:
    r"""Cross-entropy with class weights, ignored positions and label smoothing.

    At each position it is \(-\sum_c t_c \log p_c\) with weights \(t\) that do not depend on *z*, so
    its gradient is \(s p - t\) and its Hessian \(s (\operatorname{diag} p - p p^\top)\), with \(s =
    \sum_c t_c\).
    """
    from hodiff.memory import _cross_entropy as closed

    z = _single(loss, outputs)
    classes = 0 if z.ndim == 1 else 1
    weight = _counted(loss, z, target, classes)
    given = None if loss.weight is None else loss.weight.detach().to(z)
    form = closed.CrossEntropyForm(loss.label_smoothing, loss.ignore_index)
    if target.is_floating_point():
        target = target.to(z.dtype)
    scored = closed.AtLogits.of(z, target, given, form)

    def drawn(samples: int, generator: torch.Generator | None) -> Leaves:
        """The scores p - e_y of labels y, zero at ignored positions."""
        rows = z.softmax(classes).movedim(classes, -1)
        flat = rows.reshape(-1, rows.shape[-1])
        device = z.device if generator is None else generator.device
        labels = torch.multinomial(
            flat.to(device), samples, replacement=True, generator=generator
        ).to(z.device)
        scores = flat - F.one_hot(labels.T, rows.shape[-1]).to(flat.dtype)
        scores = scores.reshape((samples, *rows.shape)).movedim(-1, classes - z.ndim)
        return [scores * (scored.scale() > 0)]

    def times(tangents: Leaves, count: int | None) -> Leaves:
        """Products by a second pass through the graph of the gradient."""
        if count is None:
            return [scored.times(tangents[0])]
        return [torch.stack([scored.times(tangent) for tangent in tangents[0]])]

    if z.numel() < closed.LEAST:
        curvature = softmax_curvature(z.softmax(classes), scored.scale(), classes)
    else:
        curvature = OutputCurvature(times, (classes - z.ndim,))
    return LossAtOutputs(scored.loss, weight, [scored.gradient], curvature, drawn)


def _counted(loss: nn.CrossEntropyLoss, z: Tensor, target: Tensor, classes: int) -> float:
    """The number by which `reduction="mean"` divides."""
    if target.is_floating_point():
        check_shapes(z, target)
        return float(z.numel() // z.shape[classes])
    expected = tuple(z.shape[:classes] + z.shape[classes + 1 :])
    if tuple(target.shape) != expected:
        raise InputError(
            f"loss: targets have shape {tuple(target.shape)}, expected {expected} for the outputs."
        )
    used = target != loss.ignore_index
    if loss.weight is None:
        return float(used.sum())
    return float((loss.weight.detach().to(z)[torch.where(used, target, 0).long()] * used).sum())


def squared_error(loss: nn.MSELoss, outputs: Leaves, target: Tensor) -> LossAtOutputs:
    r"""\((z - y)^2\), of a Gaussian of variance 1/2."""
    z = _single(loss, outputs, target)
    r = z - target

    def drawn(samples: int, generator: torch.Generator | None) -> Leaves:
        return [draw((samples, *z.shape), z, "gaussian", generator) * 2**0.5]

    return LossAtOutputs(
        r.square().sum(), float(z.numel()), [2 * r], diagonal_curvature(2.0), drawn
    )


def binary_cross_entropy(
    loss: nn.BCEWithLogitsLoss, outputs: Leaves, target: Tensor
) -> LossAtOutputs:
    r"""\(-y \log p - (1 - y) \log (1 - p)\) of \(p = \sigma(z)\),
    with weights of entries and of positive ones.
    """
    z = _single(loss, outputs, target)
    target = target.to(z)
    weight = torch.ones_like(z) if loss.weight is None else loss.weight.detach().to(z).expand_as(z)
    positive = 1.0 if loss.pos_weight is None else loss.pos_weight.detach().to(z)
    p = torch.sigmoid(z)
    value = F.binary_cross_entropy_with_logits(
        z, target, loss.weight, reduction="sum", pos_weight=loss.pos_weight
    )
    mass = weight * (positive * target + 1 - target)

    def drawn(samples: int, generator: torch.Generator | None) -> Leaves:
        device = z.device if generator is None else generator.device
        uniform = torch.rand(
            (samples, *z.shape), generator=generator, device=device, dtype=sum_dtype(z.dtype)
        ).to(z.device)
        return [p - (uniform < p).to(z.dtype)]

    gradient = mass * p - weight * positive * target
    return LossAtOutputs(
        value, float(z.numel()), [gradient], diagonal_curvature(mass * p * (1 - p)), drawn
    )


def gaussian(loss: nn.GaussianNLLLoss, outputs: Leaves, target: Tensor) -> LossAtOutputs:
    r"""\(\tfrac12 (\log v + (y - m)^2 / v)\) of outputs (m, v); a variance below `eps` counts as
    `eps`.

    Its Hessian depends on the labels, so the Fisher information, the expectation of that, is
    another matrix.
    """
    if len(outputs) != 2 or outputs[0].shape != outputs[1].shape:
        raise InputError(
            f"loss: {type(loss).__name__} takes a mean and a variance of the same shape, (mean, "
            f"var), but predict returned shapes {[tuple(output.shape) for output in outputs]}."
        )
    m, v = outputs
    check_shapes(m, target)
    r = m - target
    value = F.gaussian_nll_loss(m, target, v, loss.full, loss.eps, reduction="sum")
    v = v.clamp(min=loss.eps)

    def drawn(samples: int, generator: torch.Generator | None) -> Leaves:
        normal = draw((samples, *m.shape), m, "gaussian", generator)
        return [-normal / v.sqrt(), 0.5 * (1 - normal**2) / v]

    gradient = [r / v, 0.5 * (1 / v - r**2 / v**2)]
    hessian = pair_curvature(1 / v, -r / v**2, r**2 / v**3 - 0.5 / v**2)
    return LossAtOutputs(
        value, float(m.numel()), gradient, hessian, drawn, pair_curvature(1 / v, 0.0, 0.5 / v**2)
    )


def poisson(loss: nn.PoissonNLLLoss, outputs: Leaves, target: Tensor) -> LossAtOutputs:
    r"""\(e^z - y z\), or \(z - y \log (z + \epsilon)\) without `log_input`,
    whose Hessian depends on the labels.
    """
    z = _single(loss, outputs, target)
    y = target.to(z)
    value = F.poisson_nll_loss(z, y, loss.log_input, loss.full, eps=loss.eps, reduction="sum")
    rate = z.exp() if loss.log_input else z

    def drawn(samples: int, generator: torch.Generator | None) -> Leaves:
        device = z.device if generator is None else generator.device
        wide = rate.to(device, sum_dtype(z.dtype)).expand(samples, *z.shape).contiguous()
        counts = torch.poisson(wide, generator=generator).to(z)
        return [rate - counts if loss.log_input else 1 - counts / (z + loss.eps)]

    if loss.log_input:
        return LossAtOutputs(value, float(z.numel()), [rate - y], diagonal_curvature(rate), drawn)
    safe = z + loss.eps
    hessian, fisher = diagonal_curvature(y / safe**2), diagonal_curvature(z / safe**2)
    return LossAtOutputs(value, float(z.numel()), [1 - y / safe], hessian, drawn, fisher)


LIKELIHOODS: dict[type[Any], Callable[[Any, Leaves, Tensor], LossAtOutputs]] = {
    nn.CrossEntropyLoss: cross_entropy,
    nn.MSELoss: squared_error,
    nn.BCEWithLogitsLoss: binary_cross_entropy,
    nn.GaussianNLLLoss: gaussian,
    nn.PoissonNLLLoss: poisson,
}
"""Of each kind of loss: (loss, outputs, targets) -> what stands in `LossAtOutputs`, with what a
mean is divided by.

To add one is a function above, which checks what it takes, and a line here."""


def likelihood_names() -> str:
    """The losses that are written out, in words."""
    return ", ".join(f"nn.{kind.__name__}" for kind in LIKELIHOODS)
