"""The vectors that an operator takes and gives: shaped like a point, or flat; one, or several at a time.

Inside, a vector is a list of parts, one for each leaf; `K` vectors are parts with one more dimension
in front. Outside there are five spellings: like the point, a list of the leaves in their order, `K` of
either stacked, flat `(D,)`, and columns `(D, K)`. NumPy arrays and lists of numbers stand for tensors.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _settings, _tree
from hodiff._core._arguments import as_tensors, check_dense, listing
from hodiff._core._vectors import structured
from hodiff._core._where import Where
from hodiff.curvature._staleness import one_look
from hodiff.errors import GraphError, HodiffWarning, InputError

Parts = list[Tensor]
"""A vector inside: one tensor for each leaf of the point; of `K` vectors, with one more dimension in front."""
TURNED_BYTES = 16 * 2**20
_TILE = 4096


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What many terms of a dtype are added up in: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def as_given(tensor: Tensor) -> _settings.Context:
    """Matrix products in the dtype of their factors, whatever the caller's autocast would have them rounded to."""
    return _settings.autocast(tensor.device.type)


def accumulate(total: Parts, terms: Sequence[Tensor]) -> Parts:
    """A running sum, which is the caller's own, in the precision of sums from the second term on."""
    return [sum_.to(sum_dtype(sum_.dtype)).add_(term) for sum_, term in zip(total, terms, strict=True)]


def _turned(columns: Tensor) -> Tensor:
    """The transpose `(K, n)`, each row contiguous.

    By tiles: a processor turns what its caches hold two to five times faster than a large matrix at once.
    """
    if columns.stride(0) == 1 or columns.device.type != "cpu" or len(columns) <= _TILE:
        return columns.T if columns.stride(0) == 1 else columns.T.contiguous()
    rows = columns.new_empty(columns.T.shape)
    for start in range(0, len(columns), _TILE):
        rows[:, start : start + _TILE] = columns[start : start + _TILE].T
    return rows


class Vectors(NamedTuple):
    """Vectors as they were given: their spelling, and their parts (`number` is None for a single one).

    `tree` is the structure in which results like them are given back.
    """

    kind: Literal["flat", "columns", "structure"]
    parts: Parts
    number: int | None
    tree: _tree.Tree


class Space:
    """One side of an operator.

    Attributes:
        names: A readable name for each leaf.
        shapes: The shape of each leaf.
        size: The number of entries, D.
        dtype: The dtype of flat vectors: that of the leaves, promoted.
        device: Where the vectors live.
        tree: The structure of the point.
    """

    __slots__ = ("_likes", "_meaning", "_sizes", "device", "dtype", "names", "shapes", "size", "tree")

    def __init__(self, likes: Sequence[Tensor], names: Sequence[str], tree: _tree.Tree, meaning: str) -> None:
        self.names = list(names)
        self.shapes = [like.shape for like in likes]
        self._sizes = [shape.numel() for shape in self.shapes]
        self.size = sum(self._sizes)
        self.dtype = likes[0].dtype
        for like in likes:
            self.dtype = torch.promote_types(self.dtype, like.dtype)
        self.device = likes[0].device
        if any(like.device != self.device for like in likes):
            raise InputError(
                f"{meaning}: its tensors are on several devices "
                f"({', '.join(sorted({str(like.device) for like in likes}))}); an operator needs them on one."
            )
        # Shapes without memory: a space must not keep anything of the user's alive.
        self._likes = [torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape) for like in likes]
        self.tree = tree
        self._meaning = meaning

    @classmethod
    def of(cls, where: Where) -> Space:
        """The space of vectors like a point."""
        return cls(where.tensors, where.names, where.tree(), f"like {where.name}")

    @classmethod
    def line(cls, like: Tensor, name: str = "x") -> Space:
        """The space of vectors like one tensor."""
        return cls([like], [name], _tree.LEAF, f"like {name}")

    def only(self, chosen: Sequence[int]) -> Space:
        """The space of some of the leaves: vectors are dicts by name."""
        names = [self.names[index] for index in chosen]
        tree = _tree.Branch(dict, tuple(names), (_tree.LEAF,) * len(names))
        return Space([self._likes[index] for index in chosen], names, tree, f"a dict with keys {names}")

    def like(self, other: Space) -> bool:
        """Whether vectors of the other space are vectors of this one, with their leaves in the same order."""
        same = self.shapes == other.shapes and _tree.difference(self.tree, other.tree, "") is None
        return same and _tree.paths(self.tree, "") == _tree.paths(other.tree, "")

    @property
    def flat(self) -> bool:
        """Whether a vector is a single tensor of one dimension, so that structure and flat spelling are one."""
        return self.tree is _tree.LEAF and len(self.shapes[0]) == 1

    def parse(self, value: Any, name: str = "v") -> Vectors:
        """Recognise a spelling, check it, and split it into parts."""
        if _arguments.LOADED_BY in sys.modules:
            _arguments.check_vectors(value, name)
        if type(value) is not dict or not all(map(_is_tensor, value.values())):  # as nearly every dict's are
            value = self.as_tensors(value, name)
        if isinstance(value, Tensor) and (self.flat or (0 < value.ndim <= 2 and value.shape[0] == self.size)):
            return self._parse_flat(value, name)
        if isinstance(value, Tensor) and self.tree is not _tree.LEAF:
            raise InputError(f"{name}: {self._wrong_shape(value)}")
        tree = listing(value, self.tree, len(self.shapes)) or self.tree
        parts, count = structured(value, tree, self._likes, name, f"{self._meaning}, or flat: ({self.size},)")
        return Vectors("structure", parts, count, tree)

    def as_tensors(self, value: Any, name: str = "v") -> Any:
        """NumPy arrays, also in a container, and lists of numbers as tensors; anything else as it is."""
        return as_tensors(value, self.dtype, self.device, name)

    def _parse_flat(self, value: Tensor, name: str) -> Vectors:
        check_dense(value, name)
        if value.ndim not in (1, 2) or value.shape[0] != self.size:
            raise InputError(f"{name}: {self._wrong_shape(value)}")
        if value.dtype != self.dtype or value.device != self.device:
            raise InputError(
                f"{name}: is {value.dtype} on {value.device}, expected {self.dtype} on {self.device}; "
                f"convert it: v.to(H.device, H.dtype)."
            )
        if value.ndim == 1:
            return Vectors("flat", self.split(value), None, self.tree)
        return Vectors("columns", [value], value.shape[1], self.tree)

    def _wrong_shape(self, value: Tensor) -> str:
        turned = value.ndim == 2 and value.shape[1] == self.size
        advice = "; several vectors are columns: give v.T" if turned else ""
        structure = "" if self.flat else f", or a vector {self._meaning}"
        return (
            f"has shape {tuple(value.shape)}, expected ({self.size},), ({self.size}, K) for K vectors"
            f"{structure}{advice}."
        )

    def split(self, flat: Tensor) -> Parts:
        """The parts of flat vectors, `(D,)` or rows `(K, D)`: views, unless dtypes are mixed."""
        lead = flat.shape[:-1]
        if len(self._likes) == 1:
            whole = flat.reshape((*lead, *self.shapes[0]))
            return [whole if whole.dtype == self.dtype else whole.to(self.dtype)]
        return [
            piece.reshape((*lead, *like.shape)).to(like.dtype)
            for piece, like in zip(self.pieces(flat), self._likes, strict=True)
        ]

    def pieces(self, flat: Tensor) -> Parts:
        """The entries of each leaf in flat vectors, `(D,)` or rows `(K, D)`, as they are: views."""
        return list(flat.split(self._sizes, dim=-1))

    def rows(self, columns: Tensor) -> Parts:
        """The parts of columns `(D, K)`."""
        pieces = columns.split(self._sizes, dim=0)
        return [
            _turned(piece).reshape((piece.shape[1], *like.shape)).to(like.dtype)
            for piece, like in zip(pieces, self._likes, strict=True)
        ]

    def turned_at_once(self, least: int) -> int:
        """How many vectors to turn from columns into rows in one go: some `TURNED_BYTES`, but at least so many."""
        return max(least, TURNED_BYTES // max(1, self.size * self.itemsize()))

    def join_into(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Write the parts of several vectors as the rows of `out`."""
        if any(part.dtype != self.dtype for part in parts):
            out.copy_(self.join(parts, len(out)))
            return
        torch.cat([part.reshape(len(out), -1) for part in parts], dim=1, out=out)

    def join(self, parts: Sequence[Tensor], count: int | None) -> Tensor:
        """Parts as one flat vector `(D,)`, or as rows `(K, D)`."""
        lead = () if count is None else (count,)
        if len(parts) == 1:
            whole = parts[0].reshape((*lead, self.size))
            return whole if whole.dtype == self.dtype else whole.to(self.dtype)
        pieces = [part.reshape((*lead, size)).to(self.dtype) for part, size in zip(parts, self._sizes, strict=True)]
        return torch.cat(pieces, dim=-1)

    def result(self, parts: Sequence[Tensor], tree: _tree.Tree = _tree.LEAF) -> Any:
        """Parts in the structure of the point, or in another of as many leaves."""
        return _tree.rebuild(tree or self.tree, iter(parts))

    def units(self, start: int, stop: int) -> Tensor:
        """Some of the unit vectors, as rows."""
        rows = torch.zeros((stop - start, self.size), dtype=self.dtype, device=self.device)
        rows[:, start:stop].fill_diagonal_(1)
        return rows

    def take(self, parts: Parts, count: int | None, source: Space) -> Parts:
        """The parts of vectors of another space of the same size as parts of this one."""
        return parts if source.shapes == self.shapes else self.split(source.join(parts, count))

    def numbers_of(self, patterns: Sequence[str]) -> list[int]:
        """The numbers of the leaves whose names match."""
        chosen: set[int] = set()
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise InputError(
                    f"block: got a {type(pattern).__name__}, expected names of leaves: {', '.join(self.names[:6])}."
                )
            found = {index for index, name in enumerate(self.names) if _matches(name, pattern)}
            if not found:
                near = difflib.get_close_matches(pattern.rstrip(".*"), self.names, n=3, cutoff=0.4) or self.names[:6]
                raise InputError(f"block: {pattern!r} matches no leaf. Near: {', '.join(near)}.")
            chosen |= found
        return sorted(chosen)

    def zeros(self, count: int | None = None) -> Parts:
        """The parts of a zero vector, or of `count` of them."""
        lead = () if count is None else (count,)
        return [torch.zeros((*lead, *like.shape), dtype=like.dtype, device=like.device) for like in self._likes]

    def zeros_flat(self, size: int) -> Tensor:
        """A line of zeros, in the dtype of flat vectors."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def empty(self, count: int) -> Parts:
        """Room for the parts of `count` vectors."""
        return [torch.empty((count, *like.shape), dtype=like.dtype, device=like.device) for like in self._likes]

    def itemsize(self) -> int:
        """Bytes of one entry of a flat vector."""
        return torch.empty((), dtype=self.dtype, device="cpu").element_size()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _matches(name: str, pattern: str) -> bool:
    if name == pattern:  # names like x[0] are no patterns
        return True
    keys = re.findall(r"\['?([^\]]*?)'?\]|\.(\w+)", name) if "[" in name else []
    name = ".".join(key or field for key, field in keys) or name  # x['a'][0] may be called a.0
    while name:
        if fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]
    return False


# --- a product in the spelling of its vector: one vector, or several, some at a time ----------------------------------


Product = Callable[[Parts, "int | None"], Parts]
"""A v, for the parts of one vector (the number is None), or of so many stacked ones."""
Chunk = Callable[[int], int]
"""How many of so many vectors one product should take."""


def apply(v: Any, operator: Any, live: str | None = None) -> Any:
    """The product with a vector, or with several, in the spelling of `v`; detached, and `live` as for `say_detached`.

    Where `live` is None, the product is a step on the way to something of which that has been said.
    """
    domain, target = operator._domain, operator._range
    kind, parts, count, tree = domain.parse(v)
    requiring = any(part.requires_grad for part in parts)
    if live is not None:
        say_detached("A @ v", live or ("v requires grad" if requiring else ""))
    if requiring:
        _call.refuse_transforms()
        parts = [part.detach() for part in parts]
    back = tree if target is domain or target.like(domain) else target.tree
    if count is None:
        found = operator._product(parts, None)
        return target.join(found, None) if kind == "flat" else target.result(found, back)
    fixed = operator._fixed()  # for all of them
    with one_look():
        if kind == "columns":
            return _apply_to_columns(parts[0], fixed._chunk(count), fixed._product, domain, target).T
        results = target.empty(count)
        for start, stop in _chunks(count, fixed._chunk(count)):
            found = _some(parts, start, stop, fixed._product)
            for result, part in zip(results, found, strict=True):
                result[start:stop] = part
        return target.result(results, back)


def _apply_to_columns(columns: Tensor, size: int, product: Product, domain: Space, target: Space) -> Tensor:
    """Products with columns `(D, K)`, as rows `(K, M)`."""
    count = columns.shape[1]
    rows = columns.new_empty((count, target.size), dtype=target.dtype)
    block = domain.turned_at_once(size)
    for first in range(0, count, block):
        some = domain.rows(columns[:, first : first + block])
        for start, stop in _chunks(min(block, count - first), size):
            target.join_into(rows[first + start : first + stop], _some(some, start, stop, product))
    return rows


def _chunks(count: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _some(parts: Parts, start: int, stop: int, product: Product) -> Parts:
    """Products of some of the vectors. One that stands alone is not stacked."""
    if stop - start == 1:
        return [part.unsqueeze(0) for part in product([part[start] for part in parts], None)]
    return product([part[start:stop] for part in parts], stop - start)


def columns_of(product: Product, domain: Space, target: Space, chunk: Chunk) -> Tensor:
    """Products with the unit vectors, each as a row: `(D, M)`."""
    rows = torch.empty((domain.size, target.size), dtype=target.dtype, device=target.device)
    size = chunk(domain.size)
    with one_look():
        for start, stop in _chunks(domain.size, size):
            target.join_into(rows[start:stop], product(domain.split(domain.units(start, stop)), stop - start))
    return rows


WAYS = {
    "A @ v": "hodiff.hvp, hodiff.jvp or hodiff.vjp with create_graph=True; of a matrix, PyTorch's own product",
    "A.dense()": "hodiff.hessian(..., matrix=True) or hodiff.jacobian, with create_graph=True; of a matrix, the matrix",
    "A.to_scipy()": "none by NumPy's arrays; hodiff.hvp, hodiff.jvp or hodiff.vjp with create_graph=True",
    "A.value": "the function itself, or hodiff.value_and_grad with create_graph=True",
    "A.gradient": "hodiff.grad with create_graph=True",
    "trace": "create_graph=True, of a hodiff.HessianOperator, its blocks, sums and multiples; of a matrix, torch.trace",
    "eigsh": (
        "create_graph=True, of a hodiff.HessianOperator, its blocks, sums and multiples; of a matrix, "
        "torch.linalg.eigvalsh"
    ),
    "diagonal": "hodiff.hessian_diagonal with create_graph=True; of a matrix, torch.diagonal",
    "solve": (
        "hodiff.implicit.root(lambda x: A x - b, found.value), or hodiff.implicit.argmin(lambda x: x @ (A x) / 2 - "
        "b @ x, found.value) of a symmetric operator; of a small matrix, torch.linalg.solve"
    ),
    "logdet": "torch.logdet of hodiff.hessian(..., matrix=True, create_graph=True), or of the matrix",
    "eigs": "torch.linalg.eigvals of hodiff.jacobian(..., create_graph=True), or of the matrix",
    "spectral_radius": "torch.linalg.eigvals of hodiff.jacobian(..., create_graph=True), or of the matrix",
    "spectral_density": (
        "torch.linalg.eigvalsh of hodiff.hessian(..., matrix=True, create_graph=True), or of the matrix"
    ),
}
"""Where the derivative of a detached result is to be had."""


def say_detached(name: str, live: str) -> None:
    """Of a result that is made detached: raise inside the `f` of another hodiff call; warn where it should not be.

    The warning is given once for each line of the caller's, by Python's own rule.

    Args:
        name: The result, a key of `WAYS`.
        live: What requires grad of all that it is computed from, in words; nothing, where nothing does.
    """
    if not torch.is_grad_enabled():
        return
    if _call.inside():
        raise GraphError(
            "an operator's products are detached, so inside the function of another hodiff call they would count as "
            "constants, silently. Use hodiff.hvp(f, x, v) there, or compute the product outside; if a constant is "
            "meant, write `with torch.no_grad():` around it, or create_graph=False where there is one."
        )
    if live:
        _call.refuse_transforms()
        said = "" if "." in name or "@" in name else "create_graph=False, "
        warnings.warn(
            f"{name}: the result is detached, although {live}: it counts as a constant in what is computed from it. "
            f"For its derivative: {WAYS[name]}. If a constant is meant, say so: {said}.detach() on what requires grad, "
            f"or torch.no_grad().",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )
