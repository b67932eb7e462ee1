"""A custom Function's backward computes its function again and asks autograd for the gradient.

After https://github.com/pytorch/pytorch/issues/7698
"""

import torch
from torch import nn


class TanhWrapper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return torch.tanh(inputs)

    @staticmethod
    def backward(ctx, grad_outputs):
        (inputs,) = ctx.saved_tensors
        inputs = inputs.detach().requires_grad_()
        outputs = torch.tanh(inputs)
        return torch.autograd.grad(outputs, inputs, grad_outputs)[0]


torch.manual_seed(0)
linear = nn.Linear(3, 2)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
for _ in range(2):
    y = TanhWrapper.apply(linear(torch.randn(4, 3)))
    loss = y.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
