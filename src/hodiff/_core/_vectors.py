"""Vectors like a point: the space they live in, and how they are given: one or many, by their
shapes or flat.

Inside, a vector is a list of parts, one for each leaf; `K` vectors are parts with one more
dimension
in front. Outside there are five spellings: like the point, a list of the leaves in their order, `K`
of either stacked, flat `(D,)`, and columns `(D, K)`. NumPy arrays and lists of numbers stand for
tensors.
"""

from __future__ import annotations

import difflib
import numbers
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _settings, _tree, _versions
from hodiff._core._tree import NO_BATCH, Leaves, Vectors, form, join, promoted
from hodiff.errors import InputError

__all__ = [
    "SOME",
    "Space",
    "check_generator",
    "draw",
    "empty",
    "generic",
    "near",
    "standard_error",
    "sum_dtype",
]

TURNED_BYTES = 16 * 2**20
_TILE = 4096


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which many terms of a dtype are added up: at least single."""
    return torch.promote_types(dtype, torch.float32)


class Space:
    """The vectors like some tensors.

    Attributes:
        likes: A tensor like each part of a vector.
        names: A readable name for each.
        tree: The structure of the point.
        operator: Whether it is one side of an operator, for which several vectors are columns, as
            in linear algebra.
        batch: The leading dimensions of all tensors, in which systems lie beside each other; flat:
            `(*batch, D)`.
        layout: Where the entries are, if processes share them: `likes` are like this one's parts.
    """

    def __init__(
        self,
        likes: Sequence[Tensor],
        names: Sequence[str],
        tree: _tree.Tree,
        meaning: str,
        *,
        operator: bool = False,
        batch: torch.Size = NO_BATCH,
        layout: Any = None,
    ) -> None:
        self.likes = likes
        self.layout = layout
        self.names = names
        self.tree = tree
        self.operator = operator
        self.batch = batch
        self._meaning = meaning

    def side(self, batch_ndim: int = 0) -> Space:
        """This space as one side of an operator or a matrix,
        which keeps nothing of the user's alive.
        """
        devices = {str(like.device) for like in self.likes}
        if len(devices) > 1:
            listed = ", ".join(sorted(devices))
            raise InputError(
                f"{self._meaning}: the tensors are on several devices ({listed}); "
                "a matrix needs one."
            )
        hollow = [
            torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
            for like in self.likes
        ]
        batch = hollow[0].shape[:batch_ndim]
        return Space(
            hollow, self.names, self.tree, self._meaning,
            operator=True, batch=batch, layout=self.layout,
        )  # fmt: skip

    @classmethod
    def line(cls, like: Tensor, name: str = "x", batch_ndim: int = 0) -> Space:
        """The space of vectors like one tensor, for an operator."""
        return cls([like], [name], _tree.LEAF, f"like {name}").side(batch_ndim)

    def only(self, chosen: Sequence[int]) -> Space:
        """The space of some of the leaves: vectors are dicts by name."""
        names = [self.names[index] for index in chosen]
        tree = _tree.Branch(dict, tuple(names), (_tree.LEAF,) * len(names))
        likes = [self.likes[index] for index in chosen]
        meaning = f"a dict with keys {names}"
        layout = None if self.layout is None else self.layout.only(chosen)
        return Space(
            likes, names, tree, meaning, operator=self.operator, batch=self.batch, layout=layout
        )

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """The shape of each leaf."""
        return [like.shape for like in self.likes]

    @cached_property
    def _sizes(self) -> list[int]:
        return [like.shape[len(self.batch) :].numel() for like in self.likes]

    @cached_property
    def size(self) -> int:
        """The number of entries, D, of all processes; of one of a batch."""
        if self.layout is not None:
            return sum(tensor.numel() for tensor in self.layout.given)
        return sum(self._sizes)

    @property
    def width(self) -> int:
        """The number of entries of a flat vector that this process has."""
        return self.size if self.layout is None else sum(self._sizes)

    @property
    def numel(self) -> int:
        """The number of entries of a vector in all systems of a batch."""
        return self.size * self.batch.numel()

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: that of the leaves, promoted where they differ."""
        return promoted(self.likes)

    @property
    def device(self) -> torch.device:
        """The device of flat vectors."""
        return self.likes[0].device

    @cached_property
    def flat(self) -> bool:
        """Whether a vector is a single tensor of one dimension,
        so that structure and flat spelling are one.
        """
        return self.tree is _tree.LEAF and self.likes[0].ndim == 1 + len(self.batch)

    def like(self, other: Space) -> bool:
        """Whether vectors of the other space are vectors of this one,
        with their leaves in the same order.
        """
        same = self.shapes == other.shapes and _tree.difference(self.tree, other.tree, "") is None
        return same and _tree.paths(self.tree, "") == _tree.paths(other.tree, "")

    # --- spellings

    def parse(self, value: Any, name: str = "v") -> Vectors:
        """Recognize a spelling, check it, and take it apart."""
        tree, like = self.tree, self.likes[0]
        if self.layout is not None:
            parts, count = self.layout.parsed(value, tree, name)
            return Vectors("structure", parts, count, tree)
        alike = value.__class__ is Tensor and not (self.operator or value.is_nested)
        if tree is _tree.LEAF and alike and form(value) == form(like):
            return Vectors("structure", [value], None, tree)
        plain = value.__class__ is dict and _arguments.TENSORS.issuperset(map(type, value.values()))
        if not plain and value.__class__ not in _arguments.TENSORS:
            check_vectors(value, name)
        if not plain and not isinstance(value, Tensor):
            value = self.as_tensors(value, name)
            tree = tree_of_listed_leaves(value, tree, len(self.likes)) or tree
        if self.batch and isinstance(value, Tensor):
            return self._parse_batched(value, name)
        if isinstance(value, Tensor) and self._is_flat(value, name):
            return self._parse_flat(value, name)
        parts, count = self.structured(value, name, tree)
        return Vectors("structure", parts, count, tree)

    def as_tensors(self, value: Any, name: str = "v") -> Any:
        """NumPy arrays, also in a container, and lists of numbers as tensors;
        anything else as it is.
        """
        return as_tensors(value, promoted(self.likes), self.device, name)

    def structured(self, value: Any, name: str, tree: _tree.Tree) -> tuple[Leaves, int | None]:
        """The parts of vectors with some structure, and how many they are,
        told by one dimension more in front.
        """
        if tree is _tree.LEAF and isinstance(value, Tensor):
            return [value], _count(value, self.likes[0], name)
        if (
            tree is not None
            and value.__class__ is dict
            and tree.template is dict
            and tuple(value) == tree.keys
        ):
            leaves = [*value.values()]
            known = _arguments.TENSORS.issuperset(map(type, leaves))
            # As every dict of parameters is.
            if known and [*map(form, leaves)] == [*map(form, self.likes)]:
                return leaves, None
        return self.rearranged(value, name, tree)

    def rearranged(self, value: Any, name: str, tree: _tree.Tree) -> tuple[Leaves, int | None]:
        """The parts of a container in any order, each leaf checked."""
        expected = f"it must be {self._meaning}" + (
            f", or flat: ({self.size},)." if self.operator else "."
        )
        if tree is not None and isinstance(value, Tensor):
            raise self._wrong_shape(value, name)
        if tree is not None and not _tree.is_container(value):
            raise InputError(
                f"{name}: got {_arguments.kind(value)}, expected {_tree.describe(tree)}; {expected}"
            )
        different = _tree.difference(tree, _tree.flatten(value, name)[2], name)
        if different:
            raise InputError(f"{different}; {expected}")
        leaves = _tree.leaves_like(tree, value)
        labels = _tree.paths(tree, name)
        counts = [
            _count(leaf, like, label)
            for leaf, like, label in zip(leaves, self.likes, labels, strict=True)
        ]
        if any(count != counts[0] for count in counts):
            raise InputError(
                f"{name}: the leaves hold different numbers of vectors, {counts}; "
                "give the same number in each."
            )
        return leaves, counts[0]

    def _is_flat(self, value: Tensor, name: str) -> bool:
        """Whether a tensor is `(D,)`, or columns `(D, K)`.

        For functions at one tensor, its own shape comes first, and several like it; as many as a
        line has entries may be rows or columns.
        """
        _arguments.check_dense(value, name, f", {self._meaning}")
        if self.tree is _tree.LEAF and not self.operator:
            own = self.likes[0].shape
            if value.ndim == 2 and value.shape == 2 * own:
                raise InputError(_rows_or_columns(value, name))
            if own in (value.shape, value.shape[1:]):
                return False
        return (self.operator and self.flat) or (
            0 < value.ndim <= 2 and value.shape[0] == self.size
        )

    def _parse_flat(self, value: Tensor, name: str) -> Vectors:
        if value.ndim not in (1, 2) or value.shape[0] != self.size:
            raise self._wrong_shape(value, name)
        if value.dtype != self.dtype or value.device != self.device:
            raise _wrong_kind(value, name, self.dtype, self.device)
        if value.ndim == 1:
            return Vectors("flat", self.split(value), None, self.tree)
        return Vectors(
            "columns", [value] if self.operator else self.split(value.T), value.shape[1], self.tree
        )

    def _parse_batched(self, value: Tensor, name: str) -> Vectors:
        """A vector for each system, flat or like the point; several in front,
        or behind as columns.
        """
        _arguments.check_dense(value, name, f", {self._meaning}")
        if value.dtype != self.dtype or value.device != self.device:
            raise _wrong_kind(value, name, self.dtype, self.device)
        flat = torch.Size((*self.batch, self.size))
        own = self.likes[0].shape if self.tree is _tree.LEAF else flat
        stacked = value.shape[1:] == own and own is not flat
        columns = self.flat and value.shape[:-1] == flat
        if value.shape == own and own is not flat:
            return Vectors("structure", [value], None, self.tree)
        if value.shape == flat:
            return Vectors("flat", self.split(value), None, self.tree)
        if stacked and columns:
            raise InputError(
                f"{name} has shape {tuple(value.shape)}, which could be {len(value)} stacked "
                f"vectors or columns. Pass [{name}] for vectors stacked in front, or "
                f"[{name}.movedim(-1, 0)] for columns."
            )
        if stacked:
            return Vectors("structure", [value], len(value), self.tree)
        if columns:
            return Vectors("columns", [value.movedim(-1, 0)], value.shape[-1], self.tree)
        raise InputError(
            f"{name} has shape {tuple(value.shape)}, expected {tuple(own)} for one vector in each "
            f"of the systems, or {('K', *own)} for K vectors".replace("'", "")
            + "."
        )

    def _wrong_shape(self, value: Tensor, name: str) -> InputError:
        turned = value.ndim == 2 and value.shape[1] == self.size
        advice = f"; several vectors are columns: give {name}.T" if turned else ""
        structure = "" if self.flat else f", or a vector {self._meaning}"
        return InputError(
            f"{name} has shape {tuple(value.shape)}, expected ({self.size},), or ({self.size}, K) "
            f"for K vectors{structure}{advice}."
        )

    # --- parts and flat vectors

    def split(self, flat: Tensor) -> Leaves:
        """The parts of flat vectors, one or several: views, unless dtypes are mixed."""
        if self.flat:
            return [flat if flat.dtype is self.dtype else flat.to(self.dtype)]
        lead = flat.shape[:-1]
        return [
            piece.reshape((*lead, *like.shape[len(self.batch) :])).to(like.dtype)
            for piece, like in zip(self.pieces(flat), self.likes, strict=True)
        ]

    def pieces(self, flat: Tensor) -> Leaves:
        """The entries of each leaf in flat vectors, `(D,)` or rows `(K, D)`, as they are: views."""
        return [flat] if len(self.likes) == 1 else list(flat.split(self._sizes, dim=-1))

    def rows(self, columns: Tensor) -> Leaves:
        """The parts of columns `(D, K)`."""
        return [
            _turned(piece).reshape((piece.shape[1], *like.shape)).to(like.dtype)
            for piece, like in zip(columns.split(self._sizes), self.likes, strict=True)
        ]

    def turned_at_once(self, least: int) -> int:
        """The number of vectors to turn from columns into rows in one go: some `TURNED_BYTES`, but
        at least so many.
        """
        return max(least, TURNED_BYTES // max(1, self.size * self.dtype.itemsize))

    def join_into(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Write the parts of several vectors as the rows of `out`."""
        tangents = _versions.forward[_versions.LEVEL] >= 0  # which no `out=` takes
        if tangents or any(part.dtype != self.dtype for part in parts):
            out.copy_(self.join(parts, len(out)))
            return
        pieces = [
            part.reshape((*out.shape[:-1], n)) for part, n in zip(parts, self._sizes, strict=True)
        ]
        torch.cat(pieces, dim=-1, out=out)

    def join(self, parts: Sequence[Tensor], count: int | None) -> Tensor:
        """Parts as one flat vector `(D,)`, or as rows `(K, D)`."""
        if self.flat:
            return parts[0] if parts[0].dtype is self.dtype else parts[0].to(self.dtype)
        return join(parts, count, self.dtype, self.batch)

    def result(self, parts: Sequence[Tensor], tree: _tree.Tree = _tree.LEAF) -> Any:
        """Parts in the structure of the point, or in another of as many leaves."""
        if self.layout is not None:
            parts = self.layout.placed(parts)
        return _tree.rebuild(tree or self.tree, iter(parts))

    def units(self, start: int, stop: int) -> Tensor:
        """Some of the unit vectors, as rows."""
        size = (stop - start, *self.batch, self.size)
        rows = torch.zeros(size, dtype=self.dtype, device=self.device)
        rows[..., start:stop].diagonal(dim1=0, dim2=-1).fill_(1)
        return rows

    def take(self, parts: Leaves, count: int | None, source: Space) -> Leaves:
        """The parts of vectors of another space of the same size as parts of this one."""
        return parts if source.shapes == self.shapes else self.split(source.join(parts, count))

    def numbers_of(self, patterns: Sequence[str]) -> list[int]:
        """The numbers of the leaves whose names match."""
        chosen: set[int] = set()
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise InputError(
                    f"block: got {_arguments.kind(pattern)}, expected names of leaves: "
                    f"{', '.join(self.names[:6])}."
                )
            result = {index for index, name in enumerate(self.names) if matches(name, pattern)}
            if not result:
                near = (
                    difflib.get_close_matches(pattern.rstrip(".*"), self.names, n=3, cutoff=0.4)
                    or self.names[:6]
                )
                raise InputError(
                    f"block: {pattern!r} matches no leaf. Near matches: {', '.join(near)}."
                )
            chosen |= result
        return sorted(chosen)

    def zeros(self, count: int | None = None) -> Leaves:
        """The parts of a zero vector, or of `count` of them."""
        lead = () if count is None else (count,)
        return [
            torch.zeros((*lead, *like.shape), dtype=like.dtype, device=like.device)
            for like in self.likes
        ]

    def zeros_flat(self, size: int) -> Tensor:
        """A line of zeros, in the dtype of flat vectors."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def empty(self, count: int) -> Leaves:
        """Room for the parts of `count` vectors."""
        return [
            torch.empty((count, *like.shape), dtype=like.dtype, device=like.device)
            for like in self.likes
        ]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects a leaf: by its name, or that of a module or container around it."""
    if name == pattern:  # names like x[0] are not patterns
        return True
    keys = re.findall(r"\['?([^\]]*?)'?\]|\.(\w+)", name) if "[" in name else []
    name = ".".join(key or field for key, field in keys) or name  # x['a'][0] may be called a.0
    while name:
        if fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]  # what is around a leaf selects it
    return False


def _turned(columns: Tensor) -> Tensor:
    """The transpose `(K, n)`, each row contiguous.

    By tiles: a processor turns what its caches hold two to five times faster than a large matrix at
    once.
    """
    if columns.stride(0) == 1 or columns.device.type != "cpu" or len(columns) <= _TILE:
        return columns.T if columns.stride(0) == 1 else columns.T.contiguous()
    rows = columns.new_empty(columns.T.shape)
    for start in range(0, len(columns), _TILE):
        rows[:, start : start + _TILE] = columns[start : start + _TILE].T
    return rows


def _rows_or_columns(value: Tensor, name: str) -> str:
    return (
        f"{name} has shape {tuple(value.shape)}, so the vectors could be its rows or its columns. "
        f"Pass [{name}] for rows (a list of the leaves, vectors stacked in front) or [{name}.T] "
        f"for columns; or use an operator, for which several vectors are always columns: H @ "
        f"{name} with H = hodiff.HessianOperator(f, x)."
    )


def _count(leaf: Any, like: Tensor, name: str) -> int | None:
    if not isinstance(leaf, Tensor):
        raise InputError(f"{name}: got {_arguments.kind(leaf)}, expected a tensor.")
    if leaf.dtype != like.dtype or leaf.device != like.device:
        raise _wrong_kind(leaf, name, like.dtype, like.device)
    if leaf.shape == like.shape:
        return None
    if leaf.ndim == like.ndim + 1 and leaf.shape[1:] == like.shape:
        return leaf.shape[0]
    shape = tuple(like.shape)
    turned = like.ndim == 1 and leaf.ndim == 2 and leaf.shape[0] == like.shape[0]
    raise InputError(
        f"{name} has shape {tuple(leaf.shape)}, expected {shape}, or (K, "
        f"{', '.join(map(str, shape))}) for K "
        f"vectors{', stacked in front: give ' + name + '.T' if turned else ''}."
    )


def _wrong_kind(value: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> InputError:
    return InputError(
        f"{name} is {value.dtype} on {value.device}, expected {dtype} on {device}; "
        f"convert it: {name}.to({str(device)!r}, {dtype})."
    )


# --- what stands for a tensor where a vector is wanted --------------------------------------------


def as_tensors(value: Any, dtype: torch.dtype, device: torch.device, name: str) -> Any:
    """NumPy arrays, also in a container, and lists of numbers as tensors;
    anything else as it is.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            _arguments.check_dense(value, name)
        return value
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    if _is_array(value) or _is_numbers(value):
        return _tensor(value, dtype, device, name)
    if _tree.is_container(value) and any(map(_is_array, _tree.flatten(value, name)[0])):
        return _tree.tree_map(
            lambda leaf: _tensor(leaf, dtype, device, name) if _is_array(leaf) else leaf, value
        )
    return value


def tree_of_listed_leaves(value: Any, tree: _tree.Tree, number: int) -> _tree.Tree:
    """The structure of a list (or tuple) of the leaves in the order of the point,
    where it is no such point.
    """
    if not isinstance(value, (list, tuple)) or len(value) != number:
        return None
    if not all(isinstance(part, Tensor) for part in value):
        return None
    _, _, leaves = _tree.flatten(value)
    return leaves if _tree.difference(tree, leaves, "") else None


def _tensor(value: Any, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """Numbers from elsewhere, copied, in the precision of flat vectors."""
    if _is_array(value):
        if value.dtype.kind not in "fiu":
            raise InputError(f"{name}: got an array of {value.dtype}, expected real numbers.")
        double = dtype is torch.float64
        value = torch.from_numpy(
            value.astype("float64" if double else "float32", order="C", copy=True)
        )
        return value.to(device, dtype)
    try:
        return torch.tensor(value, dtype=dtype, device=device)
    except ValueError as error:
        raise InputError(
            f"{name}: got a nested list whose rows differ in length ({error})."
        ) from error


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_numbers(value: Any, depth: int = 0) -> bool:
    """Whether this is a list of numbers, or of such lists, and no list in itself."""
    if not isinstance(value, (list, tuple)) or not value or depth > _tree.DEEPEST:
        return False
    return all(
        _is_numbers(item, depth + 1) or (isinstance(item, numbers.Real) and type(item) is not bool)
        for item in value
    )


def check_vectors(value: Any, name: str) -> None:
    """Raise for vectors of such a class, DTensors among them, alone or in a container."""
    for leaf in _tree.flatten(value, name)[0]:
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            _arguments.check_class(leaf, name)
        if _arguments.is_dtensor(leaf):
            raise InputError(
                f"{name} is a DTensor, of which each process holds a shard, but the point is an "
                f"ordinary tensor. Give the full tensor, v.full_tensor(), which is the same on "
                f"every process."
            )


# --- random vectors: their laws, and where their numbers come from. One vocabulary for all that
# draw them `samples=` is how many, `probes=` their law, `generator=` their source, `vectors=` the
# caller's own.


def check_generator(generator: object) -> None:
    """Raise unless this is a generator, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator: got {_arguments.kind(generator)}, "
            "expected torch.Generator().manual_seed(seed), or None."
        )


def empty(what: str, shape: Sequence[int], like: Tensor, way_out: str) -> Tensor:
    """Memory for vectors, where there is so much."""
    _arguments.check_room(what, shape, like, way_out)
    return like.new_empty(shape)


def draw(
    shape: Sequence[int], like: Tensor, probes: _arguments.Probes, generator: torch.Generator | None
) -> Tensor:
    """Independent numbers of mean 0 and variance 1, in the dtype and on the device of `like`.

    They are drawn where the generator is (a CPU generator gives a CUDA tensor the numbers it gives
    a CPU tensor), by default with the default generator of `like`'s device; in single precision at
    least, which half precision rounds.
    """
    _arguments.check_room("the random vectors", shape, like, "Ask for fewer of them.")
    device = like.device if generator is None else generator.device
    drawn = torch.empty(
        tuple(shape), dtype=torch.promote_types(like.dtype, torch.float32), device=device
    )
    with _settings.grad_mode(False):
        if probes == "gaussian":
            drawn.normal_(generator=generator)
        else:
            drawn.bernoulli_(generator=generator).mul_(2).sub_(1)
    return drawn.to(like)


def generic(count: int) -> Tensor:
    """Numbers in [1, 2), always the same ones,
    that touch nobody's random state. Each caller has its own.
    """
    return 1 + (SOME[:count] if count <= 2**12 else _uniform(count))


def _uniform(count: int) -> Tensor:
    return torch.rand(
        count, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )


SOME = _uniform(2**12)  # to seed a generator takes as long as a pass over a small graph


def standard_error(estimates: Tensor) -> Tensor | None:
    """The standard error of the mean of independent estimates, along the first dimension;
    None of a single one.
    """
    if len(estimates) < 2:
        return None
    if not estimates.numel():
        return estimates.sum(0)
    # squares of very small or large numbers have no place in their dtype
    unit = near(estimates.detach().abs().amax(0))
    return (estimates / unit).std(0) / len(estimates) ** 0.5 * unit


def near(sizes: Tensor) -> Tensor:
    """Powers of two near some sizes, to measure numbers in; 1 for a zero."""
    room = 100 if sizes.dtype is not torch.float64 else 1000
    return torch.ldexp(torch.ones_like(sizes), torch.frexp(sizes).exponent.clamp(-room, room))
