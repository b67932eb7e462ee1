"""The rules that say on which inputs each output of an operator depends, by the operator's name.

A rule may give too much, never too little. An operator without one is decomposed into others;
failing that, all its outputs depend on all its arguments, which is always right.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff._core import _tree
from hodiff.sparse._tracer import OperatorCall, OutputSets, Rule, Sets, tensors_in

# --- operators that compute each entry from the corresponding entries of their (broadcast)
# arguments


def pointwise(op: OperatorCall) -> list[Sets] | None:
    """The union over the arguments, entry by entry."""
    of_outputs: list[Sets] = []
    for output in op.outputs:
        if not all(broadcasts(tensor, output) for tensor, _ in op.pairs):
            return None
        parts = [sets.take(broadcast(tensor, output.shape)) for tensor, sets in op.pairs]
        of_outputs.append(functools.reduce(operator.or_, parts))
    return of_outputs


def product(op: OperatorCall) -> OutputSets:
    """A product: nothing passes where a constant factor is zero."""
    of_outputs = pointwise(op)
    if of_outputs is None or len(op.outputs) != 1:
        return of_outputs
    (output,), (sets,) = op.outputs, of_outputs
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
    return op.sets(tensor) is None and not op.tracer.is_variable(tensor)


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


RULES: dict[str, Rule] = {
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
    total, sets = _matmul(op, a, b), op.sets(c)
    return [total if sets is None else total | sets.take(broadcast(c, op.outputs[0].shape))]


def _matmul(op: OperatorCall, a: Tensor, b: Tensor) -> Sets:
    rows = a.shape[-2] if a.ndim > 1 else 1
    inner = a.shape[-1]
    columns = b.shape[-1] if b.ndim > 1 else 1
    stack = a.shape[0] if a.ndim == 3 else 1
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
    return left.take(source.reshape(-1)).grouped(target.reshape(-1), stack * rows * columns)


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
        groups = (image * targets + target).reshape(-1)
        return sets.take(elements).grouped(groups, images * targets)


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
    if op.sets(weight) is not None:
        return [op.everything(output)]
    return [_convolved(op, op.live[id(input)], input.shape, output.shape, forth=True)]


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
    of_outputs = [*map(op.everything, op.outputs)]
    if needed[0]:
        of_outputs[0] = _convolved(op, sets, input.shape, gradient.shape, forth=False)
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
    dims, kernel = _image_dims(op.name), op.argument("kernel_size")
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


def _image_dims(name: str) -> int:
    """The number of dimensions an operator pools over, by its name: `avg_pool2d`."""
    return int(next(character for character in name if character in "123"))


def _each(value: Any, dims: int) -> list[int]:
    """A setting for each dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def image(op: OperatorCall) -> OutputSets:
    """Each image by itself: all of it."""
    return _along(op, range(-_image_dims(op.name), 0))


RULES |= {
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


# --- operators that move entries, or couple them along a dimension --------------------------------


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
    return [union] * len(op.outputs)


def line(op: OperatorCall) -> OutputSets:
    """As many numbers as there were, each of which depends on all of its line."""
    of_outputs = pointwise(op)
    if of_outputs is None:
        return None
    lines = [along(output.shape, _dims(op, output)) for output in op.outputs]
    pairs = zip(of_outputs, lines, strict=True)
    return [sets.grouped(of_entry, count).take(of_entry) for sets, (count, of_entry) in pairs]


def transform(op: OperatorCall) -> OutputSets:
    """A Fourier transform: all of each line."""
    return _along(op, _dims(op, op.inputs[0]))


def _along(op: OperatorCall, dims: Sequence[int]) -> OutputSets:
    """All of each line (plane, ...), whatever its length afterwards."""
    tensor, output = op.inputs[0], op.outputs[0]
    sets = op.sets(tensor)
    if sets is None or len(op.live) != 1 or len(op.outputs) != 1 or tensor.ndim != output.ndim:
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
    count = batch.numel()
    union = Sets.empty(count, op.tracer.width)
    for tensor, sets in op.pairs:
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


RULES |= {
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

    def numbered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sets = op.sets(value)
        if sets is None:
            data = value.is_floating_point() or value.is_complex()
            return (
                torch.zeros(value.shape, dtype=torch.float64, device="cpu") if data else value.cpu()
            )
        first = 1 + sum(map(len, parts))
        parts.append(sets)
        numbers = torch.arange(first, first + value.numel(), dtype=torch.float64, device="cpu")
        return numbers.reshape(value.shape)

    args, kwargs = (
        _tree.tree_map(numbered, list(op.args)),
        _tree.tree_map(numbered, dict(op.kwargs)),
    )
    for name in ("dtype", "layout", "device", "pin_memory", "memory_format"):
        kwargs.pop(name, None)
    if op.name == "constant_pad_nd":  # what it pads with is not a number of an entry
        args, kwargs = args[:2], {}
    numbers = list(tensors_in(op.function(*args, **kwargs)))
    whole = Sets.joined(parts)
    return [whole.take(n.reshape(-1).long() - 1) for n in numbers]


def _has_variable_index(op: OperatorCall) -> bool:
    """Whether an index follows from the point: at another one it would lead elsewhere."""
    return any(
        not (t.is_floating_point() or t.is_complex()) and op.tracer.is_variable(t)
        for t in op.inputs
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
    """The sets of `self`, and where something is written or added, those as well; where it is
    written follows from an index, which may be anywhere on the line if that follows from the point.
    """
    base, source = (
        op.argument("self"),
        op.argument("src", op.argument("source", op.argument("values"))),
    )
    kept = op.sets(base) or Sets.empty(base.numel(), op.tracer.width)
    sets = op.sets(source) if isinstance(source, Tensor) else None
    if sets is None:
        return [kept]
    places = torch.arange(base.numel(), device="cpu").reshape(base.shape)
    dim, index, indices = map(op.argument, ("dim", "index", "indices"))
    variable = any(map(op.tracer.is_variable, tensors_in((index, indices))))
    if op.name in ("index_put", "_index_put_impl", "_unsafe_index_put"):
        if variable:
            return None
        hit = places[tuple(slice(None) if i is None else i.cpu() for i in indices)]
        part = hit.shape
        sets = sets.take(broadcast(source, part))
    elif op.name in ("scatter", "scatter_add"):
        part = index.shape
        numbers = torch.arange(source.numel(), device="cpu").reshape(source.shape)
        used = numbers[tuple(map(slice, part))] if source.ndim else numbers.expand(part)
        sets = sets.take(used.reshape(-1))
        hit = None if variable else places.gather(dim, index.cpu())
    else:  # index_add, index_copy
        part = source.shape
        hit = None if variable else places.index_select(dim, index.cpu())
    if hit is not None:
        return [kept | sets.grouped(hit.expand(part).reshape(-1), base.numel())]
    lines, of_base = along(base.shape, [dim])
    return [kept | sets.grouped(along(base.shape, [dim], part)[1], lines).take(of_base)]


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
        held = targets >= 0
        return [sets.take(held.nonzero()[:, 0]).grouped(targets[held], count)]

    return rule


RULES |= {
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


def find(function: Any) -> Rule | None:
    """The rule of an operator; None where there is none."""
    name = str(function._schema.name)
    if not name.startswith("aten::"):
        return None
    rule = RULES.get(name.removeprefix("aten::").rstrip("_")) or RULES.get(
        name.removeprefix("aten::")
    )
    if rule is not None:
        return rule
    return pointwise if torch.Tag.pointwise in function.tags else None
