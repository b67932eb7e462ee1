"""A hash grid's Function allows one derivative; the loss is a function of the field's slope.

After https://github.com/ashawkey/torch-ngp/issues/16
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class _grid_encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, embeddings):
        ctx.save_for_backward(inputs, embeddings)
        return (inputs @ embeddings).cos()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        inputs, embeddings = ctx.saved_tensors
        slope = -grad * (inputs @ embeddings).sin()
        return slope @ embeddings.T, inputs.T @ slope


class SDFNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(3, 6))
        self.backbone = nn.Sequential(nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 1))

    def forward(self, xyz):
        return self.backbone(_grid_encode.apply(xyz, self.embeddings))


torch.manual_seed(0)
network = SDFNetwork()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
xyz = torch.rand(5, 3, requires_grad=True)
sdf = network(xyz)
(gradient,) = torch.autograd.grad(sdf, [xyz], grad_outputs=torch.ones_like(sdf), create_graph=True)
train_loss = torch.abs(gradient.norm(dim=-1) - 1).mean()
optimizer.zero_grad()
train_loss.backward()
optimizer.step()
