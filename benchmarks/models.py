"""The networks and functions that are measured. A gradient of each network takes a millisecond or more on one core."""

from collections.abc import Callable
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
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        self.position = nn.Parameter(0.1 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x + self.position).mean(1))


def networks() -> list[Problem]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
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
        Problem("2-layer transformer", Transformer(), torch.randn(16, 16, 64), torch.randint(10, (16,))),
    ]


def tiny(x: Tensor) -> Tensor:
    """Ten variables, two operations: what a call costs beside the derivative."""
    return torch.tanh(x).sum()


def dense(n: int) -> Callable[[Tensor], Tensor]:
    """Log-sum-exp of a matrix product: smooth, with a dense Hessian."""
    matrix = torch.randn(2 * n, n) / n**0.5
    return lambda x: torch.logsumexp(matrix @ x, 0)


def network_of_input(n: int) -> Callable[[Tensor], Tensor]:
    """A scalar MLP as a function of its n inputs; its weights are constants."""
    net = nn.Sequential(nn.Linear(n, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    net.requires_grad_(False)
    return lambda x: net(x).sum()
