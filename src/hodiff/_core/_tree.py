"""Containers of tensors, in our own few lines (PyTorch has no public pytree); vectors as
they are given; leaves of ours.

A container is a tuple, namedtuple, list or dict, nested at will. Everything else is a leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hodiff.errors import InputError

__all__ = [
    "LEAF",
    "Leaves",
    "Tree",
    "Vectors",
    "describe",
    "difference",
    "flatten",
    "is_container",
    "leaves_like",
    "mark_as_parameter",
    "memory_of",
    "paths",
    "rebuild",
    "reordered",
    "tree_map",
]


class Branch(NamedTuple):
    """The construction of one container: its kind, the keys of its children, and their shapes."""

    template: Any
    keys: tuple[Any, ...]
    children: tuple[Tree, ...]


Tree = Branch | None
"""The shape of a container; None is a leaf."""

LEAF: None = None

DEEPEST = 100
"""Containers may be nested so deep; one that holds itself would be walked for ever."""


def is_container(value: Any) -> bool:
    """Whether `value` is a container that hodiff looks into."""
    return isinstance(value, (tuple, list, dict))


def flatten(value: Any, name: str = "x") -> tuple[list[Any], list[str], Tree]:
    """The leaves of `value`, a readable path for each (`x['w'][0]`), and the tree to rebuild it."""
    if not is_container(value):
        return [value], [name], LEAF
    leaves: list[Any] = []
    names: list[str] = []
    tree = _walk(value, name, leaves, names)
    return leaves, names, tree


def _walk(value: Any, path: str, leaves: list[Any], names: list[str], depth: int = 0) -> Tree:
    if not is_container(value):
        leaves.append(value)
        names.append(path)
        return LEAF
    if depth > DEEPEST:
        raise InputError(
            f"{path[: path.find('[')]}: containers are nested more than {DEEPEST} deep; "
            "does one contain itself?"
        )
    if isinstance(value, dict):
        keys = tuple(value)
        paths = [f"{path}[{key!r}]" for key in keys]
        items = list(value.values())
    else:
        items = list(value)
        fields = getattr(value, "_fields", None)
        keys = fields if fields else tuple(range(len(items)))
        paths = [f"{path}.{key}" if fields else f"{path}[{key}]" for key in keys]
    children = tuple(
        _walk(item, at, leaves, names, depth + 1) for item, at in zip(items, paths, strict=True)
    )
    return Branch(_template(value), keys, children)


def _template(value: Any) -> Any:
    """The container as `_build` needs it: its type,
    or an empty copy where the type alone is not enough.
    """
    if isinstance(value, dict) and type(value) is not dict:
        empty = copy.copy(value)
        empty.clear()
        return empty
    return type(value)


def rebuild(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Put `leaves` (an iterator, in order) back into the shape of `tree`."""
    if tree is None:
        return next(leaves)
    if not any(tree.children):  # all of them leaves
        return _build(tree, [*islice(leaves, len(tree.children))])
    return _build(tree, [rebuild(child, leaves) for child in tree.children])


def _build(branch: Branch, items: list[Any]) -> Any:
    template = branch.template
    if isinstance(template, dict):
        filled = copy.copy(template)
        for key, item in zip(branch.keys, items, strict=True):  # transformers forbids `update`
            filled[key] = item
        return filled
    if template is dict:
        return dict(zip(branch.keys, items, strict=True))
    if hasattr(template, "_fields"):
        return template(*items)
    return template(items)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to each leaf of `value`."""
    leaves, _, tree = flatten(value)
    return rebuild(tree, iter([function(leaf) for leaf in leaves]))


def difference(expected: Tree, got: Tree, path: str) -> str | None:
    """The first place where two trees differ, in words;
    None when they are alike (lists and tuples are not).
    """
    if expected is None or got is None:
        if expected is got:
            return None
        return f"{path} is {describe(got)}, expected {describe(expected)}"
    if is_dict(expected) != is_dict(got) or (
        not is_dict(expected) and expected.template is not got.template
    ):
        return f"{path} is {describe(got)}, expected {describe(expected)}"
    if set(expected.keys) != set(got.keys) or len(expected.keys) != len(got.keys):
        return f"{path} has {describe(got)}, expected {describe(expected)}"
    order = dict(zip(got.keys, got.children, strict=True))
    for key, child in zip(expected.keys, expected.children, strict=True):
        inner = difference(child, order[key], f"{path}[{key!r}]")
        if inner:
            return inner
    return None


def is_dict(branch: Branch) -> bool:
    """Whether the branch is a dict of any kind."""
    return branch.template is dict or isinstance(branch.template, dict)


def describe(tree: Tree) -> str:
    """A container's kind and size, for messages."""
    if tree is None:
        return "a single tensor"
    if is_dict(tree):
        return f"a dict with keys {list(tree.keys)}"
    return f"a {tree.template.__name__} of {len(tree.keys)}"


def rebuild_tree(tree: Tree, expansions: Iterator[Tree]) -> Tree:
    """`tree` with each leaf replaced by the next of `expansions`."""
    if tree is None:
        return next(expansions)
    return tree._replace(children=tuple(rebuild_tree(child, expansions) for child in tree.children))


def leaves_like(tree: Tree, value: Any) -> list[Any]:
    """The leaves of `value` in the order of `tree` (dicts are matched by key, not by position)."""
    if tree is None:
        return [value]
    items = [value[key] for key in tree.keys] if is_dict(tree) else list(value)
    return [
        leaf
        for child, item in zip(tree.children, items, strict=True)
        for leaf in leaves_like(child, item)
    ]


def reordered(leaves: list[Any], got: Tree, tree: Tree) -> list[Any]:
    """The leaves of a container in the order of a tree that it differs from in
    the order of keys alone.
    """
    places = rebuild(got, iter(range(len(leaves))))
    return [leaves[place] for place in leaves_like(tree, places)]


def paths(tree: Tree, name: str) -> list[str]:
    """A readable path for each leaf of `tree`."""
    if tree is None:
        return [name]
    return [
        path
        for key, child in zip(tree.keys, tree.children, strict=True)
        for path in paths(child, f"{name}[{key!r}]")
    ]


# --- vectors like a point, as they were given ----------------------------------------------------

Leaves = list[Tensor]
"""A vector inside: one tensor for each leaf of the point; of `K` vectors,
with one more dimension in front.
"""
NO_BATCH = torch.Size()
form = attrgetter("shape", "dtype", "device", "layout")
"""All in which two dense tensors of one class may differ, but their numbers."""


class Vectors(NamedTuple):
    """Vectors as they were given: their spelling, and their parts.

    Attributes:
        kind: Whether they were flat, the columns of a matrix, or had the structure of the point;
            or, inside, flat rows.
        parts: A tensor for each leaf, or, for an operator, the columns as they are.
        number: How many there are; None for a single one.
        tree: The structure in which results like them are given back.
    """

    kind: Literal["flat", "columns", "structure", "rows"]
    parts: Leaves
    number: int | None
    tree: Tree

    def like(self, results: Sequence[Tensor]) -> Any:
        """Results like the point, one for each leaf, in the spelling of the vectors."""
        if self.kind == "structure":
            return results[0] if self.tree is LEAF else rebuild(self.tree, iter(results))
        if self.kind == "flat":
            return join(results, None, promoted(results))
        return self.arranged(results, self.tree)

    def arranged(self, results: Sequence[Tensor], tree: Tree) -> Any:
        """Results in a structure of their own; those of columns are columns,
        whatever the structure.
        """
        if self.kind == "columns":
            return join(results, self.number, promoted(results)).T.contiguous()
        return results[0] if tree is LEAF else rebuild(tree, iter(results))

    def stacked(self) -> Leaves:
        """The parts of several, a single one being a stack of one; raise where there is none."""
        if self.number == 0:
            raise InputError("vectors: got none, expected at least one.")
        return [part.unsqueeze(0) for part in self.parts] if self.number is None else self.parts


def join(
    parts: Sequence[Tensor], count: int | None, dtype: torch.dtype, batch: torch.Size = NO_BATCH
) -> Tensor:
    """Parts as one flat vector, or, of so many stacked ones, as rows."""
    lead = batch if count is None else (count, *batch)
    pieces = [part.reshape((*lead, part.shape[len(lead) :].numel())).to(dtype) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of flat vectors: that of the leaves, promoted where they differ."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


# --- leaves in place of tensors -------------------------------------------------------------------


def mark_as_parameter(stand_in: Tensor, theirs: Tensor) -> None:
    """Let `isinstance(p, nn.Parameter)` say of a stand-in what it says of the user's tensor:
    `f` may ask.
    """
    if theirs.__class__ is nn.Parameter or "_is_param" in theirs.__dict__:
        stand_in.__dict__["_is_param"] = True  # pyright: ignore[reportIndexIssue]


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` detached, in another floating-point dtype if one is given."""
    still = tensor.detach()
    return still.to(dtype) if dtype is not None and still.is_floating_point() else still


def memory_of(tensor: Tensor) -> int:
    """An identity of the memory under a tensor: equal where two share it."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass that has none
        return id(tensor)
