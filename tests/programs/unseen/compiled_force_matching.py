"""A potential is compiled; its forces are matched, which needs the forces' derivative.

After https://github.com/NVIDIA/cuEquivariance/issues/268
"""

import torch
from torch import nn


class PurePyTorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions):
        return self.net(positions).sum()


def forces_of(potential, positions):
    positions = positions.requires_grad_()
    energy = potential(positions)
    return -torch.autograd.grad(energy, positions, create_graph=True)[0]


def training_step(potential, positions, target):
    return (forces_of(potential, positions) - target).square().mean()


torch.manual_seed(0)
model = PurePyTorchModel()
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = training_step(compiled, torch.randn(4, 3), torch.randn(4, 3))
optimizer.zero_grad()
loss.backward()
optimizer.step()
