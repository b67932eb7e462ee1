"""Directional derivatives, along x + t v, of every entry of an output: v·∇f and v'∇²f v,
by reverse passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff._core import _reverse
from hodiff._core._graph import OutputGraph


class Lines(NamedTuple):
    """Second derivatives along R lines, `(R, *output)`; first ones, likewise; and along the drift,
    `(*output)`.
    """

    second: Tensor
    first: Tensor | None
    drift: Tensor | None


def entries(output: Tensor, batch_ndim: int) -> tuple[Tensor, ...]:
    """The entries of an output for each sample, one tensor of the batch's shape for each."""
    return output.flatten(batch_ndim).unbind(-1) if output.ndim > batch_ndim else (output,)


def by_entries(
    graph: OutputGraph,
    output: Tensor,
    vectors: Tensor,
    *,
    first: bool = True,
    drift: Tensor | None = None,
    chunk_size: int | None = None,
) -> Lines:
    """Derivatives where a sample has few outputs and many lines: for each output its gradient, then
    the lines in batches.

    Args:
        graph: An evaluation of two passes, of a single tensor.
        output: Its output, with the batch in front.
        vectors: v, `(R, *leaf)`, or with ones for the batch.
        first: Whether first derivatives are wanted; they cost no pass.
        drift: A vector b, shaped like the leaf, for b·∇f.
        chunk_size: How many lines one pass takes; None bounds its memory.
    """
    vectors = vectors.clone() if vectors.is_inference() else vectors
    columns = entries(output, graph.call.batch_ndim)
    seconds = []
    firsts = []
    drifts = []
    for k, entry in enumerate(columns):
        (gradient,) = _reverse.vjp(graph, [entry], [torch.ones_like(entry)], differentiated=True)
        seconds.append(_seconds(graph, gradient, vectors, chunk_size, more=k < len(columns) - 1))
        if first:
            firsts.append(_inner(gradient, vectors, graph.call.batch_ndim))
        if drift is not None:
            drifts.append(_inner(gradient, drift.unsqueeze(0), graph.call.batch_ndim))
    shaped = lambda parts: torch.stack(parts, -1).reshape(len(parts[0]), *output.shape)  # noqa: E731
    return Lines(
        shaped(seconds), shaped(firsts) if firsts else None, shaped(drifts)[0] if drifts else None
    )


def _seconds(
    graph: OutputGraph, gradient: Tensor, vectors: Tensor, chunk_size: int | None, *, more: bool
) -> Tensor:
    """v'∇²f v of each line and sample, from the gradients of one output."""

    def rows(start: int, stop: int) -> list[Tensor]:
        return [vectors[start:stop].expand(stop - start, *gradient.shape)]

    seconds = []
    chunks = _reverse.vjps(graph, [gradient], rows, len(vectors), chunk_size=chunk_size, more=more)
    for start, stop, (products,) in chunks:
        seconds.append(_inner(products, vectors[start:stop], graph.call.batch_ndim))
        del products  # before the next chunk is made
    return torch.cat(seconds)


def _inner(a: Tensor, rows: Tensor, batch_ndim: int) -> Tensor:
    """The inner products of samples with each row."""
    products = a * rows
    dims = tuple(range(1 + batch_ndim, products.ndim))
    return products.sum(dims) if dims else products


def by_lines(
    graph: OutputGraph, output: Tensor, vectors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Derivatives where there are few lines and many outputs: first and second ones of all outputs
    along one line.

    Args:
        graph: An evaluation of four passes.
        output: Its output.
        vectors: v, a tensor like each leaf.
    """
    vectors = [vector.clone() if vector.is_inference() else vector for vector in vectors]
    first = _pushed(graph, output, vectors, differentiated=True)
    return first, _pushed(graph, first, vectors, differentiated=False)


def _pushed(
    graph: OutputGraph, output: Tensor, vectors: Sequence[Tensor], *, differentiated: bool
) -> Tensor:
    """J v by two passes, as in `_reverse.jvp`."""
    cotangent = torch.ones_like(output, requires_grad=True)
    pulled = _reverse.transposed_product(graph, [output], [cotangent])
    return _reverse.vjp(graph, pulled, vectors, differentiated=differentiated, inputs=[cotangent])[
        0
    ]
