"""Propagators are cached by their time step with functools.lru_cache; the Hamiltonian in them is trained.

After https://github.com/dynamiqs/dynamiqs/pull/133
"""

import functools

import torch
from torch import nn


class MEPropagator(nn.Module):
    def __init__(self, dimension):
        super().__init__()
        self.H = nn.Parameter(0.3 * torch.randn(dimension, dimension))

    @functools.lru_cache(maxsize=8)
    def propagator(self, dt):
        return torch.matrix_exp(dt * (self.H - self.H.T))

    def forward(self, y, steps):
        for _ in range(steps):
            y = self.propagator(0.1) @ y
        return y


def infidelity(solver, y0, target):
    return 1 - (solver(y0, 3) * target).sum() ** 2


torch.manual_seed(0)
solver = MEPropagator(3)
optimizer = torch.optim.SGD(solver.parameters(), lr=0.1)
y0, target = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.6, 0.8, 0.0])
for _ in range(2):
    loss = infidelity(solver, y0, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
