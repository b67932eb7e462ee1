"""Two critics, two losses, one conservative term that both of them contain.

After https://github.com/yihaosun1124/OfflineRL-Kit/issues/15
"""

import torch
from torch import nn


class Policy:
    def __init__(self):
        self.encoder = nn.Linear(3, 4)
        self.critic1, self.critic2 = nn.Linear(4, 1), nn.Linear(4, 1)
        parameters = [*self.encoder.parameters(), *self.critic1.parameters(), *self.critic2.parameters()]
        self.optim = torch.optim.SGD(parameters, lr=0.1)

    def learn(self, obss, target):
        self.optim.zero_grad()
        embedded = self.encoder(obss).tanh()
        critic1_loss = (self.critic1(embedded) - target).pow(2).mean()
        critic2_loss = (self.critic2(embedded) - target).pow(2).mean()
        critic1_loss.backward()
        critic2_loss.backward()
        self.optim.step()


torch.manual_seed(0)
policy = Policy()
for _ in range(3):
    policy.learn(torch.randn(5, 3), torch.randn(5, 1))
