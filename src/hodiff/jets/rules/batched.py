"""Linear operations without a form of their own: the operation itself, batched over the directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hodiff._core import _reverse
from hodiff.jets import _jet
from hodiff.jets._registry import NoRule, Several, listed, operation, rule
from hodiff.jets._series import Expansion, full


def generic(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Any operation that is linear in all its jets together: batched over the directions, a loop where those nest."""
    kwargs = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
    jets = [jet for jet in _jet.jets_among((args, kwargs)) if jet.expansion is expansion]

    def at(points: Any) -> Any:
        given = iter(points)
        by = lambda jet: next(given) if jet.expansion is expansion else jet  # noqa: E731
        return func(*_jet.replaced(args, by), **_jet.replaced(kwargs, by))

    value = at([jet.series[0] for jet in jets])
    zeros = [jet.series[0].new_zeros(()).expand(jet.series[0].shape) for jet in jets]
    offset = at(zeros)  # constants among the arguments: the operation is affine, and coefficients are linear
    single = isinstance(value, torch.Tensor) or _jet.is_jet(value)
    found: list[Any] = []
    for k in range(1, expansion.order + 1):
        present = [jet.series[k] for jet in jets if jet.series[k] is not None]
        if not present:
            found.append(None)
            continue
        rows = present[0].shape[0]
        points = [
            jet.series[0].new_zeros(()).expand(rows, *jet.series[0].shape)
            if jet.series[k] is None
            else full(jet.series[k], jet.series[0].shape)
            for jet in jets
        ]
        found.append(_batched(at, points, single))
    if single:
        return [value, *(None if c is None else c[0] - offset for c in found)]
    return Several([[part, *(None if c is None else c[i] - offset[i] for c in found)] for i, part in enumerate(value)])


def _batched(function: Callable[[Any], Any], points: list[Any], single: bool) -> list[Any]:
    if not _jet.jets_among(points):
        try:
            return _reverse.batched(lambda *each: (function(each),) if single else tuple(function(each)), points)
        except RuntimeError as error:
            if "atching rule" not in str(error):
                raise
    rows = [
        function(each) if not single else (function(each),) for each in zip(*(p.unbind(0) for p in points), strict=True)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


rule(
    "linear",
    *listed(
        "roll fliplr flipud rot90 pad repeat tile diagonal trace unfold interpolate tril triu diag diag_embed "
        "diagflat repeat_interleave take take_along_dim hstack vstack dstack column_stack avg_pool1d "
        "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d "
        "adaptive_avg_pool3d _adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d pixel_shuffle "
        "pixel_unshuffle channel_shuffle fold im2col col2im diff hsplit vsplit dsplit unsafe_chunk "
        "unsafe_split split_with_sizes index_add index_copy index_fill block_diag meshgrid broadcast_tensors "
        "atleast_1d atleast_2d atleast_3d constant_pad_nd _pad_circular slice_scatter "
        "diagonal_scatter scatter_add masked_select"
    ),
)(generic)


@rule("composite", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d")
def max_pool(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The entries that PyTorch chose."""
    name = operation(func)
    x = args[0]
    adaptive = name.startswith("adaptive")
    place = 2 if adaptive else 6
    native = adaptive and func is not getattr(F, name)  # which gives the indices too, whatever it is told
    if native or kwargs.pop("return_indices", False) or any(args[place:]):
        raise NoRule(f"{name}(return_indices=True)")
    spatial = int(name[-2])
    pool = getattr(F, f"{name}_with_indices")
    value = _jet.series_of(x, expansion)[0]
    if _jet.is_jet(value):
        raise NoRule(name, "inside nested expansions")
    _, index = pool(value, *args[1:place], **kwargs)
    flat = x.flatten(-spatial)
    return torch.gather(flat, -1, index.flatten(-spatial)).reshape(index.shape)
