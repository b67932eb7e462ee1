"""An in-place activation follows an operation that needs its own output.

After https://github.com/yujianke100/GFDN/issues/4
"""

import torch
from torch import nn


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(3, 4), nn.Linear(4, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x, adj):
        x = torch.tanh(adj @ self.lin1(x))
        x = self.act(x)
        return self.lin2(x)


def train(model, optimizer, data):
    for x, adj in data:
        optimizer.zero_grad()
        loss = model(x, adj).square().mean()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
model = GNN()
train(model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(4, 3), torch.rand(4, 4)) for _ in range(2)])
