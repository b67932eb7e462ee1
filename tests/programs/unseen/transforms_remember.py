"""The transforms of a flow remember their last pair; the data, and so the key, are the same in every step.

After https://github.com/pyro-ppl/pyro/pull/2542
"""

import torch
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution, constraints, transforms


class Stretch(transforms.Transform):
    domain = constraints.independent(constraints.real, 1)
    codomain = constraints.independent(constraints.real, 1)
    bijective = True

    def __init__(self, network, cache_size):
        super().__init__(cache_size=cache_size)
        self.network = network

    def _call(self, x):
        return x * self.network.log_scale.exp() + self.network.shift

    def _inverse(self, y):
        return (y - self.network.shift) * torch.exp(-self.network.log_scale)

    def log_abs_det_jacobian(self, x, y):
        return self.network.log_scale.sum().expand(x.shape[:-1])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(2))
        self.shift = nn.Parameter(torch.zeros(2))


torch.manual_seed(0)
network = Network()
base_dist = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
spline_transform = Stretch(network, cache_size=1)
flow_dist = TransformedDistribution(base_dist, [spline_transform])
dataset = torch.randn(9, 2) * 3 + 1
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
for _ in range(3):
    optimizer.zero_grad()
    loss = -flow_dist.log_prob(dataset).mean()
    loss.backward()
    optimizer.step()
