"""The value functions learn at each step; at the end of the episode the policy's pass goes through their graphs.

After https://discuss.pytorch.org/t/pytorch-runtimeerror-trying-to-backward-through-the-graph-a-second-time/191396
"""

import torch
from torch import nn

policy, value, q = nn.Linear(3, 2), nn.Linear(3, 1), nn.Linear(3, 1)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
value_opt = torch.optim.SGD([*value.parameters(), *q.parameters()], lr=0.01)
surrogates = []
for _ in range(4):
    state, reward = torch.randn(3), torch.randn(1)
    v, action_value = value(state).tanh(), q(state).tanh()
    advantage = action_value - v
    probabilities = torch.softmax(policy(state), 0)
    ratio = probabilities[0] / probabilities[0].detach()
    surrogates.append(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    value_loss = (v - reward).square().sum() + (action_value - reward).square().sum()
    value_opt.zero_grad()
    value_loss.backward()
    value_opt.step()
objective = -torch.stack(surrogates).mean()
optimizer.zero_grad()
objective.backward()
optimizer.step()
