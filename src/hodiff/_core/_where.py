"""*Where* a derivative is taken: any accepted point, as a flat list of tensors and the way back.

A point is a tensor, a nested container of tensors, an `nn.Module` (its trainable parameters), a
`Selection` of them, or a container that holds modules. `Where` is the only code that knows the
difference; everything above works on lists of leaves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _swap, _tree
from hodiff.errors import InputError


class Selection(Mapping[str, Tensor]):
    """Some parameters of a module by name; made by `hodiff.select`.

    A mapping from name to parameter. It reads the module each time, so that inside `f` it shows the
    tensors being differentiated.

    Examples:
        >>> import torch, hodiff
        >>> chosen = hodiff.select(torch.nn.Linear(2, 1), "bias")
        >>> list(chosen), chosen["bias"].shape
        (['bias'], torch.Size([1]))
    """

    __slots__ = ("_names", "module")

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.module = module
        self._names = tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        owner, _, last = name.rpartition(".")
        parameter = plain(self.module).get_submodule(owner)._parameters[last]
        if parameter is None:
            raise KeyError(name)
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Selection({type(self.module).__name__}, {list(self._names)})"


def select(module: nn.Module, *patterns: str, exclude: str | Sequence[str] = ()) -> Selection:
    """Some trainable parameters of a module, as a place to differentiate in.

    A pattern is matched, case-sensitively, by `fnmatch` against full dotted parameter names. The
    name of a submodule selects every parameter below it. No pattern at all means every parameter.

    Args:
        module: The module whose parameters are chosen.
        *patterns: Parameter or submodule names, with `*`, `?` and `[...]`.
        exclude: A pattern, or several, whose matches are left out.

    Returns:
        A mapping from name to parameter, in the module's order; a tied parameter appears once, under
        its first name. Give it as *x* to any function; `f` receives the mapping, and its `.module`
        is the module. Results are dicts of the same names; each has its parameter's shape.

    Raises:
        InputError: A pattern that matches nothing (near matches are listed), or only frozen parameters.

    Cost:
        No derivative pass; one walk over the module.

    Examples:
        >>> import torch, hodiff
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> list(hodiff.select(model, "2.*"))
        ['2.weight', '2.bias']
        >>> list(hodiff.select(model, "*.weight", exclude="0"))
        ['2.weight']
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: is a {type(module).__name__}, expected an nn.Module.")
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    first_names = _first_names(module)
    trainable = {name for name, parameter in parameters(module)}
    chosen: set[str] = set()
    for pattern in patterns or ("*",):
        matched = {first_names[name] for name in first_names if _matches(name, pattern)}
        if not matched:
            raise InputError(_no_match(module, pattern, list(first_names)))
        if matched.isdisjoint(trainable):
            raise InputError(
                f"pattern {pattern!r}: matches only frozen parameters ({', '.join(sorted(matched))}); "
                f"set requires_grad_(True) on those to differentiate in."
            )
        chosen |= matched & trainable
    dropped: set[str] = set()
    for pattern in exclude:
        matched = {first_names[name] for name in first_names if _matches(name, pattern)}
        if not matched:
            raise InputError(f"exclude: {_no_match(module, pattern, list(first_names))}")
        dropped |= matched
    names = [name for name, _ in parameters(module) if name in chosen - dropped]
    if not names:
        raise InputError(f"exclude={exclude!r} leaves no parameter of those that {patterns!r} selects.")
    return Selection(module, names)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter, mapped to the first name of that parameter (they differ when tied)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in plain(module).named_parameters(remove_duplicate=False)
    }


def _matches(name: str, pattern: str) -> bool:
    while name:
        if fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]  # a submodule's name selects all below it
    return False


def _no_match(module: nn.Module, pattern: str, names: list[str]) -> str:
    known = names + [name for name, _ in plain(module).named_modules() if name]
    near = difflib.get_close_matches(pattern.rstrip(".*"), known, n=3, cutoff=0.4)
    advice = f"Near matches: {', '.join(near)}." if near else f"Its parameters: {', '.join(names[:8])}."
    return f"pattern {pattern!r}: matches no parameter of {type(module).__name__}. {advice}"


def plain(module: nn.Module) -> nn.Module:
    """The module behind a `torch.compile` wrapper, whose names and parameters are the ones people know."""
    inner = getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None
    return inner if isinstance(inner, nn.Module) else module


def parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The trainable parameters by name, tied ones once; frozen and integer ones are left out."""
    with _swap.reading(module):
        return [
            (name, parameter)
            for name, parameter in plain(module).named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        ]


class Owned(NamedTuple):
    """Some leaves that are parameters of one module: where they start, and under which names."""

    module: nn.Module
    start: int
    names: tuple[str, ...]


class Where:
    """A parsed point: its leaves in a flat list, and how to put things back into the caller's structure.

    Attributes:
        tensors: The caller's own tensors, in order.
        names: A readable name for each.
        owned: The modules among the point, with the slice of `tensors` that is theirs.
    """

    __slots__ = ("_argument_items", "_argument_tree", "_result_tree", "name", "names", "owned", "tensors")

    def __init__(self, value: Any, name: str = "x") -> None:
        self.name = name
        if isinstance(value, Tensor):  # the commonest point, kept free of any overhead
            _checks.check_real_tensor(value, name)
            self.tensors, self.names, self.owned = [value], [name], []
            self._argument_items, self._argument_tree, self._result_tree = [None], _tree.LEAF, _tree.LEAF
            return
        if value is _checks.MISSING:
            raise InputError(f"{name}: missing. hodiff evaluates at a point: hodiff.{_checks.called()}(f, {name}).")
        items, paths, tree = _tree.flatten(value, name)
        _checks.check_container(tree, len(items), name)
        self.tensors, self.names, self.owned = [], [], []
        self._argument_tree = tree
        # A compiled module runs eagerly here; give f the module behind the wrapper, whose call says nothing of hooks.
        self._argument_items = [plain(item) if isinstance(item, nn.Module) else item for item in items]
        expansions = [self._add(item, path, single=tree is _tree.LEAF) for item, path in zip(items, paths, strict=True)]
        self._result_tree = _tree.rebuild_tree(tree, iter(expansions))
        self._check_modules()

    def _add(self, item: Any, path: str, *, single: bool) -> _tree.Tree:
        """Append the leaves of one item; return the tree of its result."""
        if isinstance(item, (nn.Module, Selection)):
            module = item if isinstance(item, nn.Module) else item.module
            pairs = parameters(item) if isinstance(item, nn.Module) else _selected(item)
            _check_module(module, pairs, path)
            names = tuple(name for name, _ in pairs)
            self.owned.append(Owned(module, len(self.tensors), names))
            self.tensors += [parameter for _, parameter in pairs]
            self.names += names if single else [f"{path}.{name}" for name in names]
            return _tree.Branch(dict, names, (_tree.LEAF,) * len(names))
        _checks.check_real_tensor(item, path)
        self.tensors.append(item)
        self.names.append(path)
        return _tree.LEAF

    def _check_modules(self) -> None:
        claimed: dict[int, str] = {}
        for owned in self.owned:
            for index in range(owned.start, owned.start + len(owned.names)):
                key, name = id(self.tensors[index]), self.names[index]
                if key in claimed:
                    raise InputError(f"{self.name}: parameter {name!r} is given twice (also as {claimed[key]!r}).")
                claimed[key] = name

    def argument(self, leaves: Sequence[Any]) -> Any:
        """What `f` receives: the caller's structure around `leaves`, modules as themselves."""
        if self._argument_tree is _tree.LEAF and not self.owned:
            return leaves[0]
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

    def match(self, value: Any, name: str) -> tuple[list[Tensor], int | None]:
        """The leaves of a vector like this point, and how many vectors they hold (None: just one)."""
        if isinstance(value, Mapping) and not isinstance(value, dict):
            value = dict(value)
        return match(value, self._result_tree, self.tensors, name, f"like {self.name}")

    def duplicate(self) -> str | None:
        """The name of a tensor that is given twice, if one is."""
        seen: set[int] = set()
        for tensor, name in zip(self.tensors, self.names, strict=True):
            if id(tensor) in seen:
                return name
            seen.add(id(tensor))
        return None


def _selected(selection: Selection) -> list[tuple[str, Tensor]]:
    with _swap.reading(selection.module):
        return list(selection.items())


def _check_module(module: nn.Module, pairs: list[tuple[str, Tensor]], path: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{path}: is a TorchScript module, whose parameters cannot be replaced; pass the eager module."
        )
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for _, parameter in pairs):
        raise InputError(f"{path}: has uninitialised (lazy) parameters; run one forward pass first.")
    if not pairs:
        raise InputError(
            f"{path}: {type(module).__name__} has no trainable parameter "
            f"(none that is floating point with requires_grad=True)."
        )


def match(
    value: Any, tree: _tree.Tree, likes: Sequence[Tensor], name: str, meaning: str
) -> tuple[list[Tensor], int | None]:
    """Check a vector (or several, with one extra leading dimension) against the tensors it must resemble."""
    if tree is None and isinstance(value, Tensor):
        return [value], _count(value, likes[0], name)
    plain_dict = tree is not None and tree.template is dict and type(value) is dict and tuple(value) == tree.keys
    if plain_dict and all(map(_alike, value.values(), likes)):  # as every dict of parameters is
        return list(value.values()), None
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


def _alike(leaf: Any, like: Tensor) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.shape == like.shape
        and leaf.dtype == like.dtype
        and leaf.device == like.device
    )


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


def joined(*parts: Where) -> Where:
    """Several points as one, a tuple of them, each keeping its name in messages."""
    whole = object.__new__(Where)
    whole.name = ", ".join(part.name for part in parts)
    whole.tensors = [tensor for part in parts for tensor in part.tensors]
    whole.names = [name for part in parts for name in part.names]
    keys = tuple(range(len(parts)))
    whole._argument_items = [item for part in parts for item in part._argument_items]
    whole._argument_tree = _tree.Branch(tuple, keys, tuple(part._argument_tree for part in parts))
    whole._result_tree = _tree.Branch(tuple, keys, tuple(part._result_tree for part in parts))
    whole.owned, start = [], 0
    for part in parts:
        whole.owned += [owned._replace(start=owned.start + start) for owned in part.owned]
        start += len(part.tensors)
    whole._check_modules()
    return whole
