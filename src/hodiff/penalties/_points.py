"""Where penalties are evaluated: points between two batches; and vectors, drawn or given."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks, _tree
from hodiff._core._graph import detached
from hodiff._core._options import Probes
from hodiff._core._random_vectors import check_generator, draw
from hodiff._core._where import Where
from hodiff.errors import HodiffWarning, InputError


def interpolate(
    a: Any,
    b: Any,
    *,
    batch_ndim: int = 1,
    detach: bool | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    r"""A random point between each sample of two batches, \(a_i + \alpha_i (b_i - a_i)\), \(\alpha_i \sim U[0, 1)\).

    One \(\alpha\) is drawn per sample and shared by all its entries, so that the point lies on the
    straight line; in a container, by all leaves.

    Args:
        a: A tensor `(*batch, ...)` or a container of them: the real samples.
        b: The same structure, with the same shapes: the generated ones.
        batch_ndim: How many leading dimensions index samples.
        detach: Whether the points are cut from the graphs of the samples. None: they are, since a penalty on
            the critic must not train the generator, with a warning where a sample requires grad. False keeps them.
        generator: What the numbers are drawn from; None: the device's default generator.

    Returns:
        The points, with the structure and shapes of *a*.

    Raises:
        InputError: Structures, shapes, dtypes or devices differ. (8 samples against 1 would broadcast.)

    Warns:
        HodiffWarning: A sample requires grad, is detached, and *detach* does not say so.

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
    check_generator(generator)
    recorded = torch.is_grad_enabled()
    a, b = apart(a, detach, "a", recorded), apart(b, detach, "b", recorded)
    batch, firsts, seconds, tree = _pairs(a, b, batch_ndim)
    like = firsts[0]
    alpha = torch.rand(
        batch, generator=generator, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32)
    )
    points = []
    for first, second in zip(firsts, seconds, strict=True):
        weight = alpha.to(first).reshape(*batch, *[1] * (first.ndim - batch_ndim))
        points.append(torch.lerp(first, second, weight))
    return _tree.rebuild(tree, iter(points))


def _pairs(a: Any, b: Any, batch_ndim: int) -> tuple[torch.Size, list[Tensor], list[Tensor], _tree.Tree]:
    """The batch's shape and the leaves of two batches, checked to be alike."""
    firsts, names, tree = _tree.flatten(a, "a")
    _checks.check_container(tree, len(firsts), "a")
    for first, name in zip(firsts, names, strict=True):
        _checks.check_real_tensor(first, name)
    batch = _checks.check_batch(firsts, names, batch_ndim)
    found = _tree.difference(tree, _tree.flatten(b, "b")[2], "b")
    if found:
        raise InputError(f"b: {found}; it must be like a.")
    seconds = _tree.leaves_like(tree, b)
    for first, second, name in zip(firsts, seconds, names, strict=True):
        _checks.check_real_tensor(second, f"b{name[1:]}")
        if first.shape != second.shape:
            batches = first.shape[:batch_ndim] != second.shape[:batch_ndim]
            way_out = (
                "Interpolation needs a partner for each sample; cut the larger batch: a[:n], b[:n]."
                if batches and first.shape[batch_ndim:] == second.shape[batch_ndim:]
                else "The samples themselves differ in shape, so there is no line between them: bring them to one "
                "shape first (resize or crop images, pad sequences)."
            )
            raise InputError(
                f"b{name[1:]}: has shape {tuple(second.shape)}, but {name} has {tuple(first.shape)}. {way_out}"
            )
        if first.dtype != second.dtype or first.device != second.device:
            raise InputError(
                f"b{name[1:]}: is {second.dtype} on {second.device}, but {name} is {first.dtype} on {first.device}."
            )
    return batch, firsts, seconds, tree


def apart(samples: Any, detach: bool | None, name: str, recorded: bool) -> Any:
    """The samples as a penalty on the critic takes them: detached, unless `detach=False`.

    Where nobody said so and the result is `recorded`, that deserves a word: whoever made them gets no gradient.
    """
    if detach is False:
        return samples
    if detach is None and recorded and not torch.compiler.is_compiling():
        leaves, names, _ = _tree.flatten(samples, name)
        attached = [name for leaf, name in zip(leaves, names, strict=True) if _requires_grad(leaf)]
        if attached:
            warnings.warn(
                f"{', '.join(attached)}: requires grad, and is detached here, so the penalty trains the critic alone: "
                f"a generator or featurizer behind the samples gets no gradient from it. If that is what you want, "
                f"say detach=True (or pass {name}.detach()); if not, detach=False.",
                HodiffWarning,
                stacklevel=_checks.outside(),
            )
    return detached(samples)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def vectors_like(
    where: Where, vectors: Any, samples: int, probes: Probes, generator: torch.Generator | None
) -> list[Tensor]:
    """The caller's vectors like a point, stacked; or `samples` random ones. None is a tensor of inference mode."""
    if vectors is not None:
        given = stacked(*where.vectors(vectors, "vectors")[:2])
        return [leaf.clone() if leaf.is_inference() else leaf for leaf in given]
    check_generator(generator)
    return [draw((samples, *leaf.shape), leaf, probes, generator) for leaf in where.tensors]


def stacked(leaves: list[Tensor], count: int | None) -> list[Tensor]:
    """One vector as a stack of one."""
    if count == 0:
        raise InputError("vectors: holds no vector, expected at least one.")
    return [leaf.unsqueeze(0) for leaf in leaves] if count is None else leaves
