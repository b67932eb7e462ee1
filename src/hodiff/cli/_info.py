"""`hodiff info`: versions and settings, and the operations whose derivatives are missing or wrong on this PyTorch."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import sys

import torch

import hodiff
from hodiff._core import _versions
from hodiff.cli import _operations

HELP = "print versions, devices, and which operations have no second derivative, or a wrong one, on this PyTorch"

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*;.*\bextra *== *['\"](?P<extra>[\w-]+)['\"]")


def configure(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(options: argparse.Namespace) -> int:
    """Print one line per fact, then what is known of operations; 1 where one does otherwise here than published."""
    sweep = _operations.published(torch.__version__)
    tried, others = _operations.spot_checks(sweep)
    facts = {
        "hodiff": hodiff.__version__,
        "torch": release(),
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "devices": ", ".join(devices()),
        "threads": f"{torch.get_num_threads()}",
        "default dtype": f"{torch.get_default_dtype()}".removeprefix("torch."),
        **{f"extra {extra!r}": state for extra, state in extras().items()},
        "operations": _swept(sweep),
        "tried here": f"{tried} operations, {tried - len(others)} as published",
    }
    width = max(map(len, facts)) + 2
    for name, fact in facts.items():
        print(f"{name:<{width}}{fact}")
    for other in others:
        print(f"{'':<{width}}{other}")
    print()
    for line in _operations.lines(sweep):
        print(line)
    return 1 if others else 0


def release() -> str:
    """The release of PyTorch, and whether it is one that was tested."""
    newer = _versions.newer()
    return f"{torch.__version__}: {newer}" if newer else torch.__version__


def _swept(sweep: _operations.Sweep) -> str:
    """Which sweep is shown."""
    exact = torch.__version__.partition("+")[0] == sweep.release
    nearest = "" if exact else " (the nearest release that was swept)"
    return f"{sweep.operations} swept with torch {sweep.release}, {sweep.samples} samples{nearest}"


def devices() -> list[str]:
    """The devices that PyTorch can use here."""
    found = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    found += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def extras() -> dict[str, str]:
    """For each extra of the package, whether it is installed, or what of it is missing."""
    try:
        requirements = importlib.metadata.requires("hodiff") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    needed: dict[str, list[str]] = {}
    for requirement in requirements:
        found = _REQUIREMENT.match(requirement)
        if found and found["name"] != "hodiff":  # an extra may be made of others
            needed.setdefault(found["extra"], []).append(found["name"])
    return {extra: _state(names) for extra, names in sorted(needed.items())}


def _state(names: list[str]) -> str:
    missing = [name for name in names if not _installed(name)]
    if not missing:
        return "installed"
    return f"missing {', '.join(missing)}"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
