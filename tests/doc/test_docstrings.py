"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import math
import pkgutil
import re
import warnings

import pytest

import hodiff

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["hodiff", *(m.name for m in pkgutil.walk_packages(hodiff.__path__, "hodiff.") if "__main__" not in m.name)]


NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d*(?:e[-+]?\d+)?")


class Checker(doctest.OutputChecker):
    """Takes -1. for -1.0000: how many digits PyTorch prints, and the last of them, differ between processors."""

    def check_output(self, want, got, optionflags):
        if super().check_output(want, got, optionflags):
            return True
        wanted, found = NUMBER.findall(want), NUMBER.findall(got)
        text = [" ".join(NUMBER.sub("#", output).replace("[ ", "[").split()) for output in (want, got)]
        return (
            len(wanted) == len(found)
            and super().check_output(*text, optionflags)
            and all(
                math.isclose(float(w), float(f), rel_tol=2e-4, abs_tol=1e-9) for w, f in zip(wanted, found, strict=True)
            )
        )


def failures_in(module):
    runner = doctest.DocTestRunner(checker=Checker(), optionflags=FLAGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for test in doctest.DocTestFinder().find(module):
            public = getattr(module, test.name.removeprefix(f"{module.__name__}."), None)
            if not hasattr(public, "__wrapped__"):  # else its module has it, where it is run
                runner.run(test)
    return runner.failures


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert failures_in(importlib.import_module(name)) == 0, "see the captured output"


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("tensor([-1.0000])", "tensor([-1.])", True),
        ("tensor([-0.9999])", "tensor([-1.0000])", True),
        ("tensor([-1.0000])", "tensor([1.])", False),
        ("tensor([0.2500])", "tensor([0.2600])", False),
        ("4 products", "5 products", False),
        ("tensor([1., 2.])", "tensor([1.])", False),
        ("tensor([1.])", "tensor([1.], dtype=torch.float64)", False),
    ],
)
def test_the_last_digit_alone_may_differ(want, got, same):
    assert Checker().check_output(want + "\n", got + "\n", FLAGS) is same


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert count >= 30
