"""What the reference shows of a signature: nothing that only the code knows."""

import dataclasses
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Defaults and types as a reader needs them.

    A required argument whose absence gets an error with words has a default in the code, none in the reference.
    A name that the code gives to a type is replaced by the type: `Literal["jets", "reverse", "auto"]`, not `Method`.
    """

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Takes such defaults away."""
        for parameter in func.parameters:
            if str(parameter.default).rpartition(".")[2] == "MISSING":
                parameter.default = None

    def on_package(
        self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any
    ) -> None:
        """Writes types out, once all modules are known."""
        _write_out(pkg, pkg.path, loader.modules_collection)


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
