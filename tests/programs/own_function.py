"""The result of a Python autograd.Function, differentiated in every step."""

import torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


x = torch.randn(3, requires_grad=True)
y = Square.apply(x)
for _ in range(2):
    y.sum().backward()
