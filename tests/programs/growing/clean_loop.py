"""A loop as it should be: numbers are kept, and predictions without their graphs."""

from collections import deque

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
total, history, recent = 0.0, [], deque(maxlen=5)
for _ in range(60):
    x = torch.randn(8, 3)
    out = model(x)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    history.append(out.detach())
    recent.append(loss)
with torch.no_grad():
    outputs = [model(torch.randn(8, 3)) for _ in range(200)]
print(f"{total:.3f}", len(history), len(recent), len(outputs))
