"""A distribution made once computes its logits lazily and keeps them, with their graph."""

import torch
from torch.distributions import Bernoulli

p = torch.full((3,), 0.5, requires_grad=True)
pi = Bernoulli(probs=p)

for _ in range(2):
    action = torch.ones(3)
    loss = -pi.log_prob(action).mean()
    loss.backward()
