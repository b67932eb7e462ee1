"""*Where* a derivative is taken: any accepted point, as a flat list of tensors and the way back.

A point is a tensor, a nested container of tensors, an `nn.Module` (its trainable parameters), a
`Selection` of them, or a container that holds modules. `Where` is the only code that knows the
difference; everything above works on lists of leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _sharded, _tree
from hodiff._core._assembly import Assembly, plain
from hodiff._core._selection import Selection, check_real
from hodiff._core._vectors import Vectors, match, structured
from hodiff.errors import InputError


class Owned(NamedTuple):
    """Some leaves that are parameters of one module: where they start, under which names, and how it is made."""

    module: nn.Module
    start: int
    names: tuple[str, ...]
    assembly: Assembly


class Where:
    """A parsed point: its leaves in a flat list, and how to put things back into the caller's structure.

    Attributes:
        name: What the point is called in messages.
        tensors: The caller's own tensors, in order.
        names: A readable name for each.
        owned: The modules among the point, with the slice of `tensors` that is theirs.
    """

    __slots__ = ("_argument_items", "_argument_tree", "_result_tree", "name", "names", "owned", "tensors")

    def __init__(self, value: Any, name: str = "x") -> None:
        self.name = name
        if isinstance(value, Tensor):  # the commonest point, kept free of any overhead
            _checks.check_real_tensor(value, name)
            self.tensors = [value]
            self.names = [name]
            self.owned = []
            self._argument_items = [None]
            self._argument_tree = _tree.LEAF
            self._result_tree = _tree.LEAF
            return
        if value is _checks.MISSING:
            raise InputError(f"{name}: missing. hodiff evaluates at a point: hodiff.{_checks.called()}(f, {name}).")
        self._begin()
        if isinstance(value, (nn.Module, Selection)):
            self._argument_items, self._argument_tree = [_given(value)], _tree.LEAF
            self._result_tree = self._add_module(value, name, single=True)
            return
        items, paths, tree = _tree.flatten(value, name)
        _checks.check_container(tree, len(items), name)
        self._argument_tree, self._argument_items = tree, [_given(item) for item in items]
        expansions = [self._add(item, path) for item, path in zip(items, paths, strict=True)]
        self._result_tree = _tree.rebuild_tree(tree, iter(expansions))
        self._check_modules()

    def _begin(self) -> None:
        """Without leaves, to which those of each part are added."""
        self.tensors = []
        self.names = []
        self.owned = []
        self._argument_items = []

    def _add(self, item: Any, path: str) -> _tree.Tree:
        """Append the leaves of one item; return the tree of its result."""
        if isinstance(item, (nn.Module, Selection)):
            return self._add_module(item, path, single=False)
        _checks.check_real_tensor(item, path)
        self.tensors.append(item)
        self.names.append(path)
        return _tree.LEAF

    def _add_module(self, item: nn.Module | Selection, path: str, *, single: bool) -> _tree.Tree:
        module = item if isinstance(item, nn.Module) else item.module
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{path}: is a TorchScript module, whose parameters cannot be replaced; pass the eager module."
            )
        assembly = Assembly.of(module)
        if _sharded.LOADED_BY in sys.modules:
            _sharded.check_modules(assembly.modules, path)
        pairs = _chosen(item, assembly) if isinstance(item, Selection) else assembly.trainable()
        if not pairs:
            raise InputError(
                f"{path}: {type(module).__name__} has no trainable parameter "
                f"(none that is floating point with requires_grad=True). To differentiate in frozen ones, call "
                f"requires_grad_(True) on them before."
            )
        check_real(pairs)
        names = tuple([name for name, _ in pairs])
        for _, parameter in pairs:
            if parameter.__class__ is nn.parameter.UninitializedParameter:
                raise InputError(f"{path}: has uninitialised (lazy) parameters; run one forward pass first.")
            if parameter.is_meta:
                _checks.check_real_tensor(parameter, path)
        self.owned.append(Owned(module, len(self.tensors), names, assembly))
        self.tensors += [parameter for _, parameter in pairs]
        self.names += names if single else [f"{path}.{name}" for name in names]
        return _tree.Branch(dict, names, (_tree.LEAF,) * len(names))

    def _check_modules(self) -> None:
        if len(self.owned) < 2:  # in one module each parameter counts once
            return
        claimed: dict[int, str] = {}
        for owned in self.owned:
            for index in range(owned.start, owned.start + len(owned.names)):
                key, name = id(self.tensors[index]), self.names[index]
                if key in claimed:
                    raise InputError(f"{self.name}: parameter {name!r} is given twice (also as {claimed[key]!r}).")
                claimed[key] = name

    @classmethod
    def joined(cls, *parts: Where) -> Where:
        """Several points as one, a tuple of them, each keeping its name in messages."""
        whole = cls.__new__(cls)
        whole.name = ", ".join(part.name for part in parts)
        whole._begin()
        for part in parts:
            start = len(whole.tensors)
            whole.owned += [owned._replace(start=owned.start + start) for owned in part.owned]
            whole.tensors += part.tensors
            whole.names += part.names
            whole._argument_items += part._argument_items
        keys = tuple(range(len(parts)))
        whole._argument_tree = _tree.Branch(tuple, keys, tuple(part._argument_tree for part in parts))
        whole._result_tree = _tree.Branch(tuple, keys, tuple(part._result_tree for part in parts))
        whole._check_modules()
        return whole

    def argument(self, leaves: Sequence[Any]) -> Any:
        """What `f` receives: the caller's structure around `leaves`, modules as themselves."""
        if self._argument_tree is _tree.LEAF:
            return self._argument_items[0] if self.owned else leaves[0]
        theirs = {i for owned in self.owned for i in range(owned.start, owned.start + len(owned.names))}
        free = iter([leaf for index, leaf in enumerate(leaves) if index not in theirs])
        items = [item if isinstance(item, (nn.Module, Selection)) else next(free) for item in self._argument_items]
        return _tree.rebuild(self._argument_tree, iter(items))

    def result(self, leaves: Iterable[Any]) -> Any:
        """`leaves` in the shape of the caller's point; a dict by parameter name for a module."""
        return _tree.rebuild(self._result_tree, iter(leaves))

    def tree(self) -> _tree.Tree:
        """The structure of results."""
        return self._result_tree

    def given_tree(self) -> _tree.Tree:
        """The structure of the point as it was given, where a module is one leaf."""
        return self._argument_tree

    def match(self, value: Any, name: str) -> tuple[list[Tensor], int | None]:
        """The leaves of a vector with the structure of this point, and how many vectors they hold (None: just one)."""
        if isinstance(value, Mapping) and not isinstance(value, dict):
            value = dict(value)
        return structured(value, self._result_tree, self.tensors, name, f"like {self.name}")

    def vectors(self, value: Any, name: str) -> Vectors:
        """Vectors in any spelling, like this point."""
        return match(value, self._result_tree, self.tensors, name, f"like {self.name}")

    def duplicate(self) -> str | None:
        """The name of a tensor that is given twice, if one is."""
        if len(self.tensors) < 2:
            return None
        seen: set[int] = set()
        for tensor, name in zip(self.tensors, self.names, strict=True):
            if id(tensor) in seen:
                return name
            seen.add(id(tensor))
        return None


def _given(item: Any) -> Any:
    """What `f` gets for an item: of a compiled module the one behind the wrapper, which runs eagerly and is silent."""
    return plain(item) if isinstance(item, nn.Module) else item


def _chosen(selection: Selection, assembly: Assembly) -> list[tuple[str, Tensor]]:
    """The parameters of a selection, as the module has them now."""
    wanted = set(selection)
    found = {path: parameter for _, _, path, parameter in assembly.slots if path in wanted}
    return [(name, found[name] if name in found else selection[name]) for name in selection]
