"""A memory network's state goes from batch to batch; the graph is retained, and the optimizer steps.

After https://github.com/NVlabs/FUNIT/issues/23
"""

import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self, slots=3, width=4):
        super().__init__()
        self.slots, self.width = slots, width
        self.controller = nn.Linear(6 + width, width)
        self.address = nn.Linear(width, slots)
        self.classify = nn.Linear(width, 3)

    def zero_state(self, batch):
        return torch.zeros(batch, self.slots, self.width), torch.zeros(batch, self.width)

    def forward(self, x, state):
        memory, read = state
        hidden = torch.tanh(self.controller(torch.cat([x, read], 1)))
        weights = self.address(hidden).softmax(1).unsqueeze(2)
        memory = memory * (1 - weights) + weights * hidden.unsqueeze(1)
        read = (memory * weights).sum(1)
        return (memory, read), self.classify(read)


def train(model, loader, optimizer, epoch):
    model.train()
    state = model.zero_state(2)
    for data, target in loader:
        next_state, output = model(data, state)
        loss = nn.CrossEntropyLoss()(output, target).clone()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        state = next_state


torch.manual_seed(0)
model = Memory()
loader = [(torch.randn(2, 6), torch.tensor([i % 3, 1])) for i in range(3)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    train(model, loader, optimizer, epoch)
