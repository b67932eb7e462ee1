"""The article's example 3: w is computed from z.detach(), so its backward raises."""

import torch

x = torch.randn(5, requires_grad=True)
y = x * 2
z = y.sum()
w = z.detach() + 1

z.backward(retain_graph=True)
print("Gradient of z:", x.grad)

x.grad.zero_()

w.backward()
