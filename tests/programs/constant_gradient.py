"""The gradient of a linear function is a constant: it has no graph, even with create_graph=True."""

import torch

x = torch.rand(4, requires_grad=True)
y = (3 * x).sum()
(g,) = torch.autograd.grad(y, x, create_graph=True)
penalty = g.square().sum()
penalty.backward()
