"""A layer computes its normalised weight and keeps it as an attribute; then the model is copied.

After https://github.com/locuslab/deq/issues/23
"""

import copy

import torch
from torch import nn


class WeightNormed(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(outputs, 1))
        self.weight_v = nn.Parameter(torch.randn(outputs, inputs))
        self.reset()

    def reset(self):
        self.weight = self.weight_v * (self.weight_g / self.weight_v.norm(dim=1, keepdim=True))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class MDEQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = WeightNormed(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        self.block.reset()
        z = torch.zeros_like(x)
        for _ in range(3):
            z = (0.3 * self.block(z) + x).tanh()
        return self.head(z)


torch.manual_seed(0)
model = MDEQ()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 1]))
loss.backward()
optimizer.step()
best = copy.deepcopy(model)
