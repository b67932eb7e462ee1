"""The command line: `hodiff`, `python -m hodiff`; one file per command; nothing else imports it.

Each command is a module with `HELP`, `configure(parser)` and `run(options) -> exit status`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import hodiff
from hodiff.cli import _explain, _info, _tour

COMMANDS = {"explain": _explain, "info": _info, "tour": _tour}


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
    for name, command in COMMANDS.items():
        command.configure(subparsers.add_parser(name, help=command.HELP, description=command.HELP))
    options = parser.parse_args(argv)
    run = COMMANDS[options.command].run
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
