"""Penalties on second derivatives: of a generator's outputs,
and of a loss along its steepest direction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _settings
from hodiff._core._arguments import Allowed, check_option, is_set
from hodiff._core._graph import OutputGraph
from hodiff._core._where import Where
from hodiff.calculus._directional import by_lines
from hodiff.errors import InputError
from hodiff.penalties import _critic
from hodiff.penalties._critic import ExtremeReduction, Reduction, SecondMethod
from hodiff.penalties._gradient import Function, outputs_and_gradient


class OfHessian(_critic.VectorOptions, total=False):
    """The options of `hessian_penalty`; for overloads alone."""

    weight: float
    samples: int
    method: SecondMethod
    epsilon: float
    reduction: ExtremeReduction


@overload
def hessian_penalty(
    f: Function, x: Any, *, return_outputs: Literal[False] = False, **options: Unpack[OfHessian]
) -> Tensor: ...


@overload
def hessian_penalty(
    f: Function, x: Any, *, return_outputs: Literal[True], **options: Unpack[OfHessian]
) -> tuple[Tensor, Tensor]: ...


def hessian_penalty(
    f: Function,
    x: Any,
    *,
    weight: float = 1.0,
    samples: int = 2,
    vectors: Any = None,
    reduction: ExtremeReduction = "max",
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    return_outputs: bool = False,
    method: SecondMethod = "exact",
    epsilon: float = 0.1,
    check_independence: bool = False,
    allow: Allowed = (),
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The Hessian penalty, maxₐ Varᵥ(vᵀHₐv), on off-diagonal Hessian entries.

    v are random signs, several vectors per sample. The varying part is \(2 \sum_{i<j} H_{ij} v_i
    v_j\), with the variance \(2 \sum_{i \ne j} H_{ij}^2\). If it is zero, the inputs act
    independently on each output: a generator's latents are disentangled.

    Args:
        f: A function of samples with outputs of any shape, `(N, ...)`: a generator, or some layer
            of it.
        x: Where: a tensor `(N, ...)` or a container of them.
        weight: A factor.
        samples: The number of vectors v for the (unbiased) variance, at least 2.
        vectors: Your own v, at least two, like *x* with one extra leading dimension on every leaf;
            then none is drawn.
        reduction: Over samples and outputs: `"max"` (as published), `"mean"`, `"sum"` or `"none"`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        method: `"exact"`: second directional derivatives. `"differences"`: the published form,
            \((f(x + \epsilon v) - 2 f(x) + f(x - \epsilon v)) / \epsilon^2\).
        epsilon: The step of the differences. Do not reduce it in float32: at 1e-3, rounding makes
            the variance 46 % too large.
        return_outputs: Whether to also return what `f` returned, from the same evaluation.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        generator: The source of v; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or the variances, with the shape of `f(x)`, for `reduction="none"`; with
        *return_outputs* a pair.

    Raises:
        InputError: An option is not known, or the output lacks the batch dimensions.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Warns:
        HodiffWarning: The second derivative depends on nothing that is trained. For a ReLU network
            it is zero almost everywhere; differences across the kinks are not, which is why the
            published form "works" there.

    Cost:
        One evaluation of `f`, and for each vector, exact, one more and four reverse passes; by
        differences two more, and no pass. All have the same random numbers of PyTorch's default
        generators, not of a generator of `f`'s own.

    Examples:
        \(f = z_0 z_1\) has \(H_{01} = H_{10} = 1\), so a variance of 4, and of 0 if the two signs
        agree:

        >>> import torch, hodiff
        >>> z = torch.randn(1, 2)
        >>> with torch.no_grad():
        ...     many = hodiff.hessian_penalty(lambda z: z[:, 0] * z[:, 1], z, samples=500)
        >>> abs(many.item() - 4) < 0.5
        True

    Reference:
        Peebles, W. et al. (2020). The Hessian penalty. arXiv:2008.10599.
    """
    _arguments.check_number(weight, "weight", least=0)
    _arguments.check_number(epsilon, "epsilon", least=0)
    check_option(method, SecondMethod, "method")
    if method == "differences" and not epsilon:
        raise InputError("epsilon: got 0, expected a positive step for the differences.")
    _arguments.check_integer(samples, "samples", least=2)
    check_option(reduction, ExtremeReduction, "reduction")
    return_outputs = is_set(return_outputs, "return_outputs")
    _critic.check_function(f)
    _critic.check_critic(f)
    _arguments.check_arguments(args, kwargs)
    where = Where(x)
    _arguments.check_batch(where.tensors, where.names, batch_ndim)
    directions = _critic.vectors_like(where, vectors, samples, "rademacher", generator)
    if directions[0].shape[0] < 2:
        raise InputError("vectors: got one vector, expected at least two, to take their variance.")
    record = _critic.recorded(
        f, x, batch_ndim=batch_ndim, create_graph=create_graph,
        check_independence=check_independence, args=args, kwargs=kwargs,
    )  # fmt: skip
    inside = _one_draw(f, where, args, kwargs or {})
    at = functools.partial(
        _critic.evaluation,
        inside,
        batch_ndim=batch_ndim,
        record=record,
        allow=allow,
        args=(),
        kwargs=None,
    )
    with _critic.recording(record):
        output = _value(at, where, where.tensors)
        _critic.refuse_empty(output, reduction)
        if method == "exact":
            seconds = [_second(at, where, v) for v in zip(*directions, strict=True)]
        else:
            seconds = [
                _difference(at, where, v, output, epsilon) for v in zip(*directions, strict=True)
            ]
        loss = _critic.reduce(_critic.wide(torch.stack(seconds)).var(0), reduction, weight)
        loss = _critic.finished(loss, f, output, seconds, record)
    return (loss, output) if return_outputs else loss


def _one_draw(
    f: Function, where: Where, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Function:
    """`f` with the same random numbers at each call: of different ones,
    differences would be those of the draws.
    """
    random = _settings.RandomState(where.tensors[0].device)
    inside = _critic.uncompiled(f)

    def call(z: Any) -> Any:
        random.restore()
        return inside(z, *args, **kwargs)

    return _call.in_place_of(f, call)


Evaluation = Callable[..., OutputGraph]
"""Of a function at a point, for so many passes."""


def _value(at: Evaluation, where: Where, leaves: Sequence[Tensor]) -> Tensor:
    with at(where.result(leaves), passes=0) as graph:
        return _arguments.check_output(graph.value())


def _difference(
    at: Evaluation, where: Where, v: Sequence[Tensor], here: Tensor, step: float
) -> Tensor:
    """vᵀ H v of every output at once, by central differences."""
    ahead, behind = (
        _value(
            at,
            where,
            [leaf + sign * step * part for leaf, part in zip(where.tensors, v, strict=True)],
        )
        for sign in (1, -1)
    )
    return (ahead + behind - 2 * here) / step**2


def _second(at: Evaluation, where: Where, v: Sequence[Tensor]) -> Tensor:
    """vᵀ H v of every output at once: the directional derivative of the directional derivative."""
    with at(where.result(where.tensors), passes=4) as graph:
        return by_lines(graph, _arguments.check_output(graph.outputs), v)[1]


def curvature_penalty(
    f: Function,
    x: Any,
    *,
    weight: float = 4.0,
    h: float = 1.5,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""CURE, γ · meanᵢ ‖∇ℓ(xᵢ + h zᵢ) - ∇ℓ(xᵢ)‖²: the curvature of a loss.

    The direction is that of the sign attack,
    \(z = \mathrm{sign}\nabla\ell / \lVert\mathrm{sign}\nabla\ell\rVert\), a constant to the
    derivative. A small value means that the loss is nearly linear around the samples, which resists
    adversarial perturbations.

    Args:
        f: The loss of each sample, a function of samples with outputs `(N,)` or `(N, 1)`:
            `lambda x: F.cross_entropy(model(x), y, reduction="none")`.
        x: Where: a tensor `(N, ...)` or a container of them.
        weight: \(\gamma\), 4 in the paper.
        h: The step, 1.5 in the paper (3 in its code).
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        return_outputs: Whether to also return what `f` returned, from the same evaluation.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`; with *return_outputs* a pair,
        the outputs being those at the samples.

    Raises:
        InputError: The loss is averaged over the batch, which would shrink the penalty by 1/N², or
            is not one number per sample; or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Cost:
        Two evaluations of `f` and two reverse passes. Where `f` draws random numbers (dropout),
        both evaluations have the same.

    Examples:
        \(\ell = \tfrac12 \lVert x\rVert^2\) has the gradient x, so the difference is h z with
        \(\lVert z\rVert = 1\):

        >>> import torch, hodiff
        >>> with torch.no_grad():
        ...     hodiff.curvature_penalty(
        ...         lambda x: x.square().sum(1) / 2, torch.randn(4, 3), weight=1.0, h=2.0
        ...     )
        tensor(4.)

    Reference:
        Moosavi-Dezfooli, S.-M. et al. (2019). Robustness via curvature regularization, and vice
        versa. arXiv:1811.09716. Other code: the authors' takes the norm without its square.
    """
    _arguments.check_number(weight, "weight", least=0)
    _arguments.check_number(h, "h", least=0)
    check_option(reduction, Reduction, "reduction")
    return_outputs = is_set(return_outputs, "return_outputs")
    _critic.check_function(f)
    critic = _critic.Critic(_critic.uncompiled(f), batch_ndim, "sum", 1.0, maps=False)
    critic.check()
    record = _critic.recorded(
        f, x, batch_ndim=batch_ndim, create_graph=create_graph,
        check_independence=check_independence, args=args, kwargs=kwargs,
    )  # fmt: skip
    options = {
        "create_graph": record,
        "strict": None,
        "allow": allow,
        "args": args,
        "kwargs": kwargs,
    }
    where = Where(x)
    random = _settings.RandomState(where.tensors[0].device)
    outputs, here = outputs_and_gradient(critic, where, **options)
    with _settings.grad_mode(False):
        signs = [part.sign() for part in here]
        # of no signs the norm is 0, of some at least 1
        scale = h / _critic.norm(signs, batch_ndim).clamp(min=1)
        steps = [
            sign * scale.to(sign).reshape(*scale.shape, *[1] * (sign.ndim - batch_ndim))
            for sign in signs
        ]
    with _critic.recording(record):
        there = where.result([leaf + step for leaf, step in zip(where.tensors, steps, strict=True)])
        random.restore()  # of two draws (dropout) the difference would be that of the draws
        _, moved = outputs_and_gradient(critic, there, **options)
        change = [_critic.wide(b) - _critic.wide(a) for a, b in zip(here, moved, strict=True)]
        loss = _critic.reduce(_critic.inner(change, change, batch_ndim), reduction, weight)
        loss = _critic.finished(loss, f, outputs, change, record)
    return (loss, outputs) if return_outputs else loss
