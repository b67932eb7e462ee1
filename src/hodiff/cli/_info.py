"""`hodiff info`: the versions and settings that a report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import sys

import torch

import hodiff
from hodiff._core import _needed

HELP = "print versions, devices and settings, for a report"

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*;.*\bextra *== *['\"](?P<extra>[\w-]+)['\"]")


def configure(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(options: argparse.Namespace) -> int:
    """Print one line per fact."""
    facts = {
        "hodiff": hodiff.__version__,
        "torch": release(),
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "devices": ", ".join(devices()),
        "threads": f"{torch.get_num_threads()}",
        "default dtype": f"{torch.get_default_dtype()}".removeprefix("torch."),
        **{f"extra {extra!r}": state for extra, state in extras().items()},
    }
    width = max(map(len, facts)) + 2
    for name, fact in facts.items():
        print(f"{name:<{width}}{fact}")
    return 0


def release() -> str:
    """The release of PyTorch, and whether it is one that was tested."""
    newer = _needed.newer()
    return f"{torch.__version__}: {newer}" if newer else torch.__version__


def devices() -> list[str]:
    """The devices that PyTorch can use here."""
    described = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    described += [
        f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        for index in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        described.append("mps")
    return described


def extras() -> dict[str, str]:
    """The state of each extra of the package: whether it is installed,
    or the part of it that is missing.
    """
    try:
        requirements = importlib.metadata.requires("hodiff") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    needed: dict[str, list[str]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match and match["name"] != "hodiff":  # an extra may be made of others
            needed.setdefault(match["extra"], []).append(match["name"])
    return {extra: _state(names) for extra, names in sorted(needed.items())}


def _state(names: list[str]) -> str:
    missing = [name for name in names if not _installed(name)]
    return f"missing {', '.join(missing)}" if missing else "installed"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
