"""The same with the text's way out: the first pass retains, the second frees, then the optimiser steps."""

import torch
from torch import nn

torch.manual_seed(0)
trunk = nn.Linear(4, 8)
head = nn.Linear(8, 2)
optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)

for _ in range(2):
    features = trunk(torch.ones(3, 4)).tanh()
    loss1 = features.square().mean()
    loss2 = head(features).square().mean()
    optimizer.zero_grad()
    loss1.backward(retain_graph=True)
    loss2.backward()
    optimizer.step()
print("trained")
