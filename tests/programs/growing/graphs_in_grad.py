"""Second derivatives by backward(create_graph=True), whose gradients pile up."""

import torch

w = torch.tensor([1.0, 2.0], requires_grad=True)
for _ in range(24):
    loss = (w**3).sum()
    loss.backward(create_graph=True)
print(w.grad.detach())
w.grad = None
