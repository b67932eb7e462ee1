"""Penalties on gradients: `gradient_penalty`, the one core, with the recipes that are a line or two
of it; and the parts that all penalties share: a critic as one number per sample, points, norms that
are right at zero, reduction.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hodiff._core import _arguments, _call, _nodes, _reverse, _settings, _tree
from hodiff._core._arguments import (
    Allowed,
    Probes,
    check_option,
    is_set,
)
from hodiff._core._graph import OutputGraph, detached
from hodiff._core._vectors import check_generator, draw
from hodiff._core._where import Where
from hodiff.calculus._first import CallOptions
from hodiff.errors import GraphError, HodiffWarning, InputError

Function = Callable[..., Any]
What = Function | Tensor
Reduction = Literal["mean", "sum", "none"]
"""From one value for each sample to a loss."""


ExtremeReduction = Literal["max", "mean", "sum", "none"]
"""From values of which the largest may be what counts."""


PatchReduction = Literal["sum", "mean"]
"""From several outputs of one sample to one."""


SecondMethod = Literal["exact", "differences"]
"""How a second directional derivative is computed."""


class LossOptions(CallOptions, total=False):
    """The options of losses over samples; for overloads alone."""

    batch_ndim: int
    check_independence: bool


class VectorOptions(LossOptions, total=False):
    """The options of losses along random vectors; for overloads alone."""

    vectors: Any
    generator: torch.Generator | None


class Critic(NamedTuple):
    """A user's critic, made to return one number per sample, and its outputs beside.

    Where it may give `maps` of outputs, `(N, 1, H, W)`, those of a sample are reduced to one.
    """

    f: Any
    batch_ndim: int
    patch_reduction: PatchReduction
    grad_scale: float
    maps: bool = True

    @property
    def __wrapped__(self) -> Any:
        """The critic itself, whose signature is asked for where a call of it fails."""
        return self.f

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One number per sample, and the outputs as `f` gave them."""
        outputs, batch = self.f(x, *args, **kwargs), torch.Size(())
        if self.batch_ndim:
            batch = (x if isinstance(x, Tensor) else _tree.flatten(x)[0][0]).shape[
                : self.batch_ndim
            ]
        return self.per_sample(outputs, batch), outputs

    def per_sample(self, outputs: Any, batch: torch.Size) -> Tensor:
        """One number per sample; what is none, and no map of one channel,
        is left for the check that names it.
        """
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"f returned {_arguments.kind(outputs)}, expected the tensor of a critic's "
                f"outputs, one per sample; select it: lambda x: critic(x)[0]."
            )
        scalars = outputs
        several = batch and outputs.numel() != batch.numel()
        if several and self.maps and outputs.shape[: self.batch_ndim + 1] == (*batch, 1):
            rows = wide(outputs).flatten(self.batch_ndim)
            scalars = rows.sum(-1) if self.patch_reduction == "sum" else rows.mean(-1)
        if self.grad_scale == 1:
            return scalars
        largest = torch.finfo(outputs.dtype).max
        if self.grad_scale > largest:
            raise InputError(
                f"grad_scale: {self.grad_scale} exceeds the largest {outputs.dtype} number, "
                f"{largest}, so the first pass would overflow; 4096 is a good value for float16."
            )
        return wide(scalars) * self.grad_scale


# --- where penalties are evaluated: points between two batches; and vectors, drawn or given -------


def interpolate(
    a: Any,
    b: Any,
    *,
    batch_ndim: int = 1,
    detach: bool | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    r"""A random point between each pair of samples, aᵢ + αᵢ (bᵢ - aᵢ) with αᵢ uniform in [0, 1).

    One \(\alpha\) is drawn per sample and shared by all its entries and, in a container, by all
    leaves, so that the point lies on the straight line.

    Args:
        a: A tensor `(*batch, ...)` or a container of them: the real samples.
        b: The same structure, with the same shapes: the generated ones.
        batch_ndim: How many leading dimensions index samples.
        detach: Whether to detach the points from the graphs of the samples. None: yes, because a
            penalty on the critic must not train the generator, with a warning if a sample requires
            grad. False: no.
        generator: The source of the random numbers; None: the device's default generator.

    Returns:
        The points, with the structure and shapes of *a*.

    Raises:
        InputError: Structures, shapes, dtypes or devices differ. (8 samples against 1 would
            broadcast.)

    Warns:
        HodiffWarning: A sample that requires grad is detached and *detach* is None.

    Cost:
        No derivative pass; one new batch.

    Examples:
        >>> import torch, hodiff
        >>> points = hodiff.interpolate(torch.zeros(4, 3), torch.ones(4, 3))
        >>> bool((points == points[:, :1]).all()), bool(((points >= 0) & (points < 1)).all())
        (True, True)

    Reference:
        Gulrajani, I. et al. (2017). Improved training of Wasserstein GANs. arXiv:1704.00028,
        section 4.
    """
    recorded = torch.is_grad_enabled()
    a, b = detached_samples(a, detach, "a", recorded), detached_samples(b, detach, "b", recorded)
    return between(a, b, ("a", "b"), batch_ndim=batch_ndim, generator=generator)


def between(
    a: Any, b: Any, names: tuple[str, str], *, batch_ndim: int, generator: torch.Generator | None
) -> Any:
    """The points of `interpolate`; `names` are what the caller calls the two batches."""
    check_generator(generator)
    batch, firsts, seconds, tree = _pairs(a, b, names, batch_ndim)
    like = firsts[0]
    alpha = torch.rand(
        batch,
        generator=generator,
        device=like.device,
        dtype=torch.promote_types(like.dtype, torch.float32),
    )
    weights = [
        alpha.to(first).reshape(*batch, *[1] * (first.ndim - batch_ndim)) for first in firsts
    ]
    return _tree.rebuild(tree, map(torch.lerp, firsts, seconds, weights))


def _samples(
    value: Any, name: str, batch_ndim: int
) -> tuple[list[Tensor], list[str], _tree.Tree, torch.Size]:
    """The tensors of a container, which share a batch; their names and order; that batch."""
    leaves, names, tree = _tree.flatten(value, name)
    _arguments.check_container(tree, len(leaves), name)
    for leaf, each in zip(leaves, names, strict=True):
        _arguments.check_real_tensor(leaf, each)
    return leaves, names, tree, _arguments.check_batch(leaves, names, batch_ndim)


def _pairs(
    a: Any, b: Any, called: tuple[str, str], batch_ndim: int
) -> tuple[torch.Size, list[Tensor], list[Tensor], _tree.Tree]:
    """The batch's shape and the leaves of two batches, checked to be alike."""
    one, other = called
    firsts, names, tree, batch = _samples(a, one, batch_ndim)
    different = _tree.difference(tree, _tree.flatten(b, other)[2], other)
    if different:
        raise InputError(f"{other}: {different}; it must be like {one}.")
    seconds = _tree.leaves_like(tree, b)
    for first, second, name in zip(firsts, seconds, names, strict=True):
        beside = other + name.removeprefix(one)
        _arguments.check_real_tensor(second, beside)
        if first.shape != second.shape:
            batches = first.shape[:batch_ndim] != second.shape[:batch_ndim]
            way_out = (
                f"Interpolation needs a partner for each sample; cut the larger batch: {one}[:n], "
                f"{other}[:n]."
                if batches and first.shape[batch_ndim:] == second.shape[batch_ndim:]
                else "The samples themselves differ in shape, so there is no line between them: "
                "bring them to one shape first (resize or crop images, pad sequences)."
            )
            raise InputError(
                f"{beside} has shape {tuple(second.shape)}, but {name} has {tuple(first.shape)}. "
                f"{way_out}"
            )
        if first.dtype != second.dtype or first.device != second.device:
            raise InputError(
                f"{beside} is {second.dtype} on {second.device}, but {name} is {first.dtype} on "
                f"{first.device}; convert it: {beside}.to({name})."
            )
    return batch, firsts, seconds, tree


def detached_samples(samples: Any, detach: bool | None, name: str, recorded: bool) -> Any:
    """The samples as a penalty on the critic takes them: detached, unless `detach=False`.

    Where nobody said so and the result is `recorded`, that deserves a word: whoever made them gets
    no gradient.
    """
    if detach is False:
        return samples
    if detach is None and recorded:
        leaves, names, _ = _tree.flatten(samples, name)
        attached = [
            name
            for leaf, name in zip(leaves, names, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if attached:
            warnings.warn(
                f"{' and '.join(attached)} require{'s' * (len(attached) == 1)} grad but will be "
                f"detached, so the penalty trains the critic alone: a generator or feature "
                f"extractor behind the samples gets no gradient from it. If you want that, pass "
                f"detach=True (or {name}.detach()); if not, pass detach=False.",
                HodiffWarning,
                stacklevel=_arguments.outside(),
            )
    return detached(samples)


def vectors_like(
    where: Where, vectors: Any, samples: int, probes: Probes, generator: torch.Generator | None
) -> list[Tensor]:
    """The caller's vectors like a point, stacked; or `samples` random ones.

    None is a tensor of inference mode.
    """
    if vectors is not None:
        stacked = where.parse(vectors, "vectors").stacked()
        return [leaf.clone() if leaf.is_inference() else leaf for leaf in stacked]
    check_generator(generator)
    return [draw((samples, *leaf.shape), leaf, probes, generator) for leaf in where.tensors]


# --- norms of gradients, one for each sample, that are right at zero, at extremes and in half
# precision


def sample_norm(grads: Any, *, ord: float = 2, batch_ndim: int = 1) -> Tensor:
    r"""The norm of each sample's gradient, ‖gᵢ‖, over everything but the batch.

    A sample's entries in all leaves of a container count as one vector. The derivative at a zero
    gradient is zero, at every order (`sqrt(sum(g**2))` gives NaN there, and `linalg.vector_norm`
    from the second order on). The norm is correct from 1e-30 to 1e30, although squares leave the
    range of float32.

    Args:
        grads: A tensor or a container of tensors, each `(*batch, ...)`.
        ord: 2 (Euclidean), 1 (sum of absolute values) or `float("inf")` (largest absolute value).
        batch_ndim: How many leading dimensions index samples: 1 for points `(P, 3)`, 2 for `(B, P,
            3)`. With 0, everything is one sample.

    Returns:
        A tensor of shape `(*batch,)`, in float32 or better whatever the dtype of *grads*.

    Raises:
        InputError: No tensor, a batch that the leaves do not share, or another *ord*.

    Cost:
        No derivative pass: a few passes over the entries. Differentiable any number of times.

    Examples:
        A gradient of (3, 4) in two leaves, and a zero one:

        >>> import torch, hodiff
        >>> hodiff.sample_norm(
        ...     {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([[4.0], [0.0]])}
        ... )
        tensor([5., 0.])

    Reference:
        The scaling by the largest entry is that of the BLAS routine `nrm2`: Blue, J. L. (1978). A
        portable Fortran program to find the Euclidean norm of a vector. ACM TOMS 4(1).
        doi:10.1145/355769.355771.
    """
    check_ord(ord)
    leaves, *_ = _samples(grads, "grads", batch_ndim)
    return norm(leaves, batch_ndim, ord)


def check_ord(ord: float) -> None:
    """Raise unless the norm is one whose derivatives are known to be safe."""
    if not isinstance(ord, (int, float)) or ord not in (1, 2, float("inf")):
        raise InputError(f'ord: got {ord!r}, expected 2, 1 or float("inf").')


def norm(leaves: Sequence[Tensor], batch_ndim: int, ord: float = 2) -> Tensor:
    """`sample_norm` of checked leaves."""
    rows = [_rows(leaf, batch_ndim) for leaf in leaves if leaf.shape[batch_ndim:].numel()]
    if not rows:
        return wide(leaves[0].new_zeros(leaves[0].shape[:batch_ndim]))
    row = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    if ord == 1:
        return row.abs().sum(-1)
    if ord != 2:
        return row.abs().amax(-1)
    plain = torch.linalg.vector_norm(row, dim=-1)
    if _ordinary(plain):
        return plain
    # With the largest entry m drawn out, squares neither overflow nor vanish. m is a constant to
    # the derivative: the norm does not depend on it.
    with _settings.grad_mode(False):
        largest = row.abs().amax(-1, keepdim=True)
        dead = largest == 0  # not where it is NaN, which must show
        # inf / inf would be NaN
        largest = torch.where(dead, 1, largest.clamp(max=torch.finfo(row.dtype).max))
    # A dead sample is moved off zero, where a norm has no second derivative, and its result
    # replaced. One operation, so that there is no further copy of the gradient.
    moved = torch.addcdiv(dead.to(row.dtype), row, largest)
    return largest.squeeze(-1) * torch.where(
        dead.squeeze(-1), 0, torch.linalg.vector_norm(moved, dim=-1)
    )


def _ordinary(norms: Tensor) -> bool:
    """Whether all norms are far from zero and from the ends of float32's range: the plain ones will
    do, and are faster.

    Not asked where the answer would have to be waited for, or cannot be had: on a GPU, in a traced
    region, under vmap.
    """
    if not norms.numel() or norms.device.type != "cpu" or _call.is_hidden(norms):
        return False
    least, most = torch.aminmax(norms.detach())  # NaN where one is
    return float(least) > 1e-12 and float(most) < 1e12


def inner(a: Sequence[Tensor], b: Sequence[Tensor], batch_ndim: int) -> Tensor:
    """The inner product of each sample's vectors; with itself it has no root: smooth everywhere."""
    left = [*map(_rows, a, repeat(batch_ndim))]
    # A product of a row with itself, for the backward of a square takes twice as long.
    right = left if b is a else [*map(_rows, b, repeat(batch_ndim))]
    return functools.reduce(torch.add, [(x * y).sum(-1) for x, y in zip(left, right, strict=True)])


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 where its dtype is a shorter one."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _rows(leaf: Tensor, batch_ndim: int) -> Tensor:
    """`(*batch, entries)`, in float32 or better: a square of 300 is infinite in float16."""
    leaf = wide(leaf)
    return leaf.flatten(batch_ndim) if leaf.ndim > batch_ndim else leaf.unsqueeze(-1)


# --- what the losses share: whether they are recorded, how they are reduced, and the warnings that
# they give


def recording(on: bool) -> AbstractContextManager[Any]:
    """Grad mode for what follows the derivatives:
    an explicit `create_graph=True` also wins under `no_grad`.
    """
    if on and torch.is_inference_mode_enabled():
        return _settings.recording()
    return _AS_IT_IS if torch.is_grad_enabled() is on else _settings.grad_mode(on)


_AS_IT_IS = nullcontext()


def check_critic(f: Any, *, computed: bool = True) -> None:
    """Raise unless `f` can be called or is a tensor, `computed` where that will do; and for a
    wrapper that loses gradients.
    """
    if not callable(f) and not (computed and isinstance(f, Tensor)):
        expected = ", a module, or a tensor computed from x" if computed else " or a module"
        raise InputError(f"f: got {_arguments.kind(f)}, expected a function{expected}.")
    if isinstance(f, DistributedDataParallel) and f.static_graph:
        raise static_graph_error()


def evaluation(
    f: Any,
    x: Any,
    *,
    passes: int,
    batch_ndim: int,
    record: bool,
    allow: Allowed,
    args: Any,
    kwargs: Any,
    check_independence: bool = False,
) -> OutputGraph:
    """`f` at `x`, for a loss of its derivatives."""
    check_critic(f)
    return OutputGraph(
        _call.call(
            f,
            x,
            passes=passes,
            batch_ndim=batch_ndim,
            create_graph=record,
            allow=allow,
            args=args,
            kwargs=kwargs,
            check_independence=check_independence,
        )
    )


def pulled(
    graph: OutputGraph, outputs: Sequence[Tensor], vectors: Sequence[Tensor]
) -> list[Tensor]:
    """Jᵀv for each of the stacked vectors, stacked; one is a plain pass, several go in batches."""
    count = vectors[0].shape[0]
    if count == 1:
        cotangents = _reverse.writable(graph, [v[0] for v in vectors])
        return [part.unsqueeze(0) for part in _reverse.vjp(graph, outputs, cotangents)]
    return _reverse.products(graph, outputs, vectors, count, chunk_size=None)


def finished(
    loss: Tensor, f: Any, outputs: Tensor, leaves: Sequence[Tensor], record: bool
) -> Tensor:
    """The loss, with a warning where nothing that is trained can be reached from the gradient's
    leaves.
    """
    if not record:
        return loss
    if _HAS_PROCESSES and torch.distributed.is_initialized():
        refuse_static_graph([outputs])
    # `requires_grad` alone would not show it: what is reached is the caller's, or a leaf of a call,
    # which an enclosing one differentiates by if it is open.
    reached = [leaf for leaf in _nodes.survey(leaves).variables() if leaf.requires_grad]
    if leaves and not any(tag is None or tag[0].open for tag in map(_call.tag_of, reached)):
        warnings.warn(
            "no trainable tensor is reachable from the gradient, so this penalty is a constant for "
            "the optimizer. Usual causes: all parameters are frozen, f detaches or leaves PyTorch "
            "somewhere, or the gradient does not depend on them. If you only want the value, "
            "pass create_graph=False, or call it under torch.no_grad().",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )
    # Every parameter must take part in the backward, or the ranks are not averaged: a bias of the
    # last layer is in no gradient by the input. (`isinstance` would ask an abstract base class, in
    # Python.)
    return loss + 0 * outputs.sum() if DistributedDataParallel in f.__class__.__mro__ else loss


_HAS_PROCESSES = torch.distributed.is_available()


def reduce(values: Tensor, reduction: ExtremeReduction, weight: float) -> Tensor:
    """The values of all samples as one."""
    if reduction in ("mean", "max") and not values.numel():
        raise InputError(
            f'x: the batch is empty and has no {reduction}; use reduction="sum", '
            "or skip empty batches."
        )
    if reduction != "none":
        values = {"max": values.max, "mean": values.mean, "sum": values.sum}[reduction]()
    return values if weight == 1 else weight * values


def refuse_static_graph(outputs: Sequence[Tensor]) -> None:
    """Raise for a `DistributedDataParallel(static_graph=True)` that a function hides,
    at its first step.
    """
    for function, nodes in _nodes.survey(outputs).functions():
        if function.__name__ == "_DDPSink" and any(
            node.ddp_weakref().static_graph for node in nodes
        ):
            raise static_graph_error()


def static_graph_error() -> GraphError:
    return GraphError(
        "f runs DistributedDataParallel(static_graph=True), which silently does not average the "
        "gradients of a penalty: the ranks would drift apart. Give the penalty the inner module "
        "(ddp.module) and add it to a loss that goes through the wrapper, or build the wrapper "
        "without static_graph."
    )


# --- the core -------------------------------------------------------------------------------------


class Recipe(LossOptions, total=False):
    """The options that the penalties on samples share."""

    reduction: Reduction
    patch_reduction: PatchReduction
    grad_scale: float


class Wanted(Recipe, total=False):
    """The further options of `gradient_penalty`."""

    weight: float
    target: float | Tensor
    one_sided: bool
    power: float
    ord: float
    strict: bool | None


@overload
def gradient_penalty(
    f: What, x: Any, *, return_outputs: Literal[False] = False, **options: Unpack[Wanted]
) -> Tensor: ...


@overload
def gradient_penalty(
    f: What, x: Any, *, return_outputs: Literal[True], **options: Unpack[Wanted]
) -> tuple[Tensor, Tensor]: ...


def gradient_penalty(
    f: What,
    x: Any,
    *,
    weight: float = 1.0,
    target: float | Tensor = 0.0,
    one_sided: bool = False,
    power: float = 2,
    ord: float = 2,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    patch_reduction: PatchReduction = "sum",
    create_graph: bool | None = None,
    grad_scale: float = 1.0,
    return_outputs: bool = False,
    check_independence: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A gradient penalty, w · meanᵢ |‖∇f(xᵢ)‖ - t|ᵖ, which pulls norms to t.

    The norm is over everything but the batch, jointly over all tensors of *x*. The result is a
    loss: if grad mode is on, it can be differentiated with respect to everything that `f` uses, and
    that backward pass frees its graph. It never needs `retain_graph`.

    Args:
        f: A critic: a function of *x* with one output per sample, `(N,)` or `(N, 1)`, or a map of
            outputs, `(N, 1, H, W)`, which *patch_reduction* reduces to one. Or such an output
            already computed from *x* (which then requires grad), whose graph is left intact.
        x: Where: a tensor `(N, ...)` or a container of them; a module (or `hodiff.select`) with
            `batch_ndim=0`. It is not changed. If it requires grad, the penalty is also
            differentiable with respect to it.
        weight: The factor \(w\).
        target: The target norm \(t\): a number, or a tensor with one entry per sample.
        one_sided: Whether only norms above the target count: \(\max(0, \lVert g\rVert - t)^p\).
        power: The exponent \(p\), at least 1.
        ord: The norm: 2, 1 or `float("inf")`.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions of *x* index independent samples; 0 for parameters.
        patch_reduction: How several outputs of one sample become one: `"sum"` (what `ones_like` as
            `grad_outputs` computes) or `"mean"`. The norms differ by the number of outputs, and a
            penalty of target 0 by its square.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        grad_scale: Multiplies the outputs before the first reverse pass and divides the gradient
            after it, for float16 (see the documentation).
        return_outputs: Whether to also return what `f` returned, from the same evaluation.
        check_independence: Whether to test that no sample's output depends on another sample, at
            the cost of one evaluation and two passes. A `BatchMixingWarning` says if it does, and
            by how much.
        strict: What to return for a tensor of *x* that the output does not depend on. None: zeros,
            and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`, such as labels.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`, in float32 or better. With
        *return_outputs* `(penalty, outputs)`.

    Raises:
        InputError: The output is not one per sample (a mean over the batch would make the gradient
            N times too small; of class logits, `(N, K)`, choose or sum), or an option is not known.
        GraphError: An operation has no second derivative (it is named); `f` does not depend on *x*;
            `f` is wrapped in `DistributedDataParallel(static_graph=True)`, whose ranks would
            diverge silently.

    Warns:
        HodiffWarning: The gradient depends on no trainable tensor: the penalty is a constant.
        BatchMixingWarning: BatchNorm in training mode mixes samples.

    Cost:
        One evaluation of `f` and one reverse pass; the loss's backward is a second one, over both.
        Memory: the graphs of the evaluation and of the gradient, until that backward.

    Examples:
        The gradient of a linear critic is its weight, of norm 5 here, so a target of 1 gives
        (5 - 1)²:

        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> penalty = hodiff.gradient_penalty(critic, torch.randn(8, 2), target=1.0)
        >>> penalty.backward()
        >>> penalty.item(), critic.weight.grad  # 2 (5 - 1) w / |w|
        (16.0, tensor([[4.8000, 6.4000]]))

    Reference:
        Gulrajani, I. et al. (2017). Improved training of Wasserstein GANs. arXiv:1704.00028.
        Drucker, H. and LeCun, Y. (1992). Improving generalization performance using double
        backpropagation. IEEE Trans. Neural Networks 3(6). doi:10.1109/72.165600.
    """
    check_ord(ord)
    check_option(reduction, Reduction, "reduction")
    _arguments.check_number(weight, "weight")
    _arguments.check_number(power, "power", least=1)
    one_sided = one_sided is not False and is_set(one_sided, "one_sided")
    if not isinstance(target, Tensor):
        _arguments.check_number(target, "target", least=0)
    elif target.is_nested:
        raise InputError("target: got a nested tensor, expected a number or one entry per sample.")
    check_option(patch_reduction, PatchReduction, "patch_reduction")
    _arguments.check_number(grad_scale, "grad_scale", positive=True)
    critic = Critic(_arguments.as_called(f), batch_ndim, patch_reduction, grad_scale)
    check_critic(critic.f)
    return_outputs = return_outputs is not False and is_set(return_outputs, "return_outputs")
    record = _call.loss_recorded(create_graph)
    outputs, gradient = outputs_and_gradient(
        critic,
        x,
        create_graph=record,
        check_independence=check_independence,
        strict=strict,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )
    with recording(record):
        if grad_scale != 1:  # divided where it cannot underflow
            gradient = [wide(leaf) / grad_scale for leaf in gradient]
        deviations = _deviations(gradient, batch_ndim, target, one_sided, power, ord)
        penalty = reduce(deviations, reduction, weight)
        penalty = finished(penalty, f, outputs, gradient, record)
    return (penalty, outputs) if return_outputs else penalty


def _deviations(
    gradient: list[Tensor],
    batch_ndim: int,
    target: float | Tensor,
    one_sided: bool,
    power: float,
    ord: float,
) -> Tensor:
    """The distances of the norms of the samples' gradients from the target, to the power."""
    batch = gradient[0].shape[:batch_ndim]
    if isinstance(target, Tensor):
        if target.ndim and target.shape != batch:
            raise InputError(
                f"target has shape {tuple(target.shape)}, expected a number or one entry "
                f"per sample: {tuple(batch)}."
            )
    elif target == 0 and ord == 2 and power % 2 == 0:
        # No root to take, so smooth also at zero.
        squared = inner(gradient, gradient, batch_ndim)
        return squared if power == 2 else squared ** (power // 2)
    excess = norm(gradient, batch_ndim, ord) - target
    if one_sided or power != 2:  # the square needs no sign, nor the derivative of one
        excess = excess.clamp(min=0) if one_sided else excess.abs()
    return _to_the(excess, power)


def outputs_and_gradient(
    critic: Critic,
    x: Any,
    *,
    create_graph: bool,
    check_independence: bool,
    strict: bool | None,
    allow: Allowed,
    args: Any,
    kwargs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """The critic's outputs, and the gradient's leaves."""
    tensor = isinstance(critic.f, Tensor)
    where = x if isinstance(x, Where) else Where(x)
    if tensor:
        _arguments.check_batch(where.tensors, where.names, critic.batch_ndim)
        with _settings.grad_mode(True):
            what = critic.per_sample(critic.f, where.tensors[0].shape[: critic.batch_ndim])
    else:
        what = critic
    with OutputGraph(
        _call.call(
            what,
            where,
            passes=1,
            has_aux=not tensor,
            batch_ndim=critic.batch_ndim,
            create_graph=create_graph,
            strict=strict,
            allow=allow,
            args=args,
            kwargs=kwargs,
            check_independence=check_independence,
        )
    ) as graph:
        gradient = _reverse.gradient(graph)
    return critic.f if tensor else graph.extra(), gradient


def _to_the(excess: Tensor, power: float) -> Tensor:
    """`excess ** power` of what is not negative, with every derivative zero at zero that can be."""
    if power == int(power):
        return excess if power == 1 else excess.pow(power)
    alive = excess != 0  # a broken power has a derivative that is infinite at zero, at some order
    return torch.where(alive, torch.where(alive, excess, 1) ** power, 0)


# --- penalties on gradients outside of adversarial training: the eikonal equation, the gradient of
# a loss


class PenaltyOptions(CallOptions, total=False):
    """The options that the penalties below share."""

    weight: float
    target: float
    power: float


class EikonalOptions(PenaltyOptions, total=False):
    """The further options of `eikonal_penalty`."""

    reduction: Reduction
    check_independence: bool


class GradientNormOptions(PenaltyOptions, total=False):
    """The further options of `gradient_norm_penalty`."""

    strict: bool | None


@overload
def eikonal_penalty(
    f: What,
    points: Tensor,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[EikonalOptions],
) -> Tensor: ...


@overload
def eikonal_penalty(
    f: What, points: Tensor, *, return_outputs: Literal[True], **options: Unpack[EikonalOptions]
) -> tuple[Tensor, Tensor]: ...


def eikonal_penalty(
    f: What,
    points: Tensor,
    *,
    weight: float = 0.1,
    target: float = 1.0,
    power: float = 2,
    reduction: Reduction = "mean",
    create_graph: bool | None = None,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The eikonal equation of a distance function, as a loss: λ · mean |‖∇f(x)‖ - 1|ᵖ.

    A point is one row: the norm is over the last dimension of `(P, 3)` or `(B, P, 3)`.

    Args:
        f: A function of points that returns one value for each, `(*batch,)` or `(*batch, 1)`; or
            such a tensor, computed from *points*.
        points: Shape `(*batch, d)`. Pass a latent code in *args*, so that it does not enter the
            norm.
        weight: \(\lambda\), 0.1 in IGR; SIREN uses 50 with `power=1`.
        target: The target norm.
        power: The exponent, 2 in IGR, 1 in SIREN.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        return_outputs: Whether to also return `f(points)`.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: *points* is not one tensor with coordinates in its last dimension, the output is
            not one per point, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Cost:
        The same as `gradient_penalty`.

    Examples:
        The distance to the origin solves the equation, and three times it is off by (3 - 1)²:

        >>> import torch, hodiff
        >>> points = torch.randn(5, 7, 3, dtype=torch.float64)
        >>> with torch.no_grad():
        ...     once, thrice = (
        ...         hodiff.eikonal_penalty(lambda x: c * x.norm(dim=-1), points) for c in (1, 3)
        ...     )
        >>> round(once.item(), 9), round(thrice.item(), 9)
        (0.0, 0.4)

    Reference:
        Gropp, A. et al. (2020), IGR. arXiv:2002.10099; Sitzmann, V. et al. (2020), SIREN.
        arXiv:2006.09661.
    """
    _arguments.check_real_tensor(points, "points")
    if points.ndim < 2:
        raise InputError(
            f"points has shape {tuple(points.shape)}, expected (*batch, d) with the coordinates "
            f"last; for a single point, pass points[None]."
        )
    return gradient_penalty(
        f,
        points,
        target=target,
        power=power,
        weight=weight,
        reduction=reduction,
        batch_ndim=points.ndim - 1,
        create_graph=create_graph,
        return_outputs=return_outputs,
        check_independence=check_independence,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )


@overload
def gradient_norm_penalty(
    f: What,
    where: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[GradientNormOptions],
) -> Tensor: ...


@overload
def gradient_norm_penalty(
    f: What, where: Any, *, return_outputs: Literal[True], **options: Unpack[GradientNormOptions]
) -> tuple[Tensor, Tensor]: ...


def gradient_norm_penalty(
    f: What,
    where: Any,
    *,
    weight: float = 1.0,
    target: float = 0.0,
    power: float = 2,
    create_graph: bool | None = None,
    return_outputs: bool = False,
    strict: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The squared norm of a loss's gradient with respect to the parameters, μ ‖∇L‖².

    Args:
        f: A function of *where* that returns the loss, one element, such as `lambda model:
            loss(model(x), y)`; or the loss itself, already computed.
        where: Usually a module (its trainable parameters; `f` receives it) or
            `hodiff.select(module, ...)`; also tensors.
        weight: \(\mu\). The implicit regularization of gradient descent with step h has \(\mu =
            h/4\).
        target: The target norm.
        power: The exponent; 1 penalizes the norm itself (Zhao et al.).
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        return_outputs: Whether to also return the loss, from the same evaluation.
        strict: What to return for a tensor of *where* that the loss does not depend on. None:
            zeros, and an error if it depends on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor of shape `()`; with *return_outputs* `(penalty, loss)`, both differentiable
        with respect to the parameters. Parameters that the gradient does not depend on have a
        `.grad` of zeros after `backward()`, not None, so an optimizer with weight decay changes
        them. Exclude them with `hodiff.select(module, ..., exclude=...)`.

    Raises:
        InputError: `f` returns more than one element, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Cost:
        One evaluation of `f` and one reverse pass; the backward of the penalty is a Hessian-vector
        product.

    Examples:
        \(L = \tfrac12 \lVert\theta\rVert^2\) has the gradient \(\theta\):

        >>> import torch, hodiff
        >>> theta = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> penalty = hodiff.gradient_norm_penalty(lambda t: t @ t / 2, theta)
        >>> penalty.backward()
        >>> penalty.item(), theta.grad
        (25.0, tensor([6., 8.]))

    Reference:
        Barrett, D. and Dherin, B. (2021). Implicit gradient regularization. arXiv:2009.11162. Zhao,
        Y. et al. (2022). Penalizing gradient norm for efficiently improving generalization.
        arXiv:2202.03599.
    """
    return gradient_penalty(
        f,
        where,
        target=target,
        power=power,
        weight=weight,
        batch_ndim=0,
        create_graph=create_graph,
        return_outputs=return_outputs,
        strict=strict,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )


# --- of adversarial training: WGAN-GP, WGAN-LP, DRAGAN, R1, R2 ------------------------------------


class Between(Recipe, total=False):
    """The further options of `wgan_gp_penalty` and `dragan_penalty`; for overloads alone."""

    weight: float
    target: float
    detach: bool | None
    generator: torch.Generator | None


class OneSided(Between, total=False):
    """The options of `wgan_gp_penalty` alone."""

    one_sided: bool


class Around(Between, total=False):
    """The options of `dragan_penalty` alone."""

    std: float


@overload
def wgan_gp_penalty(
    critic: Function,
    real: Any,
    fake: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[OneSided],
) -> Tensor: ...


@overload
def wgan_gp_penalty(
    critic: Function,
    real: Any,
    fake: Any,
    *,
    return_outputs: Literal[True],
    **options: Unpack[OneSided],
) -> tuple[Tensor, Tensor]: ...


def wgan_gp_penalty(
    critic: Function,
    real: Any,
    fake: Any,
    *,
    weight: float = 10.0,
    target: float = 1.0,
    one_sided: bool = False,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    patch_reduction: PatchReduction = "sum",
    detach: bool | None = None,
    create_graph: bool | None = None,
    grad_scale: float = 1.0,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""WGAN-GP, λ · meanᵢ (‖∇D(x̂ᵢ)‖ - 1)², between real and generated samples.

    \(\hat x_i\) is a random point on the line from `real[i]` to `fake[i]` (`interpolate`). The norm
    is over all entries of one sample. With `one_sided=True` it is WGAN-LP,
    \(\max(0, \lVert\nabla D\rVert - 1)^2\).

    Args:
        critic: A function of samples `(N, ...)`, with outputs `(N,)`, `(N, 1)` or `(N, 1, H, W)`.
        real: Real samples, a tensor or a container.
        fake: Generated samples, with the structure and shapes of *real*.
        weight: \(\lambda\), 10 in the paper (0.1 for its toy problems).
        target: The target norm.
        one_sided: Whether only norms above the target count.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions index independent samples.
        patch_reduction: How several outputs of one sample become one: `"sum"` or `"mean"`.
        detach: Whether to detach the samples. None: yes, with a warning if one requires grad. True:
            without a warning. False: the penalty is also differentiable with respect to the
            samples, as a featurizer needs.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        grad_scale: Multiplies the outputs before the first reverse pass and divides the gradient
            after it, for float16.
        return_outputs: Whether to also return the critic's outputs at these points, from the same
            evaluation.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        generator: The source of the random points; None: the device's default generator.
        args: Further positional arguments for the critic, such as labels.
        kwargs: Keyword arguments for the critic.

    Returns:
        A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs*
        `(penalty, outputs)`.

    Raises:
        InputError: The batches do not have the same structure and shapes, the output is not one per
            sample, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Warns:
        HodiffWarning: A sample that requires grad is detached and *detach* is None; or the penalty
            trains nothing.

    Cost:
        One evaluation of the critic and one reverse pass, and a second in the loss's backward.

    Examples:
        A linear critic with |w| = 5, so 10 (5 - 1)², wherever the points are:

        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> hodiff.wgan_gp_penalty(critic, torch.randn(8, 2), torch.randn(8, 2)).item()
        160.0

    Reference:
        Gulrajani, I. et al. (2017). arXiv:1704.00028; Petzka, H. et al. (2018), WGAN-LP.
        arXiv:1709.08894. Other code: BasicSR and mmgeneration (by default) take the norm over
        channels only, torchgan over the whole batch; TensorFlow-GAN penalizes norm/target - 1. The
        authors' own code has NaN at a zero gradient.
    """
    recorded = _call.loss_recorded(create_graph)
    real, fake = (
        detached_samples(real, detach, "real", recorded),
        detached_samples(fake, detach, "fake", recorded),
    )
    points = between(real, fake, ("real", "fake"), batch_ndim=batch_ndim, generator=generator)
    return gradient_penalty(
        critic,
        points,
        target=target,
        one_sided=one_sided,
        weight=weight,
        reduction=reduction,
        batch_ndim=batch_ndim,
        patch_reduction=patch_reduction,
        create_graph=create_graph,
        grad_scale=grad_scale,
        return_outputs=return_outputs,
        check_independence=check_independence,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )


@overload
def dragan_penalty(
    critic: Function,
    real: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[Around],
) -> Tensor: ...


@overload
def dragan_penalty(
    critic: Function, real: Any, *, return_outputs: Literal[True], **options: Unpack[Around]
) -> tuple[Tensor, Tensor]: ...


def dragan_penalty(
    critic: Function,
    real: Any,
    *,
    weight: float = 10.0,
    target: float = 1.0,
    std: float = 0.5,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    patch_reduction: PatchReduction = "sum",
    detach: bool | None = None,
    create_graph: bool | None = None,
    grad_scale: float = 1.0,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""DRAGAN, λ · meanᵢ (‖∇D(x̂ᵢ)‖ - 1)², at real samples with noise.

    As in the authors' code, \(\hat x = x + \alpha c \sigma u\): \(\sigma\) is the standard
    deviation of the batch, \(u \sim U[0,1)\) for each entry, \(\alpha \sim U[0,1)\) for each
    sample, \(c\) is *std*. The norm is over all entries of one sample. For the paper's normal noise
    of variance c:
    `gradient_penalty(critic, real + c**0.5 * torch.randn_like(real), target=1.0, weight=10.0)`.

    Args:
        critic: A function of samples `(N, ...)`, with outputs `(N,)`, `(N, 1)` or `(N, 1, H, W)`.
        real: Real samples, a tensor or a container.
        weight: \(\lambda\), 10 in the paper.
        target: The target norm.
        std: The range of the noise, in standard deviations of the batch.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions index independent samples.
        patch_reduction: How several outputs of one sample become one: `"sum"` or `"mean"`.
        detach: Whether to detach the samples. None: yes, with a warning if one requires grad. True:
            without a warning. False: the penalty is also differentiable with respect to the
            samples, as a featurizer needs.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        grad_scale: Multiplies the outputs before the first reverse pass and divides the gradient
            after it, for float16.
        return_outputs: Whether to also return the critic's outputs at these points, from the same
            evaluation.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        generator: The source of the random noise; None: the device's default generator.
        args: Further positional arguments for the critic, such as labels.
        kwargs: Keyword arguments for the critic.

    Returns:
        A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs*
        `(penalty, outputs)`.

    Raises:
        InputError: The output is not one per sample, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Warns:
        HodiffWarning: A sample that requires grad is detached and *detach* is None; or the penalty
            trains nothing.

    Cost:
        The same as `wgan_gp_penalty`.

    Examples:
        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> hodiff.dragan_penalty(critic, torch.randn(8, 2)).item()
        160.0

    Reference:
        Kodali, N. et al. (2017). On convergence and stability of GANs. arXiv:1705.07215. Other
        code: PyTorch-GAN takes the norm over channels only and draws α per entry; compare_gan uses
        x + σ (u - ½), clipped to [0, 1].
    """
    _arguments.check_number(std, "std", least=0)
    real = detached_samples(real, detach, "real", _call.loss_recorded(create_graph))
    leaves, _, tree, _ = _samples(real, "real", batch_ndim)
    check_generator(generator)
    noise = [
        torch.rand(leaf.shape, generator=generator, device=leaf.device, dtype=leaf.dtype)
        * (std * leaf.std(correction=0))
        for leaf in leaves
    ]
    far = _tree.rebuild(tree, map(torch.add, leaves, noise))
    points = between(real, far, ("real", "far"), batch_ndim=batch_ndim, generator=generator)
    return gradient_penalty(
        critic,
        points,
        target=target,
        weight=weight,
        reduction=reduction,
        batch_ndim=batch_ndim,
        patch_reduction=patch_reduction,
        create_graph=create_graph,
        grad_scale=grad_scale,
        return_outputs=return_outputs,
        check_independence=check_independence,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )


# --- R1 and R2: the squared norm of a critic's gradient at the samples themselves, real or
# generated


class Regularization(Recipe, total=False):
    """The options of `r1_penalty` and `r2_penalty`."""

    gamma: float
    detach: bool | None


@overload
def r1_penalty(
    critic: Function,
    real: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[Regularization],
) -> Tensor: ...


@overload
def r1_penalty(
    critic: Function, real: Any, *, return_outputs: Literal[True], **options: Unpack[Regularization]
) -> tuple[Tensor, Tensor]: ...


def r1_penalty(
    critic: Function,
    real: Any,
    *,
    gamma: float = 10.0,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    patch_reduction: PatchReduction = "sum",
    detach: bool | None = None,
    create_graph: bool | None = None,
    grad_scale: float = 1.0,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""R1, γ/2 · meanᵢ ‖∇D(xᵢ)‖², at real samples.

    The factor one half is part of the definition of \(\gamma\) in the paper, in StyleGAN2 and in
    R3GAN. The squared norm is over all entries of one sample.

    Args:
        critic: A function of samples `(N, ...)`, with outputs `(N,)`, `(N, 1)` or `(N, 1, H, W)`.
        real: Real samples, a tensor or a container.
        gamma: \(\gamma\), 10 in the paper. For a lazy penalty every k steps, pass k times the
            value.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions index independent samples.
        patch_reduction: How several outputs of one sample become one: `"sum"` or `"mean"`. With
            `"mean"`, R1 of P×P patches is P⁴ times smaller.
        detach: Whether to detach the samples. None: yes, with a warning if one requires grad. True:
            without a warning. False: the penalty is also differentiable with respect to the
            samples, as a featurizer needs.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        grad_scale: Multiplies the outputs before the first reverse pass and divides the gradient
            after it, for float16.
        return_outputs: Whether to also return the critic's outputs, so that the loss needs no other
            evaluation of the real samples.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for the critic, such as labels.
        kwargs: Keyword arguments for the critic.

    Returns:
        A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: The output is not one per sample, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Warns:
        HodiffWarning: A sample that requires grad is detached and *detach* is None; or the penalty
            trains nothing.

    Cost:
        The same as `gradient_penalty`.

    Examples:
        A linear critic with |w| = 5, so 10/2 · 25:

        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> hodiff.r1_penalty(critic, torch.randn(8, 2)).item()
        125.0

    Reference:
        Mescheder, L. et al. (2018). Which training methods for GANs do actually converge?
        arXiv:1801.04406. Other code: GAN_stability, GigaGAN and lucidrains' StyleGAN2 leave out the
        half (their 10 is a gamma of 20); StyleGAN2-ADA uses gamma = 0.0002 · resolution² / batch,
        every 16 steps times 16.
    """
    return _zero_centered(
        critic,
        real,
        "real",
        gamma,
        detach,
        reduction=reduction,
        batch_ndim=batch_ndim,
        patch_reduction=patch_reduction,
        create_graph=create_graph,
        grad_scale=grad_scale,
        return_outputs=return_outputs,
        check_independence=check_independence,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )


@overload
def r2_penalty(
    critic: Function,
    fake: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[Regularization],
) -> Tensor: ...


@overload
def r2_penalty(
    critic: Function, fake: Any, *, return_outputs: Literal[True], **options: Unpack[Regularization]
) -> tuple[Tensor, Tensor]: ...


def r2_penalty(
    critic: Function,
    fake: Any,
    *,
    gamma: float = 10.0,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    patch_reduction: PatchReduction = "sum",
    detach: bool | None = None,
    create_graph: bool | None = None,
    grad_scale: float = 1.0,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""R2, γ/2 · meanᵢ ‖∇D(xᵢ)‖², at generated samples.

    The formula is that of `r1_penalty`, including the factor one half, at other points.

    Args:
        critic: A function of samples `(N, ...)`, with outputs `(N,)`, `(N, 1)` or `(N, 1, H, W)`.
        fake: Generated samples, a tensor or a container.
        gamma: \(\gamma\), 10 in the paper; R3GAN uses the same for R1 and R2.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions index independent samples.
        patch_reduction: How several outputs of one sample become one: `"sum"` or `"mean"`.
        detach: Whether to detach the samples. None: yes, with a warning if one requires grad. True:
            without a warning. False: the penalty is also differentiable with respect to the
            samples.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        grad_scale: Multiplies the outputs before the first reverse pass and divides the gradient
            after it, for float16.
        return_outputs: Whether to also return the critic's outputs.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for the critic, such as labels.
        kwargs: Keyword arguments for the critic.

    Returns:
        A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: The output is not one per sample, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Warns:
        HodiffWarning: A sample that requires grad is detached and *detach* is None; or the penalty
            trains nothing.

    Cost:
        The same as `gradient_penalty`.

    Examples:
        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> hodiff.r2_penalty(critic, torch.randn(8, 2), gamma=1.0).item()
        12.5

    Reference:
        Mescheder, L. et al. (2018). arXiv:1801.04406; Huang, N. et al. (2024), R3GAN.
        arXiv:2501.05441. Other code: GAN_stability leaves out the half; WGAN-div (PyTorch-GAN) does
        not detach the samples.
    """
    return _zero_centered(
        critic,
        fake,
        "fake",
        gamma,
        detach,
        reduction=reduction,
        batch_ndim=batch_ndim,
        patch_reduction=patch_reduction,
        create_graph=create_graph,
        grad_scale=grad_scale,
        return_outputs=return_outputs,
        check_independence=check_independence,
        allow=allow,
        args=args,
        kwargs=kwargs,
    )


def _zero_centered(
    critic: Function, samples: Any, name: str, gamma: float, detach: bool | None, **options: Any
) -> Any:
    """Half of `gamma` times the squared norm of the gradient at samples,
    which errors call `name`.
    """
    _arguments.check_number(gamma, "gamma", least=0)
    recorded = _call.loss_recorded(options["create_graph"])
    return gradient_penalty(
        critic, detached_samples(samples, detach, name, recorded), weight=gamma / 2, **options
    )
