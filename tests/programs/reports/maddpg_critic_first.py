"""The actor's loss goes through the critic, which steps before that loss is differentiated.

After https://github.com/starry-sky6688/MADDPG/issues/27
"""

import torch
from torch import nn


class MADDPG:
    def __init__(self):
        self.actor_network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Tanh())
        self.critic_network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
        self.actor_optim = torch.optim.SGD(self.actor_network.parameters(), lr=0.1)
        self.critic_optim = torch.optim.SGD(self.critic_network.parameters(), lr=0.1)

    def q(self, o, u):
        return self.critic_network(torch.cat([o, u], 1))

    def train(self, o, u, target_q):
        critic_loss = (target_q - self.q(o, u)).pow(2).mean()
        actor_loss = -self.q(o, self.actor_network(o)).mean()

        self.critic_optim.zero_grad()
        critic_loss.backward()
        self.critic_optim.step()

        self.actor_optim.zero_grad()
        actor_loss.backward()
        self.actor_optim.step()


torch.manual_seed(0)
agent = MADDPG()
for _ in range(3):
    agent.train(torch.randn(4, 3), torch.randn(4, 2), torch.randn(4, 1))
