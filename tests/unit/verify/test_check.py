import pytest
import torch
from torch import nn

import hodiff
from tests.support.modules import Cube


class WrongSecond(torch.autograd.Function):
    """x^3 with a right first derivative whose own derivative is lost."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(3 * x**2)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0].detach() * g


def point(*shape):
    return torch.randn(shape, dtype=torch.float64)


def test_buffers_are_in_double_precision_as_parameters_are():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("by", torch.eye(3))

        def forward(self):
            return (self.weight @ self.by).sin().sum()

    report = hodiff.check_derivatives(lambda m: m(), Rotated())
    assert report.ok and report.dtype == torch.float64


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_a_right_function_passes_at_every_order(order):
    report = hodiff.check_derivatives(lambda x: (x.sin() * x.exp()).sum(), point(4), order=order)
    assert report.ok
    assert report.dtype == torch.float64
    assert sorted({check.order for check in report.checks}) == list(range(1, order + 1))


def test_a_linear_function_has_zero_second_derivative():
    report = hodiff.check_derivatives(lambda x: 3 * x.sum(), point(4), order=3)
    assert report.ok
    assert [check.computed for check in report.checks if check.order == 2] == [0.0] * 3


def test_vector_outputs_are_checked_by_random_weights():
    assert hodiff.check_derivatives(lambda x: x**2, point(3)).ok


def test_a_stop_gradient_is_found_and_placed():
    with pytest.raises(hodiff.DerivativeError, match=r"disagrees.*along x\['b'\]\)") as info:
        hodiff.check_derivatives(lambda p: (p["a"] * p["b"].detach()).sum(), {"a": point(2), "b": point(2)}, order=1)
    report = info.value.report
    assert not report.ok
    assert {check.where for check in report.checks} == {("x['b']",)}
    assert "disagrees" in str(report)


def test_a_function_with_a_wrong_second_derivative():
    with pytest.raises(hodiff.DerivativeError, match="order 2") as info:
        hodiff.check_derivatives(lambda x: WrongSecond.apply(x).sum(), point(3))
    assert all(check.verdict == "agrees" for check in info.value.report.checks if check.order == 1)


@pytest.mark.parametrize("order", [2, 3])
def test_a_right_function_of_the_users_own_is_checked_without_a_warning(order):
    """Warnings are errors here; the one that is left out says to make this check."""
    assert hodiff.check_derivatives(lambda x: Cube.apply(x).sum(), point(3), order=order).ok


def test_third_order_through_layer_norm():
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 2, dtype=torch.float64)
    assert hodiff.check_derivatives(lambda m: m(x).square().sum(), model, order=3, directions=1).ok
    assert model[0].weight.dtype == torch.float32


def test_dropout_is_replayed_and_the_random_state_kept():
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    report = hodiff.check_derivatives(lambda x: nn.functional.dropout(x**3).sum(), point_of_ones(), generator=generator)
    assert report.ok
    assert torch.equal(torch.get_rng_state(), state)


def point_of_ones():
    return torch.ones(8, dtype=torch.float64)


def test_float32_where_f_cannot_run_in_float64():
    data = torch.randn(3)
    report = hodiff.check_derivatives(lambda x: torch.dot(x, data) ** 2, torch.randn(3))
    assert report.dtype == torch.float32
    assert report.ok


def test_a_kink_is_inconclusive_or_wrong_but_never_fine():
    with pytest.raises(hodiff.DerivativeError, match="disagrees"):
        hodiff.check_derivatives(lambda x: x.relu().sum(), torch.zeros(1, dtype=torch.float64), order=1)


@pytest.mark.parametrize(
    ("keywords", "words"), [({"order": 0}, "order: got 0"), ({"directions": 0}, "directions: got 0")]
)
def test_bad_counts(keywords, words):
    with pytest.raises(hodiff.InputError, match=words):
        hodiff.check_derivatives(lambda x: x.sum(), point(2), **keywords)


def test_a_value_instead_of_a_function():
    with pytest.raises(hodiff.InputError, match="give the function, not its value"):
        hodiff.check_derivatives(point(1).sum(), point(1))


def test_errors_of_f_pass_through():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hodiff.check_derivatives(broken, point(2))


def test_independence_is_an_error():
    with pytest.raises(hodiff.GraphError, match="carries no graph"):
        hodiff.check_derivatives(lambda x: torch.ones(()), point(2))
