"""The written-out norms give PyTorch's values, gradients, and running statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core._substitutes import ExactNorms
from hodiff.errors import GraphError

LAYERS = {
    "layer": (lambda: nn.LayerNorm(4), (5, 3, 4)),
    "layer, two dims": (lambda: nn.LayerNorm((3, 4)), (5, 3, 4)),
    "layer, no affine": (lambda: nn.LayerNorm(4, elementwise_affine=False), (5, 4)),
    "layer, no bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "batch": (lambda: nn.BatchNorm1d(3), (6, 3)),
    "batch 2d": (lambda: nn.BatchNorm2d(3, affine=False), (6, 3, 2, 2)),
    "batch, no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (6, 3, 2)),
    "batch, cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (6, 3)),
    "batch, eval": (lambda: nn.BatchNorm1d(3).eval(), (6, 3)),
    "instance": (lambda: nn.InstanceNorm1d(3, affine=True), (4, 3, 5)),
    "instance, statistics": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (4, 3, 2, 2)),
    "instance, eval": (lambda: nn.InstanceNorm1d(3, track_running_stats=True).eval(), (4, 3, 5)),
    "weight, rows": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
    "weight, columns": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=1), (5, 4)),
    "weight, whole": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=None), (5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_definition_agrees_with_the_kernel(name):
    build, shape = LAYERS[name]
    native = build().double()
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.add_(torch.rand_like(parameter))
    written = copy.deepcopy(native)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(native(x))
    native.load_state_dict(written.state_dict())
    one = torch.autograd.grad((native(x) * weights).sum(), [x, *native.parameters()])
    with ExactNorms():
        value = written(x)
        two = torch.autograd.grad((value * weights).sum(), [x, *written.parameters()])
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    for a, b in zip(native.buffers(), written.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype):
    x = (torch.randn(8, 64) * 100).to(dtype)
    norm = nn.LayerNorm(64).to(dtype)
    with ExactNorms():
        written = norm(x)
    assert written.dtype == dtype
    torch.testing.assert_close(written, norm(x), rtol=2e-2, atol=2e-2)


def test_a_single_value_per_channel_is_refused_as_by_pytorch():
    norm = nn.BatchNorm1d(3)
    with ExactNorms(), pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.ones(1, 3))


def test_training_batch_norm_is_noted():
    with ExactNorms() as norms:
        nn.BatchNorm1d(3).eval()(torch.ones(2, 3))
        assert not norms.mixes_samples
        nn.BatchNorm1d(3)(torch.ones(2, 3))
    assert norms.mixes_samples


@pytest.mark.parametrize("kernel", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("training", [True, False])
def test_the_kernels_arguments_have_an_order_of_their_own(kernel, training):
    """`torch.batch_norm` takes weight and bias before the statistics, `F.batch_norm` behind them."""
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    weight, bias, mean, var = torch.tensor([[1.0, 2.0], [0.1, 0.2], [0.5, -0.5], [1.0, 4.0]], dtype=torch.float64)
    given = [part.clone() for part in (weight, bias, mean, var)]
    with ExactNorms() as norms:
        found = getattr(torch, kernel)(x, weight, bias, mean, var, training, 0.1, 1e-5, False)
    torch.testing.assert_close(
        found, getattr(nn.functional, kernel)(x, given[2], given[3], given[0], given[1], training, 0.1, 1e-5)
    )
    for now, expected in zip((weight, bias, mean, var), given, strict=True):
        torch.testing.assert_close(now, expected)
    assert norms.mixes_samples == (training and kernel == "batch_norm")


def test_taylor_mode_knows_that_order_too():
    x = torch.randn(4, 2, dtype=torch.float64)
    weight, bias, mean, var = torch.tensor([[1.0, 2.0], [0.1, 0.2], [0.5, -0.5], [1.0, 4.0]], dtype=torch.float64)

    def kernel(x):
        return (torch.batch_norm(x, weight, bias, mean, var, False, 0.1, 1e-5, False) ** 3).sum(1)

    slope = weight / (var + 1e-5).sqrt()
    expected = (6 * slope**2 * ((x - mean) * slope + bias)).sum(1)
    for method in ("jets", "reverse"):
        torch.testing.assert_close(hodiff.laplacian(kernel, x, method=method), expected)


def test_a_batch_norm_with_nothing_after_the_flag_mixes_too():
    x = torch.randn(4, 3, dtype=torch.float64)
    with ExactNorms() as norms:
        nn.functional.batch_norm(x, None, None, None, None, True)
    assert norms.mixes_samples


X = torch.tensor([0.3, -0.7, 1.1])


def test_a_norm_that_did_not_matter_once_may_matter_later():
    norm, head = nn.LayerNorm(3), torch.ones(3, requires_grad=True)

    def loss(x):
        return ((norm(x) * head) ** 3).sum()

    x = X.clone().requires_grad_()
    hodiff.hvp(loss(x), head, X, create_graph=True)
    with pytest.raises(GraphError, match="third derivative"):
        hodiff.hvp(loss(x), x, X, create_graph=True)


def test_an_operation_that_is_right_at_second_order_is_searched_at_third():
    def f(x):
        stats = [torch.zeros(2), torch.ones(2)]
        rows = torch.ops.aten._batch_norm_with_update(x, torch.ones(2), torch.zeros(2), *stats, 0.1, 1e-5)[0]
        return (rows**3).sum()

    x = torch.randn(4, 2)
    hodiff.hvp(f, x, x)
    with pytest.raises(GraphError, match="third derivative"):
        hodiff.hvp(f, x, x, create_graph=True)


ALONE = {
    "batch": lambda x, bias: F.batch_norm(x, None, None, None, bias, True),
    "batch, eval": lambda x, bias: F.batch_norm(x, torch.zeros_like(bias), torch.ones_like(bias), None, bias),
    "layer": lambda x, bias: F.layer_norm(x, (4,), None, bias),
    "instance": lambda x, bias: F.instance_norm(x[None], None, None, None, bias),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_bias_alone(name):
    """PyTorch's second derivative by it is zero, and of group norm an error of its own."""
    torch.manual_seed(0)
    x, bias, v = torch.randn(4, 4).double(), torch.randn(4).double(), torch.randn(4).double()
    norm, h = ALONE[name], 1e-5
    f = lambda bias: norm(x, bias).sin().sum()
    expected = (hodiff.grad(f, bias + h * v) - hodiff.grad(f, bias - h * v)) / (2 * h)
    torch.testing.assert_close(hodiff.hvp(f, bias, v), expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(hodiff.hvp(f, bias, v, create_graph=True), expected, rtol=1e-7, atol=1e-8)
    bias = bias.requires_grad_()
    with pytest.raises(GraphError, match="the bias of a norm without a weight is silently wrong"):
        hodiff.hvp(f(bias), bias, v)
    with pytest.raises(GraphError, match="the bias of a norm without a weight is silently wrong"):
        hodiff.hvp(checkpoint(f, bias, use_reentrant=False), bias, v)
    weight = torch.ones_like(v)
    both = lambda bias: F.layer_norm(x, (4,), weight, bias).sin().sum()
    assert hodiff.hvp(both(bias), bias, v).abs().max() > 0.1  # with a weight it is right
