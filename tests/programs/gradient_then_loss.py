"""A gradient is taken, and then enters the loss; taking it freed what the loss needs."""

import torch

x = torch.ones(3, requires_grad=True)
y = (x**3).sum()
(g,) = torch.autograd.grad(y, x)
loss = y + g.pow(2).sum()
loss.backward()
