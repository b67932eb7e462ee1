"""Memory: how much is free, how much a computation took, the exact bytes of the tensors alive."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hodiff._core import _settings
from hodiff._core._arguments import shown
from hodiff._core._faults import is_fault
from hodiff._core._settings import DispatchMode
from hodiff.errors import InputError

T = TypeVar("T")
UNKNOWN = 4 * 2**30
"""What is taken to be free where the system does not say."""
MACHINE, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
"""Where the system says what is free, and what a container may use."""


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device: of a GPU what is left (PyTorch's own reserve included),
    else of the machine.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = _number(MACHINE, "MemAvailable:")
    free = UNKNOWN if available is None else available * 1024
    limit, used = _number(GROUP / "memory.max"), _number(GROUP / "memory.current")
    return free if limit is None or used is None else min(free, limit - used)


def _number(file: Path, behind: str = "") -> int | None:
    """A number in a file of the system, behind a word; None where it has none."""
    try:
        text = file.read_text("ascii") if file.exists() else ""
    except OSError as error:
        if not is_fault(error):
            raise
        text = ""
    number = re.search(rf"{behind}\s*(\d+)", text)
    return None if number is None else int(number[1])


def readable(size: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def budget(value: float, device: torch.device) -> int:
    """`memory_budget=` in bytes: an int is bytes, a float a fraction of what is free."""
    if isinstance(value, float):
        return int(value * free_bytes(device))
    return value


def check_budget(value: Any) -> None:
    """Raise unless `memory_budget=` is a number of bytes or a fraction."""
    most = 1 if isinstance(value, float) else math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise InputError(
            f"memory_budget: got {shown(value)}, expected bytes (an int, 0 to keep nothing), or a "
            f"fraction of the free memory (a float from 0.0 to 1.0)."
        )


def measured(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """The result of a call, and the bytes that it left alive."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        return call(), max(0, torch.cuda.memory_allocated(device) - before)
    with _settings.on(LiveBytes()) as live:
        return call(), live.now


# --- the exact bytes of tensors alive, and their peak, without the garbage collector --------------


class LiveBytes(DispatchMode):
    """Counts the storages that operations make while it is on, those of reverse passes included.

    A storage that only a graph holds counts too: its weak reference ends when the memory goes, in
    any thread, or in the middle of a line. So what has gone is only listed then, and taken off when
    the thread of the mode looks.

    Attributes:
        peak: The largest value of `now` since the last `restart`.
    """

    supports_higher_order_operators = True  # where `f` exports or traces a function that has one

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        # of a reference: itself, storage and size
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._known: set[int] = set()
        # which C fills: in Python code an interrupt would be lost there
        self._gone: list[weakref.ref[Any]] = []

    @property
    def now(self) -> int:
        """Bytes alive, of those made while this was on."""
        while self._gone:
            _, key, size = self._alive.pop(id(self._gone.pop()))
            self._known.discard(key)
            self._now -= size
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in _storages([*args, *(kwargs or {}).values()])}
        for storage in _storages([outputs]):
            key = storage._cdata
            if key in before:  # a view, or an argument changed in place, is no new memory
                continue
            now = self.now
            if key not in self._known:
                reference, size = weakref.ref(storage, self._gone.append), storage.nbytes()
                self._known.add(key)
                self._alive[id(reference)] = reference, key, size
                self._now = now + size
                self.peak = max(self.peak, self._now)
        return outputs


def _storages(values: Sequence[Any]) -> list[Any]:
    """The storages of the tensors among `values`, and in the lists among them."""
    storages: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            # a sparse tensor has none: its parts were counted when they were made
            with suppress(NotImplementedError):
                storages += [value.untyped_storage()]
        elif isinstance(value, (tuple, list)):
            storages += _storages(value)
    return storages
