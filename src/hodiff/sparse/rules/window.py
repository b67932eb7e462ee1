"""Convolutions and pooling: each output sees a window of the input; and resampling, which sees each image whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.sparse._tracer import OperatorCall, OutputSets, Rule, Sets
from hodiff.sparse.rules.contraction import is_constant, listed


class Windows(NamedTuple):
    """Which places of the larger grid each place of the smaller one sees: pairs.

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
        for a, b, k, step, pad, spread in zip(small, large, kernel, stride, padding, dilation, strict=True):
            at = torch.arange(a, device="cpu").reshape(-1, 1).expand(a, k)
            within = torch.arange(k, device="cpu").expand(a, k)
            seen = at * step - pad + within * spread
            inside = (seen >= 0) & (seen < b)
            parts = zip(pairs, (at, seen, within), (a, b, k), strict=True)
            pairs = [(whole.reshape(-1, 1) * size + part[inside]).reshape(-1) for whole, part, size in parts]
        return cls((torch.Size(small).numel(), torch.Size(large).numel()), *pairs)

    def spread(self, sets: Sets, images: int, *, down: bool) -> Sets:
        """A union along the pairs, from the large grid to the small one or back, in each of the images."""
        sources, targets = self.sizes[::-1] if down else self.sizes
        source, target = (self.large, self.small) if down else (self.small, self.large)
        image = torch.arange(images, device="cpu").reshape(-1, 1)
        elements = (image * sources + source).reshape(-1)
        return sets.spread(elements, (image * targets + target).reshape(-1), images * targets)


# --- convolution


def _convolved(op: OperatorCall, sets: Sets, input: Sequence[int], output: Sequence[int], *, forth: bool) -> Sets:
    """Sets passed on between a convolution's input and output, of these shapes: forth, or back.

    They go from all channels of a group to all channels of that group, along the windows.
    """
    weight = op.argument("weight")
    transposed, groups = bool(op.argument("transposed")), int(op.argument("groups"))
    small, large = (input[2:], output[2:]) if transposed else (output[2:], input[2:])
    kernel = weight.shape[2:]
    options = (_each(op.argument(name), len(kernel)) for name in ("stride", "padding", "dilation"))
    windows = Windows.of(small, large, kernel, *options)
    if is_constant(op, weight):  # an offset at which a constant kernel has nothing but zeros sees nothing
        used = (weight.detach() != 0).reshape(*weight.shape[:2], -1).any(0).any(0).cpu()
        windows = Windows(windows.sizes, *(part[used[windows.offset]] for part in windows[1:]))
    images, down = input[0] * groups, forth != transposed
    before, after = windows.sizes[::-1] if down else windows.sizes
    source, target = (input, output) if forth else (output, input)
    mixed = sets.grouped(_channels(images, source[1] // groups, before), images * before)
    return windows.spread(mixed, images, down=down).take(_channels(images, target[1] // groups, after))


def _channels(images: int, channels: int, places: int) -> Tensor:
    """For each entry of each channel of images its place, which the channels of an image share."""
    image = torch.arange(images, device="cpu").reshape(-1, 1, 1)
    return (image * places + torch.arange(places, device="cpu")).expand(images, channels, places).reshape(-1)


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
    """What reaches the input goes back through the windows; each entry of a weight sees everything."""
    gradient, input, weight, needed = map(op.argument, ("grad_output", "input", "weight", "output_mask"))
    sets = op.sets(gradient)
    if sets is None or len(op.live) != 1 or input.ndim != weight.ndim or sum(needed) != len(op.outputs):
        return None
    of_outputs = [_convolved(op, sets, input.shape, gradient.shape, forth=False)] if needed[0] else []
    for output in op.outputs[len(of_outputs) :]:
        of_outputs.append(op.everything().take(torch.zeros(output.numel(), dtype=torch.int64, device="cpu")))
    return of_outputs


# --- pooling


def pooled(op: OperatorCall) -> OutputSets:
    """An average over each window; or back to all of it, as where the largest was follows from the point."""
    forth, tensor = not op.name.endswith("_backward"), op.argument("self")
    small = op.outputs[0] if forth else op.argument("grad_output")
    sets = op.sets(tensor if forth else small)
    if sets is None or len(op.live) != 1 or len(op.outputs) != 1:
        return None
    dims, kernel = _dims(op.name), op.argument("kernel_size")
    options = [kernel, op.argument("stride") or kernel, op.argument("padding"), op.argument("dilation", 1)]
    windows = Windows.of(small.shape[-dims:], tensor.shape[-dims:], *(_each(option, dims) for option in options))
    return [windows.spread(sets, tensor.shape[:-dims].numel(), down=forth)]


def _dims(name: str) -> int:
    """How many dimensions an operator pools over, by its name: `avg_pool2d`."""
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
    return [sets.grouped(images.repeat_interleave(before), len(images)).take(images.repeat_interleave(after))]


RULES: dict[str, Rule] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    **listed(
        "avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward "
        "max_pool3d_with_indices_backward",
        pooled,
    ),
    **listed(
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward "
        "upsample_bicubic2d_backward upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward",
        image,
    ),
}
