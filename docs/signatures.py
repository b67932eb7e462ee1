"""What the reference shows of a signature: nothing that only the code knows, and nothing twice."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import griffe

_ARGUMENTS = re.compile(r"(?<=^Args:\n)(?:(?: {4}.*)?\n)+", re.MULTILINE)
_ARGUMENT = re.compile(
    r"^    (\w+): (.*\n(?:(?: {5,}.*)?\n(?= {5}))*(?: {5,}.*\n)*)", re.MULTILINE
)
_OFTEN = 4  # a description that so many functions have is given once, on the page of keywords
_SAME = (
    "Keywords that [mean the same everywhere][keywords-that-functions-share]: {}.\n\n"
)


class Signatures(griffe.Extension):
    """Types as a reader needs them.

    A name that the code gives to a type is replaced by the type: `Literal["jets", "reverse", "auto"]`, not `Method`.
    """

    def on_package(
        self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any
    ) -> None:
        """Writes types out, once all modules are known."""
        _write_out(pkg, pkg.path, loader.modules_collection)
        documented = [*_documented(pkg)]
        found = Counter(each for doc in documented for each in _arguments(doc.value))
        often = {each for each, times in found.items() if times >= _OFTEN}
        for doc in documented:
            doc.value = _without(doc.value, often)


def _documented(inside: griffe.Object) -> Iterator[griffe.Docstring]:
    for member in inside.members.values():
        if isinstance(member, griffe.Function | griffe.Class) and member.docstring:
            yield member.docstring
        if isinstance(member, griffe.Class | griffe.Module):
            yield from _documented(member)


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Names and descriptions, in one line each."""
    for section in _ARGUMENTS.findall(text + "\n"):
        for name, said in _ARGUMENT.findall(section):
            yield name, " ".join(said.split())


def _without(text: str, often: set[tuple[str, str]]) -> str:
    """A docstring in which arguments that are described so often are named alone."""
    left_out = [name for name, said in _arguments(text) if (name, said) in often]
    if not left_out:
        return text

    def kept(argument: re.Match[str]) -> str:
        known = (argument[1], " ".join(argument[2].split())) in often
        return "" if known else argument[0]

    def section(arguments: re.Match[str]) -> str:
        names = ", ".join(f"`{name}`" for name in left_out)
        return (
            _ARGUMENT.sub(kept, arguments[0]).rstrip("\n")
            + "\n\n"
            + _SAME.format(names)
        )

    text = _ARGUMENTS.sub(section, text + "\n", count=1)
    return re.sub(r"^Args:\n\n+", "", text, flags=re.MULTILINE).rstrip()


def _write_out(
    inside: griffe.Object, package: str, known: griffe.ModulesCollection
) -> None:
    for member in inside.members.values():
        if isinstance(member, griffe.Function):
            member.returns = _spelt(member.returns, package, known)
            for parameter in member.parameters:
                parameter.annotation = _spelt(parameter.annotation, package, known)
        elif isinstance(member, griffe.Attribute):
            member.annotation = _spelt(member.annotation, package, known)
        elif isinstance(member, griffe.Class | griffe.Module):
            _write_out(member, package, known)


def _spelt(type_: Any, package: str, known: griffe.ModulesCollection) -> Any:
    """An annotation without names of types that the package made up."""
    if isinstance(type_, list):
        return [_spelt(part, package, known) for part in type_]
    if isinstance(type_, griffe.ExprName):
        meant = _meaning(type_, package, known)
        return type_ if meant is None else _spelt(meant, package, known)
    if not isinstance(type_, griffe.Expr):
        return type_
    parts = {
        field.name: getattr(type_, field.name)
        for field in dataclasses.fields(type_)
        if field.init
    }
    return dataclasses.replace(
        type_, **{name: _spelt(part, package, known) for name, part in parts.items()}
    )


def _meaning(
    name: griffe.ExprName, package: str, known: griffe.ModulesCollection
) -> griffe.Expr | None:
    """What a name stands for, where it is an alias of a type."""
    path = name.canonical_path
    if not path.startswith(f"{package}."):
        return None
    try:
        named = known[path]
        if isinstance(named, griffe.Alias):
            named = named.final_target
    except (KeyError, griffe.AliasResolutionError):  # of another package
        return None
    alias = isinstance(named, griffe.Attribute) and isinstance(named.value, griffe.Expr)
    return (
        named.value if alias and not isinstance(named.value, griffe.ExprCall) else None
    )  # TypeVar("T") stays T
