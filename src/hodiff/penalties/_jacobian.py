"""Penalties by products of a Jacobian or a Hessian with random vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _call, _locks, _nodes, _reverse, _settings
from hodiff._core._arguments import Allowed, Probes, check_option, is_set
from hodiff._core._graph import OutputGraph
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.penalties import _gradient
from hodiff.penalties._gradient import ExtremeReduction, Function, Reduction, SecondMethod, What


class JacobianPenaltyOptions(_gradient.VectorOptions, total=False):
    """The options of `jacobian_penalty`; for overloads alone."""

    weight: float
    samples: int | None
    probes: Probes
    reduction: Reduction


@overload
def jacobian_penalty(
    f: What,
    x: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[JacobianPenaltyOptions],
) -> Tensor: ...


@overload
def jacobian_penalty(
    f: What, x: Any, *, return_outputs: Literal[True], **options: Unpack[JacobianPenaltyOptions]
) -> tuple[Tensor, Tensor]: ...


def jacobian_penalty(
    f: What,
    x: Any,
    *,
    weight: float = 0.01,
    samples: int | None = 1,
    probes: Probes = "rademacher",
    vectors: Any = None,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The squared norm of each sample's Jacobian, λ/2 · meanᵢ ‖Jᵢ‖² (Frobenius norm).

    Note the factor one half. By default it is an unbiased estimate, \(\lVert v^\top J\rVert^2\)
    with a random v for each sample, \(E[v v^\top] = I\).

    Args:
        f: A function of samples with outputs of any shape, `(N, ...)`; or such a tensor, computed
            from *x*.
        x: Where: a tensor `(N, ...)` or a container of them; the norm is joint over its leaves.
        weight: \(\lambda\), 0.01 in Hoffman et al. For a contractive autoencoder: exact, of the
            encoder, with twice its λ (Rifai et al. have no half).
        samples: How many v to average over; None for the exact norm.
        probes: The distribution of v: `"rademacher"` (entries 1 and -1) or `"gaussian"`.
        vectors: Your own v, like `f(x)`, or K of them with one extra leading dimension; then none
            is drawn. Hoffman et al. draw from the sphere of radius √outputs.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        return_outputs: Whether to also return what `f` returned, from the same evaluation.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        generator: The source of v; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`; with *return_outputs* a pair.

    Raises:
        InputError: `f(x)` does not begin with the batch dimensions, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Cost:
        One evaluation of `f` and one reverse pass per vector, in batches; exact: one per output.

    Examples:
        A linear map has its matrix as Jacobian, here with the sum of squares 30:

        >>> import torch, hodiff
        >>> layer = torch.nn.Linear(2, 2)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> hodiff.jacobian_penalty(layer, torch.randn(8, 2), weight=1.0, samples=None).item()
        15.0

    Reference:
        Hoffman, J., Roberts, D. and Yaida, S. (2019). Robust learning with Jacobian regularization.
        arXiv:1908.02729. Rifai, S. et al. (2011). Contractive auto-encoders. ICML. Other code:
        JacobianReg is the same for outputs `(N, C)`, and takes no others.
    """
    _arguments.check_number(weight, "weight", least=0)
    check_option(reduction, Reduction, "reduction")
    check_option(probes, Probes, "probes")
    return_outputs = is_set(return_outputs, "return_outputs")
    if samples is not None:
        _arguments.check_integer(samples, "samples", least=1)
    record = _call.loss_recorded(create_graph)
    with _gradient.evaluation(
        f,
        x,
        passes=1,
        batch_ndim=batch_ndim,
        record=record,
        allow=allow,
        args=args,
        kwargs=kwargs,
        check_independence=check_independence,
    ) as graph:
        output = _arguments.check_output(graph.outputs)
        if output.shape[:batch_ndim] != graph.call.batch:
            raise InputError(
                f"f returned shape {tuple(output.shape)}, expected {tuple(graph.call.batch)} in "
                f"front, one row per sample (batch_ndim={batch_ndim})."
            )
        exact = samples is None and vectors is None
        if exact:
            [parts] = _reverse.blocks(graph, [output], chunk_size=None)
        else:
            drawn = _gradient.vectors_like(
                Where(output.detach(), "f(x)"), vectors, samples or 1, probes, generator
            )
            parts = _gradient.pulled(graph, [output], drawn)
    with _gradient.recording(record):
        values = _gradient.inner(parts, parts, batch_ndim if exact else batch_ndim + 1)
        values = values if exact else values.mean(0)
        loss = _gradient.reduce(values, reduction, weight / 2)
        loss = _gradient.finished(loss, f, output, parts, record)
    return (loss, graph.value()) if return_outputs else loss


# --- score matching: the trace of a Jacobian without the Jacobian ---------------------------------


class ScoreMatchingOptions(_gradient.VectorOptions, total=False):
    """The options of `sliced_score_matching_loss`; for overloads alone."""

    log_density: bool
    variance_reduced: bool
    samples: int
    probes: Probes
    reduction: Reduction


@overload
def sliced_score_matching_loss(
    f: What,
    x: Any,
    *,
    return_outputs: Literal[False] = False,
    **options: Unpack[ScoreMatchingOptions],
) -> Tensor: ...


@overload
def sliced_score_matching_loss(
    f: What, x: Any, *, return_outputs: Literal[True], **options: Unpack[ScoreMatchingOptions]
) -> tuple[Tensor, Tensor]: ...


def sliced_score_matching_loss(
    f: What,
    x: Any,
    *,
    log_density: bool = False,
    variance_reduced: bool = True,
    samples: int = 1,
    probes: Probes = "rademacher",
    vectors: Any = None,
    reduction: Reduction = "mean",
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    return_outputs: bool = False,
    check_independence: bool = False,
    allow: Allowed = (),
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""Sliced score matching, meanᵢ (vᵀ∇s v + ½‖s‖²) for the score s = ∇log p.

    v is random with \(E[v v^\top] = I\), one for each sample: the first term estimates the trace of
    \(\nabla s\). Without variance reduction the second is \(\frac12 (v^\top s)^2\). (v on the
    *unit* sphere would shrink the first term by 1/dimension, and the second only in the plain
    form.)

    Args:
        f: The score: a function of samples with outputs like *x*. With *log_density*, the
            unnormalized log-density (minus an energy), with one output per sample. Or such outputs,
            already computed.
        x: Data: a tensor `(N, ...)`, or a container of them, as one vector per sample.
        log_density: Whether `f` is the log-density, whose gradient is then the score.
        variance_reduced: Whether the second term is exact.
        samples: How many v to average over.
        probes: The distribution of v: `"rademacher"` (entries 1 and -1) or `"gaussian"`.
        vectors: Your own v, like *x*, or K of them with one extra leading dimension on every leaf;
            then none is drawn.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
        return_outputs: Whether to also return what `f` returned, from the same evaluation.
        check_independence: Whether to test that no sample's output depends on another sample.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        generator: The source of v; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`; with *return_outputs*
        `(loss, f(x))`.

    Raises:
        InputError: The outputs are not like *x*, or an option is not known.
        GraphError: An operation has no second derivative, or the output does not depend on the
            point.

    Cost:
        One evaluation of `f` and one reverse pass per vector, in batches; one more for a
        log-density, and norm layers are then computed from their definition (see `hvp`).

    Examples:
        The score \(-x\) of a standard normal: \(-d + \frac12 \lVert x\rVert^2\), at x = (3, 4).

        >>> import torch, hodiff
        >>> with torch.no_grad():
        ...     hodiff.sliced_score_matching_loss(lambda x: -x, torch.tensor([[3.0, 4.0]]))
        tensor(10.5000)

    Reference:
        Song, Y. et al. (2019). Sliced score matching. arXiv:1905.07088. Hyvärinen, A. (2005). JMLR
        6, 695-709. Other code: ermongroup/sliced_score_matching changes `requires_grad` of the
        samples, and takes `(N, D)` only.
    """
    check_option(reduction, Reduction, "reduction")
    check_option(probes, Probes, "probes")
    return_outputs = is_set(return_outputs, "return_outputs")
    log_density, variance_reduced = (
        is_set(log_density, "log_density"),
        is_set(variance_reduced, "variance_reduced"),
    )
    _arguments.check_integer(samples, "samples", least=1)
    where = Where(x)
    drawn = _gradient.vectors_like(where, vectors, samples, probes, generator)
    record = _call.loss_recorded(create_graph)
    with _gradient.evaluation(
        f,
        where,
        passes=1 + log_density,
        batch_ndim=batch_ndim,
        record=record,
        allow=allow,
        args=args,
        kwargs=kwargs,
        check_independence=check_independence,
    ) as graph:
        score = (
            _reverse.gradient(graph, differentiated=True) if log_density else _score(graph, where)
        )
        products = _gradient.pulled(graph, score, drawn)
        first = graph.tensors()[0]
    with _gradient.recording(record):
        score = score if record else [_call.cut(part) for part in score]
        trace = _gradient.inner(drawn, products, batch_ndim + 1).mean(0)
        if variance_reduced:
            size = _gradient.inner(score, score, batch_ndim)
        else:
            size = (
                _gradient.inner(drawn, [part.unsqueeze(0) for part in score], batch_ndim + 1)
                .square()
                .mean(0)
            )
        loss = _gradient.reduce(trace + size / 2, reduction, 1.0)
        loss = _gradient.finished(loss, f, first, score, record)
    _nodes.mark_results([loss])  # which stands on what f returned, not on passes alone
    return (loss, graph.value()) if return_outputs else loss


def _score(graph: OutputGraph, where: Where) -> list[Tensor]:
    """The outputs, checked to be like the point."""
    try:
        score, count = where.space().structured(graph.outputs, "f(x)", where.tree)
    except InputError as error:
        raise InputError(
            f"{error} A log-density, with one output per sample, needs log_density=True."
        ) from error
    if count is not None:
        raise InputError(f"f returned {count} vectors like x, expected one.")
    return score


# --- StyleGAN2's path length regularization: the one penalty with a state -------------------------


class PathLengthPenalty(nn.Module):
    r"""Path length regularization, w · meanᵢ (ℓᵢ - a)², with a running mean a of the lengths ℓᵢ.

    \(\ell_i = \lVert J_i^\top y_i\rVert\) with \(y \sim N(0, I) / \sqrt{HW}\): a step in latent
    space should change the image by the same amount everywhere. For latents `(N, L, D)` of L
    layers, the square is averaged over the layers.

    Each call in training mode updates the mean, \(a \leftarrow (1 - d)\,a + d\,\mathrm{mean}_i
    \ell_i\), which is saved in the state dict. As in StyleGAN2, the derivative includes the current
    call's contribution to the mean. A call whose lengths are not finite leaves the saved mean as it
    was.

    Args:
        weight: \(w\), 2 in StyleGAN2. For a lazy penalty every k steps, pass k times the value.
        decay: \(d\), 0.01 in StyleGAN2.

    Attributes:
        mean_length: The running mean, a buffer.
        lengths: The path lengths of the last call, `(N,)`, detached, as StyleGAN2 logs them; None
            before the first.

    Shapes:
        Called with a generator and latents `(N, D)` or `(N, L, D)`; images `(N, C, *size)`; the
        penalty is a scalar.

    Cost:
        One evaluation of the generator and one reverse pass, and a second in the loss's backward.

    Examples:
        Images that are three times the latents: all paths are 3 |y| long, and |y| is about the root
        of its dimension.

        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> penalty = hodiff.PathLengthPenalty(decay=1.0)
        >>> scale = torch.tensor(3.0, requires_grad=True)
        >>> latents = torch.randn(4, 10_000)
        >>> value = penalty(lambda w: scale * w[:, :, None, None], latents)
        >>> round(penalty.mean_length.item() / 100, 1)
        3.0

    Reference:
        Karras, T. et al. (2020). Analyzing and improving the image quality of StyleGAN.
        arXiv:1912.04958, appendix B. Other code: labml leaves out the factor of the lazy interval;
        NVIDIA's has NaN at a zero gradient.
    """

    mean_length: Tensor
    lengths: Tensor | None

    def __init__(self, weight: float = 2.0, decay: float = 0.01) -> None:
        super().__init__()
        _arguments.check_number(weight, "weight", least=0)
        _arguments.check_number(decay, "decay", least=0)
        if decay > 1:
            raise InputError(f"decay: got {decay!r}, expected a number between 0 and 1.")
        self.weight = weight
        self.decay = decay
        self.register_buffer("mean_length", torch.zeros(()))
        self.lengths = None

    def forward(
        self,
        f: Function,
        w: Tensor,
        *,
        vectors: Tensor | None = None,
        reduction: Reduction = "mean",
        create_graph: bool | None = None,
        return_outputs: bool = False,
        allow: Allowed = (),
        generator: torch.Generator | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        r"""The penalty at some latents, differentiable by the generator and, where they require
        grad, the latents.

        Args:
            f: The synthesis network, a function of *w* with images `(N, C, *size)`.
            w: Latents, `(N, D)` or `(N, L, D)`.
            vectors: The caller's own noise like the images, of which y is the \(1/\sqrt{HW}\)-th
                part; then nothing is drawn.
            reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
            create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
            return_outputs: Whether to return the images too, from the same evaluation.
            allow: `autograd.Function`s to accept in a second derivative, as they are.
            generator: What y is drawn from; None: the device's default generator.
            args: Further positional arguments for `f`.
            kwargs: Keyword arguments for `f`.

        Returns:
            A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs*
            `(penalty, images)`.
        """
        check_option(reduction, Reduction, "reduction")
        return_outputs = is_set(return_outputs, "return_outputs")
        _arguments.check_real_tensor(w, "w")
        if w.ndim not in (2, 3) or not w.shape[0]:
            raise InputError(f"w has shape {tuple(w.shape)}, expected latents (N, D) or (N, L, D).")
        _gradient.check_critic(f, computed=False)
        record = _call.loss_recorded(create_graph)
        with _gradient.evaluation(
            f, w, passes=1, batch_ndim=1, record=record, allow=allow, args=args, kwargs=kwargs
        ) as graph:
            images = _arguments.check_output(graph.outputs)
            if images.ndim < 2 or images.shape[0] != w.shape[0]:
                raise InputError(
                    f"f returned shape {tuple(images.shape)}, expected images ({w.shape[0]}, C, "
                    "...)."
                )
            with _settings.grad_mode(False):
                [noise] = _gradient.vectors_like(
                    Where(images.detach(), "f(w)"), vectors, 1, "gaussian", generator
                )
                if noise.shape[0] != 1:
                    raise InputError(
                        f"vectors: got {noise.shape[0]} vectors like the images, expected one."
                    )
                noise = noise[0] / images.shape[2:].numel() ** 0.5
            outputs = graph.value()
            gradient = _reverse.vjp(graph, [images], [noise])
        with _gradient.recording(record):
            layers = w.shape[1] if w.ndim == 3 else 1
            lengths = _gradient.norm(gradient, 1) / layers**0.5
            self.lengths = lengths.detach()
            with _locks.lock:  # of several threads each moves what another has left
                mean = self.mean_length.to(lengths)
                if self.training:
                    moved = mean.lerp(lengths.mean(), self.decay)
                    with _settings.grad_mode(False):
                        # or it would stay nan
                        self.mean_length.copy_(torch.where(moved.isfinite(), moved, mean))
                    mean = moved
            loss = _gradient.reduce((lengths - mean).square(), reduction, self.weight)
            loss = _gradient.finished(loss, f, images, gradient, record)
        return (loss, outputs) if return_outputs else loss

    def extra_repr(self) -> str:
        """The settings, for `repr`."""
        return f"weight={self.weight}, decay={self.decay}"


# --- of second derivatives: of a generator's outputs; of a loss along its steepest direction ------


class OfHessian(_gradient.VectorOptions, total=False):
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
    _arguments.check_number(epsilon, "epsilon", positive=True)
    check_option(method, SecondMethod, "method")
    _arguments.check_integer(samples, "samples", least=2)
    check_option(reduction, ExtremeReduction, "reduction")
    return_outputs = is_set(return_outputs, "return_outputs")
    _gradient.check_critic(f, computed=False)
    _arguments.check_arguments(args, kwargs)
    where = Where(x)
    _arguments.check_batch(where.tensors, where.names, batch_ndim)
    directions = _gradient.vectors_like(where, vectors, samples, "rademacher", generator)
    if directions[0].shape[0] < 2:
        raise InputError("vectors: got one vector, expected at least two, to take their variance.")
    record = _call.loss_recorded(create_graph)
    inside = _one_draw(f, where, args, kwargs or {})
    at = functools.partial(
        _gradient.evaluation,
        inside,
        batch_ndim=batch_ndim,
        record=record,
        allow=allow,
        args=(),
        kwargs=None,
    )
    with _gradient.recording(record):
        output = _value(at, where, where.tensors, check_independence=check_independence)
        if method == "exact":
            seconds = [_second(at, where, v) for v in zip(*directions, strict=True)]
        else:
            seconds = [
                _difference(at, where, v, output, epsilon) for v in zip(*directions, strict=True)
            ]
        stacked = _gradient.wide(torch.stack(seconds))
        # of an empty batch, which `reduce` refuses, PyTorch would warn
        variances = stacked.var(0) if stacked.numel() else stacked[0]
        loss = _gradient.reduce(variances, reduction, weight)
        loss = _gradient.finished(loss, f, output, seconds, record)
    return (loss, output) if return_outputs else loss


def _one_draw(
    f: Function, where: Where, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Function:
    """`f` with the same random numbers at each call: of different ones,
    differences would be those of the draws.
    """
    random = _settings.RandomState(where.tensors[0].device)
    inside = _arguments.as_called(f)

    def call(z: Any) -> Any:
        random.restore()
        return inside(z, *args, **kwargs)

    return _call.in_place_of(f, call)


Evaluation = Callable[..., OutputGraph]
"""Of a function at a point, for so many passes."""


def _value(at: Evaluation, where: Where, leaves: Sequence[Tensor], **options: Any) -> Tensor:
    with at(where.result(leaves), passes=0, **options) as graph:
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
        output = _arguments.check_output(graph.outputs)
        v = [vector.clone() if vector.is_inference() else vector for vector in v]
        first = _pushed(graph, output, v, differentiated=True)
        return _pushed(graph, first, v, differentiated=False)


def _pushed(
    graph: OutputGraph, output: Tensor, vectors: Sequence[Tensor], *, differentiated: bool
) -> Tensor:
    """J v by two passes, as in `_reverse.jvp`, of all outputs along one line."""
    cotangent = torch.ones_like(output, requires_grad=True)
    pulled = _reverse.transposed_product(graph, [output], [cotangent])
    return _reverse.vjp(graph, pulled, vectors, differentiated=differentiated, inputs=[cotangent])[
        0
    ]


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
    more = ", the step between two gradients"
    _arguments.check_number(h, "h", positive=True, more=more)
    check_option(reduction, Reduction, "reduction")
    return_outputs = is_set(return_outputs, "return_outputs")
    _gradient.check_critic(f, computed=False)
    critic = _gradient.Critic(_arguments.as_called(f), batch_ndim, "sum", 1.0, maps=False)
    record = _call.loss_recorded(create_graph)
    options = {
        "create_graph": record,
        "strict": None,
        "allow": allow,
        "args": args,
        "kwargs": kwargs,
    }
    where = Where(x)
    random = _settings.RandomState(where.tensors[0].device)
    outputs, here = _gradient.outputs_and_gradient(
        critic, where, check_independence=check_independence, **options
    )
    with _settings.grad_mode(False):
        signs = [part.sign() for part in here]
        # of no signs the norm is 0, of some at least 1
        scale = h / _gradient.norm(signs, batch_ndim).clamp(min=1)
        steps = [
            sign * scale.to(sign).reshape(*scale.shape, *[1] * (sign.ndim - batch_ndim))
            for sign in signs
        ]
    with _gradient.recording(record):
        there = where.result([leaf + step for leaf, step in zip(where.tensors, steps, strict=True)])
        random.restore()  # of two draws (dropout) the difference would be that of the draws
        _, moved = _gradient.outputs_and_gradient(
            critic, there, check_independence=False, **options
        )
        change = [_gradient.wide(b) - _gradient.wide(a) for a, b in zip(here, moved, strict=True)]
        loss = _gradient.reduce(_gradient.inner(change, change, batch_ndim), reduction, weight)
        loss = _gradient.finished(loss, f, outputs, change, record)
    return (loss, outputs) if return_outputs else loss
