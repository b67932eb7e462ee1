"""An encoding whose backward may not be differentiated, under a loss on the normals.

After https://github.com/NVlabs/tiny-cuda-nn/issues/50
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class EncodingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table):
        ctx.save_for_backward(x, table)
        return (x @ table).sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, table = ctx.saved_tensors
        inner = grad * (x @ table).cos()
        return inner @ table.T, x.T @ inner


class SDF(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))
        self.network = nn.Linear(4, 1)

    def forward(self, x):
        encoded = EncodingFunction.apply(x, self.table)
        return self.network(encoded).square()


torch.manual_seed(0)
sdf = SDF()
x = torch.randn(5, 3, requires_grad=True)
normals = torch.autograd.grad(sdf(x).sum(), x, create_graph=True)[0]
loss = (normals.norm(dim=1) - 1).square().mean()
loss.backward()
