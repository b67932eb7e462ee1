"""One of the inputs is not what the loss was computed from."""

import torch

x = torch.rand(4, requires_grad=True)
w = torch.rand(4, requires_grad=True)
loss = x.square().sum()
torch.autograd.grad(loss, [x, w])
