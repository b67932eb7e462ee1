"""The reset and update gates get their biases in place, after the sigmoid has saved what it gave.

After https://github.com/Rose-STL-Lab/torchTS/issues/50
"""

import torch
from torch import nn


class DCGRUCell(nn.Module):
    def __init__(self, num_units, input_dim, num_nodes):
        super().__init__()
        self.num_units, self.num_nodes = num_units, num_nodes
        self.ru_weights = nn.Parameter(torch.randn(input_dim + num_units, 2 * num_units) * 0.3)
        self.ru_biases = nn.Parameter(torch.ones(2 * num_units))
        self.candidate = nn.Linear(input_dim + num_units, num_units)

    def forward(self, inputs, hx):
        value = self._fc(inputs, hx).view(-1, self.num_nodes, 2 * self.num_units)
        r, u = torch.split(value, self.num_units, dim=-1)
        c = torch.tanh(self.candidate(torch.cat([inputs, r * hx], dim=-1)))
        return u * hx + (1.0 - u) * c

    def _fc(self, inputs, state):
        x = torch.cat([inputs, state], dim=-1).reshape(-1, self.ru_weights.shape[0])
        value = torch.sigmoid(torch.matmul(x, self.ru_weights))
        value += self.ru_biases
        return value


torch.manual_seed(0)
cell = DCGRUCell(num_units=3, input_dim=2, num_nodes=4)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
for _ in range(2):
    hx = torch.zeros(5, 4, 3)
    for inputs in torch.randn(3, 5, 4, 2):
        hx = cell(inputs, hx)
    loss = hx.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
