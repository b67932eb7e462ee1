"""The parts that penalties share: a critic as one number per sample, points,
norms that are right at zero, reduction.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hodiff._core import (
    _arguments,
    _call,
    _nodes,
    _reverse,
    _settings,
    _tree,
)
from hodiff._core._arguments import (
    Allowed,
    Probes,
    allowed,
    check_option,
    check_real_tensor,
)
from hodiff._core._graph import OutputGraph, detached
from hodiff._core._vectors import check_generator, draw
from hodiff._core._where import Where
from hodiff.calculus._first import CallOptions
from hodiff.errors import GraphError, HodiffWarning, InputError

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

    def check(self) -> None:
        """Raise for an option that is not known, and for a wrapper that loses gradients."""
        check_option(self.patch_reduction, PatchReduction, "patch_reduction")
        _arguments.check_number(self.grad_scale, "grad_scale", least=0)
        if not self.grad_scale:
            raise InputError("grad_scale: got 0, expected a positive number.")
        if isinstance(self.f, Tensor):
            check_real_tensor(self.f, "f")
        check_critic(self.f)

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
                f"{first.device}."
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
        pairs = [
            (name, leaf)
            for leaf, name in zip(leaves, names, strict=True)
            if isinstance(leaf, Tensor)
        ]
        attached = [name for name, leaf in pairs if leaf.requires_grad]
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
    if not norms.numel() or norms.device.type != "cpu" or _settings.tracing():
        return False
    try:
        least, most = torch.aminmax(norms.detach())  # NaN where one is
        return float(least) > 1e-12 and float(most) < 1e12
    except RuntimeError as error:
        if "vmap" not in str(error):  # which refuses the question
            raise
        return False


def inner(a: Sequence[Tensor], b: Sequence[Tensor], batch_ndim: int) -> Tensor:
    """The inner product of each sample's vectors; with itself it has no root: smooth everywhere."""
    left = [_rows(leaf, batch_ndim) for leaf in a]
    # A product of a row with itself, for the backward of a square takes twice as long.
    right = left if b is a else [_rows(leaf, batch_ndim) for leaf in b]
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


def accepted(allow: Allowed) -> Sequence[str | type]:
    """`allow`, and the Function that DistributedDataParallel puts behind its outputs,
    which passes gradients on.
    """
    return allowed((*names, "_DDPSink")) if (names := allowed(allow)) else _PASSES_ON


_PASSES_ON = allowed(("_DDPSink",))


def check_critic(f: Any) -> None:
    """Raise unless `f` can be called or is a tensor, and for a wrapper that loses gradients."""
    if not callable(f) and not isinstance(f, Tensor):
        raise InputError(
            f"f: got {_arguments.kind(f)}, expected a function, a module, "
            "or a tensor computed from x."
        )
    if isinstance(f, DistributedDataParallel) and f.static_graph:
        raise static_graph_error()


def check_function(f: Any) -> None:
    """Raise unless `f` can be called; a tensor will not do."""
    if isinstance(f, Tensor) or not callable(f):
        raise InputError(f"f: got {_arguments.kind(f)}, expected a function or a module.")


def recorded(
    f: Any,
    x: Any,
    *,
    batch_ndim: int,
    create_graph: bool | None,
    check_independence: bool,
    args: Any,
    kwargs: Any,
) -> bool:
    """Whether a loss is recorded; once it is known, if asked for, that samples are independent."""
    if check_independence is not False:
        _call.call(
            f, x, 1, False, args=args, kwargs=kwargs, batch_ndim=batch_ndim,
            check_independence=check_independence,
        )  # fmt: skip
    return _call.loss_recorded(create_graph)


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
            allow=accepted(allow),
            args=args,
            kwargs=kwargs,
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
    """The loss, once it is known that its graph is worth having."""
    if not record:
        return loss
    if _HAS_PROCESSES and torch.distributed.is_initialized():
        refuse_static_graph([outputs])
    warn_if_constant(leaves)
    # Every parameter must take part in the backward, or the ranks are not averaged: a bias of the
    # last layer is in no gradient by the input. (`isinstance` would ask an abstract base class, in
    # Python.)
    return loss + 0 * outputs.sum() if DistributedDataParallel in f.__class__.__mro__ else loss


def refuse_empty(values: Tensor, reduction: ExtremeReduction) -> None:
    """Raise where there is no value to reduce; their sum is zero."""
    if reduction in ("mean", "max") and not values.numel():
        raise InputError(
            f'x: the batch is empty and has no {reduction}; use reduction="sum", '
            "or skip empty batches."
        )


def reduce(values: Tensor, reduction: ExtremeReduction, weight: float) -> Tensor:
    """The values of all samples as one."""
    if reduction != "none":
        refuse_empty(values, reduction)
        values = {"max": values.max, "mean": values.mean, "sum": values.sum}[reduction]()
    return values if weight == 1 else weight * values


def warn_if_constant(gradient: Sequence[Tensor]) -> None:
    """Warn when nothing that is trained can be reached from the gradient.

    `requires_grad` alone would not show it: leaves are the caller's, or those of a call, which an
    enclosing one differentiates by if it is open.
    """
    reached = [leaf for leaf in _nodes.survey(gradient).variables() if leaf.requires_grad]
    if gradient and not any(tag is None or tag[0].open for tag in map(_call.tag_of, reached)):
        warnings.warn(
            "no trainable tensor is reachable from the gradient, so this penalty is a constant for "
            "the optimizer. Usual causes: all parameters are frozen, f detaches or leaves PyTorch "
            "somewhere, or the gradient does not depend on them. If you only want the value, "
            "pass create_graph=False, or call it under torch.no_grad().",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )


_HAS_PROCESSES = torch.distributed.is_available()


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
