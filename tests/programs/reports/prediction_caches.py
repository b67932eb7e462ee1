"""Candidates are optimised through a trained model, whose caches have the graph of its hyperparameters.

After https://github.com/cornellius-gp/gpytorch/pull/228
"""

import torch
from torch import nn


class ExactGP(nn.Module):
    def __init__(self, train_x, train_y):
        super().__init__()
        self.train_x, self.train_y = train_x, train_y
        self.lengthscale = nn.Parameter(torch.tensor(0.7))
        self.mean_cache = None

    def covar(self, a, b):
        return torch.exp(-((a[:, None] - b) ** 2) / self.lengthscale**2)

    def forward(self, x):
        if self.mean_cache is None:
            train = self.covar(self.train_x, self.train_x) + 0.1 * torch.eye(len(self.train_x))
            self.mean_cache = torch.linalg.solve(train, self.train_y)
        return self.covar(x, self.train_x) @ self.mean_cache


def expected_improvement(x, model, best):
    return torch.nn.functional.softplus(model(x) - best).sum()


torch.manual_seed(0)
model = ExactGP(torch.linspace(0, 1, 4), torch.tensor([0.0, 0.5, 1.0, 0.2]))
x = torch.tensor([0.25], requires_grad=True)
optimizer = torch.optim.SGD([x], lr=0.1)
for i in range(3):
    optimizer.zero_grad()
    loss = -expected_improvement(x, model, 0)
    loss.backward()
    optimizer.step()
