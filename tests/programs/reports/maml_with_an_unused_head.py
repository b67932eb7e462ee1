"""A learner is adapted on a loss that does not reach one of its heads.

After https://github.com/learnables/learn2learn/issues/314
"""

import torch
from torch import nn


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.cls = nn.Linear(4, 2)
        self.regression_head = nn.Linear(4, 1)

    def forward(self, x):
        return self.cls(self.body(x).relu())


def adapt(learner, loss, lr=0.1):
    gradients = torch.autograd.grad(loss, learner.parameters(), create_graph=True)
    return [p - lr * g for p, g in zip(learner.parameters(), gradients)]


torch.manual_seed(0)
learner = Learner()
error = nn.functional.cross_entropy(learner(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))
adapted = adapt(learner, error)
