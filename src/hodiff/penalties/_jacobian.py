"""The Frobenius norm of a Jacobian as a penalty, estimated by random projections or exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks, _dense, _nesting
from hodiff._core._call import Allowed
from hodiff.errors import InputError
from hodiff.penalties import _loss, _norm, _points
from hodiff.penalties._gradient import What


def jacobian_penalty(
    f: What,
    x: Any,
    *,
    weight: float = 0.01,
    num_projections: int | None = 1,
    distribution: str = "sphere",
    generator: torch.Generator | None = None,
    reduction: str = "mean",
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""The size of each sample's Jacobian, \(\frac{\lambda}{2}\,\mathrm{mean}_i \lVert J_i\rVert_F^2\): mind the half.

    By default an unbiased estimate, \(\lVert v^\top J\rVert^2\) with a random v for each sample, \(E[v v^\top] = I\).

    Args:
        f: A function of samples with outputs of any shape, `(N, ...)`; or such a tensor, computed from *x*.
        x: Where: a tensor `(N, ...)` or a container of them; the norm is joint over its leaves.
        weight: \(\lambda\), 0.01 in Hoffman et al. For a contractive autoencoder: exact, of the encoder, with
            twice its λ (Rifai et al. have no half).
        num_projections: How many v to average over; None for the exact norm.
        distribution: Of v: `"sphere"` (radius √outputs, as Hoffman et al.), `"rademacher"` or `"normal"`.
        generator: What v is drawn from; None: the device's default generator.
        reduction: As for `gradient_penalty`.
        batch_ndim: As for `gradient_penalty`.
        create_graph: As for `gradient_penalty`.
        allow: As for `gradient_penalty`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A scalar tensor, or shape `(*batch,)` with `reduction="none"`.

    Raises:
        InputError: `f(x)` does not begin with the batch; or as for `gradient_penalty`.
        GraphError: As for `gradient_penalty`.

    Cost:
        One evaluation of `f` and one reverse pass per projection, in batches; exact: one per output.

    Examples:
        A linear map has its matrix as Jacobian, here with the sum of squares 30:

        >>> import torch, hodiff
        >>> layer = torch.nn.Linear(2, 2)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> hodiff.jacobian_penalty(layer, torch.randn(8, 2), weight=1.0, num_projections=None).item()
        15.0

    Reference:
        Hoffman, J., Roberts, D. and Yaida, S. (2019). Robust learning with Jacobian regularization.
        arXiv:1908.02729. Rifai, S. et al. (2011). Contractive auto-encoders. ICML. Other code: JacobianReg is
        the same for outputs `(N, C)`, and takes no others.
    """
    _loss.check_number(weight, "weight", least=0)
    _loss.check_reduction(reduction)
    _points.check_distribution(distribution)
    if num_projections is not None:
        _checks.check_integer(num_projections, "num_projections", least=1)
    record = _nesting.loss_recorded(create_graph)
    with _loss.evaluation(
        f, x, passes=1, batch_ndim=batch_ndim, record=record, allow=allow, args=args, kwargs=kwargs
    ) as ev:
        output = _checks.check_output(ev.outputs)
        if output.shape[:batch_ndim] != ev.batch:
            raise InputError(
                f"f: returned shape {tuple(output.shape)}, expected {tuple(ev.batch)} in front, one row per sample "
                f"(batch_ndim={batch_ndim})."
            )
        if num_projections is None:
            [parts] = _dense.blocks(ev, [output], chunk_size=None)
        else:
            vectors = _points.directions(output, num_projections, batch_ndim, distribution, generator)
            parts = _loss.pulled(ev, [output], [vectors])
    with _loss.recording(record):
        if num_projections is None:
            values = _norm.squares(parts, batch_ndim)
        else:
            values = _norm.squares(parts, batch_ndim + 1).mean(0)
        loss = _loss.reduce(values, reduction, weight / 2)
        return _loss.finished(loss, f, output, parts, record)
