"""The weight of a graph convolution evolves by a GRU from snapshot to snapshot, and on into the next epoch.

After https://github.com/benedekrozemberczki/pytorch_geometric_temporal/issues/305
"""

import torch
from torch import nn


class EvolveGCNO(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.initial_weight = nn.Parameter(torch.randn(1, channels, channels))
        self.recurrent_layer = nn.GRU(channels, channels)
        self.weight = None

    def forward(self, x):
        if self.weight is None:
            self.weight = self.initial_weight.data
        _, self.weight = self.recurrent_layer(self.weight, self.weight)
        return x @ self.weight.squeeze(0)


class RecurrentGCN(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.recurrent = EvolveGCNO(channels)
        self.linear = nn.Linear(channels, 1)

    def forward(self, x):
        return self.linear(self.recurrent(x).relu())


torch.manual_seed(0)
model = RecurrentGCN(3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
snapshots = [(torch.randn(5, 3), torch.randn(5)) for _ in range(2)]
for epoch in range(3):
    loss = 0
    for x, y in snapshots:
        loss = loss + torch.mean((model(x).squeeze(-1) - y) ** 2)
    loss = loss / len(snapshots)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
