"""The same, and the leaf changes between the passes: a retained graph would be stale."""

import torch

t = torch.randn(5, 5)
a = torch.rand(5, requires_grad=True)
y = t @ a

for _ in range(3):
    loss = (y**2).sum()
    loss.backward()
    with torch.no_grad():
        a -= 0.01 * a.grad
        a.grad.zero_()
