"""An evaluation is the same function each time, but for what is held or taken off, and only while it is."""

import pytest
import torch
from torch import nn

import hodiff
from hodiff._core._call import call
from hodiff._core._lending import EvaluationContext
from hodiff.verify._trace import ScalarEvaluation


@pytest.fixture
def evaluation():
    def f(x):
        h = torch.nn.functional.dropout(x * 2, 0.5)
        h.register_hook(lambda g: 3 * g)
        return (h * x.detach()).sum()

    with EvaluationContext(call(f, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), passes=0)) as context:
        yield ScalarEvaluation(context, torch.Generator().manual_seed(0))


def gradient(evaluation):
    x = evaluation.point[0].clone().requires_grad_()
    evaluation.scalar((x,)).backward()
    return x.grad


def test_random_numbers_are_drawn_again(evaluation):
    assert evaluation.drew
    assert torch.equal(evaluation.scalar(evaluation.point), evaluation.scalar(evaluation.point))


def test_hooks_are_off_inside_and_on_after(evaluation):
    whole = gradient(evaluation)
    with evaluation.altered(hooks=False):
        torch.testing.assert_close(gradient(evaluation), whole / 3)
    torch.testing.assert_close(gradient(evaluation), whole)


def test_values_are_held_inside_and_not_after(evaluation):
    (site,) = evaluation.recorded().sites
    moved = (evaluation.point[0] * 3,)
    free, still = float(evaluation.scalar(moved)), float(evaluation.scalar(evaluation.point))
    with evaluation.altered({site.key: site.value}):
        assert float(evaluation.scalar(moved)) == pytest.approx(3 * still)
    assert float(evaluation.scalar(moved)) == free == pytest.approx(9 * still)
    evaluation.allow(["f"])
    assert float(evaluation.scalar(moved)) == pytest.approx(3 * still)


D = torch.float64


def test_checking_moves_no_buffer_of_a_closure():
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    hodiff.check_derivatives(lambda x: m(x).square().sum(), torch.randn(4, 3, dtype=D))
    assert m[1].num_batches_tracked == 0


def test_checking_under_autocast_is_not_rounded():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hodiff.check_derivatives(lambda x: m.double()(x).sum(), torch.randn(4, 3)).ok


X = torch.tensor([0.3, -0.7, 1.1])


def test_derivatives_in_double_precision_take_buffers_along():
    model = nn.Linear(3, 2)
    model.register_buffer("matrix", torch.ones(2, 2))
    hodiff.check_derivatives(lambda model: (model(X.to(model.weight.dtype)) @ model.matrix).square().sum(), model)
