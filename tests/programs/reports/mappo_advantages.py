"""Advantages are computed once, with their graph into the critic, and used in several epochs.

After https://github.com/hijkzzz/pymarl2/issues/46
"""

import torch
from torch import nn


class PPOLearner:
    def __init__(self, mini_epochs=3):
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(3, 1)
        self.agent_optimiser = torch.optim.SGD(self.actor.parameters(), lr=0.1)
        self.critic_optimiser = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.mini_epochs = mini_epochs

    def train(self, obs, actions, rewards):
        old_values = self.critic(obs).squeeze(1).tanh()
        advantages = rewards - old_values
        old_log_pac = self.actor(obs).log_softmax(-1).gather(1, actions).squeeze(1).detach()
        for _ in range(self.mini_epochs):
            critic_loss = (self.critic(obs).squeeze(1) - rewards).square().mean()
            self.critic_optimiser.zero_grad()
            critic_loss.backward()
            self.critic_optimiser.step()
            log_pac = self.actor(obs).log_softmax(-1).gather(1, actions).squeeze(1)
            ratio = (log_pac - old_log_pac).exp()
            surr = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            actor_loss = -surr.mean()
            self.agent_optimiser.zero_grad()
            actor_loss.backward()
            self.agent_optimiser.step()


torch.manual_seed(0)
learner = PPOLearner()
learner.train(torch.randn(6, 3), torch.randint(2, (6, 1)), torch.randn(6))
