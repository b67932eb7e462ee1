"""The log-probabilities of an episode are kept, and the episode is finished more than once.

After https://github.com/pytorch/examples/issues/151
"""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return self.affine(x).softmax(-1)


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)


def select_action(state):
    m = torch.distributions.Categorical(policy(state))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action


def finish_episode():
    policy_loss = [-log_prob * reward for log_prob, reward in zip(policy.saved_log_probs, policy.rewards)]
    optimizer.zero_grad()
    loss = torch.stack(policy_loss).sum()
    loss.backward()
    optimizer.step()


for t in range(4):
    policy.rewards.append(float(select_action(torch.randn(4)) == 0))
for replay in range(2):
    finish_episode()
