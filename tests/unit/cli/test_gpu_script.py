"""`python -m benchmarks gpu`: what it says without a GPU, and its table, on the CPU."""

import re
import sys

import pytest
import torch
from benchmarks import __main__ as benchmarks
from benchmarks import gpu


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])
    assert benchmarks.main() == 2
    assert capsys.readouterr() == ("", "python -m benchmarks gpu: PyTorch sees no GPU on this machine.\n")


def test_its_derivatives_agree_with_those_by_hand():
    """In double and single precision; bfloat16 is slow on a CPU."""
    found = {}
    for make in (gpu.product, gpu.penalty, gpu.laplacian):
        exact = make(torch.device("cpu"), torch.float64, 16).by_hand()
        for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
            case = make(torch.device("cpu"), dtype, 16)
            found[case.name] = gpu.measured(case.ours, torch.device("cpu"), rounds=1)
            assert found[case.name].result.shape == exact.shape
            assert gpu.error(found[case.name].result, exact) < most
    assert len(found) == 3 and all(each.milliseconds > 0 for each in found.values())


@pytest.mark.wide
def test_its_table_has_a_line_for_each_precision(monkeypatch):
    monkeypatch.setattr(gpu, "DTYPES", (torch.float32,))
    lines = [*gpu.lines(torch.device("cpu"), 16)]
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"\| [^|]+ \| float32 \| [\d.]+, [\d.]+ \| 0, 0 \| \de-\d+, \de-\d+ \|", line), line


@pytest.mark.parametrize(
    ("program", "passed", "said"),
    [("print('= 2 passed in 1s =')", True, "2 passed in 1s"), ("print('FAILED a::b'); exit(1)", False, "FAILED a::b")],
)
def test_what_pytest_said_is_said(monkeypatch, program, passed, said):
    monkeypatch.setattr(gpu, "COMMAND", [sys.executable, "-c", program])
    found = gpu.tests()
    assert found[0] is passed and said in found[1]


def test_tests_that_take_too_long_are_ended(monkeypatch):
    monkeypatch.setattr(gpu, "COMMAND", [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(gpu, "SECONDS", 0.5)
    assert gpu.tests() == (False, "not done after 0.5 s")
