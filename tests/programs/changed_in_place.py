"""A value that the graph saved is changed in place before the backward pass."""

import torch

a = torch.rand(4, requires_grad=True)
s = a.exp()
loss = s.sum()
s += 1
loss.backward()
