"""The command line: `hodiff`, `python -m hodiff`; nothing else imports it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

import torch

import hodiff
from hodiff._core import _needed
from hodiff.cli import _explain, _tour


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; None means those of the process.

    Returns:
        The exit status: 0, or 1 where a command found something wrong.
    """
    parser = argparse.ArgumentParser(
        prog="hodiff", description="Higher-order gradients for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"hodiff {hodiff.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = {
        name: subparsers.add_parser(name, help=words, description=words)
        for name, (words, _) in COMMANDS.items()
    }
    _explain.configure(commands["explain"])
    options = parser.parse_args(argv)
    _, run = COMMANDS[options.command]
    if options.command == "explain":  # streams are the program's
        return run(options)
    try:
        status = run(options)
        print(end="", flush=True)  # nothing where there is no stdout
    except OSError as error:
        if error.filename is not None:  # no stream
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # what was read is enough, as for `| head`
            print(
                f"hodiff {options.command}: can't write the output: {error.strerror}",
                file=sys.stderr,
            )
        return 1
    return status


# --- hodiff info: the versions and settings that a report needs -----------------------------------


EXTRAS = ("numpy", "scipy", "matplotlib", "tqdm")
"""Packages that some functions need."""


def info(options: argparse.Namespace) -> int:
    """Print one line per fact."""
    facts = {
        "hodiff": hodiff.__version__,
        "torch": release(),
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "devices": ", ".join(devices()),
        "threads": f"{torch.get_num_threads()}",
        "default dtype": f"{torch.get_default_dtype()}".removeprefix("torch."),
        **{name: version(name) for name in EXTRAS},
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


def version(name: str) -> str:
    """The version of a package that an extra needs."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


COMMANDS = {
    "explain": (_explain.HELP, _explain.run),
    "info": ("print versions, devices and settings, for a report", info),
    "tour": (_tour.HELP, _tour.run),
}
"""Of each command what it is for, and what runs it and gives the exit status."""
