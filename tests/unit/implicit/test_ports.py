"""What public projects compute through solutions and steps, in this library's calls, each against its own formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff.implicit import argmin, fixed_point
from tests.support.differences import first_difference, relative_error

D = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def flat(parts: object) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


# --- DARTS: the architect's step --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        h = self.inputs(x)
        for layer, w in zip(self.layers, alpha.softmax(1), strict=True):
            h = w[0] * layer(h).tanh() + w[1] * F.softplus(layer(h)) + w[2] * h
        return self.output(h)


def test_darts_the_architect_s_step() -> None:
    """A step of momentum and weight decay, from where an optimiser stands; its gradient, without the difference."""
    torch.manual_seed(0)
    model, alpha, xi = Mixed().double(), 0.1 * randn(2, 3), 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=xi, momentum=0.9, weight_decay=3e-4)
    X, labels, train, valid = randn(40, 4), torch.arange(40) % 3, slice(0, 20), slice(20, 40)
    loss = lambda a, m, rows: F.cross_entropy(m(X[rows], a), labels[rows])
    for _ in range(3):
        optimizer.zero_grad()
        loss(alpha, model, train).backward()
        optimizer.step()
    names, leaves = zip(*model.named_parameters(), strict=True)
    buffers = [{"momentum": optimizer.state[p]["momentum_buffer"].clone()} for p in leaves]
    at = lambda a, w, rows: F.cross_entropy(functional_call(model, w, (X[rows], a)), labels[rows])

    def ours(a: Tensor) -> Tensor:
        w = hodiff.unroll(lambda m: loss(a, m, train), model, optimizer, 1, state=(3, buffers))
        return at(a, w, valid)

    got = hodiff.grad(ours, alpha)

    # As it is written there: the unrolled model, its gradient v by the weights, two points along v.
    slope = torch.autograd.grad(loss(alpha, model, train), leaves)
    moved = [
        p - xi * (0.9 * b["momentum"] + g + 3e-4 * p).detach() for p, g, b in zip(leaves, slope, buffers, strict=True)
    ]
    w, a = {n: p.detach().requires_grad_() for n, p in zip(names, moved, strict=True)}, alpha.clone().requires_grad_()
    direct, *v = torch.autograd.grad(at(a, w, valid), [a, *w.values()])
    v = dict(zip(names, v, strict=True))
    R = 1e-2 / flat(v.values()).norm()
    side = lambda sign: hodiff.grad(
        at, alpha, args=({n: (p + sign * R * v[n]).detach() for n, p in model.named_parameters()}, train)
    )
    assert relative_error(got, direct - xi * (side(1) - side(-1)) / (2 * R)) < 1e-6
    assert relative_error(got, direct - xi * hodiff.cross_hvp(loss, alpha, model, v, args=(train,))) < 1e-12


# --- hypertorch: ridge with a weight for each feature -----------------------------------------------------------------


def test_hypertorch_ridge() -> None:
    """Its `CG` on the map of a gradient step: (1 - J)ᵀ u = ∂E/∂w, and the gradient -uᵀ ∂map/∂λ; and the closed form."""
    A, y, B, z = randn(30, 8), randn(30, seed=1), randn(20, 8, seed=2), randn(20, seed=3)
    theta = 0.2 * randn(8, seed=4)
    inner = lambda w, t: 0.5 * (A @ w - y).square().mean() + 0.5 * (t.exp() * w * w).sum()
    outer = lambda w: 0.5 * (B @ w - z).square().mean()
    solved = lambda t: torch.linalg.solve(A.T @ A / 30 + torch.diag(t.exp()), A.T @ y / 30)
    got = hodiff.grad(lambda t: outer(argmin(inner, solved(t.detach()), args=(t,))), theta)
    mapped = lambda w, t: w - 0.1 * hodiff.grad(inner, w, args=(t,))
    iterated = hodiff.grad(lambda t: outer(fixed_point(mapped, solved(t.detach()), args=(t,))), theta)
    w, t = solved(theta).requires_grad_(), theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(inner(w, t), w, create_graph=True)
    J = torch.stack([torch.autograd.grad(w - 0.1 * slope, w, e, retain_graph=True)[0] for e in torch.eye(8, dtype=D)])
    (b,) = torch.autograd.grad(outer(w), w)
    u = torch.linalg.solve((torch.eye(8, dtype=D) - J).T, b)
    (theirs,) = torch.autograd.grad(w.detach() - 0.1 * slope, t, u)
    closed = hodiff.grad(lambda t: outer(solved(t)), theta)
    for found in (got, iterated, theirs):
        assert relative_error(found, closed) < 1e-10


# --- iMAML: the inner solve -------------------------------------------------------------------------------------------


def conjugate_gradients(product: object, b: Tensor, steps: int) -> Tensor:
    x, r = torch.zeros_like(b), b.clone()
    d, size = r.clone(), r @ r
    for _ in range(steps):
        image = product(d)
        step = size / (d @ image)
        x, r = x + step * d, r - step * image
        size, before = r @ r, size
        d = r + size / before * d
    return x


def test_imaml_the_inner_solve() -> None:
    """Weights near a common start, φ = argmin L(φ) + λ|φ - θ|²/2: the start's gradient is (1 + H/λ)⁻¹ ∇L_val(φ)."""
    torch.manual_seed(1)
    net, lam = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(), 2.0
    X, y, V, z = randn(10, 2), randn(10, 1, seed=1), randn(10, 2, seed=2), randn(10, 1, seed=3)
    start = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    loss = lambda m: (m(X) - y).square().mean()
    near = lambda m: loss(m) + 0.5 * lam * sum((p - start[n]).square().sum() for n, p in m.named_parameters())
    for _ in range(8):  # Newton's method
        H = hodiff.HessianOperator(near, net)
        with torch.no_grad():
            step = H.unflatten(torch.linalg.solve(H.dense(), H.flatten(H.gradient)))
            for n, p in net.named_parameters():
                p -= step[n]
    adapted = argmin(near, net)
    value = (functional_call(net, adapted, (V,)) - z).square().mean()
    got = flat(torch.autograd.grad(value, list(start.values())))

    b = flat(torch.autograd.grad((net(V) - z).square().mean(), list(net.parameters())))
    H = hodiff.HessianOperator(loss, net)
    theirs = conjugate_gradients(lambda v: v + H @ v / lam, b, 30)
    assert relative_error(got, theirs) < 1e-7
    few = conjugate_gradients(lambda v: v + H @ v / lam, b, 5)  # as many as there; what that leaves is said here
    with pytest.warns(hodiff.ConvergenceWarning, match=r"after 5 products"):
        five = flat(
            torch.autograd.grad(
                (functional_call(net, argmin(near, net, products=5), (V,)) - z).square().mean(), list(start.values())
            )
        )
    assert relative_error(five, got) < 5 * relative_error(few, theirs) + 1e-3


# --- higher: five steps -----------------------------------------------------------------------------------------------


def test_higher_five_steps() -> None:
    """Its few-shot example, small: batch norms in training, in-place ReLUs, gradients summed over tasks."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(16, 3),
    ).double()  # fmt: skip
    labels, tasks = torch.arange(3), [(randn(3, 1, 14, 14, seed=s), randn(3, 1, 14, 14, seed=s + 9)) for s in (1, 2)]
    query = lambda w, x: F.cross_entropy(functional_call(net, w, (x,)), labels)
    for support, held in tasks:
        w = hodiff.unroll(lambda m, x=support: F.cross_entropy(m(x), labels), net, hodiff.rules.SGD(lr=0.1), 5)
        query(w, held).backward()
    got = [p.grad for p in net.parameters()]
    expected = []
    for support, held in tasks:
        w = dict(net.named_parameters())
        for _ in range(5):
            grads = torch.autograd.grad(query(w, support), list(w.values()), create_graph=True)
            w = {n: p - 0.1 * g for (n, p), g in zip(w.items(), grads, strict=True)}
        expected.append(torch.autograd.grad(query(w, held), list(net.parameters())))
    assert relative_error(flat(got), flat([a + b for a, b in zip(*expected, strict=True)])) < 1e-12


# --- a deep equilibrium -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The residual layer of the tutorial on deep equilibria: convolutions and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((4, 6), (6, 4)))
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for channels in (6, 4, 4))
        for convolution in (self.first, self.second):
            convolution.weight.data.normal_(0, 0.01)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](F.softplus(self.first(z)))
        return self.norms[2](F.softplus(z + self.norms[1](x + self.second(y))))


def test_a_deep_equilibrium_by_gmres() -> None:
    torch.manual_seed(0)
    layer, x = Layer().double(), randn(1, 4, 3, 3)
    leaves = [*layer.parameters()]

    def solved() -> Tensor:
        z = torch.zeros(1, 4, 3, 3, dtype=D)
        with torch.no_grad():
            for _ in range(200):
                z = layer(z, x)
        return z

    def value() -> Tensor:
        return (fixed_point(lambda z: layer(z, x), solved()).tanh() * randn(1, 4, 3, 3, seed=1)).sum()

    got = torch.autograd.grad(value(), leaves)
    z = solved().requires_grad_()
    J = hodiff.jacobian(lambda z: layer(z, x), z).reshape(36, 36)
    (b,) = torch.autograd.grad((z.tanh() * randn(1, 4, 3, 3, seed=1)).sum(), z)
    u = torch.linalg.solve((torch.eye(36, dtype=D) - J).T, b.reshape(-1)).reshape(1, 4, 3, 3)
    assert relative_error(flat(got), flat(torch.autograd.grad(layer(z, x), leaves, u))) < 1e-7
    p, v = layer.second.weight, randn(4, 6, 3, 3, seed=2)
    weight = p.detach().clone()

    def moved(t: float) -> Tensor:
        p.data.copy_(weight + t * v)
        found = (solved().tanh() * randn(1, 4, 3, 3, seed=1)).sum()
        p.data.copy_(weight)
        return found

    index = next(i for i, leaf in enumerate(leaves) if leaf is p)
    assert relative_error((got[index] * v).sum(), first_difference(moved, 1e-4)) < 1e-6
