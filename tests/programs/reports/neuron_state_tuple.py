"""A cell of spiking neurons hands on its state as a named tuple.

After https://github.com/norse/norse/pull/131
"""

from typing import NamedTuple

import torch
from torch import nn


class LIFState(NamedTuple):
    v: torch.Tensor
    i: torch.Tensor


class LIFCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)

    def forward(self, x, state=None):
        if state is None:
            state = LIFState(torch.zeros(x.shape[0], 3), torch.zeros(x.shape[0], 3))
        i = 0.8 * state.i + self.linear(x)
        v = 0.9 * state.v + 0.1 * i
        return torch.sigmoid(10 * (v - 1)), LIFState(v, i)


def train(cell, readout, batches):
    optimizer = torch.optim.SGD([*cell.parameters(), *readout.parameters()], lr=0.1)
    state = None
    for data in batches:
        spikes, state = cell(data, state)
        loss = readout(spikes).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
cell, readout = LIFCell(2, 3), nn.Linear(3, 1)
train(cell, readout, [torch.randn(4, 2) for _ in range(3)])
