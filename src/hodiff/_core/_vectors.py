"""Vectors like the point: given, one or many, by their shapes or flat; or drawn at random."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _settings, _tree
from hodiff._core._arguments import Probes, as_tensors, check_dense, check_option, listing
from hodiff.errors import InputError


class Vectors(NamedTuple):
    """Vectors in some spelling, taken apart.

    Attributes:
        leaves: A tensor for each leaf of the point; of several vectors with one more dimension in front.
        number: How many there are; None for a single one.
        tree: The structure in which results like them are given back.
        flat: Whether they were flat, or the columns of a matrix.
    """

    leaves: list[Tensor]
    number: int | None
    tree: _tree.Tree
    flat: bool

    def like(self, found: Sequence[Tensor]) -> Any:
        """Results like the point, one for each leaf, in the spelling of the vectors."""
        if not self.flat:
            return _tree.rebuild(self.tree, iter(found))
        if self.number is not None:
            return _columns(found, self.number)
        dtype = promoted(found)
        return torch.cat([part.reshape(-1).to(dtype) for part in found])

    def arranged(self, found: Sequence[Tensor], tree: _tree.Tree) -> Any:
        """Results in a structure of their own; those of columns are columns, whatever the structure."""
        if self.flat and self.number is not None:
            return _columns(found, self.number)
        return _tree.rebuild(tree, iter(found))


def _columns(found: Sequence[Tensor], number: int) -> Tensor:
    dtype = promoted(found)
    return torch.cat([part.reshape(number, -1).to(dtype) for part in found], dim=1).T.contiguous()


def match(value: Any, tree: _tree.Tree, likes: Sequence[Tensor], name: str, meaning: str) -> Vectors:
    """Vectors in any spelling: like the point, a list of its leaves, flat, columns; arrays and lists of numbers too.

    Several have one extra leading dimension, or are columns, which the shape tells. As many vectors as a line has
    entries may be either, and are refused: in the list of its one leaf they are stacked in front.
    """
    if _arguments.LOADED_BY in sys.modules:
        _arguments.check_vectors(value, name)
    if not isinstance(value, Tensor) and not (value.__class__ is dict and all(map(_is_tensor, value.values()))):
        value = as_tensors(value, promoted(likes), likes[0].device, name)
    single = isinstance(value, Tensor)
    if single and _is_plain(value):
        if tree is None and value.ndim == 2 and value.shape == 2 * likes[0].shape:
            raise InputError(_rows_or_columns(value, name))
        if _is_flat(value, tree, likes):
            return _split(value, likes, name)
    ordered = None if single else listing(value, tree, len(likes))
    leaves, count = structured(value, ordered or tree, likes, name, meaning)
    return Vectors(leaves, count, ordered or tree, False)


def _rows_or_columns(value: Tensor, name: str) -> str:
    return (
        f"{name}: has shape {tuple(value.shape)}, as many vectors as entries, so they may be its rows or its columns. "
        f"Say [{name}] for rows, stacked in front (the list of the leaves), and [{name}.T] for columns; or multiply by "
        f"an operator, for which several vectors are columns: H @ {name} with H = hodiff.HessianOperator(f, x)."
    )


def _is_plain(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def structured(
    value: Any, tree: _tree.Tree, likes: Sequence[Tensor], name: str, meaning: str
) -> tuple[list[Tensor], int | None]:
    """Check a vector (or several, with one extra leading dimension) against the tensors it must resemble."""
    if isinstance(value, Tensor):
        check_dense(value, name, f", {meaning}")
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
    if tree is not None and isinstance(value, Tensor):
        raise InputError(f"{name}: {_wrong_flat(value, likes)}; or it may be {meaning}.")
    if tree is not None and not _tree.is_container(value):
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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of flat vectors: that of the leaves, promoted where they differ."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _is_flat(value: Tensor, tree: _tree.Tree, likes: Sequence[Tensor]) -> bool:
    """Whether a tensor is `(D,)`, or columns `(D, K)`, and nothing else.

    Where the point is one tensor, its own shape comes first, and several like it.
    """
    if tree is None and (value.shape == likes[0].shape or value.shape[1:] == likes[0].shape):
        return False
    return 0 < value.ndim <= 2 and value.shape[0] == sum([like.numel() for like in likes])


def _split(value: Tensor, likes: Sequence[Tensor], name: str) -> Vectors:
    dtype = promoted(likes)
    if value.dtype != dtype or value.device != likes[0].device:
        raise _wrong_kind(value, name, dtype, likes[0].device)
    rows = value if value.ndim == 1 else value.T
    lead = rows.shape[:-1]
    pieces = rows.split([like.numel() for like in likes], dim=-1)
    parts = [part.reshape((*lead, *like.shape)).to(like.dtype) for part, like in zip(pieces, likes, strict=True)]
    return Vectors(parts, None if value.ndim == 1 else value.shape[1], None, True)


def _count(leaf: Any, like: Tensor, name: str) -> int | None:
    if not isinstance(leaf, Tensor):
        raise InputError(f"{name}: is a {type(leaf).__name__}, expected a tensor.")
    if leaf.dtype != like.dtype or leaf.device != like.device:
        raise _wrong_kind(leaf, name, like.dtype, like.device)
    if leaf.shape == like.shape:
        return None
    if leaf.ndim == like.ndim + 1 and leaf.shape[1:] == like.shape:
        return leaf.shape[0]
    shape = tuple(like.shape)
    turned = like.ndim == 1 and leaf.ndim == 2 and leaf.shape[0] == like.shape[0]
    raise InputError(
        f"{name}: has shape {tuple(leaf.shape)}, expected {shape}, or (K, {', '.join(map(str, shape))}) for K vectors"
        f"{', which are stacked in front here: give ' + name + '.T' if turned else ''}."
    )


def _wrong_kind(value: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> InputError:
    return InputError(
        f"{name}: is {value.dtype} on {value.device}, expected {dtype} on {device}; "
        f"convert it: v.to(x.device, x.dtype)."
    )


def _wrong_flat(value: Tensor, likes: Sequence[Tensor]) -> str:
    size = sum([like.numel() for like in likes])
    turned = value.ndim == 2 and value.shape[1] == size
    advice = " (several flat vectors are columns: give its .T)" if turned else ""
    return f"has shape {tuple(value.shape)}, expected ({size},), ({size}, K) for K vectors{advice}"


# --- random vectors: their laws, and where their numbers come from. One vocabulary for all that draw them -------------
# `samples=` is how many, `probes=` their law, `generator=` their source, `vectors=` the caller's own.


def check_probes(probes: object) -> None:
    """Raise unless the law is known."""
    check_option(probes, Probes, "probes")


def check_generator(generator: object) -> None:
    """Raise unless this is a generator, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator: is a {type(generator).__name__}; expected torch.Generator().manual_seed(seed), or None."
        )


def draw(shape: Sequence[int], like: Tensor, probes: Probes, generator: torch.Generator | None) -> Tensor:
    """Independent numbers of mean 0 and variance 1, in the dtype and on the device of `like`.

    They are drawn where the generator is (a CPU generator gives a CUDA tensor the numbers it gives a CPU tensor), by
    default with the default generator of `like`'s device; in single precision at least, which half precision rounds.
    """
    device = like.device if generator is None else generator.device
    drawn = torch.empty(tuple(shape), dtype=torch.promote_types(like.dtype, torch.float32), device=device)
    with _settings.grad_mode(False):
        if probes == "gaussian":
            drawn.normal_(generator=generator)
        else:
            drawn.bernoulli_(generator=generator).mul_(2).sub_(1)
    return drawn.to(like)


def standard_error(estimates: Tensor) -> Tensor | None:
    """That of the mean of independent estimates, along the first dimension; None of a single one."""
    if len(estimates) < 2:
        return None
    unit = near(estimates.detach().abs().amax(0))  # squares of very small or large numbers have no place in their dtype
    return (estimates / unit).std(0) / len(estimates) ** 0.5 * unit


def near(sizes: Tensor) -> Tensor:
    """Powers of two near some sizes, to measure numbers in; 1 for a zero."""
    room = 100 if sizes.dtype is not torch.float64 else 1000
    exponents = torch.frexp(sizes).exponent.clamp(-room, room)
    return torch.ldexp(torch.ones_like(sizes), exponents)
