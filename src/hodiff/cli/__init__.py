"""The command line: `hodiff`, `python -m hodiff`; nothing else imports it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from types import CodeType, ModuleType, TracebackType

import torch
from torch.overrides import handle_torch_function

import hodiff
from hodiff._core import _needed
from hodiff.cli import _tour
from hodiff.graph import _growth, _watch
from hodiff.graph._names import steps_of


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
    explained = commands["explain"]  # `[-m] SCRIPT [ARGS...]`; what follows SCRIPT is the script's
    explained.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module"
    )
    explained.add_argument(
        "script", metavar="SCRIPT", help="the program, as it would be given to python"
    )
    explained.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments"
    )
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
    newer = _needed.newer()  # whether the release of PyTorch is one that was tested
    facts = {
        "hodiff": hodiff.__version__,
        "torch": f"{torch.__version__}: {newer}" if newer else torch.__version__,
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


# --- hodiff explain SCRIPT: run a program, say why a backward pass failed, if one does ------------


def explain(options: argparse.Namespace) -> int:
    """Run the program under a watch.

    Returns:
        0; 1 after an exception, which was printed with its explanation; 2 if there is no such file.
        `sys.exit` and an interrupt in the program end this process as they would have ended the
        program's.
    """
    if not options.is_module and not os.path.exists(options.script):
        more = (
            "; leave python out: hodiff explain SCRIPT"
            if options.script.startswith("python")
            else ""
        )
        print(
            f"hodiff explain: can't open file {os.path.abspath(options.script)!r}{more}",
            file=sys.stderr,
        )
        return 2
    if not options.is_module and options.script.endswith(".ipynb"):
        print(
            "hodiff explain: a notebook is no script; make one of it: "
            "jupyter nbconvert --to script",
            file=sys.stderr,
        )
        return 2
    growth, ended = _growth.Growth(), True
    try:
        with _watch.Watch(growth):
            run_program(options.script, options.arguments, is_module=options.is_module)
    except SystemExit:
        raise
    except BaseException as error:
        # the traceback as the program alone would have had it, with the note that the watch added
        clean(error)
        flush()
        sys.excepthook(type(error), error, error.__traceback__)
        ended = False
        if isinstance(error, KeyboardInterrupt):
            # it was printed; but the process ends as by the signal
            sys.excepthook = lambda *_: None
            raise
        return 1
    finally:
        _tell(growth, ended=ended)
    return 0


def flush() -> None:
    """Write the program's output first, unless it closed its output, or has none,
    or nobody takes it.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        with suppress(OSError):  # Python says so at the end, and stderr has the explanation
            sys.stdout.flush()


def _tell(growth: _growth.Growth, *, ended: bool) -> None:
    """Say at the end, on stderr: which graphs grew, their holders;
    parameters that were never trained.
    """
    said = _growth.report(growth, ended=ended)
    if said and sys.stderr is not None:  # without it print would write to stdout, the program's
        flush()
        print(f"\n{said}", end="", file=sys.stderr)


# --- run a program as `python` runs it: its arguments, import path, `__main__` --------------------


_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls, by this name


def run_program(name: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a program as `python NAME ARGUMENTS` does, or `python -m NAME ARGUMENTS`."""
    sys.argv[:] = [name, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        sys.modules["__main__"] = ModuleType("__main__")
        _as_main(name)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(name))
        runpy.run_path(os.path.abspath(name), run_name="__main__")


# --- tracebacks without the frames of a watch: PyTorch hands each call to it, and it calls PyTorch,
# so the stack has frames that it would not have,
#
# the user's line, functional.mse_loss, overrides.handle_torch_function, _watch.Watch...,
# functional.mse_loss, ...
#
# of which all between the user's line and the second `mse_loss` are left out.


_HANDED_ON = handle_torch_function.__code__


def seen(codes: Sequence[CodeType]) -> list[int]:
    """The frames of a stack, given outermost first, that are there without a watch."""
    kept: list[int] = []
    between = [code is _HANDED_ON or code.co_filename == _watch.__file__ for code in codes]
    for is_between, group in groupby(range(len(codes)), between.__getitem__):
        run = [*group]
        behind = codes[run[-1] + 1 :]
        if not is_between or all(codes[index] is _HANDED_ON for index in run):
            kept += run
        elif codes[run[0]] is _HANDED_ON and kept and behind and codes[kept[-1]] is behind[0]:
            # PyTorch's function, which handed its call to the watch, and was called by it
            kept.pop()
    return kept


def clean(error: BaseException) -> None:
    """Give an exception, and all that it carries, the traceback that it has without a watch."""
    error.__traceback__ = _without_command(error.__traceback__)
    errors = [error]
    for each in errors:  # which grows
        each.__traceback__ = _without_watch(each.__traceback__)
        inside = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        errors += [
            other
            for other in (each.__cause__, each.__context__, *inside)
            if other is not None and all(other is not known for known in errors)
        ]


def _without_command(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames that lead to the program."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith(
        ("hodiff.cli", "runpy")
    ):
        traceback = traceback.tb_next
    return traceback


def _without_watch(traceback: TracebackType | None) -> TracebackType | None:
    steps = steps_of(traceback)
    kept = seen([step.tb_frame.f_code for step in steps])
    rest: TracebackType | None = None
    for step in [steps[index] for index in reversed(kept)]:
        rest = TracebackType(rest, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return rest


COMMANDS = {
    "explain": (
        "run a script; "
        "if a backward pass fails, say which variable, which lines, why, and what to do",
        explain,
    ),
    "info": ("print versions, devices and settings, for a report", info),
    "tour": (_tour.HELP, _tour.run),
}
"""Of each command what it is for, and what runs it and gives the exit status."""
