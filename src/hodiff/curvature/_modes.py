"""Whether a module computes the same in training and in evaluation: asked of its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def follows_mode(module: nn.Module) -> bool:
    """Whether a module may look at its mode: its class says `training` somewhere, or what it runs cannot be read."""
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return True
    return _class_follows_mode(type(module))


def says_training(function: Any) -> bool:
    """Whether a function's code has the word, or is none that can be read."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if isinstance(function, functools.partial):
        return says_training(function.func)
    if inspect.ismethod(function):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return True
    inner = [cell.cell_contents for cell in function.__closure__ or () if _holds_function(cell)]
    return any(map(_mentions, _codes(function.__code__))) or any(map(says_training, inner))


@functools.cache
def _class_follows_mode(kind: type[nn.Module]) -> bool:
    own = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    return any(says_training(member) for base in own for member in _code_of(base))


def _code_of(kind: type) -> Iterator[Any]:
    for name, member in vars(kind).items():
        if isinstance(member, property):
            yield from filter(None, (member.fget, member.fset))
        elif name == "forward" or isinstance(member, (FunctionType, staticmethod, classmethod)):
            yield member


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _mentions(code: CodeType) -> bool:
    return "training" in code.co_names or "training" in code.co_consts


def _holds_function(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # still empty
        return False
