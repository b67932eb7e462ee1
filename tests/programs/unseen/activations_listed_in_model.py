"""A network lists the ranges of its activations; a copy for averaged weights fails.

After https://github.com/KindXiaoming/pykan/issues/443
"""

import copy

import torch
from torch import nn


class KAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 5), nn.Linear(5, 1)])
        self.edge_actscale = []

    def forward(self, x):
        self.edge_actscale = []
        for layer in self.layers:
            x = layer(x).tanh()
            self.edge_actscale.append(x.std(0))
        return x


model = KAN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(8, 2)).square().mean()
loss.backward()
optimizer.step()
averaged = copy.deepcopy(model)
