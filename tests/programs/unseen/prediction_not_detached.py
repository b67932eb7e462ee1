"""The policy's loss looks through the critic's prediction, which the value loss has already gone through.

After https://github.com/astariul/encode-attend-navigate-pytorch/issues/2
"""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.actor = nn.Linear(3, 1)
        self.critic = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.actor_optim = torch.optim.SGD(self.actor.parameters(), lr=0.1)
        self.critic_optim = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def losses(self, tours, reward):
        log_prob = self.actor(tours).squeeze(-1).log_softmax(1)[:, 0]
        predictions = self.critic(tours.flatten(1)).squeeze(1)
        policy_loss = ((reward - predictions) * log_prob).mean()
        value_loss = (reward - predictions).square().mean()
        return policy_loss, value_loss

    def step(self, tours, reward):
        policy_loss, value_loss = self.losses(tours, reward)
        self.critic_optim.zero_grad()
        value_loss.backward()
        self.actor_optim.zero_grad()
        policy_loss.backward()
        self.critic_optim.step()
        self.actor_optim.step()


torch.manual_seed(0)
trainer = Trainer()
for _ in range(2):
    trainer.step(torch.randn(4, 2, 3), torch.rand(4))
