"""On the way to raising an error about a graph: who can say which line and which variable it is about?

`hodiff.graph` can. It stands beside the calculus, which imports nothing of it; it puts its `explainer` here
instead, and is asked with plain facts. What it answers is added to the message. Where it knows nothing,
is not loaded, or fails itself, the message stays as it is. Nothing here runs unless an error is raised.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core._faults import interrupts
from hodiff.errors import GraphError


class Failure(NamedTuple):
    """What is known where a graph cannot give what was asked.

    Attributes:
        error: The error that is about to be raised; `__cause__` is the engine's, if it was one.
        function: The user's function; None in the tensor form.
        again: Calls it once more, as the first time; None in the tensor form, and where it cannot be called alone.
        outputs: The tensors given, in the tensor form.
        leaves: The tensors that derivatives are taken by: in the function form aliases of `theirs`.
        theirs: The caller's own tensors.
        names: What those are called in messages.
        strict: Whether it is about each of the leaves: one that does not matter is an error.
    """

    error: GraphError
    function: Any
    again: Callable[[], Sequence[Tensor]] | None
    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    theirs: Sequence[Tensor]
    names: Sequence[str]
    strict: bool | None


Explainer = Callable[[Failure], str]

explainer: Explainer = lambda failure: ""  # noqa: E731 - nothing is known, until `hodiff.graph` puts its own here


class _State(threading.local):
    explaining = False
    last: weakref.ref[GraphError] | None = None


_state = _State()


def complete(failure: Failure) -> None:
    """Add to the message of an error what can be said of this very case; general advice gives way to that."""
    last, _state.last = _state.last, weakref.ref(failure.error)
    if last is not None and last() is failure.error:  # on its way out of another context
        return
    found = _asked(failure)
    facts = failure.error._facts
    if facts.kind == "freed":  # what is advised then is for a graph of the caller's, and holds whatever was found
        advice = facts.advice if failure.function is None else ""
    else:
        advice = "" if found else facts.advice
    if found or advice != facts.advice:
        words = f"{facts.stem or failure.error} {advice}".rstrip()
        failure.error.args = (f"{words}\n{found}" if found else words,)


def _asked(failure: Failure) -> str:
    if _state.explaining or torch.compiler.is_compiling():  # f is being called once more, or traced
        return ""
    _state.explaining = True
    try:
        return explainer(failure)
    except Exception as error:  # an explanation must not hide what it explains
        if interrupts(error):
            raise
        return ""
    finally:
        _state.explaining = False
