"""What public projects write, in the words of this library: uses that were awkward, each against its own formula."""

import pytest
import torch
from torch import nn

import hodiff

D = torch.float64


def network(inputs, outputs, width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def runge_kutta(f, state, steps, h):
    """The classical method, by hand."""
    add = lambda a, b, c: tuple(x + c * y for x, y in zip(a, b, strict=True))
    for _ in range(steps):
        k1 = f(state)
        k2 = f(add(state, k1, h / 2))
        k3 = f(add(state, k2, h / 2))
        k4 = f(add(state, k3, h))
        state = tuple(x + h / 6 * (a + 2 * b + 2 * c + d) for x, a, b, c, d in zip(state, k1, k2, k3, k4, strict=True))
    return state


def test_ffjord_with_a_probe_that_stays_fixed_over_the_solve():
    net, x = network(3, 3), torch.randn(5, 3, dtype=D)
    e = torch.randint(0, 2, x.shape).to(D) * 2 - 1

    def ours(state):
        value, found = hodiff.value_and_divergence(net, state[0], vectors=e)
        return value, -found.value

    def theirs(state):
        z = state[0] if state[0].requires_grad else state[0].requires_grad_()
        value = net(z)
        (pulled,) = torch.autograd.grad(value, z, e, create_graph=True)
        return value, -(pulled * e).sum(1)

    losses = []
    for f in (ours, theirs):
        z, log_p = runge_kutta(f, (x.clone(), torch.zeros(5, dtype=D)), 4, 0.25)
        losses.append((0.5 * z.square().sum(1) - log_p).mean())
    torch.testing.assert_close(losses[0], losses[1])
    found, expected = (torch.autograd.grad(loss, list(net.parameters()), allow_unused=True) for loss in losses)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_ffjord_halving_the_step_shows_the_order_of_the_method():
    """With a probe drawn anew at each stage the right-hand side would not be smooth, and no order would show."""
    net, x = network(2, 2), torch.randn(4, 2, dtype=D)
    e = torch.ones_like(x)

    def f(state):
        value, found = hodiff.value_and_divergence(net, state[0], vectors=e, create_graph=False)
        return value, -found.value

    start = (x, torch.zeros(4, dtype=D))
    coarse, middle, fine = (runge_kutta(f, start, n, 1 / n)[1] for n in (4, 8, 16))
    assert 12 < float((coarse - middle).norm() / (middle - fine).norm()) < 20


def test_deepqmc_log_and_sign():
    """The local kinetic energy, with the sign of the wave function of the same evaluation."""
    net, r = network(6, 9, 16), torch.randn(5, 6, dtype=D)

    def psi(r):
        sign, log = torch.linalg.slogdet(net(r).reshape(-1, 3, 3))
        return log, sign

    (log, sign), gradient, laplacian = hodiff.value_grad_and_laplacian(psi, r, has_aux=True)
    energy = -0.5 * (laplacian + gradient.square().sum(-1))
    wave = lambda r: torch.linalg.det(net(r).reshape(-1, 3, 3))
    expected = -0.5 * torch.diagonal(hodiff.hessian(wave, r, batch_ndim=1), dim1=1, dim2=2).sum(1) / wave(r)
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(sign * log.exp(), wave(r))


def test_stylegan2_path_lengths_are_there_to_be_logged():
    net, w, penalty = network(4, 12), torch.randn(6, 4, dtype=D), hodiff.PathLengthPenalty().double()
    noise = torch.randn(6, 3, 2, 2, dtype=D)
    images = lambda w: net(w).reshape(6, 3, 2, 2)
    loss, outputs = penalty(images, w, vectors=noise, return_outputs=True)
    z = w.clone().requires_grad_()
    (pulled,) = torch.autograd.grad((images(z) * noise / 2).sum(), z, create_graph=True)
    lengths = pulled.square().sum(1).sqrt()
    mean = 0.01 * lengths.mean()
    torch.testing.assert_close(penalty.lengths, lengths.detach())
    torch.testing.assert_close(loss, 2 * (lengths - mean).square().mean())
    torch.testing.assert_close(outputs, images(w))


def navier_stokes(o, d_x, d_y, d_t, d_xx, d_yy):
    u, v = o[:, 0], o[:, 1]
    momentum = d_t[:, :2] + u[:, None] * d_x[:, :2] + v[:, None] * d_y[:, :2] - 0.01 * (d_xx + d_yy)[:, :2]
    pressure = torch.stack([d_x[:, 2], d_y[:, 2]], 1)
    return (momentum + pressure).square().sum(1).mean() + (d_x[:, 0] + d_y[:, 1]).square().mean()


def test_pino_three_outputs_unpack():
    net, x = network(3, 3), torch.rand(7, 3, dtype=D)
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
    net, x = network(2, 1), torch.rand(7, 2, dtype=D, requires_grad=True)
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


def test_adahessian_with_one_probe():
    """z ∘ Hz of a list of parameters, in one product."""
    net, x = network(3, 1), torch.randn(5, 3, dtype=D)
    loss = lambda m: m(x).square().mean()
    z = [torch.randint(0, 2, p.shape).to(D) * 2 - 1 for p in net.parameters()]
    found = [a * b for a, b in zip(z, hodiff.hvp(loss, net, z), strict=True)]
    H = hodiff.hessian(loss, net, matrix=True)
    flat = torch.cat([part.reshape(-1) for part in z])
    torch.testing.assert_close(torch.cat([part.reshape(-1) for part in found]), flat * (H @ flat))


def test_trpo_ten_steps_of_conjugate_gradients():
    """Fisher products of a Gaussian policy by its divergence, ten steps, and no warning."""
    net, states = network(3, 2), torch.randn(20, 3, dtype=D)
    policy = lambda m, batch: m(batch)
    divergence = lambda mean, batch: (0.5 * (mean - mean.detach()).square().sum(), len(mean))
    g = torch.randn(sum(p.numel() for p in net.parameters()), dtype=D)
    F = hodiff.GaussNewtonOperator(policy, divergence, net, data=[states]) + 0.1
    found = hodiff.solve(F, g, iterations=10).value
    A, x, r = F.dense(), torch.zeros_like(g), g.clone()
    p, rr = r.clone(), r @ r
    for _ in range(10):
        Ap = A @ p
        step = rr / (p @ Ap)
        x, r = x + step * p, r - step * Ap
        p, rr = r + (r @ r) / rr * p, r @ r
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-8)


def test_deq_spectral_radius():
    f, z = network(4, 4), torch.randn(4, dtype=D)
    J = hodiff.JacobianOperator(lambda z: f(z), z)
    found = hodiff.spectral_radius(J)
    expected = torch.linalg.eigvals(J.dense()).abs().max()
    assert abs(float(getattr(found, "value", found)) - float(expected)) < 1e-6


def test_laplace_jacobians_of_a_model():
    net, x = network(3, 2), torch.randn(5, 3, dtype=D)
    J = hodiff.jacobian(lambda m: m(x), net, matrix=True).unflatten(0, (5, 2))
    for i in (0, 4):
        rows = hodiff.jacobian(lambda m, i=i: m(x[i]), net, matrix=True)
        torch.testing.assert_close(J[i], rows)


def test_pcgrad_gradients_and_masks():
    trunk, heads = nn.Linear(3, 4).double(), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]).double()
    model, x = nn.ModuleList([trunk, heads]), torch.randn(5, 3, dtype=D)
    losses = [head(trunk(x)).square().mean() for head in heads]
    gradients, used = hodiff.multi_grad(losses, model, return_used=True)
    shared = [key for key in used[0] if used[0][key] and used[1][key]]
    assert shared == ["0.weight", "0.bias"]
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(losses[0], list(model.parameters()), retain_graph=True)
    assert not gradients[0]["1.1.weight"].any()
