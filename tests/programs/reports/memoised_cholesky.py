"""A Gaussian process memoises its factorisation, and evaluates in the same mode again.

After https://github.com/cornellius-gp/gpytorch/pull/2737
"""

import torch
from torch import nn


def cached(name):
    def decorator(method):
        def wrapper(self):
            if not hasattr(self, "_memoize_cache"):
                self._memoize_cache = {}
            if name not in self._memoize_cache:
                self._memoize_cache[name] = method(self)
            return self._memoize_cache[name]

        return wrapper

    return decorator


class VariationalStrategy(nn.Module):
    def __init__(self, inducing):
        super().__init__()
        self.inducing = nn.Parameter(inducing)
        self.lengthscale = nn.Parameter(torch.tensor(1.0))

    def kernel(self, a, b):
        return torch.exp(-((a[:, None] - b) ** 2) / self.lengthscale**2)

    @cached("cholesky_factor")
    def cholesky_factor(self):
        return torch.linalg.cholesky(self.kernel(self.inducing, self.inducing) + 0.1 * torch.eye(3))

    def forward(self, x):
        return torch.linalg.solve_triangular(self.cholesky_factor(), self.kernel(self.inducing, x), upper=False)


torch.manual_seed(0)
strategy = VariationalStrategy(torch.tensor([0.0, 1.0, 2.5]))
optimizer = torch.optim.SGD(strategy.parameters(), lr=0.01)
for i in range(3):
    optimizer.zero_grad()
    loss = strategy(torch.linspace(0, 1, 4)).square().sum()
    loss.backward()
    optimizer.step()
