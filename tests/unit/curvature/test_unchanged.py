"""Whether a model is as it was is judged by its own parameters, never by those that a call lends to it."""

import threading

import pytest
import torch
from torch import nn

import hodiff
from hodiff._core import _locks
from hodiff._core._modules import ParameterLoan
from hodiff._core._where import Where
from hodiff.curvature._staleness import Modules


def lent(m: nn.Linear) -> ParameterLoan:
    loan = ParameterLoan(Where(m))
    loan.take()
    loan.put([torch.zeros(2, 2), torch.zeros(2)])
    return loan


def test_it_is_read_when_no_other_thread_has_it():
    m = nn.Linear(2, 2)
    where, seen = Where(m), []
    loan = lent(m)
    thread = threading.Thread(target=lambda: seen.append(Modules(where)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert seen == []
    loan.close()
    thread.join(10)
    seen[0].check()


def test_a_loan_that_ends_while_it_is_compared_is_no_change(monkeypatch):
    m = nn.Linear(2, 2)
    modules = Modules(Where(m))
    loan, claimed = lent(m), _locks.claimed

    def ending(found):
        loan.close()
        return claimed(found)

    monkeypatch.setattr(_locks, "claimed", ending)
    modules.check()


def test_a_parameter_that_was_replaced_is_a_change():
    m = nn.Linear(2, 2)
    H = hodiff.HessianOperator(lambda m: m.weight.square().sum(), m)
    v = torch.ones(6)
    H @ v
    m.bias = nn.Parameter(torch.ones(2))
    with pytest.raises(hodiff.GraphError, match="the model has changed since the operator was made"):
        H @ v
