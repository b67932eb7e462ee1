"""A gradient penalty whose gradient was taken without create_graph=True."""

import torch

x = torch.rand(4, requires_grad=True)
y = (x**3).sum()
(g,) = torch.autograd.grad(y, x)
penalty = g.square().sum()
penalty.backward()
