"""An RNN whose states go into a list, and a pass after each step."""

import torch

cell = torch.nn.GRUCell(3, 4)
hs = [torch.zeros(2, 4)]
for _ in range(3):
    hs.append(cell(torch.randn(2, 3), hs[-1]))
    loss = hs[-1].pow(2).mean()
    loss.backward()
