"""Operators that compute each entry from the corresponding entries of their (broadcast) arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.sparse._sets import Sets
from hodiff.sparse._tracer import Found, Operation, Rule


def pointwise(op: Operation) -> Found:
    """The union over the arguments, entry by entry."""
    found: list[Sets | None] = []
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
        found.append(total)
    return found


def product(op: Operation) -> Found:
    """A product: nothing passes where a constant factor is zero."""
    found = pointwise(op)
    if found is None or len(op.outputs) != 1 or found[0] is None:
        return found
    (output,), sets = op.outputs, found[0]
    for factor in op.inputs:
        if factor is not output and factor.ndim and is_constant(op, factor) and not bool(factor.all()):
            passes = (factor != 0).reshape(-1).cpu()[broadcast(factor, output.shape)]
            sets = sets.take(torch.where(passes, torch.arange(output.numel(), device="cpu"), -1))
    return [sets]


def nothing(op: Operation) -> Found:
    """Outputs that take no more than a shape from their arguments."""
    return [None] * len(op.outputs)


def is_constant(op: Operation, tensor: Tensor) -> bool:
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
    """The same rule under several names."""
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
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
