"""Convolutions and pooling: each output sees a window of the input; and resampling, which sees each image whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.sparse._tracer import OperatorCall, OutputSets, Rule, Sets
from hodiff.sparse.rules.contraction import is_constant, listed


class Windows(NamedTuple):
    """Which places of the larger grid each place of the smaller one sees: pairs, and the offset in the window."""

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
        windows = cls(*[torch.zeros(1, dtype=torch.int64, device="cpu")] * 3)
        for a, b, k, step, pad, spread in zip(small, large, kernel, stride, padding, dilation, strict=True):
            at = torch.arange(a, device="cpu").reshape(-1, 1).expand(a, k)
            within = torch.arange(k, device="cpu").expand(a, k)
            seen = at * step - pad + within * spread
            inside = (seen >= 0) & (seen < b)
            parts = at[inside], seen[inside], within[inside]
            windows = cls(
                *[
                    (whole.reshape(-1, 1) * size + part).reshape(-1)
                    for whole, part, size in zip(windows, parts, (a, b, k), strict=True)
                ]
            )
        return windows


def _many(sets: Sets, images: int, source: Tensor, sources: int, target: Tensor, targets: int) -> Sets:
    """A union along pairs of places, the same in each of several images."""
    image = torch.arange(images, device="cpu").reshape(-1, 1)
    return sets.spread((image * sources + source).reshape(-1), (image * targets + target).reshape(-1), images * targets)


# --- convolution


class _Convolution(NamedTuple):
    groups: int
    transposed: bool
    windows: Windows
    small: int
    large: int


def _convolution(op: OperatorCall, weight: Tensor, input: Sequence[int], output: Sequence[int]) -> _Convolution:
    """The windows of a convolution between an input and an output of these shapes."""
    transposed = bool(op.argument("transposed"))
    small, large = (input[2:], output[2:]) if transposed else (output[2:], input[2:])
    kernel = weight.shape[2:]
    options = [_each(op.argument(name), len(kernel)) for name in ("stride", "padding", "dilation")]
    windows = Windows.of(small, large, kernel, *options)
    if is_constant(op, weight):  # an offset at which a constant kernel has nothing but zeros sees nothing
        used = (weight.detach() != 0).reshape(*weight.shape[:2], -1).any(0).any(0).cpu()
        windows = Windows(*[part[used[windows.offset]] for part in windows])
    return _Convolution(
        int(op.argument("groups")), transposed, windows, torch.Size(small).numel(), torch.Size(large).numel()
    )


def _through(sets: Sets, shape: Sequence[int], channels: int, conv: _Convolution, *, forth: bool) -> Sets:
    """Sets passed on from all channels of a group to all channels of that group, along the windows: forth, or back."""
    images = shape[0] * conv.groups
    large_first = forth != conv.transposed  # whether it goes from the large grid to the small one
    source, sources, target, targets = (
        (conv.windows.large, conv.large, conv.windows.small, conv.small)
        if large_first
        else (conv.windows.small, conv.small, conv.windows.large, conv.large)
    )
    image = torch.arange(images, device="cpu").reshape(-1, 1, 1)
    place = (image * sources + torch.arange(sources, device="cpu")).expand(images, shape[1] // conv.groups, sources)
    mixed = sets.grouped(place.reshape(-1), images * sources)
    seen = _many(mixed, images, source, sources, target, targets)
    place = (image * targets + torch.arange(targets, device="cpu")).expand(images, channels // conv.groups, targets)
    return seen.take(place.reshape(-1))


def convolution(op: OperatorCall) -> OutputSets:
    """A convolution, or a transposed one."""
    input = op.argument("input")
    weight = op.argument("weight")
    bias = op.argument("bias")
    (output,) = op.outputs
    if input.ndim != weight.ndim or (bias is not None and op.sets(bias) is not None):
        return None
    total = Sets.empty(output.numel(), op.tracer.width)
    if op.sets(weight) is not None:
        total = op.everything().take(torch.zeros(output.numel(), dtype=torch.int64, device="cpu"))
    sets = op.sets(input)
    if sets is not None and op.sets(weight) is None:
        conv = _convolution(op, weight, input.shape, output.shape)
        total = total | _through(sets, input.shape, output.shape[1], conv, forth=True)
    return [total]


def convolution_backward(op: OperatorCall) -> OutputSets:
    """What reaches the input goes back through the windows; each entry of a weight sees everything."""
    gradient = op.argument("grad_output")
    input = op.argument("input")
    weight = op.argument("weight")
    sets = op.sets(gradient)
    if sets is None or len(op.live) != 1 or input.ndim != weight.ndim:
        return None
    needed = op.argument("output_mask")
    of_outputs: list[Sets | None] = []
    outputs = iter(op.outputs)
    for index, wanted in enumerate(needed):
        if not wanted:
            continue
        output = next(outputs)
        if index == 0:
            conv = _convolution(op, weight, input.shape, gradient.shape)
            of_outputs.append(_through(sets, gradient.shape, input.shape[1], conv, forth=False))
        else:
            of_outputs.append(op.everything().take(torch.zeros(output.numel(), dtype=torch.int64, device="cpu")))
    return of_outputs if len(of_outputs) == len(op.outputs) else None


# --- pooling


def _pooling(op: OperatorCall, large: Sequence[int], small: Sequence[int]) -> Windows:
    kernel_size, dims = op.argument("kernel_size"), _dims(op.name)
    kernel = _each(kernel_size, dims)
    stride = _each(op.argument("stride") or kernel_size, dims)
    padding, dilation = _each(op.argument("padding"), dims), _each(op.argument("dilation", 1), dims)
    return Windows.of(small[-dims:], large[-dims:], kernel, stride, padding, dilation)


def pooled(op: OperatorCall) -> OutputSets:
    """An average over each window."""
    tensor = op.argument("self")
    sets = op.sets(tensor)
    if sets is None or len(op.outputs) != 1:
        return None
    windows, (output,) = _pooling(op, tensor.shape, op.outputs[0].shape), op.outputs
    dims = _dims(op.name)
    large, small = tensor.shape[-dims:].numel(), output.shape[-dims:].numel()
    return [_many(sets, tensor.shape[:-dims].numel(), windows.large, large, windows.small, small)]


def pooled_backward(op: OperatorCall) -> OutputSets:
    """Back to every place of the window: where the largest was follows from the point."""
    gradient, tensor = op.argument("grad_output"), op.argument("self")
    sets = op.sets(gradient)
    if sets is None or len(op.live) != 1 or len(op.outputs) != 1:
        return None
    dims = _dims(op.name)
    windows = _pooling(op, tensor.shape, gradient.shape)
    large, small = tensor.shape[-dims:].numel(), gradient.shape[-dims:].numel()
    return [_many(sets, tensor.shape[:-dims].numel(), windows.small, small, windows.large, large)]


def _dims(name: str) -> int:
    """How many dimensions an operator pools over, by its name: `avg_pool2d`."""
    return int(next(character for character in name if character in "123"))


def _each(value: Any, dims: int) -> list[int]:
    """A setting for each dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def image(op: OperatorCall) -> OutputSets:
    """Each image by itself: all of it."""
    tensor = op.inputs[0]
    sets, (output,) = op.sets(tensor), op.outputs
    dims = _dims(op.name)
    if sets is None or len(op.live) != 1 or tensor.shape[:-dims] != output.shape[:-dims]:
        return None
    images = tensor.shape[:-dims].numel()
    before, after = tensor.shape[-dims:].numel(), output.shape[-dims:].numel()
    return [
        sets.grouped(torch.arange(images, device="cpu").repeat_interleave(before), images).take(
            torch.arange(images, device="cpu").repeat_interleave(after)
        )
    ]


RULES: dict[str, Rule] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    **listed("avg_pool2d avg_pool3d", pooled),
    **listed(
        "avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
        pooled_backward,
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
