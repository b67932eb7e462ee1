"""The networks and functions that are measured.

A gradient of each network takes a millisecond or more on one core.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Problem(NamedTuple):
    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """The loss as a function of the model."""
        return F.cross_entropy(model(self.inputs), self.targets)

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """The loss as a function of the inputs."""
        return F.cross_entropy(self.model(inputs), self.targets)

    def entries(self) -> int:
        """Parameters and buffers, each counted once."""
        return len(list(self.model.parameters())) + len(list(self.model.buffers()))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, tokens: int = 16) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        self.position = nn.Parameter(0.1 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x + self.position).mean(1))


def networks() -> list[Problem]:
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    return [
        Problem("MLP 64-256-256-10", mlp, torch.randn(128, 64), torch.randint(10, (128,))),
        Problem("CNN, BatchNorm", cnn, torch.randn(32, 1, 16, 16), torch.randint(10, (32,))),
        Problem(
            "2-layer transformer", Transformer(), torch.randn(16, 16, 64), torch.randint(10, (16,))
        ),
    ]


class Block(nn.Module):
    """A block of a decoder: attention with heads of 64, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.taken(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.given(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        self.inner = nn.Sequential(
            convolutions[0],
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            convolutions[1],
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def deep() -> list[Problem]:
    """Networks of which products of second order take their memory."""
    torch.manual_seed(0)
    words = torch.randint(256, (8, 65))
    decoder = nn.Sequential(
        nn.Embedding(256, 256),
        *(Block(256) for _ in range(8)),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
    )
    cnn = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *(Residual(32) for _ in range(4)),
        nn.AvgPool2d(32),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    widths = (256, 1024, 1024, 1024)
    layers = [nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in pairwise(widths)]
    mlp = nn.Sequential(*layers, nn.Linear(1024, 10))
    return [
        Problem(
            "decoder, 8 blocks, 8 x 64",
            nn.Sequential(decoder, Words()),
            words[:, :-1],
            words[:, 1:],
        ),
        Problem(
            "ResNet, 4 blocks, 16 images", cnn, torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        ),
        Problem("MLP, 3 x 1024", mlp, torch.randn(256, 256), torch.randint(10, (256,))),
    ]


class Words(nn.Module):
    """Classes before places, as cross-entropy takes them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def tiny(x: Tensor) -> Tensor:
    """Ten variables, two operations: what a call costs beside the derivative."""
    return torch.tanh(x).sum()


def dense(n: int) -> Callable[[Tensor], Tensor]:
    """Log-sum-exp of a matrix product: smooth, with a dense Hessian."""
    matrix = torch.randn(2 * n, n) / n**0.5
    return lambda x: torch.logsumexp(matrix @ x, 0)


def network_of_input(n: int) -> Callable[[Tensor], Tensor]:
    """A scalar MLP as a function of its n inputs; its weights are constants."""
    net = nn.Sequential(
        nn.Linear(n, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
    )
    net.requires_grad_(False)
    return lambda x: net(x).sum()


def bundle_adjustment(
    cameras: int = 60, points: int = 100, seen: int = 1000
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Where points are seen, for all cameras (rotation, translation) and points: residuals
    `(2 seen,)`, and a start.
    """
    generator = torch.Generator().manual_seed(0)
    camera = torch.randint(cameras, (seen,), generator=generator)
    point = torch.randint(points, (seen,), generator=generator)

    def residuals(x: Tensor) -> Tensor:
        views, places = (
            x[: 6 * cameras].view(cameras, 6)[camera],
            x[6 * cameras :].view(points, 3)[point],
        )
        turn, shift = views[:, :3], views[:, 3:]
        angle = (turn.square().sum(-1, keepdim=True) + 1e-9).sqrt()
        axis = turn / angle
        along = axis * (axis * places).sum(-1, keepdim=True)
        turned = (
            places * angle.cos()
            + torch.linalg.cross(axis, places) * angle.sin()
            + along * (1 - angle.cos())
        )
        local = turned + shift
        return (local[:, :2] / (local[:, 2:] + 5)).reshape(-1)

    return residuals, 0.3 * torch.randn(6 * cameras + 3 * points, generator=generator)
