"""Soft actor-critic computes the policy's loss first, and differentiates it after both critics have stepped.

After https://github.com/rail-berkeley/rlkit/pull/109
"""

import torch
from torch import nn


class SACTrainer:
    def __init__(self):
        self.policy = nn.Linear(3, 2)
        self.qf1, self.qf2 = (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in "12")
        self.policy_optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.qf1_optimizer = torch.optim.SGD(self.qf1.parameters(), lr=0.1)
        self.qf2_optimizer = torch.optim.SGD(self.qf2.parameters(), lr=0.1)

    def train_from_torch(self, batch):
        obs, actions, q_target = batch
        new_obs_actions = torch.cat([obs, self.policy(obs).tanh()], 1)
        q_new_actions = torch.min(self.qf1(new_obs_actions), self.qf2(new_obs_actions))
        policy_loss = -q_new_actions.mean()
        pair = torch.cat([obs, actions], 1)
        qf1_loss = (self.qf1(pair) - q_target).square().mean()
        qf2_loss = (self.qf2(pair) - q_target).square().mean()

        self.qf1_optimizer.zero_grad()
        qf1_loss.backward()
        self.qf1_optimizer.step()
        self.qf2_optimizer.zero_grad()
        qf2_loss.backward()
        self.qf2_optimizer.step()
        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()


torch.manual_seed(0)
trainer = SACTrainer()
for _ in range(3):
    trainer.train_from_torch((torch.randn(4, 3), torch.randn(4, 2), torch.randn(4, 1)))
