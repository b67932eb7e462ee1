"""Whether a point is still the one that was evaluated: its modules, as they are put together, and its values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hodiff._core import _claims
from hodiff._core._assembly import modules_below
from hodiff._core._where import Where
from hodiff.curvature._fingerprint import Fingerprint
from hodiff.errors import GraphError


class Modules:
    """The modules of a point, each by its mode, and by its parameters and parts, by identity."""

    def __init__(self, where: Where) -> None:
        roots = [owned.module for owned in where.owned]
        with _claims.lock:  # `modules_below` waits for other threads; after it none of them puts leaves in
            self._assemblies = {module: _assembly(module) for module in modules_below(roots)}

    def check(self) -> None:
        """Raise where a module is put together otherwise than it was."""
        with _claims.lock:  # what is lent just now is looked at another time; what is not, stays so while it is read
            if _claims.claimed(self._assemblies):
                return
            for module, assembly in self._assemblies.items():
                if _assembly(module) != assembly:
                    break
            else:
                return
        raise GraphError(
            "the model was changed since the operator was made: a parameter or a submodule was replaced, or train() "
            "and eval() switched; H.refresh() evaluates it as it is now."
        )


def _assembly(module: nn.Module) -> tuple[Any, ...]:
    return (module.training, *map(id, module._parameters.values()), *map(id, module._modules.values()))


class _Look(threading.local):
    now: object = None


_look = _Look()


@contextmanager
def one_look() -> Iterator[None]:
    """Within it the values of a point are compared once, however many products are taken."""
    outer = _look.now
    _look.now = outer or object()
    try:
        yield
    finally:
        _look.now = outer


class Values:
    """The values of a point's tensors, as they were."""

    def __init__(self, where: Where) -> None:
        self._names, self._tensors = where.names, where.tensors
        self._versions, self._fingerprint = self._now(), Fingerprint(where.tensors)
        self._looked: object = None

    def check_versions(self) -> None:
        """Raise where PyTorch has seen a tensor change."""
        found = self._now()
        if found != self._versions:
            pairs = zip(found, self._versions, self._names, strict=True)
            _refuse([name for now, before, name in pairs if now != before])

    def check(self) -> None:
        """Raise where a tensor has other values, however they came there. Several products may have one look."""
        if _look.now is not None and self._looked is _look.now:
            return
        self._looked = _look.now
        _refuse([self._names[number] for number in self._fingerprint.changed()])

    def _now(self) -> list[tuple[int, int]]:
        """How often PyTorch has seen each tensor change, and where its memory is."""
        return [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in self._tensors]


def _refuse(changed: list[str]) -> None:
    if changed:
        raise GraphError(
            f"parameters changed since the operator was evaluated ({', '.join(changed[:4])}"
            f"{', ...' if len(changed) > 4 else ''}); H.refresh() evaluates it at the new ones."
        )
