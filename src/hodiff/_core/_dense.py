"""Dense blocks of a Jacobian, row by row: the common part of `jacobian`, `hessian` and their kin."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff._core import _reverse
from hodiff._core._graph import Graph
from hodiff.errors import InputError


def blocks(
    ev: Graph,
    outputs: Sequence[Tensor],
    *,
    chunk_size: int | None,
    inputs: list[Tensor] | None = None,
) -> list[list[Tensor]]:
    """The derivative of each output by each input, shaped `(*batch, *output event, *input event)`."""
    inputs = ev.leaves if inputs is None else inputs
    table = []
    for index, output in enumerate(outputs):
        count, rows = basis(output, ev.batch_ndim)
        more = index < len(outputs) - 1
        chunks = _reverse.pull_many(ev, [output], rows, count, chunk_size=chunk_size, more=more, inputs=inputs)
        stacked = _reverse.stacked(ev, chunks, count, inputs)
        table.append([_ordered(part, output, leaf, ev.batch_ndim) for part, leaf in zip(stacked, inputs, strict=True)])
    return table


SMALL = 2**30
"""Bytes of a result that nobody need ask the machine about."""


def check_fits(outputs: Sequence[Tensor], inputs: Sequence[Tensor], batch_ndim: int, way_out: str) -> None:
    """Raise for a table of derivatives that is larger than the memory of its device."""
    batch = outputs[0].shape[:batch_ndim].numel()
    rows = sum(output.shape[batch_ndim:].numel() for output in outputs)
    columns = sum(leaf.shape[batch_ndim:].numel() for leaf in inputs)
    size = batch * rows * columns * inputs[0].element_size()
    if size > SMALL and size > memory_of(inputs[0].device):
        raise InputError(
            f"x: the result would hold {f'{batch:,} x ' if batch_ndim else ''}{rows:,} x {columns:,} numbers, "
            f"{size / 1e9:,.0f} GB, and {inputs[0].device} has {memory_of(inputs[0].device) / 1e9:,.0f} GB. {way_out}"
        )


def memory_of(device: torch.device) -> float:
    """The bytes of memory of a device; infinite where nobody says."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):  # not on Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return math.inf


def basis(output: Tensor, batch_ndim: int) -> tuple[int, _reverse.Cotangents]:
    """The unit vectors of one sample's event, the same for every sample: their number, and how to make some."""
    batch, event = output.shape[:batch_ndim], output.shape[batch_ndim:]
    count = event.numel()

    def rows(start: int, stop: int) -> list[Tensor]:
        size = stop - start
        units = output.new_zeros((size, count))
        units[:, start:stop].fill_diagonal_(1)
        return [units.reshape((size, *[1] * batch_ndim, *event)).expand((size, *batch, *event))]

    return count, rows


def _ordered(stacked: Tensor, output: Tensor, leaf: Tensor, batch_ndim: int) -> Tensor:
    """From (rows, *batch, *input event) to (*batch, *output event, *input event)."""
    batch, event = leaf.shape[:batch_ndim], leaf.shape[batch_ndim:]
    if batch_ndim:
        stacked = stacked.movedim(0, batch_ndim)
    return stacked.reshape((*batch, *output.shape[batch_ndim:], *event))


def matrix(table: list[list[Tensor]], outputs: Sequence[Tensor], leaves: Sequence[Tensor], batch_ndim: int) -> Tensor:
    """The blocks as one matrix, `(M, D)` or `(*batch, M, D)`, rows and columns in the order of the tensors."""
    batch = leaves[0].shape[:batch_ndim]
    heights = [output.shape[batch_ndim:].numel() for output in outputs]
    widths = [leaf.shape[batch_ndim:].numel() for leaf in leaves]
    rows = [
        torch.cat([block.reshape((*batch, height, width)) for block, width in zip(line, widths, strict=True)], dim=-1)
        if len(widths) > 1
        else line[0].reshape((*batch, height, widths[0]))
        for line, height in zip(table, heights, strict=True)
    ]
    return torch.cat(rows, dim=-2) if len(rows) > 1 else rows[0]
