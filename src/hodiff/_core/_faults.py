"""The exceptions that a fallback may take for the failure of what it tried.

An exception may be no failure. What the handler of a signal raises (a time limit, Ctrl-C) comes at
whatever line is being run; and an exception of a class of its own means something to its makers. A
call that went on by another route would have lost them.
"""

from __future__ import annotations

import gc
import signal
import sys
from types import CodeType, FrameType
from typing import Any

from hodiff.errors import HodiffError

__all__ = ["interrupt_behind", "interrupts", "is_fault"]

_FAULTS = frozenset({
    ArithmeticError, AssertionError, AttributeError, FileNotFoundError, FloatingPointError,
    IndexError, KeyError, LookupError, NotImplementedError, OSError, OverflowError, PermissionError,
    RuntimeError, TypeError, ValueError, ZeroDivisionError,
})  # fmt: skip
"""What Python and PyTorch raise where code fails.

Not TimeoutError, MemoryError, nor any derived class.
"""


def is_fault(error: BaseException) -> bool:
    """Whether code failed: an exception of a common class or of ours, raised by no handler of a
    signal.

    A warning too, where the filters make exceptions of them: PyTorch warns of what it batches
    slowly.
    """
    return (type(error) in _FAULTS or isinstance(error, (HodiffError, Warning))) and not interrupts(
        error
    )


def interrupts(error: BaseException) -> bool:
    """Whether the handler of a signal raised an exception, or one in whose wake it was raised."""
    return interrupt_behind(error) is not None


def interrupt_behind(error: BaseException | None) -> BaseException | None:
    """The exception that the handler of a signal raised, where this one is that, or took its place.

    PyTorch's own contexts fail while an interrupt passes them: `vmap` takes down a level that it
    had not put up.
    """
    codes = _handlers()
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                return error
            trace = trace.tb_next
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__context__
    return None


def interrupted() -> bool:
    """Whether this is called by a signal's handler, or by a callback of the collector, that came
    inside of a call.
    """
    codes = _handlers() | {_code(callback) for callback in gc.callbacks}
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("hodiff."):
        frame = frame.f_back
    return frame is not None


def _handlers() -> set[CodeType | None]:
    return {_code(signal.getsignal(number)) for number in signal.valid_signals()}


def _code(handler: Any) -> CodeType | None:
    """The code that runs where a handler is called: of a function, a method, a partial,
    an object with `__call__`.
    """
    handler = getattr(handler, "func", handler)
    function = (
        handler
        if hasattr(handler, "__code__")
        else getattr(handler, "__func__", type(handler).__call__)
    )
    return getattr(function, "__code__", None)
