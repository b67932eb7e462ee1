"""What testers found who had the documentation and not the code: each a case that was wrong, or changed the user's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff

D = torch.float64


@pytest.mark.parametrize("create_graph", [False, True])
def test_leaves_of_parameters_pass_for_parameters(create_graph):
    m = nn.Linear(2, 1).double()
    f = lambda m: sum((p**2).sum() for p in m.parameters() if isinstance(p, nn.Parameter)) + 0 * m.weight.sum()
    found = hodiff.grad(f, m, create_graph=create_graph)
    torch.testing.assert_close(found, {name: 2 * p.detach() for name, p in m.named_parameters()})
    torch.testing.assert_close(hodiff.hessian(f, m, matrix=True), 2 * torch.eye(3, dtype=D))
    assert not isinstance(found["bias"], nn.Parameter)


def test_frozen_parameters_pass_for_parameters_too():
    m = nn.Linear(2, 1).double()
    m.bias.requires_grad_(False)
    seen = []
    hodiff.grad(lambda m: seen.append(isinstance(m.bias, nn.Parameter)) or m.weight.sum(), m)
    assert seen == [True]


def test_the_mask_of_feature_alpha_dropout_is_drawn_once():
    x = torch.linspace(0.2, 1, 6, dtype=D)
    f = lambda x: F.feature_alpha_dropout((x**3)[:, None], 0.4, True)[:, 0]
    found = []
    for n in (2, 3):
        torch.manual_seed(0)
        found.append(hodiff.nth_derivative(f, x, n))
    torch.testing.assert_close(found[1], found[0] / x)  # of a x³ + b: 6 a, and 6 a x


@pytest.mark.parametrize("n", [2, 3])
def test_a_detached_derivative_is_refused_inside_torch_func(n):
    with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
        torch.func.grad(lambda x: hodiff.nth_derivative(lambda x: x**5, x, n).sum())(torch.ones(3))


class WritesIntoItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g *= 3 * x**2
        return g


def test_a_vector_of_the_users_is_not_written_into():
    u, x = torch.ones(3, dtype=D), torch.tensor([1.0, 2.0, 3.0], dtype=D)
    torch.testing.assert_close(hodiff.vjp(WritesIntoItsGradient.apply, x, u), 3 * x**2)
    assert torch.equal(u, torch.ones(3, dtype=D))


def test_a_table_met_through_a_closure_is_not_renormalised():
    table = nn.Embedding(3, 2, max_norm=1.0)
    with torch.no_grad():
        table.weight.mul_(5)
    before = table.weight.detach().clone()
    hodiff.grad(lambda y: (table(torch.tensor([0, 1])) * y).sum(), torch.ones(2))
    assert torch.equal(table.weight, before)


@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
@pytest.mark.parametrize("method", ["exact", "differences"])
def test_a_penalty_of_values_alone_moves_no_buffer(method):
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    with torch.no_grad():
        hodiff.hessian_penalty(m, torch.randn(4, 3), method=method)
    assert m[1].num_batches_tracked == 0


def test_a_penalty_of_values_alone_is_of_one_function():
    def penalty(grad_mode):
        torch.manual_seed(0)
        m = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Tanh()).double()
        with torch.set_grad_enabled(grad_mode):
            return hodiff.hessian_penalty(m, torch.ones(2, 3, dtype=D), samples=3).detach()

    torch.testing.assert_close(penalty(False), penalty(True))


def test_checking_moves_no_buffer_of_a_closure():
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    hodiff.check_derivatives(lambda x: m(x).square().sum(), torch.randn(4, 3, dtype=D))
    assert m[1].num_batches_tracked == 0


def test_checking_under_autocast_is_not_rounded():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hodiff.check_derivatives(lambda x: m.double()(x).sum(), torch.randn(4, 3)).ok


def test_both_draws_of_a_curvature_penalty_are_one():
    linear = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).double()
    found = hodiff.curvature_penalty(lambda x: linear(x).squeeze(1), torch.randn(8, 3, dtype=D), create_graph=False)
    torch.testing.assert_close(found, torch.zeros((), dtype=D))


def test_fields_by_reverse_mode_under_inference_mode():
    with torch.inference_mode():
        x = torch.linspace(0, 1, 12, dtype=D).reshape(4, 3)
        found = hodiff.laplacian(lambda z: z.sin().sum(1), x, method="reverse")
    torch.testing.assert_close(found.clone(), -x.clone().sin().sum(1))


def test_a_matrix_of_second_order_in_half_precision():
    x = torch.linspace(0.1, 1, 12).reshape(4, 3).bfloat16()
    found = hodiff.second_order_operator(lambda z: z.square().sum(1), x, torch.eye(3).bfloat16())
    torch.testing.assert_close(found, torch.full((4,), 6.0).bfloat16())


def test_an_operation_whose_derivative_fails_over_its_unused_results_is_told_in_our_words() -> None:
    x = torch.linspace(-1, 1, 6, dtype=D).reshape(2, 3)
    f = lambda bias: (torch.native_layer_norm(x * bias, (3,), None, bias, 1e-5)[0] ** 3).sum()
    with pytest.raises(hodiff.GraphError, match="layer_norm"):
        hodiff.hvp(f, x[0].clone(), x[1].clone())
