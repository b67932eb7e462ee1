"""Penalties on gradients outside of adversarial training: the eikonal equation, the gradient of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor

from hodiff._core import _checks
from hodiff._core._options import Allowed, Reduction
from hodiff.errors import InputError
from hodiff.penalties._gradient import What, gradient_penalty


class Common(TypedDict, total=False):
    """What the penalties below share.

    For overloads alone: at run time signatures are spelled out.
    """

    weight: float
    target: float
    power: float
    create_graph: bool | None
    allow: Allowed
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


class OfPoints(Common, total=False):
    """What `eikonal_penalty` takes beside."""

    reduction: Reduction
    check_independence: bool


class OfParameters(Common, total=False):
    """What `gradient_norm_penalty` takes beside."""

    strict: bool | None


@overload
def eikonal_penalty(
    f: What, points: Tensor, *, return_outputs: Literal[False] = False, **options: Unpack[OfPoints]
) -> Tensor: ...


@overload
def eikonal_penalty(
    f: What, points: Tensor, *, return_outputs: Literal[True], **options: Unpack[OfPoints]
) -> tuple[Tensor, Tensor]: ...


@overload
def eikonal_penalty(
    f: What, points: Tensor, *, return_outputs: bool, **options: Unpack[OfPoints]
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    r"""The eikonal equation, that of distances, as a loss: \(\lambda\,\mathrm{mean}\,|\lVert\nabla f(x)\rVert - 1|^p\).

    A point is one row: the norm is over the last dimension, whatever comes before, `(P, 3)` or `(B, P, 3)`.

    Args:
        f: A function of points that gives one value each, `(*batch,)` or `(*batch, 1)`; or such a tensor, computed
            from *points*.
        points: Shape `(*batch, d)`. For a latent code beside the coordinates, pass it in *args*: it must not count.
        weight: \(\lambda\), 0.1 in IGR; SIREN uses 50 with `power=1`.
        target: The wanted norm.
        power: The exponent, 2 in IGR, 1 in SIREN.
        reduction: As for `gradient_penalty`.
        create_graph: As for `gradient_penalty`.
        return_outputs: Whether to return `f(points)` too.
        check_independence: As for `gradient_penalty`.
        allow: As for `gradient_penalty`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: *points* is not one tensor with coordinates in its last dimension; or as for `gradient_penalty`.
        GraphError: As for `gradient_penalty`.

    Cost:
        That of `gradient_penalty`.

    Examples:
        The distance to the origin solves the equation, and three times it is off by (3 - 1)²:

        >>> import torch, hodiff
        >>> points = torch.randn(5, 7, 3, dtype=torch.float64)
        >>> with torch.no_grad():
        ...     once, thrice = (hodiff.eikonal_penalty(lambda x: c * x.norm(dim=-1), points) for c in (1, 3))
        >>> round(once.item(), 9), round(thrice.item(), 9)
        (0.0, 0.4)

    Reference:
        Gropp, A. et al. (2020), IGR. arXiv:2002.10099; Sitzmann, V. et al. (2020), SIREN. arXiv:2006.09661.
    """
    _checks.check_real_tensor(points, "points")
    if points.ndim < 2:
        raise InputError(
            f"points: has shape {tuple(points.shape)}, expected (*batch, d) with the coordinates last; "
            f"a single point is points[None]."
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
    f: What, where: Any, *, return_outputs: Literal[False] = False, **options: Unpack[OfParameters]
) -> Tensor: ...


@overload
def gradient_norm_penalty(
    f: What, where: Any, *, return_outputs: Literal[True], **options: Unpack[OfParameters]
) -> tuple[Tensor, Tensor]: ...


@overload
def gradient_norm_penalty(
    f: What, where: Any, *, return_outputs: bool, **options: Unpack[OfParameters]
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    r"""The size of a loss's gradient by the parameters, \(\mu\lVert\nabla_\theta L\rVert^2\): one norm over all.

    Args:
        f: A function of *where* that gives the loss, one element: `lambda model: loss(model(x), y)`; or the loss
            itself, already computed.
        where: Usually a module (its trainable parameters; `f` receives it) or `hodiff.select(module, ...)`; any point.
        weight: \(\mu\). The implicit regularisation of gradient descent with step h is that of \(\mu = h/4\).
        target: The wanted norm.
        power: The exponent; 1 penalises the norm itself (Zhao et al.).
        create_graph: As for `gradient_penalty`.
        return_outputs: Whether to return the loss too, of the same evaluation.
        strict: What a part of *where* gives that the loss does not depend on. None: zeros, and an error where that is
            all of it. True: an error. False: zeros, all of it too (isolated atoms).
        allow: As for `gradient_penalty`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor of shape `()`; with *return_outputs* `(penalty, loss)`, both differentiable by the parameters.

    Raises:
        InputError: `f` gives more than one element; or as for `gradient_penalty`.
        GraphError: As for `gradient_penalty`.

    Cost:
        One evaluation of `f` and one reverse pass; the backward of the penalty is a Hessian-vector product.

    Examples:
        \(L = \tfrac12 \lVert\theta\rVert^2\) has the gradient \(\theta\):

        >>> import torch, hodiff
        >>> theta = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> penalty = hodiff.gradient_norm_penalty(lambda t: t @ t / 2, theta)
        >>> penalty.backward()
        >>> penalty.item(), theta.grad
        (25.0, tensor([6., 8.]))

    Reference:
        Barrett, D. and Dherin, B. (2021). Implicit gradient regularization. arXiv:2009.11162. Zhao, Y. et al. (2022).
        Penalizing gradient norm for efficiently improving generalization. arXiv:2202.03599.
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
