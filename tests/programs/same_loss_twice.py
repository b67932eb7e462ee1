"""The same loss, differentiated twice."""

import torch

a = torch.rand(4, requires_grad=True)
loss = a.exp().sum()
loss.backward()
loss.backward()
