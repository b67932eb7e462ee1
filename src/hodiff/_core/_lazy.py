"""Packages whose modules are loaded when their names are asked for, not with `import hodiff`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from hodiff._core import _compiled_callers, _needed
from hodiff._core._settings import Scope, Undo

__all__ = ["names", "uncollected"]


def uncollected() -> Scope:
    """No collection meanwhile: modules make objects that stay,
    and a full one goes through all of PyTorch's.
    """
    return Scope(_without_collections)


def _without_collections(undo: Undo) -> None:
    if gc.isenabled():
        undo += [gc.enable]
        gc.disable()


def names(
    namespace: dict[str, Any], homes: Mapping[str, Sequence[str]], beside: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        namespace: The package's globals, with its `__all__`.
        homes: The names that each of its modules makes public; the modules are names themselves.
        beside: Modules whose names are not the package's, though they are looked for there.
    """
    package = namespace["__name__"]
    home = {name: module for module, listed in homes.items() for name in listed}

    def look_up(name: str) -> Any:
        if name in homes:
            return import_module(f"{package}.{name}")
        if name not in home:
            # doctest and inspect ask whether there is a `__wrapped__`
            public = () if name[0] == "_" else beside
            places = (
                f"{package}.{at}"
                for at in public
                if name in import_module(f"{package}.{at}").__all__
            )
            way = next((f"; write {at}.{name}" for at in places), "")
            raise AttributeError(f"module {package!r} has no attribute {name!r}{way}")
        for room in f"{package}.{home[name]}".split("."):
            _needed.check(room)
        value = namespace[name] = getattr(import_module(f"{package}.{home[name]}"), name)
        _compiled_callers.mark(value)
        return value

    def listed() -> list[str]:
        packages = {module for module in homes if module[0] != "_" and "." not in module}
        return sorted({*namespace, *namespace["__all__"], *packages})

    return look_up, listed
