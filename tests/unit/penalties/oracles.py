"""The penalties once more, each from its formula with plain `autograd.grad`, and small critics to try them on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

DOUBLE = torch.float64
Critic = Callable[[Tensor], Tensor]


def gradient(f: Critic, x: Tensor) -> Tensor:
    """Each sample's gradient of the sum of its outputs, with a graph."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def norms(g: Tensor) -> Tensor:
    return g.flatten(1).square().sum(1).sqrt()


def jacobian(f: Critic, x: Tensor) -> Tensor:
    """One row at a time: (N, outputs, inputs)."""
    x = x.detach().requires_grad_()
    out = f(x).flatten(1)
    rows = [torch.autograd.grad(out[:, i].sum(), x, create_graph=True)[0].flatten(1) for i in range(out.shape[1])]
    return torch.stack(rows, dim=1)


def hessians(f: Critic, x: Tensor) -> Tensor:
    """One Hessian for each output of each sample: (N, outputs, inputs, inputs)."""
    x = x.detach().requires_grad_()
    out = f(x).flatten(1)
    tables = []
    for i in range(out.shape[1]):
        (g,) = torch.autograd.grad(out[:, i].sum(), x, create_graph=True)
        tables.append(
            torch.stack([torch.autograd.grad(g[:, j].sum(), x, create_graph=True)[0] for j in range(g.shape[1])], 1)
        )
    return torch.stack(tables, dim=1)


def parameter_gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """What a backward pass would add to the parameters, zeros where nothing arrives."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def same(loss: Tensor, expected: Tensor, model: nn.Module) -> None:
    """Value and parameter gradient agree, the latter not by being zero."""
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    found, wanted = parameter_gradients(loss, model), parameter_gradients(expected, model)
    assert any(part.any() for part in wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def mlp(inputs: int = 5, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, 6), nn.Softplus(), nn.Linear(6, outputs)
    ).double()


def conv() -> nn.Sequential:
    """A patch critic: (N, 2, 8, 8) to (N, 1, 3, 3)."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 1, 2)
    ).double()
