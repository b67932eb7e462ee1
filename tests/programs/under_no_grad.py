"""The loss is computed while gradients are off."""

import torch

a = torch.rand(4, requires_grad=True)
with torch.no_grad():
    b = a * 2
loss = b.sum()
loss.backward()
