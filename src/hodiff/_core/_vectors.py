"""Vectors like the point: one, or many with an extra leading dimension, recognised by their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hodiff._core import _tree
from hodiff.errors import InputError


def match(
    value: Any, tree: _tree.Tree, likes: Sequence[Tensor], name: str, meaning: str
) -> tuple[list[Tensor], int | None]:
    """Check a vector (or several, with one extra leading dimension) against the tensors it must resemble."""
    if tree is None and isinstance(value, Tensor):
        return [value], _count(value, likes[0], name)
    if tree is not None and value.__class__ is dict and tree.template is dict and tuple(value) == tree.keys:
        leaves = [*value.values()]
        for leaf, like in zip(leaves, likes, strict=True):  # as every dict of parameters is
            if not isinstance(leaf, Tensor):
                break
            if leaf.shape != like.shape or leaf.dtype is not like.dtype or leaf.device != like.device:
                break
        else:
            return leaves, None
    if tree is not None and not isinstance(value, Tensor) and not _tree.is_container(value):
        raise InputError(f"{name}: is a {type(value).__name__}, expected {_tree.describe(tree)}; it must be {meaning}.")
    _, _, got_tree = _tree.flatten(value, name)
    found = _tree.difference(tree, got_tree, name)
    if found:
        raise InputError(f"{name}: {found}; it must be {meaning}.")
    leaves = _tree.leaves_like(tree, value)
    labels = _tree.paths(tree, name)
    counts = [_count(leaf, like, label) for leaf, like, label in zip(leaves, likes, labels, strict=True)]
    if any(count != counts[0] for count in counts):
        raise InputError(f"{name}: its leaves hold different numbers of vectors: {counts}; give all of them the same.")
    return leaves, counts[0]


def _count(leaf: Any, like: Tensor, name: str) -> int | None:
    if not isinstance(leaf, Tensor):
        raise InputError(f"{name}: is a {type(leaf).__name__}, expected a tensor.")
    if leaf.dtype != like.dtype or leaf.device != like.device:
        raise InputError(
            f"{name}: is {leaf.dtype} on {leaf.device}, expected {like.dtype} on {like.device}; "
            f"convert it: v.to(x.device, x.dtype)."
        )
    if leaf.shape == like.shape:
        return None
    if leaf.ndim == like.ndim + 1 and leaf.shape[1:] == like.shape:
        return leaf.shape[0]
    shape = tuple(like.shape)
    raise InputError(
        f"{name}: has shape {tuple(leaf.shape)}, expected {shape}, or (K, {', '.join(map(str, shape))}) for K vectors."
    )
