"""A module taken apart: the modules at or below it, and the places of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _claims
from hodiff.errors import InputError


def plain(module: nn.Module) -> nn.Module:
    """The module behind a `torch.compile` wrapper, whose names and parameters are the ones people know."""
    inner = getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None
    return inner if isinstance(inner, nn.Module) else module


class Slot(NamedTuple):
    """One place of a parameter in a module; a tied parameter has several."""

    module: nn.Module
    name: str
    path: str
    parameter: Tensor


class Assembly(NamedTuple):
    """A module taken apart, in one walk: the modules at or below it, and the slots of their parameters."""

    modules: dict[nn.Module, None]
    slots: list[Slot]

    @classmethod
    def of(cls, root: nn.Module) -> Assembly:
        """The parts of a module, read while no other thread has replaced its parameters."""
        with _claims.lock:
            _claims.wait_for(root)
            found = cls({}, [])
            found._add(plain(root), "")
            return found

    def _add(self, module: nn.Module, prefix: str) -> None:
        # Every call with a module pays for this walk: hence its plain look.
        modules, slots = self
        modules[module] = None
        own, below = module._parameters, module._modules
        if own.__class__ is not dict and isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{prefix.removesuffix('.') or 'x'}: is a TorchScript module, whose parameters cannot be replaced; use "
                f"the eager module in its place."
            )
        for name in own:
            parameter = own[name]
            if parameter is not None:
                slots += [Slot(module, name, prefix + name, parameter)]
        for name in below:
            child = below[name]
            if child is not None and child not in modules:
                self._add(child, f"{prefix}{name}.")

    def trainable(self) -> list[tuple[str, Tensor]]:
        """The parameters that require grad, by name; a tied one once, under its first name."""
        found: dict[int, tuple[str, Tensor]] = {}
        for _, _, path, parameter in self.slots:
            if parameter.requires_grad and id(parameter) not in found:
                found[id(parameter)] = path, parameter
        return [*found.values()]


def modules_below(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module at or below `roots`, once, in the order of `named_modules`."""
    found: dict[nn.Module, None] = {}
    for root in roots:
        found.update(Assembly.of(root).modules)
    return list(found)
