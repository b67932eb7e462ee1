"""A helper makes the update of each loss in turn; the policy's was computed with the critic of before its update.

After https://github.com/clvrai/spirl/issues/15
"""

import torch
from torch import nn


class ActionPriorSACAgent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        self.critic = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
        self.policy_opt = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.critic_opt = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def _compute_policy_loss(self, obs):
        return -self.critic(torch.cat([obs, self.policy(obs).tanh()], 1)).mean()

    def _compute_critic_loss(self, obs, action, target):
        return (self.critic(torch.cat([obs, action], 1)) - target).square().mean()

    def _perform_update(self, loss, opt, network):
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        opt.step()

    def update(self, obs, action, target):
        policy_loss = self._compute_policy_loss(obs)
        critic_loss = self._compute_critic_loss(obs, action, target)
        self._perform_update(critic_loss, self.critic_opt, self.critic)
        self._perform_update(policy_loss, self.policy_opt, self.policy)


torch.manual_seed(0)
agent = ActionPriorSACAgent()
for _ in range(2):
    agent.update(torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 1))
