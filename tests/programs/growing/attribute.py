"""A moving average of the loss, an attribute."""

import torch
from torch import nn


class Meter:
    def __init__(self):
        self.average = 0.0

    def update(self, value):
        self.average = 0.9 * self.average + 0.1 * value


torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
meter = Meter()
for _ in range(30):
    loss = model(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss)
print(f"{float(meter.average.detach()):.4f}")
