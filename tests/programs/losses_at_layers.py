"""Multi-task learning: two losses at different layers of one network."""

import torch
from torch import nn

torch.manual_seed(0)
trunk = nn.Linear(4, 8)
head = nn.Linear(8, 2)
x = torch.randn(3, 4)

features = trunk(x).tanh()
loss1 = features.square().mean()
loss2 = head(features).square().mean()

loss1.backward()
loss2.backward()
