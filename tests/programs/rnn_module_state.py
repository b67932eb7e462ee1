"""The hidden state is kept by the module, where it is easily overlooked."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.h = torch.zeros(2, 4)

    def forward(self, x):
        self.h = self.cell(x, self.h)
        return self.h


torch.manual_seed(0)
net = Net()
for _ in range(3):
    out = net(torch.ones(2, 3))
    loss = out.square().mean()
    loss.backward()
