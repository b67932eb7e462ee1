"""A residual branch keeps its input under a second name, which is then scaled in place.

After https://github.com/Jee-King/TSAN/issues/3
"""

import torch
from torch import nn


class ChannelAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return self.conv(x.mean((2, 3), keepdim=True)).sigmoid()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Conv2d(channels, channels, 3, padding=1)
        self.attention = ChannelAttention(channels)

    def forward(self, x):
        out = x
        residual = self.body(x)
        out *= self.attention(residual)
        return out + residual


class TSAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.block, self.tail = nn.Conv2d(1, 2, 3, padding=1), Block(2), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        return self.tail(self.block(self.head(x)))


torch.manual_seed(0)
model = TSAN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    lr, hr = torch.randn(2, 1, 5, 5), torch.randn(2, 1, 5, 5)
    loss = (model(lr) - hr).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
