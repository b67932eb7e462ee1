"""*Where* a derivative is taken: any accepted point, as a flat list of tensors with the way back.

A point is a tensor, a nested container of tensors, an `nn.Module` (its trainable parameters), a
`Selection` of them, or a container that holds modules. `Where` is the only code that knows the
difference; everything above works on lists of leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from hodiff._core import _arguments, _tree
from hodiff._core._tree import LEAF, Vectors, form
from hodiff.errors import InputError

__all__ = ["Where", "lay_out"]


lay_out: Callable[[Any], Any] = lambda where: None  # noqa: E731 - until `hodiff` puts its own here
"""The layout of a point whose tensors may be sharded over processes; None where they are not."""


class Where:
    """A parsed point: its leaves in a flat list, and how to put things back into the caller's
    structure.

    Attributes:
        name: What the point is called in messages.
        tensors: The caller's own tensors, in order.
        names: A readable name for each.
        module_slices: The modules among the point, with the slice of `tensors` that is theirs.
        tree: The structure of results.
        given_tree: The structure of the point as it was given, where a module is one leaf.
        argument_items: What `f` is given for each item of it: a module or a selection; None for a
            tensor, in whose place a leaf stands.
        shards: Whether tensors may be sharded over processes.
        layout: Where the entries of its tensors are, if processes share them; `tensors` are then
            this process's parts.
    """

    __slots__ = (
        "argument_items",
        "given_tree",
        "layout",
        "module_slices",
        "name",
        "names",
        "shards",
        "tensors",
        "tree",
    )

    def __init__(self, value: Any, name: str = "x", *, shards: bool = False) -> None:
        """Parse a point; with `shards`, also one whose tensors are sharded over processes."""
        self.name = name
        self.layout: Any = None
        self.shards = shards and _arguments.LOADED_BY in sys.modules
        # The commonest point, kept free of any overhead.
        if value.__class__ is Tensor or isinstance(value, Tensor):
            _arguments.check_real_tensor(value, name, shards=self.shards)
            self.tensors = [value]
            self.names = [name]
            self.module_slices = []
            self.argument_items = [None]
            self.given_tree = _tree.LEAF
            self.tree = _tree.LEAF
            if self.shards and value.__class__ not in _arguments.TENSORS:
                self._lay_out()
            return
        self.tensors = []
        self.names = []
        self.module_slices = []
        self.argument_items = []
        from hodiff._core._modules import KINDS, add

        if isinstance(value, KINDS):
            self.given_tree = _tree.LEAF
            self.tree = add(self, value, name, single=True)
            if self.shards:
                self._lay_out()
            return
        items, paths, tree = _tree.flatten(value, name)
        _arguments.check_container(tree, len(items), name)
        self.given_tree = tree
        expansions = [self._add(item, path) for item, path in zip(items, paths, strict=True)]
        self.tree = _tree.rebuild_tree(tree, iter(expansions))
        self._check_modules()
        if self.shards:
            self._lay_out()

    def _lay_out(self) -> None:
        """Let this process's parts stand for tensors that are sharded."""
        modules = [each for of in self.module_slices for each in of.assembly.modules]
        kinds = {*map(type, [*self.tensors, *modules])}
        from hodiff._core._modules import WHOLE

        if not kinds <= WHOLE:
            self.layout = lay_out(self)
            if self.layout is not None:
                self.tensors = self.layout.parts()

    def _add(self, item: Any, path: str) -> _tree.Tree:
        """Append the leaves of one item; return the tree of its result."""
        if item.__class__ is Where:  # see `joined`
            self.module_slices += [
                module_slice._replace(start=module_slice.start + len(self.tensors))
                for module_slice in item.module_slices
            ]
            self.tensors += item.tensors if item.layout is None else item.layout.given
            self.names += item.names
            self.argument_items += item.argument_items
            return item.tree
        from hodiff._core._modules import KINDS, add

        if isinstance(item, KINDS):
            return add(self, item, path, single=False)
        _arguments.check_real_tensor(item, path, shards=self.shards)
        self.tensors.append(item)
        self.names.append(path)
        self.argument_items.append(None)
        return _tree.LEAF

    def _of_modules(self) -> list[int]:
        """The numbers of the leaves that are parameters of modules."""
        return [
            number
            for of in self.module_slices
            for number in range(of.start, of.start + len(of.names))
        ]

    def _check_modules(self) -> None:
        # in one module each parameter counts once
        numbers = self._of_modules() if len(self.module_slices) > 1 else ()
        if twice := self.duplicate(numbers):
            raise InputError(
                f"{self.name}: the parameter {twice[0]!r} is given twice (also as {twice[1]!r})."
            )

    @classmethod
    def joined(cls, *parts: Where) -> Where:
        """Several points as one, a tuple of them, each keeping its name in messages."""
        shards = any(part.layout is not None for part in parts)
        whole = cls(parts, ", ".join(part.name for part in parts), shards=shards)
        whole.given_tree = _tree.rebuild_tree(
            whole.given_tree, iter([part.given_tree for part in parts])
        )
        return whole

    def argument(self, leaves: Sequence[Any]) -> Any:
        """The argument of `f`: the caller's structure around `leaves`, modules as themselves."""
        if self.given_tree is _tree.LEAF:
            return self.argument_items[0] if self.module_slices else leaves[0]
        theirs = {*self._of_modules()}
        free = iter([leaf for index, leaf in enumerate(leaves) if index not in theirs])
        items = [next(free) if item is None else item for item in self.argument_items]
        return _tree.rebuild(self.given_tree, iter(items))

    def result(self, leaves: Iterable[Any]) -> Any:
        """`leaves` in the shape of the caller's point; a dict by parameter name for a module."""
        if self.layout is not None:
            leaves = self.layout.placed(leaves)
        return (
            next(iter(leaves))
            if self.tree is _tree.LEAF
            else _tree.rebuild(self.tree, iter(leaves))
        )

    def parse(self, value: Any, name: str = "v") -> Vectors:
        """Vectors like this point, taken apart: mostly a tensor, of which nothing need be said."""
        alike = self.tree is LEAF and self.layout is None and value.__class__ is Tensor
        if alike and not value.is_nested and form(value) == form(self.tensors[0]):
            return Vectors("structure", [value], None, LEAF)
        return self.space().parse(value, name)

    def space(self) -> Any:
        """The `Space` of vectors like this point."""
        from hodiff._core._vectors import Space

        return Space(self.tensors, self.names, self.tree, f"like {self.name}", layout=self.layout)

    def duplicate(self, numbers: Iterable[int]) -> tuple[str, str] | None:
        """The two names of one of these leaves that is given twice, if one is."""
        first: dict[int, int] = {}
        for number in numbers:
            known = first.setdefault(id(self.tensors[number]), number)
            if known != number:
                return self.names[number], self.names[known]
        return None
