"""What a watch would change in what a program prints, undone: frames in tracebacks, and the places of warnings.

PyTorch hands each call to the watch, and the watch calls PyTorch: the stack has frames that it would not have,

    the user's line, functional.mse_loss, overrides.handle_torch_function, _watch.Watch..., functional.mse_loss, ...

of which all between the user's line and the second `mse_loss` are left out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, Self, TextIO

from torch.overrides import handle_torch_function

from hodiff.graph import _watch

_HANDED_ON = handle_torch_function.__code__


def seen(codes: Sequence[CodeType]) -> list[int]:
    """Which frames of a stack, given outermost first, are there without a watch."""
    kept: list[int] = []
    index = 0
    while index < len(codes):
        end = index
        while end < len(codes) and (codes[end] is _HANDED_ON or codes[end].co_filename == _watch.__file__):
            end += 1
        if any(codes[each] is not _HANDED_ON for each in range(index, end)):
            again = codes[index] is _HANDED_ON and end < len(codes) and kept and codes[kept[-1]] is codes[end]
            if again:  # PyTorch's function, which handed its call to the watch, and was called by it
                kept.pop()
            index = end
        else:
            kept.append(index)
            index += 1
    return kept


# --- tracebacks -------------------------------------------------------------------------------------------------------


def clean(error: BaseException) -> None:
    """Give an exception, and all that it carries, the traceback that it has without a watch."""
    stack, found = [error], {id(error)}
    error.__traceback__ = _without_command(error.__traceback__)
    while stack:
        each = stack.pop()
        each.__traceback__ = _without_watch(each.__traceback__)
        more = [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
        for other in more:
            if other is not None and id(other) not in found:
                found.add(id(other))
                stack.append(other)


def _without_command(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames that lead to the program."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("hodiff.cli."):
        traceback = traceback.tb_next
    return traceback


def _without_watch(traceback: TracebackType | None) -> TracebackType | None:
    steps: list[TracebackType] = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    kept = seen([step.tb_frame.f_code for step in steps])
    rest: TracebackType | None = None
    for step in [steps[index] for index in reversed(kept)]:
        rest = TracebackType(rest, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return rest


# --- warnings ---------------------------------------------------------------------------------------------------------


class Warnings:
    """A context in which a warning that PyTorch gives under a watch names the line that it names without."""

    def __enter__(self) -> Self:
        self._shown = warnings.showwarning
        warnings.showwarning = self._show
        return self

    def __exit__(self, *exc: Any) -> None:
        if warnings.showwarning == self._show:  # else it is the program's
            warnings.showwarning = self._shown

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        stack = _frames(sys._getframe(1))
        kept = [stack[-1 - index] for index in reversed(seen([frame.f_code for frame in reversed(stack)]))]
        places = [(frame.f_code.co_filename, frame.f_lineno) for frame in stack]
        place = places.index((filename, lineno)) if (filename, lineno) in places else len(kept)
        if place < len(kept) and kept[place] is not stack[place]:
            if _known(stack[place], kept[place], message, category):
                return
            filename, lineno = kept[place].f_code.co_filename, kept[place].f_lineno or 0
        self._shown(message, category, filename, lineno, file, line)


def _frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _known(given: FrameType, right: FrameType, message: Warning | str, category: type[Warning]) -> bool:
    """Whether the right place has shown this warning before, which is noted there, and no longer at the given one."""
    noted = given.f_globals.get("__warningregistry__", {})
    if not noted.pop((str(message), category, given.f_lineno), None):
        return False  # a filter shows it each time
    registry = right.f_globals.setdefault("__warningregistry__", {})
    if registry.get("version") != noted.get("version"):
        registry.clear()
        registry["version"] = noted.get("version")
    key = (str(message), category, right.f_lineno)
    return bool(registry.get(key)) or registry.update({key: True}) is not None
