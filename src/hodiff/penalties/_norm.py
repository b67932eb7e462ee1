"""Norms of gradients, one for each sample, that are right at zero, at extremes and in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks, _modes, _tree
from hodiff.errors import InputError


def sample_norm(grads: Any, *, ord: float = 2, batch_ndim: int = 1) -> Tensor:
    r"""The norm of each sample's gradient, over everything but the batch, \(\lVert g_i \rVert\).

    A sample's entries in all leaves of a container count as one vector. The derivative at a zero
    gradient is zero, at every order (`sqrt(sum(g**2))` gives NaN there, `linalg.vector_norm` from
    the second order on). The norm is right from 1e-30 to 1e30, where squares leave the range of float32.

    Args:
        grads: A tensor or a container of tensors, each `(*batch, ...)`.
        ord: 2 (Euclidean), 1 (sum of absolute values) or `float("inf")` (largest absolute value).
        batch_ndim: How many leading dimensions index samples. For points `(P, 3)` that is 1, for
            `(B, P, 3)` it is 2; 0 takes everything as one sample.

    Returns:
        A tensor of shape `(*batch,)`, in float32 or better whatever the dtype of *grads*.

    Raises:
        InputError: No tensor, a batch that the leaves do not share, or another *ord*.

    Cost:
        No derivative pass: a few passes over the entries. Differentiable any number of times.

    Examples:
        A gradient of (3, 4) in two leaves, and a zero one:

        >>> import torch, hodiff
        >>> hodiff.sample_norm({"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([[4.0], [0.0]])})
        tensor([5., 0.])

    Reference:
        The scaling by the largest entry is that of the BLAS routine `nrm2`: Blue, J. L. (1978). A portable
        Fortran program to find the Euclidean norm of a vector. ACM TOMS 4(1). doi:10.1145/355769.355771.
    """
    check_ord(ord)
    return norm(leaves_of(grads, batch_ndim), batch_ndim, ord)


def check_ord(ord: float) -> None:
    """Raise unless the norm is one whose derivatives are known to be safe."""
    if not isinstance(ord, (int, float)) or ord not in (1, 2, float("inf")):
        raise InputError(f'ord: got {ord!r}, expected 2, 1 or float("inf").')


def leaves_of(grads: Any, batch_ndim: int) -> list[Tensor]:
    """The tensors of a gradient, checked to share a batch."""
    leaves, names, tree = _tree.flatten(grads, "grads")
    _checks.check_container(tree, len(leaves), "grads")
    for leaf, name in zip(leaves, names, strict=True):
        _checks.check_real_tensor(leaf, name)
    _checks.check_batch(leaves, names, batch_ndim)
    return leaves


def norm(leaves: Sequence[Tensor], batch_ndim: int, ord: float = 2) -> Tensor:
    """`sample_norm` of checked leaves."""
    rows = [_rows(leaf, batch_ndim) for leaf in leaves if leaf.shape[batch_ndim:].numel()]
    if not rows:
        return wide(leaves[0].new_zeros(leaves[0].shape[:batch_ndim]))
    row = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    if ord == 1:
        return row.abs().sum(-1)
    if ord != 2:
        return row.abs().amax(-1)
    plain = torch.linalg.vector_norm(row, dim=-1)
    if _ordinary(plain):
        return plain
    # With the largest entry m drawn out, squares neither overflow nor vanish. m is a constant to the
    # derivative: the norm does not depend on it.
    with _modes.grad_mode(False):
        largest = row.abs().amax(-1, keepdim=True)
        dead = largest == 0  # not where it is NaN, which must show
        largest = torch.where(dead, 1, largest.clamp(max=torch.finfo(row.dtype).max))  # inf / inf would be NaN
    # A dead sample is moved off zero, where a norm has no second derivative, and its result replaced. One
    # operation, so that there is no further copy of the gradient.
    moved = torch.addcdiv(dead.to(row.dtype), row, largest)
    return largest.squeeze(-1) * torch.where(dead.squeeze(-1), 0, torch.linalg.vector_norm(moved, dim=-1))


def _ordinary(norms: Tensor) -> bool:
    """Whether all norms are far from zero and from the ends of float32's range: the plain ones will do, and are faster.

    Not asked where the answer would have to be waited for, or cannot be had: on a GPU, in a traced region, under vmap.
    """
    if norms.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    try:
        return bool(((norms > 1e-12) & (norms < 1e12)).all())
    except RuntimeError as error:
        if "vmap" not in str(error):  # which refuses the question
            raise
        return False


def squares(leaves: Sequence[Tensor], batch_ndim: int) -> Tensor:
    """The squared norm of each sample's gradient: no root, so smooth everywhere."""
    return _total([_dot(_rows(leaf, batch_ndim)) for leaf in leaves])


def inner(a: Sequence[Tensor], b: Sequence[Tensor], batch_ndim: int) -> Tensor:
    """The inner product of each sample's vectors."""
    return _total([(_rows(x, batch_ndim) * _rows(y, batch_ndim)).sum(-1) for x, y in zip(a, b, strict=True)])


def wide(tensor: Tensor) -> Tensor:
    """In float32 where the dtype is a shorter one."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _rows(leaf: Tensor, batch_ndim: int) -> Tensor:
    """`(*batch, entries)`, in float32 or better: a square of 300 is infinite in float16."""
    leaf = wide(leaf)
    return leaf.flatten(batch_ndim) if leaf.ndim > batch_ndim else leaf.unsqueeze(-1)


def _dot(row: Tensor) -> Tensor:
    """The sum of squares; as a product, whose backward takes half the time and memory of that of `square`."""
    return (row * row).sum(-1)


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
