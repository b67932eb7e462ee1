"""Whether a user's function takes what it will be called with: asked of its signature, before anything is computed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hodiff._core import _tree
from hodiff.curvature._data import NONE
from hodiff.errors import InputError


def check_signature(
    function: Any, name: str, names: Sequence[str], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Raise unless the function can be called with these arguments, `names` and then `args`."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # built in: who calls it will see
        return
    try:
        signature.bind(*names, *args, **(kwargs or {}))
    except TypeError as error:
        given = "with data=, once for each batch" if "batch" in names else "without data="
        raise InputError(
            f"{name}: is called as {name}({', '.join([*names, *map(_short, args)])}) {given}, which {signature} does "
            f"not take ({error})."
        ) from error


def _short(value: Any) -> str:
    return type(value).__name__


def check_predict(predict: Any, has_data: bool) -> None:
    """Raise unless `predict` is a function of the point, and of a batch if there are data."""
    names = ("where", "batch") if has_data else ("where",)
    called = f"predict({', '.join(names)})"
    if isinstance(predict, nn.Module):
        inputs = "lambda model, batch: model(batch[0])" if has_data else "lambda model: model(inputs)"
        raise InputError(
            f"predict: is the module {type(predict).__name__} itself; expected a function {called} that returns the "
            f"outputs, and the module as where: {inputs}."
        )
    if not callable(predict) or isinstance(predict, type):
        kind = predict.__name__ if isinstance(predict, type) else type(predict).__name__
        raise InputError(f"predict: is {kind}; expected a function {called} that returns the outputs.")
    check_signature(predict, "predict", names)


@contextmanager
def told_what_it_got(name: str, batch: Any) -> Iterator[None]:
    """Add to an error of the user's function what hodiff called it with: targets are not the whole batch."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if batch is not NONE:
            kind = _tree.describe(_tree.flatten(batch)[2]) if _tree.is_container(batch) else type(batch).__name__
            error.add_note(f"hodiff called {name}, with the batch as data= gave it: {kind}.")
        raise
