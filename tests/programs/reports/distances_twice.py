"""A network on distances, whose gradient is fitted to a reference.

After https://github.com/pytorch/pytorch/issues/83510
"""

import torch
from torch import nn


def function(a, b):
    return torch.cdist(a, b)


torch.manual_seed(0)
a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
b = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
linear = nn.Linear(2, 1)
y = linear(function(a, b).square())
gradient = torch.autograd.grad(y, a, grad_outputs=torch.ones_like(y), create_graph=True)[0]
loss = nn.functional.mse_loss(gradient, torch.ones(2, 2))
loss.backward()
