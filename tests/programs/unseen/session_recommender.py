"""A session-based recommender keeps its hidden state over the mini-batches and clears it where a session ended.

After https://github.com/hungpthanh/GRU4REC-pytorch/issues/7
"""

import torch
from torch import nn


class GRU4REC(nn.Module):
    def __init__(self, items, hidden):
        super().__init__()
        self.embedding = nn.Embedding(items, hidden)
        self.gru = nn.GRU(hidden, hidden)
        self.h2o = nn.Linear(hidden, items)

    def init_hidden(self, batch):
        return torch.zeros(1, batch, self.gru.hidden_size)

    def forward(self, item, hidden):
        output, hidden = self.gru(self.embedding(item)[None], hidden)
        return self.h2o(output[0]), hidden


class Trainer:
    def __init__(self, model, optim):
        self.model = model
        self.optim = optim

    def reset_hidden(self, hidden, mask):
        if len(mask):
            keep = torch.ones(hidden.size(1))
            keep[mask] = 0.0
            hidden = hidden * keep[:, None]
        return hidden

    def train_epoch(self, loader):
        losses = []
        hidden = self.model.init_hidden(3)
        for item, target, mask in loader:
            self.optim.zero_grad()
            hidden = self.reset_hidden(hidden, mask)
            logit, hidden = self.model(item, hidden)
            loss = nn.functional.cross_entropy(logit, target)
            losses.append(loss.item())
            loss.backward()
            self.optim.step()
        return losses


torch.manual_seed(0)
batches = [(torch.randint(0, 9, (3,)), torch.randint(0, 9, (3,)), mask) for mask in ([], [1], [0, 2])]
model = GRU4REC(9, 4)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
trainer.train_epoch(batches)
