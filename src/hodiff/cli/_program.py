"""Run a program as `python` runs it: its arguments, import path, `__main__`, and frames."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls, by this name


def run(name: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """What `python NAME ARGUMENTS` does, or `python -m NAME ARGUMENTS`.

    `__main__` stays when the program has ended, as it does in Python: handlers of its end still run in it.
    """
    sys.argv[:] = [name, *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    path = os.path.abspath(name)
    if is_module:
        sys.path[0] = os.getcwd()
        _as_main(name)
    elif os.path.isdir(path) or zipfile.is_zipfile(path):
        sys.path[0] = path
        _as_main("__main__", False)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        facts = {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
        vars(main).update(facts, __builtins__=builtins)
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        exec(_code(path), vars(main))


def _code(path: str) -> CodeType:
    with io.open_code(path) as file:
        compiled = pkgutil.read_code(file)  # type: ignore[attr-defined]
    if compiled is None:
        with io.open_code(path) as file:
            compiled = compile(file.read(), path, "exec", dont_inherit=True)
    return compiled
