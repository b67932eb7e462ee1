"""A compiled model is differentiated for forces, and those are trained.

After https://github.com/torchmd/torchmd-net/issues/307
"""

import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, positions):
        return (self.layer(positions) ** 2).sum()


torch.manual_seed(0)
energy = Energy()
model = torch.compile(energy, backend="aot_eager")
positions = torch.randn(4, 3, requires_grad=True)
y = model(positions)
forces = torch.autograd.grad(y, positions, create_graph=True, retain_graph=True)[0]
loss = forces.square().mean()
loss.backward()
