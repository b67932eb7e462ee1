"""Why a function cannot be called as it was: Python's own words name neither the point nor the way out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hodiff._core import _tree
from hodiff.errors import InputError


def refused(
    error: TypeError, f: Any, points: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InputError | None:
    """The error to raise in the place of a TypeError, where the call itself failed; None where `f` raised it.

    Asked only once a call has failed: looking at a signature takes longer than many a function.
    """
    f = inspect.unwrap(f)  # a penalty calls its critic through an object of its own
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
    except (TypeError, ValueError):  # a builtin without one
        return None
    try:
        signature.bind(*points, *args, **kwargs)
    except TypeError as reason:
        given = len(points) + len(args)
        return InputError(
            f"f: cannot be called with the {given} positional argument{'s' if given > 1 else ''} that it is given here"
            f"{f' and {sorted(kwargs)}' if kwargs else ''}: {reason}. {_way_out(signature, points, args)}"
        )
    return None


def _way_out(signature: inspect.Signature, points: Sequence[Any], args: Sequence[Any]) -> str:
    wanted = sum(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in signature.parameters.values()
    )
    if len(points) > 1 and wanted < len(points):
        return f"It receives the {len(points)} points one by one: f(x, y), as in lambda x, y: (x * y).sum()."
    if len(points) == 1 and wanted > 1 and not args:
        point = points[0]
        if not isinstance(point, (Tensor, nn.Module)) and _tree.is_container(point):
            return (
                "A container is one point, which f receives as one argument: "
                "lambda p: ..., with p[0] or p['name'] inside. For mixed derivatives by two points: "
                "hodiff.cross_hessian(f, x, y)."
            )
        return "What f needs beside the point goes in args= or kwargs=: args=(data,)."
    return "f receives the point first, then args= and kwargs=."
