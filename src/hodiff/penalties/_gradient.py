"""`gradient_penalty`, the one core, with the recipes that are a line of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _independence, _reverse, _settings
from hodiff._core._arguments import Allowed, check_option, is_set
from hodiff._core._graph import OutputGraph
from hodiff._core._where import Where
from hodiff.calculus._options import CallOptions
from hodiff.errors import InputError
from hodiff.penalties import _critic
from hodiff.penalties._critic import PatchReduction, Reduction

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
    critic = _critic.Critic(_critic.uncompiled(f), batch_ndim, patch_reduction, grad_scale)
    rule.check()
    critic.check()
    return_outputs = return_outputs is not False and is_set(return_outputs, "return_outputs")
    record = _call.loss_recorded(create_graph)
    outputs, gradient = outputs_and_gradient(
        critic, x, create_graph=record, strict=strict, allow=allow, args=args, kwargs=kwargs
    )
    if check_independence is not False and is_set(check_independence, "check_independence"):
        _independence.check(critic.f, x, batch_ndim=batch_ndim, args=args, kwargs=kwargs)
    with _critic.recording(record):
        penalty = rule.penalty(critic.unscaled(gradient), batch_ndim)
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
