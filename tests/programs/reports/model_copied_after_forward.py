"""A module keeps its last output as an attribute, and is copied after a forward.

After https://github.com/pytorch/pytorch/issues/54580
"""

from copy import deepcopy

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.con1 = nn.Conv2d(1, 2, 3)
        self.con2 = nn.Conv2d(2, 1, 3)

    def forward(self, x):
        self.exp = self.con2(self.con1(x))
        return self.exp


torch.manual_seed(0)
model = Net()
output = model(torch.ones(1, 1, 6, 6))
ema = deepcopy(model)
output.mean().backward()
