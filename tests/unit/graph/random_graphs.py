"""Random graphs for the fuzz: shared values, views, in-place changes, indexing, Functions, checkpoints."""

import random

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.modules import Cube


class Double(torch.autograd.Function):
    """Saves nothing: it can run again."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


UNARY = [
    lambda v, r: v.sin(),
    lambda v, r: v.exp().clamp(max=5),
    lambda v, r: v.tanh(),
    lambda v, r: v + 1,
    lambda v, r: v * 1.5,
    lambda v, r: 0.5 * v,
    lambda v, r: v**2,
    lambda v, r: v.sigmoid(),
    lambda v, r: v.flip(0),
    lambda v, r: v.view(2, 2).t().reshape(4),
    lambda v, r: torch.cat([v[:2], v[2:]]),
    lambda v, r: v.cumsum(0),
    lambda v, r: torch.softmax(v, 0),
    lambda v, r: v[torch.tensor([3, 1, 0, 0])],
    lambda v, r: torch.where(v > 0, v, v.sin()),
    lambda v, r: torch.stack([v.max(), v.min(), v.mean(), v.norm() + 0.1]),
]
BINARY = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - 2 * b,
    lambda a, b: torch.outer(a, b).sum(0),
    lambda a, b: a / (b**2 + 1),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: torch.stack([a, b]).prod(0),
]


def checkpointed(v: Tensor) -> Tensor:
    return checkpoint(lambda u: (u.sin() * u).tanh(), v, use_reentrant=False)


def in_place(v: Tensor, r: random.Random) -> Tensor:
    v = v.clone()
    if r.random() < 0.5:
        v.mul_(1.25)
    else:
        v[1:3] *= 2
    return v


class Graphs:
    """Values over shared leaves, and scalars of them; ``wild`` adds what cannot always be seen through."""

    def __init__(self, seed: int, wild: bool = True) -> None:
        self.r = r = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.leaves = [
            torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(r.randint(1, 3))
        ]
        self.values = list(self.leaves)
        for _ in range(r.randint(3, 9)):
            self.values.append(self.next(wild))
        self.losses = [self.scalar() for _ in range(r.randint(1, 4))]

    def next(self, wild: bool) -> Tensor:
        r = self.r
        value = r.choice(self.values)
        kind = r.random()
        if kind < 0.45:
            return r.choice(UNARY)(value, r)
        if kind < 0.85 or not wild:
            return r.choice(BINARY)(value, r.choice(self.values))
        return r.choice([Cube.apply, Double.apply, checkpointed, lambda v: in_place(v, r)])(value)

    def scalar(self) -> Tensor:
        value = self.r.choice(self.values[len(self.leaves) :])
        return self.r.choice([lambda v: v.sum(), lambda v: v.square().mean(), lambda v: v[0] * v[-1]])(value)
