"""The adaptive adjacency is computed from learned node vectors once, when the model is made.

After https://github.com/nnzhan/Graph-WaveNet/pull/1
"""

import torch
from torch import nn


class GWNet(nn.Module):
    def __init__(self, num_nodes):
        super().__init__()
        self.nodevec1 = nn.Parameter(torch.randn(num_nodes, 2))
        self.nodevec2 = nn.Parameter(torch.randn(2, num_nodes))
        self.adp = torch.softmax(torch.relu(self.nodevec1 @ self.nodevec2), dim=1)
        self.gconv = nn.Linear(3, 1)

    def forward(self, x):
        return self.gconv(self.adp @ x)


class Engine:
    def __init__(self, num_nodes):
        self.model = GWNet(num_nodes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, x, real):
        self.model.train()
        self.optimizer.zero_grad()
        loss = (self.model(x) - real).abs().mean()
        loss.backward()
        self.optimizer.step()


torch.manual_seed(0)
engine = Engine(4)
for _ in range(3):
    engine.train(torch.randn(4, 3), torch.randn(4, 1))
