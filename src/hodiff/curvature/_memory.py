"""How much memory is free, how much a computation took, and how many bytes a user means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from hodiff._core import _modes
from hodiff._core._faults import is_fault
from hodiff._core._live_bytes import LiveBytes
from hodiff.errors import InputError

T = TypeVar("T")
UNKNOWN = 4 * 2**30
"""What is taken to be free where the system does not say."""


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device: of a GPU what is left (PyTorch's own reserve included), else of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_machine(), _container())


def _machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError) as error:
        if not is_fault(error):
            raise
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError) as error:
        if not is_fault(error):
            raise
        return UNKNOWN


def _container() -> int:
    """What the limit of a container leaves."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text("ascii").strip()
        return int(limit) - int((group / "memory.current").read_text("ascii")) if limit != "max" else 1 << 62
    except (OSError, ValueError) as error:
        if not is_fault(error):
            raise
        return 1 << 62


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
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"memory_budget: is a {type(value).__name__}; expected bytes (int) or a fraction (float).")
    if not value >= 0 or (isinstance(value, float) and value > 1):
        raise InputError(
            f"memory_budget: got {value!r}; expected bytes (an int, 0 to keep nothing), or a fraction of the free "
            f"memory (a float from 0.0 to 1.0)."
        )


def measured(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """The result of a call, and the bytes that it left alive."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, max(0, torch.cuda.memory_allocated(device) - before)
    with _modes.on(LiveBytes()) as live:
        result = call()
        return result, live.now
