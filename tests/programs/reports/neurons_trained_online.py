"""Spiking neurons trained at every time step, whose graphs are retained: the membrane potentials of two layers.

After https://github.com/fangwei123456/spikingjelly/issues/593
"""

import torch
from torch import nn


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(4 * x)
        return g * 4 * s * (1 - s)


class LIFNode(nn.Module):
    def __init__(self, tau=2.0):
        super().__init__()
        self.tau = tau
        self.v = 0.0

    def reset(self):
        self.v = 0.0

    def neuronal_charge(self, x):
        self.v = self.v + (x - self.v) / self.tau

    def neuronal_fire(self):
        return Spike.apply(self.v - 1.0)

    def neuronal_reset(self, spike):
        self.v = (1.0 - spike) * self.v

    def forward(self, x):
        self.neuronal_charge(x)
        spike = self.neuronal_fire()
        self.neuronal_reset(spike)
        return spike


def reset_net(net):
    for m in net.modules():
        if hasattr(m, "reset"):
            m.reset()


def ottt_online_training(model, optimizer, x_seq, target_seq, f_loss_t, online):
    optimizer.zero_grad()
    total = 0.0
    for t in range(x_seq.size(0)):
        y_t = model(x_seq[t])
        loss = f_loss_t(y_t, target_seq[t])
        loss.backward(retain_graph=True)
        if online:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
    if not online:
        optimizer.step()
    return total


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), LIFNode(), nn.Linear(6, 3), LIFNode())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x_seq, target_seq = torch.rand(4, 2, 4) * 4, torch.rand(4, 2, 3)
for epoch in range(2):
    ottt_online_training(net, optimizer, x_seq, target_seq, nn.functional.mse_loss, online=True)
    reset_net(net)
