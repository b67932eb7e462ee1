"""*Where* a derivative is taken: any accepted point, as a flat list of tensors with the way back.

A point is a tensor, a nested container of tensors, an `nn.Module` (its trainable parameters), a
`Selection` of them, or a container that holds modules. `Where` is the only code that knows the
difference; everything above works on lists of leaves.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _locks, _tree
from hodiff._core._vectors import Space, matches
from hodiff.errors import InputError

__all__ = ["Selection", "Where", "lay_out", "modules_below", "plain", "select"]


lay_out: Callable[[Any], Any] = lambda where: None  # noqa: E731 - until `hodiff` puts its own here
"""The layout of a point whose tensors may be sharded over processes; None where they are not."""


class ModuleSlice(NamedTuple):
    """Some leaves that are parameters of one module: where they start, under which names,
    and how it is made.
    """

    module: nn.Module
    start: int
    names: tuple[str, ...]
    assembly: Assembly


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
        layout: Where the entries of its tensors are, if processes share them; `tensors` are then
            this process's parts.
    """

    __slots__ = (
        "_argument_items",
        "_shards",
        "given_tree",
        "layout",
        "module_slices",
        "name",
        "names",
        "tensors",
        "tree",
    )

    def __init__(self, value: Any, name: str = "x", *, shards: bool = False) -> None:
        """Parse a point; with `shards`, also one whose tensors are sharded over processes."""
        self.name = name
        self.layout: Any = None
        self._shards = shards and _arguments.LOADED_BY in sys.modules
        # The commonest point, kept free of any overhead.
        if value.__class__ is Tensor or isinstance(value, Tensor):
            _arguments.check_real_tensor(value, name, shards=self._shards)
            self.tensors = [value]
            self.names = [name]
            self.module_slices = []
            self._argument_items = [None]
            self.given_tree = _tree.LEAF
            self.tree = _tree.LEAF
            if self._shards and value.__class__ not in _arguments.TENSORS:
                self._lay_out()
            return
        self.tensors = []
        self.names = []
        self.module_slices = []
        self._argument_items = []
        if isinstance(value, (nn.Module, Selection)):
            self._argument_items, self.given_tree = [_given(value)], _tree.LEAF
            self.tree = self._add_module(value, name, single=True)
            if self._shards:
                self._lay_out()
            return
        items, paths, tree = _tree.flatten(value, name)
        _arguments.check_container(tree, len(items), name)
        self.given_tree = tree
        expansions = [self._add(item, path) for item, path in zip(items, paths, strict=True)]
        self.tree = _tree.rebuild_tree(tree, iter(expansions))
        self._check_modules()
        if self._shards:
            self._lay_out()

    def _lay_out(self) -> None:
        """Let this process's parts stand for tensors that are sharded."""
        kinds = {*map(type, self.tensors)}
        for module_slice in self.module_slices:
            kinds.update(map(type, module_slice.assembly.modules))
        if not kinds <= _arguments.WHOLE:
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
            self._argument_items += item._argument_items
            return item.tree
        self._argument_items.append(_given(item))
        if isinstance(item, (nn.Module, Selection)):
            return self._add_module(item, path, single=False)
        _arguments.check_real_tensor(item, path, shards=self._shards)
        self.tensors.append(item)
        self.names.append(path)
        return _tree.LEAF

    def _add_module(self, item: nn.Module | Selection, path: str, *, single: bool) -> _tree.Tree:
        module = item if isinstance(item, nn.Module) else item.module
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{path} is a TorchScript module, whose parameters cannot be replaced; "
                "pass the eager module."
            )
        assembly = Assembly.of(module)
        if _arguments.may_be_shared():
            _arguments.check_modules(assembly.modules, path, shards=self._shards)
            if self._shards and not _arguments.WHOLE.issuperset(map(type, assembly.modules)):
                for part in assembly.modules:
                    if hasattr(part, "reshard"):  # under `fully_shard`, after a forward pass
                        part.reshard()  # pyright: ignore[reportCallIssue]
                assembly = Assembly.of(module)
        pairs = _chosen(item, assembly) if isinstance(item, Selection) else assembly.trainable()
        if not pairs:
            raise InputError(
                f"{path}: {type(module).__name__} has no trainable parameter (floating-point, with "
                f"requires_grad=True). To differentiate with respect to frozen ones, call "
                f"requires_grad_(True) on them first."
            )
        check_real(pairs)
        names = tuple([name for name, _ in pairs])
        for _, parameter in pairs:
            if parameter.__class__ is nn.parameter.UninitializedParameter:
                raise InputError(
                    f"{path} has uninitialized (lazy) parameters; run one forward pass first."
                )
            if parameter.is_meta or parameter.__class__ not in _arguments.TENSORS:
                _arguments.check_real_tensor(parameter, path, shards=self._shards)
        self.module_slices.append(ModuleSlice(module, len(self.tensors), names, assembly))
        self.tensors += [parameter for _, parameter in pairs]
        self.names += names if single else [f"{path}.{name}" for name in names]
        return _tree.Branch(dict, names, (_tree.LEAF,) * len(names))

    def _check_modules(self) -> None:
        if len(self.module_slices) < 2:  # in one module each parameter counts once
            return
        claimed: dict[int, str] = {}
        for module_slice in self.module_slices:
            for index in range(module_slice.start, module_slice.start + len(module_slice.names)):
                key, name = id(self.tensors[index]), self.names[index]
                if key in claimed:
                    raise InputError(
                        f"{self.name}: the parameter {name!r} is given twice (also as "
                        f"{claimed[key]!r})."
                    )
                claimed[key] = name

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
            return self._argument_items[0] if self.module_slices else leaves[0]
        theirs = {
            i
            for module_slice in self.module_slices
            for i in range(module_slice.start, module_slice.start + len(module_slice.names))
        }
        free = iter([leaf for index, leaf in enumerate(leaves) if index not in theirs])
        items = [
            item if isinstance(item, (nn.Module, Selection)) else next(free)
            for item in self._argument_items
        ]
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

    def space(self) -> Space:
        """The vectors like this point."""
        return Space(self.tensors, self.names, self.tree, f"like {self.name}", layout=self.layout)

    def duplicate(self) -> str | None:
        """The name of a tensor that is given twice, if one is."""
        first: dict[int, str] = {}
        pairs = zip(self.tensors, self.names, strict=True)
        return next(
            (name for tensor, name in pairs if first.setdefault(id(tensor), name) is not name), None
        )


def _given(item: Any) -> Any:
    """The item as `f` gets it: of a compiled module the one behind the wrapper,
    which runs eagerly and is silent.
    """
    return plain(item) if isinstance(item, nn.Module) else item


def _chosen(selection: Selection, assembly: Assembly) -> list[tuple[str, Tensor]]:
    """The parameters of a selection, as the module has them now."""
    wanted = set(selection)
    selected = {path: parameter for _, _, path, parameter in assembly.slots if path in wanted}
    return [(name, selected[name] if name in selected else selection[name]) for name in selection]


# --- some parameters of a module, by name: `hodiff.select` ----------------------------------------


class Selection(Mapping[str, Tensor]):
    """Some parameters of a module by name, as returned by `hodiff.select`.

    A mapping from name to parameter. It reads the module each time, so that inside `f` it shows the
    tensors being differentiated.

    Examples:
        >>> import torch, hodiff
        >>> chosen = hodiff.select(torch.nn.Linear(2, 1), "bias")
        >>> list(chosen), chosen["bias"].shape
        (['bias'], torch.Size([1]))
    """

    if not TYPE_CHECKING:  # a checker of types says it before anything runs

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            """As `f` might take what it is given for the module."""
            raise InputError(
                "a Selection holds parameters and is not the module: call the module itself, "
                "model(x), which inside f has these parameters."
            )

    __slots__ = ("_names", "module")

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.module = module
        if not isinstance(names, Iterable) or isinstance(names, Tensor):
            raise InputError(
                f"names: got {_arguments.kind(names)}, expected names; "
                "hodiff.select makes a Selection."
            )
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
    """Select some trainable parameters of a module by name, to differentiate with respect to them.

    `fnmatch` matches patterns, case-sensitively, against full dotted parameter names. The name of a
    submodule selects every parameter below it. Without a pattern, every parameter is selected.

    Args:
        module: The module whose parameters are chosen.
        *patterns: Parameter or submodule names, with `*`, `?` and `[...]`.
        exclude: One or several patterns whose matches are omitted.

    Returns:
        A mapping from name to parameter, in the module's order; a tied parameter appears once,
        under its first name. Give it as *x* to any function; `f` receives the mapping, and its
        `.module` is the module. Results are dicts of the same names; each has its parameter's
        shape. While
        `f` runs, the parameters that are not selected are constants: their `requires_grad` is
        False, except to calls of hodiff inside.

    Raises:
        InputError: A pattern that matches nothing (near matches are listed), or only frozen
            parameters.

    Cost:
        No derivative pass; one walk over the module.

    Examples:
        >>> import torch, hodiff
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        ... )
        >>> list(hodiff.select(model, "2.*"))
        ['2.weight', '2.bias']
        >>> list(hodiff.select(model, "*.weight", exclude="0"))
        ['2.weight']
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: got {_arguments.kind(module)}, expected an nn.Module.")
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    for name, given in ("pattern", patterns), ("exclude", exclude):
        for each in given if isinstance(given, (tuple, list, set)) else (given,):
            if not isinstance(each, str):
                raise InputError(
                    f"{name}: got {_arguments.kind(each)}, expected strings, one by one: "
                    '"head.*", "*.weight".'
                )
    assembly = Assembly.of(module)
    first_names = _first_names(assembly)
    pairs = assembly.trainable()
    trainable = {name for name, _ in pairs}
    chosen: set[str] = set()
    for pattern in patterns or ("*",):
        matched = {first_names[name] for name in first_names if matches(name, pattern)}
        if not matched:
            raise InputError(_no_match(module, pattern, list(first_names)))
        if matched.isdisjoint(trainable):
            raise InputError(
                f"pattern {pattern!r} matches only frozen parameters "
                f"({', '.join(sorted(matched))}); call requires_grad_(True) on those you "
                "differentiate with respect to."
            )
        chosen |= matched
    dropped: set[str] = set()
    for pattern in exclude:
        matched = {first_names[name] for name in first_names if matches(name, pattern)}
        if not matched:
            raise InputError(f"exclude: {_no_match(module, pattern, list(first_names))}")
        dropped |= matched
    names = [name for name, _ in pairs if name in chosen - dropped]
    if not names:
        raise InputError(f"exclude={exclude!r} excludes every parameter that {patterns!r} selects.")
    check_real([pair for pair in pairs if pair[0] in names])
    return Selection(module, names)


def _first_names(assembly: Assembly) -> dict[str, str]:
    """Every name of every parameter, mapped to the first name of that parameter
    (they differ when tied).
    """
    first: dict[int, str] = {}
    return {path: first.setdefault(id(parameter), path) for _, _, path, parameter in assembly.slots}


def _no_match(module: nn.Module, pattern: str, names: list[str]) -> str:
    known = names + [name for name, _ in plain(module).named_modules() if name]
    near = difflib.get_close_matches(pattern.rstrip(".*"), known, n=3, cutoff=0.4)
    advice = (
        f"Near matches: {', '.join(near)}." if near else f"Its parameters: {', '.join(names[:8])}."
    )
    return f"pattern {pattern!r} matches no parameter of {type(module).__name__}. {advice}"


def check_real(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for a complex parameter, which would be missing from every result."""
    for path, parameter in pairs:
        if not parameter.dtype.is_floating_point:
            raise InputError(
                f"parameter {path!r} is complex ({parameter.dtype}); hodiff differentiates with "
                f"respect to real variables, so its part would be missing. Store it as a pair of "
                f"reals (nn.Parameter(torch.view_as_real(c)), with torch.view_as_complex(...) in "
                f"forward), or select the others: hodiff.select(model, exclude={path!r})."
            )


# --- a module taken apart: the modules at or below it, and the places of its parameters -----------


def plain(module: nn.Module) -> nn.Module:
    """The module behind a `torch.compile` wrapper,
    whose names and parameters are the ones people know.
    """
    inner = next(module.children(), None) if type(module).__name__ == "OptimizedModule" else None
    return inner if isinstance(inner, nn.Module) else module


ParameterSlot = tuple[nn.Module, str, str, Tensor]
"""A place of a parameter: module, name there, path, itself. A tied parameter has several."""


class Assembly(NamedTuple):
    """A module taken apart, in one walk: the modules at or below it,
    and the slots of their parameters.
    """

    modules: dict[nn.Module, None]
    slots: list[ParameterSlot]

    @staticmethod
    def of(root: nn.Module) -> Assembly:
        """The parts of a module, read while no other thread has replaced its parameters."""
        with _locks.lock:
            _locks.wait_for(root)
            assembly = Assembly({}, [])
            assembly._add(plain(root), "")
            return assembly

    def _add(self, module: nn.Module, prefix: str) -> None:
        # Every call with a module pays for this walk: hence its plain look.
        modules, slots = self
        modules[module] = None
        own, below = module._parameters, module._modules
        if own.__class__ is not dict and isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{prefix.removesuffix('.') or 'x'} is a TorchScript module, whose parameters "
                f"cannot be replaced; use the eager module instead."
            )
        for name in own:
            parameter = own[name]
            if parameter is not None:
                slots += [(module, name, prefix + name, parameter)]
        for name in below:
            child = below[name]
            if child is not None and child not in modules:
                self._add(child, f"{prefix}{name}.")

    def trainable(self) -> list[tuple[str, Tensor]]:
        """The parameters that require grad, by name; a tied one once, under its first name."""
        trainable: dict[int, tuple[str, Tensor]] = {}
        for _, _, path, parameter in self.slots:
            if parameter.requires_grad or hasattr(parameter, TRAINABLE):  # as `is_trainable`
                trainable.setdefault(id(parameter), (path, parameter))
        return [*trainable.values()]


TRAINABLE = "_hodiff_trainable"
"""An attribute of what stands, unrecorded, in place of a parameter that requires grad."""


def is_trainable(parameter: Tensor) -> bool:
    """Whether a parameter requires grad, or stands in place of one that does."""
    return parameter.requires_grad or hasattr(parameter, TRAINABLE)


def modules_below(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module at or below `roots`, once, in the order of `named_modules`."""
    modules: dict[nn.Module, None] = {}
    for root in roots:
        modules.update(Assembly.of(root).modules)
    return list(modules)
