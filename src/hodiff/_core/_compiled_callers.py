"""Public names: loaded when asked for; inside `torch.compile`, which of them the tracer may follow,
and which run as they are, between two graphs.

hodiff reads graphs, lends modules, switches settings and warns; none of that can be held by a
traced region. So what
needs it is marked when it is imported, at no cost for any call: the tracer (Dynamo) ends its graph
before a marked function, calls it as plain Python together with everything below it, and begins a
new graph behind it. Where no break is allowed (`fullgraph=True`) it raises, and says `REASON`. That
is what `torch.compiler.disable` does, but that imports Dynamo (seconds), and puts a wrapper around
each function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from hodiff._core import _needed, _versions

__all__ = ["REASON", "break_graphs", "mark", "names", "uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])

REASON = (
    "hodiff: this call needs PyTorch's own graphs, which a traced region does not have. "
    "Leave out fullgraph=True: the graph then breaks around the call, which runs uncompiled; "
    "or call it outside of the compiled function. A training step is compiled as a whole by "
    "hodiff.compile_step"
)


def uncompiled(function: F, reason: str = REASON) -> F:
    """`function` itself, marked: the tracer breaks its graph there and leaves
    everything below alone.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    _versions.skip(marked.__code__)
    return function


def break_graphs(namespace: dict[str, Any]) -> None:
    """Mark what a module makes public, by its `__all__`;
    what is loaded when it is asked for is marked then.
    """
    for name in namespace.keys() & namespace["__all__"]:
        mark(namespace[name])


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
        mark(value)
        return value

    def listed() -> list[str]:
        packages = {module for module in homes if module[0] != "_" and "." not in module}
        return sorted({*namespace, *namespace["__all__"], *packages})

    return look_up, listed
