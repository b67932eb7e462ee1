"""`gradient_penalty`, the one core, with the recipes that are a line or two of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _reverse, _settings, _tree
from hodiff._core._arguments import Allowed, check_option, is_set
from hodiff._core._graph import OutputGraph
from hodiff._core._vectors import check_generator
from hodiff._core._where import Where
from hodiff.calculus._first import CallOptions
from hodiff.errors import InputError
from hodiff.penalties import _critic
from hodiff.penalties._critic import PatchReduction, Reduction, between, detached_samples

Function = Callable[..., Any]
What = Function | Tensor


class Recipe(_critic.LossOptions, total=False):
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
    rule = PenaltyRule(target, one_sided, power, ord, weight, reduction)
    critic = _critic.Critic(_arguments.as_called(f), batch_ndim, patch_reduction, grad_scale)
    rule.check()
    critic.check()
    return_outputs = return_outputs is not False and is_set(return_outputs, "return_outputs")
    record = _call.loss_recorded(create_graph)
    outputs, gradient = outputs_and_gradient(
        critic, x, create_graph=record, strict=strict, allow=allow, args=args, kwargs=kwargs
    )
    if check_independence is not False:
        _call.call(
            critic.f, x, 1, False, args=args, kwargs=kwargs, batch_ndim=batch_ndim,
            check_independence=check_independence,
        )  # fmt: skip
    with _critic.recording(record):
        if grad_scale != 1:  # divided where it cannot underflow
            gradient = [_critic.wide(leaf) / grad_scale for leaf in gradient]
        penalty = rule.penalty(gradient, batch_ndim)
        penalty = _critic.finished(penalty, f, outputs, gradient, record)
    return (penalty, outputs) if return_outputs else penalty


class PenaltyRule(NamedTuple):
    """The rule from gradients to a penalty: target, power, norm, weight and reduction."""

    target: float | Tensor
    one_sided: bool
    power: float
    ord: float
    weight: float
    reduction: Reduction

    def check(self) -> None:
        """Raise for an option that is not known."""
        _critic.check_ord(self.ord)
        check_option(self.reduction, Reduction, "reduction")
        _arguments.check_number(self.weight, "weight")
        _arguments.check_number(self.power, "power", least=1)
        if self.one_sided is not False:
            is_set(self.one_sided, "one_sided")
        if not isinstance(self.target, Tensor):
            _arguments.check_number(self.target, "target", least=0)
        elif self.target.is_nested:
            raise InputError(
                "target: got a nested tensor, expected a number or one entry per sample."
            )

    def penalty(self, gradient: list[Tensor], batch_ndim: int) -> Tensor:
        """The penalty of each sample's gradient, reduced."""
        batch = gradient[0].shape[:batch_ndim]
        if isinstance(self.target, Tensor):
            if self.target.ndim and self.target.shape != batch:
                raise InputError(
                    f"target has shape {tuple(self.target.shape)}, expected a number or one entry "
                    f"per sample: {tuple(batch)}."
                )
        elif self.target == 0 and self.ord == 2 and self.power % 2 == 0:
            # No root to take, so smooth also at zero.
            squared = _critic.inner(gradient, gradient, batch_ndim)
            return _critic.reduce(
                squared if self.power == 2 else squared ** (self.power // 2),
                self.reduction,
                self.weight,
            )
        excess = _critic.norm(gradient, batch_ndim, self.ord) - self.target
        if self.one_sided or self.power != 2:  # the square needs no sign, nor the derivative of one
            excess = excess.clamp(min=0) if self.one_sided else excess.abs()
        return _critic.reduce(_to_the(excess, self.power), self.reduction, self.weight)


def outputs_and_gradient(
    critic: _critic.Critic,
    x: Any,
    *,
    create_graph: bool,
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
            allow=_critic.accepted(allow),
            args=args,
            kwargs=kwargs,
        )
    ) as graph:
        gradient = _reverse.gradient(graph)
    return critic.f if tensor else graph.extra(), gradient


def _to_the(excess: Tensor, power: float) -> Tensor:
    """`excess ** power` of what is not negative, with every derivative zero at zero that can be."""
    if power == 1:
        return excess
    if power == 2:
        return excess * excess
    if power == int(power):
        return excess ** int(power)
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
    leaves, names, tree = _tree.flatten(real, "real")
    for leaf, name in zip(leaves, names, strict=True):
        _arguments.check_real_tensor(leaf, name)
    check_generator(generator)
    draws = [
        torch.rand(leaf.shape, generator=generator, device=leaf.device, dtype=leaf.dtype)
        for leaf in leaves
    ]
    noise = [
        draw * (std * leaf.std(correction=0)) for draw, leaf in zip(draws, leaves, strict=True)
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
