"""Some parameters of a module, by name: `hodiff.select`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hodiff._core._assembly import Assembly, plain
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
        if not isinstance(names, Iterable) or isinstance(names, Tensor):
            raise InputError(f"names: is a {type(names).__name__}, expected names; hodiff.select makes a Selection.")
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
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    for name, given in ("pattern", patterns), ("exclude", exclude):
        for each in given if isinstance(given, (tuple, list, set)) else (given,):
            if not isinstance(each, str):
                raise InputError(f'{name}: is a {type(each).__name__}, expected words: "head.*", "*.weight".')
    assembly = Assembly.of(module)
    first_names = _first_names(assembly)
    pairs = assembly.trainable()
    trainable = {name for name, _ in pairs}
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
        chosen |= matched
    dropped: set[str] = set()
    for pattern in exclude:
        matched = {first_names[name] for name in first_names if _matches(name, pattern)}
        if not matched:
            raise InputError(f"exclude: {_no_match(module, pattern, list(first_names))}")
        dropped |= matched
    names = [name for name, _ in pairs if name in chosen - dropped]
    if not names:
        raise InputError(f"exclude={exclude!r} leaves no parameter of those that {patterns!r} selects.")
    check_real([pair for pair in pairs if pair[0] in names])
    return Selection(module, names)


def _first_names(assembly: Assembly) -> dict[str, str]:
    """Every name of every parameter, mapped to the first name of that parameter (they differ when tied)."""
    first: dict[int, str] = {}
    return {slot.path: first.setdefault(id(slot.parameter), slot.path) for slot in assembly.slots}


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


def check_real(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for a complex parameter, which would be missing from every result."""
    for path, parameter in pairs:
        if not parameter.dtype.is_floating_point:
            raise InputError(
                f"parameter {path!r}: is complex ({parameter.dtype}); derivatives here are those of real variables, "
                f"and its part would be missing. Hold it as a pair of reals "
                f"(nn.Parameter(torch.view_as_real(c)), with torch.view_as_complex(...) in forward), or choose the "
                f"others: hodiff.select(model, exclude={path!r})."
            )
