"""Ctrl-C at any moment leaves nothing behind: no switch, no loan, no leaf of ours; and the next call is right.

The suite interrupts each public name at a few moments; `--slow` at every one of them.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hodiff.jets._series import Turn
from tests.support.audit import unchanged
from tests.support.callers import CALLERS, SCALE, tensors
from tests.support.everything import ALONE, WITH_MODULES, of_module, with_a_module
from tests.support.interrupts import Interrupter
from tests.support.scene import Model, X

pytestmark = [
    pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning"),
    # an interrupt in a finaliser, or in a generator that is thrown away, is printed by Python and lost
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Call = Callable[[Model], Any]
CALLS: dict[str, Call] = {
    **{f"{c}, module in f": lambda m, c=c: c.run(c.shaped(m), X, ()) for c in CALLERS},
    **{f"{c}, module as point": lambda m, c=c: with_a_module(c, m, of_module(c)) for c in WITH_MODULES},
    **{name: lambda m, call=call: call(X) for name, call in ALONE.items()},
}


def interrupt(call: Call, moments: int | None) -> None:
    """Interrupt a call at so many moments, all of them by default, and look around after each."""
    model = Model()
    run = lambda: call(model)
    torch.manual_seed(7)
    expected = tensors(run())
    count = Interrupter()
    count(run)
    step = 1 if moments is None else max(1, count.moments // moments)
    for at in itertools.islice(range(1 + step // 2, count.moments + 1, step), moments):
        interrupter = Interrupter(at)
        try:
            with unchanged(model, X, SCALE):
                try:
                    interrupter(run)
                except KeyboardInterrupt as stopped:
                    stopped.__traceback__ = None
                    with Turn():  # the next expansion forgets that one was not counted out
                        pass
        except AssertionError as error:
            raise AssertionError(f"interrupted at {interrupter.place}:\n{error}") from None
    assert not model.fired
    torch.manual_seed(7)
    torch.testing.assert_close(tensors(run()), expected)


@pytest.mark.parametrize("name", CALLS)
def test_at_some_moments(name: str) -> None:
    interrupt(CALLS[name], 4)


@pytest.mark.parametrize("name", ["hvp, module as point", "laplacian, module in f", "jvp, module in f"])
def test_at_more_moments(name: str) -> None:
    interrupt(CALLS[name], 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_at_every_moment(name: str) -> None:
    interrupt(CALLS[name], None)
