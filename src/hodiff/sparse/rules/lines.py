"""Operators that couple the entries along some dimensions: reductions, softmax, cumulative sums, transforms, solves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.sparse._sets import Sets
from hodiff.sparse._tracer import Found, Operation, Rule
from hodiff.sparse.rules.pointwise import broadcast, broadcasts, listed


def along(shape: Sequence[int], dims: Sequence[int], part: Sequence[int] | None = None) -> tuple[int, Tensor]:
    """The lines (planes, ...) along some dimensions: how many there are, and for each entry the one it lies on.

    Args:
        shape: The shape of the tensor.
        dims: The dimensions.
        part: The shape of another tensor, whose entries lie on the first of those lines, any number on each; None:
            of the tensor itself.
    """
    ndim = len(shape)
    gone = {dim % ndim for dim in dims} if ndim else set()
    kept = [1 if dim in gone else length for dim, length in enumerate(shape)]
    count = torch.Size(kept).numel()
    first = torch.arange(count, device="cpu").reshape(kept)
    if part is None:
        return count, first.expand(tuple(shape)).reshape(-1)
    if ndim:
        first = first[tuple(slice(0, 1 if dim in gone else length) for dim, length in enumerate(part))]
    return count, first.expand(tuple(part)).reshape(-1)


def reduction(op: Operation) -> Found:
    """One number from each line."""
    tensor = op.inputs[0]
    sets = op.sets(tensor)
    if sets is None or len(op.live) != 1:
        return None
    count, of_entry = along(tensor.shape, _dims(op, tensor))
    union = sets.grouped(of_entry, count)
    if any(output.numel() != count for output in op.outputs):
        return None
    return [union] * len(op.outputs)


def line(op: Operation) -> Found:
    """As many numbers as there were, each from all of its line."""
    found: list[Sets | None] = []
    for output in op.outputs:
        count, of_entry = along(output.shape, _dims(op, output))
        total = Sets.empty(count, op.tracer.width)
        for tensor in op.inputs:
            sets = op.sets(tensor)
            if sets is not None:
                if not broadcasts(tensor, output):
                    return None
                total = total | sets.take(broadcast(tensor, output.shape)).grouped(of_entry, count)
        found.append(total.take(of_entry))
    return found


def transform(op: Operation) -> Found:
    """A Fourier transform: all of a line, whatever its length afterwards."""
    tensor, output = op.inputs[0], op.outputs[0]
    sets, dims = op.sets(tensor), _dims(op, tensor)
    if sets is None or len(op.outputs) != 1 or tensor.ndim != output.ndim:
        return None
    count, of_entry = along(tensor.shape, dims)
    after, of_output = along(output.shape, dims)
    return [sets.grouped(of_entry, count).take(of_output)] if count == after else None


def matrices(op: Operation) -> Found:
    """Linear algebra on the last two dimensions: each matrix by itself."""
    batch = op.inputs[0].shape[:-2]
    if any(t.ndim < 2 or t.shape[:-2] != batch for t in op.inputs):
        return None
    if any(t.shape[: len(batch)] != batch for t in op.outputs):
        return None
    count = batch.numel()
    union = Sets.empty(count, op.tracer.width)
    for tensor in op.inputs:
        sets = op.sets(tensor)
        if sets is not None:
            union = union | sets.grouped(along(tensor.shape, (-2, -1))[1], count)
    return [
        union.take(along(output.shape, range(len(batch), output.ndim))[1]) if output.numel() else None
        for output in op.outputs
    ]


def _dims(op: Operation, tensor: Tensor) -> list[int]:
    dim = op.argument("dim")
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(tensor.ndim))
    return [dim] if isinstance(dim, int) else list(dim)


RULES: dict[str, Rule] = {
    **listed(
        "sum nansum mean amax amin prod logsumexp linalg_vector_norm norm var std var_mean std_mean all any "
        "count_nonzero argmax argmin median nanmedian mode kthvalue max min aminmax",
        reduction,
    ),
    **listed(
        "_softmax _log_softmax softmax log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
        "logcumsumexp cummax cummin",
        line,
    ),
    **listed("_fft_c2c _fft_r2c _fft_c2r", transform),
    **listed(
        "linalg_solve_triangular triangular_solve _linalg_solve_ex linalg_inv_ex linalg_cholesky_ex cholesky_solve "
        "cholesky_inverse linalg_lu_solve linalg_matrix_exp _linalg_eigh _linalg_svd linalg_qr _linalg_det "
        "_linalg_slogdet linalg_lu_factor_ex linalg_ldl_solve",
        matrices,
    ),
}
