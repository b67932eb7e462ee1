"""Packages whose modules are loaded when their names are asked for, not with `import hodiff`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from hodiff._core import _compiled_callers, _needed
from hodiff._core._arguments import ELSEWHERE, taught
from hodiff._core._settings import Scope, Undo

__all__ = ["names", "publish", "uncollected"]


def uncollected() -> Scope:
    """No collection meanwhile: modules make objects that stay,
    and a full one goes through all of PyTorch's.
    """
    return Scope(_without_collections)


def _without_collections(undo: Undo) -> None:
    if gc.isenabled():
        undo += [gc.enable]
        gc.disable()


def publish(namespace: dict[str, Any], names: Iterable[str] = ()) -> None:
    """Make names public, by default what is loaded of `__all__`: the tracer ends its graph there,
    and wrong arguments are told in words.
    """
    for name in names or namespace.keys() & namespace["__all__"]:
        namespace[name] = taught(namespace[name], namespace["__name__"])
        _compiled_callers.mark(namespace[name])


def names(
    namespace: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        namespace: The package's globals, with its `__all__`.
        homes: The names that each of its modules makes public; the modules are names themselves,
            and those without any are public.
    """
    package = namespace["__name__"]
    home = {name: module for module, listed in homes.items() for name in listed}

    def look_up(name: str) -> Any:
        if name in homes:
            return import_module(f"{package}.{name}")
        if name not in home:
            way = ELSEWHERE.get(f"{package}.{name}", "")
            words = f"module {package!r} has no attribute {name!r}{way and f'; {way}'}"
            # Python adds names that are near, which are wrong where there is a better word
            raise AttributeError(words, name=name, obj=None if way else sys.modules[package])
        for room in f"{package}.{home[name]}".split("."):
            _needed.check(room)
        namespace[name] = getattr(import_module(f"{package}.{home[name]}"), name)
        publish(namespace, [name])
        return namespace[name]

    def listed() -> list[str]:
        doors = (module for module, names in homes.items() if not names)
        own = (name for name in namespace if name.startswith("__"))
        return sorted({*namespace["__all__"], *doors, *own})

    return look_up, listed
