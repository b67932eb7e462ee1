"""Parameters are updated by hand, in place.

After https://github.com/pytorch/examples/pull/779
"""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)

    def forward(self, words):
        return self.decoder(self.encoder(words))


def train(model, lr, batches):
    for data, targets in batches:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(data), targets)
        loss.backward()
        for p in model.parameters():
            p.add_(p.grad, alpha=-lr)


torch.manual_seed(0)
model = RNNModel()
train(model, 0.5, [(torch.tensor([0, 1]), torch.tensor([1, 2])), (torch.tensor([3, 1]), torch.tensor([4, 2]))])
