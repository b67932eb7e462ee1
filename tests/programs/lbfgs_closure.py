"""L-BFGS calls its closure several times; the prediction was computed outside."""

import torch

w = torch.randn(3, requires_grad=True)
opt = torch.optim.LBFGS([w], max_iter=4)
A = torch.randn(3, 3)
pred = (A @ w).tanh()


def closure():
    opt.zero_grad()
    loss = (pred - 1).pow(2).sum()
    loss.backward()
    return loss


opt.step(closure)
