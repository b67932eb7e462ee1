"""The article's example 1: both passes retain, so nothing fails."""

import gc

import torch

x = torch.randn(10, requires_grad=True)
y = x * 2
z = y.sum()

z.backward(retain_graph=True)
print(x.grad)

z.backward(retain_graph=True)
print(x.grad)

del x, y, z
gc.collect()
