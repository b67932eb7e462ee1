"""Parametrisations are cached around the whole training.

After https://github.com/pytorch/pytorch/issues/71062
"""

import torch
from torch import nn
from torch.nn.utils import parametrize


class Orthogonal(nn.Module):
    def forward(self, x):
        return torch.matrix_exp(x.triu(1) - x.triu(1).transpose(-1, -2))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Orthogonal())

    def forward(self, img0, img1):
        return self.layer(img0), self.layer(img1)


def training_step(model, optimizer, img0, img1):
    a, b = model(img0, img1)
    loss = (a - b).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
model = Siamese()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with parametrize.cached():
    for step in range(3):
        training_step(model, optimizer, torch.randn(2, 3), torch.randn(2, 3))
