"""A temporal graph network writes the nodes' new memory into one tensor, which the next batch reads.

After https://github.com/twitter-research/tgn/issues/25
"""

import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self, n_nodes, dimension):
        super().__init__()
        self.memory = torch.zeros(n_nodes, dimension)

    def get_memory(self, node_idxs):
        return self.memory[node_idxs, :]

    def set_memory(self, node_idxs, values):
        self.memory[node_idxs, :] = values

    def detach_memory(self):
        self.memory = self.memory.detach()


class MemoryUpdater(nn.Module):
    def __init__(self, memory, message_dimension, dimension):
        super().__init__()
        self.memory = memory
        self.cell = nn.GRUCell(message_dimension, dimension)

    def update_memory(self, node_ids, messages):
        updated = self.cell(messages, self.memory.get_memory(node_ids))
        self.memory.set_memory(node_ids, updated)


class TGN(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = Memory(7, 4)
        self.memory_updater = MemoryUpdater(self.memory, 3, 4)
        self.affinity = nn.Linear(8, 1)

    def forward(self, sources, destinations, messages):
        self.memory_updater.update_memory(sources, messages)
        pair = [self.memory.get_memory(sources), self.memory.get_memory(destinations)]
        return self.affinity(torch.cat(pair, 1)).squeeze(1)


torch.manual_seed(0)
tgn = TGN()
optimizer = torch.optim.SGD(tgn.parameters(), lr=0.1)
for batch in range(3):
    sources = torch.randperm(7)[:3]
    destinations = torch.randperm(7)[:3]
    prob = tgn(sources, destinations, torch.randn(3, 3)).sigmoid()
    loss = nn.functional.binary_cross_entropy(prob, torch.ones(3))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
