"""Operators that compute each entry from others: corresponding ones, rows times columns,
windows of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.sparse._tracer import OperatorCall, OutputSets, Rule, Sets

# --- operators that compute each entry from the corresponding entries of their (broadcast)
# arguments


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
        if (
            factor is not output
            and factor.ndim
            and is_constant(op, factor)
            and not bool(factor.all())
        ):
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
    """The entry of the tensor that each entry of its broadcast form is."""
    places = torch.arange(tensor.numel(), device="cpu")
    return (
        places if tensor.shape == shape else places.reshape(tensor.shape).expand(shape).reshape(-1)
    )


def listed(names: str, rule: Rule) -> dict[str, Rule]:
    """Register one rule under several names."""
    return dict.fromkeys(names.split(), rule)


POINTWISE_RULES: dict[str, Rule] = {
    **listed("mul multiply", product),
    **listed(
        "_to_copy clone contiguous lift_fresh lift_fresh_copy lift detach_copy alias_copy copy "
        "zero_point view_as_real_copy _conj_physical conj_physical resolve_conj resolve_neg "
        "_neg_view_copy dropout native_dropout_backward mse_loss_backward smooth_l1_loss_backward "
        "huber_loss_backward binary_cross_entropy_backward binary_cross_entropy_with_logits "
        "softplus_backward elu_backward hardtanh_backward hardswish_backward hardswish "
        "hardsigmoid_backward leaky_relu_backward log_sigmoid_backward mish_backward silu_backward "
        "gelu_backward sigmoid_backward tanh_backward threshold_backward logit_backward "
        "softshrink_backward hardshrink_backward rrelu_with_noise_backward fill_diagonal "
        "masked_fill where addcmul addcdiv lerp _fused_dropout masked_scale",
        pointwise,
    ),
    **listed(
        "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
        "new_ones new_empty new_full new_empty_strided empty_strided is_same_size "
        "_local_scalar_dense equal is_nonzero zero fill bernoulli "
        "_has_compatible_shallow_copy_type sym_size sym_numel sym_stride is_pinned",
        nothing,
    ),
}


# --- matrix products: a linear operator whose matrix is known to the entry where it is a constant
# of the user's


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
    return (
        torch.arange(stack * rows * columns, device="cpu")
        .reshape(stack, rows, columns)
        .mT.reshape(-1)
    )


def _times(
    op: OperatorCall,
    left: Sets,
    sizes: tuple[int, int, int, int],
    matrix: Tensor,
    *,
    turned: bool = False,
) -> Sets:
    """Live matrices times others: along their rows,
    to the columns that a constant does not hold a zero for.
    """
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
        if matrix.ndim != 2 or matrix.layout not in (
            torch.sparse_coo,
            torch.sparse_csr,
            torch.sparse_csc,
        ):
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


# --- convolutions: each output sees a window of the input -----------------------------------------


class Windows(NamedTuple):
    """The places of the larger grid that each place of the smaller one sees: pairs.

    Attributes:
        sizes: How many places the grids have, the smaller and the larger.
        small: A place of the smaller grid.
        large: A place of the larger one that it sees.
        offset: Where in the window that lies.
    """

    sizes: tuple[int, int]
    small: Tensor
    large: Tensor
    offset: Tensor

    @classmethod
    def of(
        cls,
        small: Sequence[int],
        large: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> Windows:
        """The windows of a convolution from the large grid to the small one."""
        pairs = [torch.zeros(1, dtype=torch.int64, device="cpu")] * 3
        for a, b, k, step, pad, spread in zip(
            small, large, kernel, stride, padding, dilation, strict=True
        ):
            at = torch.arange(a, device="cpu").reshape(-1, 1).expand(a, k)
            within = torch.arange(k, device="cpu").expand(a, k)
            seen = at * step - pad + within * spread
            inside = (seen >= 0) & (seen < b)
            parts = zip(pairs, (at, seen, within), (a, b, k), strict=True)
            pairs = [
                (whole.reshape(-1, 1) * size + part[inside]).reshape(-1)
                for whole, part, size in parts
            ]
        return cls((torch.Size(small).numel(), torch.Size(large).numel()), *pairs)

    def spread(self, sets: Sets, images: int, *, down: bool) -> Sets:
        """A union along the pairs, from the large grid to the small one or back,
        in each of the images.
        """
        sources, targets = self.sizes[::-1] if down else self.sizes
        source, target = (self.large, self.small) if down else (self.small, self.large)
        image = torch.arange(images, device="cpu").reshape(-1, 1)
        elements = (image * sources + source).reshape(-1)
        return sets.spread(elements, (image * targets + target).reshape(-1), images * targets)


def _convolved(
    op: OperatorCall, sets: Sets, input: Sequence[int], output: Sequence[int], *, forth: bool
) -> Sets:
    """Sets passed on between a convolution's input and output, of these shapes: forth, or back.

    They go from all channels of a group to all channels of that group, along the windows.
    """
    weight = op.argument("weight")
    transposed, groups = bool(op.argument("transposed")), int(op.argument("groups"))
    small, large = (input[2:], output[2:]) if transposed else (output[2:], input[2:])
    kernel = weight.shape[2:]
    options = (_each(op.argument(name), len(kernel)) for name in ("stride", "padding", "dilation"))
    windows = Windows.of(small, large, kernel, *options)
    # an offset at which a constant kernel has nothing but zeros sees nothing
    if is_constant(op, weight):
        used = (weight.detach() != 0).reshape(*weight.shape[:2], -1).any(0).any(0).cpu()
        windows = Windows(windows.sizes, *(part[used[windows.offset]] for part in windows[1:]))
    images, down = input[0] * groups, forth != transposed
    before, after = windows.sizes[::-1] if down else windows.sizes
    source, target = (input, output) if forth else (output, input)
    mixed = sets.grouped(_channels(images, source[1] // groups, before), images * before)
    return windows.spread(mixed, images, down=down).take(
        _channels(images, target[1] // groups, after)
    )


def _channels(images: int, channels: int, places: int) -> Tensor:
    """The place of each entry of each channel of images, which the channels of an image share."""
    image = torch.arange(images, device="cpu").reshape(-1, 1, 1)
    return (
        (image * places + torch.arange(places, device="cpu"))
        .expand(images, channels, places)
        .reshape(-1)
    )


def convolution(op: OperatorCall) -> OutputSets:
    """A convolution, or a transposed one."""
    input, weight, bias = map(op.argument, ("input", "weight", "bias"))
    (output,) = op.outputs
    if input.ndim != weight.ndim or (bias is not None and op.sets(bias) is not None):
        return None
    total = Sets.empty(output.numel(), op.tracer.width)
    if op.sets(weight) is not None:
        total = op.everything().take(torch.zeros(output.numel(), dtype=torch.int64, device="cpu"))
    elif (sets := op.sets(input)) is not None:
        total = _convolved(op, sets, input.shape, output.shape, forth=True)
    return [total]


def convolution_backward(op: OperatorCall) -> OutputSets:
    """The gradient of a convolution: the input's goes back through the windows;
    each entry of a weight sees everything.
    """
    gradient, input, weight, needed = map(
        op.argument, ("grad_output", "input", "weight", "output_mask")
    )
    sets = op.sets(gradient)
    if (
        sets is None
        or len(op.live) != 1
        or input.ndim != weight.ndim
        or sum(needed) != len(op.outputs)
    ):
        return None
    of_outputs = (
        [_convolved(op, sets, input.shape, gradient.shape, forth=False)] if needed[0] else []
    )
    for output in op.outputs[len(of_outputs) :]:
        of_outputs.append(
            op.everything().take(torch.zeros(output.numel(), dtype=torch.int64, device="cpu"))
        )
    return of_outputs


# --- pooling: an average over a window; resampling, which sees each image whole -------------------


def pooled(op: OperatorCall) -> OutputSets:
    """An average over each window; or back to all of it,
    as where the largest was follows from the point.
    """
    forth, tensor = not op.name.endswith("_backward"), op.argument("self")
    small = op.outputs[0] if forth else op.argument("grad_output")
    sets = op.sets(tensor if forth else small)
    if sets is None or len(op.live) != 1 or len(op.outputs) != 1:
        return None
    dims, kernel = _dims(op.name), op.argument("kernel_size")
    options = [
        kernel,
        op.argument("stride") or kernel,
        op.argument("padding"),
        op.argument("dilation", 1),
    ]
    windows = Windows.of(
        small.shape[-dims:], tensor.shape[-dims:], *(_each(option, dims) for option in options)
    )
    return [windows.spread(sets, tensor.shape[:-dims].numel(), down=forth)]


def _dims(name: str) -> int:
    """The number of dimensions an operator pools over, by its name: `avg_pool2d`."""
    return int(next(character for character in name if character in "123"))


def _each(value: Any, dims: int) -> list[int]:
    """A setting for each dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def image(op: OperatorCall) -> OutputSets:
    """Each image by itself: all of it."""
    tensor, (output,) = op.inputs[0], op.outputs
    sets, dims = op.sets(tensor), _dims(op.name)
    if sets is None or len(op.live) != 1 or tensor.shape[:-dims] != output.shape[:-dims]:
        return None
    images = torch.arange(tensor.shape[:-dims].numel(), device="cpu")
    before, after = tensor.shape[-dims:].numel(), output.shape[-dims:].numel()
    return [
        sets.grouped(images.repeat_interleave(before), len(images)).take(
            images.repeat_interleave(after)
        )
    ]


RULES: dict[str, Rule] = {
    **listed("mm bmm mv dot vdot _sparse_mm", matrix_product),
    **listed("addmm addmv baddbmm _sparse_addmm", product_added_to),
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    **listed(
        "avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward "
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
        pooled,
    ),
    **listed(
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
        "_upsample_nearest_exact3d_backward upsample_linear1d_backward "
        "upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward "
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward "
        "_adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward",
        image,
    ),
}
