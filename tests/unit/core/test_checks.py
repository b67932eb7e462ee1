"""Whose line a warning or a message is about."""

import types
import warnings

import pytest
import torch
from torch import nn

import hodiff
from hodiff._core import _arguments

USERS = """
def penalize(hodiff, model, x):
    return hodiff.grad(lambda x: model(x).square().sum(1), x, batch_ndim=1)
"""


@pytest.mark.parametrize("name", ["hodiff_experiments", "hodiffs", "my.hodiff.copy"])
def test_a_module_of_the_users_whose_name_begins_like_ours(name):
    theirs = types.ModuleType(name)
    exec(compile(USERS, f"{name}.py", "exec"), theirs.__dict__)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs.penalize(hodiff, model, torch.rand(4, 2))
    assert [warning.filename for warning in caught] == [f"{name}.py"]


@pytest.mark.parametrize("name", ["hodiff", "hodiff.calculus._first"])
def test_ours_are_skipped(name):
    ours = types.ModuleType(name)
    exec("def inner(f): return f()\ndef outer(f, x, *, k=1): return inner(f)", ours.__dict__)
    assert ours.outer(_arguments.outside, 1) == 3
    theirs = types.ModuleType("hodiff_experiments")
    exec("def inner(f): return f()\ndef outer(f): return inner(f)", theirs.__dict__)
    assert theirs.outer(_arguments.outside) == 1
