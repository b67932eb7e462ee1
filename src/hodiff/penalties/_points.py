"""Where penalties are evaluated: points between two batches, and random directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks, _tree
from hodiff.errors import InputError


def interpolate(a: Any, b: Any, *, batch_ndim: int = 1, generator: torch.Generator | None = None) -> Any:
    r"""A random point between each sample of two batches, \(a_i + \alpha_i (b_i - a_i)\), \(\alpha_i \sim U[0, 1)\).

    One \(\alpha\) is drawn per sample and shared by all its entries, so that the point lies on the
    straight line; in a container, by all leaves.

    Args:
        a: A tensor `(*batch, ...)` or a container of them: the real samples.
        b: The same structure, with the same shapes: the generated ones.
        batch_ndim: How many leading dimensions index samples.
        generator: What the numbers are drawn from; None: the device's default generator.

    Returns:
        The points, with the structure and shapes of *a*, detached: a penalty on the critic must not
        train the generator.

    Raises:
        InputError: Structures, shapes, dtypes or devices differ. (8 samples against 1 would broadcast.)

    Cost:
        No derivative pass; one new batch.

    Examples:
        >>> import torch, hodiff
        >>> points = hodiff.interpolate(torch.zeros(4, 3), torch.ones(4, 3))
        >>> bool((points == points[:, :1]).all()), bool(((points >= 0) & (points < 1)).all())
        (True, True)

    Reference:
        Gulrajani, I. et al. (2017). Improved training of Wasserstein GANs. arXiv:1704.00028, section 4.
    """
    firsts, seconds, names, tree = _pairs(a, b)
    batch = _checks.check_batch(firsts, names, batch_ndim)
    like = firsts[0]
    alpha = torch.rand(
        batch, generator=generator, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32)
    )
    points = []
    for first, second in zip(firsts, seconds, strict=True):
        weight = alpha.to(first).reshape(*batch, *[1] * (first.ndim - batch_ndim))
        points.append(torch.lerp(first.detach(), second.detach(), weight))
    return _tree.rebuild(tree, iter(points))


def _pairs(a: Any, b: Any) -> tuple[list[Tensor], list[Tensor], list[str], _tree.Tree]:
    """The leaves of two batches, checked to be alike."""
    firsts, names, tree = _tree.flatten(a, "a")
    _checks.check_container(tree, len(firsts), "a")
    found = _tree.difference(tree, _tree.flatten(b, "b")[2], "b")
    if found:
        raise InputError(f"b: {found}; it must be like a.")
    seconds = _tree.leaves_like(tree, b)
    for first, second, name in zip(firsts, seconds, names, strict=True):
        _checks.check_real_tensor(first, name)
        _checks.check_real_tensor(second, f"b{name[1:]}")
        if first.shape != second.shape:
            raise InputError(
                f"b{name[1:]}: has shape {tuple(second.shape)}, but {name} has {tuple(first.shape)}. Interpolation "
                f"needs a partner for each sample; cut the larger batch: a[:n], b[:n]."
            )
        if first.dtype != second.dtype or first.device != second.device:
            raise InputError(
                f"b{name[1:]}: is {second.dtype} on {second.device}, but {name} is {first.dtype} on {first.device}."
            )
    return firsts, seconds, names, tree


def check_distribution(distribution: str) -> None:
    """Raise for a distribution that is not known."""
    if distribution not in ("sphere", "rademacher", "normal"):
        raise InputError(f'distribution: got {distribution!r}, expected "rademacher", "sphere" or "normal".')


def directions(
    like: Tensor, count: int, batch_ndim: int, distribution: str, generator: torch.Generator | None
) -> Tensor:
    """`count` random vectors v like a tensor, stacked, independent for each sample, with E[v vᵀ] = I.

    `"sphere"`: uniform on the sphere of radius √dimension (the unit sphere would scale every estimate by 1/dimension).
    """
    shape = (count, *like.shape)
    dtype = torch.promote_types(like.dtype, torch.float32)
    with torch.no_grad():
        if distribution == "rademacher":
            signs = torch.randint(0, 2, shape, generator=generator, device=like.device)
            return (2 * signs - 1).to(like.dtype)
        drawn = torch.randn(shape, generator=generator, device=like.device, dtype=dtype)
        if distribution == "sphere":
            rows = drawn.flatten(batch_ndim + 1) if like.ndim > batch_ndim else drawn.unsqueeze(-1)
            rows = rows * (rows.shape[-1] ** 0.5 / torch.linalg.vector_norm(rows, dim=-1, keepdim=True))
            drawn = rows.reshape(shape)
        return drawn.to(like.dtype)
