"""An initial condition with a trainable constant is given as a lambda, whose values are memoised.

After https://github.com/lululxvi/deepxde/pull/2077
"""

import torch
from torch import nn


class IC:
    def __init__(self, func):
        self.func = func
        self._cache = {}

    def values(self, X):
        key = id(X)
        if key not in self._cache:
            self._cache[key] = self.func(X)
        return self._cache[key]

    def error(self, X, outputs):
        return outputs - self.values(X)


class Model:
    def __init__(self, net, ic, X, parameters):
        self.net, self.ic, self.X = net, ic, X
        self.opt = torch.optim.SGD(parameters, lr=0.05)

    def train_step(self):
        def closure():
            self.opt.zero_grad()
            total_loss = self.ic.error(self.X, self.net(self.X)).square().mean()
            total_loss.backward()
            return total_loss

        return self.opt.step(closure)


torch.manual_seed(0)
C = nn.Parameter(torch.tensor(1.0))
net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
X = torch.rand(6, 2)
ic = IC(lambda x: torch.sin(C * x[:, 0:1]) * torch.exp(-x[:, 1:2]))
model = Model(net, ic, X, [*net.parameters(), C])
for _ in range(3):
    model.train_step()
