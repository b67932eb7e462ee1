"""A learned transform of a flow caches its last pair of values, and the data is the same tensor in every step.

After https://github.com/pyro-ppl/pyro/issues/2564
"""

import torch
from torch import nn
from torch.distributions import Normal, TransformedDistribution, constraints
from torch.distributions.transforms import Transform


class AffineFlow(Transform, nn.Module):
    domain = codomain = constraints.real
    bijective = True

    def __init__(self):
        nn.Module.__init__(self)
        Transform.__init__(self, cache_size=1)
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def __hash__(self):
        return nn.Module.__hash__(self)

    def _call(self, x):
        return x * self.log_scale.exp() + self.shift

    def _inverse(self, y):
        return (y - self.shift) * (-self.log_scale).exp()

    def log_abs_det_jacobian(self, x, y):
        return self.log_scale.expand(x.shape)


torch.manual_seed(0)
flow = AffineFlow()
flow_dist = TransformedDistribution(Normal(0.0, 1.0), [flow])
dataset = torch.randn(20) * 2 + 1
optimizer = torch.optim.Adam(flow.parameters(), lr=0.05)
for step in range(3):
    optimizer.zero_grad()
    loss = -flow_dist.log_prob(dataset).mean()
    loss.backward()
    optimizer.step()
