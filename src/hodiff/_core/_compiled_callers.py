"""Calls inside `torch.compile`: the functions that the tracer may follow, and those that run as
they are, between two graphs.

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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hodiff._core import _versions

__all__ = ["REASON", "mark", "uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])

REASON = (
    "hodiff: this call needs PyTorch's own graphs, which a traced region does not have. "
    "Leave out fullgraph=True: the graph then breaks around the call, which runs uncompiled; "
    "or call it outside of the compiled function. A training step is compiled as a whole by "
    "hodiff.compile_step"
)


class Spelled(str):
    """An annotation that `help` shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def uncompiled(function: F, reason: str = REASON) -> F:
    """`function` itself, marked: the tracer breaks its graph there and leaves
    everything below alone.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    _versions.skip(marked.__code__)
    marked.__annotations__.update(  # what is around a function shares its own
        {
            name: Spelled(note)
            for name, note in marked.__annotations__.items()
            if isinstance(note, str)
        }
    )
    return function


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
