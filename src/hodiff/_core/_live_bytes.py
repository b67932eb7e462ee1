"""The exact bytes of tensors alive, and their peak, without the garbage collector."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor

from hodiff._core._modes import DispatchMode


class LiveBytes(DispatchMode):
    """Counts the storages that operations make while it is on, those of reverse passes included.

    A storage that only a graph holds counts too: its weak reference ends when the memory goes, in any thread, or in the
    middle of a line. So what has gone is only listed then, and taken off when the thread of the mode looks.

    Attributes:
        peak: The largest value of `now` since the last `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # of a reference: itself, storage and size
        self._known: set[int] = set()
        self._gone: list[weakref.ref[Any]] = []  # which C fills: in Python code an interrupt would be lost there

    @property
    def now(self) -> int:
        """Bytes alive, of those made while this was on."""
        while self._gone:
            _, key, size = self._alive.pop(id(self._gone.pop()))
            self._known.discard(key)
            self._now -= size
        return self._now

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in _storages([*args, *(kwargs or {}).values()])}
        for storage in _storages([outputs]):
            if storage._cdata not in before:  # a view, or an argument changed in place, is no new memory
                self._count(storage)
        return outputs

    def _count(self, storage: Any) -> None:
        now, key = self.now, storage._cdata
        if key not in self._known:
            reference, size = weakref.ref(storage, self._gone.append), storage.nbytes()
            self._known.add(key)
            self._alive[id(reference)] = reference, key, size
            self._now = now + size
            self.peak = max(self.peak, self._now)


def _storages(values: list[Any]) -> Iterator[Any]:
    """The storages of the tensors among `values`, and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            with suppress(NotImplementedError):  # a sparse tensor has none: its parts were counted when they were made
                yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(list(value))
