"""A buffer of values with their graphs, from before the parameters moved."""

import torch

q = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(q.parameters(), lr=0.1)
replay = []
for _ in range(3):
    s = torch.randn(3)
    value = q(s)
    replay.append(value)
    loss = sum(v.pow(2).sum() for v in replay)
    opt.zero_grad()
    loss.backward()
    opt.step()
