"""The zoo: architectures and losses that people train, at small size, in float64, smooth at the point.

``ARCHITECTURES`` are `modules.Case`s: each builds the same model, input and scalar loss whenever it is called. What is
no derivative on purpose (straight-through) has an ``oracle`` whose ordinary derivatives are those that are meant.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hodiff
from tests.support.modules import DOUBLE, Case, _case, _refused, make_input, seeded, weighted_sum

# --- convolutions ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), norm
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x + self.second(F.silu(self.norm(self.first(x)))))


def resnet(norm: type = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), Residual(2, norm(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    )


class UNet(nn.Module):
    """Down, up, skip connection; with a time, an embedding of it is added in the middle."""

    def __init__(self, time: float | None = None) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Conv2d(4, 1, 1)
        self.norm, self.time = nn.GroupNorm(1, 2), time
        self.embed = nn.Linear(4, 2) if time is not None else None

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.down(x)))
        h = self.middle(F.avg_pool2d(skip, 2))
        if self.embed is not None:
            h = h + self.embed(sinusoids(x.new_full((1,), self.time), 4))[0, :, None, None]
        return self.out(torch.cat([skip, self.up(F.silu(h))], 1))


def sinusoids(t: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(100.0) * torch.arange(width // 2, dtype=t.dtype) / (width // 2))
    angles = t[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


def denoising(model: nn.Module, x: Tensor) -> Tensor:
    noise = make_input(*x.shape).flip(-1)
    return (model(0.8 * x + 0.6 * noise) - noise).square().mean()


class Dense(nn.Module):
    """DenseNet: each layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1 + i, 1, 3, padding=1) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.tanh(layer(x))], 1)
        return x.mean((2, 3))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(1, 1, k, padding=k // 2) for k in (1, 3, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.softplus(branch(x)) for branch in self.branches], 1).mean((2, 3))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.excite = nn.Conv2d(1, 3, 3), nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(h.mean((2, 3))))))
        return (h * gate[:, :, None, None]).tanh().mean((2, 3))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.LayerNorm(3)
        self.wide, self.narrow, self.scale = nn.Linear(3, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(h)))).permute(0, 3, 1, 2)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList([nn.Conv1d(2, 2, 2, dilation=2**i) for i in range(2)])
        self.gates = nn.ModuleList([nn.Conv1d(2, 2, 2, dilation=2**i) for i in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for i, (content, gate) in enumerate(zip(self.filters, self.gates, strict=True)):
            padded = F.pad(x, (2**i, 0))
            x = x + torch.tanh(content(padded)) * torch.sigmoid(gate(padded))
        return x


class StyleTransfer(nn.Module):
    """Adaptive instance normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        content, style = self.encode(x), self.encode(torch.sin(x))
        mean, std = style.mean((2, 3), keepdim=True), style.std((2, 3), keepdim=True)
        return self.decode(F.instance_norm(content) * std + mean)


# --- attention -------------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(1, 4, 2, stride=2), nn.Parameter(torch.zeros(1, 1, 4))
        self.position = nn.Parameter(torch.zeros(1, 5, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 6, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
        return self.head(self.block(h)[:, 0])


def rotated(x: Tensor, start: int = 0) -> Tensor:
    """Rotary embedding of the last two dimensions (time, width)."""
    half = x.shape[-1] // 2
    time = torch.arange(start, start + x.shape[-2], dtype=x.dtype)
    angle = time[:, None] * 10.0 ** -torch.arange(half, dtype=x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1)


class GPT(nn.Module):
    """One block with rotary embeddings, all at once or token by token with a cache of keys and values."""

    def __init__(self, cached: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.second, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.cached = cached

    def heads(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(-2, -3) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return rotated(q, start), rotated(k, start), v

    def attend(self, x: Tensor) -> Tensor:
        if not self.cached:
            return F.scaled_dot_product_attention(*self.heads(x, 0), is_causal=True)
        found, keys, values = [], [], []
        for t in range(x.shape[-2]):
            q, k, v = self.heads(x[..., t : t + 1, :], t)
            keys, values = [*keys, k], [*values, v]
            found.append(F.scaled_dot_product_attention(q, torch.cat(keys, -2), torch.cat(values, -2)))
        return torch.cat(found, -2)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.out(self.attend(x).transpose(-2, -3).flatten(-2))
        return h + self.down(F.gelu(self.up(self.second(h))))


class Llama(nn.Module):
    """RMSNorm and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(3), nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.memory = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.zeros(1, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.expand(len(x), -1, -1)
        return self.attention(x, memory, memory, need_weights=False)[0]


class LinearAttention(nn.Module):
    """Performer-like: positive features instead of a softmax, by running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., :, None] * v[..., None, :]).cumsum(-3)
        return (q[..., None, :] @ state)[..., 0, :] / (q * k.cumsum(-2)).sum(-1, keepdim=True)


class SetTransformer(nn.Module):
    """Pooling by attention to a learned seed."""

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.key, self.value = nn.Parameter(torch.ones(2, 3)), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.seed @ self.key(x).mT, -1) @ self.value(x)


class NeuralTuring(nn.Module):
    """Addressing a memory by content, then writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.key, self.erase = nn.Parameter(torch.ones(4, 3)), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory, reads = self.memory, []
        for row in x:
            weights = torch.softmax(4 * F.cosine_similarity(memory, self.key(row)[None], dim=-1), -1)
            reads.append(weights @ memory)
            memory = memory * (1 - weights[:, None] * torch.sigmoid(self.erase(row))) + weights[:, None] * row
        return torch.stack(reads)


# --- sequences -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type, **options: object) -> None:
        super().__init__()
        self.cell = kind(3, 2, batch_first=True, **options)
        self.head = nn.Linear(4 if options.get("bidirectional") else 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class Mamba(nn.Module):
    """A selective state space: the step, the input and the output matrices depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.step = nn.Parameter(torch.zeros(3, 2)), nn.Linear(3, 3)
        self.into, self.out_of, self.gate = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        step, b, c = F.softplus(self.step(x)), self.into(x), self.out_of(x)
        state, found = x.new_zeros(len(x), 3, 2), []
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.rate.exp())
            state = decay * state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
            found.append((state * c[:, t, None]).sum(-1))
        return torch.stack(found, 1) * F.silu(self.gate(x))


class DiagonalStateSpace(nn.Module):
    """S4-like: a convolution, by the Fourier transform, with a kernel of decaying oscillations."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.frequency, self.weight = (nn.Parameter(torch.rand(3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        t = torch.arange(n, dtype=x.dtype)[:, None]
        kernel = (self.weight * torch.exp(-self.decay.exp() * t) * torch.cos(self.frequency * t)).sum(-1)
        return torch.fft.irfft(torch.fft.rfft(x, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[..., :n]


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):  # tied over depth
            gate = torch.sigmoid(self.gate(x))
            x = gate * torch.tanh(self.body(x)) + (1 - gate) * x
        return x


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.channels = nn.LayerNorm(3), nn.Linear(4, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.tokens(self.norm(x).mT)).mT
        return x + F.gelu(self.channels(self.norm(x)))


# --- graphs, sets, symmetries ----------------------------------------------------------------------------------------

EDGES = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 0]])


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        source, target = EDGES
        messages = torch.tanh(self.message(torch.cat([x[source], x[target]], -1)))
        return self.update(torch.cat([x, torch.zeros_like(x).index_add(0, target, messages)], -1))


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])
        adjacency = torch.eye(4, dtype=DOUBLE).index_put((EDGES[1], EDGES[0]), torch.ones(6, dtype=DOUBLE))
        self.register_buffer("adjacency", adjacency / adjacency.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.adjacency @ x))
        return x


class GraphAttention(nn.Module):
    """A softmax over the edges that meet in a node."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Linear(3, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        (source, target), h = EDGES, self.body(x)
        scores = self.score(torch.cat([h[source], h[target]], -1))[:, 0].tanh().exp()
        total = scores.new_zeros(len(x)).index_add(0, target, scores)
        weights = scores / total[target]
        return torch.zeros_like(h).index_add(0, target, weights[:, None] * h[source])


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)).sum(-2))


class Equivariant(nn.Module):
    """EGNN: positions move along their differences, by weights of the squared distances."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Sequential(nn.Linear(1, 4), nn.SiLU(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        apart = x[:, None] - x[None]
        return x + (apart * self.weight(apart.square().sum(-1, keepdim=True))).sum(1)


class SchNet(nn.Module):
    """Continuous filters of distances: an energy of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out = nn.Linear(5, 3), nn.Linear(3, 1)
        self.feature = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        i, j = torch.triu_indices(len(x), len(x), 1)
        distances = (x[i] - x[j]).square().sum(-1).sqrt()
        basis = torch.exp(-2 * (distances[:, None] - torch.linspace(0, 3, 5, dtype=x.dtype)).square())
        return self.out((self.feature * F.softplus(self.filter(basis))).tanh()).sum()


# --- fields and physics ----------------------------------------------------------------------------------------------


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sin(2 * self.second(torch.sin(3 * self.first(x)))))


class NeRF(nn.Module):
    """A density and colors along rays, and the rendering that sums them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.density, self.color = nn.Linear(12, 5), nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, direction: Tensor) -> Tensor:
        depths = torch.linspace(0.5, 2.0, 4, dtype=direction.dtype)
        points = direction[:, None] * depths[:, None]
        h = F.softplus(self.body(torch.cat([points.sin(), points.cos(), (2 * points).sin(), (2 * points).cos()], -1)))
        optical = F.softplus(self.density(h))[..., 0] * 0.5
        passed = torch.exp(-(optical.cumsum(-1) - optical))
        return ((passed * (1 - torch.exp(-optical)))[..., None] * torch.sigmoid(self.color(h))).sum(1)


class FourierFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 3))
        self.body = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.frequencies
        return self.body(torch.cat([angles.sin(), angles.cos()], -1))


class DeepONet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Linear(3, 4), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(0, 1, 3, dtype=x.dtype)[:, None]
        return torch.tanh(self.branch(x)) @ torch.tanh(self.trunk(grid)).mT


class FourierOperator(nn.Module):
    """FNO: weights, held as pairs of reals, on the low frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral, self.local = nn.Parameter(torch.randn(3, 2)), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)[..., :3] * torch.view_as_complex(self.spectral)
        return torch.tanh(torch.fft.irfft(modes, x.shape[-1]) + self.local(x[..., None])[..., 0])


class KAN(nn.Module):
    """Kolmogorov-Arnold: a learned function of one variable on each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-(x[..., None] - torch.linspace(-2, 2, 5, dtype=x.dtype)).square())
        return torch.einsum("nib,iob->no", basis, self.weight)


def scalar_net(width: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))


def poisson_residual(model: nn.Module, x: Tensor) -> Tensor:
    return (hodiff.laplacian(lambda z: model(z)[..., 0], x) - x.sum(-1).sin()).square().mean()


def hamiltonian(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a Hamiltonian network: dH/dp and -dH/dq against velocities."""
    g = hodiff.grad(lambda z: model(z).sum(), x, create_graph=True)
    q, p = g.chunk(2, -1)
    return (torch.cat([p, -q], -1) - x.cos()).square().sum()


def lagrangian(model: nn.Module, x: Tensor) -> Tensor:
    """Accelerations of a Lagrangian network, from its Hessian in the velocities."""
    q, v = x[0].chunk(2)
    mass = 3 * v.square().sum() / 2
    energy = lambda v: model(torch.cat([q, v])[None]).sum() + 1.5 * v.square().sum()
    force = hodiff.grad(lambda q: model(torch.cat([q, v])[None]).sum(), q, create_graph=True)
    return torch.linalg.solve(hodiff.hessian(energy, v, create_graph=True), force).square().sum() + mass


def score_matching(model: nn.Module, x: Tensor) -> Tensor:
    """An energy model by Hyvärinen's loss."""
    g = hodiff.grad(lambda z: model(z).sum(), x, create_graph=True)
    trace = hodiff.laplacian(lambda z: model(z)[..., 0], x)
    return (0.5 * g.square().sum(-1) - trace).mean()


def penalized_critic(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() + 10 * hodiff.gradient_penalty(lambda z: model(z)[..., 0], x, target=1.0)


def maml(model: nn.Module, x: Tensor) -> Tensor:
    """The loss after one step of gradient descent on another task."""
    weights = dict(model.named_parameters())
    run = lambda w, z: torch.func.functional_call(model, w, (z,))
    g = torch.autograd.grad(run(weights, x.sin()).square().mean(), list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * each for (name, w), each in zip(weights.items(), g, strict=True)}
    return (run(moved, x) - x[:, :1]).square().mean()


class NeuralODE(nn.Module):
    """Four steps of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        f, h = self.field, 0.25
        for _ in range(4):
            a = f(x)
            b = f(x + h / 2 * a)
            c = f(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + f(x + h * c))
        return x


class Equilibrium(nn.Module):
    """DEQ: z = tanh(W z + U x), iterated to its fixed point; W is a contraction."""

    def __init__(self, steps: int = 60) -> None:
        super().__init__()
        self.w, self.u, self.steps = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), steps

    def forward(self, x: Tensor) -> Tensor:
        z, into = torch.zeros_like(x), self.u(x)
        for _ in range(self.steps):
            z = torch.tanh(0.3 * torch.tanh(self.w(z)) + into)
        return z


# --- flows and probability -------------------------------------------------------------------------------------------


class Coupling(nn.Module):
    """RealNVP: scales and shifts of one half from the other; the log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        volume = x.new_zeros(len(x))
        for net in self.nets:
            scale, shift = net(left).chunk(2, -1)
            left, right = right * torch.tanh(scale).exp() + shift, left
            volume = volume + torch.tanh(scale).sum(-1)
        return volume - 0.5 * (left.square() + right.square()).sum(-1)


class PlanarFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.b = (nn.Parameter(torch.rand(3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w + self.b[0])
        inner = 1 + (1 - h**2) * (F.softplus(self.u) @ self.w.square())
        return inner.log() - (x + self.u * h[:, None]).square().sum(-1)


class ConvolutionFlow(nn.Module):
    """Glow's mixing by a matrix: its log-determinant, and what it maps to."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.slogdet(self.matrix)[1] - torch.tanh(x @ self.matrix.mT).square().sum(-1)


class VAE(nn.Module):
    """The negative evidence bound, with noise that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 4), nn.Sequential(nn.Linear(2, 3), nn.Softplus(), nn.Linear(3, 3))
        self.register_buffer("noise", make_input(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + self.noise * (0.5 * log_variance).exp()
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(-1)
        return (self.decode(z) - x).square().sum(-1) + divergence


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits, means, scales = self.body(x).chunk(3, -1)
        target = x.sum(-1, keepdim=True).sin()
        parts = -0.5 * ((target - means) * (-scales).exp()).square() - scales
        return torch.logsumexp(torch.log_softmax(logits, -1) + parts, -1)


class BayesByBackprop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.rho = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3, 2))
        self.register_buffer("noise", make_input(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        scale = F.softplus(self.rho)
        divergence = (0.5 * (scale.square() + self.mean.square()) - scale.log()).sum()
        return torch.tanh(x @ (self.mean + scale * self.noise)).sum(-1) - 0.1 * divergence


def gumbel(model: nn.Module, x: Tensor) -> Tensor:
    noise = -torch.log(-torch.log(torch.sigmoid(make_input(4, 3))))
    return weighted_sum(torch.softmax((model(x) + noise) / 0.7, -1))


class KalmanFilter(nn.Module):
    """The likelihood of a linear Gaussian model."""

    def __init__(self) -> None:
        super().__init__()
        self.move, self.noise = nn.Parameter(0.5 * torch.eye(2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        mean, cov, total = x.new_zeros(2), torch.eye(2, dtype=x.dtype), x.new_zeros(())
        for row in x:
            mean, cov = self.move @ mean, self.move @ cov @ self.move.mT + torch.diag(self.noise.exp())
            spread = cov + 0.5 * torch.eye(2, dtype=x.dtype)
            gain, residual = torch.linalg.solve(spread, cov).mT, row - mean
            total = total - 0.5 * (residual @ torch.linalg.solve(spread, residual) + torch.linalg.slogdet(spread)[1])
            mean, cov = mean + gain @ residual, cov - gain @ cov
        return total


class ConditionalRandomField(nn.Module):
    """The log-likelihood of a labelling, its normalizer by dynamic programming."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.transit = nn.Linear(3, 3), nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores, labels = self.emit(x), [0, 2, 1, 0]
        total = scores[0]
        for row in scores[1:]:
            total = torch.logsumexp(total[:, None] + self.transit, 0) + row
        path = sum(scores[t, labels[t]] for t in range(4)) + sum(
            self.transit[labels[t], labels[t + 1]] for t in range(3)
        )
        return path - torch.logsumexp(total, 0)


def ctc_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """CTC's forward algorithm, in logarithms; the native one has a can be differentiated once."""
    scores, labels = torch.log_softmax(model(x), -1), [0, 1, 0, 2, 0]
    none = scores.new_full((), -40.0)
    alpha = [scores[0, 0], scores[0, 1], none, none, none]
    for t in range(1, len(scores)):
        alpha = [
            torch.logsumexp(
                torch.stack(
                    [alpha[s]] + ([alpha[s - 1]] if s else []) + ([alpha[s - 2]] if s == 3 else [])  # over a blank
                ),
                0,
            )
            + scores[t, labels[s]]
            for s in range(5)
        ]
    return -torch.logaddexp(alpha[3], alpha[4])


def native_ctc(model: nn.Module, x: Tensor) -> Tensor:
    scores = torch.log_softmax(model(x), -1)[:, None]
    return F.ctc_loss(scores, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))


class GaussianProcess(nn.Module):
    """The marginal likelihood of a Gaussian process."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.noise = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.length.exp()
        kernel = torch.exp(-0.5 * (z[:, None] - z[None]).square().sum(-1))
        factor = torch.linalg.cholesky(kernel + self.noise.exp() * torch.eye(len(x), dtype=x.dtype))
        y = torch.sin(x.sum(-1))[:, None]
        return -0.5 * (y.mT @ torch.cholesky_solve(y, factor)).sum() - factor.diagonal().log().sum()


# --- losses ----------------------------------------------------------------------------------------------------------


def linear(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))


LABELS = torch.tensor([0, 2, 1, 2])


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    left, right = F.normalize(model(x), dim=-1), F.normalize(model(x.sin()), dim=-1)
    return F.cross_entropy(left @ right.mT / 0.5, torch.arange(len(x)))


def triplet(model: nn.Module, x: Tensor) -> Tensor:
    a, p, n = model(x), model(x.sin()), model(x.cos())
    return F.softplus((a - p).square().sum(-1) - (a - n).square().sum(-1) + 0.2).mean()


def barlow_twins(model: nn.Module, x: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / z.std(0) for z in (model(x), model(x.sin())))
    return (a.mT @ b / len(x) - torch.eye(3, dtype=x.dtype)).square().sum()


def focal(model: nn.Module, x: Tensor) -> Tensor:
    log_p = torch.log_softmax(model(x), -1).gather(-1, LABELS[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def dice(model: nn.Module, x: Tensor) -> Tensor:
    p, target = torch.softmax(model(x), -1), F.one_hot(LABELS, 3).to(x.dtype)
    return 1 - (2 * (p * target).sum(0) / (p.sum(0) + target.sum(0) + 1)).mean()


def sinkhorn(model: nn.Module, x: Tensor) -> Tensor:
    """Entropic transport between two clouds."""
    a, b = model(x), model(x.cos()) + 0.3
    cost = (a[:, None] - b[None]).square().sum(-1)
    f, g = cost.new_zeros(len(x)), cost.new_zeros(len(x))
    for _ in range(8):
        f = -torch.logsumexp(g - cost, 1)
        g = -torch.logsumexp(f[:, None] - cost, 0)
    return (torch.exp(f[:, None] + g - cost) * cost).sum()


def arcface(model: nn.Module, x: Tensor) -> Tensor:
    cosines = F.normalize(model(x), dim=-1) * 0.9
    turned = torch.cos(torch.acos(cosines) + 0.3)
    return F.cross_entropy(3 * torch.where(F.one_hot(LABELS, 3).bool(), turned, cosines), LABELS)


def distillation(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():  # a teacher, which is fixed
        teacher = torch.softmax(torch.arange(12, dtype=x.dtype).reshape(4, 3).sin(), -1)
    return F.kl_div(torch.log_softmax(model(x) / 2, -1), teacher, reduction="batchmean")


def cox(model: nn.Module, x: Tensor) -> Tensor:
    """Partial likelihood of survival times."""
    risk = model(x)[:, 0]
    return (torch.logcumsumexp(risk.flip(0), 0).flip(0) - risk).mean()


# --- ways to hold weights --------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.a.mT @ self.b.mT)


class HyperNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(2)), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        w = self.make(torch.tanh(self.code))
        return torch.tanh(F.linear(x, w[:6].reshape(2, 3), w[6:]))


class FiLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.condition = nn.Linear(3, 4), nn.Linear(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.condition(x.mean(-1, keepdim=True)).chunk(2, -1)
        return torch.tanh((1 + scale) * self.body(x) + shift)


class Mixture(nn.Module):
    """Experts, all of them or the best two for each sample."""

    def __init__(self, best: int | None = None) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]), nn.Linear(3, 3)
        self.best = best

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if self.best is not None:
            chosen = scores.topk(self.best, -1).indices
            scores = torch.full_like(scores, -torch.inf).scatter(-1, chosen, scores.gather(-1, chosen))
        outputs = torch.stack([torch.tanh(expert(x)) for expert in self.experts], 1)
        return (torch.softmax(scores, -1)[..., None] * outputs).sum(1)


class SoftTree(nn.Module):
    """A decision tree whose branches are taken by probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.leaf = nn.Linear(3, 3), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.split(x))
        root, left, right = p.unbind(-1)
        reach = torch.stack([root * left, root * (1 - left), (1 - root) * right, (1 - root) * (1 - right)], -1)
        return reach @ self.leaf


class Capsules(nn.Module):
    """Routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        votes = x[:, :, None, None] * self.weight
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(2):
            s = (torch.softmax(logits, -1)[..., None] * votes).sum(1)
            size = s.square().sum(-1, keepdim=True)
            out = s * size.sqrt() / (1 + size)
            logits = logits + (votes * out[:, None]).sum(-1)
        return out


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encode(x)) @ self.encode.weight


class Quantized(nn.Module):
    """Weights rounded to steps of 1/8, their gradients passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 2)

    def rounding(self) -> Tensor:
        return ((8 * self.weight).round() / 8 - self.weight).detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ (self.weight + self.rounding())))


class QuantizedMeant(Quantized):
    """The same with the rounding errors of the point: the function whose derivatives are meant."""

    held: Tensor | None = None

    def rounding(self) -> Tensor:
        if self.held is None:
            object.__setattr__(self, "held", super().rounding())
        return self.held


class VectorQuantized(nn.Module):
    """The nearest entries of a code book, the gradient passed straight through to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 2), nn.Linear(2, 3)
        self.register_buffer("book", torch.tensor([[0.0, 1.0], [1.0, -1.0], [-1.0, 0.0]], dtype=DOUBLE))

    def jump(self, z: Tensor) -> Tensor:
        return (self.book[torch.cdist(z, self.book).argmin(-1)] - z).detach()

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        return torch.tanh(self.decode(z + self.jump(z)))


class VectorQuantizedMeant(VectorQuantized):
    held: Tensor | None = None

    def jump(self, z: Tensor) -> Tensor:
        if self.held is None:
            object.__setattr__(self, "held", super().jump(z))
        return self.held


def held(kind: type, *shape: int):
    """A setting whose model has taken its constants at the point."""

    def build():
        setting = seeded(kind, shape)
        setting.of_model(setting.model)
        return setting

    return build


def spectral_critic() -> nn.Module:
    wrap = parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(3, 4)), nn.Softplus(), wrap(nn.Linear(4, 1))).eval()


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


IMAGE, SEQUENCE, ROWS = (2, 1, 4, 4), (2, 3, 4), (4, 3)

ARCHITECTURES: tuple[Case, ...] = (
    _case("ResNet", resnet, *IMAGE),
    _case("ResNet, eval", lambda: resnet().eval(), *IMAGE),
    _case("ResNet, group norm", lambda: resnet(lambda width: nn.GroupNorm(1, width)), *IMAGE),
    _case("U-Net", UNet, 1, 1, 4, 4),
    _case("diffusion U-Net", lambda: UNet(time=0.3), 1, 1, 4, 4, loss=denoising),
    _case("DenseNet", Dense, *IMAGE),
    _case("Inception", Inception, *IMAGE),
    _case("squeeze and excite", SqueezeExcite, *IMAGE),
    _case("ConvNeXt", ConvNeXt, 1, 3, 3, 3),
    _case("WaveNet", WaveNet, 1, 2, 5),
    _case("style transfer", StyleTransfer, 1, 1, 5, 5),
    _case("ViT", ViT, *IMAGE),
    _case("GPT, rotary", GPT, *SEQUENCE),
    _case("GPT, cache of keys and values", lambda: GPT(cached=True), *SEQUENCE),
    _case("LLaMA block", Llama, *ROWS),
    _case("cross-attention", CrossAttention, *SEQUENCE),
    _case("linear attention", LinearAttention, 2, 3, 3),
    _case("set transformer", SetTransformer, 2, 4, 3),
    _case("neural Turing memory", NeuralTuring, *ROWS),
    _case("Elman RNN", lambda: Recurrent(nn.RNN), 2, 3, 3),
    _case("LSTM", lambda: Recurrent(nn.LSTM), 2, 3, 3),
    _case("LSTM, both ways", lambda: Recurrent(nn.LSTM, bidirectional=True), 2, 3, 3),
    _case("GRU", lambda: Recurrent(nn.GRU), 2, 3, 3),
    _case("Mamba", Mamba, 2, 4, 3),
    _case("diagonal state space", DiagonalStateSpace, 2, 6),
    _case("highway network", Highway, *ROWS),
    _case("MLP-Mixer", Mixer, 2, 4, 3),
    _case("message passing", MessagePassing, *ROWS),
    _case("graph convolution", GraphConvolution, *ROWS),
    _case("graph attention", GraphAttention, *ROWS),
    _case("deep sets", DeepSets, 2, 4, 3),
    _case("equivariant layer", Equivariant, *ROWS),
    _case("SchNet", SchNet, *ROWS, loss=lambda model, x: model(x).sin()),
    _case("SIREN", Siren, 4, 2),
    _case("NeRF", NeRF, *ROWS),
    _case("Fourier features", FourierFeatures, 4, 2),
    _case("DeepONet", DeepONet, *ROWS),
    _case("Fourier neural operator", FourierOperator, 2, 6),
    _case("Kolmogorov-Arnold network", KAN, *ROWS),
    _case("PINN residual", scalar_net, 3, 2, loss=poisson_residual),
    _case("Hamiltonian network", scalar_net, 3, 2, loss=hamiltonian),
    _case("Lagrangian network", lambda: scalar_net(4), 1, 4, loss=lagrangian),
    _case("energy model, score matching", scalar_net, 3, 2, loss=score_matching),
    _case("critic with gradient penalty", scalar_net, 3, 2, loss=penalized_critic),
    _case("MAML", lambda: linear(1), *ROWS, loss=maml),
    _case("neural ODE, Runge-Kutta", NeuralODE, 3, 2),
    _case("DEQ", Equilibrium, 2, 3),
    _case("RealNVP coupling", Coupling, 3, 4),
    _case("planar flow", PlanarFlow, *ROWS),
    _case("Glow's mixing", ConvolutionFlow, *ROWS),
    _case("VAE", VAE, *ROWS),
    _case("mixture density network", MixtureDensity, *ROWS),
    _case("Bayes by backprop", BayesByBackprop, *ROWS),
    _case("Gumbel softmax", linear, *ROWS, loss=gumbel),
    _case("Kalman filter", KalmanFilter, 4, 2),
    _case("conditional random field", ConditionalRandomField, *ROWS),
    _case("CTC, by hand", linear, *ROWS, loss=ctc_by_hand),
    _case("CTC, native", linear, *ROWS, loss=native_ctc, verdicts=_refused(r"(?is)ctc_?loss", 2, 3)),
    _case("Gaussian process", GaussianProcess, 4, 2),
    _case("contrastive", linear, *ROWS, loss=contrastive),
    _case("triplet", linear, *ROWS, loss=triplet),
    _case("Barlow twins", linear, *ROWS, loss=barlow_twins),
    _case("focal loss", linear, *ROWS, loss=focal),
    _case("Dice loss", linear, *ROWS, loss=dice),
    _case("Sinkhorn", lambda: linear(2), *ROWS, loss=sinkhorn),
    _case("ArcFace", linear, *ROWS, loss=arcface),
    _case("distillation", linear, *ROWS, loss=distillation),
    _case("Cox regression", lambda: linear(1), *ROWS, loss=cox),
    _case("LoRA", LoRA, *ROWS),
    _case("hypernetwork", HyperNetwork, *ROWS),
    _case("FiLM", FiLM, *ROWS),
    _case("mixture of experts", Mixture, *ROWS),
    _case("mixture of the best experts", lambda: Mixture(best=2), *ROWS),
    _case("soft decision tree", SoftTree, *ROWS),
    _case("capsules", Capsules, *ROWS),
    _case("tied autoencoder", TiedAutoencoder, *ROWS),
    _case("weight norm", weight_normed, *ROWS),
    _case("spectral norm critic", spectral_critic, *ROWS),
    _case("quantized weights, straight through", Quantized, *ROWS, oracle=held(QuantizedMeant, *ROWS)),
    _case("vector quantized, straight through", VectorQuantized, *ROWS, oracle=held(VectorQuantizedMeant, *ROWS)),
)  # fmt: skip
