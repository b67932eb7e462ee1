"""A temporal graph network keeps a memory of each node in a dict, updated by a GRU.

After https://github.com/memgraph/mage/pull/121
"""

import torch
from torch import nn


class Memory:
    def __init__(self, dimension):
        self.dimension = dimension
        self.memory_container = {}

    def get_node_memory(self, node):
        if node not in self.memory_container:
            self.memory_container[node] = torch.zeros(1, self.dimension)
        return self.memory_container[node]

    def set_node_memory(self, node, node_memory):
        self.memory_container[node] = node_memory


class TGN(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = Memory(4)
        self.updater = nn.GRUCell(8, 4)
        self.score = nn.Linear(8, 1)

    def forward(self, edges):
        scores = []
        for source, target in edges:
            a, b = self.memory.get_node_memory(source), self.memory.get_node_memory(target)
            message = torch.cat([a, b], 1)
            scores.append(self.score(message))
            self.memory.set_node_memory(source, self.updater(message + 1, a))
            self.memory.set_node_memory(target, self.updater(message - 1, b))
        return torch.cat(scores)


torch.manual_seed(0)
model = TGN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in ([(1, 2), (2, 3)], [(1, 3), (3, 4)], [(2, 4), (1, 2)]):
    optimizer.zero_grad()
    loss = nn.functional.softplus(-model(batch)).mean()
    loss.backward()
    optimizer.step()
