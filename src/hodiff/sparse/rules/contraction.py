"""Operators that compute each entry from corresponding entries, or from rows times columns."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.sparse._tracer import OperatorCall, OutputSets, Rule, Sets

# --- operators that compute each entry from the corresponding entries of their (broadcast) arguments ------------------


def pointwise(op: OperatorCall) -> OutputSets:
    """The union over the arguments, entry by entry."""
    of_outputs: list[Sets | None] = []
    for output in op.outputs:
        total: Sets | None = None
        for tensor in op.inputs:
            sets = op.sets(tensor)
            if sets is None:
                continue
            if not broadcasts(tensor, output):
                return None
            sets = sets.take(broadcast(tensor, output.shape))
            total = sets if total is None else total | sets
        of_outputs.append(total)
    return of_outputs


def product(op: OperatorCall) -> OutputSets:
    """A product: nothing passes where a constant factor is zero."""
    of_outputs = pointwise(op)
    if of_outputs is None or len(op.outputs) != 1 or of_outputs[0] is None:
        return of_outputs
    (output,), sets = op.outputs, of_outputs[0]
    for factor in op.inputs:
        if factor is not output and factor.ndim and is_constant(op, factor) and not bool(factor.all()):
            passes = (factor != 0).reshape(-1).cpu()[broadcast(factor, output.shape)]
            sets = sets.take(torch.where(passes, torch.arange(output.numel(), device="cpu"), -1))
    return [sets]


def nothing(op: OperatorCall) -> OutputSets:
    """Outputs that take no more than a shape from their arguments."""
    return [None] * len(op.outputs)


def is_constant(op: OperatorCall, tensor: Tensor) -> bool:
    """Whether a tensor is one of the user's, and the same at each evaluation."""
    return op.sets(tensor) is None and not op.is_variable(tensor)


def broadcasts(tensor: Tensor, output: Tensor) -> bool:
    """Whether a tensor has the shape of an output, or one that is broadcast to it."""
    shape, wanted = tensor.shape, output.shape
    return len(shape) <= len(wanted) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(wanted), strict=False)
    )


def broadcast(tensor: Tensor, shape: torch.Size) -> Tensor:
    """For each entry of a broadcast tensor, which entry of the tensor it is."""
    places = torch.arange(tensor.numel(), device="cpu")
    return places if tensor.shape == shape else places.reshape(tensor.shape).expand(shape).reshape(-1)


def listed(names: str, rule: Rule) -> dict[str, Rule]:
    """Register one rule under several names."""
    return dict.fromkeys(names.split(), rule)


POINTWISE_RULES: dict[str, Rule] = {
    **listed("mul multiply", product),
    **listed(
        "_to_copy clone contiguous lift_fresh lift_fresh_copy lift detach_copy alias_copy copy "
        "zero_point view_as_real_copy _conj_physical conj_physical resolve_conj resolve_neg _neg_view_copy "
        "dropout native_dropout_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
        "binary_cross_entropy_backward binary_cross_entropy_with_logits softplus_backward elu_backward "
        "hardtanh_backward hardswish_backward hardswish hardsigmoid_backward leaky_relu_backward log_sigmoid_backward "
        "mish_backward silu_backward gelu_backward sigmoid_backward tanh_backward threshold_backward logit_backward "
        "softshrink_backward hardshrink_backward rrelu_with_noise_backward fill_diagonal "
        "masked_fill where addcmul addcdiv lerp _fused_dropout masked_scale",
        pointwise,
    ),
    **listed(
        "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty "
        "new_full new_empty_strided empty_strided is_same_size _local_scalar_dense equal is_nonzero zero fill "
        "bernoulli _has_compatible_shallow_copy_type sym_size sym_numel sym_stride is_pinned",
        nothing,
    ),
}


# --- matrix products: a linear operator whose matrix is known to the entry where it is a constant of the user's -------


def matrix_product(op: OperatorCall) -> OutputSets:
    """`a @ b` of vectors, matrices, or stacks of matrices of the same length."""
    a, b = op.inputs[0], op.inputs[1]
    return [_matmul(op, a, b)] if len(op.outputs) == 1 and len(op.inputs) == 2 else None


def product_added_to(op: OperatorCall) -> OutputSets:
    """`c + a @ b`."""
    if len(op.inputs) != 3 or len(op.outputs) != 1:
        return None
    c, a, b = op.inputs
    (output,) = op.outputs
    total = _matmul(op, a, b)
    sets = op.sets(c)
    if total is None or not broadcasts(c, output):
        return None
    return [total if sets is None else total | sets.take(broadcast(c, output.shape))]


def _matmul(op: OperatorCall, a: Tensor, b: Tensor) -> Sets | None:
    if a.ndim > 3 or b.ndim > 3 or (a.ndim == 3) != (b.ndim == 3):
        return None
    rows = a.shape[-2] if a.ndim > 1 else 1
    inner = a.shape[-1]
    columns = b.shape[-1] if b.ndim > 1 else 1
    stack = a.shape[0] if a.ndim == 3 else 1
    if (b.shape[-2] if b.ndim > 1 else b.shape[0]) != inner:
        return None
    total = Sets.empty(stack * rows * columns, op.tracer.width)
    left, right = op.sets(a), op.sets(b)
    if left is not None:
        total = total | _times(op, left, (stack, rows, inner, columns), b)
    if right is not None:  # b' @ a', with the last two dimensions of everything exchanged
        swapped = right.take(_transposed(stack, inner, columns))
        sets = _times(op, swapped, (stack, columns, inner, rows), a, turned=True)
        total = total | sets.take(_transposed(stack, columns, rows))
    return total


def _transposed(stack: int, rows: int, columns: int) -> Tensor:
    """The places of the entries of transposed matrices."""
    return torch.arange(stack * rows * columns, device="cpu").reshape(stack, rows, columns).mT.reshape(-1)


def _times(
    op: OperatorCall, left: Sets, sizes: tuple[int, int, int, int], matrix: Tensor, *, turned: bool = False
) -> Sets:
    """Live matrices times others: along their rows, to the columns that a constant does not hold a zero for."""
    stack, rows, inner, columns = sizes
    entries = _entries(op, matrix, sizes, turned=turned)
    if entries is None:
        lines = torch.arange(stack * rows, device="cpu")
        whole = left.grouped(lines.repeat_interleave(inner), stack * rows)
        return whole.take(lines.repeat_interleave(columns))
    k, i, j = entries
    row = torch.arange(rows, device="cpu").reshape(-1, 1)
    source = (k * rows + row) * inner + i
    target = (k * rows + row) * columns + j
    return left.spread(source.reshape(-1), target.reshape(-1), stack * rows * columns)


def _entries(
    op: OperatorCall, matrix: Tensor, sizes: tuple[int, int, int, int], *, turned: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Stack, row and column of the entries of a matrix that are not zero; None where all may be."""
    stack, _, inner, columns = sizes
    if matrix.layout is not torch.strided:
        if matrix.ndim != 2 or matrix.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
            return None
        i, j = matrix.detach().to_sparse_coo().coalesce().indices().cpu()
        return (torch.zeros_like(i), *((j, i) if turned else (i, j)))
    if not is_constant(op, matrix):
        return None
    shape = (stack, columns, inner) if turned else (stack, inner, columns)
    whole = matrix.detach().reshape(shape)
    entries = (whole.mT if turned else whole).nonzero().cpu()
    if 2 * len(entries) > stack * inner * columns:
        return None
    return entries[:, 0], entries[:, 1], entries[:, 2]


RULES: dict[str, Rule] = {
    **listed("mm bmm mv dot vdot _sparse_mm", matrix_product),
    **listed("addmm addmv baddbmm _sparse_addmm", product_added_to),
}
