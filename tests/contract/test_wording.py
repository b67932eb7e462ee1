"""The wording of errors and warnings: articles, counts and names of types, in all that the tables of mistakes raise."""

import re
import warnings

import numpy as np
import pytest
import torch

from hodiff._core._arguments import kind, plural
from tests.contract.test_advice import CALLS
from tests.contract.test_wrong_calls import ROWS

WRONG = re.compile(
    r"""
      \ba\ (?!one\b)[aeio]\w+ | \ba\ (?:SGD|LBFGS|LSTM|MLP|RNN)\b      # an article
    | \ban\ [bcdfgjkpqtvwyz]\w*
    | NoneType | builtin_function | \b1\ (?!is\b|as\b|has\b)[a-z]+s\b | \(s\)   # a type, a count
    | \b([a-z]{2,})\ \1\b                                             # a word twice
    | \w:\ (?:is|has|are|holds|returned)\ \w                          # a verb without a subject
    """,
    re.VERBOSE,
)


SAID = {**ROWS, **CALLS}


@pytest.mark.parametrize("name", [name for name, (_, _, *kind) in SAID.items() if TypeError not in kind])
def test_what_is_said_of_a_mistake(name: str) -> None:
    """But for what Python says of a signature."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            SAID[name][0]()
        except Exception as error:
            texts = [str(error)]
    for text in (*texts, *(str(each.message) for each in caught)):
        assert not WRONG.search(text), text


@pytest.mark.parametrize("text", ["x: got a int.", "f returned a NoneType", "1 functions of residuals", "x: is a list"])
def test_it_is_seen(text: str) -> None:
    """What a newcomer listed."""
    assert WRONG.search(text)


def test_what_a_value_is_called() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    values = None, 3, [1, 2], (), optimizer, torch.nn.LSTM(2, 2), torch.nn.SiLU(), len, int, np.ones(2), torch.ones(2)
    names = "None", "an int", "a list of 2", "a tuple of 0", "an SGD", "an LSTM", "a SiLU", "a function"
    assert tuple(map(kind, values)) == (*names, "the class int", "a NumPy array", "a Tensor")
    assert [plural(n, "vector") for n in (0, 1, 2000)] == ["0 vectors", "1 vector", "2,000 vectors"]
