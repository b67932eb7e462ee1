"""Public names: loaded when asked for; inside `torch.compile`, which of them the tracer may follow,
and which run as they are, between two graphs.

hodiff reads graphs, lends modules, switches settings and warns; none of that can be held by a
traced region. So what needs it is marked when it is imported, at no cost for any call: the tracer
(Dynamo) ends its graph before a marked function, calls it as plain Python together with everything
below it, and begins a new graph behind it. Where no break is allowed (`fullgraph=True`) it raises,
and says `REASON`. That is what `torch.compiler.disable` does, but that imports Dynamo (seconds),
and puts a wrapper around each function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from hodiff._core import _needed
from hodiff._core._arguments import taught
from hodiff._core._versions import uncompiled

__all__ = ["mark", "names", "publish"]


def mark(function: Any) -> None:
    """Mark what is public: a function, or the methods of a class, unless that only holds things."""
    if inspect.isclass(function):
        if not issubclass(function, (BaseException, Mapping)):
            for each in _methods(function):
                uncompiled(each)
    elif inspect.isfunction(function):
        uncompiled(function)


def _methods(cls: type) -> list[Any]:
    """The functions behind the methods and properties of a class that are ours: a namedtuple brings
    along others.

    But not the handler that the tracer goes through.
    """
    behind = [
        getattr(value, "fget", None)
        or getattr(value, "func", None)
        or getattr(value, "__func__", value)
        for name, value in vars(cls).items()
        if name != "__torch_function__"
    ]
    return [
        each
        for each in behind
        if inspect.isfunction(each) and each.__globals__["__name__"].startswith("hodiff")
    ]


# --- packages whose modules are loaded when their names are asked for, not with `import hodiff` ---


def publish(namespace: dict[str, Any], names: Iterable[str] = ()) -> None:
    """Make names public, by default what is loaded of `__all__`: the tracer ends its graph there,
    and wrong arguments are told in words.
    """
    for name in names or namespace.keys() & namespace["__all__"]:
        namespace[name] = taught(namespace[name], namespace["__name__"])
        mark(namespace[name])


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
            way = ""
            if name[0] != "_":  # no module of ours, which the import of a package asks for
                from hodiff._core._elsewhere import ELSEWHERE

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
