"""What a user may call inside of `f`, for every public name that takes a function: right, or refused in named words.

The rows are operators and transforms (`tests/support/inside.py`), the columns every public name. What is right is told
by the same function written plainly. Each is called twice, the second time after plain autograd has used it as well:
what PyTorch compiles at first use stays behind.
"""

import re
from contextlib import suppress
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.support.callers import CALLERS, Caller, D
from tests.support.inside import INSIDE, Inside

pytestmark = pytest.mark.filterwarnings("ignore")  # of what PyTorch calls prototypes, deprecated, or slow

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
NAMED = {caller.name: caller for caller in CALLERS}
ROWS = pytest.mark.parametrize("row", INSIDE)
WITHOUT_ANOTHER_ROUTE = ("jet",)
"""What only Taylor mode gives, which has rules for some of this."""
WRONG_TWICE = [row for name, row in INSIDE.items() if name.endswith("twice through weight_norm")]
"""What a program that does not use hodiff gets wrong."""
NO_VALUE = ("sparse.sparsity_pattern", "jets.report")
"""What says something of how a function is computed."""


@cache
def expected(caller: Caller, row: Inside) -> list[Tensor]:
    return [t.detach().clone() for t in caller(row.plain, X)]


@cache
def used_plainly(row: Inside) -> None:
    """Let PyTorch differentiate it, if it can."""
    x = X.clone().requires_grad_()
    with suppress(Exception):
        torch.autograd.grad(row.function(x).sum(), x)


def fault(caller: Caller, row: Inside) -> str:
    """What is wrong with a cell; nothing where it is right, or refused by name."""
    allowed = [row.refused] if row.refused else []
    if caller.name == "check_derivatives":  # of f as it stands, whose own second derivative PyTorch has wrong
        allowed += ["disagrees with finite differences"] if row in WRONG_TWICE else []
    if caller.name in WITHOUT_ANOTHER_ROUTE:
        allowed += ["Taylor mode has no rule for "]
    for again in (False, True):
        if again:
            used_plainly(row)
        try:
            found = [t.detach() for t in caller(row.function, X)]
        except Exception as error:
            if not any(re.search(words, str(error)) for words in allowed):
                return f"{caller.name}: {type(error).__name__}: {error}"
            continue
        if caller.name not in NO_VALUE:
            right = expected(caller, row)
            if len(found) != len(right) or not all(map(torch.allclose, found, right)):
                return f"{caller.name}: {found}, right {right}, the {'second' if again else 'first'} time"
    return ""


@pytest.mark.table(wide=60)
@ROWS
@pytest.mark.parametrize("name", ["grad", "hvp", "laplacian"])
def test_the_main_names(row: str, name: str) -> None:
    assert not fault(NAMED[name], INSIDE[row])


SLOW = ("func.linearize",)
"""Rows whose cells take seconds."""


@pytest.mark.table(wide=120)
@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.nightly] * (row in SLOW)) for row in INSIDE])
@pytest.mark.parametrize("name", NAMED)
def test_every_name(name: str, row: str) -> None:
    assert not fault(NAMED[name], INSIDE[row])
