"""A running loss that is differentiated in each step: it contains the steps before."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = torch.zeros(())

for _ in range(3):
    loss = model(torch.ones(2, 3)).square().mean()
    total = total + loss
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
