import threading

import pytest
import torch
from torch import nn

import hodiff
from hodiff._core._swap import BufferLoan, ParameterLoan, reading


def test_parameters_are_replaced_wherever_they_occur_and_come_back():
    m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[1].weight = m[0].weight
    weight, alias = m[0].weight, torch.zeros(2, 2)
    loan = ParameterLoan([m])
    loan.put({id(weight): alias})
    assert m[0].weight is alias
    assert m[1].weight is alias
    loan.close()
    assert m[0].weight is weight
    assert m[1].weight is weight
    assert list(m[0]._parameters) == ["weight", "bias"]


def test_the_flat_weights_of_an_rnn_come_back_too():
    rnn = nn.LSTM(2, 3)
    real = list(rnn.parameters())
    hodiff.grad(lambda m: m(torch.ones(2, 1, 2))[0].sum(), rnn)
    assert all(a is b for a, b in zip(rnn._flat_weights, real, strict=True))


def test_buffers_are_clones_until_the_last_borrower_leaves():
    norm = nn.BatchNorm1d(2)
    mean = norm.running_mean
    outer, inner = BufferLoan(), BufferLoan()
    outer.take(norm)
    clone = norm.running_mean
    inner.take(norm)
    assert clone is not mean
    assert norm.running_mean is clone
    inner.close()
    assert norm.running_mean is clone
    outer.close()
    assert norm.running_mean is mean


def test_a_buffer_that_requires_grad_stays_an_input_of_f():
    m = nn.Module()
    m.register_buffer("scale", torch.ones(2, requires_grad=True))
    loan = BufferLoan()
    scale = m.scale
    loan.take(m)
    assert m.scale is scale
    loan.close()


def test_another_thread_waits_and_reads_the_real_parameters():
    m = nn.Linear(2, 2)
    weight = m.weight
    loan = ParameterLoan([m])
    loan.put({id(weight): torch.zeros(2, 2)})
    seen = []

    def read():
        with reading(m):
            seen.append(m.weight)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.1)
    assert seen == []
    loan.close()
    thread.join(10)
    assert seen == [weight]


def test_a_circle_of_waiting_threads_raises_instead_of_hanging():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    ready = threading.Barrier(2, timeout=10)
    raised = []

    def take(mine, other):
        loan = ParameterLoan([mine])
        try:
            ready.wait()
            ParameterLoan([other]).close()
        except hodiff.GraphError as error:
            raised.append(str(error))
        finally:
            loan.close()

    threads = [threading.Thread(target=take, args=pair) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert len(raised) == 1
    assert "wait for each other" in raised[0]


def test_scripted_modules_are_refused():
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(nn.Linear(2, 1))
    with pytest.raises(hodiff.InputError, match=r"TorchScript .* eager module"):
        hodiff.grad(lambda m: m(torch.ones(2)).sum(), scripted)
