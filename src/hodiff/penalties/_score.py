"""Score matching by random vectors: the trace of a Jacobian without the Jacobian."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _nodes, _reverse
from hodiff._core._arguments import Allowed, Probes, check_option, is_set
from hodiff._core._call import cut
from hodiff._core._graph import OutputGraph
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.penalties import _critic
from hodiff.penalties._critic import Reduction
from hodiff.penalties._gradient import What


class ScoreMatchingOptions(_critic.VectorOptions, total=False):
    """What `sliced_score_matching_loss` takes; for overloads alone."""

    log_density: bool
    variance_reduced: bool
    samples: int
    probes: Probes
    reduction: Reduction


@overload
def sliced_score_matching_loss(
    f: What, x: Any, *, return_outputs: Literal[False] = False, **options: Unpack[ScoreMatchingOptions]
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
    log_density, variance_reduced = is_set(log_density, "log_density"), is_set(variance_reduced, "variance_reduced")
    _arguments.check_integer(samples, "samples", least=1)
    where = Where(x)
    drawn = _critic.vectors_like(where, vectors, samples, probes, generator)
    record = _critic.recorded(
        f, x, batch_ndim=batch_ndim, create_graph=create_graph,
        check_independence=check_independence, args=args, kwargs=kwargs,
    )  # fmt: skip
    with _critic.evaluation(
        f, where, passes=1 + log_density, batch_ndim=batch_ndim, record=record, allow=allow, args=args, kwargs=kwargs
    ) as graph:
        score = _reverse.gradient(graph, differentiated=True) if log_density else _score(graph, where)
        products = _critic.pulled(graph, score, drawn)
        first = graph.tensors()[0]
    with _critic.recording(record):
        score = score if record else [cut(part) for part in score]
        trace = _critic.inner(drawn, products, batch_ndim + 1).mean(0)
        if variance_reduced:
            size = _critic.inner(score, score, batch_ndim)
        else:
            size = _critic.inner(drawn, [part.unsqueeze(0) for part in score], batch_ndim + 1).square().mean(0)
        loss = _critic.reduce(trace + size / 2, reduction, 1.0)
        loss = _critic.finished(loss, f, first, score, record)
    _nodes.mark_results([loss])  # which stands on what f returned, not on passes alone
    return (loss, graph.value()) if return_outputs else loss


def _score(graph: OutputGraph, where: Where) -> list[Tensor]:
    """The outputs, checked to be like the point."""
    try:
        score, count = where.space().structured(graph.outputs, "f(x)", where.tree)
    except InputError as error:
        raise InputError(f"{error} A log-density, with one output per sample, needs log_density=True.") from error
    if count is not None:
        raise InputError(f"f returned {count} vectors like x, expected one.")
    return score
