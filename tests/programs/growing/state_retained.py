"""A hidden state that is never detached; retain_graph=True silences the error."""

import torch
from torch import nn

torch.manual_seed(0)
cell = nn.RNNCell(2, 4)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.0)
h = torch.zeros(1, 4)
for _ in range(20):
    h = cell(torch.randn(1, 2), h)
    loss = h.square().sum()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
print(f"{loss.item():.4f}")
