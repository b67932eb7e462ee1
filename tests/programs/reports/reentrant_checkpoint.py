"""All of a model is checkpointed, re-entrantly, and its input requires no grad.

After https://github.com/pytorch/pytorch/issues/6884
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.resblocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        for r in self.resblocks:
            x = checkpoint(r, x, use_reentrant=True)
        return x


torch.manual_seed(0)
model = Transformer()
loss = model(torch.randn(2, 3)).square().mean()
loss.backward()
