"""Spiking neurons keep their membrane potentials, and nothing resets them between batches.

After https://github.com/jeshraghian/snntorch/issues/250
"""

import torch
from torch import nn


class Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + 25 * x.abs()) ** 2


class Leaky(nn.Module):
    def __init__(self, beta=0.9):
        super().__init__()
        self.beta = beta
        self.mem = torch.zeros(1)

    def forward(self, current):
        self.mem = self.beta * self.mem + current
        spike = Surrogate.apply(self.mem - 1.0)
        self.mem = self.mem - spike
        return spike


net = nn.Sequential(nn.Linear(4, 6), Leaky(), nn.Linear(6, 2), Leaky())


def forward_pass(net, num_steps, data):
    return torch.stack([net(data) for step in range(num_steps)])


torch.manual_seed(0)
for p in net.parameters():
    nn.init.normal_(p)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for batch in range(3):
    data, targets = torch.rand(3, 4), torch.tensor([0, 1, 1])
    spk_rec = forward_pass(net, 4, data)
    loss_val = nn.functional.cross_entropy(spk_rec.sum(0), targets)
    optimizer.zero_grad()
    loss_val.backward()
    optimizer.step()
