"""`hodiff explain SCRIPT`: run a program as it is, and say why a backward pass failed, if one does."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from types import TracebackType

from hodiff.graph import _lifetime, _watch
from hodiff.graph._names import is_users

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
        0, or 1 after an exception, which was printed with its explanation. `sys.exit` in the program
        ends this process with the program's own status.
    """
    record = _lifetime.Lifetime() if options.picture else _watch.Watch()
    try:
        with record:
            _execute(options)
    except SystemExit:
        raise
    except BaseException as error:
        _print(error)
        if isinstance(error, KeyboardInterrupt):
            return 130
        return 1
    finally:
        if isinstance(record, _lifetime.Lifetime):
            record.save(options.picture)
    return 0


def _execute(options: argparse.Namespace) -> None:
    """What `python SCRIPT ARGS` and `python -m MODULE ARGS` do: arguments, import path, `__main__`."""
    sys.argv[:] = [options.script, *options.arguments]
    if options.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
        runpy.run_path(options.script, run_name="__main__")


def _print(error: BaseException) -> None:
    """The traceback as the program alone would have had it, with the note that the watch added."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and not is_users(traceback.tb_frame.f_code):
        traceback = traceback.tb_next
    error.__traceback__ = traceback = _without_ours(traceback)
    sys.stdout.flush()
    sys.excepthook(type(error), error, traceback)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the watch, which stand between the program and PyTorch."""
    if traceback is None:
        return None
    rest = _without_ours(traceback.tb_next)
    if traceback.tb_frame.f_globals.get("__name__", "").startswith("hodiff.graph._watch"):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
