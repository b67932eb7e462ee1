"""A Hessian-vector product is taken of gradients that backward() wrote without building their graph.

After https://github.com/amirgholami/PyHessian/issues/12
"""

import torch
from torch import nn


def get_params_grad(model):
    params, grads = [], []
    for param in model.parameters():
        if not param.requires_grad:
            continue
        params.append(param)
        grads.append(0.0 if param.grad is None else param.grad + 0.0)
    return params, grads


def hessian_vector_product(gradsH, params, v):
    return torch.autograd.grad(gradsH, params, grad_outputs=v, retain_graph=True)


class hessian:
    def __init__(self, model, criterion, data):
        inputs, targets = data
        loss = criterion(model(inputs), targets)
        loss.backward()
        self.params, self.gradsH = get_params_grad(model)

    def trace(self):
        v = [torch.ones_like(p) for p in self.params]
        Hv = hessian_vector_product(self.gradsH, self.params, v)
        return sum((a * b).sum() for a, b in zip(Hv, v))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
comp = hessian(model, nn.CrossEntropyLoss(), (torch.randn(5, 3), torch.randint(0, 2, (5,))))
trace = comp.trace().item()
