"""A term of the loss that a trainer computes once, when it is made."""

import torch


class Trainer:
    def __init__(self):
        self.w = torch.randn(3, requires_grad=True)
        self.prior = self.w.exp().sum()
        self.opt = torch.optim.SGD([self.w], lr=0.1)

    def step(self, x):
        loss = (self.w * x).pow(2).sum() + self.prior
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


t = Trainer()
for _ in range(3):
    t.step(torch.randn(3))
