"""Embeddings are put into a preallocated memory of past batches with their graphs.

After https://github.com/bnu-wangxun/Deep_Metric/issues/45
"""

import torch
from torch import nn


class XBM:
    def __init__(self, size, dim):
        self.K = size
        self.feats = torch.zeros(size, dim)
        self.targets = torch.zeros(size, dtype=torch.long)
        self.ptr = 0

    def enqueue_dequeue(self, feats, targets):
        q_size = len(targets)
        if self.ptr + q_size > self.K:
            self.ptr = 0
        self.feats[self.ptr : self.ptr + q_size] = feats
        self.targets[self.ptr : self.ptr + q_size] = targets
        self.ptr += q_size


def contrastive_loss(feats, targets, memory_feats, memory_targets):
    sim = feats @ memory_feats.T
    same = targets[:, None] == memory_targets
    return (1 - sim)[same].sum() + sim.clamp(min=0.5)[~same].sum()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
xbm = XBM(9, 4)
for iteration in range(3):
    images, targets = torch.randn(3, 5), torch.randint(0, 3, (3,))
    feats = nn.functional.normalize(model(images), dim=1)
    loss = contrastive_loss(feats, targets, feats, targets)
    xbm.enqueue_dequeue(feats, targets)
    loss = loss + contrastive_loss(feats, targets, xbm.feats, xbm.targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
