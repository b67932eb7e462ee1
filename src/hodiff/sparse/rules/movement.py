"""Operators that move entries, or couple them along a dimension: views, indices, reductions,
transforms.

The operator itself says which entry goes where: it is run on the numbers of the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff._core import _tree
from hodiff.sparse._tracer import OperatorCall, OutputSets, Rule, Sets, tensors_in
from hodiff.sparse.rules.contraction import broadcast, broadcasts, listed

# --- operators that couple the entries along some dimensions --------------------------------------


def along(
    shape: Sequence[int], dims: Sequence[int], part: Sequence[int] | None = None
) -> tuple[int, Tensor]:
    """The lines (planes, ...) along some dimensions: how many there are, and for each entry the one
    it lies on.

    Args:
        shape: The shape of the tensor.
        dims: The dimensions.
        part: The shape of another tensor, whose entries lie on the first of those lines, any number
            on each; None: of the tensor itself.
    """
    ndim = len(shape)
    gone = {dim % ndim for dim in dims} if ndim else set()
    kept = [1 if dim in gone else length for dim, length in enumerate(shape)]
    count = torch.Size(kept).numel()
    first = torch.arange(count, device="cpu").reshape(kept)
    if part is None:
        return count, first.expand(tuple(shape)).reshape(-1)
    if ndim:
        first = first[
            tuple(slice(0, 1 if dim in gone else length) for dim, length in enumerate(part))
        ]
    return count, first.expand(tuple(part)).reshape(-1)


def reduction(op: OperatorCall) -> OutputSets:
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


def line(op: OperatorCall) -> OutputSets:
    """As many numbers as there were, each of which depends on all of its line."""
    of_outputs: list[Sets | None] = []
    for output in op.outputs:
        count, of_entry = along(output.shape, _dims(op, output))
        total = Sets.empty(count, op.tracer.width)
        for tensor in op.inputs:
            sets = op.sets(tensor)
            if sets is not None:
                if not broadcasts(tensor, output):
                    return None
                total = total | sets.take(broadcast(tensor, output.shape)).grouped(of_entry, count)
        of_outputs.append(total.take(of_entry))
    return of_outputs


def transform(op: OperatorCall) -> OutputSets:
    """A Fourier transform: all of a line, whatever its length afterwards."""
    tensor, output = op.inputs[0], op.outputs[0]
    sets, dims = op.sets(tensor), _dims(op, tensor)
    if sets is None or len(op.outputs) != 1 or tensor.ndim != output.ndim:
        return None
    count, of_entry = along(tensor.shape, dims)
    after, of_output = along(output.shape, dims)
    return [sets.grouped(of_entry, count).take(of_output)] if count == after else None


def matrices(op: OperatorCall) -> OutputSets:
    """Linear algebra on the last two dimensions: each matrix by itself."""
    batch = op.inputs[0].shape[:-2]
    # but pivots
    if any(t.ndim < 2 or t.shape[:-2] != batch for t in op.inputs if t.dtype != torch.int32):
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
        union.take(along(output.shape, range(len(batch), output.ndim))[1])
        if output.numel()
        else None
        for output in op.outputs
    ]


def _dims(op: OperatorCall, tensor: Tensor) -> list[int]:
    dim = op.argument("dim")
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(tensor.ndim))
    return [dim] if isinstance(dim, int) else list(dim)


LINE_RULES: dict[str, Rule] = {
    **listed(
        "sum nansum mean amax amin prod logsumexp linalg_vector_norm norm var std var_mean "
        "std_mean all any count_nonzero argmax argmin median nanmedian mode kthvalue max min "
        "aminmax",
        reduction,
    ),
    **listed(
        "_softmax _log_softmax softmax log_softmax _softmax_backward_data "
        "_log_softmax_backward_data cumsum cumprod logcumsumexp cummax cummin",
        line,
    ),
    **listed("_fft_c2c _fft_r2c _fft_c2r", transform),
    **listed(
        "linalg_solve_triangular triangular_solve _linalg_solve_ex linalg_inv_ex "
        "linalg_cholesky_ex cholesky_solve cholesky_inverse linalg_lu_solve linalg_matrix_exp "
        "_linalg_eigh _linalg_svd linalg_qr _linalg_det _linalg_slogdet linalg_lu_factor_ex "
        "linalg_ldl_solve",
        matrices,
    ),
}


# --- movement, and its adjoints, which add entries where they came from ---------------------------


def moved(op: OperatorCall) -> OutputSets:
    """Each entry of the output is one of some argument, or a constant."""
    if _has_variable_index(op):
        return None
    parts: list[Sets] = []
    first = 1

    def numbered(value: Any) -> Any:
        nonlocal first
        if not isinstance(value, Tensor):
            return value
        sets = op.sets(value)
        if sets is None:
            data = value.is_floating_point() or value.is_complex()
            return (
                torch.zeros(value.shape, dtype=torch.float64, device="cpu") if data else value.cpu()
            )
        numbers = torch.arange(first, first + value.numel(), dtype=torch.float64, device="cpu")
        parts.append(sets)
        first += value.numel()
        return numbers.reshape(value.shape)

    args, kwargs = (
        _tree.tree_map(numbered, list(op.args)),
        _tree.tree_map(numbered, dict(op.kwargs)),
    )
    for name in ("dtype", "layout", "device", "pin_memory", "memory_format"):
        kwargs.pop(name, None)
    if op.name == "constant_pad_nd":  # what it pads with is not a number of an entry
        args, kwargs = args[:2], {}
    function = op.function
    if function._schema.is_mutable:
        function = getattr(getattr(torch.ops.aten, op.name), function._overloadname)
    numbers = list(tensors_in(function(*args, **kwargs)))
    whole = Sets.joined(parts)
    return [whole.take(n.reshape(-1).long() - 1) for n in numbers]


def _has_variable_index(op: OperatorCall) -> bool:
    """Whether an index follows from the point: at another one it would lead elsewhere."""
    return any(
        not (t.is_floating_point() or t.is_complex()) and op.is_variable(t) for t in op.inputs
    )


def along_dim(op: OperatorCall) -> OutputSets:
    """A gather along one dimension: where its index follows from the point,
    whichever entry of the line.
    """
    if not _has_variable_index(op):
        return moved(op)
    source, dim = op.argument("self"), op.argument("dim")
    sets = op.sets(source)
    if sets is None:
        return None
    lines, of_source = along(source.shape, [dim])
    return [sets.grouped(of_source, lines).take(along(source.shape, [dim], op.outputs[0].shape)[1])]


# --- writes into places


def scattered(op: OperatorCall) -> OutputSets:
    """The sets of `self`, and where something is written or added, those as well."""
    base, source = (
        op.argument("self"),
        op.argument("src", op.argument("source", op.argument("values"))),
    )
    if not isinstance(base, Tensor):
        return None
    kept = op.sets(base) or Sets.empty(base.numel(), op.tracer.width)
    if not isinstance(source, Tensor) or op.sets(source) is None:
        return [kept]
    places = _targets(op, base, source)
    if places is None:
        return None
    written, targets, count, back = places
    union = written.grouped(targets, count)
    return [kept | (union if back is None else union.take(back))]


def _targets(
    op: OperatorCall, base: Tensor, source: Tensor
) -> tuple[Sets, Tensor, int, Tensor | None] | None:
    """The sets written, the group of each, how many groups,
    and for each entry of `self` its group (None: itself).
    """
    sets = op.sets(source)
    places = torch.arange(base.numel(), device="cpu").reshape(base.shape)
    dim, index = op.argument("dim"), op.argument("index")
    if sets is None:
        return None
    if op.name in ("index_put", "_index_put_impl", "_unsafe_index_put"):
        indices = op.argument("indices")
        if any(op.is_variable(i) for i in tensors_in(indices)):
            return None
        hit = places[tuple(slice(None) if i is None else i.cpu() for i in indices)]
        return sets.take(_numbers(source, hit.shape)), hit.reshape(-1), base.numel(), None
    if op.name in ("scatter", "scatter_add"):
        numbers = torch.arange(source.numel(), device="cpu").reshape(source.shape)
        part = (
            numbers[tuple(slice(0, n) for n in index.shape)]
            if source.ndim
            else numbers.expand(index.shape)
        )
        sets, part = sets.take(part.reshape(-1)), index.shape
        hit = None if op.is_variable(index) else places.gather(dim, index.cpu())
    else:  # index_add, index_copy
        part = source.shape
        hit = None
        if not op.is_variable(index):
            hit = places.index_select(dim, index.cpu()) if base.ndim else places
    if hit is not None:
        return sets, hit.expand(part).reshape(-1), base.numel(), None
    lines, of_base = along(base.shape, [dim])
    return sets, along(base.shape, [dim], part)[1], lines, of_base


def _numbers(tensor: Tensor, shape: Any) -> Tensor:
    return (
        torch.arange(tensor.numel(), device="cpu").reshape(tensor.shape).expand(shape).reshape(-1)
    )


# --- adjoints: run the movement itself on numbers, and send each entry back


def adjoint(
    shape: Callable[[OperatorCall], Any], movement: Callable[[OperatorCall, Tensor], Tensor]
) -> Rule:
    """The rule of the adjoint of a movement of a tensor of that shape."""

    def rule(op: OperatorCall) -> OutputSets:
        gradient = next(iter(op.inputs))
        sets, size = op.sets(gradient), shape(op)
        if sets is None or len(op.live) != 1 or _has_variable_index(op):
            return None
        count = torch.Size(size).numel()
        numbers = movement(
            op, torch.arange(1, count + 1, dtype=torch.float64, device="cpu").reshape(tuple(size))
        )
        targets = numbers.reshape(-1).long() - 1
        if len(targets) != gradient.numel():
            return None
        held = targets >= 0
        return [sets.spread(held.nonzero()[:, 0], targets[held], count)]

    return rule


RULES: dict[str, Rule] = {
    **listed(
        "cat stack index _unsafe_index take flip roll rot90 repeat constant_pad_nd "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d slice_backward select_backward diagonal_backward slice_scatter "
        "select_scatter diagonal_scatter as_strided_scatter tril triu masked_select unfold_copy "
        "permute_copy transpose_copy t_copy view_copy expand_copy squeeze_copy unsqueeze_copy "
        "slice_copy select_copy diagonal_copy as_strided_copy split_copy split_with_sizes_copy "
        "unbind_copy narrow_copy _reshape_copy _unsafe_view pixel_shuffle pixel_unshuffle "
        "channel_shuffle im2col diag_embed block_diag masked_scatter upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d",
        moved,
    ),
    **listed("gather index_select", along_dim),
    **listed(
        "scatter scatter_add index_put _index_put_impl _unsafe_index_put index_add index_copy",
        scattered,
    ),
    "masked_scatter_backward": adjoint(
        lambda op: op.outputs[0].shape,
        lambda op, numbers: numbers.new_zeros(op.inputs[0].shape).masked_scatter(
            op.argument("mask").cpu(), numbers
        ),
    ),
    "embedding_dense_backward": adjoint(
        lambda op: (op.argument("num_weights"), op.inputs[0].shape[-1]),
        lambda op, numbers: numbers[op.argument("indices").cpu()],
    ),
    "col2im": adjoint(
        lambda op: op.outputs[0].shape,
        lambda op, numbers: F.unfold(
            numbers, *map(op.argument, ("kernel_size", "dilation", "padding", "stride"))
        ),
    ),
    **listed(
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
        "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
        adjoint(
            lambda op: op.argument("self").shape,
            lambda op, numbers: getattr(torch.ops.aten, op.name.removesuffix("_backward"))(
                numbers, op.argument("padding")
            ),
        ),
    ),
    "unfold_backward": adjoint(
        lambda op: op.argument("input_sizes"),
        lambda op, numbers: numbers.unfold(
            op.argument("dim"), op.argument("size"), op.argument("step")
        ),
    ),
}
