"""Training steps with derivatives in them: the ways to write one, by the networks that they meet.

Each kind is a loss of `(net, x)`, where `x` has three features and the net gives one number for each row.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, jacrev, vmap

import hodiff

AG = torch.autograd.grad


def slopes(net, x):
    x = x.detach().requires_grad_()
    return x, AG(net(x).sum(), x, create_graph=True)[0]


def plain(net, x):
    return F.mse_loss(net(x).squeeze(-1), x.sum(1))


def forces(net, x):
    return slopes(net, x)[1].square().mean() + net(x).mean()


def penalty(net, x):
    return (slopes(net, x)[1].norm(dim=1) - 1).square().mean() + net(x).mean()


def residual(net, x):
    x, g = slopes(net, x)
    laplacian = sum(AG(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3))
    return (laplacian - 1).square().mean()


def third(net, x):
    x, g = slopes(net, x)
    second = AG(g[:, 0].sum(), x, create_graph=True)[0][:, 1]
    return AG(second.sum(), x, create_graph=True)[0].square().mean() + net(x).square().mean()


def product(net, x):
    """By the parameters: a Hessian-vector product, and its square."""
    parameters = list(net.parameters())
    g = AG(plain(net, x), parameters, create_graph=True)
    Hv = AG(sum(each.sum() for each in g), parameters, create_graph=True)
    return sum(each.square().sum() for each in Hv) + plain(net, x)


def flat(net, x):
    g = AG(plain(net, x), list(net.parameters()), create_graph=True)
    return plain(net, x) + 0.1 * sum(each.square().sum() for each in g)


def inner_step(net, x):
    """A step of training inside, as MAML takes."""
    weights = dict(net.named_parameters())
    first = F.mse_loss(functional_call(net, weights, (x,)).squeeze(-1), x.sum(1))
    moved = {
        n: w - 0.1 * g
        for (n, w), g in zip(weights.items(), AG(first, list(weights.values()), create_graph=True), strict=False)
    }
    return functional_call(net, moved, (x,)).square().mean()


def batched_rows(net, x):
    x, g = slopes(net, x)
    directions = torch.eye(3, dtype=x.dtype).unsqueeze(1).expand(3, len(x), 3)
    return AG(g, x, directions, create_graph=True, is_grads_batched=True)[0].square().mean()


def func_jacobian(net, x):
    return vmap(jacrev(lambda row: net(row[None]).sum()))(x).square().mean()


def func_hessian(net, x):
    return vmap(hessian(lambda row: net(row[None]).sum()))(x).square().mean()


def func_grad(net, x):
    return torch.func.grad(lambda x: net(x).sum())(x).square().sum(1).sqrt().mean()


def samples(net, x):
    weights = dict(net.named_parameters())

    def one(weights, row):
        return functional_call(net, weights, (row[None],)).square().sum()

    return sum(g.square().sum() for g in vmap(torch.func.grad(one), (None, 0))(weights, x).values()) + plain(net, x)


def field(net, x):
    return (hodiff.laplacian(net, x).squeeze(-1) - 1).square().mean()


def critic(net, x):
    return hodiff.gradient_penalty(net, x, target=1.0) + net(x).mean()


def pair(net, x):
    """Two losses, one inside of no_grad, one detached."""
    with torch.no_grad():
        target = net(x + 0.1)
    return F.mse_loss(net(x), target) + (net(x).detach() * slopes(net, x)[1].sum(1, keepdim=True)).mean()


def point_grad(net, x):
    return hodiff.grad(lambda x: net(x).sum(), x, create_graph=True).square().mean() + net(x).mean()


def force_loss(net, x):
    energy, force = hodiff.value_and_grad(lambda x: net(x).sum(), x, create_graph=True)
    return energy.square() + (force + 1).square().mean()


def point_hvp(net, x):
    return hodiff.hvp(lambda x: net(x).square().sum(), x, torch.ones_like(x), create_graph=True).square().mean()


def weight_hvp(net, x):
    ones = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    product = hodiff.hvp(lambda net: plain(net, x), net, ones, create_graph=True)
    return sum(each.square().sum() for each in product.values()) + plain(net, x)


def dense_hessian(net, x):
    matrix = hodiff.hessian(lambda x: net(x).square(), x, batch_ndim=1, create_graph=True)
    return matrix.square().mean()


def dense_jacobian(net, x):
    return hodiff.jacobian(lambda x: net(x) * x, x, batch_ndim=1, create_graph=True).square().mean()


def tangents(net, x):
    along = hodiff.jvp(lambda x: net(x) * x, x, torch.ones_like(x), create_graph=True)
    back = hodiff.vjp(lambda x: net(x) * x, x, torch.ones_like(x), create_graph=True)
    return along.square().mean() + back.square().mean()


def mean_flow(net, x):
    """A target along a direction, of a point in two parts, inside of no_grad."""
    point = (x, x[:, :1])
    with torch.no_grad():
        along = hodiff.jvp(lambda z: net(z[0] + z[1]), point, point)
    return F.mse_loss(net(x), along)


def elementwise(net, x):
    return hodiff.nth_derivative(lambda t: torch.sin(t * net[0].bias[0]), x, 3, create_graph=True).square().mean()


def few_partials(net, x):
    u_x, u_yy = hodiff.partials(net, x, [0, (1, 1)])
    return (u_x - u_yy).square().mean()


KINDS = {
    f.__name__: f
    for f in (
        plain, forces, penalty, residual, third, product, flat, inner_step, batched_rows, func_jacobian, func_hessian,
        func_grad, samples, field, critic, pair, point_grad, force_loss, point_hvp, weight_hvp, dense_hessian,
        dense_jacobian, tangents, mean_flow, elementwise, few_partials,
    )
}  # fmt: skip


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = torch.sin(self.first(x))
        return self.last(h + F.softplus(self.second(h)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.last = nn.Linear(1, 4), nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x):
        q, k, v = self.qkv(self.embed(x.unsqueeze(-1))).chunk(3, -1)
        return self.last(((q @ k.mT / 2).softmax(-1) @ v).mean(1))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv1d(1, 3, 2), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(F.silu(self.conv(x.unsqueeze(1))).flatten(1))


NETS = {
    "tanh": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
    "residual": Residual,
    "norm": lambda: nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 1)),
    "attention": Attention,
    "convolution": Convolution,
    "groups": lambda: nn.Sequential(nn.Linear(3, 6), nn.GroupNorm(2, 6), nn.Sigmoid(), nn.Linear(6, 1)),
}
