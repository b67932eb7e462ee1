"""A tensor's hook differentiates a function of the gradient that passes.

After https://github.com/pytorch/pytorch/issues/17315
"""

import torch
from torch import nn


class Extractor:
    def __init__(self):
        self.sensitivity = None

    def hook(self, grad):
        V_grad = grad.detach().requires_grad_(True)
        U = V_grad.pow(2).sum()
        (self.sensitivity,) = torch.autograd.grad(U, V_grad)


torch.manual_seed(0)
extractor = Extractor()
model = nn.Linear(5, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
V = model(torch.ones(2, 5)).pow(3)
V.register_hook(extractor.hook)
loss = V.sum()
optimizer.zero_grad()
loss.backward()
optimizer.step()
