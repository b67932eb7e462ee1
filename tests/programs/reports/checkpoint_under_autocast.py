"""A checkpointed block runs under autocast the second time only.

After https://github.com/pytorch/pytorch/issues/141896
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            x = x[:1]
        return self.linear(x).sigmoid()


torch.manual_seed(0)
block = Block()
loss = checkpoint(block, torch.randn(3, 4, requires_grad=True), use_reentrant=False).sum()
loss.backward()
