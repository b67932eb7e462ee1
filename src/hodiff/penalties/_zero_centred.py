"""R1 and R2: the squared norm of a critic's gradient at the samples themselves, real or generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from hodiff._core import _nesting
from hodiff._core._options import Allowed, PatchReduction, Reduction
from hodiff.penalties._gradient import Function, Recipe, gradient_penalty
from hodiff.penalties._loss import check_number
from hodiff.penalties._points import apart


class Regularisation(Recipe, total=False):
    """What `r1_penalty` and `r2_penalty` take."""

    gamma: float
    detach: bool | None


@overload
def r1_penalty(
    critic: Function, real: Any, *, return_outputs: Literal[False] = False, **options: Unpack[Regularisation]
) -> Tensor: ...


@overload
def r1_penalty(
    critic: Function, real: Any, *, return_outputs: Literal[True], **options: Unpack[Regularisation]
) -> tuple[Tensor, Tensor]: ...


@overload
def r1_penalty(
    critic: Function, real: Any, *, return_outputs: bool, **options: Unpack[Regularisation]
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    r"""R1, \(\frac{\gamma}{2}\, \mathrm{mean}_i \lVert\nabla D(x_i)\rVert^2\), at real samples.

    Mind the half: it is part of \(\gamma\)'s definition in the paper, in StyleGAN2 and in R3GAN. The squared norm is
    over all entries of one sample.

    Args:
        critic: A function of samples, as for `wgan_gp_penalty`.
        real: Real samples, a tensor or a container.
        gamma: \(\gamma\), 10 in the paper. For a lazy penalty every k steps, pass k times the value.
        reduction: As for `gradient_penalty`.
        batch_ndim: As for `gradient_penalty`.
        patch_reduction: As for `gradient_penalty`. With `"mean"` R1 of P×P patches is P⁴ times smaller.
        detach: Whether the samples are cut from what made them. None: they are, with a warning where one requires
            grad; True: without it; False: the penalty is differentiable by the samples too, as a featurizer needs.
        create_graph: As for `gradient_penalty`.
        grad_scale: As for `gradient_penalty`.
        return_outputs: Whether to return the critic's outputs too: the loss then needs no other
            evaluation of the real samples.
        check_independence: As for `gradient_penalty`.
        allow: As for `gradient_penalty`.
        args: Further positional arguments for the critic, such as labels.
        kwargs: Keyword arguments for the critic.

    Returns:
        A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: As for `gradient_penalty`.
        GraphError: As for `gradient_penalty`.

    Warns:
        HodiffWarning: A sample requires grad, is detached, and *detach* does not say so; or as for `gradient_penalty`.

    Cost:
        That of `gradient_penalty`.

    Examples:
        A linear critic with |w| = 5, so 10/2 · 25:

        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> hodiff.r1_penalty(critic, torch.randn(8, 2)).item()
        125.0

    Reference:
        Mescheder, L. et al. (2018). Which training methods for GANs do actually converge? arXiv:1801.04406.
        Other code: GAN_stability, GigaGAN and lucidrains' StyleGAN2 leave out the half (their 10 is a gamma
        of 20); StyleGAN2-ADA uses gamma = 0.0002 · resolution² / batch, every 16 steps times 16.
    """
    return _zero_centred(
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
    critic: Function, fake: Any, *, return_outputs: Literal[False] = False, **options: Unpack[Regularisation]
) -> Tensor: ...


@overload
def r2_penalty(
    critic: Function, fake: Any, *, return_outputs: Literal[True], **options: Unpack[Regularisation]
) -> tuple[Tensor, Tensor]: ...


@overload
def r2_penalty(
    critic: Function, fake: Any, *, return_outputs: bool, **options: Unpack[Regularisation]
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    r"""R2, \(\frac{\gamma}{2}\, \mathrm{mean}_i \lVert\nabla D(x_i)\rVert^2\), at generated samples.

    The formula of `r1_penalty`, half included, elsewhere.

    Args:
        critic: A function of samples, as for `wgan_gp_penalty`.
        fake: Generated samples, a tensor or a container.
        gamma: \(\gamma\), 10 in the paper; R3GAN uses the same for R1 and R2.
        reduction: As for `gradient_penalty`.
        batch_ndim: As for `gradient_penalty`.
        patch_reduction: As for `gradient_penalty`.
        detach: As for `r1_penalty`.
        create_graph: As for `gradient_penalty`.
        grad_scale: As for `gradient_penalty`.
        return_outputs: Whether to return the critic's outputs too.
        check_independence: As for `gradient_penalty`.
        allow: As for `gradient_penalty`.
        args: Further positional arguments for the critic, such as labels.
        kwargs: Keyword arguments for the critic.

    Returns:
        A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: As for `gradient_penalty`.
        GraphError: As for `gradient_penalty`.

    Warns:
        HodiffWarning: As for `r1_penalty`.

    Cost:
        That of `gradient_penalty`.

    Examples:
        >>> import torch, hodiff
        >>> critic = torch.nn.Linear(2, 1)
        >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> hodiff.r2_penalty(critic, torch.randn(8, 2), gamma=1.0).item()
        12.5

    Reference:
        Mescheder, L. et al. (2018). arXiv:1801.04406; Huang, N. et al. (2024), R3GAN. arXiv:2501.05441.
        Other code: GAN_stability leaves out the half; WGAN-div (PyTorch-GAN) does not detach the samples.
    """
    return _zero_centred(
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


def _zero_centred(critic: Function, samples: Any, name: str, gamma: float, detach: bool | None, **options: Any) -> Any:
    """Half of `gamma` times the squared norm of the gradient at samples, which errors call `name`."""
    check_number(gamma, "gamma", least=0)
    recorded = _nesting.loss_recorded(options["create_graph"])
    return gradient_penalty(critic, apart(samples, detach, name, recorded), weight=gamma / 2, **options)
