"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil
import warnings

import pytest

import hodiff

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["hodiff", *(m.name for m in pkgutil.walk_packages(hodiff.__path__, "hodiff.") if "__main__" not in m.name)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failed, _ = doctest.testmod(module, optionflags=FLAGS)
    assert failed == 0, "see the captured output"


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert count >= 30
