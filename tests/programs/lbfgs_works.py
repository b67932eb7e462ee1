"""L-BFGS as it is meant: the closure computes everything."""

import torch

w = torch.randn(3, requires_grad=True)
opt = torch.optim.LBFGS([w], max_iter=4)
A = torch.randn(3, 3)


def closure():
    opt.zero_grad()
    loss = ((A @ w).tanh() - 1).pow(2).sum()
    loss.backward()
    return loss


opt.step(closure)
