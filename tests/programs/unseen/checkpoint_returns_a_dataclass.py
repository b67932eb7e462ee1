"""A checkpointed block returns a dataclass, whose tensors the reentrant checkpoint does not see.

After https://github.com/pytorch/pytorch/issues/124725
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class BlockOutput:
    hidden: torch.Tensor
    scale: float


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return BlockOutput(self.linear(x).relu(), 0.5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Linear(3, 4), Block()

    def forward(self, x):
        out = checkpoint(self.block, self.stem(x), use_reentrant=True)
        return out.hidden * out.scale


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(5, 3)).square().mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
