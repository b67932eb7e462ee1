"""The optimiser changes the weights between a retained pass and the next one."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 3)).square().mean()
loss.backward(retain_graph=True)
optimizer.step()
loss.backward()
