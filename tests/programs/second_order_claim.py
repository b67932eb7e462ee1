"""The article's example 2: it runs, and computes no second derivative."""

import torch

x = torch.randn(1, requires_grad=True)
y = x**2
z = y**2

z.backward(retain_graph=True)
print("First-order gradient:", x.grad)

x.grad.zero_()

y.backward(retain_graph=True)
print("Second-order gradient:", x.grad)
