"""A residual block adds the shortcut in place to the output of a ReLU.

After https://github.com/iMED-Lab/ER-Net/pull/3
"""

import torch
from torch import nn


class ResEncoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, 3, padding=1)
        self.conv1x1 = nn.Conv1d(channels, channels, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        residual = self.conv1x1(x)
        out = self.relu(self.conv1(x))
        out += residual
        return self.relu(out)


class ERNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder1 = ResEncoder(2)
        self.final = nn.Conv1d(2, 1, 1)

    def forward(self, x):
        return self.final(self.encoder1(x))


torch.manual_seed(0)
net = ERNet()
loss = net(torch.randn(2, 2, 5)).square().mean()
loss.backward()
