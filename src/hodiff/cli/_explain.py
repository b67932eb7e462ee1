"""`hodiff explain SCRIPT`: run a program as it is, and say why a backward pass failed, if one does."""

from __future__ import annotations

import argparse
import os
import sys

import torch

from hodiff.cli import _program, _transparent
from hodiff.graph import _growth, _growth_words, _lifetime, _watch

HELP = "run a script; if a backward pass fails, say which variable, which lines, why, and what to do"


def configure(parser: argparse.ArgumentParser) -> None:
    """`[--picture FILE.svg] [-m] SCRIPT [ARGS...]`; what follows SCRIPT is the script's."""
    parser.add_argument("--picture", metavar="FILE.svg", help="draw what was saved when, and which pass freed it")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program, as it would be given to python")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")


def run(options: argparse.Namespace) -> int:
    """Run the program under a watch.

    Returns:
        0; 1 after an exception, which was printed with its explanation; 2 if there is no such file. `sys.exit`
        and an interrupt in the program end this process as they would have ended the program's.
    """
    if not options.is_module and not os.path.exists(options.script):
        print(f"hodiff explain: can't open file {os.path.abspath(options.script)!r}", file=sys.stderr)
        return 2
    growth = _growth.Growth()
    record = (
        _lifetime.Lifetime(also=growth) if options.picture else _watch.Watch(operations=[growth], of_passes=[growth])
    )
    ended = True
    try:
        with _transparent.Warnings(), record:
            _program.run(options.script, options.arguments, is_module=options.is_module)
    except SystemExit:
        raise
    except BaseException as error:
        _print(error)
        ended = _is_out_of_memory(error)  # which is where growth ends
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # it was printed; but the process ends as by the signal
            raise
        return 1
    finally:
        if isinstance(record, _lifetime.Lifetime):
            record.save(options.picture)
        _tell(growth, ended=ended)
    return 0


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _tell(growth: _growth.Growth, *, ended: bool) -> None:
    """At the end, on stderr: which graphs grew, and what holds them."""
    said = _growth_words.report(growth.found(ended=ended))
    if said:
        sys.stdout.flush()
        print(f"\n{said}", end="", file=sys.stderr)


def _print(error: BaseException) -> None:
    """The traceback as the program alone would have had it, with the note that the watch added."""
    _transparent.clean(error)
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)
