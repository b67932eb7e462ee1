"""Positions are encoded before the training loop, by an embedding that is trained.

After https://github.com/keras-team/keras-core/pull/727
"""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, patches, encoding):
        return self.head((self.project(patches) + encoding).relu().mean(1))


def run_experiment(model, position_embedding, batches):
    parameters = [*model.parameters(), *position_embedding.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    encoded_positions = position_embedding(torch.arange(5))
    for patches, labels in batches:
        logits = model(patches, encoded_positions)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
model, position_embedding = Classifier(), nn.Embedding(5, 4)
run_experiment(model, position_embedding, [(torch.randn(2, 5, 3), torch.tensor([0, 1])) for _ in range(3)])
