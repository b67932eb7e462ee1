"""`derivatives_of`: each derivative of a tensor computed at the first look, and once. And the record of `partials`."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hodiff
from tests.support.modules import two_layers
from tests.support.passes import Count

D = torch.float64


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def problem(outputs=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x = torch.randn(4, 3, dtype=D, requires_grad=True)
    return net, x


@pytest.mark.parametrize("outputs", [1, 2])
def test_derivatives_are_those_of_the_function(outputs):
    net, x = problem(outputs)
    d = hodiff.derivatives_of(net(x), x)
    for index in ((0,), (2,), (0, 0), (1, 0), (0, 1), (2, 1, 1), (0, 1, 2)):
        expected = hodiff.partial(net, x.detach(), index, method="jets")
        assert d[index].shape == (4, outputs)
        torch.testing.assert_close(d[index], expected)
    torch.testing.assert_close(d[1], d[1,])


def test_of_a_grid_of_points():
    net, _ = problem(2)
    x = torch.randn(4, 5, 3, dtype=D, requires_grad=True)
    d = hodiff.derivatives_of(net(x), x, batch_ndim=2)
    for index in ((2,), (1, 0)):
        torch.testing.assert_close(d[index], hodiff.partial(net, x.detach(), index, batch_ndim=2, method="jets"))


def test_each_is_computed_once(count):
    net, x = problem()
    u = net(x)
    d = hodiff.derivatives_of(u, x)
    first = d[0]
    assert count.passes == 1
    assert d[0] is first
    _ = d[1], d[2]
    assert count.passes == 1
    _ = d[0, 0], d[0, 1], d[1, 0], d[0, 2]
    assert count.passes == 2 and d[1, 0] is d[0, 1]
    _ = d[1, 1]
    assert count.passes == 3
    _ = d[1, 2]
    assert count.passes == 3
    assert "computed: (0,)" in repr(d)


def test_several_numbers_at_each_point_cost_their_number():
    """Multiplications of matrices: a pass of second order for one number does not go through the graphs of all."""

    def work(outputs):
        u, x = net(points), points
        with FlopCounterMode(display=False) as flops:
            d = hodiff.derivatives_of(u[:, :outputs], x)
            _ = d[2], d[0, 0], d[1, 1], d[0, 0, 1]
        return flops.get_total_flops()

    net, points = problem(3)
    assert work(3) == 3 * work(1)


def test_they_train_and_leave_the_graph():
    net, x = problem()
    u = net(x)
    d = hodiff.derivatives_of(u, x)
    residual = d[0] - d[1, 1] + u * d[2]
    found = torch.autograd.grad(residual.square().mean(), list(net.parameters()), retain_graph=True)
    u_x, u_y, u_z = hodiff.partials(net, x.detach(), [0, (1, 1), 2])
    expected = torch.autograd.grad((u_x - u_y + net(x) * u_z).square().mean(), list(net.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    u.sum().backward()  # still there
    assert x.grad is not None


def test_without_grad_mode_they_are_detached_and_the_view_goes_on():
    net, x = problem()
    d = hodiff.derivatives_of(net(x), x)
    with torch.no_grad():
        assert not d[0, 1].requires_grad
    with torch.inference_mode():
        assert not d[0, 0, 2].requires_grad
    assert d[0, 1].requires_grad and d[0, 0, 2].requires_grad and d[0, 1, 1].requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("outputs", [1, 2])
def test_views_made_without_grad_mode(outputs, mode):
    net, x = problem(outputs)
    u = net(x)
    with mode():
        d = hodiff.derivatives_of(u, x)
        found = d[0], d[1, 2]
    assert not any(each.requires_grad for each in found) and d[0].requires_grad
    expected = hodiff.partials(net, x.detach(), [0, (1, 2)], method="jets", create_graph=False)
    torch.testing.assert_close(found, tuple(expected))


def test_a_column_taken_without_grad_mode_says_that_no_graph_leads_to_it():
    """PyTorch lets a view of a result that was made under `no_grad` say that it requires grad."""
    net, x = problem(2)
    u = net(x)
    with torch.no_grad():
        column, *_ = u.unbind(-1)
    assert column.requires_grad and column.grad_fn is None
    for run in (lambda: hodiff.derivatives_of(column, x)[0], lambda: hodiff.grad(column, x, batch_ndim=1)):
        with pytest.raises(hodiff.GraphError, match="the result does not depend on x"):
            run()


def test_a_linear_tensor_has_zero_second_derivatives():
    x = torch.randn(4, 2, dtype=D, requires_grad=True)
    d = hodiff.derivatives_of(x @ torch.tensor([1.0, 2.0], dtype=D), x)
    assert torch.equal(d[1], torch.full((4,), 2.0, dtype=D)) and not d[0, 1].any() and not d[0, 0, 1].any()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_norms_by_fixed_statistics_are_right(norm):
    net, x = problem()
    kind = norm(3, affine=True, track_running_stats=True).double().eval()
    with torch.no_grad():
        kind.running_mean.copy_(torch.tensor([0.3, -0.2, 0.1]))
        kind.running_var.copy_(torch.tensor([0.7, 1.4, 2.0]))
        kind.weight.copy_(torch.tensor([1.3, 0.6, -0.8]))

    def f(x):
        h = net[:2](x)[:, :3]
        return (kind(h) if norm is nn.BatchNorm1d else kind(h[..., None])[..., 0]).sin().prod(-1)

    def by_hand(x):
        h = net[:2](x)[:, :3]
        return ((h - kind.running_mean) / (kind.running_var + kind.eps).sqrt() * kind.weight + kind.bias).sin().prod(-1)

    d, e = hodiff.derivatives_of(f(x), x), hodiff.derivatives_of(by_hand(x), x)
    for index in ((0,), (0, 1), (2, 2), (0, 1, 2)):
        torch.testing.assert_close(d[index], e[index])
    found, expected = (torch.autograd.grad(view[1, 1].square().sum(), [x, *net[0].parameters()]) for view in (d, e))
    torch.testing.assert_close(found, expected)


def test_norm_layers_are_refused_where_pytorch_is_wrong():
    net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(3, 2, dtype=D, requires_grad=True)
    d = hodiff.derivatives_of(net(x), x)
    torch.testing.assert_close(d[0], hodiff.partial(net, x, 0))
    with pytest.raises(hodiff.GraphError, match=r"(?i)layer.?norm"):
        d[0, 0]


BAD = {
    "a function": (lambda x: (torch.sin, x), r"u: got a .*u = f\(x\)"),
    "no vectors": (lambda x: (x.sum((-1, -2)), x.reshape(4, 3, 1)), "partial derivatives need vectors"),
    "no batch": (lambda x: (x.sum(), x), "must begin with"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    make, message = BAD[name]
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.derivatives_of(*make(torch.randn(4, 3, requires_grad=True)))


def test_what_is_no_derivative():
    x = torch.randn(4, 3, requires_grad=True)
    d = hodiff.derivatives_of(x.square().sum(-1), x)
    with pytest.raises(hodiff.InputError, match="coordinates 0 to 2"):
        d[3]
    with pytest.raises(hodiff.InputError, match="expected a tuple of coordinates"):
        d["x"]
    with pytest.raises(TypeError, match="would not end"):
        list(d)
    with pytest.raises(hodiff.GraphError, match="does not depend on x"):
        hodiff.derivatives_of(torch.ones(4, requires_grad=True) * 2, x)[0]
    with pytest.raises(hodiff.GraphError, match="does not require grad"):
        hodiff.derivatives_of(torch.ones(4), torch.ones(4, 3))[0]


# --- the record of partials


def test_partials_unpack_and_are_named():
    f, x = (lambda x: x[:, 0] ** 2 * x[:, 1]), torch.tensor([[3.0, 2.0]], dtype=D)
    found = hodiff.partials(f, x, [(), 1, (1, 0), 0, 1], create_graph=False)
    u, u_y, u_xy, u_x, again = found
    assert [float(part) for part in (u, u_y, u_xy, u_x, again)] == [18, 9, 6, 12, 9]
    assert found[0, 1] is u_xy and found[1, 0] is u_xy and found[1,] is u_y and found[()] is u
    assert len(found) == 5 and found.indices == ((), (1,), (0, 1), (0,), (1,))
    for bad in (0, slice(None), "x"):
        with pytest.raises(hodiff.InputError, match="could be a position or a coordinate"):
            found[bad]
    with pytest.raises(hodiff.InputError, match=r"\(0, 0\) was not requested"):
        found[0, 0]
    assert copy.deepcopy(found).indices == pickle.loads(pickle.dumps(found)).indices == found.indices


def test_partials_are_a_container_to_other_calls():
    f, x = (lambda x: x[:, 0] ** 2 * x[:, 1]), torch.tensor([[3.0, 2.0]], dtype=D)
    jacobian = hodiff.jacobian(lambda z: hodiff.partials(f, z, [0, 1]), x)
    first, second = jacobian
    torch.testing.assert_close(first[0, 0], torch.tensor([4.0, 6.0], dtype=D))
    torch.testing.assert_close(second[0, 0], torch.tensor([6.0, 0.0], dtype=D))


@pytest.mark.parametrize(
    ("outputs", "indices", "jets"),
    [(1, [0, (0, 0)], False), (2, [0, (0, 0)], True), (2, [0, (0, 1)], False), (3, [(0, 1), 0], True)],
)
def test_several_outputs_go_through_jets(outputs, indices, jets, count):
    net, x = problem(outputs)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = hodiff.partials(net, x.detach(), indices)
    assert (count.passes == 0) == jets
    assert torch.equal(torch.get_rng_state(), state)
    for index, part in zip(found.indices, found, strict=True):
        torch.testing.assert_close(part, hodiff.partial(net, x.detach(), index, method="reverse"))


def test_dropout_is_drawn_once_where_the_route_changes():
    f = lambda x: torch.stack([torch.dropout(x, 0.5, True).square().sum(-1)] * 3, -1)
    x = torch.ones(4, 6, dtype=D)
    torch.manual_seed(0)
    found = hodiff.partials(f, x, [(), (0, 0)])
    torch.manual_seed(0)
    value, second = hodiff.partials(f, x, [(), (0, 0)], method="jets")
    assert torch.equal(found[()], value) and torch.equal(found[0, 0], second)


def test_partials_unpack_in_the_order_asked_for() -> None:
    """A dict unpacks into its keys, which are numbers too."""
    found = hodiff.partials(lambda z: (z**3).sum(-1), torch.ones(1, 2, dtype=D), [0, (1, 1)])
    first, second = found
    assert found[1, 1] is second
    with pytest.raises(hodiff.InputError, match="could be a position or a coordinate"):
        found[0]
    torch.testing.assert_close(first, torch.full_like(first, 3.0))
    torch.testing.assert_close(second, torch.full_like(second, 6.0))


def navier_stokes(o, d_x, d_y, d_t, d_xx, d_yy):
    u, v = o[:, 0], o[:, 1]
    momentum = d_t[:, :2] + u[:, None] * d_x[:, :2] + v[:, None] * d_y[:, :2] - 0.01 * (d_xx + d_yy)[:, :2]
    pressure = torch.stack([d_x[:, 2], d_y[:, 2]], 1)
    return (momentum + pressure).square().sum(1).mean() + (d_x[:, 0] + d_y[:, 1]).square().mean()


def test_pino_three_outputs_unpack():
    net, x = two_layers(3, 3), torch.rand(7, 3, dtype=D)
    loss = navier_stokes(*hodiff.partials(net, x, [(), 0, 1, 2, (0, 0), (1, 1)]))
    z = x.clone().requires_grad_()
    o = net(z)
    by = lambda columns: torch.stack([torch.autograd.grad(c.sum(), z, create_graph=True)[0] for c in columns], 1)
    first = by(o.T)
    second = [by(first[:, :, k].T)[:, :, k] for k in (0, 1)]
    expected = navier_stokes(o, *first.unbind(2), *second)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(*(torch.autograd.grad(v, list(net.parameters())) for v in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_deepxde_residual_of_a_cached_view():
    """Burgers: u_t + u u_x - ν u_xx, as `dde.grad.jacobian(y, x, j=...)` and `hessian` are used there."""
    net, x = two_layers(2, 1), torch.rand(7, 2, dtype=D, requires_grad=True)
    u = net(x)
    d = hodiff.derivatives_of(u, x)
    residual = d[1] + u * d[0] - 0.01 * d[0, 0]
    (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)
    expected = g[:, 1:] + u * g[:, :1] - 0.01 * h[:, :1]
    torch.testing.assert_close(residual, expected)
    for a, b in zip(
        *(
            torch.autograd.grad(v.square().mean(), list(net.parameters()), retain_graph=True)
            for v in (residual, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
