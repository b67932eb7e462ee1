"""Count what a call costs the interpreter: Python and builtin calls, the same number on every run and every machine."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType

Function = Callable[[], object]
Listener = Callable[[FrameType, str], None]

WARM_UP = 3  # first calls import, compile and fill caches
PARTS = 2  # of a file's path that name it: package and module


def count(function: Function) -> int:
    """The calls that ``function()`` makes once it is warm, itself left out."""
    return by_place(function).total()


def by_place(function: Function, within: str | None = None) -> Counter[str]:
    """The same calls by ``folder/file.py:function``: Python ones under what is called, builtin ones under their caller.

    ``within="hodiff"`` attributes each call to the innermost frame of that package which caused it: what PyTorch does
    on behalf of a line of ours stands under the function that holds the line, and the caller's own work under
    ``(outside)``.
    """
    found: Counter[str] = Counter()

    def listen(frame: FrameType, event: str) -> None:
        if event in ("call", "c_call"):
            found[_place(frame, within)] += 1

    for _ in range(WARM_UP):
        function()
    _listening(function, listen)
    found[_place_of(function, within)] -= isinstance(function, FunctionType)  # the entry itself; a partial has none
    return +found


def walked(function: Function, package: Path) -> dict[str, int]:
    """The Python frames of a package that ``function()`` enters, by ``path:function``, in the order of entering."""
    found: dict[str, int] = {}

    def listen(frame: FrameType, event: str) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            place = f"{path.relative_to(package).as_posix()}:{frame.f_code.co_qualname}"
            found[place] = found.get(place, 0) + 1

    _listening(function, listen)
    return found


def _listening(function: Function, listen: Listener) -> None:
    """Run it with the listener on; what turns the listener off is not the function's."""
    ours = sys._getframe()

    def heard(frame: FrameType, event: str, _: object) -> None:
        if frame is not ours:
            listen(frame, event)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # a collection's callbacks are calls too
    sys.setprofile(heard)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()


def _place(frame: FrameType, within: str | None) -> str:
    looked: FrameType | None = frame
    while within is not None and looked is not None and within not in Path(looked.f_code.co_filename).parts:
        looked = looked.f_back
    return _named(looked.f_code.co_filename, looked.f_code.co_qualname) if looked else "(outside)"


def _place_of(function: Function, within: str | None) -> str:
    if within is not None or not isinstance(function, FunctionType):
        return "(outside)"
    return _named(function.__code__.co_filename, function.__code__.co_qualname)


def _named(file: str, name: str) -> str:
    return f"{'/'.join(Path(file).parts[-PARTS:])}:{name}"
