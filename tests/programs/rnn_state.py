"""The hidden state of one step enters the next with its graph."""

import torch
from torch import nn

torch.manual_seed(0)
cell = nn.RNNCell(3, 4)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
h = torch.zeros(2, 4)

for _ in range(3):
    h = cell(torch.ones(2, 3), h)
    loss = h.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
