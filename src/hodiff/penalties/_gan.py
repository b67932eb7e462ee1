"""The gradient penalties of adversarial training: WGAN-GP, WGAN-LP, DRAGAN, R1, R2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _tree
from hodiff._core._arguments import Allowed
from hodiff._core._vectors import check_generator
from hodiff.penalties._critic import PatchReduction, Reduction, between, detached_samples
from hodiff.penalties._gradient import Function, Recipe, gradient_penalty


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
