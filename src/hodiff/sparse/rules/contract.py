"""Matrix products: a linear operator whose matrix is known to the entry where it is a constant of the user's."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.sparse._sets import Sets
from hodiff.sparse._tracer import Found, Operation, Rule
from hodiff.sparse.rules.pointwise import broadcast, broadcasts, is_constant, listed


def product(op: Operation) -> Found:
    """`a @ b` of vectors, matrices, or stacks of matrices of the same length."""
    a, b = op.inputs[0], op.inputs[1]
    return [_matmul(op, a, b)] if len(op.outputs) == 1 and len(op.inputs) == 2 else None


def product_added_to(op: Operation) -> Found:
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


def _matmul(op: Operation, a: Tensor, b: Tensor) -> Sets | None:
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
        found = _times(op, swapped, (stack, columns, inner, rows), a, turned=True)
        total = total | found.take(_transposed(stack, columns, rows))
    return total


def _transposed(stack: int, rows: int, columns: int) -> Tensor:
    """The places of the entries of transposed matrices."""
    return torch.arange(stack * rows * columns, device="cpu").reshape(stack, rows, columns).mT.reshape(-1)


def _times(
    op: Operation, left: Sets, sizes: tuple[int, int, int, int], matrix: Tensor, *, turned: bool = False
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
    op: Operation, matrix: Tensor, sizes: tuple[int, int, int, int], *, turned: bool
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
    **listed("mm bmm mv dot vdot _sparse_mm", product),
    **listed("addmm addmv baddbmm _sparse_addmm", product_added_to),
}
