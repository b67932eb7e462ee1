"""The Frobenius norm of a Jacobian as a penalty, estimated by random vectors or exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _reverse
from hodiff._core._arguments import Allowed, Probes, check_option, is_set
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.penalties import _critic
from hodiff.penalties._critic import Reduction
from hodiff.penalties._gradient import What


class JacobianPenaltyOptions(_critic.VectorOptions, total=False):
    """What `jacobian_penalty` takes; for overloads alone."""

    weight: float
    samples: int | None
    probes: Probes
    reduction: Reduction


@overload
def jacobian_penalty(
    f: What, x: Any, *, return_outputs: Literal[False] = False, **options: Unpack[JacobianPenaltyOptions]
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
    record = _critic.recorded(
        f, x, batch_ndim=batch_ndim, create_graph=create_graph,
        check_independence=check_independence, args=args, kwargs=kwargs,
    )  # fmt: skip
    with _critic.evaluation(
        f, x, passes=1, batch_ndim=batch_ndim, record=record, allow=allow, args=args, kwargs=kwargs
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
            drawn = _critic.vectors_like(Where(output.detach(), "f(x)"), vectors, samples or 1, probes, generator)
            parts = _critic.pulled(graph, [output], drawn)
    with _critic.recording(record):
        values = _critic.inner(parts, parts, batch_ndim if exact else batch_ndim + 1)
        values = values if exact else values.mean(0)
        loss = _critic.reduce(values, reduction, weight / 2)
        loss = _critic.finished(loss, f, output, parts, record)
    return (loss, graph.value()) if return_outputs else loss
