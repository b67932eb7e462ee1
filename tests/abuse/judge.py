"""Whether a call with bad input ended as it must."""

import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hodiff
from hodiff._core._lending import EvaluationContext
from hodiff.calculus._per_sample import Samples
from hodiff.curvature._probes import EstimatorProgress
from tests.abuse.calls import FUNCTIONS, Target, perform
from tests.abuse.values import LAYOUTS, VALUES
from tests.support.callers import tensors

SECONDS = 10
NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "not enough memory", "exceeds the limit")


class HangError(BaseException):
    """A call did not come back."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise in a call that computes longer than `SECONDS`; the caller looks after those that sleep."""

    def late(*_: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


CALLING = {EvaluationContext.at.__code__, EstimatorProgress.__call__.__code__, Samples.__call__.__code__}
"""What calls the user's code: `f`, and `callback=`."""
WITHIN = {"_update.<locals>.update"}
"""Likewise, by the names of functions that are made for each call."""
HERE = str(Path(hodiff.__file__).parent)


def of_the_user(error: BaseException) -> bool:
    """Whether an exception comes out of the user's code: the last of our frames is one that calls it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [frame.f_code for frame in frames if frame.f_code.co_filename.startswith(HERE)]
    last = bool(ours) and (ours[-1] in CALLING or ours[-1].co_qualname in WITHIN)
    return last or any(frame.f_code in FUNCTIONS for frame in frames)


def of_the_value(error: BaseException, replaced: dict[str, Any]) -> bool:
    """Whether what is given as a function raises the same by itself: written in C, it has no frame of its own."""
    for value in filter(callable, replaced.values()):
        for given in (), (torch.ones(2, 3, dtype=torch.float64),):
            try:
                value(*given)
            except Exception as own:
                if type(own) is type(error) and str(own) == str(error):
                    return True
    return False


def outcome(target: Target, replaced: dict[str, Any]) -> tuple[str, Any]:
    """`"answer"`, `"error of ours"`, `"of f"`, `"no memory"`, or what went wrong; and the answer or the exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limited():
                return "answer", perform(target, replaced)
        except hodiff.HodiffError as error:
            return "error of ours", error
        except HangError as error:
            return f"hangs, more than {SECONDS} s", error
        except BaseException as error:
            if of_the_user(error) or of_the_value(error, replaced):
                return "of f", error
            if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
                return "no memory", error
            return f"raises {type(error).__name__}: {str(error)[:200]}", error


GOOD = ("answer", "error of ours", "of f", "no memory")


def bad_value(target: Target, argument: str, value: str) -> str:
    """What becomes of a call in which one argument is replaced by a bad value."""
    return outcome(target, {argument: VALUES[value]()})[0]


def other_layout(target: Target, argument: str, layout: str) -> str | None:
    """What becomes of it where a tensor lies otherwise in memory: its answer is held against that of a plain one."""
    given = target.given().get(argument)
    if type(given) is not torch.Tensor or not given.is_floating_point() or given.layout is not torch.strided:
        return None
    if given.requires_grad:
        return None
    strange = LAYOUTS[layout](given)
    plain = torch.empty(given.shape, dtype=given.dtype)
    plain.copy_(strange.detach().clone().as_subclass(torch.Tensor))
    torch.manual_seed(3)
    verdict, found = outcome(target, {argument: strange})
    if verdict != "answer":
        return verdict
    torch.manual_seed(3)
    expected = outcome(target, {argument: plain})[1]
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        a, b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (a, b))
        if not torch.allclose(a.as_subclass(torch.Tensor).clone(), b.clone(), rtol=1e-9, atol=1e-12, equal_nan=True):
            return "another answer than for a plain tensor"
    return "answer"
