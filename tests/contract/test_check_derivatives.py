"""check_derivatives accepts what is right, and finds each planted fault: the library's own verification is verified."""

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.modules import BY_NAME, Cube
from tests.support.problems import PROBLEMS, Problem


class Detached(torch.autograd.Function):
    """Right at first order; the second derivative is lost, silently: its backward computes on ``.data``."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x.data**2 * g


class Wrong(Cube):
    """Wrong at first order already."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2.9 * x**2 * g


def stopped(x: Tensor) -> Tensor:
    """A stop-gradient nobody meant."""
    return (x * x.detach()).sum()


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_accepts_what_is_right(problem: Problem) -> None:
    report = hodiff.check_derivatives(problem.function, problem.point())
    assert report.order == 2
    assert report.checks
    assert str(report)


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize(
    ("f", "order"),
    [
        (lambda x: Detached.apply(x).sum(), 2),
        (lambda x: Wrong.apply(x).sum(), 1),
        (lambda x: Wrong.apply(x).sum(), 2),
        (stopped, 1),
        (stopped, 2),
    ],
)
def test_finds_what_is_wrong(f: object, order: int) -> None:
    x = torch.tensor([0.5, -1.1, 0.8], dtype=torch.float64)
    with pytest.raises(hodiff.DerivativeError, match=r"(?is)toleran"):
        hodiff.check_derivatives(f, x, order=order)


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
def test_a_first_derivative_that_is_right_passes_order_one() -> None:
    hodiff.check_derivatives(lambda x: Detached.apply(x).sum(), torch.tensor([0.5, -1.1], dtype=torch.float64), order=1)


@pytest.mark.parametrize("name", ["LayerNorm", "TransformerEncoderLayer", "weight_norm", "LSTM"])
def test_accepts_modules_to_the_third_order(name: str) -> None:
    setting = BY_NAME[name].build()
    hodiff.check_derivatives(setting.of_model, setting.model, order=2)
    hodiff.check_derivatives(setting.of_input, setting.x, order=3)


def test_draws_from_its_generator_alone() -> None:
    x = torch.tensor([0.5, -1.1], dtype=torch.float64)
    state = torch.get_rng_state()
    reports = [
        hodiff.check_derivatives(lambda t: (t**3).sum(), x, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert str(reports[0]) == str(reports[1])
    assert torch.equal(torch.get_rng_state(), state)
